"""Time, as an argument. Nothing in the journal reads a clock that was not passed in; tests pass a simulated
one.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two times: one that only goes forward, for intervals, and one that people read, which may jump."""

    def monotonic(self) -> float:
        """Seconds from some fixed point; never goes back. For intervals and deadlines."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC. May jump either way; only ever stored and shown."""
        ...

    def wall_us(self) -> int:
        """The same in microseconds: `wall_ms` has the whole milliseconds of it."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def wall_us(self) -> int:
        return time.time_ns() // 1000


# A clock that stands still until a test moves it.


class SimulatedClock:
    """Both times of `journal.clock.Clock`; they go together, except where the wall clock jumps."""

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
        """Time goes on; never back."""
        if seconds < 0:
            raise ValueError("time does not go back; jump_wall moves the wall clock")
        self._monotonic += seconds
        self._wall_ms += seconds * 1000

    def jump_wall(self, seconds: float) -> None:
        """Someone sets the wall clock, either way."""
        self._wall_ms += seconds * 1000
