"""The machine's clock keeps the promises of the interface."""

from __future__ import annotations

import time

from journal.clock import Clock, SystemClock


def test_monotonic_time_never_goes_back() -> None:
    clock: Clock = SystemClock()
    times = [clock.monotonic() for _ in range(1000)]
    assert times == sorted(times)


def test_wall_time_is_in_milliseconds_since_1970() -> None:
    assert abs(SystemClock().wall_ms() - time.time() * 1000) < 60_000
