"""How much waits, and when the next of it is due: for limits, for people, and for the alarm clock."""

from typing import Final

from tfmq.delay.buckets import Buckets
from tfmq.delay.counting import Counting
from tfmq.delay.leaving import Leaving
from tfmq.delay.ledger import Ledger
from tfmq.delay.lines import Lines
from tfmq.delay.requests import Timers
from tfmq.delay.shore import Shore

COUNT_SECONDS: Final = 0.1
"""What was counted less long ago is not counted again: every send asks."""


class Figures:
    """See the module."""

    def __init__(
        self,
        ledger: Ledger,
        shore: Shore,
        lines: Lines,
        buckets: Buckets,
        counting: Counting,
        leaving: Leaving,
        timers: Timers,
    ) -> None:
        self._ledger, self._shore, self._lines = ledger, shore, lines
        self._buckets, self._counting, self._leaving, self._timers = buckets, counting, leaving, timers
        self._count = self._size_bytes = 0
        self._count_again = 0.0

    def landed(self, count: int) -> None:
        """So many more arrived."""
        self._count += count

    @property
    def pending(self) -> int:
        """Messages that wait."""
        self._count_all()
        return self._count

    @property
    def size_bytes(self) -> int:
        """What they take in the buckets: of each as large a part as there is of its messages that wait."""
        self._count_all()
        return self._size_bytes

    def _count_all(self) -> None:
        now = self._timers.now()
        if now >= self._count_again:
            self._count, self._size_bytes = self.count_now(), self._counting.size_bytes
            self._count_again = now + COUNT_SECONDS

    def count_now(self) -> int:
        """In memory, in arrivals and in buckets. What is being loaded is still where it was."""
        in_memory = self._shore.wheel.count - self._shore.coming + self._lines.waiting
        on_disk = self._ledger.messages + self._shore.far_count + self._counting.ahead
        return max(0, in_memory + on_disk - self._leaving.count)

    @property
    def next_on_disk(self) -> int | None:
        """Nothing that is only on the disk is due before; None: there is nothing."""
        bucket = self._buckets.next_after(self._shore.horizon)
        dues = [self._shore.far.low, None if bucket is None else max(bucket.span.start, self._shore.horizon)]
        return min((due for due in dues if due is not None), default=None)

    @property
    def next_due(self) -> int | None:
        """Nothing is due before; None: nothing waits."""
        dues = [self._lines.rows_first, self._shore.wheel.due_next, self.next_on_disk]
        return min((due for due in dues if due is not None), default=None)
