"""Random programs on the simulated broker, over broken connections, power cuts, downtimes and lost answers.

Invariants, for every message that a producer sent, plain, delayed or inside a transaction:
- nothing is seen before it is due, at whatever moment one looks, nor before the wall clock shows its time of day;
- what was acknowledged is there once, in the end; what failed as "not done" is not; the rest is unknown, but it is
  there once at most;
- what was taken back is never seen, what is answered as delivered is seen;
- of one partition, delayed messages come in the order of their times;
- as many are said to wait as wait: at least those of which that is known, at most those of which it may be.
A failure prints its seed.
"""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import Any, Final

import pytest

import tfmq
from tests.client.rig import sleep
from tests.scale import SEED, scaled
from tests.testing.simulation_parts import new_driver, new_world
from tfmq.client.connection.requests import request
from tfmq.client.operation import Event, Operation, Wait
from tfmq.errors import NotAllowed, TimedOut
from tfmq.protocol.commands import CreateTopic, Fetch, Ping
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.simulation import WAIT_SECONDS_MAX, NothingComes

STEPS: Final = 60
RUNS: Final = 300
GRAIN_SECONDS: Final = 0.001
"""The broker counts in whole milliseconds, so two that are due within one may change places."""
FLOAT_SECONDS: Final = 2e-6
"""What two sums of the same times may differ by, and the clock's own grain."""
OUTCOME_SECONDS: Final = 86_400
"""What became of a handle is known for so long after its time."""
TOPICS: Final = ("orders", "invoices")


class Sent:
    """What is known of one message: when it was due at the earliest, and what was answered."""

    def __init__(self, due: float, delivery: Any) -> None:
        self.due = due
        self.delivery = delivery
        self.handle = ""
        self.prompt = False
        """It was acknowledged in the moment in which it was sent, so `due` is exactly its time."""
        self.taken_back = False
        self.in_transaction = False
        self.of_many = False
        self.at_ms = 0.0
        self.unsure = False
        """Whether it was taken back is not known."""

    def fate(self) -> str:
        """ "acknowledged", "not done" or "unknown": also of what is not settled, as in a transaction whose commit was
        not answered.
        """
        if self.delivery is None or (self.in_transaction and not self.delivery.done()):
            return "unknown"
        try:
            result = self.delivery.result(timeout=0)
        except tfmq.TfmqError as error:
            return "not done" if error.outcome == "not done" else "unknown"
        if not self.of_many:
            self.handle = self.handle or result.delayed or ""
        return "acknowledged"


class Program:
    """One run: a producer, a broker that has a hard time, and the ledger of what was sent."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.broker = SimulatedBroker({"topics.partitions": 2}, seed=seed)
        for topic in TOPICS:  # so that no send needs to make one, which a full disk would refuse
            self.broker.admin().create_topic(topic)
        self.producer = self.broker.producer(linger_ms=self.random.choice([0, 5]))
        self.sent: dict[str, Sent] = {}
        self.clock_off = 0

    @property
    def now(self) -> float:
        return self.broker.clock.monotonic()

    def delay(self) -> float:
        return self.random.choice([0.0, 0.001, 0.5, 3.0, 70.0, 4000.0, 90_000.0]) * self.random.choice([1, 1.5])

    def name(self) -> str:
        return str(len(self.sent))

    # Steps

    def send(self) -> None:
        name, delay = self.name(), self.delay() if self.random.random() < 0.7 else None
        began = self.now
        delivery = self.producer.send(self.random.choice(TOPICS), name, key=name, delay=delay)
        self.sent[name] = entry = Sent(began + (delay or 0), delivery)
        if self.random.random() < 0.6:
            entry.fate()
            entry.prompt = delay is not None and delivery.done() and self.now == began

    def send_at(self) -> None:
        """One with a time of day, which the wall clock has to show when it comes."""
        name, moment = self.name(), self.broker.clock.time() + self.delay() - 10
        delivery = self.producer.send(self.random.choice(TOPICS), name, key=name, deliver_at=moment)
        self.sent[name] = entry = Sent(self.now, delivery)
        entry.at_ms = moment * 1000

    def send_many(self) -> None:
        """A batch whose messages are due at times of their own."""
        names = [str(len(self.sent) + number) for number in range(self.random.randrange(2, 30))]
        delays = {name: self.delay() for name in names}
        messages = [tfmq.Message(name, key="together", delay=delays[name]) for name in names]
        try:
            deliveries = self.producer.send_many(self.random.choice(TOPICS), messages)
        except tfmq.TfmqError:
            deliveries = None
        for name in names:
            self.sent[name] = Sent(self.now + delays[name], deliveries)
            self.sent[name].of_many = True

    def transact(self) -> None:
        tx = self.producer.transaction()
        started: dict[str, Sent] = {}
        for _ in range(self.random.randrange(1, 4)):
            name = str(len(self.sent) + len(started))
            delay = self.delay() if self.random.random() < 0.5 else None
            started[name] = Sent(
                self.now + (delay or 0), tx.send(self.random.choice(TOPICS), name, key=name, delay=delay)
            )
        for entry in started.values():
            entry.in_transaction = True
        self.sent |= started
        try:
            tx.commit() if self.random.random() < 0.7 else tx.rollback()
        except tfmq.TfmqError:
            return  # each delivery says what is known

    def take_back(self) -> None:
        entry = self.one_with_a_handle()
        if entry is None:
            return
        try:
            answer = self.producer.cancel(entry.handle)
        except tfmq.TfmqError as error:
            entry.unsure = entry.unsure or error.outcome != "not done"
            return
        if answer == "unknown":
            late_by = self.now - entry.due
            assert late_by >= OUTCOME_SECONDS, f"forgotten {late_by} s behind its time"
            return
        assert answer == "cancelled" or not entry.taken_back, f"{answer}, after it was cancelled"
        entry.taken_back = answer == "cancelled"

    def move(self) -> None:
        entry = self.one_with_a_handle()
        if entry is None or entry.taken_back:
            return
        delay = self.delay()
        due = self.now + delay
        try:
            moved = self.producer.reschedule(entry.handle, delay=delay)
        except tfmq.TfmqError as error:
            if error.outcome != "not done":
                entry.due, entry.prompt, entry.at_ms = min(entry.due, due), False, 0.0
            return
        if moved.state == "rescheduled":
            entry.at_ms = 0.0
            entry.handle, entry.due, entry.prompt = moved.handle or "", due, False

    def one_with_a_handle(self) -> Sent | None:
        found = [each for each in self.sent.values() if each.handle]
        return self.random.choice(found) if found else None

    def time_passes(self) -> None:
        seconds = self.random.choice([0.0005, 0.01, 0.3, 2, 30, 3600, 40_000])
        full = self.broker.disk.space_bytes is not None  # what waits for room tries again every few seconds
        self.broker.clock.advance(min(seconds, 30) if full else seconds)

    def to_the_brink(self) -> None:
        """Up to just before the next one is due, where one that comes early is seen."""
        brink = min((each.due for each in self.sent.values() if each.due > self.now), default=self.now)
        brink -= 2 * GRAIN_SECONDS
        if self.broker.disk.space_bytes is None and brink > self.now:
            self.broker.clock.advance(brink - self.now)

    def set_right(self) -> None:
        """What a start needs: room, and a wall clock that is right."""
        self.broker.disk.space_bytes = None
        self.broker.clock.step(-self.clock_off)
        self.clock_off = 0

    def restart(self) -> None:
        self.set_right()
        self.broker.restart()

    def power_cut(self) -> None:
        self.set_right()
        self.broker.crash(
            self.random.choice(["nothing", "some", "everything"]), down=self.random.choice([0, 0.5, 60, 86_400])
        )

    def step(self) -> None:
        steps = {
            self.send: 30,
            self.send_many: 6,
            self.send_at: 6,
            self.failed_force: 2,
            self.mend: 4,
            self.full_disk: 3,
            self.room_again: 6,
            self.clock_is_set: 3,
            self.transact: 8,
            self.take_back: 6,
            self.move: 6,
            self.time_passes: 20,
            self.to_the_brink: 15,
            self.broker.disconnect: 4,
            self.power_cut: 4,
            self.restart: 2,
            self.lose_an_answer: 3,
        }
        self.random.choices(list(steps), list(steps.values()))[0]()

    def lose_an_answer(self) -> None:
        self.broker.fail_next("send", tfmq.TimedOut, done=self.random.random() < 0.5)

    def failed_force(self) -> None:
        """The next force of a partition fails and loses what it should have forced: the partition stops."""
        path = f"/{self.random.choice(TOPICS)}-{self.random.randrange(2)}/"
        for kind in ("force", "sync_file"):
            self.broker.disk.faults.fail(kind, path=path)

    def mend(self) -> None:
        """The operator has mended the disk."""
        self.broker.disk.faults.clear()
        if self.broker.disk.space_bytes is not None:
            return
        with self.broker.admin() as admin:
            for topic in TOPICS:
                for partition in admin.topic(topic).partitions:
                    if partition.state == "stopped":
                        with suppress(tfmq.StorageStopped):  # an error that was not reported yet
                            admin.resume(topic, partition.partition)

    def full_disk(self) -> None:
        disk = self.broker.disk
        disk.space_bytes = disk.used_bytes() + self.random.choice([0, 300, 5000])

    def room_again(self) -> None:
        self.broker.disk.space_bytes = None

    def clock_is_set(self) -> None:
        seconds = self.random.choice([-86_400, -3600, -1, 1, 3600, 86_400])
        self.clock_off += seconds
        self.broker.clock.step(seconds)

    # Looks

    def seen(self) -> list[Any]:
        return [message for topic in TOPICS for message in self.broker.sent(topic)]

    def look(self) -> None:
        """Nothing early, nothing twice, nothing that was taken back."""
        messages = self.seen()
        names = [str(message.text) for message in messages]
        assert len(set(names)) == len(names), "twice"
        for name in names:
            entry = self.sent[name]
            assert entry.due < self.now + FLOAT_SECONDS, f"{name} is {entry.due - self.now} s early"
            assert not entry.taken_back, f"{name} was taken back"
        for message in messages:
            early_ms = self.sent[message.text].at_ms - message.origin.append_ms
            assert early_ms < 1, f"{message.text} is {early_ms} ms before its time of day"
        self.in_order(messages)
        self.counted(set(names))

    def counted(self, seen: set[str]) -> None:
        engine = self.broker._server.engine
        if engine is None:
            return
        queue = engine.broker.delay_commands.queue
        waiting = queue._metrics.count_now()
        there = {name: each for name, each in self.sent.items() if name not in seen and not each.taken_back}
        known = sum(bool(each.handle) and not each.unsure for each in there.values())
        assert known <= waiting <= len(there), f"{waiting} are said to wait, and {known} to {len(there)} do"

    def in_order(self, messages: list[Any]) -> None:
        dues: dict[tuple[str, int], float] = {}
        for message in messages:
            entry = self.sent[message.text]
            place = (message.topic, message.partition)
            if entry.prompt:
                before = dues.get(place, 0.0)
                assert entry.due >= before - GRAIN_SECONDS, f"{message.text} comes behind a later one"
                dues[place] = max(before, entry.due)

    def end(self) -> None:
        """All time passes; what was acknowledged is there."""
        self.set_right()
        for _ in range(3):  # an error that was not reported yet stops a partition again
            self.mend()
            self.broker.settle()
            self.broker.clock.advance(days=2)
        fates = {name: entry.fate() for name, entry in self.sent.items()}
        self.look()
        there = {message.text for message in self.seen()}
        for name, fate in fates.items():
            entry = self.sent[name]
            if entry.taken_back or fate == "not done":
                assert name not in there, f"{name}: {fate}, taken back: {entry.taken_back}"
            elif fate == "acknowledged" and not entry.unsure:
                assert name in there, f"{name} is lost"


@pytest.mark.parametrize("number", range(scaled(RUNS)))
def test_nothing_early_nothing_lost_nothing_twice(number: int) -> None:
    seed = SEED + number
    program = Program(seed)
    try:
        for _ in range(STEPS):
            program.step()
            program.look()
        program.end()
    except BaseException:
        print(f"seed {seed}")
        raise
    finally:
        program.broker.close()


# Who does what next, and when time goes on.


def test_a_round_trip_takes_no_time() -> None:
    world = new_world()
    before = world.clock.now
    assert new_driver(world).run(request(new_driver(world).link, Ping(), seconds=5)).time_ms
    assert world.clock.now == before


def test_a_wait_with_an_end_lets_time_go_on_to_it_and_no_further() -> None:
    world = new_world()
    driver = new_driver(world)
    before = world.clock.monotonic()
    assert not driver.wait((Event(),), 2.5)
    assert world.clock.monotonic() == pytest.approx(before + 2.5, abs=2e-6)


def test_it_ends_at_what_it_waits_for_not_at_its_own_end() -> None:
    world = new_world()
    driver = new_driver(world)
    flag, before = Event(), world.clock.monotonic()
    driver.call_later(1.0, flag.complete)
    assert driver.wait((flag,), 60)
    assert world.clock.monotonic() == pytest.approx(before + 1, abs=2e-6)


def test_what_is_due_on_the_way_happens_in_order_each_at_its_time() -> None:
    world = new_world()
    first, second = new_driver(world), new_driver(world)
    start, seen = world.clock.monotonic(), []

    def note(word: str) -> Any:
        return lambda: seen.append((word, round(world.clock.monotonic() - start, 3)))

    second.call_later(30, note("half a minute"))
    first.call_later(10, note("ten"))
    second.call_later(3600, note("an hour"))
    first.call_later(3600.5, note("too late"))

    def again() -> None:
        first.timers.add(5, note("five after ten"))

    first.call_later(10, again)
    world.clock.advance(hours=1)
    assert seen == [("ten", 10.0), ("five after ten", 15.0), ("half a minute", 30.0), ("an hour", 3600.0)]


def test_a_wait_that_nothing_can_end_raises_and_moves_nothing() -> None:
    world = new_world()
    driver = new_driver(world)
    driver.call_later(10, Event().complete)
    before = world.clock.now
    with pytest.raises(NothingComes, match=r"wait for ever.*09:00:00 UTC.*clock\.advance"):
        driver.wait((Event(),))
    assert world.clock.now == before


def test_a_request_ends_by_itself_so_time_may_go_on_for_it() -> None:
    """A fetch that finds nothing is answered when its time is up; a call without a reply fails at its deadline."""
    world = new_world()
    driver = new_driver(world)
    driver.run(request(driver.link, CreateTopic("orders", 1, {})))
    assert world.server.engine is not None
    incarnation = world.server.engine.broker.topics.topic("orders").incarnation
    before = world.clock.monotonic()
    reply = driver.run(request(driver.link, Fetch("orders", incarnation, 0, 0, wait_ms=4000), seconds=30))
    assert reply.next == 0
    assert world.clock.monotonic() - before == pytest.approx(4, abs=1e-5)

    (end,) = world.server._ends
    end.pause("a test")
    with pytest.raises(TimedOut, match="did not reply to PING in time"):
        driver.run(request(driver.link, Ping(), seconds=30))
    assert world.clock.monotonic() - before == pytest.approx(34, abs=1e-5)


def test_an_operation_that_waits_again_and_again_without_end_is_ended() -> None:
    world = new_world()
    driver = new_driver(world)

    def retries_without_end() -> Operation[None]:
        while True:
            yield Wait((), 5.0)

    before = world.clock.monotonic()
    with pytest.raises(NothingComes):
        driver.run(retries_without_end())
    assert world.clock.monotonic() - before < WAIT_SECONDS_MAX + 10


def test_an_operation_may_wait_as_long_as_it_asked_to() -> None:
    world = new_world()
    new_driver(world).run(sleep(100 * 86_400))
    assert world.clock.now.isoformat().startswith("2026-04-15T09:00:00")


def test_time_cannot_be_moved_from_within_what_happens() -> None:
    world = new_world()
    driver = new_driver(world)
    caught: list[Exception] = []

    def moves() -> None:
        try:
            world.clock.advance(1)
        except NotAllowed as error:
            caught.append(error)

    driver.call_later(1, moves)
    world.clock.advance(2)
    assert "Time cannot be moved" in str(caught[0])


def test_work_beside_may_wait_itself() -> None:
    world = new_world()
    driver = new_driver(world)
    answers: list[Any] = []
    driver.run_in_thread(lambda: driver.run(request(driver.link, Ping())), lambda result, error: answers.append(result))
    world.settle()
    assert answers[0].time_ms == world.clock.wall_ms()


def test_another_thread_is_refused_with_the_way_out() -> None:
    world = new_world()
    driver = new_driver(world)
    caught: list[Exception] = []

    def elsewhere() -> None:
        try:
            driver.run(request(driver.link, Ping()))
        except NotAllowed as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert "tfmq.local_server" in str(caught[0])


def test_the_end_of_the_world_closes_every_client() -> None:
    world = new_world()
    driver = new_driver(world)
    driver.run(request(driver.link, Ping()))
    world.close_clients()
    assert driver.closed and world.clients == []
    world.close_clients()
