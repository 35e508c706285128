"""Limits for firing due messages, so that other producers and consumers are hardly delayed.

`FlowControl` limits bytes and rows, `RetryTimer` delays retries, `FlushTracker` tracks what is not durable yet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from tfmq.apply_target import AppendResult
from tfmq.backoff import Backoff
from tfmq.delay.requests import Timers, Turn

IN_FLIGHT_BYTES_MAX: Final = 512 << 10
"""The in-flight limit. Measured for large transactions (`tfmq.transaction.applier`)."""
SLICE_BYTES_MAX: Final = 256 << 10
"""Maximum size of one append, unless a single message is larger."""
TURN_ROWS_MAX: Final = 1024
"""About 2 ms of work.

Measured: with 2,048 and with 512 (and each time twice as many popped from the wheel at once) the slowest sends beside a
burst took longer, and the throughput of delayed messages was lower.
"""
TURN_BYTES_MAX: Final = 512 << 10
"""A few milliseconds of work where messages are large."""


class FlowControl:
    """Limits in-flight bytes of all target queues, and the work of one turn of the broker.

    Broker thread only. Bytes that are written but not durable delay every caller that waits for an fsync, so all
    queues share an in-flight limit. A turn of the broker writes only a limited number of rows and bytes; the rest is
    written in the next turn, after other work.
    """

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._releasing = False
        self._rows = 0
        self._bytes = 0

    # In-flight limit

    def may_write(self, size_bytes: int) -> bool:
        """Return whether this many bytes may be written now.

        A slice above the limit is written alone. Waiting slices are not overtaken: otherwise small slices could delay
        a large one without end.
        """
        return (self._releasing or not self._waiting) and self._has_room(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        return not self.in_flight_bytes or self.in_flight_bytes + size_bytes <= IN_FLIGHT_BYTES_MAX

    def wait_for_room(self, size_bytes: int, go: Callable[[], None]) -> None:
        """Call `go()` once when there is room for this many bytes; it must check `may_write` again."""
        self._waiting.append((size_bytes, go))

    def reserve(self, size_bytes: int) -> None:
        """Count bytes that are about to be written."""
        self.in_flight_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Release bytes that are durable, were not written, or have a stopped target; call waiters."""
        self.in_flight_bytes -= size_bytes
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._waiting and self._has_room(self._waiting[0][0]):
                self._waiting.popleft()[1]()
        finally:
            self._releasing = False

    # Work of one turn

    def start_turn(self) -> None:
        """Start a new turn of the broker: other work had its chance."""
        self._rows = self._bytes = 0

    @property
    def rows_left(self) -> int:
        """Rows that may still be written in this turn."""
        return 0 if self._bytes >= TURN_BYTES_MAX else max(0, TURN_ROWS_MAX - self._rows)

    def count_written(self, rows: int, size_bytes: int) -> None:
        """Count what was written in this turn."""
        self._rows += rows
        self._bytes += size_bytes


# Retries

RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 30.0
"""Bounds of the pauses between tries of a target that rejects messages; they double.

A resumption ends a pause.
"""


class RetryTimer:
    """Calls `retry()` at the end of a pause; one pause at a time."""

    def __init__(self, timers: Timers, retry: Callable[[], None]) -> None:
        self._timers, self._retry = timers, retry
        self._backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
        self._timer: Any = None

    @property
    def is_waiting(self) -> bool:
        """Whether a pause is running."""
        return self._timer is not None

    def pause(self, seconds: float) -> None:
        """Start a pause of that length, unless one is running."""
        if self._timer is None:
            self._timer = self._timers.after(seconds, self.retry_now)

    def back_off(self) -> None:
        """Start a pause twice as long as the one before."""
        self.cancel()
        self._timer = self._timers.after(self._backoff.advance(), self.retry_now)

    def retry_now(self) -> None:
        """End the pause and call `retry()` now."""
        self.cancel()
        self._retry()

    def cancel(self) -> None:
        """End the pause without calling `retry()`."""
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def reset(self) -> None:
        """Reset the pause to the shortest."""
        self._backoff.reset()


RecheckCallback: TypeAlias = Callable[[], None]
"""Called when the caller should check the state again."""


class WrittenAppend(NamedTuple):
    """One append of `count` messages, due from `first` on, up to the turn `last`."""

    mark: AppendResult
    first: int
    last: Turn
    size_bytes: int
    count: int = 1  # type: ignore[assignment]


class FlushTracker:
    """Appends of a target queue that are not known to be durable, and callers waiting for them.

    A message is reported as delivered only when its append is durable: before that, a power failure could undo the
    append, and the message would fire again, or could still be cancelled.

    `durable_through`: every turn of this target up to it is durable or will never fire; None: no turn is.
    """

    def __init__(self, through: Turn | None) -> None:
        self.durable_through = through
        self.size_bytes = 0
        """Bytes of what is not known to be durable."""
        self.count = 0
        """Messages that are not known to be durable."""
        self._written: deque[WrittenAppend] = deque()
        self._waiting: list[tuple[Turn, RecheckCallback]] = []

    def __len__(self) -> int:
        return len(self._written)

    @property
    def first_due(self) -> int | None:
        """Lowest due time of what is not known to be durable."""
        return self._written[0].first if self._written else None

    @property
    def last_append(self) -> WrittenAppend | None:
        """The latest append that is not known to be durable."""
        return self._written[-1] if self._written else None

    def add(self, written: WrittenAppend) -> None:
        """Add an append, later than all others."""
        self._written.append(written)
        self.size_bytes += written.size_bytes
        self.count += written.count

    def is_durable(self, turn: Turn) -> bool:
        """Return whether all turns up to this one are durable or will never fire."""
        return self.durable_through is not None and turn <= self.durable_through

    def pop_durable(self, is_forced: Callable[[AppendResult], bool]) -> None:
        """Remove the appends that are durable now, and call the callers that wait for them."""
        moved = False
        while self._written and is_forced(self._written[0].mark):
            written = self._written.popleft()
            self.durable_through = written.last
            self.size_bytes -= written.size_bytes
            self.count -= written.count
            moved = True
        if moved:
            self._call_waiters()

    def release_bytes(self) -> int:
        """Return the counted bytes and count none from now on: the target has stopped."""
        size, self.size_bytes = self.size_bytes, 0
        self._written = deque(each._replace(size_bytes=0) for each in self._written)
        return size

    def when_durable(self, turn: Turn, waiter: RecheckCallback) -> None:
        """Call `waiter()` once the turn is durable, or if that became uncertain.

        It must check again.
        """
        at = bisect_right(self._waiting, turn, key=lambda each: each[0])
        self._waiting.insert(at, (turn, waiter))

    def _call_waiters(self) -> None:
        count = 0
        while count < len(self._waiting) and self.is_durable(self._waiting[count][0]):
            count += 1
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        for _, waiter in ready:
            waiter()

    def reset_to(self, through: Turn | None) -> int:
        """Reset to a resumed target that has everything up to `through`.

        Return how many messages were lost.
        """
        lost = sum(each.count for each in self._written if through is None or through < each.last)
        self._written.clear()
        self.durable_through, self.size_bytes, self.count = through, 0, 0
        self.wake_all()
        return lost

    def wake_all(self) -> None:
        """Call all waiters: each checks again."""
        callbacks, self._waiting = self._waiting, []
        for _, waiter in callbacks:
            waiter()
