"""How late messages are: time from due to written, counted in buckets that double."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

BUCKETS: Final = 42
"""The last takes everything later than 34 years."""
PARTS: Final = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}


class Lateness:
    """Bucket 0 counts 0 ms, bucket n from 2^(n-1) up to below 2^n ms."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.max_ms = 0
        self.total = 0

    def note(self, late_ms: int, count: int = 1) -> None:
        """So many messages were so late."""
        late_ms = max(0, late_ms)
        self.counts[min(late_ms.bit_length(), BUCKETS - 1)] += count
        self.total += count
        if late_ms > self.max_ms:
            self.max_ms = late_ms

    def note_sorted(self, now_ms: int, dues: Sequence[int]) -> None:
        """Messages with these dues, lowest first, were written now."""
        end = len(dues)
        for bucket in range(BUCKETS):
            # Later than what this bucket counts are those that were due before.
            start = bisect_left(dues, now_ms - (1 << bucket) + 1, 0, end) if bucket < BUCKETS - 1 else 0
            self.counts[bucket] += end - start
            end = start
            if not end:
                break
        self.total += len(dues)
        if dues:
            self.max_ms = max(self.max_ms, now_ms - dues[0])

    def below(self, part: float) -> int:
        """This part of all messages was not later, in ms: the upper end of a bucket. 0 without messages."""
        wanted, seen = part * self.total, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min((1 << bucket) - 1, self.max_ms)
        return self.max_ms

    def status(self) -> dict[str, Any]:
        """p50, p99, p99.9, the maximum (ms) and the buckets."""
        known: dict[str, Any] = {name: self.below(part) for name, part in PARTS.items()}
        return known | {"max_ms": self.max_ms, "count": self.total, "counts": list(self.counts)}
