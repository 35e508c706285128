"""Broker time runs with the monotonic clock, begins no lower than it was, and knows how far the wall clock was slow."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.testing import SimulatedClock
from tests.delay.steps import steps
from tfmq.delay import due_time
from tfmq.delay.due_time import (
    DUE_MAX,
    NO_DUE_TIMES,
    RELATIVE,
    BrokerClock,
    DueTimes,
    decode_words,
    due_times_of,
    effective_due_times,
    encode_words,
)
from tfmq.errors import BadRequest

WALL = 1_700_000_000_000


def started(floor_ms: int = 0) -> tuple[BrokerClock, SimulatedClock]:
    clock = SimulatedClock(wall_ms=WALL)
    time = BrokerClock(clock)
    time.start(floor_ms)
    return time, clock


def test_it_begins_at_the_wall_clock_and_runs_with_the_monotonic_one() -> None:
    time, clock = started()
    assert time.now_ms() == WALL
    clock.advance(1.5)
    clock.jump_wall(-3600)
    assert time.now_ms() == WALL + 1500
    clock.jump_wall(10 * 365 * 86_400)
    assert time.now_ms() == WALL + 1500


def test_it_begins_no_lower_than_what_fired() -> None:
    time, clock = started(WALL + 5000)
    assert time.now_ms() == WALL + 5000
    assert (time.ahead_ms(), time.wall_offset_ms()) == (5000, 5000)
    clock.jump_wall(10)
    assert (time.ahead_ms(), time.wall_offset_ms()) == (-5000, -5000)


def test_an_alarm_rings_at_its_millisecond_and_not_before() -> None:
    time, clock = started()
    for ms in (1, 10, 33, 100, 12_345):
        clock.advance(time.seconds_until(WALL + ms) - 0.0005)
        assert time.now_ms() == WALL + ms - 1
        clock.advance(time.seconds_until(WALL + ms))
        assert time.now_ms() == WALL + ms
    assert time.seconds_until(WALL) == 0.0


def test_small_changes_back_are_not_reported() -> None:
    time, clock = started(WALL + 100)
    assert time.ahead_ms() == 100
    clock.jump_wall(0.005)
    assert time.ahead_ms() == 100
    clock.jump_wall(0.02)
    assert time.ahead_ms() == 75


@pytest.mark.parametrize("first_us", [0, 1, 500, 999])
@pytest.mark.parametrize("next_us", [0, 1, 499, 500, 999])
def test_a_start_in_another_part_of_a_millisecond_makes_nothing_early(first_us: int, next_us: int) -> None:
    """Whatever part of a millisecond has passed when broker time begins is part of it, in each life."""
    clock = SimulatedClock(wall_ms=0)  # small numbers, so that floats are exact enough
    clock.advance(0.001 + first_us / 1e6)
    time = BrokerClock(clock)
    time.start(0)
    taken, began = time.now_rounded_up_ms(), clock.monotonic()
    clock.advance(0.005 + (next_us - first_us) / 1e6)
    again = BrokerClock(clock)
    again.start(time.now_ms())
    for due in range(taken + 7, taken + 10):
        clock.advance(again.seconds_until(due))
        assert again.now_ms() == due
        assert clock.monotonic() >= began + (due - taken) / 1000 - 2e-6


@pytest.mark.parametrize("passes", [5, 30])
def test_what_passes_between_the_looks_of_a_start_makes_nothing_early(passes: int) -> None:
    """One start is quick, or quick once it looks again; one before it never was."""
    clock = Slow(wall_ms=0)
    clock.seconds = passes / 1e6
    time = BrokerClock(clock)
    time.start(0)
    clock.seconds = 0.0
    clock.advance(time.seconds_until(1))
    taken, began = time.now_rounded_up_ms(), clock.monotonic()
    again = BrokerClock(clock)
    again.start(0)
    clock.advance(again.seconds_until(taken + 100))
    assert again.now_ms() == taken + 100
    assert clock.monotonic() >= began + 0.1 - 2e-6


class Slow(SimulatedClock):
    """Time passes between two looks."""

    seconds = 0.0

    def monotonic(self) -> float:
        self.advance(self.seconds)
        return super().monotonic()

    def wall_ms(self) -> int:
        self.advance(self.seconds)
        return super().wall_ms()

    def wall_us(self) -> int:
        self.advance(self.seconds)
        return super().wall_us()


@pytest.mark.parametrize("seconds", [0.0001, 0.0004, 0.001, 0.003, 0.02])
@pytest.mark.parametrize("step", [0, 3600, -3600])
def test_what_passes_between_two_looks_makes_nothing_early(seconds: float, step: int) -> None:
    clock = Slow(wall_ms=WALL)
    clock.jump_wall(0.0005)
    time = BrokerClock(clock)
    time.start(0)
    clock.seconds = seconds
    clock.jump_wall(step)
    reported = set()
    for _ in range(100):
        ahead = time.ahead_ms()
        reported.add(ahead)
        clock.seconds = 0.0
        slower = clock.wall_ms() + ahead - time.now_ms()
        assert 0 <= slower <= 4000 * seconds + 2, "never less than it is, and hardly more"
        clock.seconds = seconds
    assert len(reported) < 5, "and no new step each time"


def test_no_clock_is_too_far_away() -> None:
    time, clock = started()
    clock.jump_wall(1 << 62)
    assert time.ahead_ms() == -due_time.AHEAD_MAX
    time.record_offset(7, time.ahead_ms())
    other, _ = started()
    other.restore_steps(time.encode_steps())
    assert other.offset_of(7) == -due_time.AHEAD_MAX


def test_what_a_start_finds_is_learned_in_its_place() -> None:
    time, _ = started()
    time.record_offset(10, 500)
    time.record_offset(20, 0)
    time.restore_offset(12, 3, 500)
    time.restore_offset(30, 3, -90)
    time.restore_offset(40, 1, -90)
    time.restore_offset(24, 2, 70)
    assert [time.offset_of(number) for number in (12, 19, 20, 23, 24, 25, 26, 29, 30, 50)] == [
        500, 500, 0, 0, 70, 70, 0, 0, -90, -90,
    ]  # fmt: skip


def test_what_was_reported_of_each_message_is_known_again() -> None:
    time, _ = started()
    time.record_offset(10, 0)
    time.record_offset(20, 500)
    time.record_offset(30, 500)
    time.record_offset(40, -90)
    assert [time.offset_of(number) for number in (0, 19, 20, 39, 40, 1000)] == [0, 0, 500, 500, -90, -90]
    assert not time.is_steady
    other, _ = started()
    other.restore_steps(time.encode_steps())
    assert [other.offset_of(number) for number in (19, 20, 40)] == [0, 500, -90]


def test_steps_are_bounded_and_the_oldest_share_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_time, "STEPS_MAX", 3)
    time, _ = started()
    for number in range(1, 7):
        time.record_offset(number * 10, number * 100)
    assert [time.offset_of(number) for number in (5, 45, 50, 65)] == [0, 0, 500, 600]


def test_early_is_what_the_wall_clock_lacks() -> None:
    time, clock = started()
    assert time.early_ms(WALL + 100, 1) == 100
    time.record_offset(5, 60)
    assert time.early_ms(WALL + 100, 5) == 40
    clock.advance(0.05)
    assert time.early_ms(WALL + 100, 5) == 0


def test_damaged_steps_are_refused() -> None:
    time, _ = started()
    with pytest.raises(ValueError):
        time.restore_steps(b"x" * 17)
    time.restore_steps(b"")
    assert time.offset_of(7) == 0


# Effective due times: never before the next ms, never after the end of time, and by columns what it is one by one.

NOW = 1_700_000_000_000

near = st.integers(0, 1 << 20)
any_word = st.integers(0, DUE_MAX)
delays = st.one_of(near, any_word).map(RELATIVE.__or__)
times = st.one_of(near.map((NOW - 1000).__add__), near, any_word)
batches = st.one_of(*(st.lists(each, min_size=1, max_size=40) for each in (delays, times, delays | times)))
differences = st.one_of(st.just(0), st.integers(-(10**7), 10**7), st.integers(-NOW, 0))


def wire(*asked: int) -> bytes:
    return b"".join(word.to_bytes(8, "big") for word in asked)


def one_by_one(asked: list[int], now_ms: int, ahead_ms: int) -> list[int]:
    """What the module does, message by message and in plain words."""
    found = []
    for word in asked:
        due = now_ms + word - RELATIVE if word >= RELATIVE else word + ahead_ms
        found.append(min(max(due, now_ms + 1), DUE_MAX))
    return found


@given(batches, differences)
def test_columns_give_what_single_messages_would_get(asked: list[int], ahead_ms: int) -> None:
    found = effective_due_times(wire(*asked), len(asked), NOW, ahead_ms)
    assert list(found.times) == one_by_one(asked, NOW, ahead_ms)
    assert list(found.absolute) == [word < RELATIVE for word in asked]
    assert (found.low, found.high) == (min(found.times), max(found.times))


@given(delays | times, st.integers(1, 300), differences)
def test_a_batch_with_one_due_time_has_it_for_all(word: int, count: int, ahead_ms: int) -> None:
    found = effective_due_times(wire(word) * count, count, NOW, ahead_ms)
    assert list(found.times) == one_by_one([word], NOW, ahead_ms) * count
    assert found.absolute == bytes((word < RELATIVE,)) * count
    assert found.low == found.high == found.times[0]


@pytest.mark.parametrize(
    ("word", "due"),
    [
        (RELATIVE, NOW + 1),  # no delay
        (RELATIVE | 1, NOW + 1),
        (RELATIVE | 2, NOW + 2),
        (RELATIVE | 315_576_000_000, NOW + 315_576_000_000),  # ten years
        (RELATIVE | DUE_MAX, DUE_MAX),
        (0, NOW + 1),  # long ago
        (NOW, NOW + 1),
        (NOW + 1, NOW + 1),
        (NOW + 2, NOW + 2),
        (DUE_MAX, DUE_MAX),
    ],
)
def test_bounds(word: int, due: int) -> None:
    """Also beside another message, where columns are used."""
    assert list(effective_due_times(wire(word), 1, NOW, 0).times) == [due]
    assert effective_due_times(wire(word, RELATIVE | 5), 2, NOW, 0).times[0] == due
    assert effective_due_times(wire(word, NOW + 5), 2, NOW, 0).times[0] == due


def test_a_time_is_one_of_the_wall_clock_and_a_delay_is_not() -> None:
    asked = wire(NOW + 500, RELATIVE | 500)
    ahead = effective_due_times(asked, 2, NOW, 3_600_000)  # the wall clock was set back by an hour
    assert list(ahead.times) == [NOW + 3_600_500, NOW + 500]
    slower = effective_due_times(asked, 2, NOW, -300)  # or forward
    assert list(slower.times) == [NOW + 200, NOW + 500]
    assert list(effective_due_times(asked, 2, NOW, -3_600_000).times) == [NOW + 1, NOW + 500], "it is over there"


@pytest.mark.parametrize(("size", "count"), [(0, 0), (0, 1), (7, 1), (9, 1), (16, 1), (8, 2), (800, 99)])
def test_one_word_for_each_message_or_none_is_taken(size: int, count: int) -> None:
    with pytest.raises(BadRequest, match=f"{size} bytes of due times for {count} messages"):
        effective_due_times(bytes(size), count, NOW, 0)


@pytest.mark.parametrize(
    "word",
    [lambda n: RELATIVE | 60_000, lambda n: NOW + 86_400_000 + n, lambda n: RELATIVE | n, lambda n: NOW - 50 + n],
    ids=["one delay for all", "times far ahead", "a delay for each", "times of which some are over"],
)
def test_no_step_of_python_is_made_for_a_message(word: Callable[[int], int]) -> None:
    few, many = (wire(*map(word, range(count))) for count in (100, 5_000))
    taken = steps(lambda: effective_due_times(few, 100, NOW, 0))
    assert steps(lambda: effective_due_times(many, 5_000, NOW, 0)) == taken < 40
    for ahead in (9, -9):
        taken = steps(lambda ahead=ahead: effective_due_times(few, 100, NOW, ahead))  # type: ignore[misc]
        assert steps(lambda ahead=ahead: effective_due_times(many, 5_000, NOW, ahead)) == taken < 40  # type: ignore[misc]


def test_a_column_is_big_endian_and_comes_back() -> None:
    data = bytes(range(16))
    column = decode_words(data)
    assert list(column) == [0x0001020304050607, 0x08090A0B0C0D0E0F]
    assert encode_words(column) == data
    assert list(column) == [0x0001020304050607, 0x08090A0B0C0D0E0F]  # as it was


@given(st.lists(any_word, min_size=1, max_size=9), st.data())
def test_a_part_is_what_the_whole_says_of_it(asked: list[int], data: st.DataObject) -> None:
    whole = due_times_of(array("Q", asked), bytes(number % 2 for number in range(len(asked))))
    start = data.draw(st.integers(0, len(asked) - 1))
    end = data.draw(st.integers(start + 1, len(asked)))
    part = whole.section(start, end)
    assert list(part.times) == asked[start:end]
    assert part == due_times_of(part.times, whole.absolute[start:end])


def test_no_member_is_due_without_members() -> None:
    assert DueTimes(array("Q"), b"", 0, 0) == NO_DUE_TIMES
    assert NO_DUE_TIMES.section(0, 0) is NO_DUE_TIMES
