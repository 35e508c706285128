"""Where the code of users runs that waits for results: in whichever thread reads, outside every lock, and never
blocking.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from tfmq.errors import NotAllowed

log = logging.getLogger("tfmq.client")

_running = threading.local()


class Callbacks:
    """A queue of calls into users' code. An exception of one is logged, and the next one runs."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], object]] = deque()

    def add(self, callback: Callable[[], object]) -> None:
        self._due.append(callback)

    def __bool__(self) -> bool:
        return bool(self._due)

    def run(self) -> None:
        """Run what is due; other threads may do so at the same time, each callback runs once."""
        if getattr(_running, "now", False):
            return
        _running.now = True
        try:
            while self._due:
                try:
                    callback = self._due.popleft()
                except IndexError:
                    return
                try:
                    callback()
                except Exception:
                    log.exception("A callback raised.")
        finally:
            _running.now = False

    def clear(self) -> None:
        self._due.clear()


def refuse_in_callback() -> None:
    """Raises `NotAllowed` in a thread that runs a callback: it would wait for what only it can read."""
    if getattr(_running, "now", False):
        raise NotAllowed(
            "A callback must not wait: it runs in the thread that reads the answers. Hand the work to a thread of"
            " your own, or use add_callback again."
        )
