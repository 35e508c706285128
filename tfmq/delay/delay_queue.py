"""The delay queue: the interface between the broker and delayed delivery.

`DelayQueue` connects the parts: arrival log, buckets, timing wheel, memory window and target queues. `QueryQueue` runs
list and histogram queries one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from journal.clock import Clock
from journal.record.batch import Appended
from journal.record.format import Buffer
from tfmq.apply_target import ARRIVALS_KEY, ApplyTarget, RunInWorker, Timers
from tfmq.delay.arrivals.header import ArrivalHeader
from tfmq.delay.arrivals.log import NonDurableArrivals, WrittenArrival
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.buckets.loader import BucketLoader, RecoveredArrivals
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.cancellation import FIRING, MessageChanges, RecordFinder, StateResolver
from tfmq.delay.cancelled_rows import BucketRowCounter, CancelledRows
from tfmq.delay.dispatcher import Dispatcher
from tfmq.delay.due_time import ABSOLUTE_FLAG, BrokerClock
from tfmq.delay.memory_window import MemoryWindow
from tfmq.delay.pending import PendingSnapshots
from tfmq.delay.queries import DelayMetrics, PendingQueries, describe_pending
from tfmq.delay.record_reader import RecordReader
from tfmq.delay.requests import (
    PENDING,
    UNKNOWN,
    ArrivalLog,
    DelaySettings,
    Histogram,
    ListPage,
    ListQuery,
    MessageState,
    RescheduleResult,
    Turn,
)
from tfmq.delay.rows import TargetIds
from tfmq.delay.storage_scheduler import StorageScheduler
from tfmq.delay.target_queue import TargetQueues
from tfmq.delay.timing_wheel import HashedTimingWheel
from tfmq.errors import DiskFull, StorageStopped


class QueryQueue:
    """Runs expensive queries one at a time: each may load the columns of a whole bucket.

    Broker thread only.
    """

    def __init__(self, run: RunInWorker) -> None:
        self._run = run
        self._waiting: deque[Callable[[], None]] = deque()
        """The first one is running."""

    def submit(
        self, work: Callable[[], Callable[[], Any]], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Call `work()` when no other query runs; call its result in a worker, then `done`."""
        self._waiting.append(partial(self._start, work, done))
        if len(self._waiting) == 1:
            self._waiting[0]()

    def submit_after(
        self,
        first: Callable[[Callable[[BaseException | None], None]], None],
        work: Callable[[], Callable[[], Any]],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Run `first`, then submit `work`. If `first` reports an error, call `done(None, error)`."""
        first(lambda error: self.submit(work, done) if error is None else done(None, error))

    def _start(
        self, work: Callable[[], Callable[[], Any]], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        def ended(result: Any, error: BaseException | None) -> None:
            self._waiting.popleft()
            if self._waiting:
                self._waiting[0]()
            done(result, error)

        self._run(work(), ended)


WHEEL_SLOTS: Final = 8192
"""Slots of the timing wheel.

With ticks of 10 ms a revolution is 82 s, about the length of the memory window.
"""
SECOND_MS: Final = 1000


class DelayQueue:
    """The delay queue as the broker uses it.

    A message fires when it is due: it is appended to its partition. Guarantees: no message fires before it is due, each
    fires once, the messages of one partition fire in the order of their turns (due time, number), and no message fires
    before its arrival is durable. Every cancel gets one exact result.

    Broker thread only: all calls are made in it and all callbacks run in it, at once or later.

    Call order: construct, `recover(done)`, `start()`. In the turns of the broker, before partitions write, call
    `write()` as long as `due`, if `mark_ready` was called or `is_delivering`. At the end call `stop(done)`, and
    `write()` in each turn until `done` is called. `floor_ms`: the highest due time that any partition has applied.
    """

    def __init__(
        self,
        *,
        arrival_log: ArrivalLog,
        state: ArrivalLogState,
        buckets: BucketStore,
        destination: ApplyTarget,
        timers: Timers,
        clock: Clock,
        run: RunInWorker,
        settings: DelaySettings,
        mark_ready: Callable[[], None],
        floor_ms: int = 0,
    ) -> None:
        self._arrival_log, self._state, self._buckets = arrival_log, state, buckets
        self._timers, self._run, self._mark_ready = timers, run, mark_ready
        outcome_ms = settings.outcome_seconds * SECOND_MS
        self._broker_clock = time = BrokerClock(clock)
        time.start(max(floor_ms, buckets.broker_ms))
        time.restore_steps(buckets.queue_state)
        self._non_durable = NonDurableArrivals()
        targets = TargetIds()
        self._window = window = MemoryWindow(HashedTimingWheel(settings.tick_ms, WHEEL_SLOTS), targets)
        self._loader = BucketLoader(arrival_log.log, buckets, targets)
        self._target_queues = target_queues = self._new_target_queues(destination, targets)
        self._state_resolver = StateResolver(
            state, target_queues, destination, time, outcome_ms, lambda: self._scheduler.lowest_stored_due
        )
        self._record_finder = RecordFinder(arrival_log.log, buckets)
        self._row_counter = counting = BucketRowCounter(buckets, window)
        self._cancelled_rows = leaving = CancelledRows(window, target_queues, buckets, counting)
        self._pending_snapshots = PendingSnapshots(state, target_queues, leaving.late)
        self._scheduler = self._new_scheduler(outcome_ms)
        self._metrics = DelayMetrics(
            self._non_durable, window, target_queues, buckets, counting, leaving, timers
        )
        self._dispatcher = self._new_dispatcher(settings.tick_ms)
        self._changes = self._new_changes()
        self._queries, self._query_queue = PendingQueries(buckets), QueryQueue(run)
        self._append_after_stop: dict[int, bool] = {}
        """By ticket of an append: whether the arrival log had stopped before `begin_append`."""
        self._stopped: Callable[[], None] | None = None
        self.is_delivering = False
        """Whether target queues have messages: if so, call `write` in each turn of the broker."""

    def _new_target_queues(self, destination: ApplyTarget, targets: TargetIds) -> TargetQueues:
        state = self._state
        return TargetQueues(
            self._buckets.store_id,
            destination=destination,
            timers=self._timers,
            run=self._run,
            broker_clock=self._broker_clock,
            targets=targets,
            record_reader=RecordReader(self._arrival_log.log, self._buckets),
            cancelled=lambda: state.cancelled,
            doubtful=self._non_durable.uncertain_targets,
            postpone=lambda queue, part: self._changes.postpone(queue, part),
        )

    def _new_scheduler(self, outcome_ms: int) -> StorageScheduler:
        non_durable = self._non_durable
        return StorageScheduler(
            arrival_log=self._arrival_log,
            state=self._state,
            pending_snapshots=self._pending_snapshots,
            buckets=self._buckets,
            loader=self._loader,
            window=self._window,
            target_queues=self._target_queues,
            broker_clock=self._broker_clock,
            timers=self._timers,
            run=self._run,
            due_limit=lambda: non_durable.due_limit,
            lowest_due=lambda: non_durable.lowest_due,
            outcome_ms=outcome_ms,
            row_counter=self._row_counter,
            cancelled_rows=self._cancelled_rows,
            more_fireable=lambda: self._dispatcher.dispatch_due(),
        )

    def _new_dispatcher(self, tick_ms: int) -> Dispatcher:
        return Dispatcher(
            metrics=self._metrics,
            arrival_log=self._arrival_log,
            non_durable=self._non_durable,
            window=self._window,
            target_queues=self._target_queues,
            scheduler=self._scheduler,
            broker_clock=self._broker_clock,
            timers=self._timers,
            tick_ms=tick_ms,
            mark_ready=self._mark_ready,
        )

    def _new_changes(self) -> MessageChanges:
        scheduler = self._scheduler
        return MessageChanges(
            arrival_log=self._arrival_log,
            state=self._state,
            state_resolver=self._state_resolver,
            target_queues=self._target_queues,
            broker_clock=self._broker_clock,
            record_finder=self._record_finder,
            run=self._run,
            arrival_tracker=self,
            durable_number=lambda: scheduler.durable_number,
            cancelled_rows=self._cancelled_rows,
            mark_ready=self._mark_ready,
        )

    # Clock

    def now_ms(self) -> int:
        """Return broker time in ms.

        It never decreases and is never below the due time of a fired message.
        """
        return self._broker_clock.now_ms()

    def now_rounded_up_ms(self) -> int:
        """Return broker time rounded up, from which delays count: at most about 1 ms above `now_ms`."""
        return self._broker_clock.now_rounded_up_ms()

    def ahead_ms(self) -> int:
        """Return by how many ms broker time is ahead of the wall clock.

        `effective_due_times` and the arrival header need the value, so that messages with an absolute time can be
        rescheduled if the wall clock is set back.
        """
        return self._broker_clock.ahead_ms()

    # Arrivals

    def begin_append(self, due_min: int) -> int:
        """Announce an append of messages that are due at `due_min` or later; return its ticket.

        Nothing due at or after `due_min` fires until `append_written` or `append_failed` is called with the ticket.
        Call it without returning to the event loop after `now_ms()`, which the due times were computed from.
        """
        ticket = self._non_durable.begin_append(due_min)
        self._append_after_stop[ticket] = self._arrival_log.log.stopped is not None
        return ticket

    def append_written(self, ticket: int, header: ArrivalHeader, records: Buffer, answer: Appended) -> None:
        """Record that the batch is written to the arrival log, not yet durable.

        `answer` is the result of the append of the records that follow the header. `records` is used only during the
        call.
        """
        first, dues = answer.first_ordinal, header.dues
        self._state.epochs.record(first, self._arrival_log.log.epoch)
        del self._append_after_stop[ticket]
        if ABSOLUTE_FLAG in dues.absolute:
            self._broker_clock.record_offset(first, header.ahead_ms)
        self._scheduler.extend_if_due()
        rows = self._window.wheel_rows_of(header, records, answer, self._broker_clock.now_ms())
        count = header.record_count
        written_range = (answer.end_offset, first + count, count, dues.low, dues.high, rows)
        self._non_durable.add_written(WrittenArrival(ticket, header.log_id, *written_range))
        self._metrics.count_arrived(count)
        self._dispatcher.batch_written(dues.low)

    def append_failed(self, ticket: int) -> None:
        """Record that the batch was not written.

        If the log stopped after `begin_append`, the next start decides whether the batch was written, and until then
        nothing fires that is due later.
        """
        if self._arrival_log.log.stopped is None or self._append_after_stop.get(ticket):
            self._non_durable.append_failed(ticket)
            self._dispatcher.dispatch_due()
        self._append_after_stop.pop(ticket, None)

    def schedule_maintenance(self) -> None:
        """Schedule maintenance, to truncate the arrival log after an append without messages."""
        self._dispatcher.schedule_maintenance()

    def process_durable(self) -> None:
        """Process the arrivals that are durable now.

        Called when a cancel or reschedule became durable.
        """
        self._dispatcher.process_durable()
        self.schedule_maintenance()

    # Requests for delayed messages

    def cancel(self, key: int, turn: Turn, done: Callable[[str | None, BaseException | None], None]) -> None:
        """Cancel the message with this turn, for the target with the log id `key`.

        `done("cancelled" | "delivered" | "unknown", None)` is called once that is durable.

        `done(None, error)`: the result is unknown unless `error.outcome` says otherwise; the same call can be repeated
        to find out.
        """
        self._changes.cancel(key, turn, done)

    def reschedule(
        self,
        key: int,
        turn: Turn,
        wire_due: bytes,
        done: Callable[[RescheduleResult | None, BaseException | None], None],
    ) -> None:
        """Assign a new due time to a pending message, in one append.

        `key`, `turn` and errors as for `cancel`. `wire_due`: one word as `effective_due_times` expects it.
        """
        self._changes.reschedule(key, turn, wire_due, done)

    def describe(
        self, key: int, turn: Turn, done: Callable[[MessageState | None, BaseException | None], None]
    ) -> None:
        """Pass the state of a message to `done`; if it was rescheduled, that of its latest turn."""
        now = Turn(*self._state.rescheduled.latest(*turn))
        try:
            state = self._state_resolver.state_of(key, now, self._arrival_log.log.whole_end[1])
        except StorageStopped as error:
            return done(None, error)
        if state not in (PENDING, FIRING):
            return done(MessageState(state, now), None)
        if now.number >= max(self._scheduler.durable_number, self._arrival_log.log.end_ordinal):
            return done(
                None, DiskFull()
            )  # the message is in the log's tail, which is not durable for lack of space

        def found(record: bytes | None, error: BaseException | None) -> None:
            if error is not None:
                done(None, error)
            elif record is None:
                done(MessageState(UNKNOWN, now), None)
            else:
                done(MessageState(PENDING, now, describe_pending(key, now, record)), None)

        self._run(partial(self._record_finder.find, key, now), found)

    def list(self, query: ListQuery, done: Callable[[ListPage | None, BaseException | None], None]) -> None:
        """List pending messages in the order of their turns."""
        self._query_queue.submit_after(
            self._when_spilled,
            lambda: partial(self._queries.list, query, self._pending_snapshots.current()),
            done,
        )

    def histogram(
        self,
        edges: Sequence[int],
        keys: Callable[[int], bool] | None,
        done: Callable[[Histogram | None, BaseException | None], None],
    ) -> None:
        """Count pending messages between each two neighbours of `edges`; `keys` as in `ListQuery`."""

        def work() -> Callable[[], Histogram]:
            pending, settled = self._pending_snapshots.current(), self._window.fires_below
            return partial(self._queries.histogram, edges, keys, pending, settled)

        self._query_queue.submit_after(self._when_spilled, work, done)

    def _when_spilled(self, then: Callable[[BaseException | None], None]) -> None:
        def forced(error: BaseException | None) -> None:
            if error is not None:
                return then(error)
            self._dispatcher.process_durable()
            self._scheduler.when_spilled(then)

        self._arrival_log.when_forced(self._arrival_log.log.end_offset, forced)

    # Metrics

    @property
    def pending(self) -> int:
        """Number of pending messages; changes of the last moments may be missing."""
        return self._metrics.pending

    @property
    def pending_bytes(self) -> int:
        """Approximate bytes on disk of the pending messages."""
        return self._metrics.size_bytes + self._scheduler.unspilled_bytes

    def status(self) -> dict[str, Any]:
        """Return the state of the queue for operators."""
        queues, now = self._target_queues, self._broker_clock.now_ms()
        parked = [
            (queues.target_name(queue.key), queue.blocked_reason)
            for queue in queues.all()
            if queue.blocked_reason
        ]
        return {
            "pending": self.pending,
            "size_bytes": self.pending_bytes,
            "near": self._window.wheel.count,
            "next_due_ms": self._metrics.next_due,
            "now_ms": now,
            "ahead_ms": self._broker_clock.wall_offset_ms(),
            "horizon_ms": self._window.end,
            "held": sum([queue.waiting for queue in queues.all() if queue.blocked_reason]),
            "behind": queues.on_disk_count,
            "waits_for": parked,
            "dropped": queues.dropped + self._row_counter.dropped,
            "damaged": queues.damaged,
            "fired": queues.fired_count,
            "lateness": queues.lateness.status(),
            "wheel": self._window.wheel.occupancy(),
            "stopped": self._buckets.stop_reason or "",
        }

    # Life cycle

    def recover(self, done: Callable[[BaseException | None], None]) -> None:
        """Read the arrivals that are in no bucket yet, before `start`; nothing fires.

        The partitions must be open.
        """
        log, buckets = self._arrival_log.log, self._buckets
        end, number = log.whole_end, max(log.end_ordinal, buckets.spilled_number)
        offset = max(
            log.forced_offset, buckets.spilled_offset
        )  # the log may underestimate its durable offset

        def found(result: RecoveredArrivals | None, error: BaseException | None) -> None:
            if result is None:
                return done(error or RuntimeError("a read of the arrival log ended without a result"))
            self._scheduler.recover(result, offset, number, whole=offset == end[0])
            if offset < end[0]:
                # The tail waits for space to become durable and may still be lost: nothing fires until that is decided.
                self._dispatcher.wait_for_tail(offset, end)
            done(None)

        pending = self._pending_snapshots.current()
        self._run(partial(self._loader.recover, buckets.spilled_offset, offset, pending), found)

    def start(self) -> None:
        """Start to deliver due messages; `recover` is done."""
        self._row_counter.request(self._buckets.live_buckets, False)
        self._dispatcher.start()

    @property
    def due(self) -> bool:
        """Whether `write` has appends to send."""
        return self._target_queues.has_work or self._changes.has_writes

    def write(self) -> bool:
        """Send appends to the targets that can accept one; return whether there was anything to do."""
        busy = self._changes.write()
        busy = self._target_queues.write() or busy
        if self._dispatcher.started and self._scheduler.needs_run:
            self._scheduler.run_due()
            self._dispatcher.dispatch_due()
        self.is_delivering = bool(self._target_queues.all())
        self._stop_if_idle()
        return busy

    def target_resumed(self, key: int) -> None:
        """Handle that the target with the log id `key`, or the arrival log, accepts writes again."""
        if key != ARRIVALS_KEY:
            self._target_queues.target_resumed(key)

    def topic_deleted(self, incarnation: int) -> None:
        """Drop and count the messages for the partitions of the deleted topic `incarnation`."""
        self._target_queues.topic_deleted(incarnation)

        def look(error: BaseException | None) -> None:
            self._target_queues.dropped += self._window.topic_deleted(incarnation)
            self._row_counter.request(self._buckets.live_buckets, False)
            self._scheduler.run_due()

        self._when_spilled(look)

    def stop(self, done: Callable[[], None]) -> None:
        """Stop firing and call `done()` when all work in progress has ended."""
        self._stopped = done
        self._dispatcher.stop()
        self._target_queues.stop()
        self._scheduler.stop(self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        busy = self._scheduler.running_step or self._changes.has_writes or not self._changes.is_idle
        if self._stopped is None or busy or not self._target_queues.is_idle:
            return
        done, self._stopped = self._stopped, None
        done()
