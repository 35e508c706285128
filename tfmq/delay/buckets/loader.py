"""Loads pending messages, as rows of the timing wheel, from buckets and the arrival log. Runs in workers."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import or_
from typing import Final, NamedTuple

from journal.errors import Corrupt
from journal.log.log import Log
from tfmq.delay.arrivals import log
from tfmq.delay.arrivals.header import ArrivalHeader
from tfmq.delay.arrivals.log import ArrivalBatch
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import ARRIVAL_LOG_ID, BUCKET_ID_SHIFT, ChunkColumns, single_target_column
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.buckets.writer import PendingFilter, pending_rows
from tfmq.delay.due_time import ABSOLUTE_FLAG
from tfmq.delay.requests import LogFilter, Turn
from tfmq.delay.rows import RowColumns, Target, TargetIds
from tfmq.delay.timing_wheel import ABSOLUTE, TARGET_SHIFT, WheelRows, no_wheel_rows

DUE_TIME_LIMIT: Final = 1 << 63


class LoadRange(NamedTuple):
    """What to load: messages with `low` <= due < `high`, from `buckets` and from an offset range of the arrival log."""

    low: int
    high: int
    buckets: Sequence[Bucket]
    from_offset: int
    to_offset: int


class RecoveredArrivals(NamedTuple):
    """What a start finds in the messages of the arrival log that are in no bucket yet.

    `wheel_rows`: the pending messages. `due_low`: the lowest due time of all messages, pending or not. `ahead_steps`:
    for each range of messages with absolute due times, its first number, its count, and how many ms broker time was
    ahead of the wall clock. `changed_turns`: the turns of cancelled or rescheduled messages that are in buckets, but
    not counted in `Bucket.dead_count` yet.
    """

    wheel_rows: list[WheelRows]
    due_low: int | None
    ahead_steps: list[tuple[int, int, int]]
    changed_turns: list[Turn]


class BucketLoader:
    """Loads pending messages as rows of the timing wheel. Any thread."""

    def __init__(self, log: Log, buckets: BucketStore, targets: TargetIds) -> None:
        self._log, self._buckets, self._targets = log, buckets, targets

    def load(self, area: LoadRange, pending: PendingFilter, keys: LogFilter | None = None) -> list[WheelRows]:
        """Load pending messages of `area`, unsorted. `keys`: selects partitions; None: all. Raises OSError, Corrupt."""
        found = [
            self._rows(columns, bucket.bucket_id, area, pending, keys)
            for bucket in area.buckets
            for columns in bucket.read_columns(self._buckets.files)
        ]
        if area.from_offset < area.to_offset:
            batches = self.read_arrivals(area.from_offset, area.to_offset)
            found += [self._rows_of_batch(batch, area, pending, keys) for batch in batches]
        return [rows for rows in found if len(rows)]

    def recover(self, from_offset: int, to_offset: int, pending: PendingFilter) -> RecoveredArrivals:
        """Read the messages of the arrival log between these offsets. Called at a start."""
        area = LoadRange(0, DUE_TIME_LIMIT, [], from_offset, to_offset)
        found: list[WheelRows] = []
        low: int | None = None
        ahead_steps: list[tuple[int, int, int]] = []
        changed: list[Turn] = []
        counted, spilled = self._buckets.counted_offset, self._buckets.spilled_number

        def add_changed(header: ArrivalHeader, offset: int) -> None:
            if offset >= counted:
                changed.extend(turn for turn in map(Turn, *header.old_turns) if turn.number < spilled)

        for batch in self.read_arrivals(from_offset, to_offset, add_changed):
            low = batch.low if low is None else min(batch.low, low)
            if ABSOLUTE_FLAG in batch.absolute:
                first, ahead_ms = batch.first_number, batch.ahead_ms
                if ahead_steps and ahead_steps[-1][2] == ahead_ms:
                    first = ahead_steps.pop()[0]
                ahead_steps.append((first, batch.first_number + len(batch.sizes) - first, ahead_ms))
            rows = self._rows_of_batch(batch, area, pending, None)
            if len(rows.dues):
                found.append(rows)
        return RecoveredArrivals(found, low, ahead_steps, changed)

    def read_arrivals(
        self,
        from_offset: int,
        to_offset: int,
        on_header: log.HeaderCallback | None = None,
        on_damage: Callable[[Corrupt], None] | None = None,
    ) -> Iterator[ArrivalBatch]:
        """Yield the undamaged batches between these offsets. Damage is logged and passed to `on_damage`."""

        def report_damage(error: Corrupt) -> None:
            log.logger.error("delayed messages are lost because the arrival log is damaged: %s", error)
            if on_damage is not None:
                on_damage(error)

        return log.read_batches(self._log, from_offset, to_offset, on_damage=report_damage, on_header=on_header)

    def _rows_of_batch(
        self, batch: ArrivalBatch, area: LoadRange, pending: PendingFilter, keys: LogFilter | None
    ) -> WheelRows:
        count, table = len(batch.sizes), [Target(batch.log_id, batch.topic)]
        numbers = array("Q", range(batch.first_number, batch.first_number + count))
        targets, flags = single_target_column(count), batch.absolute
        columns = ChunkColumns(batch.dues, numbers, targets, batch.sizes, flags, batch.offsets, table)
        return self._rows(columns, ARRIVAL_LOG_ID, area, pending, keys)

    def _rows(
        self, columns: ChunkColumns, slot: int, area: LoadRange, pending: PendingFilter, keys: LogFilter | None
    ) -> WheelRows:
        """Return rows of the pending messages in `columns` that are in `area`. `slot`: bucket id for the locators."""
        dues, numbers, targets, _, flags, positions, table = columns
        first, last = min(dues), max(dues)
        if first >= area.high or last < area.low:
            return no_wheel_rows()
        keep = pending_rows(columns, pending, keys)
        if first < area.low or last >= area.high or not all(keep):
            rows = [row for row in compress(range(len(dues)), keep) if area.low <= dues[row] < area.high]
            if not rows:
                return no_wheel_rows()
            dues, numbers, targets, positions = (
                array(column.typecode, map(column.__getitem__, rows)) for column in (dues, numbers, targets, positions)
            )
            flags = bytes(map(flags.__getitem__, rows))
        tags = {index: self._targets.id_of(*table[index]) << TARGET_SHIFT for index in set(targets)}
        return WheelRows(
            dues,
            numbers,
            array("Q", map((slot << BUCKET_ID_SHIFT).__or__, positions)),
            array("Q", map(or_, map(tags.__getitem__, targets), flags)),
        )


def merge_rows(found: Sequence[WheelRows], after: Turn, before: Turn, rows_max: int) -> tuple[RowColumns, Turn | None]:
    """Return the first `rows_max` rows with `after` <= turn < `before`, sorted, and the next row's turn (or None)."""
    turns = [
        (due, number, which, row)
        for which, rows in enumerate(found)
        for row, (due, number) in enumerate(zip(rows.dues, rows.numbers, strict=True))
        if after <= (due, number) < before
    ]
    turns.sort()
    more = Turn(*turns[rows_max][:2]) if len(turns) > rows_max else None
    del turns[rows_max:]
    columns = RowColumns(array("Q"), array("Q"), array("Q"), bytearray())
    for due, number, which, row in turns:
        columns.dues.append(due)
        columns.numbers.append(number)
        columns.locators.append(found[which].locators[row])
        columns.flags.append(found[which].tags[row] & ABSOLUTE)
    return columns, more
