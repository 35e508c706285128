"""What of the partitions is out to handlers, and the lowest offset of each that is not finished. Pure bookkeeping.

A consumer that runs handlers takes messages of a partition in order, and they end in any order. The place of a ledger
is where everything before it is finished: what may be saved. It only goes forward. A ledger is *void* once its
partition was given up or sought: what ends late counts for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from tfmq.client.places import Batch, Place, behind
from tfmq.client.received import ReceivedMessage
from tfmq.errors import NotAllowed
from tfmq.offsets.storage import PartitionName

IN_WORK: ContextVar[ReceivedMessage | None] = ContextVar("tfmq_message_in_work", default=None)
"""The message that the running handler was called with; None outside of one."""


class Ledger:
    """One partition from `place` on: see the module."""

    def __init__(self, name: PartitionName, place: Place) -> None:
        self.name = name
        self.place = place
        """Everything before it is finished."""
        self.following = place
        """Behind everything that is out."""
        self.void = False
        self.leaving = False
        """Nothing more of it may begin."""
        self.in_work = 0
        """How many handlers are at work on it."""
        self.met = self.done = 0
        """How many messages were out so far, and how many of them are finished."""
        self._out: deque[ReceivedMessage] = deque()
        self._finished: set[int] = set()
        self._behind: dict[int, Place] = {}

    @property
    def span(self) -> int:
        """Bytes from the place to the end of what is out."""
        return self.following.offset - self.place.offset if self._out else 0

    def take(self, batch: Batch) -> None:
        """All of `batch` is out; an empty one only moves on what was left out."""
        self.following = batch.following
        self.met += len(batch.messages)
        self._out.extend(batch.messages)
        if self._out:
            self._behind[self._out[-1].offset] = batch.following
        else:
            self.place = batch.following

    def finish(self, message: ReceivedMessage) -> None:
        """It is done with. A second time does nothing."""
        offset = message.offset
        if not self._out or not self._out[0].offset <= offset <= self._out[-1].offset:
            return
        if offset in self._finished:
            return
        self.done += 1
        self._finished.add(offset)
        while self._out and self._out[0].offset in self._finished:
            done = self._out.popleft()
            self._finished.discard(done.offset)
            known = done.offset in self._behind
            self.place = self._behind.pop(done.offset) if known else behind(done)

    def place_with(self, message: ReceivedMessage | None) -> Place:
        """The place as it would be if `message` were finished, too."""
        place = self.place
        if message is not None and self._out and self._out[0].offset == message.offset:
            for each in self._out:
                if each.offset != message.offset and each.offset not in self._finished:
                    break
                place = self._behind.get(each.offset) or behind(each)
        return place


class Ledgers:
    """Those of one consumer, by partition."""

    def __init__(self) -> None:
        self.freed: Callable[[], None] = lambda: None
        """Called when a partition that is leaving has no handler at work any more."""
        self.stayed: Callable[[], None] = lambda: None
        """Called when one that was leaving stays."""
        self.running = False
        """Whether a run hands out what is read; it never ends but with the consumer."""
        self._ledgers: dict[PartitionName, Ledger] = {}
        self._saved_by = ""

    def check_free(self) -> None:
        """Raises NotAllowed where a run hands out what is read."""
        if self.running:
            raise NotAllowed(
                "run() hands out the messages of this consumer: poll(), next(), a loop or another run() would take them"
                " from its handlers. A handler has its message as argument; who needs more reads with a consumer of his"
                " own."
            )

    def take(self, batch: Batch, place: Place) -> Ledger:
        """`batch` is out to handlers; everything before `place` is done where nothing else of the partition is out."""
        ledger = self._ledgers.get(batch.name)
        if ledger is None:
            ledger = self._ledgers[batch.name] = Ledger(batch.name, place)
        ledger.take(batch)
        return ledger

    def get(self, name: PartitionName) -> Ledger | None:
        return self._ledgers.get(name)

    def __iter__(self) -> Iterator[Ledger]:
        return iter(self._ledgers.values())

    def names(self) -> list[PartitionName]:
        """The partitions of which something is, or was, out."""
        return list(self._ledgers)

    def agree(self, way: str) -> None:
        """A handler is about to save by `way`. Raises NotAllowed where another way was used before."""
        if not self._ledgers or IN_WORK.get() is None:
            return
        if self._saved_by not in ("", way):
            raise NotAllowed(
                "Handlers of run() save by commit(), or in transactions, not by both: the commit() of one could take"
                " back the place that the transaction of another has just saved. Write commit_offsets(consumer)"
                " everywhere, also in a transaction of nothing else."
            )
        self._saved_by = way

    def in_work(self, name: PartitionName) -> bool:
        """Whether a handler is at work on a message of it."""
        ledger = self._ledgers.get(name)
        return ledger is not None and ledger.in_work > 0

    def leave(self, name: PartitionName) -> None:
        """Nothing more of the partition begins; what is in work may end, and counts."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.leaving = True

    def stay(self, name: PartitionName) -> None:
        """It stays after all."""
        ledger = self._ledgers.get(name)
        if ledger is not None and ledger.leaving:
            ledger.leaving = False
            self.stayed()

    def rested(self, ledger: Ledger) -> None:
        """A handler is not at work on it any more."""
        ledger.in_work -= 1
        if ledger.leaving and not ledger.in_work:
            self.freed()

    def void(self, name: PartitionName) -> None:
        """The partition was given up, or is read elsewhere: nothing of it begins, nothing that ends counts."""
        ledger = self._ledgers.pop(name, None)
        if ledger is not None:
            ledger.void = ledger.leaving = True
