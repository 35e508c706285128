"""How batches become one append: joined to control blocks, each closed by its control record. Pure.

Blocks of clients are joined up to BLOCK_SIZE_MAX bytes, so that a turn's many small sends share a control record. A
control block that is one client's block keeps the checksum that was verified; a joined one is summed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from zlib import crc32

from journal.batch import BLOCK_SIZE_MAX, cut_blocks
from journal.control import CONTROL_SIZE, Control, encode_control
from journal.disk import Bytes
from journal.errors import BadBatch
from journal.header import BadRecord
from journal.shapes import Appended, Batch, Source

_NO_CRC: Final = -1


class Tip(NamedTuple):
    """Where the next append goes, and what its control records say of the log."""

    log_id: int
    offset: int
    ordinal: int
    append_time: int
    epoch: int
    forced: int


class Append(NamedTuple):
    """One vectored write: `buffers`, the `controls` among them, the answers, and where the log ends then."""

    buffers: list[Bytes]
    controls: list[Control]
    answers: list[Appended]
    end: int
    end_ordinal: int


class _Growing:
    """A control block that still takes blocks. `pieces`: (batch, first byte, next byte)."""

    __slots__ = ("count", "crc", "offset", "pieces", "size")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.pieces: list[tuple[int, int, int]] = []
        self.size = 0
        self.count = 0
        self.crc = _NO_CRC

    def takes(self, size: int) -> bool:
        return not self.size or self.size + size <= BLOCK_SIZE_MAX

    def add(self, batch: int, start: int, size: int, count: int, crc: int) -> bool:
        """Takes a client's block; True if a contiguous run of its batch begins with it."""
        self.crc = _NO_CRC if self.size else crc
        self.size += size
        self.count += count
        if self.pieces and self.pieces[-1][0] == batch:
            self.pieces[-1] = (batch, self.pieces[-1][1], start + size)
            return False
        self.pieces.append((batch, start, start + size))
        return True


def size_bound(size_bytes: int) -> int:
    """The most bytes that an append of `size_bytes` of records can take: two neighbours exceed BLOCK_SIZE_MAX."""
    return size_bytes + CONTROL_SIZE * (2 * (size_bytes // BLOCK_SIZE_MAX) + 2)


def arrange(batches: Sequence[Batch], source: Source, tip: Tip, *, more_follows: bool = False) -> Append:
    """The append of `batches`, which have been checked; without batches, a control record alone.

    `more_follows`: it is only a part of one. Raises BadBatch where a batch without blocks is not whole records.
    """
    if len(batches) == 1 and len(batches[0].blocks) == 1:
        return _arrange_block(batches[0], source, tip, more_follows)
    blocks, positions, firsts = _join(batches, tip)
    buffers: list[Bytes] = []
    controls: list[Control] = []
    views = [memoryview(batch.data) for batch in batches]
    ordinal = tip.ordinal
    for block in blocks:
        parts = [views[batch][start:end] for batch, start, end in block.pieces]
        more = more_follows or block is not blocks[-1]
        control = Control(
            block.count, block.size, _crc(block, parts), tip.append_time, tip.epoch, tip.forced, ordinal,
            block.offset, more, *source,
        )  # fmt: skip
        buffers += parts
        buffers.append(encode_control(tip.log_id, control))
        controls.append(control)
        ordinal += block.count
    end = controls[-1].next
    answers = [
        Appended(runs, first, end, tip.append_time) for runs, first in zip(positions, firsts, strict=True)
    ]
    return Append(buffers, controls, answers, end, ordinal)


def _arrange_block(batch: Batch, source: Source, tip: Tip, more_follows: bool) -> Append:
    """One batch of one block, the most frequent append: the same as for many, in little more than half the time."""
    ((size, count, crc),) = batch.blocks
    numbers = (tip.append_time, tip.epoch, tip.forced, tip.ordinal, tip.offset)
    control = Control(count, size, crc, *numbers, more_follows, *source)
    end = tip.offset + size + CONTROL_SIZE
    answer = Appended([(0, tip.offset)], tip.ordinal, end, tip.append_time)
    buffers: list[Bytes] = [memoryview(batch.data)[:size], encode_control(tip.log_id, control)]
    return Append(buffers, [control], [answer], end, tip.ordinal + count)


def _join(
    batches: Sequence[Batch], tip: Tip
) -> tuple[list[_Growing], list[list[tuple[int, int]]], list[int]]:
    """The control blocks, and for each batch its (first record, offset) per run, and its first ordinal."""
    block = _Growing(tip.offset)
    blocks = [block]
    positions: list[list[tuple[int, int]]] = []
    firsts: list[int] = []
    ordinal = tip.ordinal
    for number, batch in enumerate(batches):
        start = index = 0
        found: list[tuple[int, int]] = []
        firsts.append(ordinal)
        for size, count, crc in batch.blocks or _cut(batch):
            if not block.takes(size):
                block = _Growing(block.offset + block.size + CONTROL_SIZE)
                blocks.append(block)
            offset = block.offset + block.size
            if block.add(number, start, size, count, crc):
                found.append((index, offset))
            start += size
            index += count
        ordinal += index
        positions.append(found)
    return blocks, positions, firsts


def _cut(batch: Batch) -> list[tuple[int, int, int]]:
    try:
        return cut_blocks(batch.data)
    except BadRecord as error:
        raise BadBatch(str(error)) from None


def _crc(block: _Growing, parts: Sequence[memoryview]) -> int:
    if block.crc != _NO_CRC:
        return block.crc
    crc = 0
    for part in parts:
        crc = crc32(part, crc)
    return crc
