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
from tfmq.apply_target import ARRIVALS_KEY, Destination
from tfmq.delay.arrivals.header import Note
from tfmq.delay.arrivals.pending import Landed, Ledger
from tfmq.delay.arrivals.state import ArrivalState
from tfmq.delay.buckets.loader import Arrived, Gatherer
from tfmq.delay.buckets.store import Buckets
from tfmq.delay.cancellation import UNSURE, Changing, Finder, Judge
from tfmq.delay.cancelled_rows import Counting, Leaving
from tfmq.delay.dispatcher import Firing
from tfmq.delay.due_time import ABSOLUTE_FLAG, BrokerTime
from tfmq.delay.memory_window import Shore
from tfmq.delay.pending import Pendings
from tfmq.delay.queries import Figures, Listing, pending_of
from tfmq.delay.record_reader import Fetching
from tfmq.delay.requests import (
    PENDING,
    UNKNOWN,
    DelaySettings,
    Described,
    Histogram,
    Landing,
    Listed,
    Query,
    Rescheduled,
    Run,
    Timers,
    Turn,
)
from tfmq.delay.rows import Targets
from tfmq.delay.storage_scheduler import Keeper
from tfmq.delay.target_queue import Lines
from tfmq.delay.timing_wheel import HashedWheelTimer
from tfmq.errors import DiskFull, StorageStopped


class Asking:
    """Run expensive queries one at a time: each may load the columns of a whole bucket.

    Broker thread only.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: deque[Callable[[], None]] = deque()
        """The first one is running."""

    def put(
        self, work: Callable[[], Callable[[], Any]], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Call `work()` when no other query runs; run its result in a worker, then call `done`."""
        self._waiting.append(partial(self._begin, work, done))
        if len(self._waiting) == 1:
            self._waiting[0]()

    def after(
        self,
        first: Callable[[Callable[[BaseException | None], None]], None],
        work: Callable[[], Callable[[], Any]],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Run `first`, then submit `work`. If `first` reports an error, call `done(None, error)`."""
        first(lambda error: self.put(work, done) if error is None else done(None, error))

    def _begin(
        self, work: Callable[[], Callable[[], Any]], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        def ended(result: Any, error: BaseException | None) -> None:
            self._waiting.popleft()
            if self._waiting:
                self._waiting[0]()
            done(result, error)

        self._run(work(), ended)


SLOTS: Final = 8192
"""Slots of the timing wheel.

With ticks of 10 ms a revolution is 82 s, about the length of the memory window.
"""
SECOND_MS: Final = 1000


class DelayQueue:
    """The delay queue as the broker uses it.

    Guarantees: no message fires before it is due, each fires once, the messages of one partition fire in the order
    of their turns (due time, number), and no message fires before its arrival is durable. Every cancel gets one exact
    result.

    Broker thread only: all calls are made in it and all callbacks run in it, at once or later.

    Call order: construct, `recover(done)`, `start()`; in each turn of the broker, before partitions write, `write()`
    while `due`; at the end `stop(done)`. `floor_ms`: the highest due time that any partition has applied.
    """

    def __init__(
        self,
        *,
        landing: Landing,
        state: ArrivalState,
        buckets: Buckets,
        destination: Destination,
        timers: Timers,
        clock: Clock,
        run: Run,
        settings: DelaySettings,
        floor_ms: int = 0,
    ) -> None:
        self._landing, self._state, self._buckets = landing, state, buckets
        self._timers, self._run = timers, run
        outcome_ms = settings.outcome_seconds * SECOND_MS
        self._time = time = BrokerTime(clock)
        time.start(max(floor_ms, buckets.broker_ms))
        time.load(buckets.note)
        self._ledger = Ledger()
        targets = Targets()
        self._shore = window = Shore(HashedWheelTimer(settings.tick_ms, SLOTS), targets)
        self._gatherer = Gatherer(landing.log, buckets, targets)
        self._lines = target_queues = self._new_lines(destination, targets)
        self._judge = Judge(state, target_queues, destination, time, outcome_ms, lambda: self._keeper.floor)
        self._finder = Finder(landing.log, buckets)
        self._counting = counting = Counting(buckets, window)
        self._leaving = leaving = Leaving(window, target_queues, buckets, counting)
        self._pendings = Pendings(state, target_queues, leaving.late)
        self._keeper = self._new_keeper(outcome_ms)
        self._figures = Figures(self._ledger, window, target_queues, buckets, counting, leaving, timers)
        self._firing = self._new_firing(settings.tick_ms)
        self._changing = self._new_changing()
        self._listing, self._asking = Listing(buckets), Asking(run)
        self._expected: dict[int, bool] = {}
        """By ticket: whether the arrival log was already stopped when the due times were assigned."""
        self._stopped: Callable[[], None] | None = None

    def _new_lines(self, destination: Destination, targets: Targets) -> Lines:
        state = self._state
        return Lines(
            self._buckets.store_id,
            destination=destination,
            timers=self._timers,
            run=self._run,
            time=self._time,
            targets=targets,
            fetching=Fetching(self._landing.log, self._buckets),
            cancelled=lambda: state.cancelled,
            doubtful=self._ledger.doubtful,
            postpone=lambda queue, part: self._changing.postpone(queue, part),
        )

    def _new_keeper(self, outcome_ms: int) -> Keeper:
        non_durable = self._ledger
        return Keeper(
            landing=self._landing,
            state=self._state,
            pendings=self._pendings,
            buckets=self._buckets,
            gatherer=self._gatherer,
            shore=self._shore,
            lines=self._lines,
            time=self._time,
            timers=self._timers,
            run=self._run,
            limit=lambda: non_durable.limit,
            lowest=lambda: non_durable.lowest,
            outcome_ms=outcome_ms,
            counting=self._counting,
            leaving=self._leaving,
            moved=lambda: self._firing.look(),
        )

    def _new_firing(self, tick_ms: int) -> Firing:
        return Firing(
            figures=self._figures,
            landing=self._landing,
            ledger=self._ledger,
            shore=self._shore,
            lines=self._lines,
            keeper=self._keeper,
            time=self._time,
            timers=self._timers,
            tick_ms=tick_ms,
        )

    def _new_changing(self) -> Changing:
        scheduler = self._keeper
        return Changing(
            landing=self._landing,
            state=self._state,
            judge=self._judge,
            lines=self._lines,
            time=self._time,
            finder=self._finder,
            run=self._run,
            arriving=self,
            sure=lambda: scheduler.number,
            leaving=self._leaving,
        )

    # Clock

    def now_ms(self) -> int:
        """Return broker time in ms.

        It never decreases and is never below the due time of a fired message.
        """
        return self._time.now_ms()

    def taken_ms(self) -> int:
        """Return broker time rounded up, from which delays count: at most about 1 ms above `now_ms`."""
        return self._time.taken_ms()

    def ahead_ms(self) -> int:
        """Return by how many ms broker time is ahead of the wall clock.

        `effective_due_times` and the arrival header need the value, so that messages for an absolute time can be
        recognised and rescheduled when the wall clock steps.
        """
        return self._time.ahead_ms()

    # Arrivals

    def expect(self, due_min: int) -> int:
        """Announce an append of messages that are due at `due_min` or later; return its ticket.

        Nothing due at or after `due_min` fires until `append_written` or `append_failed` is called with the ticket.
        Call it without returning to the event loop after `now_ms()`, which the due times were computed from.
        """
        ticket = self._ledger.expect(due_min)
        self._expected[ticket] = self._landing.log.stopped is not None
        return ticket

    def arrived(self, ticket: int, note: Note, records: Buffer, answer: Appended) -> None:
        """Record that the batch is written to the arrival log, not yet durable.

        `answer` is the result of the append of the records that follow the header. `records` is used only during the
        call.
        """
        first, dues = answer.first_ordinal, note.dues
        del self._expected[ticket]
        if ABSOLUTE_FLAG in dues.absolute:
            self._time.note(first, note.ahead_ms)
        self._keeper.catch_up()
        rows = self._shore.near_of(note, records, answer, self._time.now_ms())
        count = note.records
        landed = (answer.end_offset, first + count, count, dues.low, dues.high, rows)
        self._ledger.land(Landed(ticket, note.log_id, *landed))
        self._figures.landed(count)
        self._firing.arrived(dues.low)

    def failed(self, ticket: int) -> None:
        """Record that the batch was not written.

        If the log has stopped, the outcome is unknown until the next start and the ticket stays open.
        """
        if self._landing.log.stopped is None or self._expected.get(ticket):
            self._ledger.failed(ticket)
            self._firing.look()
        self._expected.pop(ticket, None)

    def watch(self) -> None:
        """Schedule maintenance after an append without messages, to truncate the log."""
        self._firing.watch()

    def settle(self) -> None:
        """Process the arrivals that are durable now.

        Called when a cancel or reschedule became durable.
        """
        self._firing.settle()
        self.watch()

    # Requests

    def cancel(self, key: int, turn: Turn, done: Callable[[str | None, BaseException | None], None]) -> None:
        """Cancel a message.

        `done("cancelled" | "delivered" | "unknown", None)` is called once that is durable.

        `done(None, error)`: the result is unknown unless `error.outcome` says otherwise; the same call can be repeated
        to find out.
        """
        self._changing.cancel(key, turn, done)

    def reschedule(
        self,
        key: int,
        turn: Turn,
        wire_due: bytes,
        done: Callable[[Rescheduled | None, BaseException | None], None],
    ) -> None:
        """Assign a new due time to a pending message, in one append.

        `wire_due`: one word as `effective_due_times` expects it. Errors as for `cancel`.
        """
        self._changing.reschedule(key, turn, wire_due, done)

    def describe(
        self, key: int, turn: Turn, done: Callable[[Described | None, BaseException | None], None]
    ) -> None:
        """Report the state of a message; rescheduled messages are followed to their latest turn."""
        now = Turn(*self._state.rescheduled.latest(*turn))
        try:
            state = self._judge.state(key, now, self._landing.log.whole_end[1])
        except StorageStopped as error:
            return done(None, error)
        if state not in (PENDING, UNSURE):
            return done(Described(state, now), None)
        if now.number >= max(self._keeper.number, self._landing.log.end_ordinal):
            return done(
                None, DiskFull()
            )  # the message is in the log's tail, which is not durable for lack of space

        def found(record: bytes | None, error: BaseException | None) -> None:
            if error is not None:
                done(None, error)
            elif record is None:
                done(Described(UNKNOWN, now), None)
            else:
                done(Described(PENDING, now, pending_of(key, now, record)), None)

        self._run(partial(self._finder.record, key, now), found)

    def list(self, query: Query, done: Callable[[Listed | None, BaseException | None], None]) -> None:
        """List pending messages in the order of their turns."""
        self._asking.after(
            self._when_spilled, lambda: partial(self._listing.list, query, self._pendings.now()), done
        )

    def histogram(
        self,
        edges: Sequence[int],
        keys: Callable[[int], bool] | None,
        done: Callable[[Histogram | None, BaseException | None], None],
    ) -> None:
        """Count pending messages between each two neighbours of `edges`; `keys` as in `ListQuery`."""

        def work() -> Callable[[], Histogram]:
            pending, settled = self._pendings.now(), self._shore.fires_below
            return partial(self._listing.histogram, edges, keys, pending, settled)

        self._asking.after(self._when_spilled, work, done)

    def _when_spilled(self, then: Callable[[BaseException | None], None]) -> None:
        def forced(error: BaseException | None) -> None:
            if error is not None:
                return then(error)
            self._firing.settle()
            self._keeper.when_spilled(then)

        self._landing.when_forced(self._landing.log.end_offset, forced)

    # Metrics

    @property
    def pending(self) -> int:
        """Number of pending messages; changes of the last moments may be missing."""
        return self._figures.pending

    @property
    def pending_bytes(self) -> int:
        """Approximate bytes on disk of the pending messages."""
        return self._figures.size_bytes + self._keeper.unspilled_bytes

    def status(self) -> dict[str, Any]:
        """Return the state of the queue for operators."""
        queues, now = self._lines, self._time.now_ms()
        parked = [(queues.name(queue.key), queue.parked) for queue in queues.all() if queue.parked]
        return {
            "pending": self.pending,
            "size_bytes": self.pending_bytes,
            "near": self._shore.wheel.count,
            "next_due_ms": self._figures.next_due,
            "now_ms": now,
            "ahead_ms": self._time.off_ms(),
            "horizon_ms": self._shore.horizon,
            "held": sum([queue.waiting for queue in queues.all() if queue.parked]),
            "behind": queues.behind_count,
            "waits_for": parked,
            "dropped": queues.dropped + self._counting.dropped,
            "damaged": queues.damaged,
            "fired": queues.fired_count,
            "lateness": queues.lateness.status(),
            "wheel": self._shore.wheel.load(),
            "stopped": self._buckets.stopped or "",
        }

    # Life cycle

    def recover(self, done: Callable[[BaseException | None], None]) -> None:
        """Find the messages that are pending since the checkpoint.

        Fires nothing; partitions are open.
        """
        log, buckets = self._landing.log, self._buckets
        end, number = log.whole_end, max(log.end_ordinal, buckets.spilled_number)
        offset = max(
            log.forced_offset, buckets.spilled_offset
        )  # the log may underestimate its durable offset

        def found(result: Arrived | None, error: BaseException | None) -> None:
            if result is None:
                return done(error or RuntimeError("a read of the arrival log ended without a result"))
            self._keeper.recover(result, offset, number, whole=offset == end[0])
            if offset < end[0]:
                # The tail waits for space to become durable and may still be lost: nothing fires until that is decided.
                self._firing.wait_for_tail(offset, end)
            done(None)

        pending = self._pendings.now()
        self._run(partial(self._gatherer.arrived, buckets.spilled_offset, offset, pending), found)

    def start(self) -> None:
        """Start firing."""
        self._counting.want(self._buckets.leaves, False)
        self._firing.start()

    @property
    def due(self) -> bool:
        """Whether `write` has work."""
        return self._lines.due or self._changing.due

    def write(self) -> bool:
        """Send appends to the targets that can accept one; return whether there was anything to do."""
        busy = self._changing.write()
        busy = self._lines.write() or busy
        if self._firing.started and self._keeper.is_hungry:
            self._keeper.look()
            self._firing.look()
        self._try_stop()
        return busy

    def resumed(self, key: int) -> None:
        """Handle that a target, or the arrival log (`ARRIVALS_KEY`), accepts writes again."""
        if key != ARRIVALS_KEY:
            self._lines.resumed(key)

    def topic_gone(self, incarnation: int) -> None:
        """Drop and count the messages for the partitions of a deleted topic."""
        self._lines.topic_gone(incarnation)

        def look(error: BaseException | None) -> None:
            self._lines.dropped += self._shore.topic_gone(incarnation)
            self._counting.want(self._buckets.leaves, False)
            self._keeper.look()

        self._when_spilled(look)

    def stop(self, done: Callable[[], None]) -> None:
        """Stop firing and call `done()` when all work in progress has ended."""
        self._stopped = done
        self._firing.stop()
        self._lines.stop()
        self._keeper.stop(self._try_stop)

    def _try_stop(self) -> None:
        busy = self._keeper.busy or self._changing.due or not self._changing.idle
        if self._stopped is None or busy or not self._lines.idle:
            return
        done, self._stopped = self._stopped, None
        done()
