"""One delayed call of the reactor that follows the engine's next due time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from journal.clock import Clock


class Alarm:
    """Calls `ring()` at the time that was set last, or before: ringing early is harmless, moving an alarm at
    every turn is not. Whoever is rung sets the next time.
    """

    def __init__(self, reactor: Any, clock: Clock, ring: Callable[[], None]) -> None:
        self._reactor = reactor
        self._clock = clock
        self._ring = ring
        self._call: Any = None
        self._due = 0.0

    def set(self, due: float | None) -> None:
        """Ring at `due` (monotonic seconds) at the latest; with None there is nothing to ring for now."""
        if due is None or (self._call is not None and self._due <= due):
            return
        if self._call is not None:
            self._call.cancel()
        self._due = due
        self._call = self._reactor.callLater(max(0.0, due - self._clock.monotonic()), self._rung)

    def _rung(self) -> None:
        self._call = None
        self._ring()
