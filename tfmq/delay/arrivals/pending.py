"""Arrivals that are not durable yet, from the assignment of due times to the fsync."""

from array import array
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple


class WheelRows(NamedTuple):
    """Messages as rows of the timing wheel; empty if all are due after the memory window."""

    dues: "array[int]"
    numbers: "array[int]"
    locators: "array[int]"
    tags: "array[int]"


class WrittenArrival(NamedTuple):
    """Messages for one target that are written. `ticket`: from `begin_append`."""

    ticket: int
    log_id: int
    end_offset: int
    number_next: int
    count: int  # type: ignore[assignment]
    due_low: int
    due_high: int
    wheel_rows: WheelRows


class NonDurableArrivals:
    """Tracks arrivals that a power failure could still undo.

    Nothing that is due after one of them may fire: the arrival could have the lower turn, and the highest turn of a
    partition implies all lower turns.
    """

    def __init__(self) -> None:
        self._ticket = 0
        self._lows: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._written: deque[WrittenArrival] = deque()
        self.uncertain_targets: dict[int, int] = {}
        """Targets with arrivals that only a start can resolve: log id -> lowest due time."""
        self.message_count = 0
        """Messages that are written and not known to be durable."""

    def __len__(self) -> int:
        return len(self._lows)

    @property
    def due_limit(self) -> int | None:
        """The lowest due time of arrivals that are not durable: nothing from there on may fire.

        None: all are.
        """
        heap = self._heap
        while heap and heap[0][1] not in self._lows:
            heappop(heap)
        return heap[0][0] if heap else None

    @property
    def last_written(self) -> WrittenArrival | None:
        """The last append that is not known to be durable."""
        return self._written[-1] if self._written else None

    def begin_append(self, low: int) -> int:
        """Record that due times were assigned, none below `low`; return a ticket."""
        self._ticket += 1
        self._lows[self._ticket] = low
        heappush(self._heap, (low, self._ticket))
        return self._ticket

    def append_failed(self, ticket: int) -> None:
        """Record that the messages are not written, and never will be."""
        self._lows.pop(ticket, None)

    def add_written(self, landed: WrittenArrival) -> None:
        """Record that messages are written, after all earlier ones."""
        self._written.append(landed)
        self.message_count += landed.count

    @property
    def lowest_due(self) -> int | None:
        """The lowest due time of arrivals that are not durable, or uncertain."""
        return min(
            [low for low in (self.due_limit, *self.uncertain_targets.values()) if low is not None],
            default=None,
        )

    def log_stopped(self) -> None:
        """Handle that the log has stopped: a start decides which arrivals exist.

        Until then only their targets wait.
        """
        for landed in self._written:
            if self._lows.pop(landed.ticket, None) is not None:
                self.uncertain_targets[landed.log_id] = min(
                    landed.due_low, self.uncertain_targets.get(landed.log_id, landed.due_low)
                )

    def pop_durable(self, offset: int) -> Iterator[WrittenArrival]:
        """Yield the arrivals that are durable now that the log is durable up to `offset`, in order."""
        while self._written and self._written[0].end_offset <= offset:
            landed = self._written.popleft()
            self._lows.pop(landed.ticket, None)
            self.message_count -= landed.count
            yield landed
