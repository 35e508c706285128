"""What to do next with what is not in memory: a pure decision, from numbers alone.

The horizon is the due up to which pending messages are in the wheel. It is moved on shortly before its time, a leaf of
the buckets at a time; while what lies between the old and the new one is loaded, whatever arrives is judged by the new
one, and nothing fires from the old one on. It is taken back when too much is in memory: what lies behind it is on the
disk anyway.

| found | decision |
|---|---|
| something below the horizon is on the disk only: its force took too long | retreat to it |
| more in memory than NEAR_MAX, and it reaches far enough | retreat |
| something due soon may lie on the disk, and there is room | load, or before it spill or split what is to be loaded |
| nothing due soon is on the disk | the horizon moves without any work |
| somebody asks for what arrived, or it is much, or old | spill |
| a line's target takes messages again | reload what it gave up |
| a coarse bucket's time comes, or one has too much | split |
| it is not known how much of a bucket still waits | count |
| arrivals that nobody needs fill a segment | truncate |
| time to write down what changed | commit |
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
"""What is due is in memory so long before: a slow disk has that time for a load."""
NEAR_MAX: Final = 1_000_000
"""Rows in memory, 24 MB. With more, the horizon is taken back."""
ROOM_ROWS: Final = 500_000
"""With more in memory, the next leaf is loaded only when its time has come."""
CATCH_UP_ROWS: Final = 65_536
"""Of what is overdue, the next leaf is loaded when no more than this is left to fire."""
URGENT_MS: Final = 1_000
"""The next leaf is loaded so long before its time, however much is in memory."""
KEEP_MS: Final = 3_000
"""A retreat keeps at least what is due so soon."""
SPILL_BYTES: Final = 64 << 20
"""So much in the arrivals, and it goes to the buckets: what a start has to read."""
SPILL_MS: Final = 60_000
"""What arrived so long ago goes there, too."""
RESCAN_BYTES: Final = 4 << 20
"""Arrivals that are not in buckets are read once for each load: with more, they are spilled before."""
COMMIT_MS: Final = 10_000
"""How often it is written down what time it is."""
SPLIT_ROWS: Final = 262_144
"""A bucket with more is split before it is loaded."""


class Step(Enum):
    """What the keeper is to do."""

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
    """How things are. Dues and times in ms of broker time.

    `rows`: messages in memory; `moving`: those of them that fire as soon as it is their turn. `span`, `span_rows`: of
    the first bucket that ends behind the horizon. `far_low`: the lowest due of arrivals that are in no bucket, and not
    in the wheel. `unspilled_bytes`, `unspilled_since`: of arrivals that are in no bucket. `writable`: whether buckets
    can be written, as far as known.
    """

    now: int
    horizon: int
    rows: int = 0
    moving: int = 0
    unsure: int | None = None
    """The lowest due of arrivals that are not known to be on the disk."""
    stray: int | None = None
    """The due of something below the horizon that is on the disk only."""
    span: Span | None = None
    span_rows: int = 0
    divisible: bool = True
    """Whether that bucket can be split."""
    far_low: int | None = None
    far_count: int = 0
    """How many of them there are."""
    unspilled_bytes: int = 0
    unspilled_since: int | None = None
    writable: bool = True
    wanted: bool = False
    """Somebody waits until what arrived is in the buckets."""
    splits: bool = False
    """The buckets name some that should be split."""
    counts: bool = False
    """How much of a bucket waits is not known."""
    reloads: bool = False
    spare_bytes: int = 0
    """Arrivals that nobody needs any more."""
    segment_bytes: int = SPILL_BYTES
    committed: int = 0
    """When the checkpoint was written."""
    changed: bool = False
    """Whether it says something else now."""


class Decision(NamedTuple):
    """`to`: the new horizon of RETREAT, MOVE and LOAD."""

    step: Step
    to: int = 0


REST: Final = Decision(Step.REST)


def retreat_to(now: int) -> int:
    """Where a retreat takes the horizon: a bucket of the finest level may begin there."""
    return (now + KEEP_MS + (1 << FINEST) - 1) >> FINEST << FINEST


def goal(now: int) -> int:
    """Where the horizon should be at least when nothing is in the way: whole buckets of the usual level."""
    return ((now + LEAD_MS) >> USUAL) + 1 << USUAL


def decide(view: View) -> Decision:
    """See the table above: the first row that fits."""
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
    """The same as far as memory allows it, and what is not sure to be on the disk; None: not yet."""
    step, to = onward
    if step not in (Step.LOAD, Step.MOVE):
        return onward
    if view.unsure is not None and view.unsure >= view.horizon:
        to = min(to, view.unsure)
    if view.rows > ROOM_ROWS or view.rows + _coming(view, to) > NEAR_MAX:
        to = min(to, retreat_to(view.now))  # a retreat would go there, and another load follow it
    if to <= view.horizon or (step is Step.LOAD and not _has_room(view, to)):
        return None
    return Decision(step, to)


def _has_room(view: View, to: int) -> bool:
    """Whether so much more may come to memory. What is too much would have to go again at once."""
    if view.horizon <= view.now:
        return view.moving <= CATCH_UP_ROWS
    if view.horizon <= view.now + URGENT_MS:
        return True
    return view.rows <= ROOM_ROWS and view.rows + _coming(view, to) <= NEAR_MAX


def _coming(view: View, to: int) -> int:
    """How many rows a load up to there may bring."""
    from_bucket = view.span_rows if view.span is not None and view.span.start < to else 0
    return from_bucket + (view.far_count if view.far_low is not None and view.far_low < to else 0)


def _is_old(view: View) -> bool:
    since = view.unspilled_since
    return view.unspilled_bytes >= SPILL_BYTES or (since is not None and view.now - since >= SPILL_MS)


def _onward(view: View) -> Decision:
    """The horizon has to move on."""
    span = view.span
    to = goal(view.now)
    if span is not None and span.start <= view.horizon:
        coarse = span.exponent > USUAL or (span.exponent > FINEST and view.span_rows > SPLIT_ROWS)
        if coarse and view.writable and view.divisible:
            return Decision(Step.SPLIT)
        to = min(span.end, _piece(view)) if coarse else span.end
    else:
        # What lies between here and the next bucket can only be in the arrivals.
        to = to if span is None else min(to, span.start)
        if view.far_low is None or view.far_low >= to:
            return Decision(Step.MOVE, to)
    far = view.far_low is not None and view.far_low < to
    if far and view.unspilled_bytes > RESCAN_BYTES and view.writable:
        return Decision(Step.SPILL)
    return Decision(Step.LOAD, to)


def _piece(view: View) -> int:
    """The end of the next piece of a bucket that cannot be split."""
    size = USUAL if view.span_rows <= SPLIT_ROWS else FINEST
    return (view.horizon >> size) + 1 << size


FORCE_MS: Final = 600_000
"""What is due so long behind the horizon is not looked at when it is written. Should the force take longer than the
horizon needs to get there, the horizon is taken back."""
BUCKETS: Final = 1 << SLOT_SHIFT
"""Locators below are offsets of arrivals."""
NOTHING: Final = Near(array("Q"), array("Q"), array("Q"), array("Q"))


class Far:
    """Arrivals in no bucket that are not in the wheel: how many, and the lowest due."""

    def __init__(self) -> None:
        self.count = 0
        self.low: int | None = None

    def add(self, count: int, low: int) -> None:
        """So many more, none due before `low`."""
        self.count += count
        self.low = low if self.low is None else min(low, self.low)


class Shore:
    """The border between memory and disk: the wheel, how far it reaches, and what arrived behind that.

    What is due below the horizon is in the wheel as soon as its arrival is on the disk; the rest is counted and left on
    the disk. `fires_below` is the horizon, or while something is being loaded the one before.

    One owner's thread.
    """

    def __init__(self, wheel: HashedWheelTimer, targets: Targets) -> None:
        self.wheel, self._targets = wheel, targets
        self.horizon = 0
        self.fires_below = 0
        self.border = 0
        """What is due below is in memory, or came: the horizon, or while something is being loaded the one before."""
        self.coming = 0
        """Rows out of buckets that were put behind the border."""
        self.far = Far()
        self.stray: int | None = None
        """Due of something below the horizon that is not in the wheel: the horizon must be taken back to there."""
        self._spilling: Far | None = None
        self._front = Turn(0, 0)

    @property
    def far_count(self) -> int:
        """Arrivals that are not in the wheel, also those that are on their way to buckets."""
        return self.far.count + (self._spilling.count if self._spilling is not None else 0)

    @property
    def front(self) -> Turn:
        """Every turn below was given to its line, none from there on."""
        return max(self._front, Turn(*self.wheel.front))

    # What arrives

    def near_of(self, note: Note, records: Buffer, answer: Appended, now_ms: int) -> Near:
        """What of a batch that was written may belong in the wheel once it is on the disk."""
        times, absolute, low, _ = note.dues
        if low >= max(self.horizon, goal(now_ms)) + FORCE_MS:
            return NOTHING
        target = tag(self._targets.number(note.log_id, note.topic), False)
        numbers = array("Q", range(answer.first_ordinal, answer.first_ordinal + len(times)))
        locators = record_offsets(records, answer.positions)
        tags = array("Q", [target | flag for flag in absolute])
        return Near(times, numbers, locators, tags)

    def add(self, near: Near, count: int, low: int, high: int) -> None:
        """A batch is on the disk: what is due below the horizon goes to the wheel."""
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
        """What is in the wheel for it is dropped; how many messages."""
        targets = self._targets.of(incarnation)
        return self.wheel.drop_targets(targets) if targets else 0

    # The horizon

    def begin(self, base_ms: int, horizon: int) -> None:
        """A start: nothing is due before `base_ms`."""
        self.wheel.rebase(base_ms)
        self.move(min(horizon, base_ms + DUE_SPAN))

    def reach(self, to: int, low: int) -> int:
        """How far the wheel can take the horizon, at most to `to`: an empty one takes any. Nothing to come is due
        before `low`."""
        wheel = self.wheel
        if not wheel.held:
            self._front = self.front
            wheel.rebase(min(self.fires_below, low))
        return min(to, wheel.base_ms + DUE_SPAN)

    def move(self, to: int) -> None:
        """Nothing pending lies between the horizon and `to`."""
        self.horizon = self.fires_below = self.border = to

    def begin_load(self, to: int) -> int:
        """What lies below `to` is being loaded; answers the old horizon, from which on nothing fires until then."""
        low, self.horizon = self.horizon, to
        return low

    def put(self, near: Near) -> None:
        """Some of what was loaded."""
        self.wheel.add_many(*near)
        arrivals = sum([locator < BUCKETS for locator in near.locators])
        self.far.count -= arrivals
        self.coming += len(near.locators) - arrivals

    def end_load(self) -> None:
        """All of it is there."""
        self.fires_below = self.horizon if self.stray is None else min(self.horizon, self.stray)
        self.border, self.coming = self.horizon, 0
        if self.far.low is not None:
            self.far.low = max(self.far.low, self.fires_below) if self.far.count > 0 else None
            self.far.count = max(0, self.far.count)

    def retreat(self, to: int, spilled_offset: int) -> int:
        """What is due from `to` on is forgotten: it is on the disk. How many rows. Arrivals before `spilled_offset` are
        in buckets."""
        to = min(to, self.horizon)
        dropped = self.wheel.drop_from(to)
        self.horizon, self.stray = to, None
        self.fires_below = self.border = to
        if len(dropped):
            self.far.add(sum([spilled_offset <= locator < BUCKETS for locator in dropped]), to)
        return len(dropped)

    # Spilling

    def begin_spill(self) -> None:
        """What is far goes to the buckets; what arrives from now on is counted apart."""
        self._spilling, self.far = self.far, Far()

    def end_spill(self, done: bool) -> int:
        """It is there, or stays where it is; how many messages were to go."""
        before, self._spilling = self._spilling or Far(), None
        if not done and before.low is not None:
            self.far.add(before.count, before.low)
        return before.count
