"""The clock that a test moves."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfmq.testing.clock import START, VirtualClock


def test_it_begins_on_a_monday_morning_and_stands_still() -> None:
    clock = VirtualClock()
    assert clock.now == START == clock.now
    assert clock.wall_ms() == int(START.timestamp() * 1000)
    assert clock.time() == START.timestamp()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ((2.5,), 2.5),
        ((timedelta(days=3),), 3 * 86_400),
        (({"hours": 1},), 3600),
        (({"minutes": 30, "hours": 1},), 5400),
        (({"milliseconds": 10},), 0.01),
        (({"days": 3650},), 3650 * 86_400),
    ],
)
def test_both_times_go_on_together(given, seconds) -> None:  # type: ignore[no-untyped-def]
    clock = VirtualClock()
    before = clock.monotonic(), clock.now
    clock.advance(**given[0]) if isinstance(given[0], dict) else clock.advance(*given)
    assert clock.monotonic() - before[0] == pytest.approx(seconds)
    assert clock.now - before[1] == timedelta(seconds=seconds)


def test_it_goes_on_to_a_moment_in_any_zone() -> None:
    clock = VirtualClock()
    clock.advance_to(datetime(2026, 1, 5, 11, 0, tzinfo=timezone(timedelta(hours=1))))
    assert clock.now == datetime(2026, 1, 5, 10, 0, tzinfo=UTC)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance_to(START)


def test_it_never_goes_back() -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match=r"does not go back by 1 s: step\(\)"):
        clock.advance(-1)
    with pytest.raises(ValueError):
        clock.advance(float("nan"))
    clock.move(clock.monotonic() - 5)
    assert clock.now == START


def test_it_does_not_pass_the_calendars_end() -> None:
    with pytest.raises(OverflowError):
        VirtualClock().advance(days=365 * 8000)
    with pytest.raises(OverflowError):
        VirtualClock().advance(float("inf"))


def test_a_step_sets_the_time_of_day_alone() -> None:
    clock = VirtualClock()
    before = clock.monotonic()
    clock.step(timedelta(hours=-1))
    clock.step(0.25)
    assert clock.monotonic() == before
    assert clock.now == START - timedelta(hours=1) + timedelta(milliseconds=250)


def test_times_without_a_zone_are_refused() -> None:
    with pytest.raises(TypeError, match="time zone"):
        VirtualClock(datetime(2026, 1, 5))
    with pytest.raises(TypeError, match="time zone"):
        VirtualClock().advance_to(datetime(2030, 1, 5))


@given(st.lists(st.floats(0, 1e7), max_size=30))
def test_a_move_reaches_its_time_and_passes_it_by_less_than_two_microseconds(steps: list[float]) -> None:
    clock = VirtualClock()
    for step in steps:
        until = clock.monotonic() + step
        clock.move(until)
        assert until <= clock.monotonic() <= until + 2e-6


def test_many_small_steps_end_where_a_long_one_does() -> None:
    small, long = VirtualClock(), VirtualClock()
    for _ in range(10_000):
        small.advance(milliseconds=0.1)
    long.advance(1)
    assert (small.monotonic(), small.wall_ms()) == (long.monotonic(), long.wall_ms())


def test_a_step_function_is_called_to_continue() -> None:
    asked: list[float] = []
    clock = VirtualClock(go_on=asked.append)
    clock.advance(minutes=1)
    assert asked == [clock.monotonic() + 60]
    assert "2026-01-05 09:00" in repr(clock)


@pytest.mark.parametrize("wrong", ["1h", None, True, datetime(2027, 1, 1, tzinfo=UTC)])
def test_what_is_no_time_is_reported_as_such(wrong: Any) -> None:
    clock = VirtualClock()
    for call in (clock.advance, clock.step):
        with pytest.raises(TypeError, match="A time is a number of seconds or a timedelta, not"):
            call(wrong)
        with pytest.raises(ValueError, match="nan is no time"):
            call(float("nan"))
    with pytest.raises(TypeError, match="A moment is a datetime, not str"):
        clock.advance_to("2027-01-01")  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [1e20, -1e12, float("inf")])
def test_no_step_leaves_the_calendar(seconds: float) -> None:
    clock = VirtualClock()
    with pytest.raises(OverflowError):
        clock.step(seconds)
    assert clock.now == START


def test_a_step_of_time_is_named() -> None:
    with pytest.raises(TypeError, match=r"advance\(hours=1\)"):
        VirtualClock().advance()
    with pytest.raises(TypeError, match="not str"):
        VirtualClock().advance(hours="1")  # type: ignore[arg-type]
    VirtualClock().advance(0)
    VirtualClock().advance(minutes=0)
