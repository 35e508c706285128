"""Timers of the broker, for fsyncs, parked requests, session timeouts and housekeeping.

Times are monotonic seconds of the given clock. A timer runs only inside of a call of `tick`, which the server calls at
the time that `next_due` returns.
"""

import heapq
from collections.abc import Callable
from typing import Final

from journal.clock import Clock

ROUNDING_SECONDS: Final = 0.25
"""Waits set by `after_rounded` end at multiples of this, so that many idle clients are served together in few turns."""
ROUNDED_WAIT_MIN: Final = 20
"""Waits shorter than ROUNDED_WAIT_MIN * ROUNDING_SECONDS are not rounded."""
CANCELLED_KEPT_MAX: Final = 1024
"""Cancelled timers are removed from the heap if they are more than this, and more than half of all timers there."""


class Timer:
    """A call of `call()` at the monotonic time `due`; created by `Timers.after`.

    A `deferrable` timer is for housekeeping that may run late. A simulation that skips idle time sets its clock to the
    due time of the next timer that is not deferrable. `call` is None after the timer has run or was cancelled.
    """

    __slots__ = ("call", "deferrable", "due")

    def __init__(self, due: float, call: Callable[[], None], deferrable: bool = False) -> None:
        self.due = due
        self.deferrable = deferrable
        self.call: Callable[[], None] | None = call


class Timers:
    """A heap of timers. Timers due at the same time run in the order in which they were set."""

    def __init__(self, clock: Clock) -> None:
        self.now = clock.monotonic
        """Function that returns the present time in monotonic seconds."""
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._cancelled = 0

    def after(self, seconds: float, call: Callable[[], None], *, deferrable: bool = False) -> Timer:
        """Schedule `call()` for the first tick at least `seconds` from now."""
        timer = Timer(self.now() + seconds, call, deferrable)
        self._number += 1
        heapq.heappush(self._heap, (timer.due, self._number, timer))
        return timer

    def after_rounded(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Schedule `call()` like `after`. Long waits (see ROUNDED_WAIT_MIN) are up to ROUNDING_SECONDS shorter."""
        if seconds >= ROUNDED_WAIT_MIN * ROUNDING_SECONDS:
            now = self.now()
            seconds = (now + seconds) // ROUNDING_SECONDS * ROUNDING_SECONDS - now
        return self.after(seconds, call)

    def cancel(self, timer: Timer) -> None:
        """Cancel the timer; no effect if it has run already."""
        if timer.call is None:
            return
        timer.call = None
        self._cancelled += 1
        if self._cancelled > CANCELLED_KEPT_MAX and self._cancelled > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].call is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def tick(self, now: float) -> float | None:
        """Run all timers due at `now`, also those that are set meanwhile. Return `next_due()`."""
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            call, timer.call = timer.call, None
            if call is None:
                self._cancelled -= 1
            else:
                call()
        return self.next_due()

    def next_due(self) -> float | None:
        """Return the due time of the first timer, at which `tick` must be called; None if there is no timer."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def next_not_deferrable(self) -> float | None:
        """Return the due time of the first timer that is not deferrable, or None. For simulations. Scans all timers."""
        firm = (due for due, _, timer in self._heap if timer.call is not None and not timer.deferrable)
        return min(firm, default=None)
