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

from enum import Enum
from typing import Final, NamedTuple

from tfmq.delay.spans import FINEST, USUAL, Span

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
