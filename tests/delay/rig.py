"""A delay queue with its real arrivals and buckets on a simulated disk, over targets in memory, and verbs for tests.

`Targets` is a `Destination` that can stop, fill up, lose what was not forced and forget a topic. `Rig` owns disk,
clock, forces and workers: inline, or queued with `queued=True` (then `work()` does the jobs). `send` and what fires are
noted, so that `check` can hold everything against everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from journal.log.log import Log
from journal.record.batch import Appended, Batch
from journal.record.format import make_id, make_log_id, make_record
from journal.testing import SimulatedClock, SimulatedDisk
from tests.transaction.targets import Targets
from tfmq.broker.producer_state import ProducerState
from tfmq.broker.timers import Timers
from tfmq.delay.arrivals import header
from tfmq.delay.arrivals.log import LOG_ID, arrival_batches, arrival_options
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.delay_queue import DelayQueue
from tfmq.delay.due_time import RELATIVE, effective_due_times
from tfmq.delay.requests import Histogram, ListPage, ListQuery, MessageState, Turn
from tfmq.errors import NOT_DONE, StorageStopped

FOLDER = "/data/delay"
ARRIVALS = "/data/delay/arrivals"
ORDERS = make_log_id(16, 0)
BILLS = make_log_id(17, 0)
START_MS = 1_700_000_000_000
STORE_ID = 77


class Handle(NamedTuple):
    """One message that was sent."""

    key: int
    due: int
    number: int
    payload: bytes

    @property
    def turn(self) -> Turn:
        return Turn(self.due, self.number)


class Landing:
    """The arrivals' log with a queue that is written at the end of the turn."""

    def __init__(self, rig: Rig, log: Log) -> None:
        self.log = log
        self._rig = rig
        self._queue: deque[tuple[Callable[[], Sequence[Batch]], Callable[..., None]]] = deque()
        self._waiting: list[tuple[int, Callable[[BaseException | None], None]]] = []
        self.refuse: Exception | None = None
        self.automatic = True
        """Forces that are asked for take place at the turn's end."""

    def append(self, batches: Sequence[Batch], done: Callable[..., None]) -> None:
        self._queue.append((lambda: batches, done))

    def put(self, make: Callable[[], Sequence[Batch]], done: Callable[..., None]) -> None:
        self._queue.append((make, done))

    def when_forced(self, offset: int, waiter: Callable[[BaseException | None], None]) -> None:
        if offset <= self.log.forced_offset:
            waiter(None)
        else:
            self._waiting.append((offset, waiter))

    def truncate_before(self, offset: int, done: Callable[[Any, BaseException | None], None]) -> None:
        self._rig.run(lambda: self.log.truncate_before(offset), done)

    def write(self) -> bool:
        busy = bool(self._queue)
        while self._queue:
            make, done = self._queue.popleft()
            try:
                if self.refuse is not None:
                    raise self.refuse
                batches = make()
                work = self.log.before_append(sum(len(each.data) for each in batches))
                if work is not None:
                    work()
                answers: list[Appended] = self.log.append(batches)
            except Exception as error:
                done(None, error)
            else:
                done(answers, None)
        if self.automatic:
            busy = self.force() or busy
        return busy

    def force(self) -> bool:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return False
        error: BaseException | None = None
        if self.log.stopped is None:
            try:
                self.log.force()
            except Exception as failure:
                error = failure
        if self.log.stopped is not None:
            error = StorageStopped(reason=self.log.stopped, outcome=NOT_DONE)
        for offset, waiter in waiting:
            waiter(error if offset > self.log.forced_offset else None)
        return True


class Answer:
    """What `done` was called with, once."""

    def __init__(self) -> None:
        self.calls = 0
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, result: Any, error: BaseException | None) -> None:
        self.calls += 1
        assert self.calls == 1, "one answer for one request"
        self.result, self.error = result, error

    @property
    def known(self) -> Any:
        assert self.calls, "no answer yet"
        if self.error is not None:
            raise self.error
        return self.result


class Rig:
    """See the module."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        clock: SimulatedClock | None = None,
        targets: Targets | None = None,
        *,
        queued: bool = False,
        started: bool = True,
        tick_ms: int = 10,
        segment_bytes: int = 1 << 20,
        outcome_seconds: int = 86_400,
    ) -> None:
        self.clock = clock or SimulatedClock(wall_ms=START_MS)
        self.targets = targets or Targets()
        self.queued = queued
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = deque()
        self.sequences: dict[int, int] = {}
        self.fired: list[tuple[int, bytes]] = []
        """(broker time, payload) of everything that this life fired."""
        self.options = {"tick_ms": tick_ms, "segment_bytes": segment_bytes, "outcome_seconds": outcome_seconds}
        if disk is None:
            disk = SimulatedDisk()
            for folder in ("/data", FOLDER, ARRIVALS):
                disk.make_folder(folder)
            for folder in ("/", "/data", FOLDER):
                disk.force_folder(folder)
        self.disk = disk
        self.timers = Timers(self.clock)
        self._open(started)

    def _open(self, started: bool) -> None:
        disk, options = self.disk, self.options
        self.state = ArrivalLogState(
            ProducerState(remembered=5, entries_max=1000, idle_ms=7 * 86_400_000, leased_ms=lambda _: 0)
        )
        kept = arrival_options(1000, 10.0, options["segment_bytes"])
        log = Log.open(disk, ARRIVALS, log_id=LOG_ID, clock=self.clock, options=kept, state=self.state)
        if log.stopped is not None:
            log.resume()  # as the broker's start does
        self.landing = Landing(self, log)
        self.buckets = BucketStore.open(disk, FOLDER, new_id=lambda: STORE_ID, randomness=lambda size: b"\x07" * size)
        self.queue = DelayQueue(
            arrival_log=self.landing,
            state=self.state,
            buckets=self.buckets,
            apply_target=self.targets,
            timers=self.timers,
            clock=self.clock,
            run=self.run,
            tick_ms=options["tick_ms"],
            outcome_seconds=options["outcome_seconds"],
            mark_ready=lambda: None,
            floor_ms=max((t.applied[0] for t in self.targets.targets.values() if t.applied), default=0),
        )
        recovered: list[BaseException | None] = []
        self.queue.recover(recovered.append)
        self.work()
        assert recovered == [None], recovered
        if started:
            self.queue.start()
            self.turn()

    # Turns, workers, time

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.jobs.append((work, done))
        if not self.queued:
            self.work()

    def step(self) -> bool:
        """One job of a worker."""
        if not self.jobs:
            return False
        work, done = self.jobs.popleft()
        try:
            result = work()
        except Exception as error:
            done(None, error)
        else:
            done(result, None)
        return True

    def work(self) -> None:
        """All jobs, and what comes of them."""
        while self.step():
            pass

    def turn(self) -> None:
        """Everything that can happen now, but for queued jobs."""
        while True:
            self.timers.tick(self.clock.monotonic())
            busy = self.queue.write()
            busy = self.landing.write() or busy
            busy = self._write_targets() or busy
            due = self.timers.next_due()
            if not busy and (due is None or due > self.clock.monotonic()):
                return

    def _write_targets(self) -> bool:
        counts = {key: len(target.appends) for key, target in self.targets.targets.items()}
        busy = self.targets.write()
        now = self.queue.now_ms()
        for key, target in self.targets.targets.items():
            for append in target.appends[counts.get(key, 0) :]:
                if append.place is not None:
                    self.fired += [(now, payload) for _, payload in append.records]
        return busy

    def until(self, ms: int) -> None:
        """Time passes up to that broker time."""
        self.advance((ms - self.now_ms) / 1000)

    def advance(self, seconds: float) -> None:
        """Time passes, from timer to timer, or for long from firm timer to firm timer; jobs are done at once."""
        end = self.clock.monotonic() + seconds
        next_due = self.timers.next_due if seconds < 1000 else self.timers.next_not_deferrable
        while True:
            self.turn()
            self.work()
            self.turn()
            due = next_due()
            now = self.clock.monotonic()
            if due is None or due > end:
                break
            self.clock.advance(max(0.0, due - now))
        self.clock.advance(max(0.0, end - self.clock.monotonic()))
        self.turn()
        self.work()
        self.turn()

    def leap(self, seconds: float) -> None:
        """Time passes without a turn."""
        self.clock.advance(seconds)
        self.turn()
        self.work()
        self.turn()

    @property
    def now_ms(self) -> int:
        return self.queue.now_ms()

    # Sending

    def send(
        self,
        payloads: Sequence[bytes],
        delays: Sequence[int] | int = 1000,
        *,
        at: Sequence[int] | None = None,
        key: int = ORDERS,
        attribute: bytes | None = None,
        turn: bool = True,
    ) -> list[Handle]:
        """A batch with delays (ms), or with times `at`; its handles, known after `turn`."""
        handles: list[Handle] = []
        each = [delays] * len(payloads) if isinstance(delays, int) else delays
        words = list(at) if at is not None else [RELATIVE | delay for delay in each]
        wire = b"".join(word.to_bytes(8, "big") for word in words)
        producer = 1000 + key % 1000
        sequence = self.sequences.get(producer, 0)
        self.sequences[producer] = sequence + len(payloads)
        records = [
            make_record(payload, make_id(producer, sequence + n), 0, attribute) for n, payload in enumerate(payloads)
        ]
        body = b"".join(records)
        made: list[Any] = []

        def make() -> Sequence[Batch]:
            ahead = self.queue.ahead_ms()
            dues = effective_due_times(wire, len(payloads), self.queue.now_rounded_up_ms(), ahead)
            arrival = header.arrival_header(key, f"topic{key >> 24}", dues, len(body), ahead)
            made[:] = [arrival, self.queue.begin_append(dues.low)]
            return arrival_batches(made[0], body, (), producer, sequence, len(payloads))

        def done(answers: Sequence[Appended] | None, error: BaseException | None) -> None:
            if answers is None:
                if made:
                    self.queue.append_failed(made[1])
                return
            self.queue.append_written(made[1], made[0], body, answers[1])
            first = answers[1].first_ordinal
            for index, (due, payload) in enumerate(zip(made[0].dues.times, payloads, strict=True)):
                handles.append(Handle(key, due, first + index, payload))

        self.landing.put(make, done)
        if turn:
            self.turn()
        return handles

    # Asking

    def cancel(self, handle: Handle, *, turn: bool = True) -> Answer:
        return self._ask(turn, self.queue.cancel, handle.key, handle.turn)

    def reschedule(self, handle: Handle, delay: int, *, turn: bool = True) -> Answer:
        return self._ask(turn, self.queue.reschedule, handle.key, handle.turn, (RELATIVE | delay).to_bytes(8, "big"))

    def describe(self, handle: Handle) -> MessageState:
        found = self._ask(True, self.queue.describe, handle.key, handle.turn).known
        assert isinstance(found, MessageState)
        return found

    def listed(self, first: int = 0, end: int = 1 << 62, limit: int = 1000, **more: Any) -> ListPage:
        query = ListQuery(first, end, more.get("after"), limit, more.get("keys"), more.get("message_key"))
        found = self._ask(True, self.queue.list, query).known
        assert isinstance(found, ListPage)
        return found

    def histogram(self, edges: Sequence[int], keys: Callable[[int], bool] | None = None) -> Histogram:
        found = self._ask(True, self.queue.histogram, edges, keys).known
        assert isinstance(found, Histogram)
        return found

    def _ask(self, turn: bool, method: Callable[..., None], *args: Any) -> Answer:
        answer = Answer()
        method(*args, answer)
        if turn:
            self.turn()
            self.work()
            self.turn()
        return answer

    # Looking

    def visible(self, key: int = ORDERS) -> list[bytes]:
        return self.targets.payloads(key)

    def applied(self, key: int = ORDERS) -> list[tuple[int, int]]:
        return [each.place for each in self.targets.target(key).appends if each.place is not None]

    # Ends

    def stop(self) -> None:
        ended: list[bool] = []
        self.queue.stop(lambda: ended.append(True))
        self.work()
        self.turn()
        assert ended == [True]
        self.buckets.close(self.queue.now_ms())
        self.landing.log.close()

    def again(self, disk: SimulatedDisk, targets: Targets, **options: Any) -> Rig:
        rig = Rig(disk, self.clock, targets, **({"queued": self.queued} | self.options | options))
        rig.sequences = dict(self.sequences)
        return rig

    def kill(self, **options: Any) -> Rig:
        """kill -9, and the next life."""
        return self.again(self.disk.crash(keep="everything"), self.targets.killed(), **options)

    def power_cut(self, **options: Any) -> Rig:
        """Whatever was not forced is gone."""
        return self.again(self.disk.crash(keep="nothing"), self.targets.power_cut(), **options)
