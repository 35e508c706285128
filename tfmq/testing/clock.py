"""The time of a simulated broker and of its clients: it goes on when the test says so, and while a client waits.

It counts in whole microseconds, so that a day of many small steps ends where one long step would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import Final

START: Final = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)
"""Monday morning, the same in every run."""
MICROSECONDS: Final = 1_000_000
MONOTONIC_START: Final = 1000 * MICROSECONDS
"""Not 0, as on a real machine: a time of day that is taken for an interval is far off."""


def in_seconds(time: float | timedelta) -> float:
    """Raises `TypeError` for what is neither a number nor a timedelta, `ValueError` for what is no time."""
    if isinstance(time, timedelta):
        return time.total_seconds()
    if isinstance(time, bool) or not isinstance(time, Real):
        raise TypeError(f"A time is a number of seconds or a timedelta, not {type(time).__name__}.")
    if math.isnan(time):
        raise ValueError("nan is no time.")
    return float(time)


class VirtualClock:
    """`journal.clock.Clock`, and what a test does with it.

    `start`: the time of day at which it begins, aware. `go_on(until)` is whoever lets happen what is due on the way.
    """

    def __init__(self, start: datetime = START, go_on: Callable[[float], object] | None = None) -> None:
        if start.tzinfo is None:
            raise TypeError("A start needs a time zone: datetime(..., tzinfo=UTC).")
        self._now = MONOTONIC_START
        self._wall_offset = round(start.timestamp() * MICROSECONDS) - MONOTONIC_START
        self.go_on: Callable[[float], object] = self.move if go_on is None else go_on

    # What code under test sees

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._now / MICROSECONDS

    def wall_ms(self) -> int:
        """The time of day in ms since 1970."""
        return self.wall_us() // 1000

    def wall_us(self) -> int:
        """The same in microseconds."""
        return self._now + self._wall_offset

    def time(self) -> float:
        """The time of day in seconds since 1970, as `time.time()`."""
        return (self._now + self._wall_offset) / MICROSECONDS

    @property
    def now(self) -> datetime:
        """The time of day, aware, UTC."""
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=self._now + self._wall_offset)

    # What tests do

    def advance(
        self,
        seconds: float | timedelta | None = None,
        *,
        milliseconds: float | None = None,
        minutes: float | None = None,
        hours: float | None = None,
        days: float | None = None,
    ) -> None:
        """Let time go on: everything that is due on the way happens, in order, each at its time.

        `advance(hours=1)`, `advance(2.5)`, `advance(timedelta(days=3))`; what is given adds up. Raises `ValueError`
        for a time that is past, `OverflowError` for one beyond the calendar's end (the year 9999), `TypeError` where
        nothing is given.
        """
        others = ((milliseconds, 1), (minutes, 60_000), (hours, 3_600_000), (days, 86_400_000))
        given = [in_seconds(time) * each_ms / 1000 for time, each_ms in others if time is not None]
        if seconds is None and not given:
            raise TypeError("A time is a number of seconds or a timedelta, not nothing: advance(hours=1).")
        whole = sum(given, 0.0 if seconds is None else in_seconds(seconds))
        if not whole >= 0:
            raise ValueError(f"Time does not go back by {-whole:g} s: step() sets the time of day.")
        self.now + timedelta(seconds=whole)  # raises OverflowError
        self.go_on(self.monotonic() + whole)

    def advance_to(self, moment: datetime) -> None:
        """Let time go on until the time of day is `moment` (aware). Raises `ValueError` if that is past."""
        if not isinstance(moment, datetime):
            raise TypeError(f"A moment is a datetime, not {type(moment).__name__}.")
        if moment.tzinfo is None:
            raise TypeError("A moment needs a time zone: datetime(..., tzinfo=UTC).")
        self.advance(moment - self.now)

    def step(self, seconds: float | timedelta) -> None:
        """Somebody sets the time of day, either way; no time passes. `OverflowError` where no calendar has it."""
        whole = in_seconds(seconds)
        self.now + timedelta(seconds=whole)  # raises OverflowError
        self._wall_offset += round(whole * MICROSECONDS)

    # What the simulation does

    def move(self, until: float) -> None:
        """It is `until` (monotonic seconds) now, or as little later as can be told; never earlier than before."""
        moved = math.ceil(until * MICROSECONDS)
        while (moved - 1) / MICROSECONDS >= until:  # the product was rounded up
            moved -= 1
        while moved / MICROSECONDS < until:
            moved += 1
        self._now = max(self._now, moved)

    def __repr__(self) -> str:
        return f"<clock at {self.now:%Y-%m-%d %H:%M:%S.%f} UTC>"
