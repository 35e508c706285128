"""What is due for one partition: fired strictly in the order of the turns, one effect at a time, once.

The partition remembers the highest turn that it has, and that stands for everything below it. So nothing fires while
something below it does not, and after a start, an error or a resumption the partition is asked how far it is before
anything is sent. A line whose partition takes nothing keeps a bounded number of rows and then only knows that it is
behind: the rest is on the disk, and is loaded again when there is use for it.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from journal.errors import BelowStart
from journal.record.batch import Source
from journal.record.block_trailer import SOURCE_DELAY
from journal.record.format import SEQUENCE_BITS, SEQUENCE_MASK
from tfmq.apply_target import Append, Destination, Mark
from tfmq.delay.arrivals.state import Cancelled
from tfmq.delay.due_time import BrokerTime
from tfmq.delay.flow_control import SLICE_BYTES, Pacing, Patience, Settling, Written
from tfmq.delay.record_reader import Fetched, Fetching, Supply
from tfmq.delay.requests import Run, Timers, Turn
from tfmq.delay.rows import NO_PART, Part, Rows, Slice, Targets, join, no_part
from tfmq.delay.timing_wheel import ABSOLUTE, TARGET_SHIFT, Entries
from tfmq.errors import UNKNOWN, DiskFull, StorageStopped, UnknownTopic

logger = logging.getLogger("tfmq.delay")

ROWS_MAX: Final = 65_536
"""A line keeps no more in memory, 1.6 MiB, unless they are fired as they come."""
READ_ROWS: Final = 4096
"""One read, at most."""
RECORD_BYTES_FIRST: Final = 1024
"""What a record is taken to have before one was seen: the first read of large ones does not bring hundreds."""


class Line:
    """The messages of one target that are due. `parked`: why it takes nothing at the moment, "" while it does."""

    def __init__(self, key: int, topic: str, lines: Lines) -> None:
        self.key, self.topic = key, topic
        self.parked = ""
        self._behind: Turn | None = None
        self.reloading = False
        self._cut: Turn | None = None
        """While it is being loaded: what came from this turn on is not kept."""
        self._count = LineCount()
        self._loads = 0
        self.busy = False
        self.rows = Rows()
        self._lines = lines
        self.settling = Settling(lines.applied(key))
        self._doubt = self._applied()
        """A target that was stopped before, or failed in the middle of a write, may have all up to here, or not."""
        self._known, self._life = False, 0
        """Counts what makes a read or an effect that is under way worthless."""
        self._flight: Turn | None = None
        """Everything up to here is being read, or written."""
        self._resumptions = 0
        self._record_bytes = RECORD_BYTES_FIRST
        self._forcing = False
        self._supply = Supply(lines.fetching, lines.run)
        self._patience = Patience(lines.timers, lambda: lines.ready(self))

    def _applied(self) -> Turn | None:
        applied = self._lines.destination.applied(self.key, self._lines.source)
        return None if applied is None else Turn(*applied)

    # What it has

    @property
    def behind(self) -> Turn | None:
        """All that is due from here on, and what the rows do not have, is only on the disk."""
        return self._behind

    @behind.setter
    def behind(self, turn: Turn | None) -> None:
        self._behind = turn
        self._lines.note_behind(self)

    @property
    def empty(self) -> bool:
        """Nothing waits, nothing is under way, and all that fired is on the disk."""
        return not (len(self.rows) or self.busy or self.behind or len(self.settling))

    @property
    def due_first(self) -> int | None:
        """Nothing of it that is due before is still to be fired or forced; None: all is done."""
        dues = [due for due in (self.settling.first_due, self.behind and self.behind.due) if due is not None]
        if len(self.rows):
            dues.append(self.rows.first().due)
        return min(dues, default=None)

    def add(self, part: Part) -> None:
        """These are due; their turns are above all that came before."""
        count, limit = len(part.numbers), self._cut if self.reloading else self.behind
        full = len(self.rows) + count > ROWS_MAX and (self.parked or self.reloading)
        if limit is None and not full:
            self.rows.add(part)
            return
        self._count.skip(count, self.reloading)
        if limit is None and self.reloading:
            self._cut = part.turn(0)
        elif limit is None:
            self.behind = part.turn(0)

    @property
    def waiting(self) -> int:
        """Messages that came to it and are not in the target for sure, also those that it has on the disk only."""
        return self._count.waiting(self.rows) + self.settling.count

    def left(self, turn: Turn) -> None:
        """That message will not be sent."""
        self._count.left(turn, self.rows, self._cut, self.behind)

    def forget(self) -> None:
        """Gives up the rows in memory: they are on the disk."""
        if len(self.rows):
            self._count.give_up(self.rows)
            first = self.rows.first()
            self.behind = first if self.behind is None else min(first, self.behind)
            self.rows.clear()
            self._supply.clear()
            # What is being loaded ends before what came since: it is loaded again.
            self._cut, self.reloading = None, False
            self._life += 1

    @property
    def wants_rows(self) -> bool:
        """Whether it is behind, and would fire what is loaded."""
        waits = self.busy or self.reloading or self._patience.waits
        return self.behind is not None and not waits and not len(self.rows)

    def reload(self) -> int:
        """It is being loaded from `behind` on, up to what came until now; answers a ticket for `reloaded`."""
        self.reloading, self._loads = True, self._loads + 1
        return self._loads

    def reloaded(self, ticket: int, part: Part | None, next_turn: Turn | None) -> None:
        """What was loaded from the disk, None if that failed. `next_turn`: from there on is more, which was not."""
        if not self.reloading or ticket != self._loads:
            return
        self.reloading = False
        if part is None:
            self._count.give_up(self.rows)
            self.rows.clear()
            self._cut = None
            return
        waited = self._count.waiting(self.rows)
        later, self.rows = self.rows, Rows()
        cut, self._cut = self._cut, None
        self.rows.add(part)
        self.behind = next_turn
        if next_turn is None:
            self.rows.add(later.head(len(later)))
            self.behind = cut
        dead = dead_in(self.rows, self._lines.cancelled, self._lines.blocked)
        self._count.load(waited, self.rows, dead, next_turn is None)
        self._known = False
        self._lines.ready(self)

    def fires(self, turn: Turn) -> bool:
        """Whether that message is on its way at the moment, or written and not on the disk for sure."""
        if self._flight is not None and turn <= self._flight:
            return True
        if self._doubt is not None and turn <= self._doubt and not self.settling.settled(turn):
            return True
        last = self.settling.last
        return last is not None and turn <= last.last and not self.settling.settled(turn)

    # Firing

    def pump(self) -> None:
        """Sends the next effect, if none is under way; not while what comes before the rows is being loaded."""
        while len(self.rows) and not self.busy and not self.reloading and not self._patience.waits:
            if not self._known and not self._look():
                continue
            count = min(self._lines.pacing.rows_left, READ_ROWS, 1 + SLICE_BYTES // self._record_bytes)
            if not count:
                self._lines.next_turn(self)
                return
            found = ready(self.rows.head(count), self._lines, self._lines.doubtful.get(self.key))
            if found.cancelled:
                self.rows.drop(found.cancelled)
                self._count.drop(found.cancelled)
            elif len(found.early.numbers):
                self._lines.early(self, *found[2:])
                return
            elif not len(found.part.numbers):
                return
            else:
                self._fetch(found.part)
        if not len(self.rows) and not self.busy:
            self._lines.rested(self)

    def _look(self) -> bool:
        """How far the target is; whether there is something left to send."""
        if self._lines.destination.name(self.key) is None:
            self.drop()
            return False
        stopped = self._lines.stop_of(self.key)
        if stopped is not None:
            self._park(stopped)
            self.settling.wake()
            return False
        applied = self._applied()
        self._known, self._doubt = True, None
        if applied is not None:
            self.rows.drop_through(applied)
        return bool(len(self.rows))

    def _fetch(self, part: Part) -> None:
        self.busy, self._flight = True, part.turn(len(part.numbers) - 1)
        self._supply.fetch(part, self.rows, self._record_bytes, partial(self._fetched, part, self._life))

    def _fetched(self, part: Part, life: int, found: Fetched | None, error: BaseException | None) -> None:
        self.busy = False
        if life != self._life or self._lines.stopping:
            self._landed()
            return
        if isinstance(error, BelowStart | KeyError):
            # What they lay in is gone, since everything in it is somewhere else by now.
            self.forget()
            self._landed()
            return
        if found is None:
            self._failed(error or RuntimeError("a read ended without an answer"))
            return
        limit = min(SLICE_BYTES, self._lines.destination.slice_bytes(self.key))
        piece = join(found.records, self.key, limit)
        if piece.damaged:
            told = "%d delayed messages for %s cannot be read and are left out, due %d to %d"
            dues = part.dues[0], part.dues[piece.rows - 1]
            logger.error(told, piece.damaged, self._lines.name(self.key), *dues)
            self._lines.damaged += piece.damaged
        if not piece.batches:
            self.rows.drop(piece.rows)
            self._landed()
            return
        self._record_bytes = max(1, piece.size_bytes // piece.rows)
        self._send(part.cut(piece.rows), piece)

    def _send(self, part: Part, piece: Slice) -> None:
        pacing = self._lines.pacing
        self.busy, self._flight = True, part.turn(len(part.numbers) - 1)
        if not pacing.fits(piece.size_bytes):
            pacing.wait(piece.size_bytes, partial(self._send_again, part, piece, self._life))
            return
        pacing.take(piece.size_bytes)
        pacing.spend(piece.rows, piece.size_bytes)
        source = Source(SOURCE_DELAY, self._lines.source[1], *self._flight)
        incarnation, number = self.key >> SEQUENCE_BITS, self.key & SEQUENCE_MASK
        effect = Append(self.topic, incarnation, number, piece.batches, source)
        self._lines.destination.apply(effect, partial(self._written, part, piece.size_bytes, self._life))

    def _send_again(self, part: Part, piece: Slice, life: int) -> None:
        """There is room in the window."""
        if life != self._life or self._lines.stopping:
            self._landed()
        else:
            self._send(part, piece)

    # What became of it

    def _landed(self) -> None:
        """Nothing is under way any more."""
        self.busy, self._flight = False, None
        self.settling.wake()
        self._lines.ready(self)

    def _written(
        self, part: Part, size_bytes: int, life: int, mark: Mark | None, error: BaseException | None
    ) -> None:
        self.busy = False
        if mark is None:
            self._lines.pacing.give(size_bytes)
            if life == self._life:
                self._failed(error or RuntimeError("an effect ended without a mark"))
            else:
                self._landed()
            return
        self._flight = None
        last = part.turn(len(part.numbers) - 1)
        self.settling.add(Written(mark, part.dues[0], last, size_bytes, len(part.numbers)))
        if life == self._life:
            self.rows.drop(len(part.numbers))
            if self.behind is not None and self.behind <= last:
                self.behind = Turn(last.due, last.number + 1)
        if self.parked:
            logger.info("%s takes delayed messages again", self._lines.name(self.key))
            self.parked = ""
            self._patience.renew()
        self._lines.fired(self, part)
        self._force()
        self._lines.ready(self)

    def _force(self) -> None:
        """One force at a time is asked for: what is written meanwhile shares the next."""
        last = self.settling.last
        if last is None or self._forcing:
            return
        self._forcing = True
        self._lines.destination.when_forced(last.mark, partial(self._forced, self._resumptions))

    def _forced(self, resumptions: int, error: BaseException | None) -> None:
        if resumptions != self._resumptions:
            return
        self._forcing = False
        if error is None:
            self.sweep()
            self._force()
            return
        # The target has stopped: what it had may be gone, and `resumed` finds out. Nobody else waits for that.
        self._lines.pacing.give(self.settling.give_up_room())
        if len(self.settling) and not self.parked:
            self._park(error)

    def sweep(self) -> None:
        """Settles what is on the disk."""
        before = self.settling.size_bytes
        self.settling.forced(self._lines.destination.forced)
        self._lines.pacing.give(before - self.settling.size_bytes)
        if not len(self.settling):
            self._lines.rested(self)

    def _failed(self, error: BaseException) -> None:
        if getattr(error, "outcome", None) == UNKNOWN:
            self._doubt = self._flight
        self._known, self._flight = False, None
        if isinstance(error, UnknownTopic):
            self.drop()
        else:
            self._park(error)
        self.settling.wake()

    def drop(self) -> None:
        """The target is gone for ever: what was for it is dropped and counted."""
        count, self._count = self._count.waiting(self.rows), LineCount()
        if count or self.behind:
            logger.warning("%d delayed messages were for %s, which is gone", count, self.topic)
        self._lines.dropped += count
        self._life += 1
        self.rows.clear()
        self._supply.clear()
        self.behind, self.parked, self.reloading = None, "", False
        self._patience.stop()
        self.sweep()
        self.settling.wake()
        self._lines.rested(self)

    # Waiting for the target

    def resumed(self) -> None:
        """The target stopped and takes writes again; what it had, but not on the disk, may be gone."""
        self._life += 1
        self._supply.clear()
        self._resumptions += 1
        self._flight, self._forcing, self._doubt = None, False, None
        self._lines.pacing.give(self.settling.size_bytes)
        applied = self._applied()
        if lost := self.settling.take_back(applied):
            self._count.give_up(self.rows, lost)
            # What is lost is not in memory any more: all is loaded again from there on.
            first = Turn(0, 0) if applied is None else Turn(applied.due, applied.number + 1)
            self.rows.clear()
            self.behind = first if self.behind is None else min(first, self.behind)
            self._cut, self.reloading = None, False
        self.look_again()

    def look_again(self) -> None:
        """The target may take something now, or be gone."""
        self._known = False
        self._patience.renew()
        if not self.busy:
            self._patience.end()

    def hold(self, seconds: float) -> None:
        """The first row waits for a moment."""
        self._patience.hold(seconds)

    def close(self) -> None:
        """Tries no more by itself."""
        self._patience.stop()

    def _park(self, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if reason != self.parked and not self._lines.stopping:
            logger.error("Delayed messages wait for %s: %s", self._lines.name(self.key), reason)
        self.parked = reason
        self._supply.clear()
        self._patience.refused()
        self._lines.stuck(self)


class LineCount:
    """How many messages came to a line and were not written: in its rows, but for those that were cancelled, and on the
    disk only.

    `dead`: so many of the rows were cancelled or moved. `behind`: so many came and are not in the
    rows; `cut`: and so many since what is being loaded was cut.
    """

    def __init__(self) -> None:
        self.dead = self.behind = self.cut = 0

    def waiting(self, rows: Rows) -> int:
        """All of them."""
        return max(0, len(rows) - self.dead) + self.behind + self.cut

    def give_up(self, rows: Rows, lost: int = 0) -> None:
        """All of it is on the disk only, and `lost` more that were sent."""
        self.behind = self.waiting(rows) + lost
        self.cut = self.dead = 0

    def skip(self, count: int, loading: bool) -> None:
        """So many came that are not kept."""
        if loading:
            self.cut += count
        else:
            self.behind += count

    def drop(self, dead: int) -> None:
        """So many rows that were cancelled are gone."""
        self.dead = max(0, self.dead - dead)

    def left(self, turn: Turn, rows: Rows, cut: Turn | None, behind: Turn | None) -> None:
        """That message will not be sent; what is from `cut` or `behind` on may be on the disk only."""
        if rows.holds(turn):
            self.dead += 1
        elif cut is not None and turn >= cut:
            self.cut = max(0, self.cut - 1)
        elif behind is not None and turn >= behind:
            self.behind = max(0, self.behind - 1)

    def load(self, waited: int, rows: Rows, dead: int, is_all: bool) -> None:
        """These are its rows now, with so many dead ones; `waited`: what `waiting` said before. `is_all`: nothing that
        came before the cut is missing."""
        self.dead = dead
        self.behind = self.cut if is_all else max(0, waited - len(rows) + dead)
        self.cut = 0


def dead_in(rows: Rows, cancelled: Cancelled, unsure: Collection[tuple[int, int]]) -> int:
    """How many of the rows were cancelled for sure."""
    part = rows.head(len(rows))
    if not len(rows) or not cancelled.any_between(part.dues[0], part.dues[-1]):
        return 0
    turns = zip(part.dues, part.numbers, strict=True)
    return sum([turn in cancelled and turn not in unsure for turn in turns])


# Which of the first rows of a line may fire now: up to one that is cancelled, or being so, or would be early.


class Ready(NamedTuple):
    """`part`: these may fire, none if the first has to wait. `cancelled`: so many of the first never will.

    `early`: by the wall clock the first one's time has not come, nor that of others among them; by so many ms.
    """

    part: Part
    cancelled: int = 0
    early: Part = NO_PART
    early_ms: Sequence[int] = ()


def ready(part: Part, lines: Lines, doubtful: int | None = None) -> Ready:
    """See the module; `part` has at least one row. From the due `doubtful` on none fires."""
    if doubtful is not None and part.dues[-1] >= doubtful:
        part = part.cut(bisect_left(part.dues, doubtful))
        if not len(part.numbers):
            return Ready(part)
    if lines.blocked:
        for index in range(len(part.numbers)):
            if part.turn(index) in lines.blocked:
                part = part.cut(index)
                break
        if not len(part.numbers):
            return Ready(part)
    if lines.cancelled.any_between(part.dues[0], part.dues[-1]):
        gone = [turn in lines.cancelled for turn in zip(part.dues, part.numbers, strict=True)]
        if gone[0]:
            return Ready(part, gone.index(False) if False in gone else len(gone))
        if True in gone:
            part = part.cut(gone.index(True))
    if any(part.flags) and not lines.time.steady:
        return _until_early(part, lines)
    return Ready(part)


def _until_early(part: Part, lines: Lines) -> Ready:
    columns = zip(part.dues, part.numbers, part.flags, strict=True)
    early = [lines.time.early_ms(due, number) if flag else 0 for due, number, flag in columns]
    first = next((index for index, each in enumerate(early) if each), None)
    if first is None:
        return Ready(part)
    if first:
        return Ready(part.cut(first))
    waits = no_part()
    for index, each in enumerate(early):
        if each:
            waits.dues.append(part.dues[index])
            waits.numbers.append(part.numbers[index])
            waits.locators.append(part.locators[index])
            waits.flags.append(part.flags[index])
    return Ready(part, 0, waits, [each for each in early if each])


STUCK_ROWS_MAX: Final = 524_288
"""Rows that all lines together keep which cannot fire, 13 MB: with more, the fullest gives up its own."""
EARLY_MS_MAX: Final = 50
"""If the wall clock lags by no more, whoever comes behind waits as long; with more, the message gets another due."""

Postpone = Callable[[Line, Part], None]
"""postpone(line, messages of it): their times by the wall clock have not come."""


class Lines:
    """All lines: gives each target what is due for it, lets them fire in turns, bounds what they keep in memory.

    What lines share is in its attributes. `blocked`: turns that must not fire for now.
    """

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


# How late messages are: time from due to written, counted in buckets that double.

BUCKETS: Final = 42
"""The last takes everything later than 34 years."""
PARTS: Final = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}


class Lateness:
    """Bucket 0 counts 0 ms, bucket n from 2^(n-1) up to below 2^n ms."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.max_ms = 0
        self.total = 0

    def note(self, late_ms: int, count: int = 1) -> None:
        """So many messages were so late."""
        late_ms = max(0, late_ms)
        self.counts[min(late_ms.bit_length(), BUCKETS - 1)] += count
        self.total += count
        if late_ms > self.max_ms:
            self.max_ms = late_ms

    def note_sorted(self, now_ms: int, dues: Sequence[int]) -> None:
        """Messages with these dues, lowest first, were written now."""
        end = len(dues)
        for bucket in range(BUCKETS):
            # Later than what this bucket counts are those that were due before.
            start = bisect_left(dues, now_ms - (1 << bucket) + 1, 0, end) if bucket < BUCKETS - 1 else 0
            self.counts[bucket] += end - start
            end = start
            if not end:
                break
        self.total += len(dues)
        if dues:
            self.max_ms = max(self.max_ms, now_ms - dues[0])

    def below(self, part: float) -> int:
        """This part of all messages was not later, in ms: the upper end of a bucket. 0 without messages."""
        wanted, seen = part * self.total, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min((1 << bucket) - 1, self.max_ms)
        return self.max_ms

    def status(self) -> dict[str, Any]:
        """p50, p99, p99.9, the maximum (ms) and the buckets."""
        known: dict[str, Any] = {name: self.below(part) for name, part in PARTS.items()}
        return known | {"max_ms": self.max_ms, "count": self.total, "counts": list(self.counts)}
