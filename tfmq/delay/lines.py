"""All lines: gives each target what is due for it, lets them fire in turns, bounds what they keep in memory."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from journal.record.block_trailer import SOURCE_DELAY
from journal.record.format import SEQUENCE_BITS
from tfmq.apply_target import Destination
from tfmq.delay.broker_time import BrokerTime
from tfmq.delay.cancelled import Cancelled
from tfmq.delay.fetching import Fetching
from tfmq.delay.lateness import Lateness
from tfmq.delay.line import Line
from tfmq.delay.pacing import Pacing
from tfmq.delay.requests import Run, Timers, Turn
from tfmq.delay.rows import Part
from tfmq.delay.targets import Targets
from tfmq.delay.wheel_slots import ABSOLUTE, TARGET_SHIFT, Entries
from tfmq.errors import DiskFull, StorageStopped, UnknownTopic

logger = logging.getLogger("tfmq.delay")

STUCK_ROWS_MAX: Final = 524_288
"""Rows that all lines together keep which cannot fire, 13 MB: with more, the fullest gives up its own."""
EARLY_MS_MAX: Final = 50
"""If the wall clock lags by no more, whoever comes behind waits as long; with more, the message gets another due."""

Postpone = Callable[[Line, Part], None]
"""postpone(line, messages of it): their times by the wall clock have not come."""


class Lines:
    """See the module. What lines share is in its attributes. `blocked`: turns that must not fire for now."""

    def __init__(
        self,
        store_id: int,
        *,
        destination: Destination,
        timers: Timers,
        run: Run,
        time: BrokerTime,
        targets: Targets,
        fetching: Fetching,
        cancelled: Callable[[], Cancelled],
        doubtful: Mapping[int, int],
        postpone: Postpone,
    ) -> None:
        self.source = (SOURCE_DELAY, store_id)
        self.destination, self.timers, self.run, self.time = destination, timers, run, time
        self.fetching = fetching
        self.pacing = Pacing()
        self.lateness = Lateness()
        self.doubtful = doubtful
        """Targets of which nothing fires from a due on: key -> due."""
        self.blocked: set[Turn] = set()
        self.dropped = 0
        """Messages whose topic was gone."""
        self.damaged = 0
        """Messages that could not be read."""
        self.fired_count = 0
        self.stopping = False
        self._targets, self._cancelled, self._postpone = targets, cancelled, postpone
        self._lines: dict[int, Line] = {}
        self._due: dict[Line, None] = {}
        self._behind: dict[Line, None] = {}
        self._next_turn: dict[Line, None] = {}
        self._has_stuck = False

    @property
    def cancelled(self) -> Cancelled:
        """What was cancelled, as the arrivals' state has it now."""
        return self._cancelled()

    @property
    def queued(self) -> int:
        """Rows in memory."""
        return sum([len(line.rows) for line in self._lines.values()])

    @property
    def waiting(self) -> int:
        """Messages that came to lines and are not in their targets for sure."""
        return sum([line.waiting for line in self._lines.values()])

    @property
    def moving(self) -> int:
        """Rows in memory that are going to fire as soon as it is their turn."""
        return sum([len(line.rows) for line in self._lines.values() if not line.parked])

    @property
    def due_first(self) -> int | None:
        """Nothing that is due before is still to be fired or forced, of what came to the lines."""
        dues = [due for line in self._lines.values() if (due := line.due_first) is not None]
        return min(dues, default=None)

    @property
    def rows_first(self) -> int | None:
        """No row in memory is due before; None: there is none."""
        return min((line.rows.first().due for line in self._lines.values() if len(line.rows)), default=None)

    @property
    def behind_count(self) -> int:
        """Lines that gave up rows."""
        return len(self._behind)

    def note_behind(self, line: Line) -> None:
        """It gave up rows, or has them again."""
        if line.behind is None:
            self._behind.pop(line, None)
        else:
            self._behind[line] = None

    def wanting(self) -> Line | None:
        """One that gave up rows and would fire them."""
        return next((line for line in self._behind if line.wants_rows), None)

    def get(self, key: int) -> Line | None:
        """The line of a target that has one."""
        return self._lines.get(key)

    def all(self) -> list[Line]:
        """Every line."""
        return list(self._lines.values())

    def settled(self, key: int) -> Turn | None:
        """Up to where a target has everything, on the disk. Any thread."""
        line = self._lines.get(key)
        return self.applied(key) if line is None else line.settling.through

    def applied(self, key: int) -> Turn | None:
        """What a target has, for sure: a stopped one may lose yet what was not forced. Any thread."""
        settled = self.destination.settled(key, self.source)
        return None if settled is None else Turn(*settled)

    def stop_of(self, key: int) -> StorageStopped | None:
        """Why a target takes nothing before it is resumed; None: it does, or is gone, or only full. Any thread."""
        try:
            self.destination.check(key, 0)
        except StorageStopped as error:
            return error
        except (DiskFull, UnknownTopic):
            pass
        return None

    def name(self, key: int) -> str:
        """A target for people."""
        return self.destination.name(key) or "a topic that is gone"

    # What is due

    def put(self, entries: Entries) -> None:
        """These are due: each goes to its line."""
        if not len(entries):
            return
        tags = entries.tags
        first = tags[0] >> TARGET_SHIFT
        if min(tags) >> TARGET_SHIFT == first == max(tags) >> TARGET_SHIFT:
            flags = bytearray([tag & ABSOLUTE for tag in tags])
            self._add(first, Part(entries.dues, entries.numbers, entries.locators, flags))
            return
        found: dict[int, list[int]] = {}
        for row, tag in enumerate(tags):
            target = tag >> TARGET_SHIFT
            if target in found:
                found[target].append(row)
            else:
                found[target] = [row]
        for target, rows in found.items():
            dues, numbers, locators = (array("Q", map(each.__getitem__, rows)) for each in entries[:3])
            self._add(
                target, Part(dues, numbers, locators, bytearray([tags[row] & ABSOLUTE for row in rows]))
            )

    def _add(self, target: int, part: Part) -> None:
        key, topic = self._targets.row(target)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, topic, self)
        line.add(part)
        self._due[line] = None
        if line.parked:
            self.stuck(line)

    # Turning

    @property
    def due(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._due) or self._has_stuck

    def write(self) -> bool:
        """Hands effects to the targets that can take one; whether there was anything to do."""
        due, self._due = self._due, {}
        if not self.stopping:
            for line in due:
                line.pump()
        if self._has_stuck:
            self._bound_stuck()
        return bool(due)

    def next_turn(self, line: Line) -> None:
        """This turn has brought enough: the line goes on in the next one."""
        if not self._next_turn:
            self.timers.after(0.0, self._new_turn)
        self._next_turn[line] = None

    def _new_turn(self) -> None:
        self.pacing.begin_turn()
        lines, self._next_turn = self._next_turn, {}
        self._due.update(lines)

    # What lines tell

    def ready(self, line: Line) -> None:
        """It may have something to send."""
        self._due[line] = None

    def rested(self, line: Line) -> None:
        """It has nothing to do for now; one that has nothing at all is forgotten: its target knows the rest."""
        if line.empty and self._lines.get(line.key) is line:
            line.close()
            del self._lines[line.key]
            line.settling.wake()

    def stuck(self, line: Line) -> None:
        """Its target takes nothing, and it got rows, or got stuck: that is looked at once a turn."""
        self._has_stuck = True

    def _bound_stuck(self) -> None:
        """All such lines together keep a bounded number of rows."""
        self._has_stuck = False
        stuck = sorted(
            [each for each in self._lines.values() if each.parked], key=lambda each: len(each.rows)
        )
        total = sum([len(each.rows) for each in stuck])
        while total > STUCK_ROWS_MAX:
            line = stuck.pop()
            total -= len(line.rows)
            line.forget()

    def fired(self, line: Line, part: Part) -> None:
        """These are written."""
        now = self.time.now_ms()
        self.fired_count += len(part.numbers)
        self.lateness.note_sorted(now, part.dues)

    def early(self, line: Line, part: Part, early_ms: Sequence[int]) -> None:
        """By the wall clock, which stepped back, these are so many ms too early; the first of them leads its line."""
        if early_ms[0] <= EARLY_MS_MAX:
            line.hold(early_ms[0] / 1000)
        else:
            self._postpone(line, part)

    def unblock(self, key: int, turn: Turn) -> None:
        """The message may fire again, or was cancelled: its line goes on."""
        self.blocked.discard(turn)
        line = self._lines.get(key)
        if line is not None:
            self.ready(line)

    def note_lost(self, dropped: int, damaged: int) -> None:
        """So many messages never come to a line."""
        self.dropped += dropped
        self.damaged += damaged
        if damaged:
            logger.error("%d delayed messages are lost, since they cannot be read", damaged)

    # Targets

    def resumed(self, key: int) -> None:
        """A target takes writes again."""
        line = self._lines.get(key)
        if line is not None:
            line.resumed()

    def topic_gone(self, incarnation: int) -> None:
        """Its partitions' lines have nobody to wait for any more."""
        for key, line in list(self._lines.items()):
            if key >> SEQUENCE_BITS == incarnation:
                line.look_again()
                line.sweep()

    def left(self, key: int, turn: Turn) -> None:
        """That message will not be sent."""
        line = self._lines.get(key)
        if line is not None:
            line.left(turn)

    def forget_parked(self, due: int) -> None:
        """Whoever waits for a target with rows that are due before gives them up, so that the files can go that only
        they need."""
        for line in self._lines.values():
            if line.parked and not line.busy and len(line.rows) and line.rows.first().due < due:
                line.forget()

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not any(line.busy for line in self._lines.values())

    def stop(self) -> None:
        """Nothing new is sent, and no line tries anything by itself any more."""
        self.stopping = True
        for line in self._lines.values():
            line.close()
