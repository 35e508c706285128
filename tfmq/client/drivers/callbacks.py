"""Where the code of users runs that waits for results: in whichever thread reads, outside every lock, and never
blocking.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from tfmq.errors import NotAllowed

log = logging.getLogger("tfmq.client")

_running = threading.local()


class Callbacks:
    """A queue of calls into users' code. An exception of one is logged, and the next one runs."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], object]] = deque()

    def add(self, callback: Callable[[], object]) -> None:
        self._due.append(callback)

    def __bool__(self) -> bool:
        return bool(self._due)

    def run(self) -> None:
        """Run what is due; other threads may do so at the same time, each callback runs once."""
        if getattr(_running, "now", False):
            return
        _running.now = True
        try:
            while self._due:
                try:
                    callback = self._due.popleft()
                except IndexError:
                    return
                try:
                    callback()
                except Exception:
                    log.exception("A callback raised.")
        finally:
            _running.now = False

    def clear(self) -> None:
        self._due.clear()


def refuse_in_callback() -> None:
    """Raises `NotAllowed` in a thread that runs a callback: it would wait for what only it can read."""
    if getattr(_running, "now", False):
        raise NotAllowed(
            "A callback must not wait: it runs in the thread that reads the answers. Hand the work to a thread of"
            " your own, or use add_callback again."
        )


# Functions to be called at a time.


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
