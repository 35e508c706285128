"""Ids that nobody had before: producer ids and incarnations of topics, from one durable counter.

They are taken from ranges that are forced before the first id of them is given out, and what is left of a
range after a stop, or after an hour, is never used: so an id is given out at most an hour after its range
was leased, and the age of an id is known to the hour.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from journal.clock import Clock
from journal.header import PRODUCER_ID_MAX
from tfmq.broker.catalog import Catalog
from tfmq.broker.register import LEASE
from tfmq.errors import ServerError

RANGE: Final = 4096
"""Ids leased at once: one force serves many; 40 bits last for ever at one range an hour and more."""

RANGE_SECONDS: Final = 3600.0
"""Older ranges are given up; far below the time after which ids expire."""

Taken = Callable[[int, BaseException | None], None]


class Leases:
    """Takes contiguous ids; `taken(first, None)` at once, or after a force."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        self._next = self._end = 0
        self._since = 0.0
        self._waiting: deque[tuple[int, Taken]] = deque()

    def take(self, count: int, taken: Taken) -> None:
        """`count` contiguous ids, at most RANGE of them; `taken(first, None)` or `taken(0, error)`."""
        self._waiting.append((count, taken))
        if len(self._waiting) == 1:
            self._serve()

    def _serve(self) -> None:
        """Gives out what there is, in order; asks for a range where that is not enough."""
        while self._waiting:
            count, taken = self._waiting[0]
            if self._next + count > self._end or self._clock.monotonic() - self._since > RANGE_SECONDS:
                self._refill()
                return
            first = self._next
            self._next += count
            self._waiting.popleft()
            taken(first, None)

    def _refill(self) -> None:
        begin = self._catalog.register.next_id
        end = begin + RANGE
        if end > PRODUCER_ID_MAX:
            self._fail(ServerError("All 2^40 ids have been given out; this data folder cannot go on."))
            return
        since = self._clock.monotonic()

        def forced(error: BaseException | None) -> None:
            if error is not None:
                self._fail(error)
                return
            self._next, self._end, self._since = begin, end, since
            self._serve()

        self._catalog.submit((LEASE, end, self._clock.wall_ms()), forced)

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, taken in waiting:
            taken(0, error)
