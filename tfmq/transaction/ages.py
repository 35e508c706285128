"""Which prepared transaction has waited longest: what an operator must hear of."""

import heapq
from typing import Final

DEAD_MIN: Final = 1024
"""Below this many dead entries a clean-up of the heap is not worth its pass."""


class Ages:
    """Prepared transactions by the time (wall clock, ms) at which they were prepared."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, epoch: int, prepared_ms: int) -> None:
        self._times[epoch] = prepared_ms
        heapq.heappush(self._heap, (prepared_ms, epoch))

    def remove(self, epoch: int) -> None:
        """Harmless if it is not there."""
        self._times.pop(epoch, None)
        if len(self._heap) > 2 * len(self._times) + DEAD_MIN:
            self._heap = [(time_ms, each) for each, time_ms in self._times.items()]
            heapq.heapify(self._heap)

    @property
    def oldest_ms(self) -> int | None:
        """When the one that has waited longest was prepared; None if there is none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
