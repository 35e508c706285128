"""Decisions that are written everywhere, until all of it is on the disk: only then the journal need not keep them.

Nothing is forced for a transaction alone: partitions are forced by their own rules, and what became true is
noticed by looking. Only what waits for long, or is much, asks for a force.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from tfmq.effects import Destination, Mark
from tfmq.transaction.course import Course
from tfmq.transaction.requests import Timers
from tfmq.transaction.transaction import Target

SWEEP_SECONDS: Final = 0.5
"""Twice a second is often enough to free memory, and seldom enough to cost nothing."""
FORCE_SECONDS: Final = 15.0
"""A partition that forces seldom does not keep the journal's files for longer."""
UNSETTLED_MAX: Final = 20_000
UNSETTLED_BYTES_MAX: Final = 256 << 20
"""Above these everything is forced: a decision costs about a kilobyte of memory, its messages lie on the disk twice."""


class Part(NamedTuple):
    """What a decision brought to one target."""

    course: Course
    target: Target

    @property
    def place(self) -> tuple[int, int]:
        """The position that says that it is there."""
        return self.course.decision.place, self.target.last


class Written(NamedTuple):
    """Parts that one append brought to a target, and when."""

    mark: Mark
    parts: Sequence[Part]
    since: float


class Settling:
    """`settle(course)` once every part of it is on the disk, and all of it applied."""

    def __init__(self, destination: Destination, timers: Timers, settle: Callable[[Course], None]) -> None:
        self._destination, self._timers, self._settle = destination, timers, settle
        self._keys: dict[int, deque[Written]] = {}
        self._asked: set[int] = set()
        self._timer: Any = None
        self._parts = 0
        self._size_bytes = 0
        self._drained: Callable[[], None] | None = None

    def __len__(self) -> int:
        """How many parts are not known to be on the disk."""
        return self._parts

    def add(self, mark: Mark, parts: Sequence[Part]) -> None:
        """They are written; `mark` says what must be forced."""
        written = self._keys.get(mark.key)
        if written is None:
            written = self._keys[mark.key] = deque()
        written.append(Written(mark, parts, self._timers.now()))
        self._parts += len(parts)
        for course, target in parts:
            course.unforced += 1
            self._size_bytes += target.size_bytes
        if self._timer is None:
            self._timer = self._timers.after(SWEEP_SECONDS, self._ring)

    def lost(self, key: int, applied: tuple[int, int] | None) -> list[Part]:
        """The target came back and has only what is at or below `applied`: the parts that must be written again."""
        written = self._keys.pop(key, None)
        if written is None:
            return []
        lost: list[Part] = []
        kept: deque[Written] = deque()
        for each in written:
            gone = [part for part in each.parts if applied is None or part.place > applied]
            there = [part for part in each.parts if applied is not None and part.place <= applied]
            lost += gone
            if there:
                kept.append(Written(each.mark._replace(end=0), there, each.since))
        self._take_out(lost)
        if kept:
            self._keys[key] = kept
        return lost

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
        """Looks no more."""
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def sweep(self) -> None:
        """Settles what is on the disk."""
        for key in list(self._keys):
            self._sweep(key)

    def _ring(self) -> None:
        self._timer = None
        self.sweep()
        pressing = self._parts > UNSETTLED_MAX or self._size_bytes > UNSETTLED_BYTES_MAX
        old = self._timers.now() - FORCE_SECONDS
        for key, written in list(self._keys.items()):
            if pressing or written[0].since <= old:
                self._ask(key, written[-1].mark)
        if self._keys:
            self._timer = self._timers.after(SWEEP_SECONDS, self._ring)

    def _ask(self, key: int, mark: Mark) -> None:
        if key not in self._asked:
            self._asked.add(key)
            self._destination.when_forced(mark, partial(self._forced, key))

    def _forced(self, key: int, error: BaseException | None) -> None:
        """A failed force has stopped the target: what becomes of its parts is told by `lost`."""
        self._asked.discard(key)
        if error is None:
            self._sweep(key)

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

    def _take_out(self, parts: Sequence[Part]) -> None:
        self._parts -= len(parts)
        for course, target in parts:
            course.unforced -= 1
            self._size_bytes -= target.size_bytes
