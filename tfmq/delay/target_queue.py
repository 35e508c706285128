"""Target queues: due messages of each partition, appended in order, each exactly once.

A partition remembers the highest turn that it has applied, which implies all lower turns. So no message is sent before
a lower one, and after a start, an error or a resumption the queue first asks the partition for that turn. A queue
whose target rejects messages keeps a bounded number of rows; the others are only on disk and are reloaded when they
can be sent.
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
"""Maximum rows of a queue in memory (1.6 MiB) while they cannot be sent."""
READ_ROWS: Final = 4096
"""Maximum rows of one read."""
RECORD_BYTES_FIRST: Final = 1024
"""Assumed record size before the first read, so that a first read of large records is small."""


class Line:
    """The due messages of one target.

    `blocked_reason`: why the target rejects messages, "" if it does not.
    """

    def __init__(self, key: int, topic: str, lines: Lines) -> None:
        self.key, self.topic = key, topic
        self.parked = ""
        self._behind: Turn | None = None
        self.reloading = False
        self._cut: Turn | None = None
        """During a reload: messages from this turn on arrived meanwhile and were not kept."""
        self._count = LineCount()
        self._loads = 0
        self.busy = False
        self.rows = Rows()
        self._lines = lines
        self.settling = Settling(lines.applied(key))
        self._doubt = self._applied()
        """The target may or may not have the messages up to here.

        It stopped, or failed during a write.
        """
        self._known, self._life = False, 0
        """Increased to invalidate the running read or append."""
        self._flight: Turn | None = None
        """Messages up to this turn are being read or written."""
        self._resumptions = 0
        self._record_bytes = RECORD_BYTES_FIRST
        self._forcing = False
        self._supply = Supply(lines.fetching, lines.run)
        self._patience = Patience(lines.timers, lambda: lines.ready(self))

    def _applied(self) -> Turn | None:
        applied = self._lines.destination.applied(self.key, self._lines.source)
        return None if applied is None else Turn(*applied)

    # State

    @property
    def behind(self) -> Turn | None:
        """Turn from which on messages that are not in `rows` are only on disk.

        None: all are in memory.
        """
        return self._behind

    @behind.setter
    def behind(self, turn: Turn | None) -> None:
        self._behind = turn
        self._lines.note_behind(self)

    @property
    def empty(self) -> bool:
        """Whether nothing is pending or running, and all that fired is durable."""
        return not (len(self.rows) or self.busy or self.behind or len(self.settling))

    @property
    def due_first(self) -> int | None:
        """Lower bound of the due times that are not fired or not durable; None if there are none."""
        dues = [due for due in (self.settling.first_due, self.behind and self.behind.due) if due is not None]
        if len(self.rows):
            dues.append(self.rows.first().due)
        return min(dues, default=None)

    def add(self, part: Part) -> None:
        """Add due messages; their turns are higher than all earlier ones."""
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
        """Messages of this queue that are not durable in the target.

        Those only on disk are included.
        """
        return self._count.waiting(self.rows) + self.settling.count

    def left(self, turn: Turn) -> None:
        """Stop counting a message that was cancelled or rescheduled."""
        self._count.left(turn, self.rows, self._cut, self.behind)

    def forget(self) -> None:
        """Drop the rows from memory; they are on disk."""
        if len(self.rows):
            self._count.give_up(self.rows)
            first = self.rows.first()
            self.behind = first if self.behind is None else min(first, self.behind)
            self.rows.clear()
            self._supply.clear()
            # A running reload ends before messages that arrived later: they are reloaded, too.
            self._cut, self.reloading = None, False
            self._life += 1

    @property
    def wants_rows(self) -> bool:
        """Whether rows are only on disk and could be sent after a reload."""
        waits = self.busy or self.reloading or self._patience.waits
        return self.behind is not None and not waits and not len(self.rows)

    def reload(self) -> int:
        """Start a reload of the rows from `on_disk_from` up to now.

        Return a ticket for `end_reload`.
        """
        self.reloading, self._loads = True, self._loads + 1
        return self._loads

    def reloaded(self, ticket: int, part: Part | None, next_turn: Turn | None) -> None:
        """End a reload.

        `part`: the rows, None after a failure; `next_turn`: there are more from this turn on.
        """
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
        """Return whether the message is being sent, or is written and not known to be durable."""
        if self._flight is not None and turn <= self._flight:
            return True
        if self._doubt is not None and turn <= self._doubt and not self.settling.settled(turn):
            return True
        last = self.settling.last
        return last is not None and turn <= last.last and not self.settling.settled(turn)

    # Sending

    def pump(self) -> None:
        """Send the next append, unless one is running or the rows before it are being reloaded."""
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
        """Check the target: drop what it has applied.

        Return whether there is something left to send.
        """
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
            # Everything in that file was moved to other files since: reload.
            self.forget()
            self._landed()
            return
        if found is None:
            self._failed(error or RuntimeError("a read ended without a result"))
            return
        limit = min(SLICE_BYTES, self._lines.destination.slice_bytes(self.key))
        piece = join(found.records, self.key, limit)
        if piece.damaged:
            text = "%d delayed messages for %s cannot be read and are left out, due %d to %d"
            dues = part.dues[0], part.dues[piece.rows - 1]
            logger.error(text, piece.damaged, self._lines.name(self.key), *dues)
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
        """Retry an append for which the in-flight limit has room now."""
        if life != self._life or self._lines.stopping:
            self._landed()
        else:
            self._send(part, piece)

    # Results

    def _landed(self) -> None:
        """End an operation without an append."""
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
            logger.info("%s accepts delayed messages again", self._lines.name(self.key))
            self.parked = ""
            self._patience.renew()
        self._lines.fired(self, part)
        self._force()
        self._lines.ready(self)

    def _force(self) -> None:
        """Request an fsync, one at a time: later appends share the next one."""
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
        # The target has stopped and may lose what is not durable; `target_resumed` finds out. Release its bytes, so
        # that other queues do not wait for it.
        self._lines.pacing.give(self.settling.give_up_room())
        if len(self.settling) and not self.parked:
            self._park(error)

    def sweep(self) -> None:
        """Process the appends that are durable now."""
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
        """Drop and count all messages: the target's topic is deleted."""
        count, self._count = self._count.waiting(self.rows), LineCount()
        if count or self.behind:
            logger.warning("%d delayed messages for the deleted topic %s are dropped", count, self.topic)
        self._lines.dropped += count
        self._life += 1
        self.rows.clear()
        self._supply.clear()
        self.behind, self.parked, self.reloading = None, "", False
        self._patience.stop()
        self.sweep()
        self.settling.wake()
        self._lines.rested(self)

    # Blocked targets

    def resumed(self) -> None:
        """Handle a stopped target that accepts writes again; it may have lost what was not durable."""
        self._life += 1
        self._supply.clear()
        self._resumptions += 1
        self._flight, self._forcing, self._doubt = None, False, None
        self._lines.pacing.give(self.settling.size_bytes)
        applied = self._applied()
        if lost := self.settling.take_back(applied):
            self._count.give_up(self.rows, lost)
            # The lost messages are not in memory any more: reload everything from there on.
            first = Turn(0, 0) if applied is None else Turn(applied.due, applied.number + 1)
            self.rows.clear()
            self.behind = first if self.behind is None else min(first, self.behind)
            self._cut, self.reloading = None, False
        self.look_again()

    def look_again(self) -> None:
        """Check the target again at once: it may accept messages, or its topic may be deleted."""
        self._known = False
        self._patience.renew()
        if not self.busy:
            self._patience.end()

    def hold(self, seconds: float) -> None:
        """Delay the first row."""
        self._patience.hold(seconds)

    def close(self) -> None:
        """Cancel the retry timer."""
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
    """Count of the messages of a queue that were not written.

    Rows, and messages that are only on disk.
    `dead_rows`: rows of cancelled or rescheduled messages. `on_disk`: messages that are only on disk.
    `arrived_in_reload`: messages that arrived during a reload and are only on disk.
    """

    def __init__(self) -> None:
        self.dead = self.behind = self.cut = 0

    def waiting(self, rows: Rows) -> int:
        """Return the count of all messages."""
        return max(0, len(rows) - self.dead) + self.behind + self.cut

    def give_up(self, rows: Rows, lost: int = 0) -> None:
        """Count all rows as only on disk, and `lost` messages that were sent."""
        self.behind = self.waiting(rows) + lost
        self.cut = self.dead = 0

    def skip(self, count: int, loading: bool) -> None:
        """Count messages that arrived and are not kept."""
        if loading:
            self.cut += count
        else:
            self.behind += count

    def drop(self, dead: int) -> None:
        """Count dead rows that were removed."""
        self.dead = max(0, self.dead - dead)

    def left(self, turn: Turn, rows: Rows, cut: Turn | None, behind: Turn | None) -> None:
        """Stop counting a message; from `reload_end` or `on_disk_from` on it may be only on disk."""
        if rows.holds(turn):
            self.dead += 1
        elif cut is not None and turn >= cut:
            self.cut = max(0, self.cut - 1)
        elif behind is not None and turn >= behind:
            self.behind = max(0, self.behind - 1)

    def load(self, waited: int, rows: Rows, dead: int, is_all: bool) -> None:
        """Set the rows after a reload; `dead` of them are dead.

        `waited`: the count before the reload.
        `is_all`: no message that arrived before the reload is missing.
        """
        self.dead = dead
        self.behind = self.cut if is_all else max(0, waited - len(rows) + dead)
        self.cut = 0


def dead_in(rows: Rows, cancelled: Cancelled, unsure: Collection[tuple[int, int]]) -> int:
    """Return how many of the rows have a durable cancel."""
    part = rows.head(len(rows))
    if not len(rows) or not cancelled.any_between(part.dues[0], part.dues[-1]):
        return 0
    turns = zip(part.dues, part.numbers, strict=True)
    return sum([turn in cancelled and turn not in unsure for turn in turns])


# Which of the first rows of a queue may fire.


class Ready(NamedTuple):
    """Which rows may fire.

    `part`: rows that may fire; none if the first must wait. `cancelled`: how many rows at the head are cancelled.
    `early`: rows, the first one included, that would fire too early by the wall clock; `early_ms`: by how much.
    """

    part: Part
    cancelled: int = 0
    early: Part = NO_PART
    early_ms: Sequence[int] = ()


def ready(part: Part, lines: Lines, doubtful: int | None = None) -> Ready:
    """Return the first rows that may fire, up to one that is cancelled, locked or too early.

    `part` has at least one row. Rows due at `uncertain_from` or later must wait.
    """
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
"""Maximum rows of all blocked queues, 13 MB. With more, the largest queue drops its rows."""
EARLY_MS_MAX: Final = 50
"""Up to this lag of the wall clock the queue waits; with more, the message is rescheduled."""

Postpone = Callable[[Line, Part], None]
"""postpone(queue, rows): reschedule messages that are not due yet by the wall clock."""


class Lines:
    """All target queues.

    Dispatches due messages to them, runs them in turns, limits their memory. The attributes are shared by the queues.
    `locked`: turns that must not fire because a change is running.
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
        """Targets for which nothing fires from a due time on: log id -> due time."""
        self.blocked: set[Turn] = set()
        self.dropped = 0
        """Messages with a deleted topic."""
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
        """The cancelled messages, from the current state of the arrival log."""
        return self._cancelled()

    @property
    def queued(self) -> int:
        """Rows in memory."""
        return sum([len(queue.rows) for queue in self._lines.values()])

    @property
    def waiting(self) -> int:
        """Messages of all queues that are not durable in their targets."""
        return sum([queue.waiting for queue in self._lines.values()])

    @property
    def moving(self) -> int:
        """Rows in memory of queues that are not blocked."""
        return sum([len(queue.rows) for queue in self._lines.values() if not queue.parked])

    @property
    def due_first(self) -> int | None:
        """Lower bound of the due times in the queues that are not fired or not durable."""
        dues = [due for queue in self._lines.values() if (due := queue.due_first) is not None]
        return min(dues, default=None)

    @property
    def rows_first(self) -> int | None:
        """Lower bound of the due times of rows in memory; None if there are none."""
        return min(
            (queue.rows.first().due for queue in self._lines.values() if len(queue.rows)), default=None
        )

    @property
    def behind_count(self) -> int:
        """Number of queues with rows that are only on disk."""
        return len(self._behind)

    def note_behind(self, line: Line) -> None:
        """Update whether the queue has rows that are only on disk."""
        if line.behind is None:
            self._behind.pop(line, None)
        else:
            self._behind[line] = None

    def wanting(self) -> Line | None:
        """Return a queue that should be reloaded, if any."""
        return next((queue for queue in self._behind if queue.wants_rows), None)

    def get(self, key: int) -> Line | None:
        """Return the queue of a target, None if it has none."""
        return self._lines.get(key)

    def all(self) -> list[Line]:
        """Return all queues."""
        return list(self._lines.values())

    def settled(self, key: int) -> Turn | None:
        """Return the turn up to which a target has everything durable. Any thread."""
        queue = self._lines.get(key)
        return self.applied(key) if queue is None else queue.settling.through

    def applied(self, key: int) -> Turn | None:
        """Return the highest turn that is durable in a target. Any thread."""
        settled = self.destination.settled(key, self.source)
        return None if settled is None else Turn(*settled)

    def stop_of(self, key: int) -> StorageStopped | None:
        """Return why a target rejects writes until it is resumed.

        None: it accepts writes, or its topic is deleted, or its disk is full. Any thread.
        """
        try:
            self.destination.check(key, 0)
        except StorageStopped as error:
            return error
        except (DiskFull, UnknownTopic):
            pass
        return None

    def name(self, key: int) -> str:
        """Return the name of a target for log messages."""
        return self.destination.name(key) or "a deleted topic"

    # Due messages

    def put(self, entries: Entries) -> None:
        """Add due messages to the queues of their targets."""
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
        queue = self._lines.get(key)
        if queue is None:
            queue = self._lines[key] = Line(key, topic, self)
        queue.add(part)
        self._due[queue] = None
        if queue.parked:
            self.stuck(queue)

    # Turns of the broker

    @property
    def due(self) -> bool:
        """Whether `write` has work."""
        return bool(self._due) or self._has_stuck

    def write(self) -> bool:
        """Send appends to targets that can accept one; return whether there was anything to do."""
        due, self._due = self._due, {}
        if not self.stopping:
            for queue in due:
                queue.pump()
        if self._has_stuck:
            self._bound_stuck()
        return bool(due)

    def next_turn(self, line: Line) -> None:
        """Continue this queue in the next turn: the limit of this turn is reached."""
        if not self._next_turn:
            self.timers.after(0.0, self._new_turn)
        self._next_turn[line] = None

    def _new_turn(self) -> None:
        self.pacing.begin_turn()
        queues, self._next_turn = self._next_turn, {}
        self._due.update(queues)

    # Notifications by queues

    def ready(self, line: Line) -> None:
        """Mark that the queue may have something to send."""
        self._due[line] = None

    def rested(self, line: Line) -> None:
        """Remove the queue if it is empty: the state of its target is sufficient."""
        if line.empty and self._lines.get(line.key) is line:
            line.close()
            del self._lines[line.key]
            line.settling.wake()

    def stuck(self, line: Line) -> None:
        """Request a check of the memory limit: a blocked queue has new rows, or was blocked now."""
        self._has_stuck = True

    def _bound_stuck(self) -> None:
        """Drop rows of the largest blocked queues until the memory limit is met."""
        self._has_stuck = False
        blocked = sorted(
            [each for each in self._lines.values() if each.parked], key=lambda each: len(each.rows)
        )
        total = sum([len(each.rows) for each in blocked])
        while total > STUCK_ROWS_MAX:
            queue = blocked.pop()
            total -= len(queue.rows)
            queue.forget()

    def fired(self, line: Line, part: Part) -> None:
        """Record that these rows are written."""
        now = self.time.now_ms()
        self.fired_count += len(part.numbers)
        self.lateness.note_sorted(now, part.dues)

    def early(self, line: Line, part: Part, early_ms: Sequence[int]) -> None:
        """Handle rows that are too early, because the wall clock stepped back.

        The first one is the queue's head.
        """
        if early_ms[0] <= EARLY_MS_MAX:
            line.hold(early_ms[0] / 1000)
        else:
            self._postpone(line, part)

    def unblock(self, key: int, turn: Turn) -> None:
        """Unlock a turn: the message may fire again, or is cancelled."""
        self.blocked.discard(turn)
        queue = self._lines.get(key)
        if queue is not None:
            self.ready(queue)

    def note_lost(self, dropped: int, damaged: int) -> None:
        """Count messages that are lost before they reach a queue."""
        self.dropped += dropped
        self.damaged += damaged
        if damaged:
            logger.error("%d delayed messages are lost because they cannot be read", damaged)

    # Targets

    def resumed(self, key: int) -> None:
        """Handle a target that accepts writes again."""
        queue = self._lines.get(key)
        if queue is not None:
            queue.resumed()

    def topic_gone(self, incarnation: int) -> None:
        """Retry the queues of a deleted topic's partitions; they drop their messages."""
        for key, queue in list(self._lines.items()):
            if key >> SEQUENCE_BITS == incarnation:
                queue.look_again()
                queue.sweep()

    def left(self, key: int, turn: Turn) -> None:
        """Stop counting a message that was cancelled or rescheduled."""
        queue = self._lines.get(key)
        if queue is not None:
            queue.left(turn)

    def forget_parked(self, due: int) -> None:
        """Drop the rows of blocked queues with rows due before `due`.

        Files that only these rows need can then be deleted.
        """
        for queue in self._lines.values():
            if queue.parked and not queue.busy and len(queue.rows) and queue.rows.first().due < due:
                queue.forget()

    @property
    def idle(self) -> bool:
        """Whether no read or append is running."""
        return not any(queue.busy for queue in self._lines.values())

    def stop(self) -> None:
        """Send nothing new and cancel all retry timers."""
        self.stopping = True
        for queue in self._lines.values():
            queue.close()


# Lateness: the time from due to written.

BUCKETS: Final = 42
"""The last bucket counts everything later than 34 years."""
PARTS: Final = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}


class Lateness:
    """A histogram of lateness. Bucket 0 counts 0 ms, bucket n counts 2^(n-1) <= ms < 2^n."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.max_ms = 0
        self.total = 0

    def note(self, late_ms: int, count: int = 1) -> None:
        """Count messages with the same lateness."""
        late_ms = max(0, late_ms)
        self.counts[min(late_ms.bit_length(), BUCKETS - 1)] += count
        self.total += count
        if late_ms > self.max_ms:
            self.max_ms = late_ms

    def note_sorted(self, now_ms: int, dues: Sequence[int]) -> None:
        """Count messages with these due times (ascending), written now."""
        end = len(dues)
        for bucket in range(BUCKETS):
            # Messages with lower due times are later than this bucket.
            start = bisect_left(dues, now_ms - (1 << bucket) + 1, 0, end) if bucket < BUCKETS - 1 else 0
            self.counts[bucket] += end - start
            end = start
            if not end:
                break
        self.total += len(dues)
        if dues:
            self.max_ms = max(self.max_ms, now_ms - dues[0])

    def below(self, part: float) -> int:
        """Return the lateness in ms that this part of the messages does not exceed.

        0 without messages. The result is the upper bound of a bucket.
        """
        wanted, seen = part * self.total, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min((1 << bucket) - 1, self.max_ms)
        return self.max_ms

    def status(self) -> dict[str, Any]:
        """Return p50, p99, p99.9, the maximum (ms) and the bucket counts."""
        known: dict[str, Any] = {name: self.below(part) for name, part in PARTS.items()}
        return known | {"max_ms": self.max_ms, "count": self.total, "counts": list(self.counts)}
