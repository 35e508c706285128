"""Metrics of the delay queue, and the queries that list and count pending messages."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress
from operator import add
from typing import Any, Final

from journal.record.format import BadRecord
from tfmq.apply_target import Timers
from tfmq.delay.arrivals.log import NonDurableArrivals
from tfmq.delay.buckets.format import BUCKET_ID_SHIFT, POSITION_MASK
from tfmq.delay.buckets.rows import BucketRow, bucket_histogram, histogram_of
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.buckets.writer import pending_rows
from tfmq.delay.cancelled_rows import BucketRowCounter, CancelledRows
from tfmq.delay.due_time import DUE_MAX
from tfmq.delay.memory_window import MemoryWindow
from tfmq.delay.pending import PendingSnapshot
from tfmq.delay.requests import Histogram, ListPage, ListQuery, PendingMessage, Turn
from tfmq.delay.rows import attribute_of
from tfmq.delay.target_queue import TargetQueues
from tfmq.errors import DecodeFailed
from tfmq.message import decode_attribute

COUNT_SECONDS: Final = 0.1
"""How long `DelayMetrics` caches its counts, because every send needs them."""


class DelayMetrics:
    """Counts and sizes of pending messages, and the next due time."""

    def __init__(
        self,
        non_durable: NonDurableArrivals,
        window: MemoryWindow,
        target_queues: TargetQueues,
        buckets: BucketStore,
        row_counter: BucketRowCounter,
        cancelled_rows: CancelledRows,
        timers: Timers,
    ) -> None:
        self._non_durable, self._window, self._target_queues = non_durable, window, target_queues
        self._buckets, self._row_counter, self._cancelled_rows, self._timers = (
            buckets,
            row_counter,
            cancelled_rows,
            timers,
        )
        self._count = self._size_bytes = 0
        self._count_again = 0.0

    def count_arrived(self, count: int) -> None:
        """Add newly arrived messages to the cached count."""
        self._count += count

    @property
    def pending(self) -> int:
        """Number of pending messages."""
        self._refresh()
        return self._count

    @property
    def size_bytes(self) -> int:
        """Bytes of pending messages in buckets, see `BucketRowCounter.size_bytes`."""
        self._refresh()
        return self._size_bytes

    def _refresh(self) -> None:
        now = self._timers.now()
        if now >= self._count_again:
            self._count, self._size_bytes = self.count_now(), self._row_counter.size_bytes
            self._count_again = now + COUNT_SECONDS

    def count_now(self) -> int:
        """Count pending messages in memory, in arrivals and in buckets.

        Messages that a running load has added to memory still count as being in buckets.
        """
        in_memory = self._window.wheel.count - self._window.loaded_rows + self._target_queues.waiting_count
        on_disk = (
            self._non_durable.message_count + self._window.disk_count + self._row_counter.pending_on_disk
        )
        return max(0, in_memory + on_disk - self._cancelled_rows.miscounted)

    @property
    def next_on_disk(self) -> int | None:
        """Lower bound of the due times of messages that are only on disk; None if there are none."""
        bucket = self._buckets.next_after(self._window.end)
        dues = [
            self._window.disk_arrivals.low,
            None if bucket is None else max(bucket.span.start, self._window.end),
        ]
        return min((due for due in dues if due is not None), default=None)

    @property
    def next_due(self) -> int | None:
        """Lower bound of the due times of pending messages; None if there are none."""
        dues = [self._target_queues.lowest_row_due, self._window.wheel.next_due, self.next_on_disk]
        return min((due for due in dues if due is not None), default=None)


SCAN_ROWS: Final = 200_000
"""Maximum of messages that a request for one page examines, about 100 ms of a worker.

The page then says that there may be more, and the caller continues with another request.
"""


class LogFilter(Collection[int]):
    """A collection of log ids that is defined by a predicate; supports `in` only."""

    def __init__(self, keys: Callable[[int], bool]) -> None:
        self._keys = keys

    def __contains__(self, key: Any) -> bool:
        return self._keys(key)

    def __iter__(self) -> Iterator[int]:
        raise TypeError("a filter of logs supports `in` only")

    def __len__(self) -> int:
        raise TypeError("a filter of logs supports `in` only")


def _log_filter(keys: Callable[[int], bool] | None) -> Collection[int] | None:
    return None if keys is None else LogFilter(keys)


class PendingQueries:
    """Lists and counts pending messages from the columns of buckets. Runs in workers.

    Messages in no bucket are not found: the caller has to wait with `StorageScheduler.when_spilled` before.
    """

    def __init__(self, buckets: BucketStore) -> None:
        self._buckets = buckets

    def list(self, query: ListQuery, pending: PendingSnapshot) -> ListPage:
        """Return the first page of the messages for `query`."""
        found: list[PendingMessage] = []
        after = query.after
        first = max(
            Turn(query.first_due, 0), Turn(0, 0) if after is None else Turn(after.due, after.number + 1)
        )
        rows = self._buckets.rows(first, query.end_due, _log_filter(query.keys))
        for count, row in enumerate(rows):
            if len(found) == query.limit or count == SCAN_ROWS:
                return ListPage(found, True, after)
            after = Turn(row.due, row.number)
            if not _is_pending(pending, row):
                continue
            known = self._read_pending(row, query.message_key)
            if known is not None:
                found.append(known)
        return ListPage(found, False, after)

    def _read_pending(self, row: BucketRow, message_key: bytes | None) -> PendingMessage | None:
        """Read the message of a row; None if its key is not `message_key` or it cannot be read."""
        slot, position = row.locator >> BUCKET_ID_SHIFT, row.locator & POSITION_MASK
        (record,) = self._buckets.read(slot, [position], [row.number])
        if record is None:
            return None
        known = describe_pending(row.log_id, Turn(row.due, row.number), record)
        if message_key is not None and _message_key(known.attribute) != message_key:
            return None
        return known

    def histogram(
        self,
        edges: Sequence[int],
        keys: Callable[[int], bool] | None,
        pending: PendingSnapshot,
        settled_below: int,
    ) -> Histogram:
        """Count pending messages between `edges`.

        Messages due before `settled_below` may be delivered already, so the columns of their buckets are examined.
        """
        chosen = _log_filter(keys)
        total, counts = 0, [0] * max(0, len(edges) - 1)
        for bucket in self._buckets.live_buckets:
            start, end = bucket.span.start, bucket.span.end
            dirty = bucket.dead_count or start < settled_below or pending.may_have_cancelled(start, end - 1)
            with self._buckets.ignore_if_removed(bucket):
                if dirty:
                    kept = [
                        array("Q", compress(columns.dues, pending_rows(columns, pending, chosen)))
                        for columns in self._buckets.read_columns(bucket)
                    ]
                    count, found = sum(map(len, kept)), histogram_of(kept, edges)
                else:
                    (count,) = bucket_histogram(bucket, self._buckets.files, (0, DUE_MAX + 1), chosen)
                    found = bucket_histogram(bucket, self._buckets.files, edges, chosen)
                total += count
                counts = list(map(add, counts, found))
        return Histogram(counts, total)


def _is_pending(pending: PendingSnapshot, row: BucketRow) -> bool:
    answer = pending(row.log_id, array("Q", (row.due,)), array("Q", (row.number,)))
    return answer if isinstance(answer, bool) else bool(answer[0])


def describe_pending(key: int, turn: Turn, record: bytes) -> PendingMessage:
    """Return the description of a pending message; the attribute and the size are from its record."""
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
