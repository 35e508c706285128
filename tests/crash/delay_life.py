"""A seeded life of a broker with delayed messages, with a moment kept after every call that changed the disk.

Whole engine, slow workers: file work ends in any order with what clients ask meanwhile. Sends, cancels, new times and
transactions; hours that pass; clean stops and kills. What was known at a boundary is kept with it: see `Known`.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from journal.testing import Moment, SimulatedClock, SimulatedDisk
from tests.broker.helpers import Answer, Broker, Stream, after, at, handles
from tests.crash.delay_points import Points
from tfmq.broker import startup
from tfmq.delay import memory_window, record_reader, storage_scheduler, target_queue
from tfmq.delay.buckets import store
from tfmq.protocol.delayed_handle import parse_handle

Place = tuple[str, int]
PLACES: tuple[Place, ...] = (("orders", 0), ("orders", 1), ("bills", 0))
SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
DELAYS = (0, 1, 10, 400, 5 * SECOND, 30 * SECOND, 5 * MINUTE, 20 * MINUTE, 90 * MINUTE, 5 * HOUR, 4 * DAY)
WAITS = (0.001, 0.01, 0.4, 4, 30, 300, 3600, 30_000)
TEXT_BYTES = 12
"""The shortest payload: each message of a life has a length of its own, by which a list's rows are known again."""
ROLLED_BYTES = 2600
"""The shortest payload of a life in which the arrivals roll: some twenty fill a segment."""
SEGMENT_BYTES = 1 << 16
OUTCOME_SECONDS = 100 * 86_400
"""Longer than a life: the outcome of a message is never forgotten."""
HEADER_BYTES = 20


class Broken(AssertionError):
    """A promise that is not kept."""


def require(kept: bool, what: str) -> None:
    if not kept:
        raise Broken(what)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits, retreats, rescans, rolls, and lines that give up rows, with the few messages that a life has."""
    monkeypatch.setattr(store, "SPLIT_MESSAGES", 12)
    monkeypatch.setattr(memory_window, "SPLIT_ROWS", 12)
    monkeypatch.setattr(memory_window, "MEMORY_ROWS_MAX", 24)
    monkeypatch.setattr(memory_window, "LOAD_ROWS_MAX", 12)
    monkeypatch.setattr(memory_window, "CATCH_UP_ROWS", 4)
    monkeypatch.setattr(memory_window, "RESCAN_BYTES_MAX", 600)
    monkeypatch.setattr(memory_window, "SPILL_BYTES", 4000)
    monkeypatch.setattr(target_queue, "QUEUE_ROWS_MAX", 5)
    monkeypatch.setattr(storage_scheduler, "QUEUE_ROWS_MAX", 5)
    monkeypatch.setattr(target_queue, "BLOCKED_ROWS_MAX", 8)
    monkeypatch.setattr(record_reader, "READ_AHEAD_ROWS_MIN", 3)
    monkeypatch.setattr(record_reader, "READ_AHEAD_BYTES", 2000)
    monkeypatch.setattr(startup, "_segment_bytes", lambda house: SEGMENT_BYTES)


@dataclass
class Message:
    """What is known of one message.

    `low`: it may not be delivered before. `turn`: its (due, number) if that is sure. `must`: it was reported that it is
    there; without, it may be. `doubt`: a cancel or a new time has no answer.
    """

    payload: bytes
    place: Place
    low: int
    transaction: int = 0
    delayed: bool = True
    must: bool = False
    doubt: bool = False
    cancelled: bool = False
    delivered: bool = False
    handle: str = ""
    turn: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        return len(self.payload) + HEADER_BYTES


@dataclass
class Step:
    """A request. `messages`: indices of those that it is about; `ask(broker)` asks, also once more."""

    name: str
    messages: list[int]
    ask: Callable[..., Answer]
    answer: Answer
    before: tuple[int, tuple[int, int] | None] | None = None
    """Of a cancel or a new time: low and turn of its message as they were."""


class Known(NamedTuple):
    """What a client knows: all messages, and the requests that had no answer."""

    messages: tuple[Message, ...]
    lost: tuple[Step, ...]


class Boundary(NamedTuple):
    number: int
    points: tuple[str, ...]
    after: str
    moment: Moment
    known: Known
    wall_ms: int


class LifeClock(SimulatedClock):
    """It counts whole microseconds, so that no rounding makes broker times of two lives differ."""

    def __init__(self, wall_ms: int) -> None:
        super().__init__(wall_ms)
        self._start_ms, self._passed = wall_ms, 0

    def monotonic(self) -> float:
        return 1000 + self._passed / 1e6

    def wall_ms(self) -> int:
        return self.wall_us() // 1000

    def wall_us(self) -> int:
        return self._start_ms * 1000 + self._passed

    def advance(self, seconds: float) -> None:
        """At least so long, where it is no mere rounding; and not nothing."""
        self._passed += max(seconds > 0, math.ceil(seconds * 1e6 - 1e-3))


def now_of(broker: Broker) -> int:
    return int(broker.engine.broker.delay_commands.queue.now_ms())


def started(disk: SimulatedDisk, clock: SimulatedClock, like: Broker, *, queued: bool) -> Broker:
    """A broker of that configuration on another disk; its randomness goes on from elsewhere."""
    broker = Broker(disk, clock, start=False, **like.values)
    broker.random.count = like.random.count + 1_000_000
    broker.engine.start()
    broker.queued = queued
    return broker


@dataclass
class Client:
    """Asks, and notes the reply."""

    messages: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def known(self) -> Known:
        return Known(tuple(copy.copy(each) for each in self.messages), tuple(self.steps))

    def recall(self, known: Known) -> None:
        """Knows no more than that."""
        self.messages = [copy.copy(each) for each in known.messages]
        self.steps = []

    def look(self) -> None:
        """Takes in the answers."""
        for step in [step for step in self.steps if step.answer.done]:
            self.steps.remove(step)
            self.take(step)

    def take(self, step: Step) -> None:
        answer = step.answer
        require(answer.code == "ok", f"{step.name} of {step.messages}: {answer.failure!r}")
        chosen = [self.messages[index] for index in step.messages]
        getattr(self, f"_{step.name}")(step, chosen, answer)

    def _send(self, step: Step, chosen: list[Message], answer: Answer) -> None:
        names: Sequence[str] = handles(answer) if answer.delayed is not None else [""] * len(chosen)
        for message, handle in zip(chosen, names, strict=True):
            message.must = True
            self._name(message, handle)

    def _transact(self, step: Step, chosen: list[Message], answer: Answer) -> None:
        require(answer.state in ("committed", "applying"), f"a transaction is {answer.state}")
        for message in chosen:
            message.must = answer.state == "committed" or message.must

    def _cancel(self, step: Step, chosen: list[Message], answer: Answer) -> None:
        (message,) = chosen
        require(answer.state in ("cancelled", "delivered"), f"a cancel of one that is there: {answer.state}")
        require(not (message.cancelled or message.delivered) or message.cancelled == (answer.state == "cancelled"),
                f"{message.payload!r} is {answer.state} now")  # fmt: skip
        self._end(message, answer.state)

    def _reschedule(self, step: Step, chosen: list[Message], answer: Answer) -> None:
        (message,) = chosen
        if answer.state == "rescheduled":
            require(not message.cancelled, f"{message.payload!r} was cancelled, and is moved")
            self._name(message, answer.handle)
            message.low = parse_handle(answer.handle).due
            message.doubt = False
            return
        require(answer.state in ("cancelled", "delivered"), f"a new time for one that is there: {answer.state}")
        self._end(message, answer.state)

    @staticmethod
    def _end(message: Message, state: str) -> None:
        message.cancelled, message.delivered, message.doubt = (state == "cancelled", state == "delivered", False)

    @staticmethod
    def _name(message: Message, handle: str) -> None:
        if handle:
            found = parse_handle(handle)
            message.handle, message.turn = handle, (found.due, found.number)
            require(found.due >= message.low, f"{message.payload!r} is due at {found.due}, before {message.low}")


class Life:
    """`run` lives it; `boundaries` are collected unless configured otherwise."""

    def __init__(self, generator: random.Random) -> None:
        self.random = generator
        self.text_bytes = generator.choice((TEXT_BYTES, ROLLED_BYTES))
        self.clock = LifeClock(1_700_000_000_000 + generator.randrange(1 << 22))
        self.broker = Broker(SimulatedDisk(), self.clock, queued=True, delay__outcome_seconds=OUTCOME_SECONDS)
        self.disk = self.broker.disk
        """Already the next one while a broker starts on it."""
        self.client = Client()
        self.boundaries: list[Boundary] = []
        self.points = Points()
        self.broker.work()
        self.broker.create("orders", 2)
        self.broker.create("bills", 1)
        self.producer = Stream(self.broker.lease())
        self.transactions = Stream(self.broker.lease())
        self.plain = {place: Stream(self.broker.lease()) for place in PLACES}
        self.action = "start"
        self.count = 0
        self.broker.disk.after = self._bound

    def run(self, actions: int) -> list[Boundary]:
        table: list[tuple[int, Callable[[], None]]] = [
            (10, self.send), (3, self.crowd), (2, self.transact), (8, self.cancel), (8, self.reschedule),
            (9, self.wait), (6, self.work), (4, self.work_some), (1, self.restart), (1, self.kill),
        ]  # fmt: skip
        weights = [weight for weight, _ in table]
        for _ in range(actions):
            action = self.random.choices(table, weights)[0][1]
            self.action = action.__name__
            action()
            self.client.look()
        self.work()
        self.broker.disk.after = None
        return self.boundaries

    # Watching

    def _bound(self, kind: str, path: str) -> None:
        self.client.look()
        points = self.points.of(self.broker, self.disk, kind, path)
        self.boundaries.append(
            Boundary(
                len(self.boundaries),
                points,
                f"{self.action}: {kind} {path}",
                Moment(self.disk),
                self.client.known(),
                self.clock.wall_ms(),
            )
        )

    # What may happen

    def _messages(self, count: int, place: Place, waits: Sequence[int | None]) -> list[int]:
        """New ones, and what is surely known of them before any answer: when they were asked for."""
        first = len(self.client.messages)
        for wait in waits:
            index = len(self.client.messages)
            text = b"%d." % index
            low = now_of(self.broker) + (wait or 0)
            self.client.messages.append(
                Message(text.ljust(self.text_bytes + index, b"."), place, low, delayed=wait is not None)
            )
        return list(range(first, first + count))

    def send(self) -> None:
        self._send([self.random.choice(DELAYS) + self.random.randrange(12) for _ in range(self.random.randrange(1, 4))])

    def crowd(self) -> None:
        """Many in one place of time: a bucket gets too much, the wheel too."""
        wait = self.random.choice((3 * SECOND, 8 * MINUTE, 8 * MINUTE, 3 * HOUR))
        self._send([wait + self.random.randrange(2 * SECOND) for _ in range(self.random.randrange(8, 14))])

    def _send(self, waits: list[int]) -> None:
        place = self.random.choice(PLACES)
        chosen = self._messages(len(waits), place, waits)
        now = now_of(self.broker)
        absolute = self.random.random() < 0.3
        wire = b"".join(at(now + wait) if absolute else after(wait) for wait in waits)
        payloads = [self.client.messages[index].payload for index in chosen]
        sequence, (topic, partition), producer = self.producer.take(len(chosen)), place, self.producer.id

        def ask(broker: Broker, turn: bool = True) -> Answer:
            return broker.delay(producer, sequence, payloads, due=wire, topic=topic, partition=partition, turn=turn)

        self._put("send", chosen, ask)

    def _put(
        self,
        name: str,
        chosen: list[int],
        ask: Callable[..., Answer],
        before: tuple[int, tuple[int, int] | None] | None = None,
    ) -> Step:
        """The step is known before it is asked: the broker may write at once."""
        step = Step(name, chosen, ask, Answer(0, None), before)
        self.client.steps.append(step)
        step.answer = ask(self.broker, turn=False)
        if self.random.random() < 0.8:
            self.broker.engine.broker.end_turn()
        return step

    def transact(self) -> None:
        """A message now and one later, both or none; one after the other, as in one stream they are."""
        if any(step.name == "transact" for step in self.client.steps):
            return
        place, other = self.random.sample(PLACES, 2)
        wait = self.random.choice(DELAYS)
        (now,) = self._messages(1, place, [None])
        (later,) = self._messages(1, other, [wait])
        for index in (now, later):
            self.client.messages[index].transaction = later
        texts = [self.client.messages[index].payload for index in (now, later)]
        request, body = self.broker.transaction(
            self.transactions, [(*place, texts[:1]), (*other, texts[1:], after(wait))]
        )

        def ask(broker: Broker, turn: bool = True) -> Answer:
            return broker.ask(request, body, turn=turn)

        self._put("transact", [now, later], ask)

    def _any(self) -> int | None:
        """One that has a handle, and about which nothing is asked."""
        asked = {index for step in self.client.steps for index in step.messages}
        found = [i for i, each in enumerate(self.client.messages) if each.handle and i not in asked]
        late = [i for i in found if not (self.client.messages[i].delivered or self.client.messages[i].cancelled)]
        return self.random.choice(late if late and self.random.random() < 0.9 else found) if found else None

    def cancel(self) -> None:
        index = self._any()
        if index is None:
            return
        message = self.client.messages[index]
        before = message.low, message.turn
        message.doubt = not (message.cancelled or message.delivered)
        handle = message.handle

        def ask(broker: Broker, turn: bool = True) -> Answer:
            return broker.cancel_delayed(handle, turn=turn)

        self._put("cancel", [index], ask, before)

    def reschedule(self) -> None:
        index = self._any()
        if index is None:
            return
        message, wait = self.client.messages[index], self.random.choice(DELAYS)
        before = message.low, message.turn
        if not (message.cancelled or message.delivered):
            message.doubt, message.turn = True, None
            message.low = min(message.low, now_of(self.broker) + wait)
        handle = message.handle

        def ask(broker: Broker, turn: bool = True) -> Answer:
            return broker.reschedule(handle, after(wait), turn=turn)

        self._put("reschedule", [index], ask, before)

    def wait(self) -> None:
        """Time goes on, with workers that do some of their work, or none."""
        pass_time(
            self.broker, self.random.choice(WAITS) * self.random.random(), self.random.choice((0, 0.5, 1)), self.random
        )

    def work(self) -> None:
        self.broker.engine.broker.end_turn()
        self.broker.work()

    def work_some(self) -> None:
        """Some jobs, in any order."""
        for _ in range(self.random.randrange(4)):
            if self.broker.jobs:
                self.broker.step(self.random.randrange(len(self.broker.jobs)))

    def restart(self) -> None:
        self.work()
        self.client.look()
        self.broker.stop()
        self.client.look()
        self._go_on(self.broker.disk)

    def kill(self) -> None:
        self.broker.disk.after = None
        self._go_on(self.broker.disk.crash(keep="everything"))

    def _go_on(self, disk: SimulatedDisk) -> None:
        """The next broker; who had no answer asks again."""
        self.broker.disk.after = None
        for step in self.client.steps:
            step.answer = Answer(0, None)
        disk.after, self.disk = self._bound, disk
        self.broker = started(disk, self.clock, self.broker, queued=True)
        for step in list(self.client.steps):  # answers are taken in meanwhile
            step.answer = step.ask(self.broker)
        self.work()


def pass_time(broker: Broker, seconds: float, share: float, generator: random.Random) -> None:
    """From one firm timer to the next; at each, workers do their share of what they have to do."""
    house, end = broker.engine.broker, broker.clock.monotonic() + seconds
    while True:
        due = house.timers.next_not_deferrable()
        due = end if due is None or due > end else due
        broker.clock.advance(max(0.0, due - broker.clock.monotonic()))
        broker.advance(0)
        while broker.jobs and generator.random() < share:
            broker.step(generator.randrange(len(broker.jobs)))
        if due == end:
            return
