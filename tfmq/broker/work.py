"""What is to be written to a partition, from the queue to its append: the `Work` protocol, and `Staged`, which
gathers the work of one append.

An append names one source, so works share one only if they come from the same: all plain sends, or all effects
of one transaction journal, whose highest place then stands for all of them. An append is written whole or not
at all, so that place never covers an effect that is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from journal.record.batch import Appended, Batch, Source
from journal.record.format import HEADER_SIZE

if TYPE_CHECKING:
    from tfmq.broker.partition import Partition


class Work(Protocol):
    """Something to be written. Exactly one of `appended` and `refused` is called."""

    size_bytes: int
    alone: bool
    """It is an append of its own, whatever its source."""
    effect: bool
    """It comes from a transaction or a timer. Its batches were checked when they were taken from their producer, and
    their bytes again when they were read back; they stay unchanged until it is told that it is written or not."""
    source: Source

    def batches(self, partition: Partition, staged: Staged) -> list[Batch] | None:
        """What to append now; None if the work was settled without (a repeat, a refusal).

        Raises `NotYet` if that cannot be told before what is staged has been written.
        """
        ...

    def appended(self, partition: Partition, answers: list[Appended]) -> None:
        """It is written; not forced yet."""
        ...

    def refused(self, error: BaseException) -> None:
        """It was not written."""
        ...

    def keep(self, *, staged: bool = False) -> None:
        """It waits beyond this turn: from now on its bytes are its own, and the memory they came in is free.

        `staged`: its batches have bytes of their own already, and it is not asked for them again.
        """
        ...


class NotYet(Exception):
    """Write what is staged, then ask again."""


class Staged:
    """Work gathered for one append: per item its batches, and per producer the sequence that comes next."""

    def __init__(self) -> None:
        self.items: list[tuple[Work, list[Batch]]] = []
        self.size_bytes = 0
        self.next_sequences: dict[int, int] = {}
        self.tail = b""
        """The last bytes, which the next batch follows at once."""

    def takes(self, work: Work, size_bytes_max: int) -> bool:
        """Whether `work` may share the append: there is room, and the source is the same."""
        if not self.items:
            return True
        first = self.items[0][0]
        if work.alone or first.alone or self.size_bytes + work.size_bytes > size_bytes_max:
            return False
        return work.source is first.source or work.source[:2] == first.source[:2]

    def add(self, work: Work, batches: list[Batch]) -> None:
        self.items.append((work, batches))
        self.size_bytes += work.size_bytes
        for batch in batches:
            self.next_sequences[batch.producer_id] = batch.sequence + batch.count
            self.tail = tail_of(batch)

    @property
    def source(self) -> Source:
        """What the append's control records name: the last one's place, since places of one source grow."""
        return self.items[-1][0].source

    def keep(self) -> None:
        """As `Work.keep`, for all that is staged."""
        for number, (work, batches) in enumerate(self.items):
            if work.effect:
                continue
            own = [batch._replace(data=bytes(batch.data)) for batch in batches]
            self.items[number] = (work, own)
            work.keep(staged=True)


def tail_of(batch: Batch) -> bytes:
    """The end of a checked batch, as long as a header."""
    return bytes(batch.data[-HEADER_SIZE:])
