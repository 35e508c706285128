"""Arrivals that are not sure yet: dues were given, or they are written, and a power cut could still take them.

Nothing that is due behind one of them may fire: it could be one of those with the lower turn, and the highest turn
that a partition has stands for everything below it.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple


class Near(NamedTuple):
    """Messages as the wheel takes them; empty where all are due behind the horizon."""

    dues: "array[int]"
    numbers: "array[int]"
    locators: "array[int]"
    tags: "array[int]"


class Landed(NamedTuple):
    """Messages for one target that are written. `ticket` is what was answered when dues were given to them."""

    ticket: int
    key: int
    end_offset: int
    number_next: int
    count: int  # type: ignore[assignment]
    low: int
    high: int
    near: Near


class Ledger:
    """See the module. `limit`: nothing from this due on may fire."""

    def __init__(self) -> None:
        self._ticket = 0
        self._lows: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._written: deque[Landed] = deque()
        self.doubtful: dict[int, int] = {}
        """Targets for which something is written that only a start can find out about: key -> its lowest due."""
        self.messages = 0
        """In what is written and not known to be on the disk."""

    def __len__(self) -> int:
        return len(self._lows)

    @property
    def limit(self) -> int | None:
        """The lowest due of what is not sure; None: everything is."""
        heap = self._heap
        while heap and heap[0][1] not in self._lows:
            heappop(heap)
        return heap[0][0] if heap else None

    @property
    def written(self) -> Landed | None:
        """The last append that is written and not known to be on the disk."""
        return self._written[-1] if self._written else None

    def expect(self, low: int) -> int:
        """Dues were given, none below `low`; answers a ticket."""
        self._ticket += 1
        self._lows[self._ticket] = low
        heappush(self._heap, (low, self._ticket))
        return self._ticket

    def failed(self, ticket: int) -> None:
        """They are not written, and never will be."""
        self._lows.pop(ticket, None)

    def land(self, landed: Landed) -> None:
        """They are written, behind all that landed before."""
        self._written.append(landed)
        self.messages += landed.count

    @property
    def lowest(self) -> int | None:
        """As `limit`, and no higher than what is doubtful."""
        return min([low for low in (self.limit, *self.doubtful.values()) if low is not None], default=None)

    def give_up(self) -> None:
        """The log has stopped: what is written and not forced may be there behind a start, or not. Until then it holds
        back its own targets only."""
        for landed in self._written:
            if self._lows.pop(landed.ticket, None) is not None:
                self.doubtful[landed.key] = min(landed.low, self.doubtful.get(landed.key, landed.low))

    def forced(self, offset: int) -> Iterator[Landed]:
        """What is sure now that the log is forced up to `offset`, in order."""
        while self._written and self._written[0].end_offset <= offset:
            landed = self._written.popleft()
            self._lows.pop(landed.ticket, None)
            self.messages -= landed.count
            yield landed
