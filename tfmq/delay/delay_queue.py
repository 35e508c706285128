"""The delay queue: the interface between the broker and delayed delivery."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from journal.clock import Clock
from tfmq.apply_target import ARRIVALS_KEY, ApplyTarget, RunInWorker, Timers
from tfmq.delay.arrivals.non_durable import NonDurableArrivals
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.buckets.loader import BucketLoader, RecoveredArrivals
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.cancellation import FIRING, MessageChanges
from tfmq.delay.dispatcher import Dispatcher
from tfmq.delay.due_time import BrokerClock
from tfmq.delay.memory_window import MemoryWindow
from tfmq.delay.pending import BucketRowCounter, CancelledRows, PendingSnapshot
from tfmq.delay.queries import DelayMetrics, describe_pending, list_pending, pending_histogram
from tfmq.delay.record_reader import RecordReader
from tfmq.delay.requests import (
    PENDING,
    UNKNOWN,
    ArrivalLog,
    Histogram,
    ListPage,
    ListQuery,
    LogFilter,
    MessageState,
    Turn,
)
from tfmq.delay.rows import TargetIds
from tfmq.delay.storage_scheduler import StorageScheduler
from tfmq.delay.target_queue import TargetQueues
from tfmq.delay.timing_wheel import HashedTimingWheel
from tfmq.errors import DiskFull, StorageStopped

WHEEL_SLOTS: Final = 8192
"""Number of slots of the timing wheel. With ticks of 10 ms they cover 82 s, about the length of the memory window."""


class DelayQueue:
    """Connects the parts of delayed delivery for the broker. Broker thread only.

    When a message is due it fires: it is appended to its partition. No message fires before it is due or before its
    record in the arrival log is durable. Each message fires once, and the messages of one partition fire in the order
    of their turns (due time, number). The result of a cancel is always exact: cancelled, delivered or unknown.

    Order of calls: the constructor, `recover(done)`, `start()`. After that, the broker calls `write()` in each of its
    turns (passes of its event loop) in which `mark_ready` was called or `is_delivering` is true. It does so before the
    partitions write, and repeats the call while `due` is true. At the end it calls `stop(done)`, and then `write()` in
    each turn until `done` is called.

    `floor_ms`: the highest due time of the messages that have fired already; broker time starts at this time or later.
    `tick_ms`: interval at which due messages fire. `outcome_seconds`: how long after its due time a message's state can
    be queried.
    """

    def __init__(
        self,
        *,
        arrival_log: ArrivalLog,
        state: ArrivalLogState,
        buckets: BucketStore,
        apply_target: ApplyTarget,
        timers: Timers,
        clock: Clock,
        run: RunInWorker,
        tick_ms: int,
        outcome_seconds: int,
        mark_ready: Callable[[], None],
        floor_ms: int = 0,
    ) -> None:
        self._arrival_log, self._state, self._buckets, self._run = arrival_log, state, buckets, run
        self._broker_clock = broker_clock = BrokerClock(clock)
        broker_clock.start(max(floor_ms, buckets.broker_ms))
        broker_clock.restore_steps(buckets.queue_state)
        targets, non_durable = TargetIds(), NonDurableArrivals()
        self._window = window = MemoryWindow(HashedTimingWheel(tick_ms, WHEEL_SLOTS), targets)
        self._loader = BucketLoader(arrival_log.log, buckets, targets)
        self._target_queues = target_queues = TargetQueues(
            buckets.store_id,
            apply_target=apply_target,
            timers=timers,
            run=run,
            broker_clock=broker_clock,
            targets=targets,
            record_reader=RecordReader(arrival_log.log, buckets),
            cancelled=state.cancelled,
            uncertain_targets=non_durable.uncertain_targets,
            postpone=lambda queue, part: self._changes.postpone(queue, part),
        )
        self._row_counter = row_counter = BucketRowCounter(buckets, window)
        cancelled_rows = CancelledRows(window, target_queues, buckets, row_counter)
        self._scheduler = StorageScheduler(
            arrival_log=arrival_log,
            state=state,
            buckets=buckets,
            loader=self._loader,
            window=window,
            target_queues=target_queues,
            non_durable=non_durable,
            broker_clock=broker_clock,
            timers=timers,
            run=run,
            outcome_ms=outcome_seconds * 1000,
            row_counter=row_counter,
            cancelled_rows=cancelled_rows,
            more_fireable=lambda: self._dispatcher.dispatch_due(),
        )
        self._metrics = DelayMetrics(non_durable, window, target_queues, buckets, row_counter, cancelled_rows, timers)
        self._dispatcher = dispatcher = Dispatcher(
            arrival_log=arrival_log,
            state=state,
            non_durable=non_durable,
            window=window,
            target_queues=target_queues,
            scheduler=self._scheduler,
            metrics=self._metrics,
            broker_clock=broker_clock,
            timers=timers,
            tick_ms=tick_ms,
            mark_ready=mark_ready,
        )
        self._changes = MessageChanges(
            arrival_log=arrival_log,
            state=state,
            target_queues=target_queues,
            broker_clock=broker_clock,
            run=run,
            dispatcher=dispatcher,
            scheduler=self._scheduler,
            cancelled_rows=cancelled_rows,
            mark_ready=mark_ready,
        )
        self._waiting_queries: deque[Callable[[], None]] = deque()
        """Queries, run one at a time because each may load all columns of a bucket. The first query is running."""
        self._stopped: Callable[[], None] | None = None
        self.is_delivering = False
        """Whether target queues have messages. While this is true, the broker must call `write` in each turn."""
        # The broker calls these methods of the parts as methods of this object.
        self.now_ms, self.now_rounded_up_ms = broker_clock.now_ms, broker_clock.now_rounded_up_ms
        self.ahead_ms = broker_clock.ahead_ms
        self.begin_append, self.append_written = dispatcher.begin_append, dispatcher.append_written
        self.append_failed = dispatcher.append_failed
        self.schedule_maintenance = dispatcher.schedule_maintenance
        self.cancel, self.reschedule = self._changes.cancel, self._changes.reschedule
        self.verify = self._changes.verify

    # Requests for delayed messages

    def describe(self, key: int, turn: Turn, done: Callable[[MessageState | None, BaseException | None], None]) -> None:
        """Pass the state of a message to `done`; for a rescheduled message, this is the state of its latest turn."""
        now = Turn(*self._state.rescheduled.latest(*turn))
        try:
            state = self._changes.state_of(key, now, self._arrival_log.log.whole_end[1])
        except StorageStopped as error:
            return done(None, error)
        if state not in (PENDING, FIRING):
            return done(MessageState(state, now), None)
        if now.number >= max(self._scheduler.durable_number, self._arrival_log.log.end_ordinal):
            # The end of the log, which has the message, is not durable yet because the disk is full.
            return done(None, DiskFull())

        def found(record: bytes | None, error: BaseException | None) -> None:
            pending = None if record is None else describe_pending(key, now, record)
            state = MessageState(UNKNOWN if pending is None else PENDING, now, pending)
            done(state if error is None else None, error)

        self._run(partial(self._target_queues.record_reader.find, key, now), found)

    def list(self, query: ListQuery, done: Callable[[ListPage | None, BaseException | None], None]) -> None:
        """Pass one page of the pending messages that `query` selects, in the order of their turns, to `done`."""
        self._query(lambda: partial(list_pending, self._buckets, query, self._pending_snapshot()), done)

    def histogram(
        self,
        edges: Sequence[int],
        keys: LogFilter | None,
        done: Callable[[Histogram | None, BaseException | None], None],
    ) -> None:
        """Count all pending messages, and those in each interval edges[n] <= due < edges[n + 1].

        `keys`: selects partitions by log id; None: all. `done` gets the counts.
        """

        def work() -> Callable[[], Histogram]:
            pending, fires_below = self._pending_snapshot(), self._window.fires_below
            return partial(pending_histogram, self._buckets, edges, keys, pending, fires_below)

        self._query(work, done)

    def _query(self, work: Callable[[], Callable[[], Any]], done: Callable[[Any, BaseException | None], None]) -> None:
        """Wait until all messages are in buckets and no other query runs; then run this query in a worker.

        `work()`: returns the function for the worker; called in the broker thread. `done` gets the function's result.
        """

        def start() -> None:
            self._run(work(), ended)

        def ended(result: Any, error: BaseException | None) -> None:
            self._waiting_queries.popleft()
            if self._waiting_queries:
                self._waiting_queries[0]()
            done(result, error)

        def spilled(error: BaseException | None) -> None:
            if error is not None:
                return done(None, error)
            self._waiting_queries.append(start)
            if len(self._waiting_queries) == 1:
                start()

        self._when_spilled(spilled)

    def _pending_snapshot(self) -> PendingSnapshot:
        return PendingSnapshot(self._state, self._target_queues)

    def _when_spilled(self, then: Callable[[BaseException | None], None]) -> None:
        def durable(error: BaseException | None) -> None:
            if error is not None:
                return then(error)
            self._dispatcher.process_durable()
            self._scheduler.when_spilled(then)

        self._arrival_log.when_forced(self._arrival_log.log.end_offset, durable)

    # Metrics

    @property
    def pending(self) -> int:
        """Number of pending messages, counted at most a tenth of a second ago."""
        return self._metrics.pending

    @property
    def pending_bytes(self) -> int:
        """Approximate bytes on disk of the pending messages."""
        return self._metrics.size_bytes + self._scheduler.unspilled_bytes

    def status(self) -> dict[str, Any]:
        queues, now = self._target_queues, self._broker_clock.now_ms()
        blocked = queues.blocked
        return {
            "pending": self.pending,
            "size_bytes": self.pending_bytes,
            "near": self._window.wheel.count,
            "next_due_ms": self._metrics.next_due,
            "now_ms": now,
            "ahead_ms": self._broker_clock.wall_offset_ms(),
            "horizon_ms": self._window.end,
            "held": sum([queue.waiting for queue in blocked]),
            "behind": len(queues.on_disk),
            "waits_for": [(queues.target_name(queue.key), queue.blocked_reason) for queue in blocked],
            "dropped": queues.dropped + self._row_counter.dropped,
            "damaged": queues.damaged,
            "fired": queues.fired_count,
            "lateness": queues.lateness.status(),
            "wheel": self._window.wheel.occupancy(),
            "stopped": self._buckets.stop_reason or "",
        }

    # Life cycle

    def recover(self, done: Callable[[BaseException | None], None]) -> None:
        """Load the messages of the arrival log that are in no bucket yet, then call `done`.

        The caller has opened all partitions. No message is delivered before `start`.
        """
        log, buckets = self._arrival_log.log, self._buckets
        end, number = log.whole_end, max(log.end_ordinal, buckets.spilled_number)
        # At a start, `forced_offset` may be lower than the end of the durable part. But all messages before
        # `spilled_offset` are durable, because they were made durable before they were written to buckets.
        offset = max(log.forced_offset, buckets.spilled_offset)

        def found(result: RecoveredArrivals | None, error: BaseException | None) -> None:
            if result is None:
                return done(error or RuntimeError("a read of the arrival log ended without a result"))
            self._scheduler.recover(result, offset, number, whole=offset == end[0])
            if offset < end[0]:
                # The end of the log is not durable because the disk is full, and may still be lost. Until this end is
                # durable, no message is delivered.
                self._dispatcher.wait_for_tail(offset, end)
            done(None)

        pending = self._pending_snapshot()
        self._run(partial(self._loader.recover, buckets.spilled_offset, offset, pending), found)

    def start(self) -> None:
        """Begin to deliver due messages. The broker calls this after `recover` has ended."""
        self._row_counter.request(self._buckets.live_buckets, False)
        self._dispatcher.start()

    @property
    def due(self) -> bool:
        return self._target_queues.has_work or self._changes.has_writes

    def write(self) -> bool:
        """Append collected cancels to the arrival log and due messages to partitions; return whether there was work."""
        busy = self._changes.write()
        busy = self._target_queues.write() or busy
        if self._dispatcher.started and self._scheduler.needs_run:
            self._scheduler.run_due()
            self._dispatcher.dispatch_due()
        self.is_delivering = bool(self._target_queues.by_key)
        self._stop_if_idle()
        return busy

    def target_resumed(self, key: int) -> None:
        """Continue appends to the resumed partition with the log id `key`. Ignore ARRIVALS_KEY, the arrival log."""
        if key != ARRIVALS_KEY:
            self._target_queues.target_resumed(key)

    def topic_deleted(self, incarnation: int) -> None:
        """Drop and count the messages for all partitions of the deleted topic with this incarnation."""
        self._target_queues.topic_deleted(incarnation)

        def spilled(error: BaseException | None) -> None:
            self._target_queues.dropped += self._window.topic_deleted(incarnation)
            self._row_counter.request(self._buckets.live_buckets, False)
            self._scheduler.run_due()

        self._when_spilled(spilled)

    def stop(self, done: Callable[[], None]) -> None:
        """Stop the delivery of messages, and call `done()` when all work in progress has ended."""
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
