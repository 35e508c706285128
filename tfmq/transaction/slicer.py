"""Split a decision's part for one partition into appends, reading batches from the journal.

A slice is at most 1 MiB (unless one block is larger) and ends at a block boundary. A partition therefore
always ends at a block boundary too, where the rest continues after a crash. Batches of delayed messages are
never split: an arrival header with the due times precedes their records. Every entry is verified when it is
read.
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
"""Bytes per append of a large transaction; other work runs between two appends."""

ENTRIES_AT_ONCE: Final = 1024
"""Entries read in the owner's thread at once (about 10 ms).

Without this limit 1 MiB of tiny batches would block the thread for half a second.
"""

PART: Final = -1
"""Batch index of a batch that continues one from an earlier slice."""

Read = Callable[[int, int], Entry]
"""Return the verified entry at an LSN; the second argument is its approximate size in bytes."""

ENTRY_EXTRA: Final = 1024
"""Estimated bytes of an entry in addition to its messages.

An entry with many small blocks has more and needs a second read.
"""


class _Slicing:
    """Builds slices from batches; holds the slice that is being filled."""

    def __init__(self, slice_bytes: int, *, whole: bool) -> None:
        self._slice_bytes = slice_bytes
        self._whole = whole
        """Whether batches must not be split."""
        self._begin()

    def _begin(self) -> None:
        self._batches: list[Batch] = []
        self._pieces: list[int] = []
        self._size_bytes = 0
        self._last = 0
        self._lost: list[tuple[int, int]] = []

    def add(self, batch: Batch, number: int, index: int) -> Iterator[Slice]:
        """Add a batch whose first message has ordinal `number`; yield slices that are full."""
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
        """Yield the last slice if it is not empty."""
        if self._last:
            yield self.end()


def slices(
    read: Read, rows: "array[int]", log_id: int, after: int, slice_bytes: int = SLICE_BYTES
) -> Iterator[Slice]:
    """Yield the messages of `rows` (from `Decision.partition_rows`) after ordinal `after`, as slices.

    Messages lost in a journal repair are skipped and logged; a slice may be empty for that reason.
    Raises: whatever `read` raises; Corrupt if an entry does not match the recorded location.
    """
    slicing = _Slicing(slice_bytes, whole=log_id == ARRIVALS_KEY)
    for at in range(first_row(rows, after), len(rows), ROW_WORDS):
        lsn, number, count_size, index = rows[at : at + ROW_WORDS]
        try:
            batch = _batch(read(lsn, (count_size & SIZE_MASK) + ENTRY_EXTRA), log_id, count_size)
        except Lost as error:
            count = count_size >> SIZE_BITS
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
    """Like `read_slices`, for a small transaction whose batches are in memory."""
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
    """Like `read_slices` without waiting; None if there is too much, or `read` returns None.

    The limits are SLICE_BYTES and ENTRIES_PER_READ. `read` returns None where it would have to wait for the
    disk.
    """
    start = first_row(rows, after)
    if len(rows) - start > ENTRIES_AT_ONCE * ROW_WORDS:
        return None
    if sum(count_size & SIZE_MASK for count_size in rows[start + 2 :: ROW_WORDS]) > SLICE_BYTES:
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
    return list(slices(lambda lsn, _: found[lsn], rows, log_id, after, slice_bytes))


def first_row(rows: "array[int]", after: int) -> int:
    """Return the index in `rows` of the row with the message after ordinal `after`.

    If there is none, the length of `rows`.
    """
    if not rows or not after:
        return 0
    row = bisect_right(rows[1::ROW_WORDS], after) - 1
    if row < 0:
        return 0
    last = rows[row * ROW_WORDS + 1] + (rows[row * ROW_WORDS + 2] >> SIZE_BITS) - 1
    return (row + (last <= after)) * ROW_WORDS


def _batch(entry: Entry, log_id: int, count_size: int) -> Batch:
    """Return the batch of `entry`.

    Raises: Corrupt if it is not the batch recorded for the transaction.
    """
    found = entry.content
    if not (
        isinstance(found, AppendMsg)
        and found.log_id == log_id
        and found.count == count_size >> SIZE_BITS
        and len(found.data) == count_size & SIZE_MASK
    ):
        reason = "the entry is not the batch that the transaction had there"
        raise Corrupt("the transaction journal", entry.place, entry.place + entry.size, reason)
    return Batch(found.data, found.blocks, found.producer_id, found.sequence, found.count)


def _behind(batch: Batch, skipped: int) -> Batch:
    """Return the batch without its first `skipped` records; cuts the block in which they end."""
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
    """Split the batch at block boundaries into batches of at most `slice_bytes`, or one block."""
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
