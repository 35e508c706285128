"""How much of the buckets nobody waits for any more, found out where it is not known: at a start, when a topic went.

What was cancelled, or is for a topic that is gone, stays in its bucket until that is cut or its time comes; it must not
count as waiting meanwhile. Columns only are read, one bucket at a time, beside everything else.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from tfmq.delay.asking import Asking
from tfmq.delay.bucket import Bucket
from tfmq.delay.buckets import Buckets
from tfmq.delay.pending import PendingNow
from tfmq.delay.spilling import pending_rows

logger = logging.getLogger("tfmq.delay")


class Recount:
    """See the module. One owner's thread."""

    def __init__(self, buckets: Buckets, asking: Asking, pending: Callable[[], PendingNow]) -> None:
        self._buckets, self._asking, self._pending = buckets, asking, pending
        self._wanted = False

    def want(self) -> None:
        """Counts anew, when it is its turn among the requests; whoever wants it before that shares it."""
        if not self._wanted and self._buckets.leaves:
            self._wanted = True
            self._asking.put(self._begin, self._ended)

    def _begin(self) -> Callable[[], list[tuple[Bucket, int]]]:
        self._wanted = False
        return partial(self._count, self._buckets.leaves, self._pending())

    def _count(self, leaves: Sequence[Bucket], pending: PendingNow) -> list[tuple[Bucket, int]]:
        """How many messages of each bucket are dead, in a worker."""
        found = []
        for bucket in leaves:
            with self._buckets.unless_gone(bucket):
                chunks = self._buckets.load(bucket)
                found.append((bucket, sum([pending_rows(columns, pending).count(0) for columns in chunks])))
        return found

    def _ended(self, found: list[tuple[Bucket, int]] | None, error: BaseException | None) -> None:
        if error is not None:
            logger.warning("how many delayed messages are cancelled could not be counted: %s", error)
        for bucket, dead in found or ():
            bucket.dead = dead
