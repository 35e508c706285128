"""Ids that nobody had before: producer ids and incarnations of topics, from one durable counter.

They are taken from ranges that are forced before the first id of them is given out, and what is left of a
range after a stop, or after an hour, is never used: so an id is given out at most an hour after its range
was leased, and the age of an id is known to the hour.

A data folder may be an older copy of one that went on: its counter is behind ids that are in use. So a range begins
at the clock's number where that is higher (`IDS_PER_SECOND`), except in a folder that never gave an id.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from journal.clock import Clock
from journal.record.format import PRODUCER_ID_MAX
from tfmq.broker.catalog import Catalog
from tfmq.broker.register import LEASE
from tfmq.errors import ServerError

RANGE: Final = 4096
"""Ids leased at once: one force serves many; 40 bits last for ever at one range an hour and more."""

IDS_PER_SECOND: Final = 256
CLOCK_BEGIN_SECONDS: Final = 1_700_000_000
"""The clock's number is 256 for each second since November 2023. A range is 4,096, so a copy that is started 16 seconds
after the folder it was taken from leased its last range gives none of its ids again."""
CLOCK_ID_MAX: Final = PRODUCER_ID_MAX // 2
"""A clock that is wrong by centuries uses up no more than half of all ids; the true time reaches it in 2091."""

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
        begin = self._begin()
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

    def _begin(self) -> int:
        """Where the next range begins. What lies between the counter and the clock's number is given up."""
        register = self._catalog.register
        if not register.leases:
            return register.next_id
        seconds = self._clock.wall_ms() // 1000 - CLOCK_BEGIN_SECONDS
        return max(register.next_id, min(seconds * IDS_PER_SECOND, CLOCK_ID_MAX))

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, taken in waiting:
            taken(0, error)
