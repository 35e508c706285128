"""Blocks: records and their trailer, found in bytes that may be damaged or malicious.

A payload may contain bytes that look like a block trailer, even with a correct checksum and offset. So a trailer is
accepted only at one position: where the records of the block end, according to their lengths from the block's start on.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from journal.crc32 import crc32
from journal.record.batch import BLOCK_SIZE_MAX
from journal.record.block_trailer import BLOCK_SPAN_MAX, TRAILER_SIZE, BlockTrailer, decode_trailer
from journal.record.format import (
    COLUMNS_COUNT_MIN,
    FLAG_FILLER,
    FLAG_LOW_POSITION,
    FLAG_TRAILER,
    HEADER_SIZE,
    LENGTH,
    RECORD_SIZE_MAX,
    SEQUENCE_COUNT,
    SEQUENCE_MASK,
    BadRecord,
    Buffer,
    Bytes,
    Incomplete,
    count_leading,
    has_no_special_flags,
    ids_are_contiguous,
    sizes_are_equal,
    split_id,
)

_LENGTH_FLAG: Final = Struct(">I12xI")
_LENGTH_ID_FLAG: Final = Struct(">I4xQI")

LENGTH_MAX: Final = RECORD_SIZE_MAX - HEADER_SIZE


class Block(NamedTuple):
    """A block of records at `offset` of the partition, and its trailer `control`.

    `data`: the records without the trailer, as a view (not a copy) of the bytes passed to `blocks_of`.
    """

    offset: int
    data: memoryview
    control: BlockTrailer

    @property
    def next(self) -> int:
        """Offset after the block trailer, where the next block starts."""
        return self.offset + len(self.data) + TRAILER_SIZE


class ProducerRun(NamedTuple):
    """`count` records of one producer with consecutive sequences, the first of them at `offset`."""

    producer_id: int
    first_sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here
    offset: int


def blocks_of(data: Buffer, offset: int, log_id: int, *, verify: bool = True) -> Iterator[Block]:
    """Yield the blocks of `data`, which starts with a block at partition offset `offset`.

    Always checked: record lengths; the trailer's own checksum, log id, version, offset and size; and that ordinals
    continue from block to block. The CRC over the records is checked unless `verify` is False. At the first invalid
    block, raises Incomplete if the bytes end inside that block, else BadRecord; `position` is the start of the block.
    """
    plain = data if isinstance(data, bytes | bytearray) else bytes(data)
    view = memoryview(plain).toreadonly()
    start, end = 0, len(plain)
    ordinal = -1
    while start < end:
        at = trailer_position(plain, start)
        try:
            trailer = decode_trailer(plain, at, log_id)
        except BadRecord as error:
            raise error.with_position(start) from None
        if trailer.size != at - start:
            raise BadRecord(start, f"the block trailer covers {trailer.size} bytes, the block has {at - start}")
        if trailer.offset != offset + start:
            raise BadRecord(start, f"the block is of offset {trailer.offset}, but is at {offset + start}")
        if trailer.first_ordinal != ordinal and ordinal >= 0:
            raise BadRecord(start, f"the block's first ordinal is {trailer.first_ordinal}, {ordinal} was expected")
        records = view[start:at]
        if verify and crc32(records) != trailer.crc:
            raise BadRecord(start, f"the block of {trailer.size} bytes at offset {offset + start} fails its checksum")
        yield Block(offset + start, records, trailer)
        ordinal = trailer.next_ordinal
        start = at + TRAILER_SIZE


def trailer_position(data: Bytes, start: int) -> int:
    """Return the position of the trailer of the block at `start`. Raises Incomplete, BadRecord."""
    # The lengths of the records lead to the trailer. Leading records of equal size are skipped all at once.
    position = start + _leading_size(data, start)
    unpack = _LENGTH_FLAG.unpack_from
    try:
        while True:
            length, flag = unpack(data, position)
            if flag == FLAG_TRAILER:
                return position
            if length > LENGTH_MAX:
                raise BadRecord(start, f"the record at position {position} has an impossible length of {length}")
            position += HEADER_SIZE + length
    except StructError:
        if len(data) - start > BLOCK_SPAN_MAX:
            raise BadRecord(start, f"no block trailer in {len(data) - start} bytes") from None
        raise Incomplete(start, "no block trailer closes this block") from None


def producer_runs(block: Block) -> list[ProducerRun]:
    """Return the records, except fillers, as runs of one producer's consecutive sequences. Raises BadRecord."""
    data = block.data
    size = len(data)
    if not size:
        return []
    record_size = HEADER_SIZE + LENGTH.unpack_from(data)[0]
    if size >= record_size * COLUMNS_COUNT_MIN and size % record_size == 0:
        whole = _as_one_run(bytes(data), record_size, block.offset)
        if whole is not None:
            return [whole]
    return _runs_by_walk(block)


def _leading_size(data: Bytes, start: int) -> int:
    """Bytes of the leading records of equal size from `start` on; 0 if `data` is too short for COLUMNS_COUNT_MIN."""
    # The low bytes of the flags must be equal too, so that a trailer of the same size is not counted as a record.
    if len(data) - start < HEADER_SIZE or data[start + FLAG_LOW_POSITION] >= FLAG_TRAILER:
        return 0
    size = HEADER_SIZE + int(LENGTH.unpack_from(data, start)[0])
    end = min(len(data), start + BLOCK_SIZE_MAX)
    if end - start < size * COLUMNS_COUNT_MIN:
        return 0
    if data[start + size + FLAG_LOW_POSITION] >= FLAG_TRAILER:
        return 0  # the block has one record: `count_leading` would read the bytes after the block in vain
    return size * count_leading(data, start, end, size)


def _as_one_run(data: bytes, record_size: int, offset: int) -> ProducerRun | None:
    """Return all records as one run; None if their sizes differ or their sequences are not consecutive."""
    size = len(data)
    if not sizes_are_equal(data, 0, size, record_size) or not has_no_special_flags(data, 0, size, record_size):
        return None
    first_id = int.from_bytes(data[8:16], "big")
    count = size // record_size
    if (first_id & SEQUENCE_MASK) + count > SEQUENCE_COUNT or not ids_are_contiguous(
        data, 0, size, record_size, first_id
    ):
        return None
    return ProducerRun(*split_id(first_id), count, offset)


def _runs_by_walk(block: Block) -> list[ProducerRun]:
    found: list[ProducerRun] = []
    unpack = _LENGTH_ID_FLAG.unpack_from
    data = block.data
    position, size = 0, len(data)
    try:
        while position < size:
            first_position = position
            length, first_id, flag = unpack(data, position)
            position += HEADER_SIZE + length
            if flag & (FLAG_FILLER | FLAG_TRAILER):
                continue
            producer_id, first_sequence = split_id(first_id)
            next_id = first_id + 1
            while position < size and next_id & SEQUENCE_MASK:
                length, id, flag = unpack(data, position)
                if id != next_id or flag & FLAG_FILLER:
                    break
                next_id += 1
                position += HEADER_SIZE + length
            count = next_id - first_id
            found.append(ProducerRun(producer_id, first_sequence, count, block.offset + first_position))
    except StructError:
        raise Incomplete(first_position, "the records end inside a header") from None
    return found
