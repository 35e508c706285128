"""Clocks. The journal reads the time only from a clock that its caller passes. Tests pass a `SimulatedClock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Interface of a clock with two times: a monotonic one for intervals, and the wall-clock time, which may jump."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary fixed moment, for intervals and deadlines. The value never decreases."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC. May jump in both directions."""

    def wall_us(self) -> int:
        """Microseconds since 1970-01-01 UTC, of the same clock as `wall_ms`."""


class SystemClock:
    monotonic = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def wall_us(self) -> int:
        return time.time_ns() // 1000


class SimulatedClock:
    """A clock for tests. Its two times change only when a test calls `advance` or `jump_wall`."""

    def __init__(self, wall_ms: int = 1_700_000_000_000, monotonic: float = 1000.0) -> None:
        self._wall_ms = float(wall_ms)
        self._monotonic = monotonic

    def monotonic(self) -> float:
        return self._monotonic

    def wall_ms(self) -> int:
        return int(self._wall_ms)

    def wall_us(self) -> int:
        whole = int(self._wall_ms)
        return whole * 1000 + int((self._wall_ms - whole) * 1000)

    def advance(self, seconds: float) -> None:
        """Advance the monotonic and the wall-clock time. Raises ValueError if `seconds` is negative."""
        if seconds < 0:
            raise ValueError("time cannot decrease; jump_wall changes the wall-clock time")
        self._monotonic += seconds
        self._wall_ms += seconds * 1000

    def jump_wall(self, seconds: float) -> None:
        """Change the wall-clock time only, in either direction."""
        self._wall_ms += seconds * 1000
