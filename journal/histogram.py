"""Histograms of times, cheap enough to record each request and each fsync."""

from bisect import bisect_left
from typing import Final

BOUNDS_SECONDS: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the buckets in seconds. The last bucket, which has no bound, has everything above."""


class TimeHistogram:
    """Counts times by size. `counts` has one more number than BOUNDS_SECONDS. Used in one thread."""

    __slots__ = ("counts", "sum_seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def record(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds
