"""The records of due messages, from wherever they lie: the arrivals, or a bucket.

Rows come in the order of their turns. What is in memory is read in that order, each record by itself unless neighbours
follow one another; from the disk in the order of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Final, NamedTuple

from journal.log.log import Log
from tfmq.delay.arrivals.log import ArrivedRecords, Found, Proven
from tfmq.delay.buckets.format import POSITION_MASK, SLOT_SHIFT
from tfmq.delay.buckets.store import Buckets
from tfmq.delay.flow_control import SLICE_BYTES
from tfmq.delay.requests import Run
from tfmq.delay.rows import NO_PART, Part, Rows

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


AHEAD_MIN: Final = 8192
"""With fewer rows nothing is read ahead."""
AHEAD_BYTES: Final = 8 << 20
"""Nor more than this: with all that a line may have, some 16 MiB of memory where messages are small."""

Done = Callable[[Fetched | None, BaseException | None], None]


class Supply:
    """The records of a line's next rows. While many wait, they are read ahead: many at once, in the order of positions.

    Messages that are due together lie anywhere in their files. One by one each costs a call; of some ten thousands
    many lie close together, and come with one read.

    One owner's thread.
    """

    def __init__(self, fetching: Fetching, run: Run) -> None:
        self._fetching, self._run = fetching, run
        self._part = NO_PART
        self._records: Sequence[bytes | None] = ()
        """Those of the first rows of the part."""
        self._given = 0
        self._life = 0

    def clear(self) -> None:
        """What was read ahead is not wanted any more."""
        self._part, self._records, self._given = NO_PART, (), 0
        self._life += 1

    def fetch(self, part: Part, rows: Rows, record_bytes: int, done: Done) -> None:
        """`done(records of the first rows of `part`, None)`, at least one, or `done(None, error)`; at once or later.

        `part` lies in front of `rows`, whose records have about so many bytes.
        """
        ahead = self._take(part)
        if ahead is not None:
            done(ahead, None)
            return
        self.clear()
        if len(rows) >= AHEAD_MIN:
            whole = rows.head(max(len(part.numbers), AHEAD_BYTES // record_bytes))
            read = partial(self._fetching.read, whole.locators, whole.numbers, AHEAD_BYTES)
            self._run(read, partial(self._read_ahead, part, whole, done, self._life))
            return
        try:
            found = self._fetching.cached(part.locators, part.numbers, SLICE_BYTES)
        except Exception as error:
            done(None, error)
            return
        if found is not None:
            done(found, None)
        else:
            self._read(part, done)

    def _read(self, part: Part, done: Done) -> None:
        self._run(partial(self._fetching.read, part.locators, part.numbers, SLICE_BYTES), done)

    def _read_ahead(
        self,
        part: Part,
        whole: Part,
        done: Done,
        life: int,
        found: Fetched | None,
        error: BaseException | None,
    ) -> None:
        if found is None:
            # Something behind may be what cannot be read: that must not keep these waiting.
            self._read(part, done)
        elif life != self._life:
            done(Fetched(found.records[: len(part.numbers)]), None)
        else:
            self._part, self._records = whole, found.records
            done(self._take(part), None)

    def _take(self, part: Part) -> Fetched | None:
        """The records of the first rows of `part`, if they were read ahead: of exactly these messages."""
        numbers, count = self._part.numbers, len(self._records)
        try:
            start = numbers.index(part.numbers[0], self._given, count)
        except ValueError:
            return None
        end = min(start + len(part.numbers), count)
        size = end - start
        if (
            part.numbers[:size] != numbers[start:end]
            or part.locators[:size] != self._part.locators[start:end]
        ):
            return None
        self._given = start
        return Fetched(self._records[start:end])
