"""Read positions of a consumer: what was delivered, acked and committed, by partition.

An ack says that a message's handling is complete. A loop acks its message when it requests the next one, `poll` acks
the messages of the `poll` before, and closing the consumer without an error acks all delivered messages. In manual mode
only `commit` acks. Handlers of `run` ack in any order. A partition's offset may be committed up to its first unacked
message. `Positions` keeps a revoked partition until the consumer has released it, because its messages may still be
acked. It removes a lost partition: one that another member owns without a release by this consumer. After a rolled back
transaction with offsets, `rewind_to_committed` in `external_offsets.py` moves the positions back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import attrgetter

from tfmq.client.consumer.ack_tracker import AckTracker, AckTrackers
from tfmq.client.consumer.message import CURRENT_MESSAGE, UNKNOWN, Batch, ReadPosition, ReceivedMessage, partition_of
from tfmq.errors import BadRequest, Fenced, LogTruncated, OffsetOutOfRange, TfmqError
from tfmq.offsets.storage import PartitionName as PartitionName


class Positions:
    """Delivered, acked and committed positions of all partitions of one consumer.

    `current` is the message that a loop works on. To be fast, a loop sets `current` for each message, and does nothing
    else here. `ready` is the batch that is being delivered. A loop gets its list of messages from `hand_out` and
    iterates over it.
    """

    def __init__(self, *, manual: bool = False) -> None:
        self.current: ReceivedMessage | None = None
        self.ready: Batch | None = None
        self.ack_trackers = AckTrackers()
        """For each partition, which messages delivered to handlers of `run` are acked."""
        self._manual = manual
        self._polled: dict[PartitionName, ReadPosition] = {}
        self._delivered: dict[PartitionName, ReadPosition] = {}
        self._acked: dict[PartitionName, ReadPosition] = {}
        self.committed: dict[PartitionName, int | None] = {}
        """By partition, the last committed offset that this consumer knows of; None: no offset is committed."""
        self.incarnations: dict[PartitionName, int] = {}
        self._start_offsets: dict[PartitionName, int] = {}
        self.uncommitted: dict[PartitionName, int] = {}
        """In manual mode, by partition: the offset after the last delivered message, until this offset is committed."""
        self._delegated: dict[PartitionName, int] = {}
        self._loop_partition: PartitionName | None = None
        self._loop_messages: list[ReceivedMessage] = []
        self.stopped = False
        self._invalidated_loop_partition: PartitionName | None = None
        self._removed: set[PartitionName] = set()
        self.lost: set[PartitionName] = set()
        """Partitions lost while their messages were handled or uncommitted, if no Fenced was raised for that yet."""

    # Partitions

    def add(self, name: PartitionName, position: ReadPosition, saved: int | None = None, incarnation: int = 0) -> None:
        """Start reading a partition at `position`. `saved`: its committed offset; `incarnation`: that of its topic."""
        self.committed[name] = saved
        self.incarnations[name] = incarnation
        if saved is None:
            self._start_offsets[name] = position.offset
        # This line is the last because Ctrl-C can interrupt at any line, and a partition in `_acked` counts as read.
        self._acked[name] = position

    def remove(self, name: PartitionName) -> None:
        self._discard_delivered(name)
        self._removed.add(name)
        for by_partition in (self._acked, self.committed, self.incarnations, self._start_offsets):
            by_partition.pop(name, None)

    def remove_lost(self, name: PartitionName) -> bool:
        """Remove a partition that another member owns now. Return whether that member may also get messages that this
        consumer has delivered."""
        known = self._acked.get(name)
        unsaved = known is not None and known.offset != self.committed[name]
        open_ended = self.is_in_progress(name) or name in self.uncommitted
        self.remove(name)
        if open_ended:
            self.lost.add(name)
        return open_ended or unsaved

    def reassigned_after_loss(self, message: ReceivedMessage | None = None) -> list[PartitionName]:
        """Return the partitions that were lost and assigned again, if no Fenced was raised for the loss yet. With
        `message`, consider only the partition of this message."""
        own = None if message is None else partition_of(message)
        return [name for name in self.lost if name in self and own in (None, name)]

    def raise_if_lost(self, refused: Iterable[PartitionName] = (), message: ReceivedMessage | None = None) -> None:
        """Raise Fenced for partitions that were lost, and for partitions whose commit was refused (`refused`), if there
        are any.

        Each loss is raised only once. With `message`, only its partition is considered. If `message` is None in a
        handler, the partition of the handler's own message is considered.
        """
        lost = sorted(self.lost.union(refused))
        message = message or CURRENT_MESSAGE.get()
        if message is not None:
            lost = [name for name in lost if name == partition_of(message)]
        self.lost.difference_update(lost)
        if lost:
            raise Fenced(
                f"{', '.join(map(str, lost))}: another member of the group owns it by now; the uncommitted messages"
                " that were delivered here are delivered again there.",
                partitions=[list(name) for name in lost],
            )

    def is_in_progress(self, name: PartitionName) -> bool:
        """Return whether a loop, a caller of `poll` or a handler may be working on a message of the partition."""
        tracker = self.ack_trackers.get(name)
        active = tracker is not None and tracker.active_handlers > 0
        return active or name in self._polled or name == self._loop_partition

    def seek(self, name: PartitionName, position: ReadPosition) -> None:
        """Continue at `position`. Everything before it counts as acked; unacked messages count as not delivered."""
        self._discard_delivered(name)
        self._start_offsets.pop(name, None)
        self._acked[name] = position

    def __contains__(self, name: object) -> bool:
        return name in self._acked

    # Delivery

    def set_ready_batch(self, batch: Batch) -> None:
        """Make `batch` the next batch to deliver. The former batch must be delivered completely. A batch without
        messages only moves the position past filtered-out messages."""
        self.ready = batch
        if batch.messages:
            return
        if self.ack_trackers.get(batch.name) is not None:
            self.dispatch_ready_batch()
        elif batch.name in self._polled:
            self._polled[batch.name] = batch.end_position
        else:
            self._ack_through(batch.name, batch.end_position)

    def ready_messages(self) -> list[ReceivedMessage]:
        return [] if self.ready is None else self.ready.messages

    def hand_out(self) -> list[ReceivedMessage]:
        """Return the list of ready messages. A loop iterates over the list, and `stop` ends the loop by emptying it."""
        self._loop_partition = None if self.ready is None else self.ready.name
        self._loop_messages = self.ready_messages()
        return [] if self.stopped else self._loop_messages

    def stop(self) -> None:
        """End a loop after the current message, without acking it. May be called in threads and signal handlers."""
        self.stopped = True
        self._loop_messages.clear()

    def take_ready_messages(self, count: int) -> list[ReceivedMessage]:
        ready = self.ready
        if ready is None:
            return []
        messages = ready.messages[:count]
        if messages:
            self._polled[ready.name] = self._batch_position_after(messages[-1])
            self._remove_first(ready, len(messages))
        return messages

    def dispatch_ready_batch(self) -> AckTracker | None:
        """Move the ready batch to the ack tracker of its partition, so that handlers get its messages. Return the
        tracker, or None if no batch is ready."""
        ready, self.ready = self.ready, None
        return None if ready is None else self.ack_trackers.add_batch(ready, self._acked[ready.name])

    def ack_delivered(self) -> None:
        """Ack all messages delivered to a loop or by `poll`; in manual mode only record their delivery. Called when the
        user requests more messages, or leaves the consumer without an error."""
        current, ready = self._loop_message(), self.ready
        for name, position in self._unacked_positions():
            self._ack_through(name, position)
            if (
                self._manual
                and name in self
                and position.offset not in (self.committed[name], self._delegated.get(name))
            ):
                self.uncommitted[name] = position.offset
        self._polled.clear()
        self.current = self._loop_partition = self._invalidated_loop_partition = None
        if not self._manual:
            self.lost.clear()
        if current is None or ready is None or partition_of(current) != ready.name:
            return
        if ready.ends_with(current):
            self.ready = None
        else:
            self._remove_first(ready, bisect_right(ready.messages, current.offset, key=_offset))

    def ack_all(self) -> None:
        """For `commit()`, ack all delivered messages, also the current one. If handlers get the messages, ack only up
        to the position that `_committable` returns."""
        for name, position in (*self._delivered.items(), *self._unacked_positions()):
            self._advance_acked(name, position)
        for name in self.ack_trackers:
            self._advance_acked(name, self._committable(name))

    def ack_through(self, message: ReceivedMessage) -> PartitionName:
        """For `commit(message)`, ack all messages of a partition up to and including `message`. Return the partition.

        If handlers of `run` receive the messages, only `message` itself is acked, and the acked position stops at the
        first unacked message. Raises BadRequest if this consumer did not deliver `message`, Fenced if its partition was
        reassigned.
        """
        name, next_position = self._check_delivered(message)
        tracker = self.ack_trackers.get(name)
        if tracker is not None:
            tracker.ack(message)
            next_position = tracker.position
        self._advance_acked(name, next_position)
        return name

    def position_after(self, message: ReceivedMessage) -> tuple[PartitionName, ReadPosition]:
        """Return the partition of `message` and the position after it.

        Raises BadRequest if this consumer did not deliver `message`, or if it was delivered to a handler and an earlier
        message of the partition is not acked. Raises Fenced if the partition was reassigned.
        """
        name, next_position = self._check_delivered(message)
        tracker = self.ack_trackers.get(name)
        return name, next_position if tracker is None else self._contiguous_position_after(name, message)

    def _check_delivered(self, message: ReceivedMessage) -> tuple[PartitionName, ReadPosition]:
        name, next_position = partition_of(message), self._batch_position_after(message)
        if name not in self._acked:
            self._raise_if_removed(name)
            raise BadRequest(f"This consumer does not read {name}, so it cannot commit a message of it.")
        if next_position.offset > self.delivered_position(name).offset:
            self._raise_if_removed(name)
            raise BadRequest(f"The message at offset {message.offset} of {name} was not delivered yet.")
        return name, next_position

    def drop_ready_batch(self) -> None:
        """Discard the undelivered messages of the ready batch. A loop over these ends at once."""
        if self.ready is not None:
            self.ready.messages.clear()
            self.ready = None

    # Queries

    def delivered_position(self, name: PartitionName) -> ReadPosition:
        positions = [self._acked[name], *(position for each, position in self._unacked_positions() if each == name)]
        if name in self._delivered:
            positions.append(self._delivered[name])
        tracker = self.ack_trackers.get(name)
        if tracker is not None:
            positions.append(tracker.end_position)
        return max(positions)

    def acked_position(self, name: PartitionName) -> ReadPosition:
        """Return the position before which everything of the partition is acked."""
        current = self._loop_message()
        if current is not None and not self._manual and partition_of(current) == name:
            self._advance_acked(name, ReadPosition(current.offset, current.ordinal, current.origin.epoch))
        tracker = self.ack_trackers.get(name)
        if tracker is not None and not self._manual:
            self._advance_acked(name, tracker.position)
        return self._acked[name]

    def uncommitted_positions(self, names: Iterable[PartitionName] | None = None) -> dict[PartitionName, ReadPosition]:
        """Return the acked positions that are not committed yet: of the partitions `names`, or of all."""
        read = self._acked if names is None else [name for name in names if name in self._acked]
        positions = {name: self.acked_position(name) for name in read}
        return {name: position for name, position in positions.items() if position.offset != self.committed[name]}

    def transaction_positions(self) -> dict[PartitionName, ReadPosition]:
        """Return the positions that a transaction is to commit: in each partition, after all delivered messages.

        In a handler, return only the position after the handler's own message. Another handler's transaction may commit
        a later offset of its partition first, and this transaction must not move that offset back. A partition is left
        out if its position is committed already or if it delivered nothing, because the loss of such a partition must
        not fence the transaction. Raises BadRequest in a handler if an earlier message of the partition is not acked.
        """
        message = CURRENT_MESSAGE.get()
        if message is not None and self.ack_trackers.get(partition_of(message)) is not None:
            name = partition_of(message)
            positions = {name: self._contiguous_position_after(name, message)}
        else:
            positions = {name: self._committable(name) for name in self._acked}
        known = {name: self._start_offsets.get(name, self.committed[name]) for name in positions}
        return {name: position for name, position in positions.items() if position.offset != known[name]}

    def delegate_to_transaction(self, positions: Mapping[PartitionName, ReadPosition]) -> None:
        """Record that a transaction will commit `positions`. If one of these partitions is revoked, it is released
        without waiting for the commit, because the consumer may never be informed of the commit."""
        for name, position in positions.items():
            self._delegated[name] = position.offset
            if self.uncommitted.get(name, UNKNOWN) <= position.offset:
                self.uncommitted.pop(name, None)

    def start_position(self, name: PartitionName) -> ReadPosition:
        """If the partition has no committed offset and there was no seek, return the position at which reading of the
        partition began. Otherwise return its acked position."""
        offset = self._start_offsets.get(name)
        return self._acked[name] if offset is None else ReadPosition(offset, UNKNOWN, UNKNOWN)

    def mark_committed_by_transaction(self, positions: Mapping[PartitionName, ReadPosition]) -> None:
        """Record that a transaction committed `positions`, and ack all messages before them."""
        self.mark_committed(positions)
        for name, position in positions.items():
            # If the delivered position is lower, a `seek` has moved it back meanwhile: the position of the seek stays.
            if name in self and self.delivered_position(name).offset >= position.offset:
                self._advance_acked(name, position)

    def mark_committed(self, positions: Mapping[PartitionName, ReadPosition]) -> None:
        for name in positions.keys() & self.committed.keys():
            self.committed[name] = positions[name].offset
            self._start_offsets.pop(name, None)
            if self.uncommitted.get(name, UNKNOWN) <= positions[name].offset:
                self.uncommitted.pop(name, None)

    def names(self) -> Iterable[PartitionName]:
        return self._acked.keys()

    def _contiguous_position_after(self, name: PartitionName, message: ReceivedMessage) -> ReadPosition:
        """Return the position after a handler's message. Raises BadRequest if an earlier message is not acked."""
        tracker = self.ack_trackers.get(name)
        assert tracker is not None
        position = max(self._acked[name], tracker.position_if_acked(message))
        if position.offset <= message.offset:
            raise BadRequest(
                f"Messages of {name} before offset {message.offset} are not acked, so its offset cannot be committed"
                ' together with its results: that needs run(order="partition").'
            )
        return position

    def _committable(self, name: PartitionName) -> ReadPosition:
        """Return the position up to which `commit()` may commit: after all delivered messages. If handlers get the
        messages, it is before the first unacked message, and the calling handler's own message counts as acked."""
        tracker = self.ack_trackers.get(name)
        if tracker is None:
            return self.delivered_position(name)
        message = CURRENT_MESSAGE.get()
        own = message if message is not None and partition_of(message) == name else None
        return max(self._acked[name], tracker.position_if_acked(own))

    def _loop_message(self) -> ReceivedMessage | None:
        """Return the message that a loop works on; None without one, or after a seek or removal of its partition."""
        current = self.current  # A loop sets `current` without a lock, possibly after the partition was removed.
        if current is None or partition_of(current) == self._invalidated_loop_partition:
            return None
        return current

    def _unacked_positions(self) -> list[tuple[PartitionName, ReadPosition]]:
        """Return the positions after the unacked messages that `poll` or a loop delivered."""
        current = self._loop_message()
        found = list(self._polled.items())
        if current is not None:
            found.append((partition_of(current), self._batch_position_after(current)))
        return found

    def _ack_through(self, name: PartitionName, position: ReadPosition) -> None:
        """Ack all messages before `position`; in manual mode only record that they were delivered."""
        if self._manual and name in self:
            self._delivered[name] = position
        else:
            self._advance_acked(name, position)

    def _remove_first(self, ready: Batch, count: int) -> None:
        """Remove the first `count` messages of `ready`. Empty the old list, so that a loop over it ends."""
        rest = ready.messages[count:]
        ready.messages.clear()
        self.ready = ready._replace(messages=rest) if rest else None

    def _batch_position_after(self, message: ReceivedMessage) -> ReadPosition:
        """Return the position after `message`. If `message` is the last one of the batch `ready`, return the end
        position of the batch, which is also after the filtered-out messages that follow."""
        ready = self.ready
        if ready is not None and ready.ends_with(message):
            return ready.end_position
        return ReadPosition(message.next_offset, message.ordinal + 1, message.origin.epoch)

    def _raise_if_removed(self, name: PartitionName) -> None:
        if name in self._removed:
            self.lost.discard(name)
            raise Fenced(
                f"{name} was assigned to another member of the group after that message was delivered.",
                partitions=[list(name)],
            )

    def _advance_acked(self, name: PartitionName, position: ReadPosition) -> None:
        known = self._acked.get(name)
        if known is not None and position.offset > known.offset:
            self._acked[name] = position

    def _discard_delivered(self, name: PartitionName) -> None:
        self.ack_trackers.invalidate(name)
        for by_partition in (self._polled, self._delivered, self.uncommitted, self._delegated):
            by_partition.pop(name, None)
        if self._loop_partition == name:
            self._invalidated_loop_partition = name
        if self.ready is not None and self.ready.name == name:
            self.drop_ready_batch()
        if self.current is not None and partition_of(self.current) == name:
            self.current = None


_offset = attrgetter("offset")


def reset_offset(error: TfmqError, reset: str | None) -> int | None:
    """Return the offset at which to continue after the fetch error `error`; None if the partition must stop.

    `reset`: the option `on_out_of_range`. If it is None, the partition stops. If it is "earliest" or "latest" and the
    fetched offset was out of range, reading continues at the log's first or end offset. In both cases, if the log was
    truncated after a crash, reading continues at the end of what remained. After any other error the partition stops.
    """
    if reset is None:
        return None
    if isinstance(error, LogTruncated):
        return error.cut
    if isinstance(error, OffsetOutOfRange):
        return error.first if reset == "earliest" else error.end
    return None
