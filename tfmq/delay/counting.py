"""How many rows of a bucket nobody waits for any more, and how many of one lie behind the horizon: counted by a worker
where it is not known, a bucket at a time.

That is when a topic went, in the buckets that have something for it (also at a start: it may have gone just before the
end); everywhere, where the checkpoint does not say it; and of the bucket in whose middle the horizon is.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from typing import NamedTuple

from tfmq.delay.bucket import Bucket
from tfmq.delay.buckets import Buckets
from tfmq.delay.pending import PendingNow
from tfmq.delay.shore import Shore
from tfmq.delay.spans import Span
from tfmq.delay.spilling import pending_rows

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
