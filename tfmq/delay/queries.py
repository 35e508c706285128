"""Metrics of the delay queue, and the queries that list and count pending messages."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

from journal.record.format import BadRecord
from tfmq.apply_target import Timers
from tfmq.delay.arrivals.non_durable import NonDurableArrivals
from tfmq.delay.buckets.format import BUCKET_ID_SHIFT, POSITION_MASK
from tfmq.delay.buckets.store import BucketRow, BucketStore
from tfmq.delay.buckets.writer import PendingFilter, pending_rows
from tfmq.delay.memory_window import MemoryWindow
from tfmq.delay.pending import BucketRowCounter, CancelledRows, PendingSnapshot
from tfmq.delay.requests import Histogram, ListPage, ListQuery, LogFilter, PendingMessage, Turn
from tfmq.delay.rows import attribute_of
from tfmq.delay.target_queue import TargetQueues
from tfmq.errors import DecodeFailed
from tfmq.message import decode_attribute

COUNT_SECONDS: Final = 0.1
"""How long `DelayMetrics` reuses its counts, because every delayed send needs them, and counting takes time."""


@dataclass(eq=False)
class DelayMetrics:
    """Counts and sizes of pending messages, and the next due time."""

    non_durable: NonDurableArrivals
    window: MemoryWindow
    target_queues: TargetQueues
    buckets: BucketStore
    row_counter: BucketRowCounter
    cancelled_rows: CancelledRows
    timers: Timers

    def __post_init__(self) -> None:
        self._count = self._size_bytes = 0
        self._count_again = 0.0

    def count_arrived(self, count: int) -> None:
        self._count += count

    @property
    def pending(self) -> int:
        self._refresh()
        return self._count

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of the pending messages in buckets."""
        self._refresh()
        return self._size_bytes

    def _refresh(self) -> None:
        now = self.timers.now()
        if now >= self._count_again:
            self._count, self._size_bytes = self.count_now(), self.row_counter.size_bytes
            self._count_again = now + COUNT_SECONDS

    def count_now(self) -> int:
        """Count pending messages. During a load, messages loaded from a bucket are counted there, not in memory."""
        in_memory = self.window.wheel.count - self.window.loaded_rows
        in_memory += sum([queue.waiting for queue in self.target_queues.by_key.values()])
        on_disk = self.non_durable.message_count + self.window.disk_count + self.row_counter.pending_on_disk
        return max(0, in_memory + on_disk - self.cancelled_rows.miscounted)

    @property
    def next_on_disk(self) -> int | None:
        bucket = self.buckets.next_after(self.window.end)
        start = None if bucket is None else max(bucket.span.start, self.window.end)
        dues = (self.window.disk_arrivals.low, start)
        return min((due for due in dues if due is not None), default=None)

    @property
    def next_due(self) -> int | None:
        dues = [self.target_queues.lowest_row_due, self.window.wheel.next_due, self.next_on_disk]
        return min((due for due in dues if due is not None), default=None)


SCAN_ROWS: Final = 200_000
"""Maximum number of messages that a request for one page examines: about 100 ms of a worker's time."""


# The functions below list and count pending messages. They run in workers and read only buckets. So the caller first
# waits with `StorageScheduler.when_spilled` until all messages are in buckets.


def list_pending(buckets: BucketStore, query: ListQuery, pending: PendingSnapshot) -> ListPage:
    """Return the first page of the pending messages that `query` selects."""
    found: list[PendingMessage] = []
    after = query.after
    first = max(Turn(query.first_due, 0), Turn(0, 0) if after is None else Turn(after.due, after.number + 1))
    for count, row in enumerate(buckets.rows(first, query.end_due, query.keys)):
        if len(found) == query.limit or count == SCAN_ROWS:
            return ListPage(found, True, after)
        after = Turn(row.due, row.number)
        if not _is_pending(pending, row):
            continue
        slot, position = row.locator >> BUCKET_ID_SHIFT, row.locator & POSITION_MASK
        (record,) = buckets.read(slot, [position], [row.number])
        if record is not None:
            known = describe_pending(row.log_id, after, record)
            if query.message_key is None or _message_key(known.attribute) == query.message_key:
                found.append(known)
    return ListPage(found, False, after)


def pending_histogram(
    buckets: BucketStore, edges: Sequence[int], keys: LogFilter | None, pending: PendingSnapshot, fires_below: int
) -> Histogram:
    """Count all pending messages, and those in each interval edges[n] <= due < edges[n + 1].

    `keys`: selects partitions by log id; None: all. Messages due before `fires_below` may have been delivered, so
    each of them is checked with `pending`.
    """
    total, counts = 0, [0] * max(0, len(edges) - 1)
    for bucket in buckets.live_buckets:
        start, end = bucket.span.start, bucket.span.end
        dirty = bucket.dead_count or start < fires_below or pending.may_have_cancelled(start, end - 1)
        chosen: PendingFilter = pending if dirty else lambda *_: True
        whole = not dirty and keys is None
        edge = bisect_left(edges, start + 1) - 1
        with buckets.ignore_if_removed(bucket):
            count = bucket.count if whole else 0
            if whole and 0 <= edge < len(counts) and end <= edges[edge + 1]:
                counts[edge] += count  # counted without reading the file
            else:
                for columns in bucket.read_columns(buckets.files):
                    kept = sorted(compress(columns.dues, pending_rows(columns, chosen, keys)))
                    count += 0 if whole else len(kept)
                    below = [bisect_left(kept, each) for each in edges]
                    for index in range(len(counts)):
                        counts[index] += below[index + 1] - below[index]
            total += count
    return Histogram(counts, total)


def _is_pending(pending: PendingSnapshot, row: BucketRow) -> bool:
    is_pending = pending(row.log_id, array("Q", (row.due,)), array("Q", (row.number,)))
    return is_pending if isinstance(is_pending, bool) else bool(is_pending[0])


def describe_pending(key: int, turn: Turn, record: bytes) -> PendingMessage:
    try:
        attribute = attribute_of(record)
    except BadRecord:
        attribute = None
    return PendingMessage(key, turn.due, turn.number, len(record), attribute)


def _message_key(attribute: bytes | None) -> bytes | None:
    try:
        key = None if attribute is None else decode_attribute(attribute).key
        return key.encode() if isinstance(key, str) else key
    except DecodeFailed:
        return None
