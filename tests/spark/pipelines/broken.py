"""Damage planted into a data folder of a broker that is stopped; each answers where an audit must find it."""

from pathlib import Path
from zlib import crc32

from journal import LogOptions
from journal.disk import RealDisk
from journal.fsck.log_verify import find_log_id
from journal.log.readonly import open_log
from journal.log.segment import Segment
from journal.record.batch import Batch, Source
from journal.record.block import Block
from journal.record.block_trailer import SOURCE_TRANSACTION, TRAILER_SIZE, encode_trailer
from journal.record.format import make_filler
from tests.spark.pipelines.audited import segments

Where = tuple[int, int]


def log_id_of(folder: Path) -> int:
    found = find_log_id(RealDisk(), str(segments(folder)[0]))
    assert found is not None
    return found


def blocks_of(path: Path) -> list[Block]:
    segment = Segment.open(RealDisk(), str(path.parent), int(path.stem), log_id_of(path.parent), writable=False)
    try:
        return [block._replace(data=memoryview(bytes(block.data))) for block in segment.blocks()]
    finally:
        segment.close()


def flip_bit(path: Path, position: int) -> int:
    """The offset of the byte that was changed."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
    return int(path.stem) + position


def cut(path: Path, size: int) -> Where:
    """The offsets that are lost."""
    end = int(path.stem) + path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size)
    return int(path.stem) + size, end


def remove(path: Path) -> Where:
    """The offsets that are lost."""
    lost = int(path.stem), int(path.stem) + path.stat().st_size
    path.unlink()
    return lost


def repeat(source: Path, target: Path) -> Where:
    """A block of one partition, appended to another as if it were new; where it stands there."""
    block = blocks_of(source)[0]
    first_id = int.from_bytes(block.data[8:16], "big")
    batch = Batch(bytes(block.data), (), first_id >> 24, first_id & 0xFFFFFF, block.control.records)
    return append(target, batch)


def append(folder: Path, batch: Batch, source: Source | None = None) -> Where:
    """An append that no broker made; where its records stand."""
    with open_log(str(folder), LogOptions(), log_id=log_id_of(folder)) as log:
        (answer,) = log.append([batch], *([source] if source is not None else []))
    (folder / "lock").unlink()
    (_, offset), *more = answer.positions
    assert not more
    return offset, offset + len(batch.data)


def tear(folder: Path, number: int = -3) -> Block:
    """The append of a transaction is replaced as if it had never been one; the block as it was."""
    path = segments(folder)[0]
    block = [each for each in blocks_of(path) if each.control.source_kind == SOURCE_TRANSACTION][number]
    log_id, control = log_id_of(folder), block.control
    filler = make_filler(log_id, control.size, control.records)
    plain = control._replace(crc=crc32(filler), source_kind=0, source_id=0, source_high=0, source_low=0)
    with path.open("r+b") as file:
        file.seek(block.offset - int(path.stem))
        file.write(filler + encode_trailer(log_id, plain))
    assert block.next - block.offset == len(filler) + TRAILER_SIZE
    return block
