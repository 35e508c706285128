"""Which messages on disk are pending, and how many: not delivered, not cancelled, and of a topic that is not deleted.

`PendingSnapshot` decides for single messages. A message that was delivered or cancelled a moment ago may be reported as
pending; its state is checked again before it is delivered. A pending message is never reported as not pending.
`BucketRowCounter` and `CancelledRows` count. They handle dead rows: entries in memory or in buckets whose messages were
cancelled or rescheduled, or whose topic is deleted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import compress

from journal.errors import Corrupt
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import TimeSpan
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.buckets.writer import pending_rows
from tfmq.delay.memory_window import MemoryWindow
from tfmq.delay.requests import Turn
from tfmq.delay.target_queue import TargetQueues

logger = logging.getLogger("tfmq.delay")


class PendingSnapshot:
    """Decides which messages on disk are pending. Any thread may call it.

    `late`: turns whose cancel or reschedule became durable during the running file work (a worker reads or writes
    buckets); None outside of file work. During file work, the turns in `late` are reported as pending, even if the
    topic is deleted. So are the turns in `target_queues.locked`, whose cancel or reschedule is still running. Other
    threads may change both collections meanwhile. After the work, `CancelledRows` subtracts the changed messages.

    `border`: during a spill (messages of the arrival log are written to buckets), the end of the memory window, else
    None. Of the messages due at `border` or later, `dropped` counts those of deleted topics, and `kept` those that are
    spilled. If the log has `damage`, all other messages that the spill had to move are lost.
    """

    def __init__(
        self,
        state: ArrivalLogState,
        target_queues: TargetQueues,
        late: Collection[tuple[int, int]] | None = None,
        border: int | None = None,
    ) -> None:
        self._cancelled, self._target_queues, self._late = state.cancelled, target_queues, late
        self._locked = target_queues.locked
        self._border = border
        self.dropped = self.kept = 0
        self.damage: list[Corrupt] = []
        """Damaged ranges in the spilled part of the arrival log; `BucketLoader.read_arrivals` adds and logs them."""

    def topic_deleted(self, key: int) -> bool:
        return self._target_queues.apply_target.display_name(key) is None

    def __call__(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> bool | Sequence[int]:
        """Return which messages of the partition `key` are pending: True (all), False (none), or a value for each."""
        keep = self._pending_of(key, dues, numbers)
        if self._border is not None and keep is not False:
            ahead = map(self._border.__le__, dues)
            self.kept += sum(ahead if keep is True else map(bool, compress(keep, ahead)))
        return keep

    def lost_count(self, count: int) -> int:
        """Return how many messages are lost because of damage. `count`: how many messages the spill had to move."""
        return max(0, count - self.kept - self.dropped) if self.damage else 0

    def _pending_of(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> bool | Sequence[int]:
        keep = False if self.topic_deleted(key) else self._pending_by_state(key, dues, numbers)
        late = self._late
        if keep is False and self._border is not None and self.topic_deleted(key):
            turns = zip(dues, numbers, strict=True)
            self.dropped += sum([t[0] >= self._border and not self._is_cancelled(t) for t in turns])
        if late is None or keep is True or not (late or self._locked):
            return keep
        # Another thread may move a turn from `locked` to `late` at any time. So check `locked` first, then `late`.
        undelivered = [turn in self._locked or turn in late for turn in zip(dues, numbers, strict=True)]
        if keep is False:
            return bytes(undelivered) if any(undelivered) else False
        return bytes([bool(one or other) for one, other in zip(keep, undelivered, strict=True)])

    def _pending_by_state(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> bool | Sequence[int]:
        low, high = min(dues), max(dues)
        through = self._target_queues.durable_turn(key)
        cancelled = self._cancelled.any_between(low, high)
        if not cancelled and (through is None or low > through.due):
            return True
        if through is not None and (high, max(numbers)) < through and high < through.due:
            return False
        turns = zip(dues, numbers, strict=True)
        if through is None:
            return bytes([not self._is_cancelled(turn) for turn in turns])
        return bytes([turn > through and not (cancelled and self._is_cancelled(turn)) for turn in turns])

    def _is_cancelled(self, turn: tuple[int, int]) -> bool:
        """Return whether a cancel or reschedule of the turn was durable when the snapshot was made."""
        # The order of the checks matters: a turn is added to `cancelled` before it is removed from `locked`.
        return turn in self._cancelled and turn not in self._locked and turn not in (self._late or ())

    def may_have_cancelled(self, low: int, high: int) -> bool:
        """Return whether a message due in [low, high] may be cancelled. False is certain, True may be wrong."""
        return self._cancelled.any_between(low, high)


class BucketRowCounter:
    """Counts the dead and the pending rows of each bucket. A row is the entry of one message. Broker thread only.

    A row is dead if its message was cancelled or rescheduled, or if the message's topic is deleted. A worker counts the
    rows of one bucket at a time. All buckets are counted if the checkpoint has no counts, or if the memory window was
    shrunk to a time before now. Otherwise only two kinds of buckets are counted: the bucket that contains the end of
    the memory window, and buckets with messages of a deleted topic. Deleted topics are looked up at each start, too,
    because the broker may have stopped just after the deletion.
    """

    def __init__(self, buckets: BucketStore, window: MemoryWindow) -> None:
        self._buckets, self._window = buckets, window
        self._requested: dict[TimeSpan, bool] = {}
        """Span of a bucket to check -> True: count its rows; False: count them only if a topic in it is deleted."""
        self._border_bucket: tuple[Bucket, int, int] | None = None
        """(bucket, its size, border) when the bucket with the border (end of the memory window) was last counted."""
        self.dropped = 0
        self._pending_after_border = 0
        """Number of pending rows in `_border_bucket` that are due at the border or later."""
        if not buckets.counted_offset:
            self.request(buckets.live_buckets, True)

    def request(self, buckets: Iterable[Bucket], always: bool) -> None:
        """Let a worker check these buckets later. `always`: count rows even if no topic in a bucket is deleted."""
        for bucket in buckets:
            self._requested[bucket.span] = always or self._requested.get(bucket.span, False)

    def count_dead_row(self, due: int) -> None:
        """Add 1 to the dead rows of the bucket for this due time. Do nothing if there is no such bucket."""
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
        """Approximate bytes of the pending messages in buckets, as if all messages of a bucket had the same size."""
        buckets = [bucket for bucket in self._buckets.live_buckets if bucket.count]
        return sum([each.size * max(0, each.count - each.dead_count) // each.count for each in buckets])

    # Counting, in a worker

    @property
    def has_work(self) -> bool:
        return bool(self._requested) or self._uncounted_border_bucket() is not None

    def _uncounted_border_bucket(self) -> Bucket | None:
        """Return the bucket that contains the window's end; None if there is no such bucket or its rows are counted."""
        border = self._window.border
        bucket = self._buckets.bucket_at(border)
        if bucket is None or self._border_bucket == (bucket, bucket.size, border):
            return None
        return bucket if bucket.span.start < border else None

    def start(self, pending: PendingSnapshot) -> Callable[[], Callable[[], bool]]:
        """Return a function that counts the rows of one bucket. The caller runs this function in a worker.

        The function returns a second function, which the caller then calls in the broker thread. The second function
        stores the counts, and returns whether the number of dead rows has changed.
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
                if not surely and bucket.span.start >= border:  # earlier rows are in memory and counted there
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
    """Estimate how many pending rows of `bucket` are due at `border` or later, as if due times were evenly spread."""
    part = (bucket.span.end - border) / (bucket.span.end - bucket.span.start)
    return int(max(0, bucket.count - bucket.dead_count) * part)


ChangedTurn = tuple[int, Turn]
"""(log id of the partition of a message, turn of the message before the cancel or reschedule)."""


class CancelledRows:
    """Removes cancelled and rescheduled messages from memory, and counts their rows in buckets. Broker thread only.

    A change is the cancel or the reschedule of one message. If the message is in a bucket, its row stays in the file
    and is counted in `Bucket.dead_count`. This count must be exact, so file work (a worker reads or writes buckets)
    sees only the changes that were durable when the work began. Changes that become durable during the work are
    collected in `late`, and counted when the work has ended. A start counts the changes after
    `BucketStore.counted_offset` in the arrival log.
    """

    def __init__(
        self, window: MemoryWindow, target_queues: TargetQueues, buckets: BucketStore, row_counter: BucketRowCounter
    ) -> None:
        self._window, self._target_queues = window, target_queues
        self._buckets, self._row_counter = buckets, row_counter
        self._non_durable: deque[tuple[int, Sequence[ChangedTurn]]] = deque()
        """Changes that are not durable yet: (offset in the arrival log where their header ends, changes)."""
        self.late: dict[Turn, int] = {}
        """The changes that became durable during the running file work: old turn -> log id of the partition.

        Any thread may read this.
        """
        self._not_in_memory: set[Turn] = set()
        """The turns in `late` whose rows were not in memory when the change became durable."""
        self._file_work_running = False
        self._durable_offset = buckets.counted_offset

    @property
    def miscounted(self) -> int:
        """Number of messages that are still counted as pending although their cancel or reschedule is durable."""
        return len(self._not_in_memory)

    def add_written(self, end_offset: int, changes: Sequence[ChangedTurn]) -> None:
        """Add cancels or reschedules that were written to the arrival log. `end_offset`: where their append ends."""
        self._non_durable.append((end_offset, changes))

    def process_durable(self, forced_offset: int) -> None:
        """Handle the cancels and reschedules before `forced_offset`, the durable offset of the arrival log.

        Rows of changed messages are removed from memory, and counted as dead in buckets. The caller must have added the
        messages before this offset to memory already, because otherwise their rows would not be found.
        """
        while self._non_durable and self._non_durable[0][0] <= forced_offset:
            for key, turn in self._non_durable.popleft()[1]:
                self._remove_message(key, turn)
        self._set_counted_offset(forced_offset)

    def add_recovered(self, turns: Iterable[Turn], forced_offset: int) -> None:
        """Count as dead the messages whose cancel or reschedule a start has found. They have no rows in memory."""
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
        """Begin file work, which sees only changes before `forced_offset`, the durable offset of the arrival log."""
        self.process_durable(forced_offset)
        self._file_work_running = True

    def end_file_work(self) -> None:
        """End file work, and count the cancels and reschedules that became durable during the work."""
        self._file_work_running = False
        late, ahead = list(self.late.items()), self._not_in_memory
        self.late.clear()
        self._not_in_memory = set()
        for turn, key in late:
            was_in_memory = turn not in ahead
            if not was_in_memory and turn.due < self._window.border:
                self._remove_from_memory(key, turn)  # the row was loaded during the work
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
