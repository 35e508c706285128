"""Forces of single files in the reactor: the kernel does them, an eventfd tells their end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from journal.linux_aio import Begin, ForceQueue
from tfmq.server.workers import Wakeup

LOOK_SECONDS = 0.25
"""How often ends of forces are looked for that no eventfd told: an answer may be late, it never fails to come."""

logger = logging.getLogger("tfmq.server")


class Forces:
    """`begin` is for the engine; None where the system cannot, then the engine's workers force."""

    def __init__(self, reactor: Any, delivered: Callable[[], None], queue: ForceQueue | None = None) -> None:
        """`delivered()` is called behind the callbacks of whatever ended together. `queue`: instead of the system's."""
        self._reactor = reactor
        self._delivered = delivered
        self._queue = queue or ForceQueue.open()
        self.begin: Begin | None = None
        if self._queue is not None:
            self.begin = self._queue.begin
            self._wakeup = Wakeup(self._deliver, self._queue.fileno())
            reactor.addReader(self._wakeup)
            self._later = reactor.callLater(LOOK_SECONDS, self._look)

    def stop(self) -> None:
        """Give it back; nothing may be under way."""
        if self._queue is not None:
            self._later.cancel()
            self._reactor.removeReader(self._wakeup)
            self._queue.close()

    def _look(self) -> None:
        self._later = self._reactor.callLater(LOOK_SECONDS, self._look)
        if self._queue is not None and self._queue.busy:
            self._deliver()

    def _deliver(self) -> None:
        for flight in self._queue.ended() if self._queue is not None else ():
            try:
                flight.landed(flight.error)
            except Exception:
                logger.exception("what follows a force failed")
        self._delivered()
