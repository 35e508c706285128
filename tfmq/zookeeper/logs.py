"""What kazoo says of its connections, said sparingly: it connects for as long as that takes, and tells each time.

Its tracebacks show its own inside, and are left out: who sees one cannot do more than its first line says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

AGAIN_SECONDS: Final = 60.0
"""The same words are said again after so long."""
TEXTS_MAX: Final = 100
"""Different words that are remembered; with more of them all are forgotten."""
NO_NEWS: Final = "Failed connecting to Zookeeper within the connection retry policy."
"""What it says when it stops connecting, which it does only because it was told to."""
NO_ZOOKEEPER: Final = "Exception raised during deserialization of request"
"""How it tells that something answers that is no ZooKeeper; what follows is of use to nobody."""


class Sparing(logging.Filter):
    """Lets warnings and errors through, the same one once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is to be said."""
        if record.levelno < logging.WARNING or record.msg == NO_NEWS:
            return False
        if isinstance(record.msg, str) and record.msg.startswith(NO_ZOOKEEPER):
            record.msg, record.args = "What answers there is no ZooKeeper, or one that wants TLS.", ()
        record.exc_info = record.exc_text = None
        now, text = self._clock(), record.getMessage()
        if now < self._said_at.get(text, float("-inf")) + AGAIN_SECONDS:
            return False
        if len(self._said_at) >= TEXTS_MAX:
            self.forget()
        self._said_at[text] = now
        return True

    def forget(self) -> None:
        """Everything may be said again."""
        self._said_at.clear()


logger: Final = logging.getLogger("tfmq.zookeeper")
logger.addFilter(Sparing())
