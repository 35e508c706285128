"""The memory window: which messages are in the timing wheel, and which storage work is next.

`decide` is the policy, a pure function. The window ends at a due time: pending messages due before it are in the wheel,
the others only on disk. The end is extended shortly before it is reached, by one bucket at a time. While the messages
between the old and the new end are loaded, arriving messages are compared with the new end, and nothing fires from the
old end on. If too much is in memory the window shrinks, which only drops rows, because they are on disk.

| found | decision |
|---|---|
| a message inside the window is only on disk: its fsync was too slow | shrink to it |
| more in memory than MEMORY_ROWS_MAX, and the window is long enough | shrink |
| something due soon may be on disk, and there is room | load, after a spill or split if needed |
| nothing due soon is on disk | extend without any work |
| a spill is requested, or the arrivals are many or old | spill |
| the target of an evicted queue accepts messages again | reload the rows of the queue |
| a coarse bucket is due soon, or a bucket is too large | split |
| the pending rows of a bucket are not counted | count |
| obsolete arrivals fill a segment | truncate |
| the checkpoint is out of date | commit |
"""

from __future__ import annotations

from array import array
from enum import Enum
from itertools import compress
from typing import Final, NamedTuple

from journal.record.batch import Appended
from journal.record.format import Buffer
from tfmq.delay.arrivals.header import Note
from tfmq.delay.arrivals.log import record_offsets
from tfmq.delay.arrivals.pending import Near
from tfmq.delay.buckets.format import FINEST, SLOT_SHIFT, USUAL, Span
from tfmq.delay.requests import Turn
from tfmq.delay.rows import Targets
from tfmq.delay.timing_wheel import DUE_SPAN, HashedWheelTimer, tag

LEAD_MS: Final = 10_000
"""Messages are in memory this long before they are due: time for a load by a slow disk."""
NEAR_MAX: Final = 1_000_000
"""Maximum of rows in memory, 24 MB. With more, the window shrinks."""
ROOM_ROWS: Final = 500_000
"""With more rows in memory, the next bucket is loaded only when it is urgent."""
CATCH_UP_ROWS: Final = 65_536
"""An overdue bucket is loaded when no more rows than this are left to fire."""
URGENT_MS: Final = 1_000
"""The next bucket is loaded this long before it is due, however full the memory is."""
KEEP_MS: Final = 3_000
"""After shrinking, the window still covers at least this time."""
SPILL_BYTES: Final = 64 << 20
"""Spill when the arrivals have this size: the next start has to read them."""
SPILL_MS: Final = 60_000
"""Spill when the oldest arrival is this old."""
RESCAN_BYTES: Final = 4 << 20
"""Spill before a load if the arrivals are larger, because each load reads all of them."""
COMMIT_MS: Final = 10_000
"""Interval of checkpoints, which store broker time."""
SPLIT_ROWS: Final = 262_144
"""A bucket with more rows is split before it is loaded."""


class Step(Enum):
    """The next work of the storage scheduler."""

    REST = "rest"
    RETREAT = "retreat"
    MOVE = "move"
    LOAD = "load"
    SPILL = "spill"
    SPLIT = "split"
    COUNT = "count"
    RELOAD = "reload"
    TRUNCATE = "truncate"
    COMMIT = "commit"


class View(NamedTuple):
    """Input of `decide`. Due times and times are ms of broker time.

    `rows`: messages in memory; `fireable`: those in target queues that are not blocked. `span`, `span_rows`: of the
    first bucket that ends after the window. `disk_low`: the lowest due time of arrivals that are in no bucket and not
    in the wheel. `unspilled_bytes`, `unspilled_since`: of arrivals in no bucket. `writable`: False after a failed
    write until the next try.
    """

    now: int
    horizon: int
    rows: int = 0
    moving: int = 0
    unsure: int | None = None
    """The lowest due time of arrivals that are not durable."""
    stray: int | None = None
    """The due time of a message inside the window that is only on disk."""
    span: Span | None = None
    span_rows: int = 0
    divisible: bool = True
    """False if a split of that bucket was not possible."""
    far_low: int | None = None
    far_count: int = 0
    """How many arrivals are in no bucket and not in the wheel."""
    unspilled_bytes: int = 0
    unspilled_since: int | None = None
    writable: bool = True
    wanted: bool = False
    """A request waits until the arrivals are in buckets."""
    splits: bool = False
    """There are buckets that should be split."""
    counts: bool = False
    """The pending rows of a bucket must be counted."""
    reloads: bool = False
    spare_bytes: int = 0
    """Obsolete arrivals."""
    segment_bytes: int = SPILL_BYTES
    committed: int = 0
    """When the checkpoint was written."""
    changed: bool = False
    """Whether the checkpoint is out of date."""


class Decision(NamedTuple):
    """`to`: the new end of the window for SHRINK, EXTEND and LOAD."""

    step: Step
    to: int = 0


REST: Final = Decision(Step.REST)


def retreat_to(now: int) -> int:
    """Return the end of a shrunk window: a multiple of the finest bucket span."""
    return (now + KEEP_MS + (1 << FINEST) - 1) >> FINEST << FINEST


def goal(now: int) -> int:
    """Return the end that the window should at least have: whole buckets of the default level."""
    return ((now + LEAD_MS) >> USUAL) + 1 << USUAL


def decide(view: View) -> Decision:
    """Return the first row of the table above that applies."""
    if view.stray is not None:
        return Decision(Step.RETREAT, view.stray)
    if view.rows > NEAR_MAX and retreat_to(view.now) < view.horizon:
        return Decision(Step.RETREAT, retreat_to(view.now))
    if view.reloads and view.horizon > view.now + URGENT_MS:
        return Decision(Step.RELOAD)
    if view.horizon <= view.now + LEAD_MS:
        onward = _bounded(view, _onward(view))
        if onward is not None:
            return onward
    if view.reloads:
        return Decision(Step.RELOAD)
    if view.writable and view.unspilled_bytes and (view.wanted or _is_old(view)):
        return Decision(Step.SPILL)
    if view.writable and view.splits:
        return Decision(Step.SPLIT)
    if view.counts:
        return Decision(Step.COUNT)
    if view.writable and view.spare_bytes >= view.segment_bytes:
        return Decision(Step.TRUNCATE)
    if view.writable and view.changed and view.now - view.committed >= COMMIT_MS:
        return Decision(Step.COMMIT)
    return REST


def _bounded(view: View, onward: Decision) -> Decision | None:
    """Limit a step to what memory allows and to durable arrivals; None: not yet."""
    step, to = onward
    if step not in (Step.LOAD, Step.MOVE):
        return onward
    if view.unsure is not None and view.unsure >= view.horizon:
        to = min(to, view.unsure)
    if view.rows > ROOM_ROWS or view.rows + _coming(view, to) > NEAR_MAX:
        to = min(to, retreat_to(view.now))  # a longer load would be undone by the next shrink
    if to <= view.horizon or (step is Step.LOAD and not _has_room(view, to)):
        return None
    return Decision(step, to)


def _has_room(view: View, to: int) -> bool:
    """Whether memory has room for the load; otherwise its rows would be dropped again at once."""
    if view.horizon <= view.now:
        return view.moving <= CATCH_UP_ROWS
    if view.horizon <= view.now + URGENT_MS:
        return True
    return view.rows <= ROOM_ROWS and view.rows + _coming(view, to) <= NEAR_MAX


def _coming(view: View, to: int) -> int:
    """Return how many rows a load up to `to` may add."""
    from_bucket = view.span_rows if view.span is not None and view.span.start < to else 0
    return from_bucket + (view.far_count if view.far_low is not None and view.far_low < to else 0)


def _is_old(view: View) -> bool:
    since = view.unspilled_since
    return view.unspilled_bytes >= SPILL_BYTES or (since is not None and view.now - since >= SPILL_MS)


def _onward(view: View) -> Decision:
    """Return the step that extends the window: split, spill, load, or extend without work."""
    span = view.span
    to = goal(view.now)
    if span is not None and span.start <= view.horizon:
        coarse = span.exponent > USUAL or (span.exponent > FINEST and view.span_rows > SPLIT_ROWS)
        if coarse and view.writable and view.divisible:
            return Decision(Step.SPLIT)
        to = min(span.end, _piece(view)) if coarse else span.end
    else:
        # No bucket overlaps this range: its messages can only be in the arrival log.
        to = to if span is None else min(to, span.start)
        if view.far_low is None or view.far_low >= to:
            return Decision(Step.MOVE, to)
    far = view.far_low is not None and view.far_low < to
    if far and view.unspilled_bytes > RESCAN_BYTES and view.writable:
        return Decision(Step.SPILL)
    return Decision(Step.LOAD, to)


def _piece(view: View) -> int:
    """Return the end of the next piece of a bucket that cannot be split."""
    size = USUAL if view.span_rows <= SPLIT_ROWS else FINEST
    return (view.horizon >> size) + 1 << size


FORCE_MS: Final = 600_000
"""Messages due this long after the window get no wheel rows when they are written.

If their fsync lasts until the window covers them, the window shrinks again.
"""
BUCKETS: Final = 1 << SLOT_SHIFT
"""Locators below this value are offsets of the arrival log."""
NOTHING: Final = Near(array("Q"), array("Q"), array("Q"), array("Q"))


class Far:
    """Arrivals in no bucket that are not in the wheel: their count and lowest due time."""

    def __init__(self) -> None:
        self.count = 0
        self.low: int | None = None

    def add(self, count: int, low: int) -> None:
        """Add `count` messages, due at `low` or later."""
        self.count += count
        self.low = low if self.low is None else min(low, self.low)


class Shore:
    """The timing wheel, the end of its window, and the count of arrivals that are due later.

    Messages due before `end` are added to the wheel as soon as they are durable; the others are only counted.
    `fires_below` is `end`, or during a load the end before it. Broker thread only.
    """

    def __init__(self, wheel: HashedWheelTimer, targets: Targets) -> None:
        self.wheel, self._targets = wheel, targets
        self.horizon = 0
        self.fires_below = 0
        self.border = 0
        """Messages due before this are in memory or were popped.

        It is `end`, or during a load the end before it.
        """
        self.coming = 0
        """Rows from buckets that a running load has added after the border."""
        self.far = Far()
        self.stray: int | None = None
        """Due time of a message inside the window that is not in the wheel.

        The window must shrink to it.
        """
        self._spilling: Far | None = None
        self._front = Turn(0, 0)

    @property
    def far_count(self) -> int:
        """Arrivals that are not in the wheel, with those of a running spill."""
        return self.far.count + (self._spilling.count if self._spilling is not None else 0)

    @property
    def front(self) -> Turn:
        """Every turn below was popped from the wheel, no turn from there on."""
        return max(self._front, Turn(*self.wheel.front))

    # Arrivals

    def near_of(self, note: Note, records: Buffer, answer: Appended, now_ms: int) -> Near:
        """Return the rows of a written batch that may belong in the wheel once it is durable."""
        times, absolute, low, _ = note.dues
        if low >= max(self.horizon, goal(now_ms)) + FORCE_MS:
            return NOTHING
        target = tag(self._targets.number(note.log_id, note.topic), False)
        numbers = array("Q", range(answer.first_ordinal, answer.first_ordinal + len(times)))
        locators = record_offsets(records, answer.positions)
        tags = array("Q", [target | flag for flag in absolute])
        return Near(times, numbers, locators, tags)

    def add(self, near: Near, count: int, low: int, high: int) -> None:
        """Process a durable batch: add what is due inside the window to the wheel, count the rest."""
        if low >= self.horizon:
            self.far.add(count, low)
        elif not len(near.dues):
            self.far.add(count, low)
            self.stray = low if self.stray is None else min(low, self.stray)
            self.fires_below = min(self.fires_below, low)
        elif high < self.horizon:
            self.wheel.add_many(*near)
        else:
            keep = [due < self.horizon for due in near.dues]
            far = [due for due in near.dues if due >= self.horizon]
            self.far.add(len(far), min(far))
            self.wheel.add_many(*(array("Q", compress(column, keep)) for column in near))

    def topic_gone(self, incarnation: int) -> int:
        """Drop the messages of a deleted topic from the wheel; return how many."""
        targets = self._targets.of(incarnation)
        return self.wheel.drop_targets(targets) if targets else 0

    # End of the window

    def begin(self, base_ms: int, horizon: int) -> None:
        """Start with an empty wheel and a window up to `end`; nothing is due before `base_ms`."""
        self.wheel.rebase(base_ms)
        self.move(min(horizon, base_ms + DUE_SPAN))

    def reach(self, to: int, low: int) -> int:
        """Return how far the window can be extended, at most to `to`.

        An empty wheel is rebased to reach any time; no message added later may be due before `low`.
        """
        wheel = self.wheel
        if not wheel.held:
            self._front = self.front
            wheel.rebase(min(self.fires_below, low))
        return min(to, wheel.base_ms + DUE_SPAN)

    def move(self, to: int) -> None:
        """Set the end to `to`.

        No pending message between the old and the new end is outside the wheel.
        """
        self.horizon = self.fires_below = self.border = to

    def begin_load(self, to: int) -> int:
        """Start a load up to `to`. Return the old end: nothing fires from there on until `end_load`."""
        low, self.horizon = self.horizon, to
        return low

    def put(self, near: Near) -> None:
        """Add some of the loaded rows."""
        self.wheel.add_many(*near)
        arrivals = sum([locator < BUCKETS for locator in near.locators])
        self.far.count -= arrivals
        self.coming += len(near.locators) - arrivals

    def end_load(self) -> None:
        """End a load: all rows are added."""
        self.fires_below = self.horizon if self.stray is None else min(self.horizon, self.stray)
        self.border, self.coming = self.horizon, 0
        if self.far.low is not None:
            self.far.low = max(self.far.low, self.fires_below) if self.far.count > 0 else None
            self.far.count = max(0, self.far.count)

    def retreat(self, to: int, spilled_offset: int) -> int:
        """Drop the rows due at `to` or later, which are on disk; return how many.

        Arrivals before `spilled_offset` are in buckets.
        """
        to = min(to, self.horizon)
        dropped = self.wheel.drop_from(to)
        self.horizon, self.stray = to, None
        self.fires_below = self.border = to
        if len(dropped):
            self.far.add(sum([spilled_offset <= locator < BUCKETS for locator in dropped]), to)
        return len(dropped)

    # Spill

    def begin_spill(self) -> None:
        """Start a spill of all arrivals; those that arrive from now on are counted separately."""
        self._spilling, self.far = self.far, Far()

    def end_spill(self, done: bool) -> int:
        """End a spill; `done`: it succeeded. Return how many messages were to be spilled."""
        before, self._spilling = self._spilling or Far(), None
        if not done and before.low is not None:
            self.far.add(before.count, before.low)
        return before.count
