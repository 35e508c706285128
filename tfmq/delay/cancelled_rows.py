"""Cancelled messages that still have rows in memory or buckets, and counts of such rows."""

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
    """A bucket of that size which contains the border of the memory window."""

    bucket: Bucket
    size: int
    border: int


class _Count(NamedTuple):
    """Pending rows of a bucket: all, and those from the border on."""

    pending: int
    ahead: int


class Counting:
    """Counts the dead and the pending rows of buckets, in workers, one bucket at a time.

    Broker thread only. A count is needed when a topic was deleted, for the buckets that have messages of it (also at a
    start, because the broker may have stopped just after the deletion); for all buckets, if the checkpoint has no
    counts; and for the bucket that contains the end of the memory window.
    """

    def __init__(self, buckets: Buckets, shore: Shore) -> None:
        self._buckets, self._shore = buckets, shore
        self._wanted: dict[Span, bool] = {}
        """Buckets to check; True: count also if no topic in it is deleted."""
        self._cut: _Cut | None = None
        self.dropped = 0
        """Messages in buckets whose topic was deleted."""
        self._ahead = 0
        """Pending rows after the border in the bucket `_border_bucket`."""
        if not buckets.counted_offset:
            self.want(buckets.leaves, True)

    def want(self, buckets: Iterable[Bucket], surely: bool) -> None:
        """Request a check of these buckets; `always`: count whether or not a topic is deleted."""
        for bucket in buckets:
            self._wanted[bucket.span] = surely or self._wanted.get(bucket.span, False)

    def died(self, due: int) -> None:
        """Count one more dead row, of this due time."""
        bucket = self._buckets.leaf(due)
        if bucket is None:
            return
        bucket.dead = min(bucket.dead + 1, bucket.count)
        if self._cut is not None and self._cut.bucket is bucket and due >= self._cut.border:
            self._ahead = max(0, self._ahead - 1)

    @property
    def ahead(self) -> int:
        """Pending messages in buckets that are not in memory."""
        border, count = self._shore.border, 0
        for bucket in self._buckets.leaves:
            live = max(0, bucket.count - bucket.dead)
            if bucket.span.start >= border:
                count += live
            elif bucket.span.end > border:
                known = self._cut == (bucket, bucket.size, border)
                # Estimate until it is counted: due times are distributed evenly.
                part = (bucket.span.end - border) / (bucket.span.end - bucket.span.start)
                count += self._ahead if known else int(live * part)
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes of pending messages in buckets.

        All messages of a bucket are assumed to have the same size.
        """
        buckets = [bucket for bucket in self._buckets.leaves if bucket.count]
        return sum([each.size * max(0, each.count - each.dead) // each.count for each in buckets])

    # Work

    @property
    def due(self) -> bool:
        """Whether something is to be counted."""
        return bool(self._wanted) or self._uncounted() is not None

    def _uncounted(self) -> Bucket | None:
        """Return the bucket that contains the border, if its rows after the border are not counted."""
        border = self._shore.border
        bucket = self._buckets.leaf(border)
        if bucket is None or bucket.span.start == border or self._cut == (bucket, bucket.size, border):
            return None
        return bucket

    def begin(self, pending: PendingNow) -> Callable[[], Callable[[], bool]]:
        """Return work for a worker.

        Its result is a function for the broker thread, which stores the counts. That function returns whether the
        count of dead rows has changed.
        """
        bucket, surely = self._uncounted(), True
        while bucket is None and self._wanted:
            span, surely = self._wanted.popitem()
            found = self._buckets.leaf(span.start)
            bucket = found if found is not None and found.span == span else None
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
            if not surely and bucket.span.start >= cut.border:  # earlier rows are dropped in memory
                self.dropped += max(0, bucket.dead - before)
        if bucket.span.start < cut.border < bucket.span.end:
            part = (bucket.span.end - cut.border) / (bucket.span.end - bucket.span.start)
            guess = int(max(0, bucket.count - bucket.dead) * part)
            self._cut, self._ahead = cut, found.ahead if found is not None else guess
        return bucket.dead != before


Change = tuple[int, Turn]
"""The log id of a target, and the former turn of one of its messages."""


class Leaving:
    """Cancelled and rescheduled messages whose rows still exist, in memory or in a bucket.

    Broker thread only. A bucket keeps the rows; it counts them in `dead_count`, which is stored in the checkpoint. The
    count must be exact. So work on files uses only the changes that were durable when it began; later ones are
    collected in `late` and counted when the work has ended. `counted_offset` of the buckets is the offset of the
    arrival log up to which changes are counted in `dead_count`; a start counts the later ones.
    """

    def __init__(self, shore: Shore, lines: Lines, buckets: Buckets, counting: Counting) -> None:
        self._shore, self._lines, self._buckets, self._counting = shore, lines, buckets, counting
        self._written: deque[tuple[int, Sequence[Change]]] = deque()
        """(end offset of the header, changes) that are not durable yet."""
        self.late: dict[Turn, int] = {}
        """Changes that became durable during file work, with their log ids.

        For that work they are pending. Any thread may test whether a turn is in it.
        """
        self._ahead: set[Turn] = set()
        """Turns of `late` that were not in memory."""
        self._works = False
        self._sure_offset = buckets.counted_offset

    @property
    def count(self) -> int:
        """Messages that are counted as pending and should not be."""
        return len(self._ahead)

    def written(self, end_offset: int, changes: Sequence[Change]) -> None:
        """Add changes; their header ends at `end_offset` of the arrival log."""
        self._written.append((end_offset, changes))

    def settle(self, forced_offset: int) -> None:
        """Process the changes up to `forced_offset`, where the log is durable.

        Their arrivals are processed already.
        """
        while self._written and self._written[0][0] <= forced_offset:
            for key, turn in self._written.popleft()[1]:
                self._leave(key, turn)
        self._counted(forced_offset)

    def recovered(self, turns: Iterable[Turn], forced_offset: int) -> None:
        """Add changes that a start found after `counted_offset`; nothing is in memory yet."""
        for turn in turns:
            if turn.number < self._buckets.spilled_number:
                self._counting.died(turn.due)
        self._counted(forced_offset)

    def _counted(self, offset: int) -> None:
        self._sure_offset = max(offset, self._sure_offset)
        if not self._works:
            self._buckets.counted_offset = self._sure_offset

    # During file work

    def begin(self, forced_offset: int) -> None:
        """Start file work."""
        self.settle(forced_offset)
        self._works = True

    def end(self) -> None:
        """End file work and count the changes that became durable during it."""
        self._works = False
        late, ahead = list(self.late.items()), self._ahead
        self.late.clear()
        self._ahead = set()
        for turn, key in late:
            was_in_memory = turn not in ahead
            if not was_in_memory and turn.due < self._shore.border:
                self._from_memory(key, turn)  # it was loaded during the work
                was_in_memory = True
            self._bury(turn, was_in_memory)
        self._counted(self._sure_offset)

    def _leave(self, key: int, turn: Turn) -> None:
        in_memory = turn.due < self._shore.border
        if in_memory:
            self._from_memory(key, turn)
        if not self._works:
            self._bury(turn, in_memory)
            return
        self.late[turn] = key
        if not in_memory:
            self._ahead.add(turn)

    def _from_memory(self, key: int, turn: Turn) -> None:
        if not self._shore.wheel.cancel(*turn):
            self._lines.left(key, turn)

    def _bury(self, turn: Turn, near: bool) -> None:
        if turn.number < self._buckets.spilled_number:
            self._counting.died(turn.due)
        elif not near:
            self._shore.far.count = max(0, self._shore.far.count - 1)
