"""Batches of messages, and the delivery handles of their messages.

A batch gathers payloads while it is open, is encoded once when its producer sequence is assigned, and is done when the
broker has replied or it failed. A handle is a tuple of batch and index. The offset of a message is computed only on
request, so that no other object is created per message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from journal.record.format import FLAG_TOMBSTONE, HEADER_SIZE, tag_flag
from tfmq.client.operation import Future
from tfmq.client.send.delivery_time import DueTimes
from tfmq.client.send.record_encoder import EncodedRecords, attribute_part, encode_each, encode_shared, rewrite_ids
from tfmq.errors import TfmqError
from tfmq.ids import pack_id
from tfmq.message import SendResult, encode_attribute
from tfmq.protocol.commands import DUE_MAX, DURABILITY
from tfmq.protocol.delayed_handle import Handles, decode_due_times

if TYPE_CHECKING:
    from tfmq.client.connection.requests import Topic
    from tfmq.protocol.commands import DelayedBatch as Told
    from tfmq.protocol.commands import TransactionDelayed


class DeliveryOwner(Protocol):
    """The part of a producer that delivery handles use."""

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None: ...

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]: ...

    def schedule_callback(self, callback: Callable[[], object]) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class Batch(Future):
    """Messages for one partition that are sent together. `partition` -1: not chosen yet."""

    owner: DeliveryOwner
    topic: str
    partition: int
    room_bytes: int
    """Bytes that can still be added."""
    born_ms: InitVar[int]
    closes_at: float
    """When the batch is closed at the latest."""
    size_bytes: int = 0
    deadline: float = float("inf")
    """When the batch fails."""
    shared_attribute: bytes = field(init=False)
    overhead_bytes: int = field(init=False)
    """Bytes that a record without key, tag and properties adds to its payload."""
    payloads: list[bytes] = field(default_factory=list)
    attribute_parts: list[bytes] | None = None
    flags: list[int] | None = None
    is_open: bool = True
    is_urgent: bool = False
    count: int = 0
    producer_id: int = 0
    sequence: int = 0
    encoded: EncodedRecords | None = None
    attempts: int = 0
    last_error: TfmqError | None = None
    rerouted_from_partitions: int = 0
    """Number of partitions of the deleted topic that the batch was rerouted from; else 0."""
    error: TfmqError | None = None
    positions: Sequence[tuple[int, int]] = ()
    durability: str = ""
    seen_indexes: set[int] | None = None
    user_callbacks: list[Callable[[Batch], object]] | None = None
    due_times: DueTimes | None = None
    """Of delayed messages, which the broker holds until each is due; else None."""
    routed_topic: Topic | None = None
    """The topic's metadata at the time when the partition was chosen."""
    handles: Handles | None = None
    """Of delayed messages, which have these instead of offsets."""

    def __post_init__(self, born_ms: int) -> None:
        self.shared_attribute = attribute_part(encode_attribute(born_ms))
        self.overhead_bytes = HEADER_SIZE + len(self.shared_attribute)

    # While the batch is open

    def add(self, payload: bytes | None, part: bytes | None, tag: str | None) -> int:
        """Append one message and return its index. `part` None: the shared attribute bytes."""
        index = len(self.payloads)
        flag = tag_flag(tag) if tag else 0
        if payload is None:
            flag |= FLAG_TOMBSTONE
            payload = b""
        if (part is not None or flag) and self.attribute_parts is None:
            self.attribute_parts = [self.shared_attribute] * index
            self.flags = [0] * index
        if self.attribute_parts is not None and self.flags is not None:
            self.attribute_parts += [self.shared_attribute] * (index - len(self.attribute_parts))
            self.flags += [0] * (index - len(self.flags))
            self.attribute_parts.append(self.shared_attribute if part is None else part)
            self.flags.append(flag)
        self.payloads.append(payload)
        self.room_bytes -= len(payload) + HEADER_SIZE + len(self.shared_attribute if part is None else part)
        return index

    def add_plain(self, payload: bytes) -> Delivery | None:
        """Append a message without key, tag and properties, unless it would fill the batch."""
        room = self.room_bytes - len(payload) - self.overhead_bytes
        if room <= 0:
            return None
        self.room_bytes = room
        self.payloads.append(payload)
        return Delivery((self, len(self.payloads) - 1))

    def close(self, full_room: int) -> None:
        """Close the batch for further messages. `full_room` is its initial capacity in bytes."""
        self.is_open = False
        self.count = len(self.payloads)
        self.size_bytes = full_room - self.room_bytes
        self.room_bytes = 0

    # While the batch is being sent

    def assign_sequence(self, producer_id: int, sequence: int) -> EncodedRecords:
        """Assign the producer sequence. Encode the records, or change the ids of encoded records."""
        if self.encoded is not None:
            if (self.producer_id, self.sequence) != (producer_id, sequence):
                self.encoded = rewrite_ids(self.encoded, producer_id, sequence)
        elif self.attribute_parts is None or self.flags is None:
            self.encoded = encode_shared(self.payloads, self.shared_attribute, producer_id, sequence)
        else:
            missing = len(self.payloads) - len(self.attribute_parts)
            parts = self.attribute_parts + [self.shared_attribute] * missing
            flags = self.flags + [0] * missing
            self.encoded = encode_each(self.payloads, parts, flags, producer_id, sequence)
        self.producer_id, self.sequence = producer_id, sequence
        self.payloads, self.attribute_parts, self.flags = [], None, None
        return self.encoded

    def clear_sequence(self) -> None:
        """Clear the producer sequence; `assign_sequence` sets the next one."""
        self.producer_id = 0

    @property
    def last_sequence(self) -> int:
        return self.sequence + self.count - 1

    def set_stored(self, positions: Sequence[tuple[int, int]], durability: int) -> None:
        """Complete the batch as stored. `positions` may be () where they are unknown."""
        self.positions = positions
        self.durability = DURABILITY[durability]
        self._complete()

    def set_failed(self, error: TfmqError) -> None:
        """Complete the batch with an error."""
        self.error = error
        self._complete()

    def _complete(self) -> None:
        if self.done:
            return
        self.payloads, self.attribute_parts, self.flags = [], None, None
        if self.due_times is not None:
            self.due_times = DueTimes()
        if self.encoded is not None:
            self.encoded = self.encoded._replace(data=bytearray(), blocks=[])
        self.is_open = False
        self.complete()
        if self.user_callbacks:
            for callback in self.user_callbacks:
                self.owner.schedule_callback(partial(callback, self))
            self.user_callbacks = None

    # Results

    def set_handles(self, told: Told | TransactionDelayed | None) -> None:
        """Store the handles of the reply. Ignored if it has none, or if they do not match the batch."""
        if told is None:
            return
        dues = self._decode_due_times(told.dues)
        if len(dues) == self.count and max(dues) <= DUE_MAX >= told.first_number + self.count:
            self.handles = Handles(told.store_id, told.log_id, told.first_number, dues)

    def _decode_due_times(self, packed: bytes) -> array[int]:
        return decode_due_times(packed)

    def offset_of(self, index: int) -> int | None:
        """Return the offset of message `index`; None where the broker did not return it."""
        if not self.positions or self.encoded is None:
            return None
        place = bisect_right(self.positions, index, key=itemgetter(0)) - 1
        first, offset = self.positions[place]
        return offset + self.encoded.start_of(index) - self.encoded.start_of(first)

    def result_of(self, index: int, count: int = 1) -> SendResult:
        """Return the result of `count` messages from `index` on. Raises the error of the batch."""
        if self.error is not None:
            self.mark_seen(index, count)
            raise self.error
        message_id = pack_id(self.producer_id, self.sequence + index)
        offset = self.offset_of(index)
        result = SendResult(self.topic, self.partition, offset, message_id, self.durability, count)
        return result if self.handles is None else result._replace(delayed=self.handles[index])

    def results_of(self, first: int, count: int) -> SendResult:
        """Return one result for `count` messages sent together. Raises as `result_of`."""
        result = self.result_of(first, count)
        return result if self.handles is None else result._replace(delayed=self.handles[first : first + count])

    def mark_seen(self, index: int, count: int) -> None:
        """Record that the caller has seen the outcome of these messages."""
        if self.seen_indexes is None:
            self.seen_indexes = set()
        self.seen_indexes.update(range(index, index + count))

    def unseen_failures(self) -> list[Delivery]:
        """Return the deliveries of a failed batch whose outcome no caller has seen."""
        if self.error is None:
            return []
        seen = self.seen_indexes or ()
        return [Delivery((self, index)) for index in range(self.count) if index not in seen]

    def add_user_callback(self, callback: Callable[[Batch], object]) -> None:
        """Run `callback(self)` outside of every lock once the batch is done."""
        if self.done:
            self.owner.schedule_callback(partial(callback, self))
        elif self.user_callbacks is None:
            self.user_callbacks = [callback]
        else:
            self.user_callbacks.append(callback)


class Delivery(tuple[Batch, int]):
    """The handle on one sent message. It costs little memory; keep as many as needed, or none."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> SendResult:
        """Return the send result. Waits at most `timeout` seconds (None: until delivered or failed).

        Raises the error of the send, `TimedOut` if it is not done in time, and in the asyncio API `NotAllowed` if it is
        not done: use `await` there.
        """
        batch, index = self
        if not batch.done:
            batch.owner.wait_for((batch,), timeout)
        return batch.result_of(index)

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self[0].done

    def error(self) -> TfmqError | None:
        """Return the error, or None if there is none so far. Marks the outcome as seen."""
        batch, index = self
        if batch.error is not None:
            batch.mark_seen(index, 1)
        return batch.error

    def peek(self) -> TfmqError | None:
        """Return the error as `error` does, without marking the outcome as seen."""
        return self[0].error

    def add_callback(self, callback: Callable[[Delivery], object]) -> None:
        """Call `callback(self)` once it is done, in the thread that reads replies.

        The callback must not wait for the broker.
        """
        self[0].add_user_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, SendResult]:
        batch, index = self
        if not batch.done:
            yield from batch.owner.wait_async((batch,))
        return batch.result_of(index)

    def __repr__(self) -> str:
        batch, index = self
        state = "on its way" if not batch.done else f"failed: {batch.error}" if batch.error else "delivered"
        return f"<Delivery to {batch.topic}/{batch.partition} #{index} {state}>"


class Deliveries:
    """The handle on all messages of one `send_many`: runs of (batch, first index, count)."""

    def __init__(self, owner: DeliveryOwner) -> None:
        self.owner = owner
        self.runs: list[tuple[Batch, int, int]] = []
        self.complete = False

    def add(self, batch: Batch, first: int, count: int) -> None:
        """Add `count` messages of `batch`, starting at index `first`."""
        if self.runs:
            last, start, length = self.runs[-1]
            if last is batch and start + length == first:
                self.runs[-1] = (batch, start, length + count)
                return
        self.runs.append((batch, first, count))

    def __len__(self) -> int:
        """Return the number of messages."""
        return sum(count for _, _, count in self.runs)

    @property
    def batches(self) -> list[Batch]:
        return list(dict.fromkeys(batch for batch, _, _ in self.runs))

    def result(self, timeout: float | None = None) -> list[SendResult]:
        """Return the results, one per batch: with its `count` and the first message's offset and id.

        Waits at most `timeout` seconds. Raises the error of the first failed batch, or `TimedOut`.
        """
        self.owner.wait_for(self.batches, timeout)
        return self._results()

    def _results(self) -> list[SendResult]:
        return [batch.results_of(first, count) for batch, first, count in self.runs]

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return all(batch.done for batch, _, _ in self.runs)

    def add_callback(self, callback: Callable[[Deliveries], object]) -> None:
        """Call `callback(self)` once all are done, in the thread that reads replies.

        The callback must not wait for the broker.
        """
        left = set(self.batches)

        def finished(batch: Batch) -> None:
            left.discard(batch)
            if not left:
                callback(self)

        if not left:
            self.owner.schedule_callback(partial(callback, self))
        for batch in list(left):
            batch.add_user_callback(finished)

    def __await__(self) -> Generator[Any, None, list[SendResult]]:
        yield from self.owner.wait_async(self.batches)
        return self._results()

    def __repr__(self) -> str:
        return f"<Deliveries of {len(self)} messages in {len(self.batches)} batches>"
