"""How fast due messages are brought: so that whoever else sends and reads hardly notices.

Two bounds. What is written and not forced lies in front of everybody who waits for a force, so all lines together
have a window of bytes. And a turn of the broker's thread brings no more than a part of a tick's work; the rest goes on
in the next turn, behind whatever came in meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from tfmq.apply_target import Mark
from tfmq.delay.requests import Timers, Turn

WINDOW_BYTES: Final = 512 << 10
"""As for large transactions (`tfmq.transaction.applier`), where it was measured."""
SLICE_BYTES: Final = 256 << 10
"""One effect brings no more, unless one message alone is larger."""
TURN_ROWS: Final = 1024
"""Some two milliseconds' work. With 2,048 and with 512 (and each time twice as many taken out of the wheel at once) a
neighbour's slowest sends beside a burst took longer, and fewer messages came a second."""
TURN_BYTES: Final = 512 << 10
"""Some milliseconds' work where messages are large."""


class Pacing:
    """See the module. One owner's thread."""

    def __init__(self) -> None:
        self.unforced_bytes = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._giving = False
        self._rows = 0
        self._bytes = 0

    # The window

    def fits(self, size_bytes: int) -> bool:
        """Whether so many bytes more may be written now; a slice larger than the window goes alone. Nobody passes those
        who wait: else small slices would keep a large one waiting for ever."""
        return (self._giving or not self._waiting) and self._has_room(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        return not self.unforced_bytes or self.unforced_bytes + size_bytes <= WINDOW_BYTES

    def wait(self, size_bytes: int, go: Callable[[], None]) -> None:
        """`go()` once when it is its turn and there is room for so much; it asks anew then."""
        self._waiting.append((size_bytes, go))

    def take(self, size_bytes: int) -> None:
        """They are going to be written."""
        self.unforced_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """They are forced, or were not written, or their target has stopped."""
        self.unforced_bytes -= size_bytes
        if self._giving:
            return
        self._giving = True
        try:
            while self._waiting and self._has_room(self._waiting[0][0]):
                self._waiting.popleft()[1]()
        finally:
            self._giving = False

    # The turn

    def begin_turn(self) -> None:
        """Everybody else had a chance."""
        self._rows = self._bytes = 0

    @property
    def rows_left(self) -> int:
        """So many rows may still be brought in this turn."""
        return 0 if self._bytes >= TURN_BYTES else max(0, TURN_ROWS - self._rows)

    def spend(self, rows: int, size_bytes: int) -> None:
        """They are brought in this turn."""
        self._rows += rows
        self._bytes += size_bytes


# When something that was refused is tried again.

FLOW_PAUSE_SECONDS: Final = 1.0
FLOW_PAUSE_SECONDS_MAX: Final = 30.0
"""A target that takes nothing is tried again after pauses that double between these, besides when it is resumed."""


class Patience:
    """One pause at a time; `go()` at its end."""

    def __init__(self, timers: Timers, go: Callable[[], None]) -> None:
        self._timers, self._go = timers, go
        self._pause = FLOW_PAUSE_SECONDS
        self._timer: Any = None

    @property
    def waits(self) -> bool:
        """Whether a pause is under way."""
        return self._timer is not None

    def hold(self, seconds: float) -> None:
        """A pause of that length, unless there is one."""
        if self._timer is None:
            self._timer = self._timers.after(seconds, self.end)

    def refused(self) -> None:
        """A pause, twice as long as the last one."""
        self.stop()
        self._timer = self._timers.after(self._pause, self.end)
        self._pause = min(2 * self._pause, FLOW_PAUSE_SECONDS_MAX)

    def end(self) -> None:
        """No pause any more: on it goes."""
        self.stop()
        self._go()

    def stop(self) -> None:
        """No pause any more, and nothing comes of it."""
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def renew(self) -> None:
        """The next pause is a short one again."""
        self._pause = FLOW_PAUSE_SECONDS


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
    """What of a line is written and not known to be on the disk, and who waits to hear that it is.

    "Delivered" is told of a message only when its append is forced: before that a power cut could take it back, and
    then it would fire again, or be cancelled after all.

    `through`: every turn of this target up to it is forced, or will never fire; None: none is.
    """

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
