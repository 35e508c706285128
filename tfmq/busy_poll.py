"""Busy polling: before a wait that blocks, poll again and again for a short time, if the last waits were short.

A wait that blocks lets the processor go idle, and then the peer's write has to wake it. Between the broker and one
client that waits for each answer, these wake-ups take half of the time of a request
(docs/decisions/busy-polling.md has the figures).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

from tfmq.backoff import Backoff

SECONDS: Final = 100e-6
"""A wait is short if it ends within this limit, and busy polling lasts at most this long, unless the caller has another
limit, or the work before the wait took long."""
WORK_FACTOR: Final = 3
"""The limit is at least this many times the time since the last wait, up to `SECONDS_MAX`. So on a slow machine it is
longer, as are the waits, and the time that is polled for nothing is in proportion to the work."""
SECONDS_MAX: Final = 400e-6
FSYNC_SECONDS: Final = 500e-6
"""The limit of a thread that waits for an fsync: of the broker during one, and of a producer whose messages are
acknowledged after one."""
SHORT_WAITS_MIN: Final = 4
"""Number of consecutive short waits after which busy polling begins. One long wait ends it."""
PAUSE_SECONDS: Final = 0.02
"""No busy polling for this long after one that lasted twice as long as its limit. Then another program has got the
processor, or the process has used up its quota. A thread that blocks gets the processor back when its event comes; one
that has yielded gets it back after the other's time slice, milliseconds later."""
PAUSE_SECONDS_MAX: Final = 1.0
"""The pause is doubled up to this if the processor is lost again, until it was kept for this long."""

_YIELD_PROCESSOR: Final[Callable[[], None] | None] = getattr(os, "sched_yield", None)


class BusyPoll:
    """Decides for the polls of one thread whether they busy-poll. An idle thread never does.

    `yield_processor` lets other threads run on this processor. Where the platform has no such function, every poll
    blocks at once.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, yield_processor: Callable[[], None] | None = _YIELD_PROCESSOR
    ) -> None:
        self._clock = clock
        self._yield_processor = yield_processor
        self._short_waits = 0
        self._waited_at = clock()
        self._pause = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        self._pause_until = float("-inf")

    def poll(
        self, poll: Callable[..., list[tuple[int, int]]], timeout: float, *arguments: Any, seconds: float = SECONDS
    ) -> list[tuple[int, int]]:
        """Return `poll(timeout, *arguments)`, where `poll` is the method of a poll object of the module `select`.

        `seconds`: the limit of busy polling, if the work before this wait does not make it longer. A wait may last as
        much longer than `timeout`, unless `timeout` is 0.
        """
        yield_processor = self._yield_processor
        if not timeout or yield_processor is None:
            return poll(timeout, *arguments)
        clock = self._clock
        begun = clock()
        by_work = WORK_FACTOR * (begun - self._waited_at)
        if by_work > SECONDS_MAX:
            by_work = SECONDS_MAX
        if by_work > seconds:
            seconds = by_work
        if self._short_waits >= SHORT_WAITS_MIN and begun >= self._pause_until:
            until = begun + seconds
            while not (events := poll(0, *arguments)) and clock() < until:
                # Otherwise a peer that needs this processor for its answer could not run before the time is over.
                yield_processor()
            self._waited_at = now = clock()
            if now > until + seconds:
                if begun > self._pause_until + PAUSE_SECONDS_MAX:
                    self._pause.reset()
                self._pause_until = now + self._pause.advance()
            if events:
                return events
        events = poll(timeout, *arguments)
        self._waited_at = now = clock()
        self._short_waits = self._short_waits + 1 if now - begun < seconds else 0
        return events
