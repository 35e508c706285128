"""Pending messages from the disk, as the wheel and the lines take them: out of buckets, and out of arrivals that are in
no bucket yet. In workers, from columns only.
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
"""Above every due."""


class Area(NamedTuple):
    """What is looked for: `low` <= due < `high`, in these buckets and in arrivals between the offsets."""

    low: int
    high: int
    buckets: Sequence[Bucket]
    from_offset: int
    to_offset: int


class Arrived(NamedTuple):
    """What is found in arrivals: those that are pending; the lowest due of all, pending or not; of all that are for a
    time of the wall clock (first number, how many, by how much broker time was ahead of it); the turns that were
    cancelled or moved by notes that the buckets do not count yet."""

    near: "list[Near]"
    low: int | None
    told: list[tuple[int, int, int]]
    changed: list[Turn]


class Gatherer:
    """See the module. Any thread."""

    def __init__(self, log: Log, buckets: Buckets, targets: Targets) -> None:
        self._log, self._buckets, self._targets = log, buckets, targets

    def near(self, area: Area, pending: Pending, keys: Collection[int] | None = None) -> list[Near]:
        """Everything that is pending in the area; of these logs only. In no order. Raises OSError, Corrupt."""
        found = []
        for bucket in area.buckets:
            for columns in self._buckets.load(bucket):
                found += self._of_bucket(columns, bucket.slot, area, pending, keys)
        if area.from_offset < area.to_offset:
            for batch in self.batches(area.from_offset, area.to_offset):
                near = self._of_arrival(batch, area, pending, keys)
                if len(near.dues):
                    found.append(near)
        return found

    def arrived(self, from_offset: int, to_offset: int, pending: Pending) -> Arrived:
        """All arrivals between these offsets."""
        area = Area(0, DUES_MAX, [], from_offset, to_offset)
        found: list[Near] = []
        low: int | None = None
        told: list[tuple[int, int, int]] = []
        changed: list[Turn] = []
        counted, spilled = self._buckets.counted_offset, self._buckets.spilled_number

        def noted(note: Note, offset: int) -> None:
            if offset >= counted:
                changed.extend(turn for turn in map(Turn, *note.old) if turn.number < spilled)

        for batch in self.batches(from_offset, to_offset, noted):
            low = batch.low if low is None else min(batch.low, low)
            if ABSOLUTE_FLAG in batch.absolute:
                first, ahead_ms = batch.first_number, batch.ahead_ms
                if told and told[-1][2] == ahead_ms:
                    first = told.pop()[0]
                told.append((first, batch.first_number + len(batch.sizes) - first, ahead_ms))
            near = self._of_arrival(batch, area, pending, None)
            if len(near.dues):
                found.append(near)
        return Arrived(found, low, told, changed)

    def batches(
        self,
        from_offset: int,
        to_offset: int,
        noted: log.Noted | None = None,
        damaged: Callable[[Corrupt], None] | None = None,
    ) -> Iterator[ArrivedBatch]:
        """Arrivals, without what is damaged: the broker's log names that, and `damaged` is called."""

        def tell(error: Corrupt) -> None:
            log.logger.error("delayed messages are lost where the arrivals are damaged: %s", error)
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
        """Those of the rows, all of one target, that are in the area and pending."""
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
        near = Near(batch.dues, numbers, batch.offsets, tags)
        return near if len(rows) == count else Near(*(_picked(column, rows) for column in near))


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
    """The first `rows_max` of them from the turn `after` on up to below `before`, in order; the turn from which there
    are more."""
    turns = [
        (due, number, which, row)
        for which, near in enumerate(found)
        for row, (due, number) in enumerate(zip(near.dues, near.numbers, strict=True))
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
