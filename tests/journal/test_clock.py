"""The machine's clock keeps the promises of the interface."""

from __future__ import annotations

import time

import pytest

from journal.clock import Clock, SimulatedClock, SystemClock


def test_monotonic_time_never_goes_back() -> None:
    clock: Clock = SystemClock()
    times = [clock.monotonic() for _ in range(1000)]
    assert times == sorted(times)


def test_wall_time_is_in_milliseconds_since_1970() -> None:
    assert abs(SystemClock().wall_ms() - time.time() * 1000) < 60_000


# A clock that advances on request.


def test_it_stands_still_until_it_is_moved() -> None:
    clock = SimulatedClock(wall_ms=5000, monotonic=7.0)
    seen: Clock = clock
    assert (seen.monotonic(), seen.wall_ms()) == (7.0, 5000)
    clock.advance(1.5)
    assert (seen.monotonic(), seen.wall_ms()) == (8.5, 6500)


def test_small_steps_add_up() -> None:
    clock = SimulatedClock(wall_ms=0)
    for _ in range(1000):
        clock.advance(0.0001)
    assert 99 <= clock.wall_ms() <= 100


def test_only_the_wall_clock_jumps() -> None:
    clock = SimulatedClock(wall_ms=5000, monotonic=7.0)
    clock.jump_wall(-3)
    assert (clock.monotonic(), clock.wall_ms()) == (7.0, 2000)
    with pytest.raises(ValueError, match="cannot decrease"):
        clock.advance(-1)
