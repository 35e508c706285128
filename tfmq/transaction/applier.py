"""Brings decided transactions to their targets: everything, in order, exactly once, however long it takes.

One line a target (`line`), so that a target which takes nothing holds up only what must come behind; a large
part goes as a convoy (`convoy`); what is written is watched until it is on the disk (`settling`). Nothing here
can undo a decision: an error of a target is waited out, and only a target that is gone for ever lets go.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from journal.errors import Closed, Corrupt
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import SEQUENCE_BITS
from tfmq.apply_target import (
    ARRIVALS_KEY,
    OFFSETS_KEY,
    Append,
    Applied,
    CommitOffsets,
    Delayed,
    Destination,
    Effect,
    GroupPlaces,
    Mark,
    Schedule,
    SourceName,
)
from tfmq.errors import NOT_DONE, StorageStopped, UnknownTopic
from tfmq.transaction.apply_progress import Course, Part, Settling
from tfmq.transaction.journal_writer import Run
from tfmq.transaction.model import Slice, Target
from tfmq.transaction.requests import Timers
from tfmq.transaction.store import JournalTransactionStore

COUNTED_AT_ONCE: Final = 10_000
"""Batches of a decision, some five milliseconds' work. More are counted in a worker, and what was decided behind waits
until then."""
LATE_SECONDS: Final = 10.0
"""Who waits for a commit is told so long after the decision that it is still being applied."""
TURN_BYTES: Final = 8 << 20
"""After so much of small parts, about ten milliseconds' work, everybody else has a turn."""
DUES_MAX_ALL: Final = 4 << 20
"""Words of due times that all decisions together keep until they are settled: 32 MiB. Above, no handles are told."""
Noted: TypeAlias = tuple[Course, Sequence[int], Sequence[Delayed]]
"""A decision, the indexes of delayed batches of it, and what these came to."""
OFFSETS_TARGET: Final = Target(OFFSETS_KEY, "", 0, 0, 0)


class Applier:
    """See the module. `ended(course)` when a course is applied for the first time, before anybody is told."""

    def __init__(
        self,
        store: JournalTransactionStore,
        destination: Destination,
        *,
        timers: Timers,
        run: Run,
        release: Callable[[int], None],
        ended: Callable[[Course], None],
    ) -> None:
        self.store, self.destination, self.timers, self.run = store, destination, timers, run
        self.journal_id = store.journal_id
        self.source: SourceName = (SOURCE_TRANSACTION, self.journal_id)
        self.pace = Pace(destination)
        self.settling = Settling(destination, timers, self._settle)
        self.stopping = False
        self.hurried = True
        """Until it was idle once: during a start nobody else waits for a turn, and none comes."""
        self._release, self._ended = release, ended
        self._lines: dict[int, Line] = {}
        self._starting: deque[Course] = deque()
        """The first of them is being counted."""
        self._due: dict[Line, None] = {}
        self._next_turn: dict[Line, None] = {}
        self._turn_bytes = 0
        self.dues = 0
        """Words of due times that courses keep to be told."""
        self._late: deque[tuple[float, Course]] = deque()
        self._timer: Any = None
        self._stopped: Callable[[], None] | None = None

    # Decisions

    def start(self, course: Course) -> None:
        """The decision is on the disk: it goes to its targets, behind all that were decided before."""
        self._starting.append(course)
        if len(self._starting) == 1:
            self._start_next()

    def _start_next(self) -> None:
        while self._starting:
            decision = self._starting[0].decision
            if decision.batches > COUNTED_AT_ONCE:
                self.run(decision.count, self._counted)
                return
            self._begin(self._starting.popleft())

    def _counted(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            raise error
        self._begin(self._starting.popleft())
        self._start_next()

    def _begin(self, course: Course) -> None:
        targets = course.decision.targets
        offsets = any(each.offsets for each in course.decision.transactions)
        course.left = len(targets) + offsets
        if not course.left:
            self._over(course)
            return
        self._watch(course)
        for key, target in targets.items():
            self._put(key, Part(course, target))
        if offsets:
            self._put(OFFSETS_KEY, Part(course, OFFSETS_TARGET))

    def _put(self, key: int, part: Part) -> None:
        line = self._line(key)
        line.put(part)
        self._due[line] = None

    def _line(self, key: int) -> Line:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, self)
        return line

    # Turning

    @property
    def due(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._due)

    def write(self) -> bool:
        """Hands effects to the targets that can take one; whether there was anything to do."""
        due, self._due = self._due, {}
        for line in due:
            line.pump()
        self.hurried = self.hurried and not self.idle
        self._try_stop()
        return bool(due)

    def may_read(self, line: Line, size_bytes: int) -> bool:
        """Whether so many bytes may come now; if not, the line goes on in the next turn, and the count begins anew."""
        if self.stopping or self.hurried:
            return True
        if self._turn_bytes and self._turn_bytes + size_bytes > TURN_BYTES:
            if not self._next_turn:
                self.timers.after(0.0, self._new_turn)
            self._next_turn[line] = None
            return False
        self._turn_bytes += size_bytes
        return True

    def _new_turn(self) -> None:
        self._turn_bytes = 0
        lines, self._next_turn = self._next_turn, {}
        self._due.update(lines)

    # What lines tell

    def ready(self, line: Line) -> None:
        """It may have something to send."""
        self._due[line] = None

    def rested(self, line: Line) -> None:
        """Its target takes nothing for now."""
        self._try_stop()

    def arrived(self, line: Line, parts: Sequence[Part], mark: Mark) -> None:
        """They are written."""
        self.settling.add(mark, parts)
        self._done(line, parts)

    def note_delayed(self, mark: Mark, noted: Sequence[Noted]) -> None:
        """Delayed batches are written: what they came to is told once that is on the disk, which is asked for now."""
        for course, _, _ in noted:
            course.unsure += 1

        def forced(error: BaseException | None) -> None:
            for course, pieces, delayed in noted:
                course.unsure -= 1
                if error is None and self.dues < DUES_MAX_ALL:
                    before = course.dues
                    course.note_delayed(pieces, delayed)
                    self.dues += course.dues - before
                if course.known:
                    course.tell()
                if course.safe:  # others had it forced before this was told
                    self._settle(course)

        self.destination.when_forced(mark, forced)

    def dropped(self, line: Line, parts: Sequence[Part]) -> None:
        """Their target is gone for ever."""
        for course, target in parts:
            course.dropped += target.messages
        self._done(line, parts)

    def _done(self, line: Line, parts: Sequence[Part]) -> None:
        if line.empty:
            line.close()
            self._lines.pop(line.key, None)
        else:
            self._due[line] = None
        for course, target in parts:
            freed = min(course.reserved, target.size_bytes)
            if freed:
                course.reserved -= freed
                self._release(freed)
            course.left -= 1
            if not course.left:
                self._over(course)

    def _over(self, course: Course) -> None:
        """Everything is written or dropped; also once more after a target had lost something."""
        if not course.applied:
            course.applied = True
            self.store.applied(course.decision)
            self._ended(course)
            if course.known:
                course.tell()
        if course.safe:
            self._settle(course)

    def _settle(self, course: Course) -> None:
        self.dues -= course.dues
        course.dues = 0
        self.store.settle(course.decision)
        course.tell_safe()

    # Targets

    def resumed(self, key: int) -> None:
        """A target takes writes again. What it had written but not forced may be gone: that comes first, again."""
        parts = self.settling.take_back(key)
        if parts:
            for course, _ in parts:
                course.left += 1
            self._line(key).put_back(parts)
        if key in self._lines:
            self._lines[key].resumed()

    def topic_gone(self, incarnation: int) -> None:
        """Its partitions' lines have nobody to wait for any more."""
        for key, line in list(self._lines.items()):
            if key >> SEQUENCE_BITS == incarnation:
                line.look_again()
        for key in list(self.settling.trouble):
            if key >> SEQUENCE_BITS == incarnation:
                self.settling.look_again(key)

    def name(self, key: int) -> str:
        """A target for people."""
        return (
            "the groups' offsets"
            if key == OFFSETS_KEY
            else self.destination.name(key) or "a topic that is gone"
        )

    def parked(self) -> dict[int, str]:
        """Targets that take nothing at the moment, or stopped with something that is not forced: key -> why."""
        return self.settling.trouble | {key: line.parked for key, line in self._lines.items() if line.parked}

    @property
    def stuck(self) -> int:
        """Transactions that were applied once, and of which a target lacks a part, or may lose it yet."""
        courses = self.settling.stuck()
        for line in self._lines.values():
            courses |= {part.course for part in line.parts() if part.course.applied}
        return sum(len(course.decision.transactions) for course in courses)

    @staticmethod
    def concerns(key: int, course: Course) -> bool:
        """Whether a decision goes to that target."""
        if key == OFFSETS_KEY:
            return any(each.offsets for each in course.decision.transactions)
        return key in course.decision.targets

    @property
    def idle(self) -> bool:
        """Everything that was decided is written, or waits for a target that takes nothing."""
        return (
            not self._starting
            and not self._due
            and not self._next_turn
            and all(each.parked and not each.busy for each in self._lines.values())
        )

    # Those that take long

    def _watch(self, course: Course) -> None:
        while self._late and self._late[0][1].known:
            self._late.popleft()
        self._late.append((self.timers.now() + LATE_SECONDS, course))
        if self._timer is None:
            self._timer = self.timers.after(LATE_SECONDS, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self.timers.now()
        while self._late and (self._late[0][0] <= now or self._late[0][1].known):
            course = self._late.popleft()[1]
            if not course.known:
                course.tell_late()
        if self._late:
            self._timer = self.timers.after(self._late[0][0] - now, self._ring)

    # Stopping

    def stop(self, done: Callable[[], None]) -> None:
        """Brings what is small, ends convoys after their next slice; then forces what was written: `done()`."""
        self.stopping = True
        self._stopped = done
        self._try_stop()

    def _try_stop(self) -> None:
        if self._stopped is None or not self.idle:
            return
        done, self._stopped = self._stopped, None
        if self._timer is not None:
            self.timers.cancel(self._timer)
        for line in self._lines.values():
            line.close()
        self.settling.close()
        self.settling.force_all(done)


# What goes to one target, strictly in the order of the decisions' places, one effect at a time.
#
# The target remembers the highest place that it has, and that stands for everything before it: so nothing may
# be written while something earlier is not, and after a start, an error or a resumption the target is asked how
# far it came before anything is sent. Neighbours that are small share one effect under the last one's place.

logger = logging.getLogger("tfmq.transaction")

PLACES_MAX: Final = 10_000
"""Offsets in one effect: half a megabyte at most, far below what one change of the catalog may have."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 30.0
"""A target that takes nothing is tried again after pauses that double between these, besides when it is resumed."""


class Line:
    """The queue of one target. `parked`: why it takes nothing at the moment, "" while it does."""

    def __init__(self, key: int, applier: Applier) -> None:
        self.key = key
        self.parked = ""
        self.busy = False
        self._applier = applier
        self.slice_bytes = self._slice_bytes()
        """One effect brings no more, so that the owner's thread is not kept for long; larger parts go as a convoy."""
        self._queue: deque[Part] = deque()
        self._flight: list[Part] = []
        self._pieces: list[Sequence[int]] = []
        self._convoy: Convoy | None = None
        self._known = False
        self._after = 0
        self._pause = PAUSE_SECONDS
        self._timer: Any = None

    def _slice_bytes(self) -> int:
        return 0 if self.key == OFFSETS_KEY else self._applier.destination.slice_bytes(self.key)

    @property
    def empty(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not self._queue and not self.busy

    def parts(self) -> list[Part]:
        """What its target does not have."""
        return [*self._flight, *self._queue]

    def put(self, part: Part) -> None:
        """Behind all others: its place is the highest."""
        self._queue.append(part)
        if self.parked:
            part.course.tell_late()

    def put_back(self, parts: Sequence[Part]) -> None:
        """They are not at the target; it is asked how far it is before the next effect."""
        self._queue = deque(sorted([*parts, *self._queue], key=lambda part: part.place))
        self._known = False

    def resumed(self) -> None:
        """The target stopped and takes writes again; what it had, but not on the disk, may be gone."""
        if self._convoy is not None:
            self._convoy.recall()
        self.look_again()

    def look_again(self) -> None:
        """The target may take something now, or be gone."""
        self._known = False
        self._pause = PAUSE_SECONDS
        self._go_on()

    def close(self) -> None:
        """Tries no more by itself."""
        self._stop_timer()

    # Sending

    def pump(self) -> None:
        """Sends the next effect on its way, if there is one and none is under way."""
        while self._queue and not self.busy and self._timer is None:
            if not self._known and not self._look():
                continue
            if self.key == OFFSETS_KEY:
                self._send_offsets()
            elif not self._send_messages():
                return

    def _look(self) -> bool:
        """How far the target is; whether there is something left to send."""
        destination, key = self._applier.destination, self.key
        if key != OFFSETS_KEY and destination.name(key) is None:
            self.drop()
            return False
        self.slice_bytes = self._slice_bytes()  # one that could not be opened has told nothing before
        applied = destination.applied(key, self._applier.source)
        there = []
        while applied is not None and self._queue and self._queue[0].place <= applied:
            there.append(self._queue.popleft())
        head = self._queue[0].course.decision.place if self._queue else -1
        self._after = applied[1] if applied is not None and head == applied[0] else 0
        self._known = True
        if there:
            self._send(there, [], [], [])
            return False
        return bool(self._queue)

    def _send_messages(self) -> bool:
        """Small neighbours together, or a large one alone; False if this turn has brought enough."""
        parts: list[Part] = []
        batches: list[Batch] = []
        pieces: list[Sequence[int]] = []
        decided_ms: list[int] = []
        size = 0
        while self._queue:
            part = self._queue[0]
            if parts and size + part.target.size_bytes > self.slice_bytes:
                break
            if part.target.size_bytes <= self.slice_bytes and not self._applier.may_read(
                self, part.target.size_bytes
            ):
                break
            try:
                slices = self._cached(part)
            except Exception as error:
                if not parts:
                    self._failed(Unreadable(error) if isinstance(error, Corrupt | OSError) else error)
                break
            if slices is None:
                if not parts:
                    self._send_convoy()
                break
            parts.append(self._queue.popleft())
            batches += [batch for each in slices for batch in each.batches]
            pieces.append([piece for each in slices for piece in each.pieces])
            decided_ms += [part.course.decision.time_ms] * (len(batches) - len(decided_ms))
            size += part.target.size_bytes
            self._after = 0
        if parts:
            self._send(parts, batches, pieces, decided_ms)
        return bool(parts) or self.busy

    def _cached(self, part: Part) -> list[Slice] | None:
        if part.target.size_bytes > self.slice_bytes:
            return None
        return self._applier.store.slices_cached(
            part.course.decision, self.key, self._after, self.slice_bytes
        )

    def _send(
        self,
        parts: list[Part],
        batches: list[Batch],
        pieces: list[Sequence[int]],
        decided_ms: list[int],
    ) -> None:
        """One effect for all parts, under the last one's place."""
        self._flight, self._pieces, self.busy = parts, pieces, True
        last = parts[-1]
        effect = self.effect(last, batches, last.target.last, decided_ms)
        self._applier.destination.apply(effect, self._written)

    def effect(
        self, part: Part, batches: Sequence[Batch], last: int, decided_ms: Sequence[int] | None = None
    ) -> Effect:
        """What brings `batches` here, of which the last message is number `last` of its decision. `decided_ms`: when
        each batch was decided, if not all with `part`.
        """
        source = Source(SOURCE_TRANSACTION, self._applier.journal_id, part.course.decision.place, last)
        if self.key == OFFSETS_KEY:
            return CommitOffsets((), source)
        if self.key == ARRIVALS_KEY:
            times = [part.course.decision.time_ms] * len(batches) if decided_ms is None else decided_ms
            return Schedule(batches, times, source)
        return Append(
            part.target.topic, self.key >> SEQUENCE_BITS, self.key & (1 << SEQUENCE_BITS) - 1, batches, source
        )

    def _send_offsets(self) -> None:
        """Offsets of the first decisions that wait, in one effect: the later win. So many that it fits the catalog's
        segments, unless one decision alone has more."""
        parts: list[Part] = []
        groups: list[GroupPlaces] = []
        count = 0
        while self._queue:
            offsets = self._queue[0].course.decision.offsets
            count += sum(len(each.places) for each in offsets)
            if parts and count > PLACES_MAX:
                break
            parts.append(self._queue.popleft())
            groups += offsets
        place = parts[-1].course.decision.place
        self._flight, self._pieces, self.busy = parts, [], True
        source = Source(SOURCE_TRANSACTION, self._applier.journal_id, place, 0)
        self._applier.destination.apply(CommitOffsets(groups, source), self._written)

    def _send_convoy(self) -> None:
        part = self._queue.popleft()
        self._flight, self._pieces, self.busy = [part], [], True
        after, self._after = self._after, 0
        self._convoy = Convoy(self, self._applier, part, after, self._written)
        self._convoy.start()

    # What became of it

    def _written(self, mark: Mark | None, error: BaseException | None) -> None:
        parts, self._flight, self.busy = self._flight, [], False
        self._convoy = None
        if mark is None:
            self.put_back(parts)
            self._failed(error or RuntimeError("an effect ended without a mark"))
            return
        if self.parked:
            self._tell_open()
        for part in parts:
            part.course.damage = ""
        self._note_offsets(parts, mark)
        self._note_delayed(parts, mark)
        self._applier.arrived(self, parts, mark)

    def _note_offsets(self, parts: Sequence[Part], mark: Mark) -> None:
        """Only what is on the disk already is told: an offset that was told stays."""
        if not mark.offsets or not self._applier.destination.forced(mark):
            return
        first = 0
        for part, pieces in zip(parts, self._pieces, strict=False):
            part.course.note_offsets(pieces, mark.offsets[first : first + len(pieces)])
            first += len(pieces)

    def _note_delayed(self, parts: Sequence[Part], mark: Mark) -> None:
        noted = []
        first = 0
        for part, pieces in zip(parts, self._pieces, strict=False):
            noted.append((part.course, pieces, mark.delayed[first : first + len(pieces)]))
            first += len(pieces)
        if mark.delayed:
            self._applier.note_delayed(mark, noted)

    def _failed(self, error: BaseException) -> None:
        self._known = False
        if isinstance(error, UnknownTopic):
            self.drop()
            return
        if isinstance(error, Unreadable) and self._queue:
            self._queue[0].course.damage = str(error)
        self._park(error)

    def drop(self) -> None:
        """The target is gone for ever: what was for it is dropped, counted and told."""
        parts, self._queue = list(self._queue), deque()
        messages = sum(part.target.messages for part in parts)
        if messages:
            topic = parts[0].target.topic
            logger.warning("%d messages of decided transactions were for %s, which is gone", messages, topic)
        self.parked = ""
        self._applier.dropped(self, parts)

    # Waiting for the target

    def _park(self, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if reason != self.parked and not self._applier.stopping:
            name = self._applier.name(self.key)
            logger.error("Decided transactions wait for %s: %s", name, reason)
        self.parked = reason
        self._timer = self._applier.timers.after(self._pause, self._go_on)
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
        for part in self._queue:
            part.course.tell_late()
        self._applier.rested(self)

    def _go_on(self) -> None:
        self._stop_timer()
        self._applier.ready(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._applier.timers.cancel(self._timer)
            self._timer = None

    def _tell_open(self) -> None:
        logger.info("%s takes decided transactions again", self._applier.name(self.key))
        self.parked = ""
        self._pause = PAUSE_SECONDS


CONTIGUOUS_BYTES: Final = 64 << 20
"""A part up to this lies in one piece in its partition."""
WINDOW_BYTES: Final = 512 << 10
"""Written and not forced: whoever waits for a force meanwhile waits for these, too. Beside 2 GB a neighbour's send took
4.6 ms (p99 9.3) with 8 MiB, 1.6 ms (3.3) with this and slices of 256 KiB, and the 2 GB 6 % longer (measured)."""
CONVOYS_MAX: Final = 4
"""At the same time: each holds a slice in memory and takes a reader."""


class Unreadable(Exception):
    """Messages of a decided transaction cannot be read from the journal."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the transaction journal is damaged: {error}. Stop the broker, mend it with `tfmq log repair`, which says"
            " what is lost, and start the broker again"
        )


class Pace:
    """The window that all convoys share, and how many may go at the same time."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._unforced = 0
        self._running = 0
        self._entering: deque[Callable[[], None]] = deque()
        self._writing: deque[tuple[int, Callable[[], None]]] = deque()

    def enter(self, go: Callable[[], None]) -> None:
        """`go()` when a convoy more may start."""
        if self._running < CONVOYS_MAX:
            self._running += 1
            go()
        else:
            self._entering.append(go)

    def leave(self) -> None:
        """A convoy ended."""
        if self._entering:
            self._entering.popleft()()
        else:
            self._running -= 1

    def take(self, size_bytes: int, go: Callable[[], None]) -> None:
        """`go()` when so many bytes fit into the window; one larger than it goes alone."""
        if not self._writing and self._fits(size_bytes):
            self._unforced += size_bytes
            go()
        else:
            self._writing.append((size_bytes, go))

    def written(self, mark: Mark, size_bytes: int) -> None:
        """They are written: the force that frees their room is asked for."""
        self._destination.when_forced(mark, partial(self._give, size_bytes))

    def not_written(self, size_bytes: int) -> None:
        """Their room is free again."""
        self._give(size_bytes, None)

    def _give(self, size_bytes: int, error: BaseException | None) -> None:
        """A target whose force failed has stopped: nothing more comes of these bytes."""
        self._unforced -= size_bytes
        while self._writing and self._fits(self._writing[0][0]):
            size, go = self._writing.popleft()
            self._unforced += size
            go()

    def _fits(self, size_bytes: int) -> bool:
        return not self._unforced or self._unforced + size_bytes <= WINDOW_BYTES


class Convoy:
    """A large part of one transaction on its way into one partition: read slice by slice in a worker, and paced.

    What it writes has to be forced some day, and whoever else waits for a force meanwhile waits for those bytes,
    too: so only a window of bytes may be written and not forced, of all convoys together. Up to CONTIGUOUS_BYTES
    nothing else comes between; a larger part lets others in after each slice.

    `done` is called once, as for one effect.
    """

    def __init__(self, line: Line, applier: Applier, part: Part, after: int, done: Applied) -> None:
        self._line, self._applier, self._part, self._done = line, applier, part, done
        self._after = after
        self._slices: Iterator[Slice] = iter(())
        self._holds = part.target.size_bytes <= CONTIGUOUS_BYTES
        self._mark: Mark | None = None
        self._recalled: StorageStopped | None = None

    def start(self) -> None:
        self._applier.pace.enter(self._begin)

    def recall(self) -> None:
        """Its target stopped and came back: what it had brought may be gone, and the highest place wins, so not one
        slice more goes there. It ends as refused, and its line asks the target how far it is."""
        self._recalled = StorageStopped(reason="it was resumed meanwhile", outcome=NOT_DONE)

    def _begin(self) -> None:
        self._slices = self._applier.store.slices(
            self._part.course.decision, self._line.key, self._after, self._line.slice_bytes
        )
        if self._holds:
            self._applier.destination.hold(self._line.key, self._applier.source)
        self._read()

    def _read(self) -> None:
        self._applier.run(lambda: next(self._slices, None), self._have)

    def _have(self, found: Slice | None, error: BaseException | None) -> None:
        if isinstance(error, Corrupt | OSError):
            error = Unreadable(error)
        if error is not None or self._recalled is not None:
            self._end(None, self._recalled or error)
        elif found is None:
            self._end_of_slices()
        else:
            self._applier.pace.take(found.size_bytes, partial(self._write, found))

    def _write(self, found: Slice) -> None:
        if self._recalled is not None:
            self._written(found, None, self._recalled)
            return
        effect = self._line.effect(self._part, found.batches, found.last)
        self._applier.destination.apply(effect, partial(self._written, found))

    def _written(self, found: Slice, mark: Mark | None, error: BaseException | None) -> None:
        if mark is None:
            self._applier.pace.not_written(found.size_bytes)
            self._end(None, error)
            return
        self._applier.pace.written(mark, found.size_bytes)
        for number, count in found.lost:
            self._part.course.losses[self._line.key, number] = count
        if mark.delayed:
            self._applier.note_delayed(mark, [(self._part.course, found.pieces, mark.delayed)])
        self._mark = mark
        if self._recalled is not None:
            self._end(None, self._recalled)
        elif found.last >= self._part.target.last:
            self._end(mark, None)
        elif self._applier.stopping:
            self._end(None, Closed())
        else:
            self._read()

    def _end_of_slices(self) -> None:
        """Without the last message something is amiss in the journal; nothing that is not there is called written."""
        self._end(None, RuntimeError("the journal has fewer messages of a transaction than were counted"))

    def _end(self, mark: Mark | None, error: BaseException | None) -> None:
        if self._holds:
            self._applier.destination.unhold(self._line.key)
        self._applier.pace.leave()
        self._done(None if mark is None else mark._replace(offsets=(), delayed=()), error)
