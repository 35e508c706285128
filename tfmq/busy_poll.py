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

SECONDS: Final = 100e-6
"""A wait is short if it ends within this time, and busy polling lasts at most this long, unless the caller has another
limit."""
SHORT_WAITS_MIN: Final = 4
"""Number of consecutive short waits after which busy polling begins. One long wait ends it."""
PAUSE_SECONDS: Final = 1.0
"""No busy polling for this long after one that lasted twice as long as its limit. Then another program has got the
processor, or the process has used up its quota. A thread that blocks gets the processor back when its event comes; one
that has yielded gets it back after the other's time slice, milliseconds later."""

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
        self._pause_until = float("-inf")

    def poll(
        self, poll: Callable[..., list[tuple[int, int]]], timeout: float, *arguments: Any, seconds: float = SECONDS
    ) -> list[tuple[int, int]]:
        """Return `poll(timeout, *arguments)`, where `poll` is the method of a poll object of the module `select`.

        It may last `seconds` longer than `timeout`, unless `timeout` is 0.
        """
        yield_processor = self._yield_processor
        if not timeout or yield_processor is None:
            return poll(timeout, *arguments)
        clock = self._clock
        begun = clock()
        if self._short_waits >= SHORT_WAITS_MIN and begun >= self._pause_until:
            until = begun + seconds
            while not (events := poll(0, *arguments)) and clock() < until:
                # Otherwise a peer that needs this processor for its answer could not run before the time is over.
                yield_processor()
            if (now := clock()) > until + seconds:
                self._pause_until = now + PAUSE_SECONDS
            if events:
                return events
        events = poll(timeout, *arguments)
        self._short_waits = self._short_waits + 1 if clock() - begun < seconds else 0
        return events
