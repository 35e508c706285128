"""Loads pending messages from buckets, and from arrivals that are in no bucket yet.

Runs in workers; reads columns only, no records.
"""

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple

from journal.errors import Corrupt
from journal.log.log import Log
from tfmq.delay.arrivals import log
from tfmq.delay.arrivals.header import Note
from tfmq.delay.arrivals.log import ArrivedBatch
from tfmq.delay.arrivals.pending import Near
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import SLOT_SHIFT, Columns
from tfmq.delay.buckets.store import Buckets
from tfmq.delay.buckets.writer import Pending
from tfmq.delay.due_time import ABSOLUTE_FLAG
from tfmq.delay.requests import Turn
from tfmq.delay.rows import Part, Targets
from tfmq.delay.timing_wheel import ABSOLUTE, tag

DUES_MAX: Final = 1 << 63
"""Greater than every due time."""


class Area(NamedTuple):
    """What to load.

    `low` <= due < `high`, from these buckets and from arrivals between the offsets.
    """

    low: int
    high: int
    buckets: Sequence[Bucket]
    from_offset: int
    to_offset: int


class Arrived(NamedTuple):
    """What a start finds in the arrivals.

    `wheel_rows`: the pending messages. `due_low`: the lowest due time, pending or not. `ahead_steps`: for messages
    with absolute times (first number, count, by how many ms broker time was ahead of the wall clock). `changed_turns`:
    turns that were cancelled or rescheduled by headers that the buckets do not count yet.
    """

    near: "list[Near]"
    low: int | None
    told: list[tuple[int, int, int]]
    changed: list[Turn]


class Gatherer:
    """Loads pending messages as rows of the timing wheel. Any thread."""

    def __init__(self, log: Log, buckets: Buckets, targets: Targets) -> None:
        self._log, self._buckets, self._targets = log, buckets, targets

    def near(self, area: Area, pending: Pending, keys: Collection[int] | None = None) -> list[Near]:
        """Load all pending messages of the range, unsorted; `keys`: only for these logs.

        Raises OSError, Corrupt.
        """
        found = []
        for bucket in area.buckets:
            for columns in self._buckets.load(bucket):
                found += self._of_bucket(columns, bucket.slot, area, pending, keys)
        if area.from_offset < area.to_offset:
            for batch in self.batches(area.from_offset, area.to_offset):
                rows = self._of_arrival(batch, area, pending, keys)
                if len(rows.dues):
                    found.append(rows)
        return found

    def arrived(self, from_offset: int, to_offset: int, pending: Pending) -> Arrived:
        """Read the arrivals between these offsets for a start."""
        area = Area(0, DUES_MAX, [], from_offset, to_offset)
        found: list[Near] = []
        low: int | None = None
        ahead_steps: list[tuple[int, int, int]] = []
        changed: list[Turn] = []
        counted, spilled = self._buckets.counted_offset, self._buckets.spilled_number

        def noted(header: Note, offset: int) -> None:
            if offset >= counted:
                changed.extend(turn for turn in map(Turn, *header.old) if turn.number < spilled)

        for batch in self.batches(from_offset, to_offset, noted):
            low = batch.low if low is None else min(batch.low, low)
            if ABSOLUTE_FLAG in batch.absolute:
                first, ahead_ms = batch.first_number, batch.ahead_ms
                if ahead_steps and ahead_steps[-1][2] == ahead_ms:
                    first = ahead_steps.pop()[0]
                ahead_steps.append((first, batch.first_number + len(batch.sizes) - first, ahead_ms))
            rows = self._of_arrival(batch, area, pending, None)
            if len(rows.dues):
                found.append(rows)
        return Arrived(found, low, ahead_steps, changed)

    def batches(
        self,
        from_offset: int,
        to_offset: int,
        noted: log.Noted | None = None,
        damaged: Callable[[Corrupt], None] | None = None,
    ) -> Iterator[ArrivedBatch]:
        """Yield arrivals, without damaged ones: these are logged and passed to `on_damage`."""

        def tell(error: Corrupt) -> None:
            log.logger.error("delayed messages are lost because the arrival log is damaged: %s", error)
            if damaged is not None:
                damaged(error)

        return log.read(self._log, from_offset, to_offset, damaged=tell, noted=noted)

    def _of_bucket(
        self, columns: Columns, slot: int, area: Area, pending: Pending, keys: Collection[int] | None
    ) -> list[Near]:
        dues = columns.dues
        if not len(dues) or min(dues) >= area.high or max(dues) < area.low:
            return []
        found = []
        for index, (key, topic) in enumerate(columns.table):
            if keys is not None and key not in keys:
                continue
            rows: Sequence[int] = range(len(dues))
            if len(columns.table) > 1:
                rows = [row for row, target in enumerate(columns.targets) if target == index]
            rows = self._rows(rows, key, dues, columns.numbers, area, pending)
            if len(rows):
                number = self._targets.number(key, topic)
                found.append(_bucket_rows(columns, rows, slot << SLOT_SHIFT, number))
        return found

    def _rows(
        self,
        rows: Sequence[int],
        key: int,
        dues: "array[int]",
        numbers: "array[int]",
        area: Area,
        pending: Pending,
    ) -> Sequence[int]:
        """Return the rows, all of one target, that are in the range and pending."""
        low, high = area.low, area.high
        if not low <= min(dues) <= max(dues) < high:
            rows = [row for row in rows if low <= dues[row] < high]
        if not len(rows):
            return rows
        if len(rows) < len(dues):
            keep = pending(key, _picked(dues, rows), _picked(numbers, rows))
        else:
            keep = pending(key, dues, numbers)
        if keep is True:
            return rows
        if keep is False:
            return ()
        return [row for row, kept in zip(rows, keep, strict=True) if kept]

    def _of_arrival(
        self, batch: ArrivedBatch, area: Area, pending: Pending, keys: Collection[int] | None
    ) -> Near:
        count = len(batch.sizes)
        if batch.low >= area.high or batch.high < area.low or (keys is not None and batch.log_id not in keys):
            return _none()
        numbers = array("Q", range(batch.first_number, batch.first_number + count))
        rows = self._rows(range(count), batch.log_id, batch.dues, numbers, area, pending)
        if not len(rows):
            return _none()
        target = tag(self._targets.number(batch.log_id, batch.topic), False)
        tags = array("Q", [target | flag for flag in batch.absolute])
        wheel_rows = Near(batch.dues, numbers, batch.offsets, tags)
        return wheel_rows if len(rows) == count else Near(*(_picked(column, rows) for column in wheel_rows))


def _bucket_rows(columns: Columns, rows: Sequence[int], slot_bits: int, target: int) -> Near:
    whole = len(rows) == len(columns.dues)
    dues = columns.dues if whole else _picked(columns.dues, rows)
    numbers = columns.numbers if whole else _picked(columns.numbers, rows)
    positions = columns.positions if whole else _picked(columns.positions, rows)
    locators = array("Q", map(slot_bits.__or__, positions))
    number = tag(target, False)
    if any(columns.flags):
        flags = columns.flags
        tags = array("Q", [number | flags[row] for row in rows])
    else:
        tags = array("Q", (number,)) * len(rows)
    return Near(dues, numbers, locators, tags)


def _picked(column: "array[int]", rows: Sequence[int]) -> "array[int]":
    return array("Q", map(column.__getitem__, rows))


def _none() -> Near:
    return Near(array("Q"), array("Q"), array("Q"), array("Q"))


def in_order(found: Sequence[Near], after: Turn, before: Turn, rows_max: int) -> tuple[Part, Turn | None]:
    """Return the first `rows_max` rows with `after` <= turn < `before`, sorted.

    And the turn of the next one, if any.
    """
    turns = [
        (due, number, which, row)
        for which, rows in enumerate(found)
        for row, (due, number) in enumerate(zip(rows.dues, rows.numbers, strict=True))
        if after <= (due, number) < before
    ]
    turns.sort()
    more = Turn(*turns[rows_max][:2]) if len(turns) > rows_max else None
    del turns[rows_max:]
    part = Part(array("Q"), array("Q"), array("Q"), bytearray())
    for due, number, which, row in turns:
        part.dues.append(due)
        part.numbers.append(number)
        part.locators.append(found[which].locators[row])
        part.flags.append(found[which].tags[row] & ABSOLUTE)
    return part, more
