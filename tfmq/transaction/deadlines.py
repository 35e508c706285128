"""Deadlines of transactions, in one heap with one timer. A transaction is identified by its epoch."""

import heapq
from collections.abc import Callable
from typing import Any, Final

from tfmq.apply_target import Timers

STALE_ENTRIES_MIN: Final = 1024
"""The heap is not rebuilt while it has fewer removed or replaced entries than this."""


class EpochHeap:
    """A map from epochs to values that finds the lowest value by a heap, rebuilt when half of the heap is obsolete."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._values

    def set(self, epoch: int, value: float) -> None:
        self._values[epoch] = value
        heapq.heappush(self._heap, (value, epoch))
        if len(self._heap) > 2 * len(self._values) + STALE_ENTRIES_MIN:
            self._heap = [(value, epoch) for epoch, value in self._values.items()]
            heapq.heapify(self._heap)

    def remove(self, epoch: int) -> None:
        self._values.pop(epoch, None)

    @property
    def lowest(self) -> float | None:
        while self._heap and self._values.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    @property
    def first_epoch(self) -> int | None:
        """The epoch that was added first of those that are in the map; None if the map is empty."""
        return next(iter(self._values), None)


class Deadlines(EpochHeap):
    """Deadlines by epoch, on the monotonic clock. When a deadline passes, it is removed and `expired(epoch)` called."""

    def __init__(self, timers: Timers, expired: Callable[[int], None]) -> None:
        super().__init__()
        self._timers, self._expired = timers, expired
        self._timer: Any = None
        self._timer_due = 0.0

    def set_deadline(self, epoch: int, seconds: float) -> None:
        self.set(epoch, self._timers.now() + seconds)
        self._start_timer()

    def close(self) -> None:
        self._values.clear()
        self._heap.clear()
        self._cancel_timer()

    def _start_timer(self) -> None:
        """Start the timer for the lowest heap entry. If the entry is obsolete by then, only start the timer again."""
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
            if self._values.get(epoch) == due:
                del self._values[epoch]
                self._expired(epoch)
        self._start_timer()
