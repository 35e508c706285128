"""Clocks, passed as arguments: the journal reads the time only from them. Tests pass a simulated one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic time for intervals, and the wall-clock time, which may jump."""

    def monotonic(self) -> float:
        """Seconds from a fixed point; never decreases. For intervals and deadlines."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC. May jump in both directions."""

    def wall_us(self) -> int:
        """Microseconds since 1970-01-01 UTC, consistent with `wall_ms`."""


class SystemClock:
    """The system's clock."""

    monotonic = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def wall_us(self) -> int:
        return time.time_ns() // 1000


class SimulatedClock:
    """A clock that only a test advances. Both times advance together, except for `jump_wall`."""

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
        """Advance both times. Raises ValueError if `seconds` is negative."""
        if seconds < 0:
            raise ValueError("time cannot decrease; jump_wall changes the wall-clock time")
        self._monotonic += seconds
        self._wall_ms += seconds * 1000

    def jump_wall(self, seconds: float) -> None:
        """Change the wall-clock time only, in either direction."""
        self._wall_ms += seconds * 1000
