"""Counters from which the page makes rates: messages appended to all partitions, bytes received and sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from journal.log.log import Log

FRESH_SECONDS: Final = 1.0
"""For this long the counters are not read again, because that costs milliseconds for each ten thousand partitions."""


class Counters:
    """Messages of all logs, and bytes of all connections.

    The sum of the logs' ends grows with each append, and is not changed by retention. `bytes_counted` returns the bytes
    that were received from and sent to clients.
    """

    def __init__(
        self,
        logs: Callable[[], Iterable[Log]],
        bytes_counted: Callable[[], tuple[int, int]],
        clock: Callable[[], float],
    ) -> None:
        self._logs, self._bytes_counted, self._clock = logs, bytes_counted, clock
        self._read_at = -FRESH_SECONDS
        self._found: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """Return counter -> value, not older than FRESH_SECONDS; `clock_ms` is when it was read, by the clock."""
        now = self._clock()
        if now >= self._read_at + FRESH_SECONDS:
            received, sent = self._bytes_counted()
            self._read_at = now
            self._found = {
                "clock_ms": int(now * 1000),
                "messages_appended": sum(log.end_ordinal for log in self._logs()),
                "bytes_received": received,
                "bytes_sent": sent,
            }
        return self._found
