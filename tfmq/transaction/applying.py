"""Brings decided transactions to their targets: everything, in order, exactly once, however long it takes.

One line a target (`line`), so that a target which takes nothing holds up only what must come behind; a large
part goes as a convoy (`convoy`); what is written is watched until it is on the disk (`settling`). Nothing here
can undo a decision: an error of a target is waited out, and only a target that is gone for ever lets go.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import SEQUENCE_BITS
from tfmq.apply_target import OFFSETS_KEY, Delayed, Destination, Mark, SourceName
from tfmq.transaction.convoy import Pace
from tfmq.transaction.course import Course
from tfmq.transaction.line import Line
from tfmq.transaction.queue import Run
from tfmq.transaction.requests import Timers
from tfmq.transaction.settling import Part, Settling
from tfmq.transaction.store import JournalTransactionStore
from tfmq.transaction.transaction import Target

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
