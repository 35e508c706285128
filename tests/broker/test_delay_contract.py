"""The contract of delayed delivery on a virtual clock, through the whole engine: docs/delay.md, one promise a test.

What other files hold already is not said again: streams, targets and the house are in test_delay, transactions in
test_delayed_transactions, the wheel alone in tests/delay/test_wheel.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from journal.disk import RealDisk
from journal.testing import SimulatedClock
from tests.broker.helpers import Broker, after, at, handles
from tests.scale import SCALE, scaled, seeded
from tfmq.delay.delay_queue import WHEEL_SLOTS
from tfmq.delay.memory_window import Step
from tfmq.protocol.commands import ACKS_WRITTEN, DUE_MAX, DUE_RELATIVE, ResumePartition
from tfmq.protocol.delayed_handle import decode_due_times, parse_handle

TICK_MS = 10
ROUND_MS = WHEEL_SLOTS * TICK_MS
SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
YEAR = 365 * DAY
TEN_YEARS = 10 * YEAR
SPANS = (1 << 10, 1 << 16, 1 << 22, 1 << 28)
"""Lengths of buckets."""
TURN_ROWS_MOST = 1500
"""Deliveries in one turn: some seven milliseconds' work."""


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def now_of(broker: Broker) -> int:
    return int(broker.engine.broker.delay_commands.queue.now_ms())


def wait(broker: Broker, seconds: float) -> None:
    """Time goes on from one thing that must happen at its time to the next; rounds of housekeeping come with them."""
    house, end = broker.engine.broker, broker.clock.monotonic() + seconds
    while (due := house.timers.next_not_deferrable()) is not None and due <= end:
        broker.clock.advance(max(0.0, due - broker.clock.monotonic()))
        broker.advance(0)
    broker.clock.advance(max(0.0, end - broker.clock.monotonic()))
    broker.advance(0)


def until(broker: Broker, due: int) -> None:
    """Broker time goes on to that millisecond."""
    wait(broker, (due - now_of(broker)) / 1000)
    assert now_of(broker) == due


def send_at(broker: Broker, dues: Sequence[int]) -> None:
    """A message for each due, its payload."""
    producer = broker.lease()
    for start in range(0, len(dues), 1000):
        part = dues[start : start + 1000]
        wire = b"".join(at(due) for due in part)
        assert broker.delay(producer, start, [b"%d" % due for due in part], due=wire).code == "ok"


# Never early, and late by a tick


def edges(now: int, lengths: Iterable[int], reach: int) -> list[int]:
    """Milliseconds before, at and after the first multiples of each length after now."""
    found: set[int] = set()
    for length in lengths:
        first = (now // length + 1) * length
        for edge in (first, first + length):
            found.update(edge + beside for beside in (-1, 0, 1) if now < edge + beside <= now + reach)
    return sorted(found)


def held_at_each(broker: Broker, dues: Sequence[int]) -> None:
    """A millisecond before each due it is not there, a tick after it is."""
    for number, due in enumerate(dues):
        if now_of(broker) < due - 1:
            until(broker, due - 1)
        if now_of(broker) < due:
            assert len(broker.payloads()) <= number, f"{due - now_of(broker)} ms early"
        until_ms = dues[number + 1] - 1 if number + 1 < len(dues) else due + TICK_MS
        until(broker, max(now_of(broker), min(due + TICK_MS, until_ms)))
        there = len(broker.payloads())
        past = sum(each <= now_of(broker) - TICK_MS for each in dues)
        assert past <= there <= sum(each <= now_of(broker) for each in dues)
    until(broker, now_of(broker) + TICK_MS)
    assert broker.payloads() == [b"%d" % due for due in dues]


@pytest.mark.parametrize("phase", [0, 1, 9, 123_457])
def test_never_early_at_the_edges_of_ticks_and_of_the_wheel_s_rounds(phase: int) -> None:
    broker = Broker(clock=SimulatedClock(1_700_000_000_000 + phase))
    broker.create()
    now = now_of(broker)
    dues = sorted({*edges(now, [TICK_MS], 40), *(now + ROUND_MS * n + beside for n in (1, 2) for beside in (-1, 0, 1))})
    dues += [due + ROUND_MS * 3 for due in dues[-3:]]
    send_at(broker, dues)
    held_at_each(broker, dues)


@pytest.mark.parametrize("down", [False, True], ids=["awake", "restarted"])
def test_never_early_at_the_edges_of_buckets(broker: Broker, down: bool) -> None:
    dues = edges(now_of(broker), SPANS, 7 * DAY)
    assert len(dues) >= 9
    send_at(broker, dues)
    held_at_each(broker.restart() if down else broker, dues)


@pytest.mark.parametrize("round", range(scaled(60)))
def test_never_early_at_random_times_in_whatever_steps_the_clock_goes(round: int) -> None:
    generator = seeded("random times", round)
    broker = Broker(clock=SimulatedClock(1_700_000_000_000 + generator.randrange(1 << 22)))
    broker.create()
    now = now_of(broker)
    reach = generator.choice((50, 3 * SECOND, 3 * MINUTE, 3 * HOUR))
    dues = [now + 1 + generator.randrange(reach) for _ in range(50)]
    send_at(broker, dues)
    due_next = sorted(dues)
    while len(broker.payloads()) < len(dues):
        broker.advance(generator.choice((0.001, 0.007, 0.01, reach / 20_000, reach / 3_000)))
        seen = [int(payload) for payload in broker.payloads()]
        assert all(due <= now_of(broker) for due in seen)
        assert seen == due_next[: len(seen)]
        late = [due for due in due_next[len(seen) :] if due + TICK_MS <= now_of(broker)]
        assert not late


# In order


def test_they_come_by_due_time_and_those_of_one_millisecond_as_they_were_sent(broker: Broker) -> None:
    """From several producers, sent over minutes, some at once, some from buckets, over a restart."""
    generator = seeded("order")
    start = now_of(broker)
    sent: list[tuple[int, int, bytes]] = []
    streams = {broker.lease(): 0 for _ in range(3)}
    for number in range(scaled(600)):
        if number == scaled(300):
            broker = broker.restart()
        producer, count = generator.choice(list(streams)), generator.randrange(1, 5)
        dues = [start + 600 * SECOND + generator.randrange(40) * 7 for _ in range(count)]
        payloads = [b"%d.%d" % (number, n) for n in range(count)]
        wire = b"".join(map(at, dues))
        answer = broker.delay(producer, streams[producer], payloads, due=wire)
        streams[producer] += count
        first = answer.delayed.first_number
        sent += [(due, first + n, payload) for n, (due, payload) in enumerate(zip(dues, payloads, strict=True))]
        if now_of(broker) < start + 580 * SECOND:
            broker.advance(generator.random() * 2)
    until(broker, start + 601 * SECOND)
    assert broker.payloads() == [payload for _, _, payload in sorted(sent)]


def test_what_arrives_beside_a_load_waits_for_what_is_loaded() -> None:
    """The disk is slow: a bucket is still being read when its time comes, and something later is in memory already."""
    broker = Broker(queued=True)
    broker.create()
    broker.work()
    producer = broker.lease()
    answer = broker.delay(producer, 0, [b"first"], due=after(30 * MINUTE))
    broker.work()
    due = parse_handle(handles(answer)[0]).due
    while now_of(broker) < due - 2 * MINUTE:
        wait(broker, 60)
        broker.work()
    while now_of(broker) < due - 5 * SECOND and not loading(broker):
        wait(broker, 1)
        while broker.jobs and not loading(broker):
            broker.step()
    assert loading(broker)
    rest = due - now_of(broker)
    later = broker.delay(producer, 1, [b"second"], due=after(rest + 100))
    while not later.done:
        broker.step(len(broker.jobs) - 1)
    wait(broker, (rest + SECOND) / 1000)
    while len(broker.jobs) > 1:
        broker.step(len(broker.jobs) - 1)
    assert loading(broker) and broker.payloads() == []
    broker.work()
    wait(broker, 1)
    broker.work()
    assert broker.payloads() == [b"first", b"second"]


def loading(broker: Broker) -> bool:
    return broker.engine.broker.delay_commands.queue._scheduler.running_step is Step.LOAD


# Every delay there is


@pytest.mark.parametrize(
    ("wire", "waits"),
    [
        (after(0), 1),
        (after(1), 1),
        (at(0), 1),
        (at(1_600_000_000_000), 1),
        (after(TEN_YEARS), TEN_YEARS),
        (at(1_700_000_000_000 + TEN_YEARS), TEN_YEARS),
    ],
    ids=["no delay", "1 ms", "1970", "a time that is over", "ten years", "a time in ten years"],
)
def test_any_delay_is_as_long_as_it_is(broker: Broker, wire: bytes, waits: int) -> None:
    start = now_of(broker)
    (handle,) = handles(broker.delay(broker.lease(), 0, due=wire))
    assert parse_handle(handle).due == start + waits
    if waits > DAY:
        broker.clock.advance((waits - HOUR) / 1000)
    until(broker, start + waits - 1)
    assert broker.payloads() == []
    until(broker, start + waits + TICK_MS)
    assert broker.payloads() == [b"later"]


@pytest.mark.parametrize(
    "wire",
    [after(DUE_RELATIVE - 1), at(DUE_MAX), after(DUE_MAX - 1_700_000_000_000)],
    ids=["longest delay", "last time", "nearly"],
)
def test_the_end_of_time_is_listed_cancelled_and_never_comes(broker: Broker, wire: bytes) -> None:
    never, also = handles(broker.delay(broker.lease(), 0, [b"never", b"also"], due=wire))
    assert parse_handle(never).due == DUE_MAX
    broker.clock.advance(100 * YEAR / 1000)
    broker.advance(1)
    again = broker.restart()
    assert [row["due_ms"] for row in again.delayed()] == [DUE_MAX, DUE_MAX]
    assert again.cancel_delayed(never).state == "cancelled"
    assert [row["handle"] for row in again.delayed()] == [also]
    assert again.payloads() == []


def test_a_delayed_message_may_be_as_large_as_any(broker: Broker) -> None:
    """At once from memory, and after the arrivals have been given up, from a bucket."""
    limits = broker.engine.broker.limits
    largest = limits["message_bytes"]
    payloads = [bytes([n]) * largest for n in range(2)]
    producer = broker.lease()
    assert broker.delay(producer, 0, [payloads[0]], due=after(SECOND)).code == "ok"
    assert broker.delay(producer, 1, [payloads[1]], due=after(2 * HOUR)).code == "ok"
    assert broker.delay(producer, 2, [bytes(largest + 1)], due=after(SECOND)).code == "message_too_large"
    broker.advance(2)
    assert broker.payloads() == payloads[:1]
    again = broker.restart()
    wait(again, 2 * HOUR / 1000)
    assert again.payloads() == payloads


# The clock


@pytest.mark.parametrize("hours", [1, -1, 24 * 3652], ids=["an hour on", "an hour back", "ten years on"])
def test_no_step_of_the_wall_clock_moves_a_delay(broker: Broker, hours: int) -> None:
    start, producer = now_of(broker), broker.lease()
    broker.delay(producer, 0, [b"near", b"far"], due=after(5 * SECOND) + after(3 * HOUR))
    broker.clock.jump_wall(hours * 3600)
    broker.delay(producer, 2, [b"behind"], due=after(6 * SECOND))
    until(broker, start + 5 * SECOND - 1)
    assert broker.payloads() == []
    until(broker, start + 6 * SECOND - 1)
    assert broker.payloads() == [b"near"]
    until(broker, start + 3 * HOUR - 1)
    assert broker.payloads() == [b"near", b"behind"]
    until(broker, start + 3 * HOUR + TICK_MS)
    assert broker.payloads() == [b"near", b"behind", b"far"]


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("hours", [1, -1, 24 * 3652], ids=["an hour on", "an hour back", "ten years on"])
def test_a_step_of_the_wall_clock_never_brings_a_time_before_the_clock_shows_it(hours: int, restarted: bool) -> None:
    """Steps there and back: a message for nine o'clock, by a clock that was right, is delivered at nine, or later."""
    broker = Broker()
    broker.create()
    producer, nine = broker.lease(), broker.clock.wall_ms() + 6 * HOUR
    broker.delay(producer, 0, [b"before"], due=at(nine))
    broker.clock.jump_wall(hours * 3600)
    broker.delay(producer, 1, [b"between"], due=at(nine))
    broker.advance(60)
    broker.clock.jump_wall(-hours * 3600)
    broker.delay(producer, 2, [b"behind"], due=at(nine))
    if restarted:
        broker = broker.restart()
    while broker.clock.wall_ms() < nine - 1000:
        assert broker.payloads() == ([b"between"] if b"between" in broker.payloads() else [])
        wait(broker, min(900, (nine - 1000 - broker.clock.wall_ms()) / 1000))
    assert {b"before", b"behind"}.isdisjoint(broker.payloads())
    wait(broker, 2 * HOUR / 1000)
    assert sorted(broker.payloads()) == [b"before", b"behind", b"between"]


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_clock_that_is_slow_at_the_start_brings_nothing_early_and_loses_nothing(broker: Broker, killed: bool) -> None:
    """It is an hour after what the broker knew: time goes on from there."""
    producer, start = broker.lease(), now_of(broker)
    broker.delay(producer, 0, [b"delay", b"time"], due=after(10 * MINUTE) + at(start + 10 * MINUTE))
    broker.advance(270)
    broker.delay(producer, 2, [b"far"], due=after(DAY))
    broker.advance(30)
    if not killed:
        broker.stop()
    again = Broker(broker.disk.crash(keep="everything"), SimulatedClock(start - HOUR))
    noted = now_of(again) - start
    # Ten seconds after the last change of what is on the disk, or when it stopped.
    assert (270 if killed else 299) * SECOND <= noted <= 300 * SECOND
    wait(again, (10 * MINUTE - noted - SECOND) / 1000)
    assert again.payloads() == []
    again.advance(2)
    assert again.payloads() == [b"delay"]
    wait(again, (start + 10 * MINUTE - SECOND - again.clock.wall_ms()) / 1000)
    assert again.payloads() == [b"delay"], "the clock does not show that time yet"
    again.advance(2)
    assert again.payloads() == [b"delay", b"time"]


def test_a_clock_that_is_ahead_at_the_start_brings_what_seems_due_once_and_no_later_one_early(broker: Broker) -> None:
    producer, start = broker.lease(), now_of(broker)
    broker.delay(producer, 0, [b"seems due", b"later"], due=after(10 * MINUTE) + after(TEN_YEARS + DAY))
    broker.stop()
    ahead = Broker(broker.disk, SimulatedClock(start + TEN_YEARS))
    ahead.advance(1)
    assert ahead.payloads() == [b"seems due"]
    ahead.delay(producer, 2, [b"new", b"time"], due=after(10 * SECOND) + at(start + TEN_YEARS + HOUR))
    ahead.stop()
    right = Broker(broker.disk, SimulatedClock(start + MINUTE))
    assert right.payloads() == [b"seems due"]
    right.delay(producer, 4, [b"by the right clock"], due=at(start + 2 * MINUTE))
    right.advance(8)
    assert right.payloads() == [b"seems due"]
    right.advance(3)
    assert right.payloads() == [b"seems due", b"new"]
    right.advance(40)
    assert b"by the right clock" not in right.payloads()
    right.advance(20)
    assert right.payloads() == [b"seems due", b"new", b"by the right clock"]


# Many


def test_as_many_as_a_hundred_thousand_are_due_in_one_second(broker: Broker) -> None:
    count, start, generator = scaled(100_000), now_of(broker), seeded("one second")
    dues = [start + 30 * SECOND + generator.randrange(SECOND) for _ in range(count)]
    send_at(broker, dues)
    until(broker, start + 30 * SECOND)
    while len(broker.payloads()) < count:
        before = now_of(broker)
        broker.advance(0.1)
        found = [int(payload) for payload in broker.payloads()]
        assert not found or found[-1] <= now_of(broker)
        assert before < start + 60 * SECOND
    assert [int(payload) for payload in broker.payloads()] == sorted(dues)


MANY = 10_000_000


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_as_many_as_ten_million_are_due_in_one_minute(tmp_path: Path) -> None:
    """On a real disk, since they take some gigabytes; none in memory that need not be."""
    count = scaled(MANY) if SCALE >= 1 else min(scaled(MANY), 100_000)
    broker = Broker(RealDisk(), server__data=str(tmp_path / "data"))  # type: ignore[arg-type]
    broker.create()
    start, producer, size = now_of(broker), 0, 1 << 13
    dues = [HOUR + (n * 7919) % MINUTE for n in range(size)]
    wire = b"".join(map(after, dues))
    sent = 0
    begun = time.monotonic()
    while sent < count:
        if sent % (size * 1024) == 0:
            producer = broker.lease()
        part = min(size, count - sent)
        payloads = [b"%d" % n for n in range(sent, sent + part)]
        assert broker.delay(producer, sent % (size * 1024), payloads, due=wire[: 8 * part]).code == "ok"
        sent += part
    print(f"{sent:,} sent in {time.monotonic() - begun:.0f} s")
    broker.advance(1)
    assert broker.engine.broker.status()["delay"]["pending"] == count
    until(broker, start + HOUR - 1)
    assert broker.payloads() == []
    begun = time.monotonic()
    while broker.log().end_ordinal < count:
        broker.clock.advance(0.25)  # at once: a disk is slower than ten million dues a minute
        broker.advance(0)
        assert broker.engine.broker.status()["delay"]["near"] <= 1_200_000
        assert now_of(broker) < start + 2 * HOUR, f"{broker.log().end_ordinal:,} came"
    assert now_of(broker) >= start + HOUR + MINUTE - SECOND
    print(f"{count:,} came in {time.monotonic() - begun:.0f} s")
    seen = [int(payload) for payload in broker.payloads()]
    keys = [(dues[n % size], n) for n in seen]
    assert all(before < until_ms for before, until_ms in itertools.pairwise(keys))
    assert len(seen) == count
    broker.stop()


class PassingClock(SimulatedClock):
    """Each look takes a microsecond, as on a machine: what is put off until the next turn is not due in this one."""

    def monotonic(self) -> float:
        self._monotonic += 1e-6
        return self._monotonic


def test_what_fell_due_in_a_long_downtime_comes_paced_and_live_traffic_goes_between() -> None:
    """The broker is down for longer than any memory window; each turn delivers a part, and others are served."""
    broker = Broker(clock=PassingClock())
    broker.create()
    broker.create("live")
    producer, count = broker.lease(), (scaled(60) + 16) * 1000
    for first in range(0, count, 1000):
        payloads = [b"%d" % n for n in range(first, first + 1000)]
        broker.delay(producer, first, payloads, due=after(HOUR + first) * 1000)
    broker.stop()
    broker.clock.advance(30 * DAY / 1000)
    again = Broker(broker.disk, broker.clock)
    live, turns = again.lease(), 0
    while (before := again.log().end_ordinal) < count:
        answer = again.produce(live, turns, topic="live", turn=False)
        again.engine.broker.timers.tick(again.clock.monotonic())
        again.engine.broker.end_turn()
        assert answer.code == "ok"
        assert again.log().end_ordinal - before <= TURN_ROWS_MOST
        again.clock.advance(0.001)
        turns += 1
        assert turns < 100 + count // 100
    assert [int(payload) for payload in again.payloads()] == list(range(count))


# A cancel meets a firing


class Race:
    """A message that falls due, and a cancel that comes after so many steps of whatever goes on."""

    def __init__(self, far: bool) -> None:
        self.broker = Broker(queued=True)
        self.broker.create()
        self.broker.work()
        delay = 2 * HOUR if far else 50
        sent = [self.broker.delay(self.broker.lease(), 0, [b"x", b"other"], due=after(delay))]
        self.work()
        (self.handle, _) = handles(sent[0])
        self.steps = 0
        while now_of(self.broker) < parse_handle(self.handle).due - 20:
            rest = parse_handle(self.handle).due - 20 - now_of(self.broker)
            wait(self.broker, min(rest / 1000, 600))
            self.work()

    def work(self) -> None:
        self.broker.engine.broker.end_turn()
        self.broker.work()

    def step(self) -> None:
        """A job of a worker, or, without one, a millisecond."""
        self.steps += 1
        if self.broker.jobs:
            self.broker.step()
        else:
            self.broker.advance(0.001)

    def held(self, answer: Any, again: Broker) -> None:
        """Exactly one of the two, and the answer says which, and stays the same."""
        payloads = again.payloads()
        state = again.cancel_delayed(self.handle)
        again.work()
        assert state.code == "ok" and state.state in ("cancelled", "delivered")
        assert payloads.count(b"x") == (state.state == "delivered") and payloads.count(b"other") == 1
        if answer.done:
            assert answer.state == state.state


@pytest.mark.long
@pytest.mark.parametrize("ending", ["goes on", "kill", "power cut"])
@pytest.mark.parametrize("far", [False, True], ids=["from memory", "from a bucket"])
def test_a_cancel_that_meets_the_firing_has_exactly_one_of_the_two_outcomes(far: bool, ending: str) -> None:
    states = set()
    for steps in range(0, 60, 1 if SCALE >= 1 else 4):
        for later in (0, 1, 2, 5):
            race = Race(far)
            for _ in range(steps):
                race.step()
            answer = race.broker.cancel_delayed(race.handle)
            for _ in range(later):
                race.step()
            again = race.broker
            if ending != "goes on":
                answer_before = answer.done
                keep = "everything" if ending == "kill" else "nothing"
                again = again.crashed(again.disk.crash(keep=keep))
                assert answer.done == answer_before
            again.work()
            again.advance(1)
            again.work()
            race.held(answer, again)
            if answer.done:
                states.add(answer.state)
    assert "cancelled" in states and ("delivered" in states or ending != "goes on")


# Targets


@pytest.mark.long
def test_while_one_partition_is_stopped_for_days_all_others_are_on_time(broker: Broker) -> None:
    """Also what falls due and arrives meanwhile, over a restart; and then it gets its own, in order."""
    broker.create("bills", 2)
    producer = broker.lease()
    broker.produce(broker.lease(), 0, [b"plain"])
    for number in range(20):
        due = after(number * 6 * HOUR + 500)
        broker.delay(producer, 2 * number, [b"o%d" % number], due=due)
        broker.delay(producer, 2 * number + 1, [b"b%d" % number], due=due, topic="bills", partition=1)
    broker.log().stop("a test stops it")
    for number in range(20):
        broker.advance(1)
        assert broker.payloads("bills", 1)[-1:] == [b"b%d" % number]
        wait(broker, 6 * HOUR / 1000 - 1)
    assert broker.payloads() == [b"plain"]
    assert broker.ask(ResumePartition("orders", 0)).state == "open"
    broker.advance(1)
    assert broker.payloads() == [b"plain", *(b"o%d" % number for number in range(20))]


@pytest.mark.timeout(60)
def test_arrivals_that_fail_beside_a_non_durable_one_keep_no_worker_busy() -> None:
    """What is due soon is not on the disk and never will be in this life: it is not requested again and again."""
    broker = Broker(queued=True)
    broker.create()
    broker.work()
    producer = broker.lease()
    assert broker.delay(producer, 0, [b"written"], due=after(5 * SECOND), acks=ACKS_WRITTEN).code == "ok"
    broker.disk.faults.fail("write", path="/arrivals/")
    refused = broker.delay(producer, 1, [b"refused"], due=after(4 * SECOND))
    assert refused.code == "storage_stopped"
    broker.work()
    wait(broker, 20)
    assert broker.produce(broker.lease(), 0, turn=True) is not None
    again = Broker(broker.disk.crash(keep="everything"), broker.clock)
    again.advance(1)
    assert again.payloads() == [b"hello", b"written"]


def test_the_dues_of_an_answer_are_those_of_the_handles(broker: Broker) -> None:
    answer = broker.delay(broker.lease(), 0, [b"a", b"b"], due=after(5) + at(0))
    dues = list(decode_due_times(answer.delayed.dues))
    assert dues == [now_of(broker) + 5, now_of(broker) + 1]
    assert [parse_handle(handle).due for handle in handles(answer)] == dues
