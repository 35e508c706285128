"""A batch of delayed messages: as any other, with their dues beside, and handles instead of offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfmq.client.batch import Batch, Owner
from tfmq.client.dues import Dues
from tfmq.protocol.commands import DUE_MAX
from tfmq.protocol.handles import Handles, read_dues

if TYPE_CHECKING:
    from tfmq.client.cluster import Topic
    from tfmq.message import SendResult
    from tfmq.protocol.commands import DelayedBatch as Told


class DelayedBatch(Batch):
    """Messages for one partition that wait at the broker until each is due."""

    __slots__ = ("dues", "handles", "home")

    def __init__(
        self, owner: Owner, topic: str, partition: int, room: int, born_ms: int, leaves_at: float
    ) -> None:
        super().__init__(owner, topic, partition, room, born_ms, leaves_at)
        self.dues = Dues()
        self.handles: Handles | None = None
        """None until the broker has it, and for ever where its answer was lost and it remembers no more of it."""
        self.home: Topic | None = None
        """The topic as it was known when the partition was chosen."""

    def place(self, topic: Topic, partition: int) -> None:
        super().place(topic, partition)
        self.home = topic

    def take_handles(self, told: Told | None) -> None:
        """What the broker answered, if it did, and as far as it fits this batch."""
        if told is not None:
            dues = read_dues(told.dues)
            if len(dues) == self.count and max(dues) <= DUE_MAX >= told.first_number + self.count:
                self.handles = Handles(told.store_id, told.log_id, told.first_number, dues)

    def _finish(self) -> None:
        super()._finish()
        self.dues = Dues()

    def result_of(self, index: int, count: int = 1) -> SendResult:
        return self._with(super().result_of(index, count), self.handles and self.handles[index])

    def results_of(self, first: int, count: int) -> SendResult:
        return self._with(
            super().result_of(first, count), self.handles and self.handles[first : first + count]
        )

    def _with(self, result: SendResult, delayed: Any) -> SendResult:
        return result._replace(delayed=delayed)
