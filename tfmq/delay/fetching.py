"""The records of due messages, from wherever they lie: the arrivals, or a bucket.

Rows come in the order of their turns. What is in memory is read in that order, each record by itself unless neighbours
follow one another; from the disk in the order of positions.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple

from journal.log.log import Log
from tfmq.delay.arrived_records import ArrivedRecords, Found
from tfmq.delay.buckets import Buckets
from tfmq.delay.columns import POSITION_MASK, SLOT_SHIFT
from tfmq.delay.proven import Proven

ARRIVALS: Final = 0
"""The slot of a locator that names no bucket."""


class Fetched(NamedTuple):
    """Records of the first rows that were asked for, in their order, fewer where bytes were too many; None: damaged."""

    records: Sequence[bytes | None]


class Fetching:
    """See the module. `cached` in the owner's thread, `read` in any."""

    def __init__(self, log: Log, buckets: Buckets) -> None:
        self._buckets = buckets
        proven = Proven()
        self._inline = ArrivedRecords(log, proven)
        self._slow = ArrivedRecords(log, proven)
        self._lock = Lock()

    def cached(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Fetched | None:
        """The records of the first rows; None where that would wait for the disk, or take long. Raises OSError."""
        found = self._in_turn(locators, numbers, bytes_max, True)
        return None if found is None else Fetched(found)

    def read(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Fetched:
        """As `cached`, and waits. Raises OSError, Closed."""
        count = len(locators)
        plain = list(locators)
        order = sorted(range(count), key=plain.__getitem__)
        rising = [plain[row] for row in order]
        if rising == plain:
            return Fetched(self._slowly(rising, numbers, bytes_max))
        found = self._slowly(rising, [numbers[row] for row in order], bytes_max)
        by_row: list[bytes | int | None] = [0] * count
        for row, record in zip(order, found, strict=False):
            by_row[row] = record
        end = by_row.index(0) if len(found) < count else count
        if end:
            return Fetched(by_row[:end])  # type: ignore[arg-type]
        # What must come first lies behind what filled the room: it is read alone.
        first = order.index(0)
        return Fetched(self._slowly([rising[first]], [numbers[order[first]]], bytes_max))

    def _slowly(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Found:
        found = self._in_turn(locators, numbers, bytes_max, False)
        assert found is not None, "a read that may wait answers"
        return found

    def _in_turn(
        self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int, cached: bool
    ) -> Found | None:
        """One call for each file that they lie in."""
        count = len(locators)
        if count and min(locators) >> SLOT_SHIFT == max(locators) >> SLOT_SHIFT:
            return self._from_file(locators[0] >> SLOT_SHIFT, locators, numbers, bytes_max, cached)
        rows_of: dict[int, list[int]] = {}
        for row, locator in enumerate(locators):
            rows_of.setdefault(locator >> SLOT_SHIFT, []).append(row)
        by_row: Found = [None] * count
        end = count
        for slot, rows in rows_of.items():
            part = self._from_file(
                slot, [locators[row] for row in rows], [numbers[row] for row in rows], bytes_max, cached
            )
            if part is None:
                return None
            for row, record in zip(rows, part, strict=False):
                by_row[row] = record
            if len(part) < len(rows):
                end = min(end, rows[len(part)])
        return by_row[:end]

    def _from_file(
        self, slot: int, locators: Sequence[int], numbers: Sequence[int], bytes_max: int, cached: bool
    ) -> Found | None:
        if slot == ARRIVALS:
            if cached:
                return self._inline.read_cached(locators, bytes_max)
            with self._lock:
                return self._slow.read(locators, bytes_max)
        positions = [locator & POSITION_MASK for locator in locators]
        if cached:
            return self._buckets.read_cached(slot, positions, numbers, bytes_max)
        return self._buckets.read(slot, positions, numbers, bytes_max)
