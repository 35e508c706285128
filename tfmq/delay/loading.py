"""Brings what is due between the old horizon and a new one into the wheel; until it is there nothing of it fires."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from tfmq.delay.buckets import Buckets, Pending
from tfmq.delay.gathering import Area, Gatherer
from tfmq.delay.ledger import Near
from tfmq.delay.requests import Run, Timers
from tfmq.delay.shore import Shore

logger = logging.getLogger("tfmq.delay")

PUT_ROWS: Final = 8192
"""Rows that come to the wheel in one turn, some three milliseconds' work."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 10.0
"""What the disk does not give is asked for again after pauses that double between these: nothing behind it fires."""


class Loading:
    """See the module. One load at a time."""

    def __init__(
        self, shore: Shore, buckets: Buckets, gatherer: Gatherer, *, timers: Timers, run: Run
    ) -> None:
        self._shore, self._buckets, self._gatherer = shore, buckets, gatherer
        self._timers, self._run = timers, run
        self._pause = PAUSE_SECONDS
        self._stopping = False
        self._done: Callable[[], None] | None = None

    def begin(
        self, to: int, from_offset: int, to_offset: int, pending: Pending, done: Callable[[], None]
    ) -> None:
        """Moves the horizon to `to`; `done()` when all below it is in the wheel. Arrivals between the offsets are in no
        bucket."""
        low = self._shore.begin_load(to)
        buckets = [each for each in self._buckets.leaves if each.span.end > low and each.span.start < to]
        self._done = done
        self._gather(Area(low, to, buckets, from_offset, to_offset), pending)

    def stop(self) -> None:
        """What is not there yet is not waited for."""
        self._stopping = True

    def _gather(self, area: Area, pending: Pending) -> None:
        self._run(partial(self._gatherer.near, area, pending), partial(self._loaded, area, pending))

    def _loaded(
        self, area: Area, pending: Pending, found: list[Near] | None, error: BaseException | None
    ) -> None:
        """An error leaves all as it is, since what arrived meanwhile was judged by the new horizon: once more."""
        if found is not None:
            self._pause = PAUSE_SECONDS
            self._put([near for near in found if len(near.dues)])
        elif self._stopping:
            self._end()
        else:
            logger.error("delayed messages that are soon due cannot be loaded, tried again: %s", error)
            self._timers.after(self._pause, partial(self._gather, area, pending))
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)

    def _put(self, found: list[Near]) -> None:
        """Some rows a turn, so that nobody waits for all of them."""
        room = PUT_ROWS
        while found and room > 0:
            near = found.pop()
            if len(near.dues) > room:
                found.append(Near(*(column[room:] for column in near)))
                near = Near(*(column[:room] for column in near))
            self._shore.put(near)
            room -= len(near.dues)
        if found and not self._stopping:
            self._timers.after(0.0, partial(self._put, found))
            return
        if not found:
            self._shore.end_load()
        self._end()

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()
