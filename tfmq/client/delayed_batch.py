"""A batch of delayed messages: as any other, with their dues beside, and handles instead of offsets."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from tfmq.client.batch import Batch, Owner
from tfmq.client.dues import Dues
from tfmq.protocol.commands import DUE_MAX
from tfmq.protocol.delayed_handle import Handles, read_dues

if TYPE_CHECKING:
    from tfmq.client.cluster import Topic
    from tfmq.message import SendResult
    from tfmq.protocol.commands import DelayedBatch as Told
    from tfmq.protocol.schema import TransactionDelayed


class HandledBatch(Batch):
    """A batch whose messages may have handles: None until the broker has told them, or where it tells none."""

    __slots__ = ("handles",)

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.handles: Handles | None = None

    def take_handles(self, told: Told | TransactionDelayed | None) -> None:
        """What the broker answered, if it did, and as far as it fits this batch."""
        if told is None:
            return
        dues = self._dues(told.dues)
        if len(dues) == self.count and max(dues) <= DUE_MAX >= told.first_number + self.count:
            self.handles = Handles(told.store_id, told.log_id, told.first_number, dues)

    def _dues(self, packed: bytes) -> array[int]:
        """Due times as the answer has them."""
        return read_dues(packed)

    def result_of(self, index: int, count: int = 1) -> SendResult:
        result = super().result_of(index, count)
        return result if self.handles is None else result._replace(delayed=self.handles[index])

    def results_of(self, first: int, count: int) -> SendResult:
        result = super().result_of(first, count)
        return (
            result if self.handles is None else result._replace(delayed=self.handles[first : first + count])
        )


class DelayedBatch(HandledBatch):
    """Messages for one partition that wait at the broker until each is due."""

    __slots__ = ("dues", "home")

    def __init__(
        self, owner: Owner, topic: str, partition: int, room: int, born_ms: int, leaves_at: float
    ) -> None:
        super().__init__(owner, topic, partition, room, born_ms, leaves_at)
        self.dues = Dues()
        self.home: Topic | None = None
        """The topic as it was known when the partition was chosen."""

    def place(self, topic: Topic, partition: int) -> None:
        super().place(topic, partition)
        self.home = topic

    def _finish(self) -> None:
        super()._finish()
        self.dues = Dues()
