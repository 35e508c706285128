"""A decision on its way to its targets: how many do not have their part yet, and who waits to hear of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from tfmq.apply_target import Delayed, Destination, Mark
from tfmq.transaction import states
from tfmq.transaction.model import Decision, Target
from tfmq.transaction.requests import Timers

OFFSETS_MAX: Final = 4096
"""Batches of which the offsets are answered: as many as one TRANSACT may have. More would fill a frame."""

UNKNOWN_OFFSET: Final = -1

DUES_MAX: Final = 65_536
"""Words of due times that one answer tells: half a megabyte. A batch whose messages are all due at once has one."""

Waiting: TypeAlias = Callable[["Course", BaseException | None], None]
"""waiting(course, None) when it is applied, or when it is sure to take long; waiting(course, error) when nobody
knows whether the decision is on the disk."""


class Course:
    """`left`: targets without their part. `unforced`: parts that are written, not known to be on the disk. `stuck`: a
    target stopped before one of those was forced, so nobody sees it until the target is resumed.

    `unsure`: appends of delayed batches that are not known to be on the disk. A commit is answered after they are: a
    message's handle has the number that it got there, which a power cut could give to another one before.

    `delayed`: what is told of delayed batches, by their index; it has `dues` words of due times.

    `damage`: why messages of it cannot be read from the journal, "" while they can. `losses`: messages that a repair of
    the journal gave up after the decision, by target and number, found as they were to be written.

    `reserved`: bytes set aside for it. `offsets`: where each batch begins, -1 where that is not known; empty for many
    batches, for groups and after a restart. `applied`: every target had its part once.
    """

    __slots__ = (
        "applied",
        "damage",
        "decision",
        "delayed",
        "dropped",
        "dues",
        "failure",
        "late",
        "left",
        "losses",
        "offsets",
        "reserved",
        "settling",
        "stuck",
        "unforced",
        "unsure",
        "waiting",
    )

    def __init__(self, decision: Decision, reserved: int = 0, batches: int = 0) -> None:
        self.decision = decision
        self.reserved = reserved
        self.left = self.unforced = self.dropped = self.unsure = self.dues = 0
        self.delayed: dict[int, Delayed] = {}
        self.damage = ""
        self.losses: dict[tuple[int, int], int] = {}
        self.applied = self.late = self.stuck = False
        self.failure: BaseException | None = None
        self.offsets = [UNKNOWN_OFFSET] * batches if batches <= OFFSETS_MAX else []
        self.waiting: list[Waiting] = []
        self.settling: list[Callable[[], None]] = []
        """Who waits until it is safe."""

    @property
    def state(self) -> str:
        """What an answer says of it."""
        there = self.applied and not self.left and not self.stuck
        return states.COMMITTED if there else states.APPLYING

    @property
    def lost(self) -> int:
        """Messages of it that damage of the journal took, at most."""
        return sum(each.lost for each in self.decision.transactions) + sum(self.losses.values())

    @property
    def safe(self) -> bool:
        """All of it is written, all of that on the disk, and what an answer tells of it is noted."""
        return self.applied and not self.left and not self.unforced and not self.unsure

    @property
    def known(self) -> bool:
        """It is applied, and all that an answer can tell of it is known."""
        return self.applied and not self.unsure

    def wait(self, waiting: Waiting) -> None:
        """Tells `waiting` now if there is something to tell, else later."""
        if self.failure is not None or self.known or self.late:
            waiting(self, self.failure)
        else:
            self.waiting.append(waiting)

    def tell(self) -> None:
        """It is applied, it failed, or it takes long: whoever waits hears which."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each(self, self.failure)

    def tell_safe(self) -> None:
        """All of it is on the disk."""
        settling, self.settling = self.settling, []
        for each in settling:
            each()

    def tell_late(self) -> None:
        """A target takes nothing, or too much time has passed."""
        self.late = True
        self.tell()

    def fail(self, error: BaseException) -> None:
        """The journal stopped before it was known that the decision is on the disk."""
        self.failure = error
        self.tell()

    def note_offsets(self, pieces: Sequence[int], offsets: Sequence[int]) -> None:
        """Where batches of it begin; `pieces`: their numbers, -1 for the rest of one that was noted before."""
        if self.offsets:
            for piece, offset in zip(pieces, offsets, strict=False):
                if piece >= 0:
                    self.offsets[piece] = offset

    def note_delayed(self, pieces: Sequence[int], delayed: Sequence[Delayed]) -> None:
        """What delayed batches of it came to, as far as an answer has room; `pieces` as above."""
        for piece, each in zip(pieces, delayed, strict=False):
            if self.offsets and piece >= 0 and self.dues + len(each.dues) <= DUES_MAX:
                self.dues += len(each.dues)
                self.delayed[piece] = each


# Decisions that are written everywhere, until all of it is on the disk: only then the journal need not keep them.
#
# Who reads forced data sees them then, too. So a force is asked for soon, though not for each decision: what many bring
# within a few milliseconds shares one, and a commit is answered without waiting for it.

SOON_SECONDS: Final = 0.005
"""Readers of forced data see a commit so much later at most; two hundred forces a second leave the disk to others."""
RETRY_SECONDS: Final = 30.0
"""A target whose force failed has stopped; should nobody say that it is back, it is asked again after this."""


class Part(NamedTuple):
    """What a decision brought to one target."""

    course: Course
    target: Target

    @property
    def place(self) -> tuple[int, int]:
        """The position that says that it is there."""
        return self.course.decision.place, self.target.last


class Written(NamedTuple):
    """Parts that one append brought to a target."""

    mark: Mark
    parts: Sequence[Part]


class Settling:
    """`settle(course)` once every part of it is on the disk, and all of it applied."""

    def __init__(self, destination: Destination, timers: Timers, settle: Callable[[Course], None]) -> None:
        self._destination, self._timers, self._settle = destination, timers, settle
        self._keys: dict[int, deque[Written]] = {}
        self._asked: set[int] = set()
        """Keys of which a force is under way, or has failed not long ago."""
        self.trouble: dict[int, str] = {}
        """Targets that stopped before what they had was forced: key -> why."""
        self._timer: Any = None
        self._parts = 0
        self._closed = False

    def __len__(self) -> int:
        """How many parts are not known to be on the disk."""
        return self._parts

    def add(self, mark: Mark, parts: Sequence[Part]) -> None:
        """They are written; `mark` says what must be forced."""
        written = self._keys.get(mark.key)
        if written is None:
            written = self._keys[mark.key] = deque()
        written.append(Written(mark, parts))
        self._parts += len(parts)
        for course, _ in parts:
            course.unforced += 1
            course.stuck = course.stuck or mark.key in self.trouble
        self._arm(mark.key)

    def take_back(self, key: int) -> list[Part]:
        """Everything that a target is not known to have on the disk, in order: it came back, and must be asked."""
        self._asked.discard(key)
        self.trouble.pop(key, None)
        parts = [part for each in self._keys.pop(key, ()) for part in each.parts]
        self._take_out(parts)
        for course, _ in parts:
            course.stuck = False
        for other in self.trouble:
            self._mark_stuck(other)
        return parts

    def stuck(self) -> set[Course]:
        """Decisions of which a target stopped before all that it had was forced."""
        return {
            course for key in self.trouble for each in self._keys.get(key, ()) for course, _ in each.parts
        }

    def force_all(self, done: Callable[[], None]) -> None:
        """Forces what can be forced; `done()` when that has ended, with or without success."""
        left = len(self._keys) + 1

        def ended(error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if not left:
                self.sweep()
                done()

        for written in list(self._keys.values()):
            self._destination.when_forced(written[-1].mark, ended)
        ended(None)

    def close(self) -> None:
        """Looks no more by itself."""
        self._closed = True
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def sweep(self) -> None:
        """Settles what is on the disk."""
        for key in list(self._keys):
            self._sweep(key)

    def _arm(self, key: int) -> None:
        if self._timer is None and not self._closed and key not in self._asked:
            self._timer = self._timers.after(SOON_SECONDS, self._ring)

    def _ring(self) -> None:
        self._timer = None
        for key in list(self._keys):
            self._sweep(key)
            written = self._keys.get(key)
            if written and key not in self._asked:
                self._asked.add(key)
                self._destination.when_forced(written[-1].mark, partial(self._forced, key))

    def _forced(self, key: int, error: BaseException | None) -> None:
        """A failed force has stopped the target: it is asked again when it comes back, or after a pause."""
        if error is None:
            self._sweep(key)
            self.look_again(key)
            return
        self._timers.after(RETRY_SECONDS, partial(self.look_again, key))
        if key in self._keys:
            self.trouble[key] = str(error)
            self._mark_stuck(key)

    def _mark_stuck(self, key: int) -> None:
        for written in self._keys.get(key, ()):
            for course, _ in written.parts:
                course.stuck = True

    def look_again(self, key: int) -> None:
        """The target may be forced now, or be gone."""
        self._asked.discard(key)
        if key in self._keys:
            self._arm(key)

    def _sweep(self, key: int) -> None:
        written = self._keys.get(key)
        while written and self._destination.forced(written[0].mark):
            parts = written.popleft().parts
            self._take_out(parts)
            for course, _ in parts:
                if course.safe:
                    self._settle(course)
        if written is not None and not written:
            self._keys.pop(key, None)
            self.trouble.pop(key, None)

    def _take_out(self, parts: Sequence[Part]) -> None:
        self._parts -= len(parts)
        for course, _ in parts:
            course.unforced -= 1
            course.stuck = course.stuck and course.unforced > 0
