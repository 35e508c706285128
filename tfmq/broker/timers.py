"""One heap of everything that happens at a time: flushes, long polls, sessions, housekeeping.

Times are monotonic seconds of the clock that is passed in; nothing runs before its time, and nothing runs
unless `tick` is called. Whoever drives the engine arms one alarm for `next_due`.

A *deferrable* timer (the word is the Linux kernel's) is one whose call may as well come with the next other
one: rounds of housekeeping. `next_firm` leaves them out, so that a simulation need not stop at each of the
thirty million seconds of a year to find that nothing is to be tidied.
"""

import heapq
from collections.abc import Callable
from typing import Final

from journal.clock import Clock

GRAIN_SECONDS: Final = 0.25
"""Waits that may end a little early end together: a turn for a thousand idle clients, not one for each."""
GRAINS_MIN: Final = 20
"""A wait of fewer grains ends when it should."""
CANCELLED_MIN: Final = 1024
"""Below this many dead timers a clean-up of the heap is not worth its pass."""


class Timer:
    """Something to call at `due`; made by `Timers.after`."""

    __slots__ = ("call", "deferrable", "due")

    def __init__(self, due: float, call: Callable[[], None], deferrable: bool = False) -> None:
        self.due = due
        self.deferrable = deferrable
        self.call: Callable[[], None] | None = call


class Timers:
    """The heap. Calls at the same time run in the order in which they were set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._cancelled = 0

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def after(self, seconds: float, call: Callable[[], None], *, deferrable: bool = False) -> Timer:
        """`call()` in the first tick at least `seconds` from now."""
        timer = Timer(self._clock.monotonic() + seconds, call, deferrable)
        self._number += 1
        heapq.heappush(self._heap, (timer.due, self._number, timer))
        return timer

    def idle_after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """As `after`, for a wait in which nothing happens: a long one ends up to a grain before `seconds` are over."""
        if seconds >= GRAINS_MIN * GRAIN_SECONDS:
            now = self._clock.monotonic()
            seconds = (now + seconds) // GRAIN_SECONDS * GRAIN_SECONDS - now
        return self.after(seconds, call)

    def cancel(self, timer: Timer) -> None:
        """The timer will not be called; harmless if it was already."""
        if timer.call is None:
            return
        timer.call = None
        self._cancelled += 1
        if self._cancelled > CANCELLED_MIN and self._cancelled > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].call is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def tick(self, now: float) -> float | None:
        """Calls everything due at `now`, also what those calls set for now or before; then the next due
        time.
        """
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            call, timer.call = timer.call, None
            if call is None:
                self._cancelled -= 1
            else:
                call()
        return self.next_due()

    def next_due(self) -> float | None:
        """When `tick` has something to do; None if never."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def next_firm(self) -> float | None:
        """When the first timer is due that may not wait for another one; None if there is none. Looks at all."""
        firm = (due for due, _, timer in self._heap if timer.call is not None and not timer.deferrable)
        return min(firm, default=None)
