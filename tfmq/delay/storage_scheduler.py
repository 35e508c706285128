"""The storage scheduler: runs the file work of delayed messages that `memory_window.decide` selects."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tfmq.apply_queue import RETRY_SECONDS
from tfmq.apply_target import RunInWorker, Timers
from tfmq.backoff import Backoff
from tfmq.delay.arrivals.non_durable import NonDurableArrivals, WrittenArrival
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import TimeSpan
from tfmq.delay.buckets.loader import DUE_TIME_LIMIT, BucketLoader, LoadRange, RecoveredArrivals, merge_rows
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.buckets.writer import PendingFilter, next_to_split
from tfmq.delay.due_time import BrokerClock
from tfmq.delay.memory_window import (
    LOAD_AHEAD_MS,
    URGENT_MS,
    Decision,
    MemoryWindow,
    Step,
    StorageView,
    decide,
    minimum_end,
)
from tfmq.delay.pending import BucketRowCounter, CancelledRows, PendingSnapshot
from tfmq.delay.requests import ArrivalLog, Turn
from tfmq.delay.rows import RowColumns
from tfmq.delay.target_queue import QUEUE_ROWS_MAX, TargetQueues
from tfmq.delay.timing_wheel import DUE_RANGE, WheelRows
from tfmq.errors import NOT_DONE, StorageStopped

logger = logging.getLogger("tfmq.delay")

WORK_RETRY_SECONDS, WORK_RETRY_SECONDS_MAX = 1.0, 30.0
"""Bounds of the pauses before file work is retried after a disk error; each pause is twice the one before."""

ADD_ROWS_MAX: Final = 8192
"""Maximum of loaded messages added to the timing wheel in one turn of the broker: about 3 ms of work."""
LOAD_RETRY_SECONDS: Final = 1.0
LOAD_RETRY_SECONDS_MAX: Final = 10.0
"""Longest pause before a failed load is retried (first: LOAD_RETRY_SECONDS). Its messages are not delivered then."""
QUERIES_UNAVAILABLE: Final = (
    "Pending messages cannot be listed or counted, because the disk failed under the buckets of delayed messages."
    " Repair the disk, then start the broker again."
)
"""Lists and counts read only buckets, and after a disk error no messages of the arrival log are written to buckets."""

Callback = Callable[[BaseException | None], None]


@dataclass(eq=False, kw_only=True)
class StorageScheduler:
    """Runs the file work of delayed messages in a worker, one step at a time.

    The steps are: spill (write messages of the arrival log to buckets, files by due time), truncate the arrival log,
    load messages into memory, split and remove buckets, and write the checkpoint. Failed steps are retried. If messages
    of the arrival log cannot be spilled, they are loaded from that log when they are due soon.

    `more_fireable()` is called after a step that may have made more messages ready to be delivered. `outcome_ms`: how
    long after its due time the state of a message can be queried.
    """

    arrival_log: ArrivalLog
    state: ArrivalLogState
    buckets: BucketStore
    loader: BucketLoader
    window: MemoryWindow
    target_queues: TargetQueues
    non_durable: NonDurableArrivals
    broker_clock: BrokerClock
    timers: Timers
    run: RunInWorker
    outcome_ms: int
    row_counter: BucketRowCounter
    cancelled_rows: CancelledRows
    more_fireable: Callable[[], None]

    def __post_init__(self) -> None:
        self.durable_offset = self.buckets.spilled_offset
        self.durable_number = self.buckets.spilled_number
        """Messages before `durable_offset` of the arrival log have numbers below this, and were added to `window`."""
        self.tail_offset: int | None = None
        """Where the log's non-durable end began at the start. None: there was no such end, or `load_tail` has ended."""
        self.running_step: Step | None = None
        self.stopping = self._scheduling = False
        self.changed = False
        """Whether the checkpoint is out of date."""
        self._unspilled_arrivals, self._committed_ms = UnspilledArrivals(), 0
        self._file_references = FileReferences(self.durable_offset)
        self._unsplittable: set[TimeSpan] = set()
        self._spill_waiters: list[Callback] = []
        self._backoff, self._write_after = Backoff(WORK_RETRY_SECONDS, WORK_RETRY_SECONDS_MAX), 0.0
        self._load_backoff = Backoff(LOAD_RETRY_SECONDS, LOAD_RETRY_SECONDS_MAX)
        self._stopped: Callable[[], None] | None = None

    # Arrivals

    def arrival_durable(self, landed: WrittenArrival) -> None:
        """Record that an append to the arrival log is durable. Called for each append, in the order of the log."""
        self.durable_offset, self.durable_number = landed.end_offset, landed.number_next
        self._unspilled_arrivals.add(landed.due_low, self.broker_clock.now_ms())
        self.changed = True

    def skip_to_log_end(self) -> None:
        """Advance `durable_offset` past headers of cancels at the end of the log, so that they can be truncated."""
        log = self.arrival_log.log
        if log.forced_offset == log.end_offset > self.durable_offset and self.tail_offset is None:
            self.durable_offset, self.durable_number, self.changed = log.end_offset, log.end_ordinal, True
            self._unspilled_arrivals.add(None, self.broker_clock.now_ms())

    @property
    def unspilled_bytes(self) -> int:
        return self.durable_offset - self.buckets.spilled_offset

    @property
    def is_empty(self) -> bool:
        return not (self.buckets.live_buckets or self.unspilled_bytes) and self.non_durable.due_limit is None

    def when_spilled(self, done: Callback) -> None:
        """Call `done(None)` once all durable messages of the arrival log are in buckets; `done(error)` on failure."""
        self._spill_waiters.append(done)
        self._notify_spill_waiters()
        if self._spill_waiters:
            self.run_due()

    def _notify_spill_waiters(self) -> None:
        error = None
        if self.unspilled_bytes:
            if self.buckets.stop_reason is None:
                return
            error = StorageStopped(QUERIES_UNAVAILABLE, reason=self.buckets.stop_reason, outcome=NOT_DONE)
        waiters, self._spill_waiters = self._spill_waiters, []
        for waiter in waiters:
            waiter(error)

    # Scheduling

    def run_due(self) -> None:
        """Start the next step unless one is running. Steps that need no worker are done before this returns."""
        if self._scheduling or (self.tail_offset is not None and self.tail_offset < self.arrival_log.log.forced_offset):
            return  # `load_tail` must load the end of the log first
        self._scheduling = True
        while self.running_step is None and not self.stopping:
            self._mark_obsolete()
            decision = decide(self.build_view())
            if decision.step is Step.IDLE or not self._start_step(decision):
                break
        self._scheduling = False
        self._try_stop()

    def build_view(self) -> StorageView:
        window, buckets, queues = self.window, self.buckets, self.target_queues
        now = self.broker_clock.now_ms()
        bucket = buckets.next_after(window.end)
        return StorageView(
            now=now,
            window_end=window.end,
            non_durable_due=self.non_durable.due_limit,
            missing_due=window.missing_due,
            rows=window.wheel.row_count + queues.row_count,
            fireable=queues.fireable_count + (window.wheel.row_count if window.end <= now else 0),
            span=None if bucket is None else bucket.span,
            span_rows=0 if bucket is None else bucket.count,
            divisible=bucket is None or bucket.span not in self._unsplittable,
            disk_low=window.disk_arrivals.low,
            disk_count=window.disk_arrivals.count,
            unspilled_bytes=self.unspilled_bytes,
            unspilled_since=self._unspilled_arrivals.since,
            writable=buckets.stop_reason is None and self.timers.now() >= self._write_after,
            spill_requested=bool(self._spill_waiters),
            has_split=self._bucket_to_split() is not None,
            has_count=self.row_counter.has_work,
            has_reload=self.target_queues.next_to_reload() is not None,
            obsolete_bytes=self._obsolete_before() - self.arrival_log.log.first_offset,
            segment_bytes=self.arrival_log.log.options.segment_bytes,
            committed_ms=self._committed_ms,
            changed=self.changed,
        )

    def _start_step(self, decision: Decision) -> bool:
        """Start a step in a worker, or do it at once if it needs no worker; return False if the step had no effect."""
        step, to = decision
        if step is Step.SHRINK:
            dropped = self.window.shrink(to, self.buckets.spilled_offset)
            logger.info("%d delayed messages that are due from %d on are left on the disk", dropped, to)
            if to <= self.broker_clock.now_ms():  # messages from `to` on may be delivered already
                self.row_counter.request(self.buckets.live_buckets, True)
            return True
        if step is Step.EXTEND or step is Step.LOAD:
            unsure, now = self.non_durable.due_limit, self.broker_clock.now_ms()
            to = self.window.reachable_end(to, now if unsure is None else min(unsure, now))
            if to <= self.window.end:
                return False  # the wheel covers 34 years: it must become empty before the window can be extended
        if step is Step.EXTEND:
            self.window.extend(to)
            self.more_fireable()
            return True
        self.running_step = step
        self.cancelled_rows.begin_file_work(self.arrival_log.log.forced_offset)
        if step is Step.LOAD:
            self._load(to)
        else:
            work = {Step.SPILL: self._spill, Step.SPLIT: self._split, Step.COUNT: self._count}
            work |= {Step.RELOAD: self._reload, Step.TRUNCATE: self._truncate, Step.COMMIT: self._commit}
            work[step]()
        return True

    def _pending(self, border: int | None = None) -> PendingSnapshot:
        return PendingSnapshot(self.state, self.target_queues, self.cancelled_rows.late, border)

    def _step_ended(self, error: BaseException | None = None) -> None:
        """Handle the end of a step in a worker, and start the next step. After an error, steps that write wait."""
        if error is None:
            self._backoff.reset()
        else:
            what = self.running_step.value if self.running_step is not None else "work"
            logger.error("delayed messages: the %s failed and is tried again: %s", what, error)
            pause = self._backoff.advance()
            self._write_after = self.timers.now() + pause
            self.timers.after(pause, self.run_due)
        self.running_step = None
        self.cancelled_rows.end_file_work()
        # A spill calls only the waiters that were added before it began. If nothing is left to spill, no other spill
        # would begin for later waiters, so they are called here. They get an error if the bucket store has stopped
        # meanwhile.
        self._notify_spill_waiters()
        self.more_fireable()
        self.run_due()

    # Loads into memory

    def _load(self, to: int) -> None:
        """Load the messages due from the end of the window to `to`. They are not delivered before all are loaded."""
        low = self.window.begin_load(to)
        buckets = [each for each in self.buckets.live_buckets if each.span.end > low and each.span.start < to]
        area = LoadRange(low, to, buckets, self.buckets.spilled_offset, self.durable_offset)
        self._read_range(area, self._pending())

    def _read_range(self, area: LoadRange, pending: PendingFilter) -> None:
        """Load the messages of `area`, and retry after an error.

        A load cannot be abandoned, because arriving messages due before `area.high` are added to memory meanwhile.
        """

        def loaded(found: list[WheelRows] | None, error: BaseException | None) -> None:
            if found is not None:
                self._load_backoff.reset()
                self._add_rows(found)
            elif self.stopping:
                self._step_ended()
            else:
                logger.error("delayed messages that are soon due cannot be loaded, tried again: %s", error)
                self.timers.after(self._load_backoff.advance(), partial(self._read_range, area, pending))

        self.run(partial(self.loader.load, area, pending), loaded)

    def _add_rows(self, found: list[WheelRows]) -> None:
        room = ADD_ROWS_MAX
        while found and room > 0:
            rows = found.pop()
            if len(rows) > room:
                found.append(WheelRows(*(column[room:] for column in rows)))
                rows = WheelRows(*(column[:room] for column in rows))
            self.window.add_loaded(rows)
            room -= len(rows)
        if found and not self.stopping:
            self.timers.after(0.0, partial(self._add_rows, found))
            return
        if not found:
            self.window.end_load()
        self._step_ended()

    def _reload(self) -> None:
        """Reload rows that one target queue has dropped from memory, QUEUE_ROWS_MAX rows at most."""
        queue = self.target_queues.next_to_reload()
        assert queue is not None and queue.on_disk_from is not None, "a reload was decided without a queue"
        ticket = queue.begin_reload()
        # Messages from the turn `before` on were not popped yet: their rows are still in the wheel.
        first, before, pending = queue.on_disk_from, self.window.first_unpopped, self._pending()
        arrivals = self.buckets.spilled_offset, self.durable_offset

        def ended(found: tuple[RowColumns, Turn | None] | None, error: BaseException | None) -> None:
            if found is None:
                queue.end_reload(ticket, None, None)
                queue.pause(RETRY_SECONDS)
            else:
                queue.end_reload(ticket, *found)
            self._step_ended()

        self.run(partial(self._find_rows, queue.key, first, before, arrivals, pending), ended)

    def _find_rows(
        self, key: int, first: Turn, before: Turn, arrivals: tuple[int, int], pending: PendingFilter
    ) -> tuple[RowColumns, Turn | None]:
        """Return the pending rows of the target `key` with first <= turn < before, at most QUEUE_ROWS_MAX of them.

        The second value is None if the rows are complete. Otherwise it is a turn: rows from this turn on are left out.
        `arrivals`: the first and the end offset of the part of the arrival log that is in no bucket.
        """
        found: list[WheelRows] = []
        high = covered = before.due + 1
        for bucket in self.buckets.live_buckets:
            if bucket.span.end <= first.due or bucket.span.start >= high:
                continue
            found += self.loader.load(LoadRange(first.due, high, [bucket], 0, 0), pending, key.__eq__)
            if sum(map(len, found)) >= QUEUE_ROWS_MAX:
                covered = min(high, bucket.span.end)
                break
        found += self.loader.load(LoadRange(first.due, covered, [], *arrivals), pending, key.__eq__)
        part, more = merge_rows(found, first, before, QUEUE_ROWS_MAX)
        return part, Turn(covered, 0) if more is None and covered < high else more

    # Writing to buckets, splits, counts, deletion of files

    def _spill(self) -> None:
        buckets, offset, number = self.buckets, self.durable_offset, self.durable_number
        self.window.begin_spill()
        self._unspilled_arrivals.begin_spill()
        wanted, self._spill_waiters = self._spill_waiters, []
        pending = self._pending(self.window.border)
        batches = self.loader.read_arrivals(buckets.spilled_offset, offset, on_damage=pending.damage.append)
        how = (self.broker_clock.now_ms(), pending, self.broker_clock.encode_steps())
        work = partial(buckets.spill, batches, offset, number, *how)

        def done(result: Any, error: BaseException | None) -> None:
            count = self.window.end_spill(error is None)
            self._unspilled_arrivals.end_spill(error is None)
            if error is None:
                self._file_references.add(self.window.end, offset=offset)
                self.target_queues.record_lost(pending.dropped, pending.lost_count(count))
                self._committed_ms = self.broker_clock.now_ms()
            for waiter in wanted:
                waiter(error)
            self._step_ended(error)

        self.run(work, done)

    def _bucket_to_split(self) -> Bucket | None:
        named = [*self.buckets.due_for_split(self.broker_clock.now_ms()), *self.buckets.oversized]
        following = self.buckets.next_after(self.window.end)
        return next_to_split(named, following, self.window.end, self._unsplittable)

    def _split(self) -> None:
        bucket = self._bucket_to_split() or self.buckets.next_after(self.window.end)
        assert bucket is not None, "a split was decided without a bucket"

        def done(pieces: list[Bucket] | None, error: BaseException | None) -> None:
            if pieces is not None:
                self._file_references.add(self.window.end, bucket=bucket)
            else:
                self._unsplittable.add(bucket.span)
            self._step_ended(error)

        self.run(partial(self.buckets.split, bucket, self._pending()), done)

    def _count(self) -> None:
        def done(store: Callable[[], bool] | None, error: BaseException | None) -> None:
            self.changed = (store is not None and store()) or self.changed
            self._step_ended()

        self.run(self.row_counter.start(self._pending()), done)

    def _mark_obsolete(self) -> None:
        """Mark buckets that have no pending messages as obsolete; release old files to which no row refers any more."""
        window, queues = self.window, self.target_queues
        limits = (window.fires_below, window.wheel.next_due, queues.lowest_due, self.non_durable.lowest_due)
        through = min(limit for limit in limits if limit is not None)
        for bucket in self.buckets.live_buckets:
            if bucket.span.end > through:
                break
            self.buckets.mark_obsolete(bucket)
            self.changed = True
        needed = min(limit for limit in (window.fires_below, window.wheel.next_due) if limit is not None)
        if self._should_drop_blocked_rows and self._file_references.oldest_window_end <= needed:
            queues.drop_blocked_rows(self._file_references.oldest_window_end)
        first = queues.lowest_row_due
        for bucket in self._file_references.release_before(needed if first is None else min(first, needed)):
            self.buckets.release(bucket)
            self._unsplittable.clear()
            self.changed = True

    @property
    def _should_drop_blocked_rows(self) -> bool:
        """Whether two or more segments of the arrival log are in buckets, but rows in memory prevent their deletion."""
        log = self.arrival_log.log
        kept = self._file_references.offset - log.first_offset
        spilled = self.buckets.spilled_offset - log.first_offset
        return kept < log.options.segment_bytes and spilled >= 2 * log.options.segment_bytes

    def _obsolete_before(self) -> int:
        """Return the offset before which the arrival log is obsolete: it is in buckets, and no row refers to it."""
        return min(self._file_references.offset, self.buckets.spilled_offset)

    def _truncate(self) -> None:
        self.arrival_log.truncate_before(self._obsolete_before(), lambda result, error: self._step_ended(error))

    def _commit(self) -> None:
        now = self.broker_clock.now_ms()
        self.changed = False
        low = min(self.lowest_stored_due, now - self.outcome_ms)

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                self._committed_ms = now
                self.state.expire_before(low)
            else:
                self.changed = True
            self._step_ended(error)

        self.run(partial(self.buckets.commit, now, self.broker_clock.encode_steps()), done)

    @property
    def lowest_stored_due(self) -> int:
        """A due time before which no message is pending, neither in a live bucket nor in the arrival log."""
        starts = [bucket.span.start for bucket in self.buckets.live_buckets[:1]]
        limits = [*self._unspilled_arrivals.lows, *starts, self.non_durable.lowest_due]
        return min((limit for limit in limits if limit is not None), default=DUE_TIME_LIMIT)

    # Urgent work

    @property
    def needs_run(self) -> bool:
        """Whether `run_due` should be called now: a target queue waits for rows, or a load is urgent."""
        if self.running_step is not None or self.stopping:
            return False
        urgent = self.window.end <= self.broker_clock.now_ms() + URGENT_MS
        return self.target_queues.next_to_reload() is not None or (urgent and not self.is_empty)

    # Start and stop

    def recover(self, found: RecoveredArrivals, offset: int, number: int, whole: bool) -> None:
        """Restore the state at a start from `found`, the messages of the arrival log that are in no bucket.

        `offset`: the end of the durable part of the log; `number`: the number of the next message. `whole`: whether the
        log ends at `offset`. If it does not, `load_tail` adds the messages after `offset` later. These may have been
        due long ago, so the timing wheel gets an earlier base: it takes no messages due before its base.
        """
        self.durable_offset, self.durable_number = offset, number
        window, now = self.window, self.broker_clock.now_ms()
        lows = [min(rows.dues) for rows in found.wheel_rows if len(rows.dues)]
        window_end = min([minimum_end(now), *(bucket.span.start for bucket in self.buckets.live_buckets[:1])])
        window.start(min([now if whole else max(0, now - DUE_RANGE // 2), window_end, *lows]), window_end)
        self._add_recovered(found)

    def _add_recovered(self, found: RecoveredArrivals) -> None:
        self.cancelled_rows.add_recovered(found.changed_turns, self.durable_offset)
        if self.unspilled_bytes:
            self._unspilled_arrivals.add(found.due_low, self.broker_clock.now_ms())
        for step in found.ahead_steps:
            self.broker_clock.restore_offset(*step)
        for rows in found.wheel_rows:
            if len(rows.dues):
                self.window.add_durable(rows, len(rows.dues), min(rows.dues), max(rows.dues))

    def load_tail(self, from_offset: int, end: tuple[int, int], done: Callable[[], None]) -> None:
        """Add the messages of the arrival log from `from_offset` to `end` (offset, ordinal), which are durable now.

        Call `done()` when all messages are added. A failed read is retried.
        """

        def found(arrived: RecoveredArrivals | None, error: BaseException | None) -> None:
            if arrived is None:
                logger.error("the last delayed messages of the log cannot be read, tried again: %s", error)
                self.timers.after(WORK_RETRY_SECONDS_MAX, partial(self.load_tail, from_offset, end, done))
                return
            self.tail_offset, self.changed = None, True
            self.durable_offset = max(self.durable_offset, end[0])
            self.durable_number = max(self.durable_number, end[1])
            self._add_recovered(arrived)
            done()
            self.run_due()

        pending = PendingSnapshot(self.state, self.target_queues)
        work = partial(self.loader.recover, from_offset, end[0], pending)
        self.run(work, found)

    def extend_if_due(self) -> None:
        """Call `run_due` if the memory window ends within LOAD_AHEAD_MS, so that the window is extended."""
        if self.window.end <= self.broker_clock.now_ms() + LOAD_AHEAD_MS:
            self.run_due()

    def stop(self, done: Callable[[], None]) -> None:
        self.stopping = True
        self._stopped = done
        for waiter in self._spill_waiters:
            waiter(StorageStopped(reason="the broker stops", outcome=NOT_DONE))
        self._spill_waiters.clear()
        self._try_stop()

    def _try_stop(self) -> None:
        if self._stopped is not None and self.running_step is None:
            done, self._stopped = self._stopped, None
            done()


class FileReferences:
    """The obsolete files that must stay readable because rows in memory refer to records in them.

    A spill writes messages of the arrival log to buckets, and a split divides a bucket into several. Rows that are in
    memory during the spill or split still refer to the old file. All these rows are due before the end that the
    memory window has during that work. So when no row in memory is due before this end any more, the old file can be
    deleted. `offset`: no row refers to the arrival log before this offset.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._references: deque[tuple[int, int | None, Bucket | None]] = deque()
        self._highest_end = 0

    def add(self, window_end: int, *, offset: int | None = None, bucket: Bucket | None = None) -> None:
        """Record that messages of the arrival log before `offset` are in buckets now, or that `bucket` was split."""
        # The window ends in `_references` must not decrease, even if the window has shrunk, because rows that were
        # popped from the wheel earlier may be due after the window's new end.
        self._highest_end = max(window_end, self._highest_end) if self._references else window_end
        self._references.append((self._highest_end, offset, bucket))

    @property
    def oldest_window_end(self) -> int:
        """All rows that refer to the oldest obsolete file are due before this time; 0 if there is no such file."""
        return self._references[0][0] if self._references else 0

    def release_before(self, needed: int) -> list[Bucket]:
        """Release the files to which no row can refer, because no row in memory is due before `needed`.

        Advance `offset` if a part of the arrival log is released, and return the released buckets.
        """
        found = []
        while self._references and self._references[0][0] <= needed:
            _, offset, bucket = self._references.popleft()
            if bucket is not None:
                found.append(bucket)
            if offset is not None:
                self.offset = offset
        return found


class UnspilledArrivals:
    """Lowest due time and age of the messages of the arrival log that are in no bucket, whether pending or not.

    `since`: when the first of these messages became durable (broker time). `lows`: the lowest due time of these
    messages, and the lowest due time of the messages that a running spill writes to buckets.
    """

    def __init__(self) -> None:
        self.low: int | None = None
        self.since: int | None = None
        self._spilling: tuple[int | None, int | None] = (None, None)

    def add(self, low: int | None, now_ms: int) -> None:
        self.low = min([each for each in (low, self.low) if each is not None], default=None)
        self.since = self.since or now_ms

    @property
    def lows(self) -> list[int]:
        return [low for low in (self.low, self._spilling[0]) if low is not None]

    def begin_spill(self) -> None:
        self._spilling = self.low, self.since
        self.low = self.since = None

    def end_spill(self, done: bool) -> None:
        (low, since), self._spilling = self._spilling, (None, None)
        if not done:
            self.add(low, since or 0)
            self.since = since
