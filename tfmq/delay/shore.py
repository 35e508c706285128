"""The border between memory and disk: the wheel, how far it reaches, and what arrived behind that.

What is due below the horizon is in the wheel as soon as its arrival is on the disk; the rest is counted and left on
the disk. `fires_below` is the horizon, or while something is being loaded the one before.
"""

from array import array
from itertools import compress
from typing import Final

from journal.record.batch import Appended
from journal.record.format import Buffer
from tfmq.delay.arrivals import record_offsets
from tfmq.delay.columns import SLOT_SHIFT
from tfmq.delay.horizon import goal
from tfmq.delay.ledger import Near
from tfmq.delay.note import Note
from tfmq.delay.requests import Turn
from tfmq.delay.targets import Targets
from tfmq.delay.wheel import HashedWheelTimer
from tfmq.delay.wheel_slots import DUE_SPAN, tag

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
    """See the module. One owner's thread."""

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
