"""Looks after prepared transactions that nobody finishes, and says so in the log: a forgotten one keeps its
messages on the disk and its offsets locked for as long as nobody decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("tfmq.server")

LOOK_SECONDS = 60.0
"""How often it looks; more often where the operator wants to know sooner than that."""
LOOK_SECONDS_MIN = 0.05
REMIND_SECONDS = 3600.0
"""As long as the alarm lasts it is told again, so that it stands in the log of every hour."""


class InDoubt:
    """`status()` is what STATUS says under "transactions"; `call_later` as a reactor has it. One thread."""

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], Any],
        status: Callable[[], Mapping[str, Any]],
        alarm_seconds: float,
    ) -> None:
        self._call_later = call_later
        self._status = status
        self._alarm_seconds = alarm_seconds
        self._pause_seconds = max(LOOK_SECONDS_MIN, min(LOOK_SECONDS, alarm_seconds / 2))
        self._silent_seconds: float | None = None  # since the alarm was told last; None: there is none
        self._call: Any = None

    def start(self) -> None:
        """Look soon and from now on: what was prepared before the start may be old already."""
        self._call = self._call_later(0, self._look)

    def _look(self) -> None:
        try:
            self._judge(self._status())
        finally:
            self._call = self._call_later(self._pause_seconds, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._call is not None and self._call.active():
            self._call.cancel()

    def _judge(self, found: Mapping[str, Any]) -> None:
        if not found.get("alarm"):
            if self._silent_seconds is not None:
                logger.info("no transaction is prepared for longer than %g s any more", self._alarm_seconds)
            self._silent_seconds = None
        elif self._silent_seconds is None or self._silent_seconds + self._pause_seconds >= REMIND_SECONDS:
            self._silent_seconds = 0.0
            logger.error(
                "prepared transactions that wait for their owners: %d, the oldest for %d s, which is longer than "
                "transaction.alarm_seconds = %g; tfmq tx list shows them, docs/operations.md (tfmq --docs) says what "
                "to do",
                found.get("prepared", 0),
                found.get("oldest_prepared_seconds") or 0,
                self._alarm_seconds,
            )
        else:
            self._silent_seconds += self._pause_seconds
