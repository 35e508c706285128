"""Cuts what a decision brings to one partition into appends, reading the journal as it goes.

A slice is at most 1 MiB, unless one block alone is larger, and ends at a block's end; so does whatever a partition
has, and after a crash the rest begins there. A delayed batch is never cut: what its records are due stands before
them. Each entry is verified when it is read.
"""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from journal.errors import Corrupt, Lost
from journal.record.batch import Batch, cut_blocks
from journal.record.format import walk
from journal.wal.entry import AppendMsg, Entry
from tfmq.apply_target import ARRIVALS_KEY
from tfmq.transaction.model import ROW_WORDS, SIZE_BITS, SIZE_MASK, Slice

logger = logging.getLogger("tfmq.transaction")

SLICE_BYTES: Final = 1 << 20
"""One append of a large transaction; others get their turn between two of them."""

ENTRIES_AT_ONCE: Final = 1024
"""Read while everybody waits, some ten milliseconds' work: of tiny batches, 1 MiB would take half a second."""

PART: Final = -1
"""The index of a batch that goes on with a piece that began in a slice before."""

Read = Callable[[int, int], Entry]
"""read(place, size): the verified entry at `place`, which has about `size` bytes."""

ENTRY_EXTRA: Final = 1024
"""What an entry has beside its messages, unless its blocks are very small: then it is read in two goes."""


class _Slicing:
    """The slice that is being filled."""

    def __init__(self, slice_bytes: int, *, whole: bool) -> None:
        self._slice_bytes = slice_bytes
        self._whole = whole
        """Batches are never cut."""
        self._begin()

    def _begin(self) -> None:
        self._batches: list[Batch] = []
        self._pieces: list[int] = []
        self._size_bytes = 0
        self._last = 0
        self._lost: list[tuple[int, int]] = []

    def add(self, batch: Batch, number: int, index: int) -> Iterator[Slice]:
        """A batch whose first message has `number`; yields what is full."""
        size = len(batch.data)
        if self._batches and self._size_bytes + size > self._slice_bytes:
            yield self.end()
        if self._whole or size <= self._slice_bytes:
            self._put(batch, number, index)
            return
        for part in _parts(batch, self._slice_bytes):
            if self._batches:
                yield self.end()
            self._put(part, number, index)
            number += part.count
            index = PART

    def _put(self, batch: Batch, number: int, index: int) -> None:
        self._batches.append(batch)
        self._pieces.append(index)
        self._size_bytes += len(batch.data)
        self._last = number + batch.count - 1

    def lose(self, number: int, count: int) -> None:
        """`count` messages from `number` on are lost: the partition has all of them that there are."""
        self._last = number + count - 1
        self._lost.append((number, count))

    def end(self) -> Slice:
        """What is there, full or not."""
        found = Slice(self._batches, self._last, self._size_bytes, self._pieces, self._lost)
        self._begin()
        return found

    def rest(self) -> Iterator[Slice]:
        if self._last:
            yield self.end()


def slices(
    read: Read, rows: "array[int]", log_id: int, after: int, slice_bytes: int = SLICE_BYTES
) -> Iterator[Slice]:
    """What `rows` (of `Decision.rows`) hold behind the message number `after`.

    What a repair of the journal has given up is left out, and told in the log; a slice may be empty for that reason.
    Raises what `read` does, and Corrupt where an entry is not what memory says.
    """
    slicing = _Slicing(slice_bytes, whole=log_id == ARRIVALS_KEY)
    for at in range(first_row(rows, after), len(rows), ROW_WORDS):
        place, number, both, index = rows[at : at + ROW_WORDS]
        try:
            batch = _batch(read(place, (both & SIZE_MASK) + ENTRY_EXTRA), log_id, both)
        except Lost as error:
            count = both >> SIZE_BITS
            logger.error("%d messages of a transaction for the log %#x are lost: %s", count, log_id, error)
            slicing.lose(number, count)
            continue
        if number <= after:
            batch = _behind(batch, after - number + 1)
            number, index = after + 1, PART
        yield from slicing.add(batch, number, index)
    yield from slicing.rest()


def slices_of(
    batches: Sequence[Batch],
    rows: "array[int]",
    log_id: int,
    after: int,
    slice_bytes: int = SLICE_BYTES,
) -> list[Slice]:
    """As `slices`, of a small transaction whose batches, by their index, are in memory."""
    slicing = _Slicing(slice_bytes, whole=log_id == ARRIVALS_KEY)
    found: list[Slice] = []
    for at in range(first_row(rows, after), len(rows), ROW_WORDS):
        _, number, _, index = rows[at : at + ROW_WORDS]
        batch = batches[index]
        if number <= after:
            batch = _behind(batch, after - number + 1)
            number, index = after + 1, PART
        found.extend(slicing.add(batch, number, index))
    found.extend(slicing.rest())
    return found


def slices_at_once(
    read: Callable[[int, int], Entry | None],
    rows: "array[int]",
    log_id: int,
    after: int,
    slice_bytes: int = SLICE_BYTES,
) -> list[Slice] | None:
    """As `slices`, if they are 1 MiB and ENTRIES_AT_ONCE at most, and `read`, which answers None where it would wait,
    has it all."""
    start = first_row(rows, after)
    if len(rows) - start > ENTRIES_AT_ONCE * ROW_WORDS:
        return None
    if sum(both & SIZE_MASK for both in rows[start + 2 :: ROW_WORDS]) > SLICE_BYTES:
        return None
    found = {}
    for at in range(start, len(rows), ROW_WORDS):
        try:
            entry = read(rows[at], (rows[at + 2] & SIZE_MASK) + ENTRY_EXTRA)
        except Lost:
            return None
        if entry is None:
            return None
        found[rows[at]] = entry
    return list(slices(lambda place, _: found[place], rows, log_id, after, slice_bytes))


def first_row(rows: "array[int]", after: int) -> int:
    """Where in `rows` the row begins that holds the message behind number `after`; its length if there is none."""
    if not rows or not after:
        return 0
    row = bisect_right(rows[1::ROW_WORDS], after) - 1
    if row < 0:
        return 0
    last = rows[row * ROW_WORDS + 1] + (rows[row * ROW_WORDS + 2] >> SIZE_BITS) - 1
    return (row + (last <= after)) * ROW_WORDS


def _batch(entry: Entry, log_id: int, both: int) -> Batch:
    found = entry.content
    if not (
        isinstance(found, AppendMsg)
        and found.log_id == log_id
        and found.count == both >> SIZE_BITS
        and len(found.data) == both & SIZE_MASK
    ):
        reason = "the entry is not the batch that the transaction had there"
        raise Corrupt("the transaction journal", entry.place, entry.place + entry.size, reason)
    return Batch(found.data, found.blocks, found.producer_id, found.sequence, found.count)


def _behind(batch: Batch, skipped: int) -> Batch:
    """The batch without its first `skipped` records; a block that they end in is cut."""
    data, blocks, producer_id, sequence, count = batch
    view = memoryview(data)
    position = number = 0
    kept: list[tuple[int, int, int]] = []
    for size, records, crc in blocks or cut_blocks(data):
        if number + records <= skipped:
            position += size
        elif number < skipped:
            begins = walk(view[position : position + size])[skipped - number]
            kept.extend(cut_blocks(view[position + begins : position + size]))
            position += begins
        else:
            kept.append((size, records, crc))
        number += records
    return Batch(view[position:], kept, producer_id, sequence + skipped, count - skipped)


def _parts(batch: Batch, slice_bytes: int) -> Iterator[Batch]:
    """The batch in parts of whole blocks, each of at most `slice_bytes` or one block."""
    data, blocks, producer_id, sequence, _ = batch
    view = memoryview(data)
    position = size = count = 0
    part: list[tuple[int, int, int]] = []
    for block in blocks or cut_blocks(data):
        if part and size + block[0] > slice_bytes:
            yield Batch(view[position : position + size], part, producer_id, sequence, count)
            position, sequence = position + size, sequence + count
            part, size, count = [], 0, 0
        part.append(block)
        size += block[0]
        count += block[1]
    if part:
        yield Batch(view[position:], part, producer_id, sequence, count)
