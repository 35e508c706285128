"""Limits for appends of due messages, so that other producers and consumers are not delayed."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Final, NamedTuple

from tfmq.apply_queue import InFlightLimit
from tfmq.apply_target import AppendResult
from tfmq.delay.requests import Turn

SLICE_BYTES_MAX: Final = 256 << 10
"""Maximum size of one append of due messages, unless a single message is larger."""
TURN_ROWS_MAX: Final = 1024
"""Maximum number of due messages that are appended in one turn of the broker: about 2 ms of work.

Measured: both with twice and with half this number, sends during a burst took longer and throughput was lower.
"""
TURN_BYTES_MAX: Final = 512 << 10
"""After appends of this many bytes in a turn of the broker (a few ms of work), other appends wait for the next turn."""


class FlowControl(InFlightLimit):
    """Limits the bytes that all target queues have written and not fsynced, and the appends in a turn of the broker."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = self._bytes = 0

    def start_turn(self) -> None:
        self._rows = self._bytes = 0

    @property
    def rows_left(self) -> int:
        """How many due messages may still be appended in this turn of the broker."""
        return 0 if self._bytes >= TURN_BYTES_MAX else max(0, TURN_ROWS_MAX - self._rows)

    def count_written(self, rows: int, size_bytes: int) -> None:
        self._rows += rows
        self._bytes += size_bytes


class WrittenAppend(NamedTuple):
    """An append of `count` messages. `mark`: its result. `first`: its lowest due time. `last`: its highest turn."""

    mark: AppendResult
    first: int
    last: Turn
    count: int = 1  # type: ignore[assignment]


class NonDurableAppends:
    """Appends of a target queue that are not known to be durable, and callers that wait for them.

    A message is reported as delivered only when its append is durable, because until then a power failure could undo
    the append. `durable_through`: every message up to this turn is durable in the target, or will never be delivered
    (for example, it was cancelled). None: no such turn is known.
    """

    def __init__(self, through: Turn | None) -> None:
        self.durable_through = through
        self.count = 0
        """Number of messages that are written but not known to be durable."""
        self._written: deque[WrittenAppend] = deque()
        self._waiting: list[tuple[Turn, Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._written)

    @property
    def first_due(self) -> int | None:
        return self._written[0].first if self._written else None

    @property
    def last_append(self) -> WrittenAppend | None:
        return self._written[-1] if self._written else None

    def add(self, written: WrittenAppend) -> None:
        self._written.append(written)
        self.count += written.count

    def is_durable(self, turn: Turn) -> bool:
        """Return whether each message up to this turn is durable in the target or will never be delivered."""
        return self.durable_through is not None and turn <= self.durable_through

    def pop_durable(self, is_forced: Callable[[AppendResult], bool]) -> None:
        """Remove the appends that are durable now, and call the waiters for their messages."""
        moved = False
        while self._written and is_forced(self._written[0].mark):
            written = self._written.popleft()
            self.durable_through = written.last
            self.count -= written.count
            moved = True
        if moved:
            count = bisect_right(self._waiting, self.durable_through, key=itemgetter(0))
            ready, self._waiting = self._waiting[:count], self._waiting[count:]
            for _, waiter in ready:
                waiter()

    def when_durable(self, turn: Turn, waiter: Callable[[], None]) -> None:
        """Call `waiter()` when the turn is durable, or in `wake_all`. So the waiter must check the message's state."""
        at = bisect_right(self._waiting, turn, key=itemgetter(0))
        self._waiting.insert(at, (turn, waiter))

    def reset_to(self, through: Turn | None) -> int:
        """Forget all appends, because the target was resumed; return how many of their messages the target has lost.

        `through`: the highest turn that the target still has; None: it has none.
        """
        lost = sum(each.count for each in self._written if through is None or through < each.last)
        self._written.clear()
        self.durable_through, self.count = through, 0
        self.wake_all()
        return lost

    def wake_all(self) -> None:
        """Call all waiters. Each waiter looks up the state of its message again, and may wait again."""
        callbacks, self._waiting = self._waiting, []
        for _, waiter in callbacks:
            waiter()
