"""Brings rows back to a line that had given them up: from the buckets and the arrivals, a bounded number at a time."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tfmq.delay.buckets import Buckets, Pending
from tfmq.delay.gathering import Area, Gatherer, in_order
from tfmq.delay.ledger import Near
from tfmq.delay.line import ROWS_MAX, Line
from tfmq.delay.lines import Lines
from tfmq.delay.patience import PAUSE_SECONDS
from tfmq.delay.requests import Turn
from tfmq.delay.rows import Part


class Found(NamedTuple):
    """`more`: the turn from which on there are others; None: these are all."""

    part: Part
    more: Turn | None


class Reloading:
    """See the module. One line at a time."""

    def __init__(self, lines: Lines, buckets: Buckets, gatherer: Gatherer) -> None:
        self._lines, self._buckets, self._gatherer = lines, buckets, gatherer
        self._line: Line | None = None
        self._ticket = 0

    @property
    def wanted(self) -> bool:
        """Whether a line is behind and would fire."""
        return self._lines.wanting() is not None

    def begin(
        self, from_offset: int, to_offset: int, front: Turn, pending: Pending
    ) -> Callable[[], Found | None]:
        """Work for a worker: what of the first such line has a turn below `front`, all that ever came to it."""
        self._line = line = self._lines.wanting()
        if line is None or line.behind is None:
            return lambda: None
        self._ticket = line.reload()
        return partial(self._find, line.key, line.behind, from_offset, to_offset, front, pending)

    def _find(
        self, key: int, after: Turn, from_offset: int, to_offset: int, front: Turn, pending: Pending
    ) -> Found:
        """A bucket at a time until there are enough; the arrivals are looked through as far as that reached."""
        found: list[Near] = []
        high = front.due + 1
        count, covered = 0, high
        for bucket in self._buckets.leaves:
            if bucket.span.end <= after.due or bucket.span.start >= high:
                continue
            area = Area(after.due, high, [bucket], 0, 0)
            found += self._gatherer.near(area, pending, (key,))
            count = sum([len(near.dues) for near in found])
            if count >= ROWS_MAX:
                covered = min(high, bucket.span.end)
                break
        found += self._gatherer.near(Area(after.due, covered, [], from_offset, to_offset), pending, (key,))
        part, more = in_order(found, after, front, ROWS_MAX)
        if more is None and covered < high:
            more = Turn(covered, 0)
        return Found(part, more)

    def end(self, found: Found | None, error: BaseException | None) -> None:
        """What the work found, or why not: then the line waits a moment."""
        line, self._line = self._line, None
        if line is None:
            return
        if found is None:
            line.reloaded(self._ticket, None, None)
            line.hold(PAUSE_SECONDS)
        else:
            line.reloaded(self._ticket, *found)
