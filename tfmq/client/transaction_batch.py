"""A batch of a transaction: as any other, but delivered by the commit, and soon without its bytes.

Once the broker's journal has it, its records are let go; what is left of it costs a few KiB, and nothing at all where
nobody holds a handle on it. So a transaction may be larger than memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

from tfmq.client.batch import Batch
from tfmq.client.delayed_batch import HandledBatch
from tfmq.client.dues import Dues
from tfmq.client.encoder import Encoded
from tfmq.protocol.delayed_handle import read_dues


class Teller(Protocol):
    """What the handles on a transaction's messages need of it: an `Owner` of batches, and one thing more."""

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None: ...

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]: ...

    def call_back(self, callback: Callable[[], object]) -> None: ...

    def keep(self, batch: TransactionBatch) -> None:
        """Somebody wants to be told what becomes of `batch`, and may not hold it."""
        ...


class TransactionBatch(HandledBatch):
    """Messages of one transaction for one partition of the topic's `incarnation`."""

    __slots__ = ("dues", "first_count", "incarnation")

    owner: Teller

    def __init__(
        self, owner: Teller, topic: str, incarnation: int, partition: int, room: int, born_ms: int
    ) -> None:
        super().__init__(owner, topic, partition, room, born_ms, float("inf"))
        self.incarnation = incarnation
        self.dues: Dues | None = None
        """Of one whose messages are delayed; they count from the commit."""
        self.first_count = 0
        """How many messages its first block has: what is behind it lies at a place that the commit does not tell."""

    @property
    def due(self) -> bytes | None:
        """What the wire carries of its dues."""
        return None if self.dues is None else self.dues.packed_whole()

    def _dues(self, packed: bytes) -> array[int]:
        """One alone is that of all messages."""
        dues = read_dues(packed)
        return dues * self.count if len(dues) == 1 else dues

    def number(self, producer_id: int, sequence: int) -> Encoded:
        encoded = super().number(producer_id, sequence)
        self.first_count = encoded.blocks[0][1]
        return encoded

    def journalled(self) -> None:
        """The broker's journal has it, so its bytes are not needed any more."""
        encoded = self.encoded
        if encoded is not None:
            ends = None if encoded.ends is None else array("I", encoded.ends[: self.first_count])
            self.encoded = Encoded(bytearray(), [], encoded.record_size, ends)
        self.dues = None

    def offset_of(self, index: int) -> int | None:
        """None behind the first block, and where the commit did not tell."""
        return super().offset_of(index) if index < self.first_count else None

    def when_finished(self, callback: Callable[[Batch], object]) -> None:
        if not self.done:
            self.owner.keep(self)
        super().when_finished(callback)
