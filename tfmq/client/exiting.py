"""What happens to producers that nobody closed when the interpreter ends: a bounded flush, a log of what was lost.

They are held until then, so that a producer that goes out of scope still delivers what it was given.
"""

from __future__ import annotations

import atexit
import logging
from typing import Protocol

log = logging.getLogger("tfmq.producer")

EXIT_SECONDS = 5.0
"""All open producers together; a broker that is away must not keep a process from ending."""


class Unclosed(Protocol):
    """A producer, as the end of the interpreter sees it."""

    def finish(self, seconds: float) -> int:
        """Flush for at most `seconds` and close; how many messages were not delivered."""
        ...


_open: set[Unclosed] = set()


def opened(producer: Unclosed) -> None:
    _open.add(producer)


def closed(producer: Unclosed) -> None:
    _open.discard(producer)


def _finish_all() -> None:
    for producer in list(_open):
        try:
            lost = producer.finish(EXIT_SECONDS / max(1, len(_open)))
        except Exception:
            log.exception("A producer could not be flushed at the end of the program.")
            continue
        if lost:
            log.error(
                "%d messages were not delivered when the program ended: close producers, or use `with`.", lost
            )


atexit.register(_finish_all)
