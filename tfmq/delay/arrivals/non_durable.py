"""Messages of the arrival log that are not durable yet: a power failure could still remove them.

The dispatcher and the target queues obey two limits because of these messages. First, no message due at
`NonDurableArrivals.due_limit` or later is delivered. Second, after the log has stopped, `uncertain_targets` has a due
time for each target: messages of this target that are due then or later wait for the next start.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from tfmq.delay.timing_wheel import WheelRows


class WrittenArrival(NamedTuple):
    """A written append for one target. `ticket`: from `begin_append`. `number_next`: the last number plus 1."""

    ticket: int
    log_id: int
    end_offset: int
    number_next: int
    count: int  # type: ignore[assignment]
    due_low: int
    due_high: int
    wheel_rows: WheelRows


class NonDurableArrivals:
    """Appends to the arrival log that are not durable, and tickets of appends that are not written yet.

    The messages of these appends must be delivered before all messages that are due later, because after a crash all
    messages of a partition up to the highest delivered turn (due time, number) count as delivered.
    """

    def __init__(self) -> None:
        self._ticket = 0
        self._lows: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._written: deque[WrittenArrival] = deque()
        self.uncertain_targets: dict[int, int] = {}
        """Log id of a target -> lowest due time of its messages that may be lost. Only the next start finds them."""
        self.message_count = 0
        """Number of messages that are written and not known to be durable."""

    def __len__(self) -> int:
        return len(self._lows)

    @property
    def due_limit(self) -> int | None:
        """The lowest due time of non-durable messages. No message due then or later is delivered. None: no limit."""
        heap = self._heap
        while heap and heap[0][1] not in self._lows:
            heappop(heap)
        return heap[0][0] if heap else None

    @property
    def last_written(self) -> WrittenArrival | None:
        """The last append that is written and not known to be durable, or None."""
        return self._written[-1] if self._written else None

    def begin_append(self, low: int) -> int:
        """Record that an append with the lowest due time `low` will be written; return a ticket for the append."""
        self._ticket += 1
        self._lows[self._ticket] = low
        heappush(self._heap, (low, self._ticket))
        return self._ticket

    def append_failed(self, ticket: int) -> None:
        """Record that the append with this ticket was not written and never will be."""
        self._lows.pop(ticket, None)

    def add_written(self, landed: WrittenArrival) -> None:
        """Record that an append is written. Called in the order of the appends in the log."""
        self._written.append(landed)
        self.message_count += landed.count

    @property
    def lowest_due(self) -> int | None:
        """The lowest due time of messages that are not durable, including those in `uncertain_targets`; or None."""
        lows = (self.due_limit, *self.uncertain_targets.values())
        return min([low for low in lows if low is not None], default=None)

    def log_stopped(self) -> None:
        """Move the written messages to `uncertain_targets`, because the log has stopped.

        Only the next start finds out which of these messages are durable. Until then, messages that are due later are
        not delivered to the same targets. Messages for other targets do not wait.
        """
        for arrival in self._written:
            if self._lows.pop(arrival.ticket, None) is not None:
                self.uncertain_targets[arrival.log_id] = min(
                    arrival.due_low, self.uncertain_targets.get(arrival.log_id, arrival.due_low)
                )

    def pop_durable(self, offset: int) -> Iterator[WrittenArrival]:
        """Remove and yield, in order, the appends that end at the durable offset `offset` or before."""
        while self._written and self._written[0].end_offset <= offset:
            arrival = self._written.popleft()
            self._lows.pop(arrival.ticket, None)
            self.message_count -= arrival.count
            yield arrival
