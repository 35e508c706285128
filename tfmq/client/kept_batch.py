"""A batch of messages that is either stored by the broker or kept in a local store until its partition takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfmq.client.batch import Batch
from tfmq.message import SendResult


class KeptBatch(Batch):
    """A batch that may end in the store. To the sender it is never open: it leaves when its line is free."""

    __slots__ = ("gathering", "is_kept")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_open = False
        self.gathering = True
        self.is_kept = False

    def leave(self) -> None:
        """Nothing is added any more. A second time does nothing."""
        self.gathering = False
        self.count = len(self.payloads) or self.count

    def stored(self, positions: Sequence[tuple[int, int]], durability: int) -> None:
        """The broker has it, or the store (`is_kept`)."""
        super().stored(positions, durability)
        if self.is_kept:
            self.durability = "kept"

    def result_of(self, index: int, count: int = 1) -> SendResult:
        """As its base; a kept one has no offset and no id yet."""
        if self.is_kept and self.error is None:
            return SendResult(self.topic, self.partition, None, 0, "kept", count)
        return super().result_of(index, count)
