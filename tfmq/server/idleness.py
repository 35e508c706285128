"""When nobody is connected for long, a server that was started for its clients ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Idleness:
    """Calls `end` once when there was no session for `seconds`, from `start` on; 0 seconds: never."""

    def __init__(
        self,
        call_later: Callable[..., Any],
        seconds: float,
        sessions: Callable[[], int],
        end: Callable[[], None],
    ) -> None:
        self._call_later = call_later
        self._seconds = seconds
        self._sessions = sessions
        self._end = end
        self._call: Any = None
        self._running = False

    def start(self) -> None:
        self._running = True
        self.look()

    def look(self) -> None:
        """A session came or went."""
        idle = self._running and self._seconds > 0 and not self._sessions()
        if idle and self._call is None:
            self._call = self._call_later(self._seconds, self._over)
        elif not idle and self._call is not None:
            self._call.cancel()
            self._call = None

    def stop(self) -> None:
        self._running = False
        self.look()

    def _over(self) -> None:
        self._call = None
        self._running = False
        self._end()
