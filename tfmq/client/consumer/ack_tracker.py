"""Acks of messages that several handlers process at the same time, and the position that may be committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tfmq.client.consumer.message import CURRENT_MESSAGE, Batch, ReadPosition, ReceivedMessage, position_after
from tfmq.errors import NotAllowed
from tfmq.offsets.storage import PartitionName


class AckTracker:
    """Unacked messages of one partition that were delivered to handlers.

    Messages are delivered in order and acked in any order. All messages before `position` are acked, so `position` may
    be committed; it never moves back. After a seek or the loss of the partition the tracker is `invalid`: callers then
    ignore acks of its messages.
    """

    def __init__(self, name: PartitionName, position: ReadPosition) -> None:
        self.name = name
        self.position = position
        self.end_position = position
        """Position after the last delivered message."""
        self.invalid = False
        self.revoked = False
        """Whether the group has requested the partition back, so that no handler may start."""
        self.active_handlers = 0
        self.delivered_count = self.acked_count = 0
        """Numbers of messages delivered and acked so far."""
        self.failing_offsets: frozenset[int] | None = None
        """Offsets of messages for which the dead-letter store has recorded failed calls; None: not looked up yet."""
        self._unacked: deque[ReceivedMessage] = deque()
        self._acked_offsets: set[int] = set()
        self._positions_after: dict[int, ReadPosition] = {}

    @property
    def unacked_bytes(self) -> int:
        """Bytes from the first unacked message to the end of the last delivered message."""
        return self.end_position.offset - self.position.offset if self._unacked else 0

    def add_batch(self, batch: Batch) -> None:
        """Add a delivered batch. A batch without messages only moves `end_position` past filtered-out messages."""
        self.end_position = batch.end_position
        self.delivered_count += len(batch.messages)
        self._unacked.extend(batch.messages)
        if self._unacked:
            self._positions_after[self._unacked[-1].offset] = batch.end_position
        else:
            self.position = batch.end_position

    def ack(self, message: ReceivedMessage) -> None:
        """Ack a message. A second call does nothing."""
        offset = message.offset
        if not self._unacked or not self._unacked[0].offset <= offset <= self._unacked[-1].offset:
            return
        if offset in self._acked_offsets:
            return
        self.acked_count += 1
        self._acked_offsets.add(offset)
        while self._unacked and self._unacked[0].offset in self._acked_offsets:
            done = self._unacked.popleft()
            self._acked_offsets.discard(done.offset)
            known = done.offset in self._positions_after
            self.position = self._positions_after.pop(done.offset) if known else position_after(done)

    def position_if_acked(self, message: ReceivedMessage | None) -> ReadPosition:
        """Return what `position` would be if `message` were acked as well."""
        position = self.position
        if message is not None and self._unacked and self._unacked[0].offset == message.offset:
            for each in self._unacked:
                if each.offset != message.offset and each.offset not in self._acked_offsets:
                    break
                position = self._positions_after.get(each.offset) or position_after(each)
        return position


class AckTrackers(dict[PartitionName, AckTracker]):
    def __init__(self) -> None:
        super().__init__()
        self.on_handlers_idle: Callable[[], None] = lambda: None
        """Called when a revoked partition has no running handler any more."""
        self.on_unrevoked: Callable[[], None] = lambda: None
        """Called when the group has withdrawn the revocation of a partition."""
        self.is_run_active = False
        """Whether the user has called `run` of this consumer. From then on only handlers get its messages."""
        self._commit_method = ""

    def raise_if_run_active(self) -> None:
        if self.is_run_active:
            raise NotAllowed(
                "run() hands out the messages of this consumer: poll(), next(), a loop or another run() would take them"
                " from its handlers. A handler has its message as argument; to read others, use another consumer."
            )

    def add_batch(self, batch: Batch, position: ReadPosition) -> AckTracker:
        """Add a delivered batch to its partition's tracker. A missing tracker is created at the acked `position`."""
        tracker = self.get(batch.name)
        if tracker is None:
            tracker = self[batch.name] = AckTracker(batch.name, position)
        tracker.add_batch(batch)
        return tracker

    def check_commit_method(self, method: str) -> None:
        """Record that a handler commits by `method`, "commit" or "transaction". Raises NotAllowed if a handler has
        committed by the other method before."""
        if not self or CURRENT_MESSAGE.get() is None:
            return
        if self._commit_method not in ("", method):
            raise NotAllowed(
                "Handlers of run() commit by commit(), or in transactions, not by both: the commit() of one could move"
                " back the offset that the transaction of another has just committed. Use commit_offsets(consumer)"
                " everywhere, also in a transaction of nothing else."
            )
        self._commit_method = method

    def revoke(self, name: PartitionName) -> None:
        """Start no more handlers for the partition. Running handlers may end and ack."""
        tracker = self.get(name)
        if tracker is not None:
            tracker.revoked = True

    def unrevoke(self, name: PartitionName) -> None:
        tracker = self.get(name)
        if tracker is not None and tracker.revoked:
            tracker.revoked = False
            self.on_unrevoked()

    def handler_ended(self, tracker: AckTracker) -> None:
        tracker.active_handlers -= 1
        if tracker.revoked and not tracker.active_handlers:
            self.on_handlers_idle()

    def invalidate(self, name: PartitionName) -> None:
        """Remove the partition's tracker after a seek or the loss of the partition. Later acks for it are ignored."""
        tracker = self.pop(name, None)
        if tracker is not None:
            tracker.invalid = tracker.revoked = True
