"""The storage scheduler: runs the file work that `memory_window.decide` selects.

It runs one piece of work at a time, in a worker. It spills arrivals to buckets, truncates the arrival log, loads,
splits and removes buckets, and writes the checkpoint. Disk errors are retried: arrivals that cannot be spilled are
loaded from the arrival log.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, NamedTuple

from tfmq.apply_queue import RETRY_SECONDS
from tfmq.apply_target import RunInWorker, Timers
from tfmq.backoff import Backoff
from tfmq.delay.arrivals.log import WheelRows, WrittenArrival
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import TimeSpan
from tfmq.delay.buckets.loader import DUE_TIME_LIMIT, BucketLoader, LoadRange, RecoveredArrivals, merge_rows
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.buckets.writer import PendingFilter, next_to_split
from tfmq.delay.cancelled_rows import BucketRowCounter, CancelledRows
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
from tfmq.delay.pending import PendingSnapshots
from tfmq.delay.requests import ArrivalLog, Turn
from tfmq.delay.rows import RowColumns
from tfmq.delay.target_queue import QUEUE_ROWS_MAX, TargetQueue, TargetQueues
from tfmq.delay.timing_wheel import DUE_RANGE
from tfmq.errors import NOT_DONE, StorageStopped

logger = logging.getLogger("tfmq.delay")

WORK_RETRY_SECONDS, WORK_RETRY_SECONDS_MAX = 1.0, 30.0
"""Bounds of the pauses before work is retried after a disk error; they double."""

Callback = Callable[[BaseException | None], None]


class StorageScheduler:
    """Runs the file work of delayed messages, one piece at a time, in a worker.

    `due_limit()` and `lowest_due()` are those of `tfmq.delay.arrivals.log.NonDurableArrivals`. `moved()` is called
    after work that may have made more messages ready to fire.
    """

    def __init__(
        self,
        *,
        arrival_log: ArrivalLog,
        state: ArrivalLogState,
        pending_snapshots: PendingSnapshots,
        buckets: BucketStore,
        loader: BucketLoader,
        window: MemoryWindow,
        target_queues: TargetQueues,
        broker_clock: BrokerClock,
        timers: Timers,
        run: RunInWorker,
        due_limit: Callable[[], int | None],
        lowest_due: Callable[[], int | None],
        outcome_ms: int,
        row_counter: BucketRowCounter,
        cancelled_rows: CancelledRows,
        more_fireable: Callable[[], None],
    ) -> None:
        self._arrival_log, self._state, self._buckets, self._loader = arrival_log, state, buckets, loader
        self._window, self._target_queues, self._broker_clock, self._timers = (
            window,
            target_queues,
            broker_clock,
            timers,
        )
        self._pending_snapshots = pending_snapshots
        self._run_worker, self._due_limit, self._lowest_due, self._outcome_ms = (
            run,
            due_limit,
            lowest_due,
            outcome_ms,
        )
        self._row_counter, self._cancelled_rows, self._more_fireable = (
            row_counter,
            cancelled_rows,
            more_fireable,
        )
        self.durable_offset = buckets.spilled_offset
        self.durable_number = buckets.spilled_number
        """Arrivals before these, by offset and number, are durable and processed."""
        self.tail_offset: int | None = None
        """Offset from which on the log was not durable at the start (`load_tail`); None: all was."""
        self.running_step: Step | None = None
        self.stopping = self._scheduling = False
        self.changed = False
        """Whether the checkpoint is out of date."""
        self._unspilled_arrivals, self._committed_ms = UnspilledArrivals(), 0
        self._file_references = FileReferences(buckets.spilled_offset)
        self._unsplittable: set[TimeSpan] = set()
        self._spill_waiters: list[Callback] = []
        self._window_loader = WindowLoader(window, buckets, loader, timers=timers, run=run)
        self._queue_reloader = QueueReloader(target_queues, buckets, loader)
        self._backoff, self._write_after = Backoff(WORK_RETRY_SECONDS, WORK_RETRY_SECONDS_MAX), 0.0
        self._stopped: Callable[[], None] | None = None

    # Arrivals

    def arrival_durable(self, landed: WrittenArrival) -> None:
        """Record a durable batch."""
        self.durable_offset, self.durable_number = landed.end_offset, landed.number_next
        self._unspilled_arrivals.add(landed.due_low, self._broker_clock.now_ms())
        self.changed = True

    def skip_to_log_end(self) -> None:
        """Advance to the end of the log if all batches are processed: the rest has no messages.

        Cancels and closed producer streams can then be truncated, too.
        """
        log = self._arrival_log.log
        if log.forced_offset == log.end_offset > self.durable_offset and self.tail_offset is None:
            self.durable_offset, self.durable_number, self.changed = log.end_offset, log.end_ordinal, True
            self._unspilled_arrivals.add(None, self._broker_clock.now_ms())

    @property
    def unspilled_bytes(self) -> int:
        """Bytes of arrivals that are in no bucket."""
        return self.durable_offset - self._buckets.spilled_offset

    @property
    def is_empty(self) -> bool:
        """Whether there are no pending messages on disk."""
        return not (self._buckets.live_buckets or self.unspilled_bytes) and self._due_limit() is None

    def when_spilled(self, done: Callback) -> None:
        """Call `done(None)` once all durable arrivals are in buckets; `done(error)` if that fails."""
        self._spill_waiters.append(done)
        self._tell_wanted()
        if self._spill_waiters:
            self.run_due()

    def _tell_wanted(self) -> None:
        """Reply to all of `_wanted` if nothing is left to spill, or if no spill is possible until the next start."""
        error = None
        if self.unspilled_bytes:
            if self._buckets.stop_reason is None:
                return
            error = StorageStopped(QUERIES_UNAVAILABLE, reason=self._buckets.stop_reason, outcome=NOT_DONE)
        wanted, self._spill_waiters = self._spill_waiters, []
        for told in wanted:
            told(error)

    # Scheduling

    def run_due(self) -> None:
        """Start the next work unless some is running.

        Steps that need no worker are repeated until none is left.
        """
        if self._scheduling or (
            self.tail_offset is not None and self.tail_offset < self._arrival_log.log.forced_offset
        ):
            return  # a tail of the log must be loaded first
        self._scheduling = True
        while self.running_step is None and not self.stopping:
            self._mark_obsolete()
            decision = decide(self.build_view())
            if decision.step is Step.IDLE or not self._start_step(decision):
                break
        self._scheduling = False
        self._try_stop()

    def build_view(self) -> StorageView:
        """Return the input of `decide`."""
        window, buckets, queues = self._window, self._buckets, self._target_queues
        now = self._broker_clock.now_ms()
        bucket = buckets.next_after(window.end)
        return StorageView(
            now=now,
            window_end=window.end,
            non_durable_due=self._due_limit(),
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
            writable=buckets.stop_reason is None and self._timers.now() >= self._write_after,
            spill_requested=bool(self._spill_waiters),
            has_split=self._bucket_to_split() is not None,
            has_count=self._row_counter.has_work,
            has_reload=self._queue_reloader.has_work,
            obsolete_bytes=self._obsolete_before() - self._arrival_log.log.first_offset,
            segment_bytes=self._arrival_log.log.options.segment_bytes,
            committed_ms=self._committed_ms,
            changed=self.changed,
        )

    def _start_step(self, decision: Decision) -> bool:
        """Start or do the step; return False if it had no effect."""
        step, to = decision
        if step is Step.SHRINK:
            dropped = self._window.shrink(to, self._buckets.spilled_offset)
            logger.info("%d delayed messages that are due from %d on are left on the disk", dropped, to)
            if to <= self._broker_clock.now_ms():  # `to` may be before messages that were fired
                self._row_counter.request(self._buckets.live_buckets, True)
            return True
        if step is Step.EXTEND or step is Step.LOAD:
            unsure, now = self._due_limit(), self._broker_clock.now_ms()
            to = self._window.reachable_end(to, now if unsure is None else min(unsure, now))
            if to <= self._window.end:
                return False  # the wheel covers 34 years: earlier messages must fire first
        if step is Step.EXTEND:
            self._window.extend(to)
            self._more_fireable()
            return True
        self.running_step = step
        self._cancelled_rows.begin_file_work(self._arrival_log.log.forced_offset)
        if step is Step.LOAD:
            self._load(to)
        else:
            work = {Step.SPILL: self._spill, Step.SPLIT: self._split, Step.COUNT: self._count}
            work |= {Step.RELOAD: self._reload, Step.TRUNCATE: self._truncate, Step.COMMIT: self._commit}
            work[step]()
        return True

    def _step_ended(self, error: BaseException | None = None) -> None:
        """End a piece of work. After an error nothing is written for a while."""
        if error is None:
            self._backoff.reset()
        else:
            what = self.running_step.value if self.running_step is not None else "work"
            logger.error("delayed messages: the %s failed and is tried again: %s", what, error)
            pause = self._backoff.advance()
            self._write_after = self._timers.now() + pause
            self._timers.after(pause, self.run_due)
        self.running_step = None
        self._cancelled_rows.end_file_work()
        # A spill replies only to requests made before it began. Afterwards there may be nothing left to spill, so no
        # other spill would begin for later requests; and any work that writes may have stopped the buckets.
        self._tell_wanted()
        self._more_fireable()
        self.run_due()

    # Load

    def _load(self, to: int) -> None:
        self._window_loader.start(
            to,
            self._buckets.spilled_offset,
            self.durable_offset,
            self._pending_snapshots.for_file_work(),
            self._step_ended,
        )

    def _reload(self) -> None:
        offsets = (self._buckets.spilled_offset, self.durable_offset)
        work = self._queue_reloader.start(
            *offsets, self._window.first_unpopped, self._pending_snapshots.for_file_work()
        )
        self._run_worker(work, self._reload_ended)

    def _reload_ended(self, result: Any, error: BaseException | None) -> None:
        self._queue_reloader.finish(result, error)
        self._step_ended()

    # Spill, split, count, remove

    def _spill(self) -> None:
        buckets, offset, number = self._buckets, self.durable_offset, self.durable_number
        self._window.begin_spill()
        self._unspilled_arrivals.begin_spill()
        wanted, self._spill_waiters = self._spill_waiters, []
        pending = self._pending_snapshots.for_file_work(self._window.border)
        batches = self._loader.read_arrivals(buckets.spilled_offset, offset, on_damage=pending.damage.append)
        how = (self._broker_clock.now_ms(), pending, self._broker_clock.encode_steps())
        work = partial(buckets.spill, batches, offset, number, *how)

        def done(result: Any, error: BaseException | None) -> None:
            count = self._window.end_spill(error is None)
            self._unspilled_arrivals.end_spill(error is None)
            if error is None:
                self._file_references.add_spill(offset, self._window.end)
                self._target_queues.record_lost(pending.dropped, pending.lost_count(count))
                self._committed_ms = self._broker_clock.now_ms()
            for waiter in wanted:
                waiter(error)
            self._step_ended(error)

        self._run_worker(work, done)

    def _bucket_to_split(self) -> Bucket | None:
        named = [*self._buckets.due_for_split(self._broker_clock.now_ms()), *self._buckets.oversized()]
        following = self._buckets.next_after(self._window.end)
        return next_to_split(named, following, self._window.end, self._unsplittable)

    def _split(self) -> None:
        bucket = self._bucket_to_split() or self._buckets.next_after(self._window.end)
        assert bucket is not None, "a split was decided without a bucket"
        done = partial(self._split_ended, bucket)
        self._run_worker(partial(self._buckets.split, bucket, self._pending_snapshots.for_file_work()), done)

    def _split_ended(
        self, bucket: Bucket, pieces: Collection[Bucket] | None, error: BaseException | None
    ) -> None:
        if pieces is not None:
            self._file_references.add_split(bucket, self._window.end)
        else:
            self._unsplittable.add(bucket.span)
        self._step_ended(error)

    def _count(self) -> None:
        self._run_worker(self._row_counter.start(self._pending_snapshots.for_file_work()), self._count_ended)

    def _count_ended(self, found: Callable[[], bool] | None, error: BaseException | None) -> None:
        self.changed = (found is not None and found()) or self.changed
        self._step_ended()

    def _mark_obsolete(self) -> None:
        """Mark buckets obsolete in which everything is durably delivered.

        Release files that memory does not need.
        """
        window, queues = self._window, self._target_queues
        limits = (window.fires_below, window.wheel.next_due, queues.lowest_due, self._lowest_due())
        through = min(limit for limit in limits if limit is not None)
        for bucket in self._buckets.live_buckets:
            if bucket.span.end > through:
                break
            self._buckets.mark_obsolete(bucket)
            self.changed = True
        needed = min(limit for limit in (window.fires_below, window.wheel.next_due) if limit is not None)
        if self._should_drop_blocked_rows and self._file_references.oldest_window_end <= needed:
            queues.drop_blocked_rows(self._file_references.oldest_window_end)
        first = queues.lowest_row_due
        for bucket in self._file_references.release_before(needed if first is None else min(first, needed)):
            self._buckets.release(bucket)
            self._unsplittable.clear()
            self.changed = True

    @property
    def _should_drop_blocked_rows(self) -> bool:
        """Whether blocked queues should drop their rows.

        Their locators retain two segments of spilled arrivals.
        """
        log = self._arrival_log.log
        kept, spilled = (
            self._file_references.offset - log.first_offset,
            self._buckets.spilled_offset - log.first_offset,
        )
        return kept < log.options.segment_bytes and spilled >= 2 * log.options.segment_bytes

    def _obsolete_before(self) -> int:
        """Return the offset before which arrivals are obsolete."""
        return min(self._file_references.offset, self._buckets.spilled_offset)

    def _truncate(self) -> None:
        self._arrival_log.truncate_before(
            self._obsolete_before(), lambda result, error: self._step_ended(error)
        )

    def _commit(self) -> None:
        now = self._broker_clock.now_ms()
        self.changed = False
        low = min(self.lowest_stored_due, now - self._outcome_ms)

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                self._committed_ms = now
                self._state.expire_before(low)
            else:
                self.changed = True
            self._step_ended(error)

        self._run_worker(partial(self._buckets.commit, now, self._broker_clock.encode_steps()), done)

    @property
    def lowest_stored_due(self) -> int:
        """Due time before which no message is in a file that counts: all are delivered or cancelled."""
        starts = [bucket.span.start for bucket in self._buckets.live_buckets[:1]]
        limits = [*self._unspilled_arrivals.lows, *starts, self._lowest_due()]
        return min((limit for limit in limits if limit is not None), default=DUE_TIME_LIMIT)

    # Queries

    @property
    def needs_run(self) -> bool:
        """Whether `run_due` should be called now, because queues wait for messages on disk."""
        if self.running_step is not None or self.stopping:
            return False
        urgent = self._window.end <= self._broker_clock.now_ms() + URGENT_MS
        return self._queue_reloader.has_work or (urgent and not self.is_empty)

    # Start and stop

    def recover(self, found: RecoveredArrivals, offset: int, number: int, whole: bool) -> None:
        """Restore the state from the arrivals that are in no bucket.

        The window starts where the buckets start. `whole`: False if a tail of the log follows later, which may hold
        messages that were due long ago.
        """
        self.durable_offset, self.durable_number = offset, number
        window, now = self._window, self._broker_clock.now_ms()
        lows = [min(rows.dues) for rows in found.wheel_rows if len(rows.dues)]
        horizon = min([minimum_end(now), *(bucket.span.start for bucket in self._buckets.live_buckets[:1])])
        window.start(min([now if whole else max(0, now - DUE_RANGE // 2), horizon, *lows]), horizon)
        self._add_recovered(found)

    def _add_recovered(self, found: RecoveredArrivals) -> None:
        self._cancelled_rows.add_recovered(found.changed_turns, self.durable_offset)
        if self.unspilled_bytes:
            self._unspilled_arrivals.add(found.due_low, self._broker_clock.now_ms())
        for step in found.ahead_steps:
            self._broker_clock.restore_offset(*step)
        for rows in found.wheel_rows:
            if len(rows.dues):
                self._window.add_durable(rows, len(rows.dues), min(rows.dues), max(rows.dues))

    def load_tail(self, from_offset: int, end: tuple[int, int], done: Callable[[], None]) -> None:
        """Load the tail of the log, which is durable now, then call `done()`. Errors are retried."""

        def found(arrived: RecoveredArrivals | None, error: BaseException | None) -> None:
            if arrived is None:
                logger.error("the last delayed messages of the log cannot be read, tried again: %s", error)
                self._timers.after(WORK_RETRY_SECONDS_MAX, partial(self.load_tail, from_offset, end, done))
                return
            self.tail_offset, self.changed = None, True
            self.durable_offset, self.durable_number = (
                max(self.durable_offset, end[0]),
                max(self.durable_number, end[1]),
            )
            self._add_recovered(arrived)
            done()
            self.run_due()

        work = partial(self._loader.recover, from_offset, end[0], self._pending_snapshots.current())
        self._run_worker(work, found)

    def extend_if_due(self) -> None:
        """Extend the window if it is due to be extended."""
        if self._window.end <= self._broker_clock.now_ms() + LOAD_AHEAD_MS:
            self.run_due()

    def stop(self, done: Callable[[], None]) -> None:
        """Start no more work; call `done()` when none is running."""
        self.stopping = True
        self._window_loader.stop()
        self._stopped = done
        for waiter in self._spill_waiters:
            waiter(StorageStopped(reason="the broker stops", outcome=NOT_DONE))
        self._spill_waiters.clear()
        self._try_stop()

    def _try_stop(self) -> None:
        if self._stopped is not None and self.running_step is None:
            done, self._stopped = self._stopped, None
            done()


ADD_ROWS_MAX: Final = 8192
"""Rows added to the wheel in one turn of the broker, about 3 ms of work."""
LOAD_RETRY_SECONDS: Final = 1.0
LOAD_RETRY_SECONDS_MAX: Final = 10.0
"""Bounds of the pauses before a failed load is retried; they double.

Nothing after the load fires meanwhile.
"""


class WindowLoader:
    """Loads the messages between the old and a new end of the window into the wheel.

    None fires before all are loaded. One load at a time.
    """

    def __init__(
        self,
        window: MemoryWindow,
        buckets: BucketStore,
        loader: BucketLoader,
        *,
        timers: Timers,
        run: RunInWorker,
    ) -> None:
        self._window, self._buckets, self._loader = window, buckets, loader
        self._timers, self._run = timers, run
        self._backoff = Backoff(LOAD_RETRY_SECONDS, LOAD_RETRY_SECONDS_MAX)
        self._stopping = False
        self._done: Callable[[], None] | None = None

    def start(
        self, to: int, from_offset: int, to_offset: int, pending: PendingFilter, done: Callable[[], None]
    ) -> None:
        """Extend the window to `to` and call `done()` when all below is in the wheel.

        Arrivals between the offsets are in no bucket.
        """
        low = self._window.begin_load(to)
        buckets = [
            each for each in self._buckets.live_buckets if each.span.end > low and each.span.start < to
        ]
        self._done = done
        self._load(LoadRange(low, to, buckets, from_offset, to_offset), pending)

    def stop(self) -> None:
        """Do not wait for rows that are not loaded yet."""
        self._stopping = True

    def _load(self, area: LoadRange, pending: PendingFilter) -> None:
        self._run(partial(self._loader.load, area, pending), partial(self._loaded, area, pending))

    def _loaded(
        self,
        area: LoadRange,
        pending: PendingFilter,
        found: list[WheelRows] | None,
        error: BaseException | None,
    ) -> None:
        """Add the loaded rows, or retry.

        The old window cannot be restored, because later arrivals were compared with its new end.
        """
        if found is not None:
            self._backoff.reset()
            self._add_rows([rows for rows in found if len(rows.dues)])
        elif self._stopping:
            self._finish()
        else:
            logger.error("delayed messages that are soon due cannot be loaded, tried again: %s", error)
            self._timers.after(self._backoff.advance(), partial(self._load, area, pending))

    def _add_rows(self, found: list[WheelRows]) -> None:
        """Add a limited number of rows in each turn of the broker, to not delay other work."""
        room = ADD_ROWS_MAX
        while found and room > 0:
            rows = found.pop()
            if len(rows.dues) > room:
                found.append(WheelRows(*(column[room:] for column in rows)))
                rows = WheelRows(*(column[:room] for column in rows))
            self._window.add_loaded(rows)
            room -= len(rows.dues)
        if found and not self._stopping:
            self._timers.after(0.0, partial(self._add_rows, found))
            return
        if not found:
            self._window.end_load()
        self._finish()

    def _finish(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()


class _FileReference(NamedTuple):
    window_end: int
    offset: int | None
    bucket: Bucket | None


class FileReferences:
    """Which files must be kept because rows in memory have locators into them.

    Rows that were in memory at a spill or a split were due before the end of the window at that time; rows loaded later
    have locators into the new files. So when everything due before that end has fired, the old files are obsolete.

    Arrivals before `offset` are obsolete.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._references: deque[_FileReference] = deque()
        self._highest_end = 0

    def add_spill(self, offset: int, horizon: int) -> None:
        """Record a spill of the arrivals before `offset`."""
        self._add(horizon, offset, None)

    def add_split(self, bucket: Bucket, horizon: int) -> None:
        """Record that the messages of a bucket are in other buckets now."""
        self._add(horizon, None, bucket)

    def _add(self, horizon: int, offset: int | None, bucket: Bucket | None) -> None:
        """Add a reference; a window that has shrunk must not release an earlier reference too early."""
        self._highest_end = max(horizon, self._highest_end) if self._references else horizon
        self._references.append(_FileReference(self._highest_end, offset, bucket))

    @property
    def oldest_window_end(self) -> int:
        """Rows due before this time hold the oldest reference; 0 if there is none."""
        return self._references[0].window_end if self._references else 0

    def release_before(self, needed: int) -> list[Bucket]:
        """Release references, given that no row in memory is due before `needed`.

        Return the unreferenced buckets.
        """
        found = []
        while self._references and self._references[0].window_end <= needed:
            pin = self._references.popleft()
            if pin.bucket is not None:
                found.append(pin.bucket)
            if pin.offset is not None:
                self.offset = pin.offset
        return found


class ReloadedRows(NamedTuple):
    """Reloaded rows. `more`: the turn from which on there are more; None: these are all."""

    rows: RowColumns
    more: Turn | None


class QueueReloader:
    """Reloads the rows that a target queue has dropped.

    Reads buckets and arrivals, a bounded number of rows at a time. One queue at a time.
    """

    def __init__(self, target_queues: TargetQueues, buckets: BucketStore, loader: BucketLoader) -> None:
        self._target_queues, self._buckets, self._loader = target_queues, buckets, loader
        self._queue: TargetQueue | None = None
        self._ticket = 0

    @property
    def has_work(self) -> bool:
        """Whether a queue has rows only on disk and could send them."""
        return self._target_queues.next_to_reload() is not None

    def start(
        self, from_offset: int, to_offset: int, front: Turn, pending: PendingFilter
    ) -> Callable[[], ReloadedRows | None]:
        """Return work for a worker: find rows of the next queue with turns below `front`.

        Higher turns were not popped from the wheel yet.
        """
        self._queue = queue = self._target_queues.next_to_reload()
        if queue is None or queue.on_disk_from is None:
            return lambda: None
        self._ticket = queue.begin_reload()
        return partial(self._find, queue.key, queue.on_disk_from, from_offset, to_offset, front, pending)

    def _find(
        self, key: int, after: Turn, from_offset: int, to_offset: int, front: Turn, pending: PendingFilter
    ) -> ReloadedRows:
        """Read buckets until there are enough rows, then the arrivals of the same time range."""
        found: list[WheelRows] = []
        high = front.due + 1
        count, covered = 0, high
        for bucket in self._buckets.live_buckets:
            if bucket.span.end <= after.due or bucket.span.start >= high:
                continue
            area = LoadRange(after.due, high, [bucket], 0, 0)
            found += self._loader.load(area, pending, (key,))
            count = sum([len(rows.dues) for rows in found])
            if count >= QUEUE_ROWS_MAX:
                covered = min(high, bucket.span.end)
                break
        found += self._loader.load(LoadRange(after.due, covered, [], from_offset, to_offset), pending, (key,))
        part, more = merge_rows(found, after, front, QUEUE_ROWS_MAX)
        if more is None and covered < high:
            more = Turn(covered, 0)
        return ReloadedRows(part, more)

    def finish(self, found: ReloadedRows | None, error: BaseException | None) -> None:
        """Pass the rows to the queue. After an error the queue pauses."""
        queue, self._queue = self._queue, None
        if queue is None:
            return
        if found is None:
            queue.end_reload(self._ticket, None, None)
            queue.pause(RETRY_SECONDS)
        else:
            queue.end_reload(self._ticket, *found)


QUERIES_UNAVAILABLE: Final = (
    "Pending messages cannot be listed or counted, because the disk failed under the buckets of delayed messages."
    " Repair the disk, then start the broker again."
)
"""Lists and counts need all arrivals in buckets, which are not writable any more."""


class UnspilledArrivals:
    """Arrivals that are in no bucket: their lowest due time, pending or not, and their age.

    `lows`: the lowest due time of these, and of a running spill. `since`: the broker time of the first of them.
    """

    def __init__(self) -> None:
        self.low: int | None = None
        self.since: int | None = None
        self._spilling: tuple[int | None, int | None] = (None, None)

    def add(self, low: int | None, now_ms: int) -> None:
        """Add arrivals; `low` is None if they have no messages."""
        self.low = min([each for each in (low, self.low) if each is not None], default=None)
        self.since = self.since or now_ms

    @property
    def lows(self) -> list[int]:
        return [low for low in (self.low, self._spilling[0]) if low is not None]

    def begin_spill(self) -> None:
        """Start a spill of all arrivals; later ones are counted separately."""
        self._spilling = self.low, self.since
        self.low = self.since = None

    def end_spill(self, done: bool) -> None:
        """End a spill; if it failed, count its arrivals again."""
        (low, since), self._spilling = self._spilling, (None, None)
        if not done:
            self.add(low, since or 0)
            self.since = since
