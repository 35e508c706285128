"""Deadlines of transactions, in one heap with one timer."""

import heapq
from collections.abc import Callable
from typing import Any, Final

from tfmq.apply_target import Timers

STALE_ENTRIES_MIN: Final = 1024
"""With fewer cleared or replaced entries than this, the heap is not rebuilt without them.

It would cost more than it saves.
"""


class Deadlines:
    """Deadlines of transactions by epoch, on the monotonic clock.

    Calls `expired(epoch)` once, by a timer, at or after the deadline. Cleared and replaced entries stay in the heap
    until they reach the top or outnumber the live ones, so setting and clearing cost at most a logarithm.
    """

    def __init__(self, timers: Timers, expired: Callable[[int], None]) -> None:
        self._timers, self._expired = timers, expired
        self._due_by_epoch: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._timer: Any = None
        self._timer_due = 0.0

    def __len__(self) -> int:
        return len(self._due_by_epoch)

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._due_by_epoch

    def set_deadline(self, epoch: int, seconds: float) -> None:
        """Set the deadline of `epoch` to `seconds` from now; replaces an earlier deadline."""
        due = self._timers.now() + seconds
        self._due_by_epoch[epoch] = due
        heapq.heappush(self._heap, (due, epoch))
        self._remove_stale_entries()
        self._start_timer()

    def clear_deadline(self, epoch: int) -> None:
        """Remove the deadline; no effect if none is set."""
        self._due_by_epoch.pop(epoch, None)

    def close(self) -> None:
        """Remove all deadlines and cancel the timer."""
        self._due_by_epoch.clear()
        self._heap.clear()
        self._cancel_timer()

    def _remove_stale_entries(self) -> None:
        if len(self._heap) > 2 * len(self._due_by_epoch) + STALE_ENTRIES_MIN:
            self._heap = [(due, epoch) for epoch, due in self._due_by_epoch.items()]
            heapq.heapify(self._heap)

    def _start_timer(self) -> None:
        """Start the timer for the earliest deadline. A timer that fires too early restarts itself."""
        if not self._heap:
            return
        due = self._heap[0][0]
        if self._timer is not None and self._timer_due <= due:
            return
        self._cancel_timer()
        self._timer_due = due
        self._timer = self._timers.after(max(0.0, due - self._timers.now()), self._on_timer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        now = self._timers.now()
        while self._heap and self._heap[0][0] <= now:
            due, epoch = heapq.heappop(self._heap)
            if self._due_by_epoch.get(epoch) == due:
                del self._due_by_epoch[epoch]
                self._expired(epoch)
        self._start_timer()
