"""How many rows of a bucket nobody waits for any more, and how many of one lie behind the horizon: counted by a worker
where it is not known, a bucket at a time.

That is when a topic went, in the buckets that have something for it (also at a start: it may have gone just before the
end); everywhere, where the checkpoint does not say it; and of the bucket in whose middle the horizon is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import Span
from tfmq.delay.buckets.store import Buckets
from tfmq.delay.buckets.writer import pending_rows
from tfmq.delay.memory_window import Shore
from tfmq.delay.pending import PendingNow
from tfmq.delay.requests import Turn
from tfmq.delay.target_queue import Lines

logger = logging.getLogger("tfmq.delay")


class _Cut(NamedTuple):
    """A bucket of that size with the horizon in its middle."""

    bucket: Bucket
    size: int
    border: int


class _Count(NamedTuple):
    """What is pending in a bucket, in all and from the border on."""

    pending: int
    ahead: int


class Counting:
    """See the module. One owner's thread."""

    def __init__(self, buckets: Buckets, shore: Shore) -> None:
        self._buckets, self._shore = buckets, shore
        self._wanted: dict[Span, bool] = {}
        """Where to look, and whether it is to be counted although no topic of it went."""
        self._cut: _Cut | None = None
        self.dropped = 0
        """Messages in buckets whose topic was gone."""
        self._ahead = 0
        """Pending rows behind the border of that bucket."""
        if not buckets.counted_offset:
            self.want(buckets.leaves, True)

    def want(self, buckets: Iterable[Bucket], surely: bool) -> None:
        """These are to be looked at; `surely`: to be counted, whatever is found."""
        for bucket in buckets:
            self._wanted[bucket.span] = surely or self._wanted.get(bucket.span, False)

    def died(self, due: int) -> None:
        """One row of that due nobody waits for any more."""
        bucket = self._buckets.leaf(due)
        if bucket is None:
            return
        bucket.dead = min(bucket.dead + 1, bucket.count)
        if self._cut is not None and self._cut.bucket is bucket and due >= self._cut.border:
            self._ahead = max(0, self._ahead - 1)

    @property
    def ahead(self) -> int:
        """What is pending in buckets and not in memory."""
        border, count = self._shore.border, 0
        for bucket in self._buckets.leaves:
            live = max(0, bucket.count - bucket.dead)
            if bucket.span.start >= border:
                count += live
            elif bucket.span.end > border:
                known = self._cut == (bucket, bucket.size, border)
                # Until that is counted: as if they were due evenly.
                part = (bucket.span.end - border) / (bucket.span.end - bucket.span.start)
                count += self._ahead if known else int(live * part)
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes of what is pending in buckets, as far as these are of one size."""
        leaves = [bucket for bucket in self._buckets.leaves if bucket.count]
        return sum([each.size * max(0, each.count - each.dead) // each.count for each in leaves])

    # The work

    @property
    def due(self) -> bool:
        """Whether something is to be counted."""
        return bool(self._wanted) or self._uncounted() is not None

    def _uncounted(self) -> Bucket | None:
        """The bucket in whose middle the border is, if its rows behind that are not known."""
        border = self._shore.border
        bucket = self._buckets.leaf(border)
        if bucket is None or bucket.span.start == border or self._cut == (bucket, bucket.size, border):
            return None
        return bucket

    def begin(self, pending: PendingNow) -> Callable[[], Callable[[], bool]]:
        """Work for a worker; its answer is for the owner: it takes over what was found, and says if that is news."""
        bucket, surely = self._uncounted(), True
        while bucket is None and self._wanted:
            span, surely = self._wanted.popitem()
            leaf = self._buckets.leaf(span.start)
            bucket = leaf if leaf is not None and leaf.span == span else None
        if bucket is None:
            return lambda: lambda: False
        return partial(self._look, _Cut(bucket, bucket.size, self._shore.border), surely, pending)

    def _look(self, cut: _Cut, surely: bool, pending: PendingNow) -> Callable[[], bool]:
        bucket, files = cut.bucket, self._buckets.files
        found = None
        try:
            with self._buckets.unless_gone(bucket):
                if surely or any(pending.gone(row.log_id) for table in bucket.tables(files) for row in table):
                    found = self._count(cut, pending)
        except OSError as error:
            logger.warning("delayed messages in %s cannot be counted: %s", bucket.path, error)
        return partial(self._counted, cut, found, surely)

    def _count(self, cut: _Cut, pending: PendingNow) -> _Count:
        count = ahead = 0
        for columns in self._buckets.load(cut.bucket):
            rows = pending_rows(columns, pending)
            count += len(rows) - rows.count(0)
            ahead += sum(compress(map(cut.border.__le__, columns.dues), rows))
        return _Count(count, ahead)

    def _counted(self, cut: _Cut, found: _Count | None, surely: bool) -> bool:
        bucket = cut.bucket
        before = bucket.dead
        if found is not None:
            bucket.dead = max(0, bucket.count - found.pending)
            if not surely and bucket.span.start >= cut.border:  # what lies before is dropped in memory
                self.dropped += max(0, bucket.dead - before)
        if bucket.span.start < cut.border < bucket.span.end:
            part = (bucket.span.end - cut.border) / (bucket.span.end - bucket.span.start)
            guess = int(max(0, bucket.count - bucket.dead) * part)
            self._cut, self._ahead = cut, found.ahead if found is not None else guess
        return bucket.dead != before


Change = tuple[int, Turn]
"""A target, and the turn that one of its messages had."""


class Leaving:
    """Messages that were cancelled or moved, until they count no more: where they are in memory, and in which bucket.

    A bucket keeps its rows of them: how many those are is its `dead`, and stands in the checkpoint. It must be exact,
    so whoever works with the files sees the changes that were sure when his work began, and no later one: those are
    kept apart, and entered when the work has ended. An offset of the arrivals tells which changes are in `dead`; a
    start enters the ones behind it.

    One owner's thread.
    """

    def __init__(self, shore: Shore, lines: Lines, buckets: Buckets, counting: Counting) -> None:
        self._shore, self._lines, self._buckets, self._counting = shore, lines, buckets, counting
        self._written: deque[tuple[int, Sequence[Change]]] = deque()
        """Changes whose notes end at these offsets, and are not known to be on the disk."""
        self.late: dict[Turn, int] = {}
        """What became sure while files are worked on, and for whom it was: pending, for that work. Any thread may look
        whether a turn is in it."""
        self._ahead: set[Turn] = set()
        """Those of them that were not in memory."""
        self._works = False
        self._sure_offset = buckets.counted_offset

    @property
    def count(self) -> int:
        """So many count where they lie, and should not."""
        return len(self._ahead)

    def written(self, end_offset: int, changes: Sequence[Change]) -> None:
        """The note about them ends there in the arrivals."""
        self._written.append((end_offset, changes))

    def settle(self, forced_offset: int) -> None:
        """The arrivals are on the disk up to there, and what arrived before was taken over."""
        while self._written and self._written[0][0] <= forced_offset:
            for key, turn in self._written.popleft()[1]:
                self._leave(key, turn)
        self._counted(forced_offset)

    def recovered(self, turns: Iterable[Turn], forced_offset: int) -> None:
        """A start found these changes behind those that are counted; nothing is in memory yet."""
        for turn in turns:
            if turn.number < self._buckets.spilled_number:
                self._counting.died(turn.due)
        self._counted(forced_offset)

    def _counted(self, offset: int) -> None:
        self._sure_offset = max(offset, self._sure_offset)
        if not self._works:
            self._buckets.counted_offset = self._sure_offset

    # Beside work with files

    def begin(self, forced_offset: int) -> None:
        """Files are worked on from now on; `settle` is done first."""
        self.settle(forced_offset)
        self._works = True

    def end(self) -> None:
        """That is over."""
        self._works = False
        late, ahead = list(self.late.items()), self._ahead
        self.late.clear()
        self._ahead = set()
        for turn, key in late:
            near = turn not in ahead
            if not near and turn.due < self._shore.border:
                self._from_memory(key, turn)  # it was loaded
                near = True
            self._bury(turn, near)
        self._counted(self._sure_offset)

    def _leave(self, key: int, turn: Turn) -> None:
        near = turn.due < self._shore.border
        if near:
            self._from_memory(key, turn)
        if not self._works:
            self._bury(turn, near)
            return
        self.late[turn] = key
        if not near:
            self._ahead.add(turn)

    def _from_memory(self, key: int, turn: Turn) -> None:
        if not self._shore.wheel.cancel(*turn):
            self._lines.left(key, turn)

    def _bury(self, turn: Turn, near: bool) -> None:
        if turn.number < self._buckets.spilled_number:
            self._counting.died(turn.due)
        elif not near:
            self._shore.far.count = max(0, self._shore.far.count - 1)
