"""Dead rows: the rows, in memory or buckets, of messages that are cancelled, rescheduled, or have a deleted topic."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress

from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import TimeSpan
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.buckets.writer import pending_rows
from tfmq.delay.memory_window import MemoryWindow
from tfmq.delay.pending import PendingSnapshot
from tfmq.delay.requests import Turn
from tfmq.delay.target_queue import TargetQueues

logger = logging.getLogger("tfmq.delay")


class BucketRowCounter:
    """Counts the dead and the pending rows of buckets. A row is one message. Broker thread only.

    A row is dead if its message is cancelled or rescheduled, or if the message's topic is deleted. Workers count the
    rows, one bucket at a time: in buckets with messages of a deleted topic (also at each start, because the broker may
    have stopped just after the deletion), in all buckets if the checkpoint has no counts, and in the bucket that
    contains the end of the memory window.
    """

    def __init__(self, buckets: BucketStore, window: MemoryWindow) -> None:
        self._buckets, self._window = buckets, window
        self._requested: dict[TimeSpan, bool] = {}
        """Spans of buckets to check. True: count the rows of the bucket even if no topic in it is deleted."""
        self._border_bucket: tuple[Bucket, int, int] | None = None
        """The last counted bucket that contains the end of the window (the border): (bucket, its size, border)."""
        self.dropped = 0
        self._pending_after_border = 0
        """Pending rows in `_border_bucket` that are due from the border on."""
        if not buckets.counted_offset:
            self.request(buckets.live_buckets, True)

    def request(self, buckets: Iterable[Bucket], always: bool) -> None:
        """Request a check of these buckets. `always`: count their rows even if no topic in them is deleted."""
        for bucket in buckets:
            self._requested[bucket.span] = always or self._requested.get(bucket.span, False)

    def count_dead_row(self, due: int) -> None:
        """Count one more dead row in the live bucket that contains this due time, if there is one."""
        bucket = self._buckets.bucket_at(due)
        if bucket is None:
            return
        bucket.dead_count = min(bucket.dead_count + 1, bucket.count)
        if self._border_bucket is not None and self._border_bucket[0] is bucket and due >= self._border_bucket[2]:
            self._pending_after_border = max(0, self._pending_after_border - 1)

    @property
    def pending_on_disk(self) -> int:
        """Number of pending messages that are in buckets and not in memory."""
        border, count = self._window.border, 0
        for bucket in self._buckets.live_buckets:
            if bucket.span.start >= border:
                count += max(0, bucket.count - bucket.dead_count)
            elif bucket.span.end > border:
                known = self._border_bucket == (bucket, bucket.size, border)
                count += self._pending_after_border if known else _estimate_after(bucket, border)
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes of pending messages in buckets. All messages of a bucket are assumed to have the same size."""
        buckets = [bucket for bucket in self._buckets.live_buckets if bucket.count]
        return sum([each.size * max(0, each.count - each.dead_count) // each.count for each in buckets])

    # Counting, in a worker

    @property
    def has_work(self) -> bool:
        return bool(self._requested) or self._uncounted_border_bucket() is not None

    def _uncounted_border_bucket(self) -> Bucket | None:
        """Return the bucket that contains the border, unless its rows due after the border are counted; or None."""
        border = self._window.border
        bucket = self._buckets.bucket_at(border)
        if bucket is None or self._border_bucket == (bucket, bucket.size, border):
            return None
        return bucket if bucket.span.start < border else None

    def start(self, pending: PendingSnapshot) -> Callable[[], Callable[[], bool]]:
        """Return a function that counts the rows of one bucket, to be run in a worker.

        That function returns another one, to be called in the broker thread: it stores the counts and returns whether
        the count of dead rows has changed.
        """
        bucket, surely = self._uncounted_border_bucket(), True
        while bucket is None and self._requested:
            span, surely = self._requested.popitem()
            found = self._buckets.bucket_at(span.start)
            bucket = found if found is not None and found.span == span else None
        if bucket is None:
            return lambda: lambda: False
        return partial(self._count, bucket, bucket.size, self._window.border, surely, pending)

    def _count(
        self, bucket: Bucket, size: int, border: int, surely: bool, pending: PendingSnapshot
    ) -> Callable[[], bool]:
        count = after_border = None

        def store() -> bool:
            before = bucket.dead_count
            if count is not None:
                bucket.dead_count = max(0, bucket.count - count)
                if not surely and bucket.span.start >= border:  # earlier rows are dropped in memory
                    self.dropped += max(0, bucket.dead_count - before)
            if bucket.span.start < border < bucket.span.end:
                self._border_bucket = bucket, size, border
                estimate = _estimate_after(bucket, border)
                self._pending_after_border = estimate if after_border is None else after_border
            return bucket.dead_count != before

        try:
            with self._buckets.ignore_if_removed(bucket):
                tables = () if surely else bucket.read_targets(self._buckets.files)
                if surely or any(pending.topic_deleted(row.log_id) for table in tables for row in table):
                    found = ahead = 0
                    for columns in bucket.read_columns(self._buckets.files):
                        rows = pending_rows(columns, pending)
                        found += len(rows) - rows.count(0)
                        ahead += sum(compress(map(border.__le__, columns.dues), rows))
                    count, after_border = found, ahead
        except OSError as error:
            logger.warning("delayed messages in %s cannot be counted: %s", bucket.path, error)
        return store


def _estimate_after(bucket: Bucket, border: int) -> int:
    """Estimate how many pending rows of `bucket` are due from `border` on, as if due times were evenly spread."""
    part = (bucket.span.end - border) / (bucket.span.end - bucket.span.start)
    return int(max(0, bucket.count - bucket.dead_count) * part)


ChangedTurn = tuple[int, Turn]
"""The log id of a target, and the former turn of one of its messages."""


class CancelledRows:
    """Cancelled and rescheduled messages whose rows still exist, in memory or in a bucket. Broker thread only.

    A change is the cancel or the reschedule of one message. If the message's row is in a bucket, the row stays there
    and is counted in `Bucket.dead_count`, which must be exact. So work on bucket files sees only the changes that were
    durable when the work began. Changes that become durable during the work are collected in `late` and counted when
    the work has ended. A start counts the changes after the offset `BucketStore.counted_offset` of the arrival log.
    """

    def __init__(
        self, window: MemoryWindow, target_queues: TargetQueues, buckets: BucketStore, row_counter: BucketRowCounter
    ) -> None:
        self._window, self._target_queues = window, target_queues
        self._buckets, self._row_counter = buckets, row_counter
        self._non_durable: deque[tuple[int, Sequence[ChangedTurn]]] = deque()
        """Changes that are not durable yet, by header: (offset where the header ends, changes)."""
        self.late: dict[Turn, int] = {}
        """Turn -> log id of the target, for changes that became durable during file work, which does not see them.

        Any thread may read this.
        """
        self._not_in_memory: set[Turn] = set()
        """Turns in `late` whose rows were not in memory."""
        self._file_work_running = False
        self._durable_offset = buckets.counted_offset

    @property
    def miscounted(self) -> int:
        """Number of messages that are counted as pending, though their cancel is durable."""
        return len(self._not_in_memory)

    def add_written(self, end_offset: int, changes: Sequence[ChangedTurn]) -> None:
        """Add changes whose header is written to the arrival log, where it ends at `end_offset`."""
        self._non_durable.append((end_offset, changes))

    def process_durable(self, forced_offset: int) -> None:
        """Handle the changes before `forced_offset`, the durable offset of the arrival log.

        Rows of changed messages are removed from memory, and counted as dead in buckets. The messages before this
        offset must have been added to memory already, so that their rows are found.
        """
        while self._non_durable and self._non_durable[0][0] <= forced_offset:
            for key, turn in self._non_durable.popleft()[1]:
                self._remove_message(key, turn)
        self._set_counted_offset(forced_offset)

    def add_recovered(self, turns: Iterable[Turn], forced_offset: int) -> None:
        """Add changes that a start has found after `counted_offset`; no row is in memory yet."""
        for turn in turns:
            if turn.number < self._buckets.spilled_number:
                self._row_counter.count_dead_row(turn.due)
        self._set_counted_offset(forced_offset)

    def _set_counted_offset(self, offset: int) -> None:
        self._durable_offset = max(offset, self._durable_offset)
        if not self._file_work_running:
            self._buckets.counted_offset = self._durable_offset

    # Changes that become durable during file work

    def begin_file_work(self, forced_offset: int) -> None:
        """Prepare for file work, which will see only the changes before `forced_offset`."""
        self.process_durable(forced_offset)
        self._file_work_running = True

    def end_file_work(self) -> None:
        """End file work and count the changes that became durable during it."""
        self._file_work_running = False
        late, ahead = list(self.late.items()), self._not_in_memory
        self.late.clear()
        self._not_in_memory = set()
        for turn, key in late:
            was_in_memory = turn not in ahead
            if not was_in_memory and turn.due < self._window.border:
                self._remove_from_memory(key, turn)  # it was loaded during the work
                was_in_memory = True
            self._count_removed(turn, was_in_memory)
        self._set_counted_offset(self._durable_offset)

    def _remove_message(self, key: int, turn: Turn) -> None:
        in_memory = turn.due < self._window.border
        if in_memory:
            self._remove_from_memory(key, turn)
        if not self._file_work_running:
            self._count_removed(turn, in_memory)
            return
        self.late[turn] = key
        if not in_memory:
            self._not_in_memory.add(turn)

    def _remove_from_memory(self, key: int, turn: Turn) -> None:
        if not self._window.wheel.cancel(*turn):
            self._target_queues.remove_message(key, turn)

    def _count_removed(self, turn: Turn, in_memory: bool) -> None:
        if turn.number < self._buckets.spilled_number:
            self._row_counter.count_dead_row(turn.due)
        elif not in_memory:
            self._window.disk_arrivals.count = max(0, self._window.disk_arrivals.count - 1)
