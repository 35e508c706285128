"""Short numbers for the logs to which messages in memory go: 23 bits in the wheel instead of 64 and a name."""

from threading import Lock
from typing import NamedTuple

from journal.record.format import SEQUENCE_BITS
from tfmq.delay.wheel_slots import TARGETS_MAX


class TargetRow(NamedTuple):
    """A partition's log, and its topic for people."""

    key: int
    topic: str


class Targets:
    """A number stays as long as `clear` is not called. Workers may ask for one beside the owner."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: dict[int, int] = {}
        self._rows: list[TargetRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, key: int, topic: str) -> int:
        """The log's number. Raises OverflowError if there are none left."""
        known = self._numbers.get(key)
        if known is not None:
            return known
        with self._lock:
            if key not in self._numbers:
                if len(self._rows) == TARGETS_MAX:
                    raise OverflowError(f"more than {TARGETS_MAX} logs have delayed messages in memory")
                self._rows.append(TargetRow(key, topic))
                self._numbers[key] = len(self._rows) - 1
            return self._numbers[key]

    def of(self, incarnation: int) -> frozenset[int]:
        """The numbers of that topic's logs."""
        with self._lock:
            rows = enumerate(self._rows)
            return frozenset(number for number, row in rows if row.key >> SEQUENCE_BITS == incarnation)

    def row(self, number: int) -> TargetRow:
        """What a number stands for."""
        return self._rows[number]

    def clear(self) -> None:
        """Nobody has a number any more."""
        with self._lock:
            self._numbers.clear()
            self._rows.clear()
