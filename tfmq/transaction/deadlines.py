"""Deadlines of transactions, in one heap with one timer."""

import heapq
from collections.abc import Callable
from typing import Any, Final

from tfmq.transaction.requests import Timers

DEAD_MIN: Final = 1024
"""With fewer stale entries than this the heap is not rebuilt.

The pass would cost more than it saves.

The pass would cost more than it saves.
"""


class Deadlines:
    """Monotonic deadlines by epoch.

    Calls `expired(epoch)` once, in the first tick at or after the deadline. Cleared and replaced entries
    stay in the heap until they reach the top or outnumber the live ones, so setting and clearing cost at
    most a logarithm.
    """

    def __init__(self, timers: Timers, over: Callable[[int], None]) -> None:
        self._timers, self._over = timers, over
        self._times: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._timer: Any = None
        self._armed = 0.0

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._times

    def set(self, epoch: int, seconds: float) -> None:
        """Set the deadline of `epoch` to `seconds` from now; replaces an earlier deadline."""
        due = self._timers.now() + seconds
        self._times[epoch] = due
        heapq.heappush(self._heap, (due, epoch))
        self._sweep()
        self._arm()

    def clear(self, epoch: int) -> None:
        """Remove the deadline; no effect if none is set."""
        self._times.pop(epoch, None)

    def close(self) -> None:
        """Remove all deadlines and cancel the timer."""
        self._times.clear()
        self._heap.clear()
        self._disarm()

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._times) + DEAD_MIN:
            self._heap = [(due, epoch) for epoch, due in self._times.items()]
            heapq.heapify(self._heap)

    def _arm(self) -> None:
        """Start the timer for the earliest deadline. A timer that fires too early restarts itself."""
        if not self._heap:
            return
        due = self._heap[0][0]
        if self._timer is not None and self._armed <= due:
            return
        self._disarm()
        self._armed = due
        self._timer = self._timers.after(max(0.0, due - self._timers.now()), self._ring)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        now = self._timers.now()
        while self._heap and self._heap[0][0] <= now:
            due, epoch = heapq.heappop(self._heap)
            if self._times.get(epoch) == due:
                del self._times[epoch]
                self._over(epoch)
        self._arm()
