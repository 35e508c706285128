"""The clock of a simulated broker and its clients. The time advances if the test advances it, or if a client waits.

The clock counts whole microseconds, so that many small steps end at the same time as one long step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import Final

START: Final = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)
"""Date and time at which a clock begins by default: a Monday morning, the same in every test run."""
MICROSECONDS: Final = 1_000_000
MONOTONIC_START: Final = 1000 * MICROSECONDS
"""Start of the monotonic time. Not 0, so that code fails clearly if it uses a monotonic time as an interval."""


def to_seconds(time: float | timedelta) -> float:
    if isinstance(time, timedelta):
        return time.total_seconds()
    if isinstance(time, bool) or not isinstance(time, Real):
        raise TypeError(f"A time is a number of seconds or a timedelta, not {type(time).__name__}.")
    if math.isnan(time):
        raise ValueError("nan is no time.")
    return float(time)


class VirtualClock:
    """A `journal.clock.Clock` that a test can advance.

    `start`: date and time at which the clock begins, with a time zone. `go_on(until)`: function that `advance` calls to
    set the clock to `until` (monotonic seconds) and to run the work that becomes due until then; None: only set it.
    """

    def __init__(self, start: datetime = START, go_on: Callable[[float], object] | None = None) -> None:
        if start.tzinfo is None:
            raise TypeError("A start needs a time zone: datetime(..., tzinfo=UTC).")
        self._now = MONOTONIC_START
        self._wall_offset = round(start.timestamp() * MICROSECONDS) - MONOTONIC_START
        self.go_on: Callable[[float], object] = self.move if go_on is None else go_on

    # Methods that the broker and its clients call

    def monotonic(self) -> float:
        """Return the monotonic time in seconds: it never goes back, and does not change when the time of day is set."""
        return self._now / MICROSECONDS

    def wall_ms(self) -> int:
        """Return the time of day in ms since 1970."""
        return self.wall_us() // 1000

    def wall_us(self) -> int:
        """Return the time of day in microseconds since 1970."""
        return self._now + self._wall_offset

    def time(self) -> float:
        """Return the time of day in seconds since 1970, like `time.time()`."""
        return (self._now + self._wall_offset) / MICROSECONDS

    @property
    def now(self) -> datetime:
        """The date and time of day in UTC, as an aware datetime."""
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=self._now + self._wall_offset)

    # Methods that tests call

    def advance(
        self,
        seconds: float | timedelta | None = None,
        *,
        milliseconds: float | None = None,
        minutes: float | None = None,
        hours: float | None = None,
        days: float | None = None,
    ) -> None:
        """Advance the time by the sum of the arguments. All work until then runs in order, at the times when it is due.

        Examples: `advance(hours=1)`, `advance(2.5)`, `advance(timedelta(days=3))`. Raises `ValueError` for a negative
        time, `OverflowError` for a time after the year 9999, `TypeError` without arguments.
        """
        others = ((milliseconds, 1), (minutes, 60_000), (hours, 3_600_000), (days, 86_400_000))
        given = [to_seconds(time) * each_ms / 1000 for time, each_ms in others if time is not None]
        if seconds is None and not given:
            raise TypeError("A time is a number of seconds or a timedelta, not nothing: advance(hours=1).")
        whole = sum(given, 0.0 if seconds is None else to_seconds(seconds))
        if not whole >= 0:
            raise ValueError(f"Time does not go back by {-whole:g} s: step() sets the time of day.")
        self.now + timedelta(seconds=whole)  # raises OverflowError for a time after the year 9999
        self.go_on(self.monotonic() + whole)

    def advance_to(self, moment: datetime) -> None:
        """Advance until the time of day is `moment`, an aware datetime. Raises `ValueError` for a time in the past."""
        if not isinstance(moment, datetime):
            raise TypeError(f"A moment is a datetime, not {type(moment).__name__}.")
        if moment.tzinfo is None:
            raise TypeError("A moment needs a time zone: datetime(..., tzinfo=UTC).")
        self.advance(moment - self.now)

    def step(self, seconds: float | timedelta) -> None:
        """Add `seconds` to the time of day, not to the monotonic time. Raises `OverflowError` above the year 9999."""
        whole = to_seconds(seconds)
        self.now + timedelta(seconds=whole)  # raises the OverflowError
        self._wall_offset += round(whole * MICROSECONDS)

    # Methods that the simulation calls

    def move(self, until: float) -> None:
        """Set the clock to `until` (monotonic seconds), rounded up to a microsecond. The clock never goes back."""
        moved = math.ceil(until * MICROSECONDS)
        while (moved - 1) / MICROSECONDS >= until:  # the float product above was rounded up
            moved -= 1
        while moved / MICROSECONDS < until:
            moved += 1
        self._now = max(self._now, moved)

    def __repr__(self) -> str:
        return f"<clock at {self.now:%Y-%m-%d %H:%M:%S.%f} UTC>"
