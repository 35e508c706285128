"""How much waits, and when the next of it is due: for limits, for people, and for the alarm clock."""

from typing import Final

from tfmq.delay.buckets import Buckets
from tfmq.delay.ledger import Ledger
from tfmq.delay.lines import Lines
from tfmq.delay.requests import Timers
from tfmq.delay.shore import Shore

COUNT_SECONDS: Final = 0.1
"""What was counted less long ago is not counted again: every send asks."""


class Figures:
    """See the module. `pending` is near enough: what is cancelled while files are worked on may count for longer."""

    def __init__(self, ledger: Ledger, shore: Shore, lines: Lines, buckets: Buckets, timers: Timers) -> None:
        self._ledger, self._shore, self._lines = ledger, shore, lines
        self._buckets, self._timers = buckets, timers
        self._count = 0
        self._count_again = 0.0

    def landed(self, count: int) -> None:
        """So many more arrived."""
        self._count += count

    def gone(self, due: int, number: int) -> None:
        """A message that lies on the disk only is not waited for any more."""
        self._count -= 1
        if number >= self._buckets.spilled_number:
            self._shore.far.count = max(0, self._shore.far.count - 1)
        elif (bucket := self._buckets.leaf(due)) is not None:
            bucket.dead += 1

    @property
    def pending(self) -> int:
        """Messages that wait."""
        now = self._timers.now()
        if now >= self._count_again:
            shore, leaves = self._shore, self._buckets.leaves
            ahead = [max(0, each.count - each.dead) for each in leaves if each.span.start >= shore.horizon]
            near = shore.wheel.count + self._lines.queued
            self._count = self._ledger.messages + near + max(0, shore.far.count) + sum(ahead)
            self._count_again = now + COUNT_SECONDS
        return self._count

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
