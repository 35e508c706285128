"""Batches of messages, the delivery handles of their messages, and the division of `send_many` into batches.

An open batch gathers payloads. A batch is encoded once, when its producer sequence is assigned, and is done when the
broker has stored it or it has failed. The delivery handle of a message is a tuple of its batch and its index in that
batch. Sending creates no other object per message, because the offset of a message is computed only on request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, Final, Protocol

from journal.record.format import FLAG_TOMBSTONE, HEADER_SIZE, tag_flag
from tfmq.client.connection.requests import Topic
from tfmq.client.operation import Future
from tfmq.client.send.delivery_time import IMMEDIATE, DeliveryTime, DueTimes
from tfmq.client.send.record_encoder import EncodedRecords, encode_each, encode_one, encode_shared, rewrite_ids
from tfmq.errors import TfmqError
from tfmq.ids import pack_id
from tfmq.message import Message, SendResult, text_bytes
from tfmq.protocol.commands import DUE_MAX, DURABILITY, DelayedBatch, TransactionDelayed
from tfmq.protocol.delayed_handle import Handles, decode_due_times


class DeliveryOwner(Protocol):
    """The part of a producer that delivery handles use."""

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None: ...

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]: ...

    def schedule_callback(self, callback: Callable[[], object]) -> None: ...


class BatchBuffer(Protocol):
    """Gathers messages for one partition in an open batch, and queues closed batches. Usually a `PartitionSender`."""

    topic: Topic
    open_batch: Batch | None

    @property
    def idle(self) -> bool: ...

    def push(self, batch: Batch) -> None: ...


class PreparedBatch(Protocol):
    """Records that are already encoded except for their ids, which depend on the producer sequence."""

    @property
    def count(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def encode(self, producer_id: int, sequence: int) -> EncodedRecords: ...


@dataclass(slots=True, eq=False, repr=False)
class Batch(Future):
    """Messages for one partition that are sent together. `partition`: the partition's number; -1: not chosen yet."""

    owner: DeliveryOwner
    topic: str
    partition: int
    room_bytes: int
    """How many bytes of records can still be added."""
    shared_attribute: bytes
    """The encoded attribute (see `attribute_part`) of records without key, tag and properties."""
    closes_at: float
    """When the batch is closed at the latest, in the connection's clock."""
    deadline: float = float("inf")
    """When the batch fails if it is not delivered, in the connection's clock."""
    overhead_bytes: int = field(init=False)
    """Bytes of a record without key, tag and properties, not counting its payload."""
    number: int = 0
    """How many batches the producer had created when it created this one: the order in which a topic's batches go."""
    buffer: BatchBuffer | None = None
    """The object whose `open_batch` is this batch; None: no partition is chosen yet, or the batch was created full."""
    size_bytes: int = 0
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
    """How many requests may have stored the batch."""
    send_count: int = 0
    """How often the batch was sent, also where the broker was busy."""
    last_error: TfmqError | None = None
    rerouted_from_partitions: int = 0
    """If the batch was rerouted from a deleted topic, the number of partitions that this topic had; else 0."""
    error: TfmqError | None = None
    positions: Sequence[tuple[int, int]] = ()
    durability: str = ""
    seen_indexes: set[int] | None = None
    user_callbacks: list[Callable[[Batch], object]] | None = None
    due_times: DueTimes | None = None
    """The due times of the messages if they are delayed; else None."""
    routed_topic: Topic | None = None
    """The topic's metadata at the time when the partition was chosen."""
    handles: Handles | None = None
    """The handles of delayed messages, which have no offsets before they are delivered; else None."""
    trace: str | None = None
    """The trace context of the first message that has one; the broker's spans for the batch are its children."""
    prepared: PreparedBatch | None = None
    """The records of a batch that was made from Arrow columns and has no `payloads`; else None."""

    def __post_init__(self) -> None:
        self.overhead_bytes = HEADER_SIZE + len(self.shared_attribute)

    # While the batch is open

    def add(self, payload: bytes | None, part: bytes | None, tag: str | None) -> int:
        """Append one message; return its index. `part`: its encoded attribute; None: use `shared_attribute`."""
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
        """Append a message without key, tag and properties. Return None if the message would fill the batch."""
        room = self.room_bytes - len(payload) - self.overhead_bytes
        if room <= 0:
            return None
        self.room_bytes = room
        self.payloads.append(payload)
        return Delivery((self, len(self.payloads) - 1))

    def close(self, full_room: int) -> None:
        """Close the batch for further messages. `full_room` is its initial capacity in bytes."""
        self.is_open = False
        self.count = len(self.payloads) if self.prepared is None else self.prepared.count
        self.size_bytes = full_room - self.room_bytes
        self.room_bytes = 0

    # While the batch is being sent

    def assign_sequence(self, producer_id: int, sequence: int) -> EncodedRecords:
        """Assign the producer sequence, and encode the records or, if they are already encoded, change their ids."""
        if self.encoded is not None:
            if (self.producer_id, self.sequence) != (producer_id, sequence):
                self.encoded = rewrite_ids(self.encoded, producer_id, sequence)
        elif self.prepared is not None:
            self.encoded = self.prepared.encode(producer_id, sequence)
        elif self.attribute_parts is None or self.flags is None:
            self.encoded = (
                encode_one(self.payloads[0], self.shared_attribute, producer_id, sequence)
                if len(self.payloads) == 1
                else encode_shared(self.payloads, self.shared_attribute, producer_id, sequence)
            )
        else:
            missing = len(self.payloads) - len(self.attribute_parts)
            parts = self.attribute_parts + [self.shared_attribute] * missing
            flags = self.flags + [0] * missing
            self.encoded = encode_each(self.payloads, parts, flags, producer_id, sequence)
        self.producer_id, self.sequence = producer_id, sequence
        self.payloads, self.attribute_parts, self.flags, self.prepared = [], None, None, None
        return self.encoded

    def clear_sequence(self) -> None:
        """Clear the producer sequence, so that `assign_sequence` must be called before the batch is sent."""
        self.producer_id = 0

    @property
    def last_sequence(self) -> int:
        return self.sequence + self.count - 1

    def set_stored(self, positions: Sequence[tuple[int, int]], durability: int) -> None:
        self.positions = positions
        self.durability = DURABILITY[durability]
        self._complete()

    def set_failed(self, error: TfmqError) -> None:
        self.error = error
        self._complete()

    def _complete(self) -> None:
        if self.done:
            return
        self.payloads, self.attribute_parts, self.flags, self.prepared = [], None, None, None
        if self.due_times is not None:
            self.due_times = DueTimes()
        if self.encoded is not None:
            self.encoded = self.encoded.without_data()
        self.is_open = False
        self.complete()
        if self.user_callbacks:
            for callback in self.user_callbacks:
                self.owner.schedule_callback(partial(callback, self))
            self.user_callbacks = None

    # Results

    def set_handles(self, reply: DelayedBatch | TransactionDelayed | None) -> None:
        """Store the handles of the delayed messages, which the broker's reply `reply` describes.

        Nothing is stored if `reply` is None, or if it does not describe as many messages as the batch has.
        """
        if reply is None:
            return
        dues = decode_due_times(reply.dues)
        if isinstance(reply, TransactionDelayed) and len(dues) == 1:  # The single due time applies to all messages.
            dues *= self.count
        if len(dues) == self.count and max(dues) <= DUE_MAX >= reply.first_number + self.count:
            self.handles = Handles(reply.store_id, reply.log_id, reply.first_number, dues)

    def offset_of(self, index: int) -> int | None:
        """Return the offset of message `index`; None if the broker did not return it."""
        if not self.positions or self.encoded is None:
            return None
        first, offset = self.positions[0]
        if len(self.positions) > 1:
            first, offset = self.positions[bisect_right(self.positions, index, key=itemgetter(0)) - 1]
        if first == index:
            return offset
        return offset + self.encoded.start_of(index) - self.encoded.start_of(first)

    def result_of(self, index: int, count: int | None = None) -> SendResult:
        """Return the result of message `index`. Raises the error of the batch.

        With `count`, return one result for `count` messages from `index` on, with a list of their delayed handles.
        """
        if self.error is not None:
            self.mark_seen(index, count or 1)
            raise self.error
        message_id = pack_id(self.producer_id, self.sequence + index)
        offset = self.offset_of(index)
        result = SendResult(self.topic, self.partition, offset, message_id, self.durability, count or 1)
        if self.handles is None:
            return result
        return result._replace(delayed=self.handles[index if count is None else slice(index, index + count)])

    def mark_seen(self, index: int, count: int) -> None:
        if self.seen_indexes is None:
            self.seen_indexes = set()
        self.seen_indexes.update(range(index, index + count))

    def unseen_failures(self) -> list[Delivery]:
        if self.error is None:
            return []
        seen = self.seen_indexes or ()
        return [Delivery((self, index)) for index in range(self.count) if index not in seen]

    def add_user_callback(self, callback: Callable[[Batch], object]) -> None:
        """Call `callback(self)` without any lock when the batch is done, also if it is done already."""
        if self.done:
            self.owner.schedule_callback(partial(callback, self))
        elif self.user_callbacks is None:
            self.user_callbacks = [callback]
        else:
            self.user_callbacks.append(callback)


class Delivery(tuple[Batch, int]):
    """The handle on one sent message. A handle costs little memory; keep as many as needed, or none."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> SendResult:
        """Return the send result. Waits at most `timeout` seconds (None: until delivered or failed).

        Raises the error of the send, and `TimedOut` if the message is not delivered in time. In the asyncio API it
        raises `NotAllowed` if the message is not delivered yet: use `await` there.
        """
        batch, index = self
        if not batch.done:
            batch.owner.wait_for((batch,), timeout)
        return batch.result_of(index)

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self[0].done

    def error(self) -> TfmqError | None:
        """Return the error of the send; None if it has not failed so far. `flush` will not report this error again."""
        batch, index = self
        if batch.error is not None:
            batch.mark_seen(index, 1)
        return batch.error

    def peek(self) -> TfmqError | None:
        """Return the error as `error` does, but `flush` will still report the error."""
        return self[0].error

    def add_callback(self, callback: Callable[[Delivery], object]) -> None:
        """Call `callback(self)` once the message is delivered or failed, in the thread that reads replies.

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
    """The handle on all messages of one `send_many`. `runs`: ranges of messages as (batch, first index, count)."""

    def __init__(self, owner: DeliveryOwner) -> None:
        self.owner = owner
        self.runs: list[tuple[Batch, int, int]] = []

    def add(self, batch: Batch, first: int, count: int) -> None:
        """Add `count` messages of `batch`, starting at index `first`."""
        if self.runs:
            last, start, length = self.runs[-1]
            if last is batch and start + length == first:
                self.runs[-1] = (batch, start, length + count)
                return
        self.runs.append((batch, first, count))

    def __len__(self) -> int:
        return sum(count for _, _, count in self.runs)

    @property
    def batches(self) -> list[Batch]:
        return list(dict.fromkeys(batch for batch, _, _ in self.runs))

    def result(self, timeout: float | None = None) -> list[SendResult]:
        """Return one result per batch: the number of its messages, and the offset and id of its first message.

        Waits at most `timeout` seconds (None: no limit). Raises the error of the first failed batch, or `TimedOut`.
        """
        self.owner.wait_for(self.batches, timeout)
        return self._results()

    def _results(self) -> list[SendResult]:
        return [batch.result_of(first, count) for batch, first, count in self.runs]

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return all(batch.done for batch, _, _ in self.runs)

    def add_callback(self, callback: Callable[[Deliveries], object]) -> None:
        """Call `callback(self)` once all messages are delivered or failed, in the thread that reads replies.

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


CHUNK_COUNT: Final = 500
"""Number of payloads in the first chunk. The average record size in a chunk decides the size of the next chunk."""
CHUNK_COUNT_MAX: Final = 50_000
FILL_RATIO: Final = 0.95
"""The next chunk should fill this fraction of a batch, estimated from the average record size in the last chunk."""
PLAIN_TYPES: Final = frozenset((bytes, str))


class PayloadChunker:
    """Reads the user's iterable in chunks. Iterating may block or send, so operations call `read` by `CallUserCode`."""

    def __init__(self, payloads: Iterable[Any]) -> None:
        if isinstance(payloads, str | bytes | bytearray | memoryview | Message | Mapping):
            raise TypeError(
                f"send_many takes an iterable of payloads, not one {type(payloads).__name__}: use send, or a list."
            )
        if not isinstance(payloads, Iterable) and not hasattr(payloads, "__getitem__"):
            raise TypeError(f"send_many takes an iterable of payloads, not {payloads!r}: use a list.")
        self._iterator = iter(payloads)
        self.count = CHUNK_COUNT
        self.chunk: list[Any] = []

    def read(self) -> None:
        """Read the next chunk into `chunk`, which is empty at the end of the iterable."""
        self.chunk = list(islice(self._iterator, self.count))

    def as_bytes(self) -> list[bytes] | None:
        """Return the chunk's payloads as bytes; None if an item is neither bytes nor text."""
        types = set(map(type, self.chunk))
        if not types <= PLAIN_TYPES:
            return None
        if str not in types:
            return self.chunk
        return [text_bytes(each) if type(each) is str else each for each in self.chunk]

    def adjust_count(self, size_bytes: int, batch_bytes: int) -> None:
        """Set the number of payloads in the next chunk. `size_bytes`: the total size of the last chunk's records."""
        fitting = FILL_RATIO * batch_bytes * len(self.chunk) / size_bytes
        self.count = max(1, min(CHUNK_COUNT_MAX, int(fitting)))


def with_delivery_time(item: Any, when: DeliveryTime) -> Message:
    """Return the item as a message. If the message has no delivery time of its own, its delivery time is `when`."""
    message = item if isinstance(item, Message) else Message(item)
    own = message.delay is not None or message.deliver_at is not None
    if own or when == IMMEDIATE:
        return message
    return message._replace(delay=when.delay, deliver_at=when.deliver_at)


def batch_ends(sizes: Sequence[int], batch_bytes: int, overhead: int) -> list[int]:
    """Divide payloads into batches of up to `batch_bytes` or of one payload. Return the end index of each batch."""
    ends = list(accumulate([size + overhead for size in sizes]))
    if ends[-1] <= batch_bytes:
        return [len(sizes)]
    cuts, first, start = [], 0, 0
    while first < len(sizes):
        first = max(bisect_right(ends, start + batch_bytes), first + 1)
        start = ends[first - 1]
        cuts.append(first)
    return cuts
