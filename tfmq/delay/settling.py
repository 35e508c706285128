"""What of a line is written and not known to be on the disk, and who waits to hear that it is.

"Delivered" is told of a message only when its append is forced: before that a power cut could take it back, and then
it would fire again, or be cancelled after all.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tfmq.apply_target import Mark
from tfmq.delay.requests import Turn

Waiter: TypeAlias = Callable[[], None]
"""Called when it is worth to ask again."""


class Written(NamedTuple):
    """One append: of `count` messages from the due `first` up to the turn `last`."""

    mark: Mark
    first: int
    last: Turn
    size_bytes: int
    count: int = 1  # type: ignore[assignment]


class Settling:
    """See the module. `through`: every turn of this target up to it is forced, or will never fire; None: none is."""

    def __init__(self, through: Turn | None) -> None:
        self.through = through
        self.size_bytes = 0
        """Of what is not known to be forced."""
        self.count = 0
        """Messages of which that is not known."""
        self._written: deque[Written] = deque()
        self._waiting: list[tuple[Turn, Waiter]] = []

    def __len__(self) -> int:
        return len(self._written)

    @property
    def first_due(self) -> int | None:
        """Of what is not known to be forced."""
        return self._written[0].first if self._written else None

    @property
    def last(self) -> Written | None:
        """The latest append."""
        return self._written[-1] if self._written else None

    def add(self, written: Written) -> None:
        """Behind all others."""
        self._written.append(written)
        self.size_bytes += written.size_bytes
        self.count += written.count

    def settled(self, turn: Turn) -> bool:
        """Whether that turn is passed, and this is on the disk."""
        return self.through is not None and turn <= self.through

    def forced(self, is_forced: Callable[[Mark], bool]) -> None:
        """Takes out what is on the disk now, and tells who waits for it."""
        moved = False
        while self._written and is_forced(self._written[0].mark):
            written = self._written.popleft()
            self.through = written.last
            self.size_bytes -= written.size_bytes
            self.count -= written.count
            moved = True
        if moved:
            self._tell()

    def give_up_room(self) -> int:
        """Nobody waits for the disk any more, since the target has stopped: the bytes that it may give back at once."""
        size, self.size_bytes = self.size_bytes, 0
        self._written = deque(each._replace(size_bytes=0) for each in self._written)
        return size

    def wait(self, turn: Turn, waiter: Waiter) -> None:
        """`waiter()` once the turn is settled, or nobody can say any more when that will be."""
        at = bisect_right(self._waiting, turn, key=lambda each: each[0])
        self._waiting.insert(at, (turn, waiter))

    def _tell(self) -> None:
        count = 0
        while count < len(self._waiting) and self.settled(self._waiting[count][0]):
            count += 1
        told, self._waiting = self._waiting[:count], self._waiting[count:]
        for _, waiter in told:
            waiter()

    def take_back(self, through: Turn | None) -> int:
        """The target came back, and has everything up to `through`; how many messages were lost."""
        lost = sum(each.count for each in self._written if through is None or through < each.last)
        self._written.clear()
        self.through, self.size_bytes, self.count = through, 0, 0
        self.wake()
        return lost

    def wake(self) -> None:
        """Everybody asks again."""
        told, self._waiting = self._waiting, []
        for _, waiter in told:
            waiter()
