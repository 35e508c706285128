"""What kazoo says of its connections, said sparingly: it connects for as long as that takes, and tells each time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

AGAIN_SECONDS: Final = 60.0
"""The same words are said again after so long."""
TEXTS_MAX: Final = 100
"""Different words that are remembered; with more of them all are forgotten."""


class Sparing(logging.Filter):
    """Lets warnings and errors through, the same one once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is to be said."""
        if record.levelno < logging.WARNING:
            return False
        now, text = self._clock(), record.getMessage()
        if now < self._said_at.get(text, float("-inf")) + AGAIN_SECONDS:
            return False
        if len(self._said_at) >= TEXTS_MAX:
            self._said_at.clear()
        self._said_at[text] = now
        return True


logger: Final = logging.getLogger("tfmq.zookeeper")
logger.addFilter(Sparing())
