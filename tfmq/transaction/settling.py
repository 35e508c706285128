"""Decisions that are written everywhere, until all of it is on the disk: only then the journal need not keep them.

Who reads forced data sees them then, too. So a force is asked for soon, though not for each decision: what many bring
within a few milliseconds shares one, and a commit is answered without waiting for it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from tfmq.apply_target import Destination, Mark
from tfmq.transaction.course import Course
from tfmq.transaction.requests import Timers
from tfmq.transaction.transaction import Target

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
