"""The records of due messages, from wherever they lie: the arrivals, or a bucket.

Rows come in the order of their turns; files are read in the order of positions, so that neighbours cost one read.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple

from journal.log import Log
from tfmq.delay.arrived_records import ArrivedRecords
from tfmq.delay.buckets import Buckets
from tfmq.delay.columns import POSITION_MASK, SLOT_SHIFT

ARRIVALS: Final = 0
"""The slot of a locator that names no bucket."""


class Fetched(NamedTuple):
    """Records of the first rows that were asked for, in their order, fewer where bytes were too many; None: damaged."""

    records: Sequence[bytes | None]


class Fetching:
    """See the module. `cached` in the owner's thread, `read` in any."""

    def __init__(self, log: Log, buckets: Buckets) -> None:
        self._buckets = buckets
        self._inline = ArrivedRecords(log)
        self._slow = ArrivedRecords(log)
        self._lock = Lock()

    def reset(self) -> None:
        """The arrivals came back from a stop: what was read before may have been another's bytes."""

    def cached(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Fetched | None:
        """The records of the first rows; None where that would wait for the disk. Raises OSError."""
        return self._fetch(locators, numbers, bytes_max, True)

    def read(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Fetched:
        """As `cached`, and waits. Raises OSError, Closed."""
        found = self._fetch(locators, numbers, bytes_max, False)
        assert found is not None, "a read that may wait answers"
        return found

    def _fetch(
        self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int, cached: bool
    ) -> Fetched | None:
        count = len(locators)
        order: Sequence[int] = range(count)
        rising = sorted(locators)
        if list(locators) != rising:
            order = sorted(order, key=locators.__getitem__)
            numbers = [numbers[row] for row in order]
        found = self._in_order(rising, numbers, bytes_max, cached)
        if found is None or not isinstance(order, list):
            return None if found is None else Fetched(found)
        by_row: list[bytes | int | None] = [0] * count
        for row, record in zip(order, found, strict=False):
            by_row[row] = record
        end = by_row.index(0) if len(found) < count else count
        if end:
            return Fetched(by_row[:end])  # type: ignore[arg-type]
        # What must come first lies behind what filled the room: it is read alone.
        first = order.index(0)
        alone = self._in_order([rising[first]], [numbers[first]], bytes_max, cached)
        return None if alone is None else Fetched(alone)

    def _in_order(
        self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int, cached: bool
    ) -> list[bytes | None] | None:
        """Locators rise: one call for each file."""
        found: list[bytes | None] = []
        start, count = 0, len(locators)
        while start < count and bytes_max > 0:
            slot = locators[start] >> SLOT_SHIFT
            end = start + 1
            if locators[-1] >> SLOT_SHIFT == slot:
                end = count
            while end < count and locators[end] >> SLOT_SHIFT == slot:
                end += 1
            positions = [locator & POSITION_MASK for locator in locators[start:end]]
            part = self._from_file(slot, positions, numbers[start:end], bytes_max, cached)
            if part is None:
                return None
            found += part
            if len(part) < end - start:
                break
            bytes_max -= sum([len(record) for record in part if record is not None])
            start = end
        return found

    def _from_file(
        self, slot: int, positions: Sequence[int], numbers: Sequence[int], bytes_max: int, cached: bool
    ) -> list[bytes | None] | None:
        if slot != ARRIVALS:
            if cached:
                return self._buckets.read_cached(slot, positions, numbers, bytes_max)
            return self._buckets.read(slot, positions, numbers, bytes_max)
        if cached:
            return self._inline.read_cached(positions, bytes_max)
        with self._lock:
            return self._slow.read(positions, bytes_max)
