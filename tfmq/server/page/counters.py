"""Counters from which the page makes rates: what was appended to all partitions together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from journal.log.log import Log

FRESH_SECONDS: Final = 1.0
"""For this long the counters are not read again, because that costs milliseconds for each ten thousand partitions."""


class LogCounters:
    """The sums of the ends of all logs. They grow with each append, and never because retention deletes messages."""

    def __init__(self, logs: Callable[[], Iterable[Log]], clock: Callable[[], float]) -> None:
        self._logs, self._clock = logs, clock
        self._read_at = -FRESH_SECONDS
        self._found: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """Return counter -> value, not older than FRESH_SECONDS, and when it was read, in ms of the clock."""
        now = self._clock()
        if now >= self._read_at + FRESH_SECONDS:
            messages = size = 0
            for log in self._logs():
                messages += log.end_ordinal
                size += log.end_offset
            self._read_at = now
            self._found = {"clock_ms": int(now * 1000), "messages_in": messages, "bytes_in": size}
        return self._found
