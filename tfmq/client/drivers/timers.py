"""Functions to be called at a time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timer:
    """One function with its time; `cancel` takes it back."""

    __slots__ = ("cancelled", "due", "function")

    def __init__(self, due: float, function: Callable[[], None]) -> None:
        self.due = due
        self.function = function
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """A heap of timers. `tick` runs what is due, under whatever lock its caller holds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def add(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer(self._clock() + seconds, function)
        heapq.heappush(self._heap, (timer.due, next(self._numbers), timer))
        return timer

    def next_time(self) -> float:
        """When the first timer is due; infinity if there is none."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def tick(self) -> None:
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if not timer.cancelled:
                timer.cancelled = True
                timer.function()

    def clear(self) -> None:
        self._heap.clear()
