"""Limits for appends of due messages, so that other producers and consumers are not delayed."""

from __future__ import annotations

from typing import Final

from tfmq.apply_queue import InFlightLimit

SLICE_BYTES_MAX: Final = 256 << 10
"""Maximum size of one append of due messages, unless a single message is larger."""
TURN_ROWS_MAX: Final = 1024
"""Maximum number of due messages that are appended in one turn of the broker: about 2 ms of work.

Measured: both with twice and with half this number, sends during a burst took longer and throughput was lower.
"""
TURN_BYTES_MAX: Final = 512 << 10
"""After appends of this many bytes in a turn of the broker (a few ms of work), other appends wait for the next turn."""


class FlowControl(InFlightLimit):
    """Limits the bytes that all target queues have written and not fsynced, and the appends in a turn of the broker."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = self._bytes = 0

    def start_turn(self) -> None:
        self._rows = self._bytes = 0

    @property
    def rows_left(self) -> int:
        """How many due messages may still be appended in this turn of the broker."""
        return 0 if self._bytes >= TURN_BYTES_MAX else max(0, TURN_ROWS_MAX - self._rows)

    def count_written(self, rows: int, size_bytes: int) -> None:
        self._rows += rows
        self._bytes += size_bytes
