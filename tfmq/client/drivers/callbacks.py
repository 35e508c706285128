"""Users' result callbacks, and timers."""

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


class CallbackQueue(deque[Callable[[], object]]):
    """A queue of user callbacks. They run in the thread that reads, outside every lock.

    An exception of a callback is logged; the next one still runs.
    """

    def run(self) -> None:
        """Run the queued callbacks. Thread-safe: each one runs once. Ignored inside a callback."""
        if getattr(_running, "now", False):
            return
        _running.now = True
        try:
            while self:
                try:
                    callback = self.popleft()
                except IndexError:
                    return
                try:
                    callback()
                except Exception:
                    log.exception("A callback raised.")
        finally:
            _running.now = False


def check_not_in_callback() -> None:
    """Raises `NotAllowed` in a thread that runs a callback.

    The callback would wait for a reply that only its own thread can read.
    """
    if getattr(_running, "now", False):
        raise NotAllowed(
            "A callback must not wait: it runs in the thread that reads the replies. Hand the work to a thread of"
            " your own, or use add_callback again."
        )


class Timer:
    """A function and its time. `cancel` prevents the call."""

    __slots__ = ("cancelled", "due", "function")

    def __init__(self, due: float, function: Callable[[], None]) -> None:
        self.due = due
        self.function = function
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """A heap of timers. `tick` runs the due ones under the lock of its caller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def add(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer(self._clock() + seconds, function)
        heapq.heappush(self._heap, (timer.due, next(self._numbers), timer))
        return timer

    def next_time(self) -> float:
        """Return the time of the first timer; infinity if there is none."""
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
