"""Requests that read much, one after the other: each may take the columns of a whole bucket into memory."""

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
    """See the module. One owner's thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: deque[Callable[[], None]] = deque()
        """The first is under way."""

    def put(
        self, work: Callable[[], Callable[[], Any]], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """`work()` when it is its turn; what that answers runs in a worker, then `done`."""
        self._waiting.append(partial(self._begin, work, done))
        if len(self._waiting) == 1:
            self._waiting[0]()

    def after(
        self,
        first: Callable[[Callable[[BaseException | None], None]], None],
        work: Callable[[], Callable[[], Any]],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """The same once `first` tells that it is done; an error of it is the answer."""
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
"""Of the wheel: with ticks of 10 ms a turn takes 82 s, about as far as the horizon is ever ahead."""
SECOND_MS: Final = 1000


class DelayQueue:
    """The delay queue, as the broker drives it: takes what arrived, fires what is due, answers about what waits.

    It guarantees: no message fires before it is due, each fires once, those of one partition in the order of their
    turns (due, number), and none before its arrival is on the disk. Whoever cancels gets one exact answer.

    All calls come from the owner's thread, all callbacks in it, at once or later.

    In the life of a broker: made, `recover(done)`, then `start()`; in each turn, before partitions write, `write()`
    while `due`; at the end `stop(done)`. `floor_ms`: the highest due that any partition has applied.
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
        self._shore = shore = Shore(HashedWheelTimer(settings.tick_ms, SLOTS), targets)
        self._gatherer = Gatherer(landing.log, buckets, targets)
        self._lines = lines = self._new_lines(destination, targets)
        self._judge = Judge(state, lines, destination, time, outcome_ms, lambda: self._keeper.floor)
        self._finder = Finder(landing.log, buckets)
        self._counting = counting = Counting(buckets, shore)
        self._leaving = leaving = Leaving(shore, lines, buckets, counting)
        self._pendings = Pendings(state, lines, leaving.late)
        self._keeper = self._new_keeper(outcome_ms)
        self._figures = Figures(self._ledger, shore, lines, buckets, counting, leaving, timers)
        self._firing = self._new_firing(settings.tick_ms)
        self._changing = self._new_changing()
        self._listing, self._asking = Listing(buckets), Asking(run)
        self._expected: dict[int, bool] = {}
        """By ticket: whether the arrivals took nothing any more when dues were given."""
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
            postpone=lambda line, part: self._changing.postpone(line, part),
        )

    def _new_keeper(self, outcome_ms: int) -> Keeper:
        ledger = self._ledger
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
            limit=lambda: ledger.limit,
            lowest=lambda: ledger.lowest,
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
        keeper = self._keeper
        return Changing(
            landing=self._landing,
            state=self._state,
            judge=self._judge,
            lines=self._lines,
            time=self._time,
            finder=self._finder,
            run=self._run,
            arriving=self,
            sure=lambda: keeper.number,
            leaving=self._leaving,
        )

    # Time

    def now_ms(self) -> int:
        """Broker time: never goes back, and is never below anything that fired."""
        return self._time.now_ms()

    def taken_ms(self) -> int:
        """Broker time rounded up, from which delays count: hardly more than a millisecond above `now_ms`."""
        return self._time.taken_ms()

    def ahead_ms(self) -> int:
        """By how much broker time is ahead of the wall clock, as `dues.effective` is to be told it and the note to say
        it, so that messages for a time of the wall clock are known again when that steps."""
        return self._time.ahead_ms()

    # Arriving

    def expect(self, due_min: int) -> int:
        """Dues were given to messages that are about to be written, none below `due_min`: until `arrived` or `failed`
        with the ticket that is answered, nothing from there on fires. In the same call as `now_ms()` was asked.
        """
        ticket = self._ledger.expect(due_min)
        self._expected[ticket] = self._landing.log.stopped is not None
        return ticket

    def arrived(self, ticket: int, note: Note, records: Buffer, answer: Appended) -> None:
        """They are written to the arrivals, not forced yet. `answer` is that of the records behind the note;
        `records` need stay only during the call."""
        first, dues = answer.first_ordinal, note.dues
        del self._expected[ticket]
        if ABSOLUTE_FLAG in dues.absolute:
            self._time.note(first, note.ahead_ms)
        self._keeper.catch_up()
        near = self._shore.near_of(note, records, answer, self._time.now_ms())
        count = note.records
        landed = (answer.end_offset, first + count, count, dues.low, dues.high, near)
        self._ledger.land(Landed(ticket, note.log_id, *landed))
        self._figures.landed(count)
        self._firing.arrived(dues.low)

    def failed(self, ticket: int) -> None:
        """They were not written, or nobody knows: then the log is stopped, and a start finds out."""
        if self._landing.log.stopped is None or self._expected.get(ticket):
            self._ledger.failed(ticket)
            self._firing.look()
        self._expected.pop(ticket, None)

    def watch(self) -> None:
        """Something else was written to the arrivals: it must not stay there for ever."""
        self._firing.watch()

    def settle(self) -> None:
        """Something was changed, on the disk: what arrived before it is taken over."""
        self._firing.settle()
        self.watch()

    # Asking

    def cancel(self, key: int, turn: Turn, done: Callable[[str | None, BaseException | None], None]) -> None:
        """`done("cancelled" | "delivered" | "unknown", None)` once that is on the disk, or `done(None, error)`: then
        nobody knows, unless the error's outcome says otherwise, and the same call finds out."""
        self._changing.cancel(key, turn, done)

    def reschedule(
        self,
        key: int,
        turn: Turn,
        wire_due: bytes,
        done: Callable[[Rescheduled | None, BaseException | None], None],
    ) -> None:
        """Another due (one word as `dues.effective` takes them) for a message that waits, in one append; errors as for
        `cancel`."""
        self._changing.reschedule(key, turn, wire_due, done)

    def describe(
        self, key: int, turn: Turn, done: Callable[[Described | None, BaseException | None], None]
    ) -> None:
        """What became of a message, or where it waits now: followed from turn to turn where it was given others."""
        now = Turn(*self._state.rescheduled.latest(*turn))
        try:
            state = self._judge.state(key, now, self._landing.log.whole_end[1])
        except StorageStopped as error:
            return done(None, error)
        if state not in (PENDING, UNSURE):
            return done(Described(state, now), None)
        if now.number >= max(self._keeper.number, self._landing.log.end_ordinal):
            return done(None, DiskFull())  # it waits for space, as the log does

        def found(record: bytes | None, error: BaseException | None) -> None:
            if error is not None:
                done(None, error)
            elif record is None:
                done(Described(UNKNOWN, now), None)
            else:
                done(Described(PENDING, now, pending_of(key, now, record)), None)

        self._run(partial(self._finder.record, key, now), found)

    def list(self, query: Query, done: Callable[[Listed | None, BaseException | None], None]) -> None:
        """Messages that wait, in the order of their turns."""
        self._asking.after(
            self._when_spilled, lambda: partial(self._listing.list, query, self._pendings.now()), done
        )

    def histogram(
        self,
        edges: Sequence[int],
        keys: Callable[[int], bool] | None,
        done: Callable[[Histogram | None, BaseException | None], None],
    ) -> None:
        """How many wait between each of `edges` and the next; `keys` as in `Query`."""

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

    # Figures

    @property
    def pending(self) -> int:
        """How many messages wait: exact but for what changed in the last moments."""
        return self._figures.pending

    @property
    def pending_bytes(self) -> int:
        """What they take on the disk, near enough."""
        return self._figures.size_bytes + self._keeper.unspilled_bytes

    def status(self) -> dict[str, Any]:
        """How it is, for people."""
        lines, now = self._lines, self._time.now_ms()
        parked = [(lines.name(line.key), line.parked) for line in lines.all() if line.parked]
        return {
            "pending": self.pending,
            "size_bytes": self.pending_bytes,
            "near": self._shore.wheel.count,
            "next_due_ms": self._figures.next_due,
            "now_ms": now,
            "ahead_ms": self._time.off_ms(),
            "horizon_ms": self._shore.horizon,
            "held": sum([line.waiting for line in lines.all() if line.parked]),
            "behind": lines.behind_count,
            "waits_for": parked,
            "dropped": lines.dropped + self._counting.dropped,
            "damaged": lines.damaged,
            "fired": lines.fired_count,
            "lateness": lines.lateness.status(),
            "wheel": self._shore.wheel.load(),
            "stopped": self._buckets.stopped or "",
        }

    # The broker's life

    def recover(self, done: Callable[[BaseException | None], None]) -> None:
        """Finds what is pending since the checkpoint. Fires nothing yet; the partitions are open."""
        log, buckets = self._landing.log, self._buckets
        end, number = log.whole_end, max(log.end_ordinal, buckets.spilled_number)
        offset = max(log.forced_offset, buckets.spilled_offset)  # the log may not know all that is forced

        def found(result: Arrived | None, error: BaseException | None) -> None:
            if result is None:
                return done(error or RuntimeError("a read of the arrivals ended without an answer"))
            self._keeper.recover(result, offset, number, whole=offset == end[0])
            if offset < end[0]:
                # What waits for space to be made durable may be lost yet: until it is known, nothing fires.
                self._firing.wait_for_tail(offset, end)
            done(None)

        pending = self._pendings.now()
        self._run(partial(self._gatherer.arrived, buckets.spilled_offset, offset, pending), found)

    def start(self) -> None:
        """From now on what is due fires."""
        self._counting.want(self._buckets.leaves, False)
        self._firing.start()

    @property
    def due(self) -> bool:
        """Whether `write` has something to do."""
        return self._lines.due or self._changing.due

    def write(self) -> bool:
        """Hands effects to the targets that can take one; whether there was anything to do."""
        busy = self._changing.write()
        busy = self._lines.write() or busy
        if self._firing.started and self._keeper.is_hungry:
            self._keeper.look()
            self._firing.look()
        self._try_stop()
        return busy

    def resumed(self, key: int) -> None:
        """A target, or the arrivals (`ARRIVALS_KEY`), takes writes again."""
        if key != ARRIVALS_KEY:
            self._lines.resumed(key)

    def topic_gone(self, incarnation: int) -> None:
        """Messages for its partitions have nobody to go to any more: they are dropped and counted."""
        self._lines.topic_gone(incarnation)

        def look(error: BaseException | None) -> None:
            self._lines.dropped += self._shore.topic_gone(incarnation)
            self._counting.want(self._buckets.leaves, False)
            self._keeper.look()

        self._when_spilled(look)

    def stop(self, done: Callable[[], None]) -> None:
        """Fires nothing more, waits for what is under way: `done()`."""
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
