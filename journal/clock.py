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
