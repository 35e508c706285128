"""Reads a decision's messages for one partition from the journal, and splits them into slices.

A decision is a commit of one or more transactions; a slice is a part of its messages that one append writes. A slice
has at most 1 MiB, unless one block is larger, and ends at the end of a block. The next slice begins where the last one
ended, also after a crash. Batches of delayed messages are never split, because an arrival header with their due times
precedes all records of the batch. Every journal entry is verified when it is read.
"""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from journal.errors import Corrupt, Lost
from journal.record.batch import Batch, split_blocks
from journal.record.format import header_positions
from journal.wal.entry import AppendMsg, JournalEntry
from tfmq.apply_target import ARRIVALS_KEY
from tfmq.transaction.model import ROW_WORDS, SIZE_BITS, SIZE_MASK, Slice

logger = logging.getLogger("tfmq.transaction")

SLICE_BYTES: Final = 1 << 20
"""Maximum bytes of one append of a large transaction; the broker does other work between two appends."""

ENTRIES_PER_READ: Final = 1024
"""Maximum of journal entries read in the broker's thread at once (about 10 ms)."""

CONTINUED: Final = -1

ReadEntry = Callable[[int, int], JournalEntry]
"""read(lsn, size): return the verified entry at this LSN. `size`: estimated size of the entry in bytes."""

ENTRY_EXTRA: Final = 1024
"""Estimated bytes of an entry besides its messages. If many small blocks make it larger, the entry is read twice."""


class _SliceBuilder:
    """Builds slices of at most `slice_bytes` from batches that are added in order."""

    def __init__(self, slice_bytes: int, *, never_split: bool) -> None:
        self._slice_bytes = slice_bytes
        self._never_split = never_split
        self._reset()

    def _reset(self) -> None:
        self._batches: list[Batch] = []
        self._batch_indexes: list[int] = []
        self._size_bytes = 0
        self._last_ordinal = 0
        self._lost: list[tuple[int, int]] = []

    def add_batch(self, batch: Batch, number: int, index: int) -> Iterator[Slice]:
        """Add a batch whose first message has the ordinal `number`; yield each slice that is full."""
        size = len(batch.data)
        if self._batches and self._size_bytes + size > self._slice_bytes:
            yield self.finish_slice()
        if self._never_split or size <= self._slice_bytes:
            self._append(batch, number, index)
            return
        for part in _split_batch(batch, self._slice_bytes):
            if self._batches:
                yield self.finish_slice()
            self._append(part, number, index)
            number += part.count
            index = CONTINUED

    def _append(self, batch: Batch, number: int, index: int) -> None:
        self._batches.append(batch)
        self._batch_indexes.append(index)
        self._size_bytes += len(batch.data)
        self._last_ordinal = number + batch.count - 1

    def skip_lost(self, number: int, count: int) -> None:
        """Add `count` lost messages, from ordinal `number` on, to the slice: they have ordinals, but no batch."""
        self._last_ordinal = number + count - 1
        self._lost.append((number, count))

    def finish_slice(self) -> Slice:
        found = Slice(self._batches, self._last_ordinal, self._size_bytes, self._batch_indexes, self._lost)
        self._reset()
        return found

    def finish(self) -> Iterator[Slice]:
        if self._last_ordinal:
            yield self.finish_slice()


def read_slices(
    read: ReadEntry, rows: "array[int]", log_id: int, after: int, slice_bytes: int = SLICE_BYTES
) -> Iterator[Slice]:
    """Yield slices with all messages above the ordinal `after`. `rows`: the batches, from `Decision.partition_rows`.

    Lost messages are skipped and logged. Raises the errors of `read`, and Corrupt if an entry does not match its row.
    """
    slicing = _SliceBuilder(slice_bytes, never_split=log_id == ARRIVALS_KEY)
    for at in range(first_row(rows, after), len(rows), ROW_WORDS):
        lsn, number, count_size, index = rows[at : at + ROW_WORDS]
        try:
            batch = _checked_batch(read(lsn, (count_size & SIZE_MASK) + ENTRY_EXTRA), log_id, count_size)
        except Lost as error:
            count = count_size >> SIZE_BITS
            logger.error("%d messages of a transaction for the log %#x are lost: %s", count, log_id, error)
            slicing.skip_lost(number, count)
            continue
        if number <= after:
            batch = _skip_records(batch, after - number + 1)
            number, index = after + 1, CONTINUED
        yield from slicing.add_batch(batch, number, index)
    yield from slicing.finish()


def slice_cached(
    batches: Sequence[Batch], rows: "array[int]", log_id: int, after: int, slice_bytes: int = SLICE_BYTES
) -> list[Slice]:
    """Return the slices that `read_slices` would yield, for a transaction whose `batches` are in memory."""
    slicing = _SliceBuilder(slice_bytes, never_split=log_id == ARRIVALS_KEY)
    found: list[Slice] = []
    for at in range(first_row(rows, after), len(rows), ROW_WORDS):
        _, number, _, index = rows[at : at + ROW_WORDS]
        batch = batches[index]
        if number <= after:
            batch = _skip_records(batch, after - number + 1)
            number, index = after + 1, CONTINUED
        found.extend(slicing.add_batch(batch, number, index))
    found.extend(slicing.finish())
    return found


def read_slices_nowait(
    read: Callable[[int, int], JournalEntry | None],
    rows: "array[int]",
    log_id: int,
    after: int,
    slice_bytes: int = SLICE_BYTES,
) -> list[Slice] | None:
    """Return the slices of `read_slices` as a list; None if a worker must read them.

    A worker must read them if there are more than ENTRIES_PER_READ entries or SLICE_BYTES, if messages are lost, or if
    `read` returns None because it would have to wait for the disk.
    """
    start = first_row(rows, after)
    if len(rows) - start > ENTRIES_PER_READ * ROW_WORDS:
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
    return list(read_slices(lambda lsn, _: found[lsn], rows, log_id, after, slice_bytes))


def first_row(rows: "array[int]", after: int) -> int:
    """Return the index in `rows` of the first batch with a message above ordinal `after`, or len(rows) if none has."""
    if not rows or not after:
        return 0
    row = bisect_right(rows[1::ROW_WORDS], after) - 1
    if row < 0:
        return 0
    last = rows[row * ROW_WORDS + 1] + (rows[row * ROW_WORDS + 2] >> SIZE_BITS) - 1
    return (row + (last <= after)) * ROW_WORDS


def _checked_batch(entry: JournalEntry, log_id: int, count_size: int) -> Batch:
    """Return the batch in `entry`. Raises Corrupt if its log id, count or size differs from the batch's location."""
    found = entry.content
    if not (
        isinstance(found, AppendMsg)
        and found.log_id == log_id
        and found.count == count_size >> SIZE_BITS
        and len(found.data) == count_size & SIZE_MASK
    ):
        reason = "the entry is not the batch that the transaction had there"
        raise Corrupt("the transaction journal", entry.lsn, entry.lsn + entry.size, reason)
    return Batch(found.data, found.blocks, found.producer_id, found.sequence, found.count)


def _skip_records(batch: Batch, skipped: int) -> Batch:
    """Return the batch without its first `skipped` records. The result may begin in the middle of a block."""
    data, blocks, producer_id, sequence, count = batch
    view = memoryview(data)
    position = number = 0
    kept: list[tuple[int, int, int]] = []
    for size, records, crc in blocks or split_blocks(data):
        if number + records <= skipped:
            position += size
        elif number < skipped:
            begins = header_positions(view[position : position + size])[skipped - number]
            kept.extend(split_blocks(view[position + begins : position + size]))
            position += begins
        else:
            kept.append((size, records, crc))
        number += records
    return Batch(view[position:], kept, producer_id, sequence + skipped, count - skipped)


def _split_batch(batch: Batch, slice_bytes: int) -> Iterator[Batch]:
    """Split a batch, between blocks, into batches of at most `slice_bytes` or of a single larger block."""
    data, blocks, producer_id, sequence, _ = batch
    view = memoryview(data)
    position = size = count = 0
    piece: list[tuple[int, int, int]] = []
    for block in blocks or split_blocks(data):
        if piece and size + block[0] > slice_bytes:
            yield Batch(view[position : position + size], piece, producer_id, sequence, count)
            position, sequence = position + size, sequence + count
            piece, size, count = [], 0, 0
        piece.append(block)
        size += block[0]
        count += block[1]
    if piece:
        yield Batch(view[position:], piece, producer_id, sequence, count)
