"""The memory window: which messages are in the timing wheel, and which file work is next.

The window ends at a due time. Pending messages due before this end are in the timing wheel, later ones are on disk.
Shortly before broker time reaches the end, the window is extended by one bucket (file with the messages of one time
span). While the messages between the old and the new end are loaded, arriving messages are added if they are due before
the new end, and no message due after the old end is delivered. If too many messages are in memory, the window
shrinks: the rows (entries in memory) of messages due after the new end are dropped. These messages are also on disk.

`decide`, a pure function, selects the next work: the first row that applies. Work that writes needs `writable`:

| found | decision |
|---|---|
| a message inside the window is only on disk, because its fsync was too slow | shrink the window to its due time |
| more rows in memory than MEMORY_ROWS_MAX, and the window ends after `shrunk_end` | shrink it to that time |
| a target queue can send messages whose rows it has dropped, and the window lasts for URGENT_MS | reload the rows |
| the window ends within LOAD_AHEAD_MS, and the next messages may be on disk | spill or split if needed, then load |
| the window ends within LOAD_AHEAD_MS, and the next messages are not on disk | extend it without file work |
| a target queue can send messages whose rows it has dropped, and the window cannot be extended | reload the rows |
| a query waits, or the messages in no bucket have SPILL_BYTES or are SPILL_MS old | spill: write them to buckets |
| a coarse bucket is due soon, or a bucket has too many messages | split it |
| the pending rows of a bucket are not counted | count them |
| obsolete messages fill a segment of the arrival log | truncate the log |
| the checkpoint is out of date | commit: write the checkpoint |
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Final, NamedTuple

from journal.record.batch import Appended
from journal.record.format import Buffer
from tfmq.delay.arrivals.header import ArrivalHeader
from tfmq.delay.arrivals.log import record_offsets
from tfmq.delay.buckets.format import BUCKET_ID_SHIFT, DEFAULT_LEVEL, FINEST_LEVEL, TimeSpan
from tfmq.delay.requests import Turn
from tfmq.delay.rows import TargetIds
from tfmq.delay.timing_wheel import DUE_RANGE, TARGET_SHIFT, HashedTimingWheel, WheelRows, no_wheel_rows

LOAD_AHEAD_MS: Final = 10_000
"""Messages are loaded into memory this long before they are due: time enough for a slow disk."""
MEMORY_ROWS_MAX: Final = 1_000_000
"""Maximum of rows (messages) in memory, 24 MB. With more, the window shrinks."""
LOAD_ROWS_MAX: Final = 500_000
"""With more rows in memory than this, the next bucket is loaded only when it is urgent (URGENT_MS)."""
CATCH_UP_ROWS: Final = 65_536
"""If broker time has passed the window's end, the next load waits while more due messages than this are in memory."""
URGENT_MS: Final = 1_000
"""If the window ends within this time, the next bucket is loaded even if memory has no room."""
SHRINK_KEEP_MS: Final = 3_000
"""After shrinking, the window still covers at least this time from now on."""
SPILL_BYTES: Final = 64 << 20
"""Spill when the part of the arrival log that is in no bucket has this size, because a start has to read it."""
SPILL_MS: Final = 60_000
"""Spill when the oldest message of the arrival log that is in no bucket is this old."""
RESCAN_BYTES_MAX: Final = 4 << 20
"""Spill before a load if more bytes of the arrival log than this are in no bucket, because a load reads them all."""
COMMIT_INTERVAL_MS: Final = 10_000
"""An out-of-date checkpoint is written this long after the last spill or commit, if no other step writes it earlier."""
SPLIT_ROWS: Final = 262_144
"""A bucket with more rows is split before it is loaded."""


class Step(Enum):
    """The next work of the storage scheduler."""

    IDLE = "rest"
    SHRINK = "retreat"
    EXTEND = "move"
    LOAD = "load"
    SPILL = "spill"
    SPLIT = "split"
    COUNT = "count"
    RELOAD = "reload"
    TRUNCATE = "truncate"
    COMMIT = "commit"


class StorageView(NamedTuple):
    """Input of `decide`. All times are in ms of broker time.

    `rows`: number of messages in memory. `fireable`: number of due messages in memory whose target queues are not
    blocked. `span` and `span_rows`: time span and message count of the first bucket that ends after `window_end`.
    `disk_low`: the lowest due time of messages that are only in the arrival log, neither in a bucket nor in the wheel.
    `unspilled_bytes`: size of the part of the arrival log that is in no bucket. `unspilled_since`: when the first
    message of this part became durable. `writable`: False if the bucket store has stopped, and in the pause after a
    failed step. `has_reload`: a target queue can send messages, but has no rows of them in memory.
    """

    now: int
    window_end: int
    rows: int = 0
    fireable: int = 0
    non_durable_due: int | None = None
    """The lowest due time of messages in the arrival log that are not durable."""
    missing_due: int | None = None
    """The due time of a message inside the window that is only on disk."""
    span: TimeSpan | None = None
    span_rows: int = 0
    divisible: bool = True
    """False if the bucket that has the time span `span` could not be split. It is loaded in pieces then."""
    disk_low: int | None = None
    disk_count: int = 0
    """How many messages are only in the arrival log, neither in a bucket nor in the wheel."""
    unspilled_bytes: int = 0
    unspilled_since: int | None = None
    writable: bool = True
    spill_requested: bool = False
    """A request waits until all messages of the arrival log are in buckets."""
    has_split: bool = False
    """There are buckets that should be split."""
    has_count: bool = False
    """The pending rows of a bucket must be counted."""
    has_reload: bool = False
    obsolete_bytes: int = 0
    """Size of the obsolete part at the start of the arrival log."""
    segment_bytes: int = SPILL_BYTES
    committed_ms: int = 0
    """When the last checkpoint was written."""
    changed: bool = False
    """Whether the checkpoint is out of date."""


class Decision(NamedTuple):
    """The next step of the storage scheduler. `to`: the new end of the window, if the step changes the window."""

    step: Step
    to: int = 0


IDLE: Final = Decision(Step.IDLE)


def shrunk_end(now: int) -> int:
    """Return the end to which a window shrinks: SHRINK_KEEP_MS from now, rounded up to the end of a 1 s span."""
    return (now + SHRINK_KEEP_MS + (1 << FINEST_LEVEL) - 1) >> FINEST_LEVEL << FINEST_LEVEL


def minimum_end(now: int) -> int:
    """Return the window's end if no bucket begins earlier: LOAD_AHEAD_MS from now, up to the end of a 65 s span."""
    return ((now + LOAD_AHEAD_MS) >> DEFAULT_LEVEL) + 1 << DEFAULT_LEVEL


def decide(view: StorageView) -> Decision:
    """Return what to do next, by the table in the module's docstring."""
    if view.missing_due is not None:
        return Decision(Step.SHRINK, view.missing_due)
    if view.rows > MEMORY_ROWS_MAX and shrunk_end(view.now) < view.window_end:
        return Decision(Step.SHRINK, shrunk_end(view.now))
    if view.has_reload and view.window_end > view.now + URGENT_MS:
        return Decision(Step.RELOAD)
    if view.window_end <= view.now + LOAD_AHEAD_MS:
        onward = _limited(view, _extension(view))
        if onward is not None:
            return onward
    if view.has_reload:
        return Decision(Step.RELOAD)
    since = view.unspilled_since
    is_old = view.unspilled_bytes >= SPILL_BYTES or (since is not None and view.now - since >= SPILL_MS)
    if view.writable and view.unspilled_bytes and (view.spill_requested or is_old):
        return Decision(Step.SPILL)
    if view.writable and view.has_split:
        return Decision(Step.SPLIT)
    if view.has_count:
        return Decision(Step.COUNT)
    if view.writable and view.obsolete_bytes >= view.segment_bytes:
        return Decision(Step.TRUNCATE)
    if view.writable and view.changed and view.now - view.committed_ms >= COMMIT_INTERVAL_MS:
        return Decision(Step.COMMIT)
    return IDLE


def _limited(view: StorageView, onward: Decision) -> Decision | None:
    """Return the step `onward`, with an earlier end if memory is short or messages before its end are not durable.

    None: the window must not be extended now.
    """
    step, to = onward
    if step not in (Step.LOAD, Step.EXTEND):
        return onward
    if view.non_durable_due is not None and view.non_durable_due >= view.window_end:
        to = min(to, view.non_durable_due)
    if view.rows > LOAD_ROWS_MAX or view.rows + _rows_to_load(view, to) > MEMORY_ROWS_MAX:
        to = min(to, shrunk_end(view.now))  # a longer load would be undone by the next shrink
    if to <= view.window_end or (step is Step.LOAD and not _has_room(view, to)):
        return None
    return Decision(step, to)


def _has_room(view: StorageView, to: int) -> bool:
    """Return whether memory has room for a load up to `to`, or the load is too urgent to wait."""
    if view.window_end <= view.now:
        return view.fireable <= CATCH_UP_ROWS
    if view.window_end <= view.now + URGENT_MS:
        return True
    return view.rows <= LOAD_ROWS_MAX and view.rows + _rows_to_load(view, to) <= MEMORY_ROWS_MAX


def _rows_to_load(view: StorageView, to: int) -> int:
    from_bucket = view.span_rows if view.span is not None and view.span.start < to else 0
    return from_bucket + (view.disk_count if view.disk_low is not None and view.disk_low < to else 0)


def _extension(view: StorageView) -> Decision:
    """Return the next step towards a later end of the window: split, spill, load, or extend without file work."""
    span = view.span
    to = minimum_end(view.now)
    if span is not None and span.start <= view.window_end:
        coarse = span.exponent > DEFAULT_LEVEL or (span.exponent > FINEST_LEVEL and view.span_rows > SPLIT_ROWS)
        if coarse and view.writable and view.divisible:
            return Decision(Step.SPLIT)
        to = span.end
        if coarse:  # the bucket should be split but cannot be: load only a piece of its span
            size = DEFAULT_LEVEL if view.span_rows <= SPLIT_ROWS else FINEST_LEVEL
            to = min(to, (view.window_end >> size) + 1 << size)
    else:
        # No bucket has messages due at the window's end: such messages can only be in the arrival log.
        to = to if span is None else min(to, span.start)
        if view.disk_low is None or view.disk_low >= to:
            return Decision(Step.EXTEND, to)
    far = view.disk_low is not None and view.disk_low < to
    if far and view.unspilled_bytes > RESCAN_BYTES_MAX and view.writable:
        return Decision(Step.SPILL)
    return Decision(Step.LOAD, to)


FSYNC_MARGIN_MS: Final = 600_000
"""If all messages of an append are due at least this long after the window's end, no wheel rows are computed for them.

If the window reaches such a message before the message is durable, the window shrinks; the message is loaded later.
"""
FIRST_BUCKET_LOCATOR: Final = 1 << BUCKET_ID_SHIFT
"""A locator (where a record is stored) below this value is an offset of the arrival log."""
NO_WHEEL_ROWS: Final = no_wheel_rows()


@dataclass
class DiskArrivals:
    """Count and lowest due time of the messages that are only in the arrival log, not in a bucket or the wheel."""

    count: int = 0
    low: int | None = None

    def add(self, count: int, low: int) -> None:
        self.count += count
        self.low = low if self.low is None else min(low, self.low)


class MemoryWindow:
    """The timing wheel, the end of its window, and the count of messages of the arrival log that are due later.

    Messages due before `end` are added to the wheel as soon as they are durable; later messages are only counted.
    Messages due at `fires_below` or later may not be delivered yet. `fires_below` is `end`, with two exceptions. During
    a load it is the old end. If a message due before `end` is missing in the wheel, it is the due time of this message.
    Broker thread only.
    """

    def __init__(self, wheel: HashedTimingWheel, targets: TargetIds) -> None:
        self.wheel, self._targets = wheel, targets
        self.end = 0
        self.fires_below = 0
        self.border = 0
        """Messages due before this time are in memory or were popped. It is `end`; during a load, the old end."""
        self.loaded_rows = 0
        self.disk_arrivals = DiskArrivals()
        self.missing_due: int | None = None
        """Lowest due time of messages inside the window that are only on disk: the window must shrink to this time."""
        self._spilling_arrivals = DiskArrivals()
        self._earlier_front = Turn(0, 0)

    @property
    def disk_count(self) -> int:
        return self.disk_arrivals.count + self._spilling_arrivals.count

    @property
    def first_unpopped(self) -> Turn:
        """The lowest turn that is not popped from the wheel yet. Messages with lower turns were popped."""
        return max(self._earlier_front, Turn(*self.wheel.first_unpopped))

    # Arrivals

    def wheel_rows_of(self, header: ArrivalHeader, records: Buffer, appended: Appended, now_ms: int) -> WheelRows:
        """Return rows to add once `records` are durable; none if all are due FSYNC_MARGIN_MS or more after `end`."""
        times, absolute, low, _ = header.dues
        if low >= max(self.end, minimum_end(now_ms)) + FSYNC_MARGIN_MS:
            return NO_WHEEL_ROWS
        target = self._targets.id_of(header.log_id, header.topic) << TARGET_SHIFT
        numbers = array("Q", range(appended.first_ordinal, appended.first_ordinal + len(times)))
        locators = record_offsets(records, appended.positions)
        tags = array("Q", [target | flag for flag in absolute])
        return WheelRows(times, numbers, locators, tags)

    def add_durable(self, rows: WheelRows, count: int, low: int, high: int) -> None:
        """Add `count` messages that are durable now; `low` and `high` are their lowest and highest due times.

        `rows`: the result of `wheel_rows_of`. Messages due before `end` are added to the wheel; later ones are counted
        in `disk_arrivals`. If `rows` is empty, all messages are counted in `disk_arrivals`; and if one of them is due
        before `end`, `missing_due` is set, so that the window shrinks.
        """
        if low >= self.end:
            self.disk_arrivals.add(count, low)
        elif not len(rows.dues):
            self.disk_arrivals.add(count, low)
            self.missing_due = low if self.missing_due is None else min(low, self.missing_due)
            self.fires_below = min(self.fires_below, low)
        elif high < self.end:
            self.wheel.add_many(*rows)
        else:
            keep = [due < self.end for due in rows.dues]
            far = [due for due in rows.dues if due >= self.end]
            self.disk_arrivals.add(len(far), min(far))
            self.wheel.add_many(*(array("Q", compress(column, keep)) for column in rows))

    def topic_deleted(self, incarnation: int) -> int:
        """Drop the messages of a deleted topic from the wheel; return how many were dropped."""
        targets = self._targets.ids_of_topic(incarnation)
        return self.wheel.drop_targets(targets) if targets else 0

    # Moving the end of the window

    def start(self, base_ms: int, end: int) -> None:
        """Start with an empty wheel and a window up to `end`. No message is due before `base_ms`."""
        self.wheel.rebase(base_ms)
        self.extend(min(end, base_ms + DUE_RANGE))

    def reachable_end(self, to: int, low: int) -> int:
        """Return the end to which the window can be extended: `to` or less, as the wheel covers 34 years from its base.

        An empty wheel gets a new base first. `low`: the caller will add no message that is due before this time.
        """
        wheel = self.wheel
        if not wheel.row_count:
            self._earlier_front = self.first_unpopped
            wheel.rebase(min(self.fires_below, low))
        return min(to, wheel.base_ms + DUE_RANGE)

    def extend(self, to: int) -> None:
        """Set the end of the window to `to`. The caller knows that no message due before `to` has to be loaded."""
        self.end = self.fires_below = self.border = to

    def begin_load(self, to: int) -> int:
        """Begin a load up to `to`; return the old end. Until `end_load`, messages due at the old end or later wait."""
        low, self.end = self.end, to
        return low

    def add_loaded(self, rows: WheelRows) -> None:
        self.wheel.add_many(*rows)
        arrivals = sum([locator < FIRST_BUCKET_LOCATOR for locator in rows.locators])
        self.disk_arrivals.count -= arrivals
        self.loaded_rows += len(rows.locators) - arrivals

    def end_load(self) -> None:
        """End a load after all its rows were added. From now on the loaded messages may be delivered."""
        self.fires_below = self.end if self.missing_due is None else min(self.end, self.missing_due)
        self.border, self.loaded_rows = self.end, 0
        if self.disk_arrivals.low is not None:
            self.disk_arrivals.low = (
                max(self.disk_arrivals.low, self.fires_below) if self.disk_arrivals.count > 0 else None
            )
            self.disk_arrivals.count = max(0, self.disk_arrivals.count)

    def shrink(self, to: int, spilled_offset: int) -> int:
        """Move the end of the window back to `to`, drop the rows due at `to` or later, and return their number.

        Their messages are also on disk: in buckets, or in the arrival log at `spilled_offset` or later.
        """
        to = min(to, self.end)
        dropped = self.wheel.drop_from(to)
        self.end, self.missing_due = to, None
        self.fires_below = self.border = to
        if len(dropped):
            self.disk_arrivals.add(sum([spilled_offset <= locator < FIRST_BUCKET_LOCATOR for locator in dropped]), to)
        return len(dropped)

    # Counts during a spill, which writes messages of the arrival log to buckets

    def begin_spill(self) -> None:
        self._spilling_arrivals, self.disk_arrivals = self.disk_arrivals, DiskArrivals()

    def end_spill(self, done: bool) -> int:
        """End a spill; return how many messages due at `end` or later were to be moved. `done`: it succeeded."""
        before, self._spilling_arrivals = self._spilling_arrivals, DiskArrivals()
        if not done and before.low is not None:
            self.disk_arrivals.add(before.count, before.low)
        return before.count
