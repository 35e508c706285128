"""The entry writer: order, the window, repeats, and what counts as stored."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tfmq.broker.timers import Timers
from tfmq.replication.entries import EntryKind, Position, decode_entry, entry_key
from tfmq.replication.entry_writer import WINDOW, EntryWriter
from tfmq.replication.errors import Deposed, StoreUnavailable
from tfmq.testing.clock import VirtualClock

HEARTBEAT = 2.0
START = Position(3, 1)


class RecordedBody(NamedTuple):
    parts: tuple[bytes, ...]
    operation_count: int
    size_bytes: int
    last_operation: int


class Rig:
    """An entry writer, a store in a dict, and calls of the store that a test completes in any order."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.timers = Timers(self.clock)
        self.objects: dict[str, bytes] = {}
        self.name = "memory"
        self.jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []
        self.closed: list[RecordedBody] = []
        self.deposed: list[Deposed] = []
        self.number = 0
        self.failing = 0
        """How many of the next puts fail; `took_effect`: although the object is stored."""
        self.took_effect = False
        self.error: Exception = StoreUnavailable("the network is down")
        self.writer = EntryWriter(
            self,  # type: ignore[arg-type]
            self,
            lambda work, done: self.jobs.append((work, done)),
            self.clock,
            self.timers.after,
            next_position=START,
            time_ms=0,
            stored_at=self.clock.monotonic(),
            heartbeat_seconds=HEARTBEAT,
            deposed=self.deposed.append,
        )
        self.writer.start()

    def take(self) -> list[RecordedBody]:
        closed, self.closed = self.closed, []
        return closed

    def put_new(self, key: str, data: bytes) -> bool:
        if self.failing:
            self.failing -= 1
            if self.took_effect:
                self.objects.setdefault(key, data)
            raise self.error
        if key in self.objects:
            return False
        self.objects[key] = data
        return True

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def record(self, data: bytes) -> int:
        """Record one operation, as a body of its own. Return its number."""
        self.number += 1
        self.closed.append(RecordedBody((data,), 1, len(data), self.number))
        self.writer.pump()
        return self.number

    def complete(self, index: int = 0) -> None:
        """Run one job, and deliver its result."""
        work, done = self.jobs.pop(index)
        try:
            result = work()
        except Exception as error:
            done(None, error)
        else:
            done(result, None)

    def complete_all(self) -> None:
        while self.jobs:
            self.complete()

    def advance(self, seconds: float) -> None:
        self.clock.move(self.clock.monotonic() + seconds)
        self.timers.tick(self.clock.monotonic())

    def bodies(self) -> list[bytes]:
        """The bodies of the entries in the store, from the first slot up to the first one that is missing."""
        found = []
        position = START
        while (data := self.objects.get(entry_key(position))) is not None:
            found.append(bytes(decode_entry(data, position).body))
            position = position._replace(slot=position.slot + 1)
        return found


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_nothing_counts_as_stored_before_all_entries_below_are(rig: Rig) -> None:
    told: list[int] = []
    for number in (rig.record(b"one"), rig.record(b"two"), rig.record(b"three")):
        rig.writer.when_stored(number, lambda number=number: told.append(number))  # type: ignore[misc]
    rig.complete(2)
    rig.complete(1)
    assert told == [] and rig.writer.stored_slot == START.slot - 1
    rig.complete(0)
    assert told == [1, 2, 3] and rig.writer.position == START._replace(slot=START.slot + 2)
    assert rig.bodies() == [b"one", b"two", b"three"] and rig.writer.unstored_bytes == 0


def test_what_is_stored_already_is_told_at_once(rig: Rig) -> None:
    number = rig.record(b"one")
    rig.complete()
    told: list[int] = []
    rig.writer.when_stored(number, lambda: told.append(1))
    assert told == [1]


def test_at_most_a_window_of_puts_is_under_way_and_the_rest_becomes_one_entry(rig: Rig) -> None:
    for number in range(WINDOW + 5):
        rig.record(b"%d," % number)
    assert len(rig.jobs) == WINDOW
    rig.complete_all()
    bodies = rig.bodies()
    assert len(bodies) < WINDOW + 5 and b"".join(bodies) == b"".join(b"%d," % n for n in range(WINDOW + 5))


@pytest.mark.parametrize("error", [StoreUnavailable("the network is down"), MemoryError("of the network")])
@pytest.mark.parametrize("took_effect", [False, True])
def test_a_put_that_failed_is_repeated_whether_or_not_it_had_an_effect(
    rig: Rig, took_effect: bool, error: Exception
) -> None:
    told: list[int] = []
    rig.failing, rig.took_effect, rig.error = 1, took_effect, error
    rig.writer.when_stored(rig.record(b"one"), lambda: told.append(1))
    rig.complete()
    assert told == [] and "network" in rig.writer.trouble and rig.deposed == []
    rig.advance(5)
    rig.complete_all()
    assert told == [1] and rig.bodies()[0] == b"one" and rig.writer.trouble == ""


def test_an_entry_of_another_server_ends_everything(rig: Rig) -> None:
    told: list[int] = []
    rig.objects[entry_key(START)] = b"a fence of another server"
    number = rig.record(b"one")
    rig.writer.when_stored(number, lambda: told.append(1))
    rig.record(b"two")
    rig.complete_all()
    assert len(rig.deposed) == 1 and told == []
    rig.record(b"three")
    rig.advance(10)
    assert rig.jobs == [], "a deposed server stores nothing"


def test_an_idle_writer_stores_an_empty_entry_now_and_then(rig: Rig) -> None:
    rig.advance(HEARTBEAT)
    rig.complete_all()
    assert rig.bodies() == [b""]
    rig.record(b"one")
    rig.complete_all()
    rig.advance(HEARTBEAT / 2)
    assert rig.jobs == [], "a body was stored in the meantime"
    rig.advance(HEARTBEAT / 2)
    rig.complete_all()
    assert rig.bodies() == [b"", b"one", b""]


def test_a_clock_that_is_set_back_makes_no_entry_older_than_the_one_before(rig: Rig) -> None:
    rig.record(b"one")
    rig.complete_all()
    before = rig.clock.wall_ms
    rig.clock.wall_ms = lambda: before() - 3_600_000  # type: ignore[method-assign]
    rig.record(b"two")
    rig.complete_all()
    second = START._replace(slot=START.slot + 1)
    times = [decode_entry(rig.objects[entry_key(each)], each).time_ms for each in (START, second)]
    assert times[0] <= times[1]


def test_other_kinds_of_entries_come_after_what_was_recorded_before(rig: Rig) -> None:
    for number in range(WINDOW + 2):
        rig.record(b"%d" % number)
    position = rig.writer.put(EntryKind.FENCE, b"fence")
    rig.complete_all()
    data = rig.objects[entry_key(position)]
    assert decode_entry(data, position).kind is EntryKind.FENCE and rig.bodies()[-1] == b"fence"


def test_a_mark_ends_an_entry_and_tells_its_position(rig: Rig) -> None:
    told: list[Position] = []
    for number in range(WINDOW):
        rig.record(b"%d," % number)
    rig.closed += [RecordedBody((b"a,",), 1, 2, 90), RecordedBody((b"b,",), 1, 2, 91)]
    rig.writer.mark(91, told.append)
    rig.writer.pump()
    rig.closed += [RecordedBody((b"c,",), 1, 2, 92)]
    rig.writer.pump()
    rig.complete_all()
    assert rig.bodies()[-2:] == [b"a,b,", b"c,"] and told == [START._replace(slot=START.slot + WINDOW)]
    rig.writer.mark(92, told.append)
    assert told[1] == START._replace(slot=START.slot + WINDOW + 1), "that operation was the last one of an entry"


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_answers_and_failures_stores_everything_once_and_in_order(rig: Rig, seed: int) -> None:
    generator = random.Random(seed)
    told: list[int] = []
    recorded: list[bytes] = []
    for _ in range(200):
        choice = generator.random()
        if choice < 0.4:
            recorded.append(b"%d;" % len(recorded))
            number = rig.record(recorded[-1])
            rig.writer.when_stored(number, lambda number=number: told.append(number))  # type: ignore[misc]
        elif choice < 0.5:
            rig.failing, rig.took_effect = 1, generator.random() < 0.5
        elif choice < 0.6:
            rig.advance(generator.random())
        elif rig.jobs:
            rig.complete(generator.randrange(len(rig.jobs)))
        assert told == list(range(1, len(told) + 1))
        assert b"".join(rig.bodies()).startswith(b"".join(recorded[: len(told)]))
    rig.failing = 0
    for _ in range(20):
        rig.complete_all()
        rig.advance(1)
    assert told == list(range(1, len(recorded) + 1)) and b"".join(rig.bodies()) == b"".join(recorded)


def test_after_its_own_fence_a_writer_stores_nothing_and_nothing_counts_as_stored() -> None:
    """A broker that is still at work when its term is ended must not answer: what follows the FENCE does not count."""
    rig = Rig()
    told: list[int] = []
    first = rig.record(b"before")
    rig.writer.put(EntryKind.FENCE, b"")
    late = rig.record(b"after")
    for number in (first, late):
        rig.writer.when_stored(number, lambda number=number: told.append(number))  # type: ignore[misc]
    rig.complete_all()
    rig.advance(10 * HEARTBEAT)
    rig.complete_all()
    assert told == [first] and len(rig.objects) == 2
    assert rig.writer.is_idle
