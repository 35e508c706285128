"""Sending of a transaction: batches, accumulator, pipeline, and producer sequences.

The messages of a batch are delivered by the commit, but the client frees the batch's records as soon as the broker has
acknowledged them. The batch object itself takes a few KiB, and is freed if no delivery handle refers to it. So a
transaction may be larger than memory.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from tfmq.backoff import Backoff, pause_seconds
from tfmq.client.connection.connection import READY, ClientConnection, PendingRequest
from tfmq.client.connection.requests import (
    TRANSACTION_PAUSE_SECONDS,
    TRANSACTION_PAUSE_SECONDS_MAX,
    Topic,
    request_until_not_busy,
)
from tfmq.client.operation import Event, Operation, ResultFuture, Wait
from tfmq.client.send.accumulator import KEYLESS, RecordAccumulator
from tfmq.client.send.batch import Batch, Delivery, DeliveryOwner
from tfmq.client.send.delivery_time import DueTimes, StampedDueTime, due_number
from tfmq.client.send.partition_sender import IN_FLIGHT_BATCHES_MAX, IN_FLIGHT_BYTES_MAX, ProducerIds
from tfmq.client.send.partitioner import choose_partition
from tfmq.client.send.record_encoder import EncodedRecords, birth_part
from tfmq.errors import (
    NOT_DONE,
    Busy,
    ConnectionFailed,
    HeuristicOutcome,
    SequenceGap,
    StaleProducer,
    TfmqError,
    TimedOut,
    TransactionError,
    TransactionRolledBack,
    TransactionState,
    UnknownProducer,
    UnknownTransaction,
)
from tfmq.ids import remaining_sequences
from tfmq.message import Message
from tfmq.protocol.commands import ACKS_WRITTEN, BeginTransaction, BeginTransactionReply, CommitMember, Produce


class TransactionDeliveryOwner(DeliveryOwner, Protocol):
    """The methods of a transaction that its delivery handles use."""

    def retain(self, batch: TransactionBatch) -> None:
        """Keep `batch` alive until its callbacks have run, also if the user has dropped all handles on it."""


class TransactionBatch(Batch):
    """Messages of one transaction for one partition. `incarnation`: that of the topic. Delays start at the commit."""

    __slots__ = ("first_block_count", "incarnation")

    owner: TransactionDeliveryOwner

    def __init__(
        self, owner: TransactionDeliveryOwner, topic: str, incarnation: int, partition: int, room: int, born_ms: int
    ) -> None:
        super().__init__(owner, topic, partition, room, birth_part(born_ms), float("inf"))
        self.incarnation = incarnation
        self.first_block_count = 0
        """Number of messages in the first block. The commit returns no offsets for later blocks."""

    @property
    def due_field(self) -> bytes | None:
        return None if self.due_times is None else self.due_times.pack_original()

    def assign_sequence(self, producer_id: int, sequence: int) -> EncodedRecords:
        encoded = super().assign_sequence(producer_id, sequence)
        self.first_block_count = encoded.blocks[0][1]
        return encoded

    def release_records(self) -> None:
        encoded = self.encoded
        if encoded is not None:
            ends = None if encoded.ends is None else array("I", encoded.ends[: self.first_block_count])
            self.encoded = EncodedRecords(bytearray(), [], encoded.record_size, ends)
        self.due_times = None

    def offset_of(self, index: int) -> int | None:
        """Return the offset of message `index`; None if unknown: a commit returns offsets only for the first block."""
        return super().offset_of(index) if index < self.first_block_count else None

    def add_user_callback(self, callback: Callable[[Batch], object]) -> None:
        if not self.done:
            self.owner.retain(self)
        super().add_user_callback(callback)


BATCH_BYTES: Final = 256 << 10
"""Size of a batch, the same as by default outside of transactions. Larger batches do not increase the throughput."""
ONE_REQUEST_BYTES: Final = 1 << 20
"""A larger transaction is sent while it grows, so that neither client nor broker has all of it in memory."""
CHECK_INTERVAL_BYTES: Final = 64 << 10
"""A transaction's size is computed only after it may have grown by this number of bytes, not at every message."""
DELAY_START: Final = 0.0
"""Start time recorded for all delays. It has no effect, because delays in a transaction start at its commit."""


class TransactionAccumulator:
    """The unsent messages of one transaction: an open batch per partition, and full batches.

    Order is kept per partition. The transaction uses the metadata that a topic had at its first message. If the topic
    is deleted and re-created before the commit, the broker therefore rejects the transaction, instead of storing some
    messages in the old topic and some in the new topic. Used under the driver's lock.
    """

    def __init__(self, owner: TransactionDeliveryOwner, accumulator: RecordAccumulator) -> None:
        self.shared_batches: dict[str, TransactionBatch] = {}
        """By topic name: the open batch to which `send` directly appends messages without a key."""
        self._owner = owner
        self._accumulator = accumulator
        self._topics: dict[str, Topic] = {}
        self._shared_delayed: dict[str, TransactionBatch] = {}
        self._open: dict[tuple[str, int, bool], TransactionBatch] = {}
        self._full: list[TransactionBatch] = []
        self._full_bytes = 0
        self._bytes_max = self._check_at_bytes = 0

    def is_known(self, topic: str) -> bool:
        return topic in self._topics or self._accumulator.is_known(topic)

    @property
    def is_empty(self) -> bool:
        return not self._full and not any(batch.payloads for batch in self._open.values())

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        accumulator = self._accumulator
        length = 0 if payload is None else len(payload)
        accumulator.check_size(length)
        part = accumulator.encode_attribute_part(message)
        due = due_number(message.delay, message.deliver_at)
        batch = self._open_batch_for(topic, message, due is not None)
        size = length + batch.overhead_bytes + len(part or b"")
        if size > batch.room_bytes and batch.payloads:
            self._close(batch)
            batch = self._open_batch_for(topic, message, due is not None)
        index = batch.add(payload, part, message.tag)
        if due is not None and batch.due_times is not None:
            batch.due_times.add(StampedDueTime(due, DELAY_START))
        self._bytes_max += size
        if batch.room_bytes <= 0:
            self._close(batch)
        return Delivery((batch, index))

    def append_many(
        self, topic: str, payloads: list[bytes], size_bytes: int, due: int | None = None
    ) -> tuple[TransactionBatch, int]:
        """Append payloads to one batch, as messages with the same due time and without key, tag and properties.

        `size_bytes` includes the overhead of each record. Return the batch and the index of the first payload in it.
        Raises `MessageTooLarge`.
        """
        self._accumulator.check_size(max(map(len, payloads)))
        batch = self._open_batch_for(topic, KEYLESS, due is not None)
        if size_bytes > batch.room_bytes and batch.payloads:
            self._close(batch)
            batch = self._open_batch_for(topic, KEYLESS, due is not None)
        if due is not None and batch.due_times is not None:
            batch.due_times.add(StampedDueTime(due, DELAY_START), len(payloads))
        first = len(batch.payloads)
        batch.payloads += payloads
        batch.room_bytes -= size_bytes
        self._bytes_max += size_bytes
        if batch.room_bytes <= 0:
            self._close(batch)
        return batch, first

    def exceeds(self, limit_bytes: int) -> bool:
        """Return whether more than `limit_bytes` are unsent. May return True up to `CHECK_INTERVAL_BYTES` too late."""
        if self._bytes_max <= max(limit_bytes, self._check_at_bytes):
            return False
        size = self.size_bytes()
        self._bytes_max = size + sum(batch.room_bytes for batch in self.shared_batches.values())
        self._check_at_bytes = self._bytes_max + CHECK_INTERVAL_BYTES
        return size > limit_bytes

    @property
    def batch_count(self) -> int:
        """Maximum number of batches that `drain_all` would return."""
        return len(self._full) + len(self._open)

    def size_bytes(self) -> int:
        return self._full_bytes + sum([BATCH_BYTES - batch.room_bytes for batch in self._open.values()])

    def drain_full(self) -> list[TransactionBatch]:
        full_batches, self._full, self._full_bytes = self._full, [], 0
        return full_batches

    def drain_all(self) -> list[TransactionBatch]:
        """Close, remove and return every batch that has messages."""
        for batch in list(self._open.values()):
            self._close(batch)
        self._bytes_max = self._check_at_bytes = 0
        return self.drain_full()

    def requeue(self, batches: list[TransactionBatch]) -> None:
        """Queue `batches` ahead of all other batches. `drain_all` has returned them, and they were not sent."""
        self._full[:0] = batches
        self._full_bytes += sum(batch.size_bytes for batch in batches)
        self._bytes_max += sum(batch.size_bytes for batch in batches)

    def invalidate_topics(self) -> None:
        for topic in self._topics.values():
            self._accumulator.invalidate_topic(topic)

    def _open_batch_for(self, topic: str, message: Message, delayed: bool) -> TransactionBatch:
        free = message.partition is None and message.key is None and self._accumulator.selector.per_batch
        shared = self._shared_delayed if delayed else self.shared_batches
        if free and topic in shared:
            return shared[topic]
        known = self._topics.get(topic) or self._pin_topic(topic)
        partition = choose_partition(self._accumulator.selector, known, message)
        batch = self._open.get((topic, partition, delayed))
        if batch is None:
            born_ms = int(self._accumulator.wall_clock() * 1000)
            batch = TransactionBatch(self._owner, topic, known.incarnation, partition, BATCH_BYTES, born_ms)
            batch.due_times = DueTimes() if delayed else None
            self._open[topic, partition, delayed] = batch
        if free:
            shared[topic] = batch
            if not delayed:
                # `send` appends to the shared batch without counting bytes here, so count all that the batch can take.
                self._bytes_max += batch.room_bytes
        return batch

    def _pin_topic(self, name: str) -> Topic:
        accumulator = self._accumulator
        entry = accumulator.topic_entry(name)
        assert entry.metadata is not None, "requested before"
        if accumulator.metadata.is_stale(name):
            # For later transactions, because this transaction uses the old metadata.
            accumulator.request_metadata(entry)
        self._topics[name] = entry.metadata
        return entry.metadata

    def _close(self, batch: TransactionBatch) -> None:
        delayed = batch.due_times is not None
        del self._open[batch.topic, batch.partition, delayed]
        shared = self._shared_delayed if delayed else self.shared_batches
        if shared.get(batch.topic) is batch:
            del shared[batch.topic]
        batch.close(BATCH_BYTES)
        if batch.count:
            self._full.append(batch)
            self._full_bytes += batch.size_bytes


BUFFER_BYTES: Final = 12 << 20
"""Maximum bytes of one transaction that are queued or in flight: 1.5 times the in-flight limit."""
SEQUENCE_ERRORS: Final = (SequenceGap, UnknownProducer, StaleProducer)
"""After these errors the transaction takes a new producer id: the broker forgot the id, or expects another sequence."""


class BeginFields(NamedTuple):
    """Fields of the BEGIN_TRANSACTION request.

    `xid`: the transaction's name; "": none, and the transaction ends with its connection. `group`: the producer group.
    `member`: the commit group in which the transaction is a member, if any.
    """

    xid: str = ""
    timeout_ms: int | None = None
    group: str = ""
    member: CommitMember | None = None


class Pipeline:
    """Begins a transaction that is too large for one request or has a name, and sends its batches while it grows.

    If the broker is busy, rejected batches are sent again later, with the same sequences. The broker accepts the
    batches of one producer id only in order, so after a rejected batch it rejects all following batches. Memory is
    bounded, because callers wait while `BUFFER_BYTES` are queued or in flight. The owner starts the operation `run` as
    a background task. Once `failure` is set, the transaction can only be rolled back.
    """

    def __init__(
        self,
        link: ClientConnection,
        sequences: ProducerSequencePool,
        beginning: BeginFields,
        seconds: float,
        epoch: int = 0,
    ) -> None:
        self.begin_fields = beginning
        self.xid = beginning.xid
        self.epoch = epoch
        """The transaction's number; 0 until it is begun. Given by the caller if another client has begun it."""
        self.failure: TfmqError | None = None
        self.already_committed = False
        """Whether the commit group has committed this member's sequence before. Then no transaction is begun."""
        self.unacked_bytes = 0
        """Bytes of batches that are queued or in flight."""
        self.batch_count = self.message_count = self.sent_bytes = 0
        """How many batches, messages and bytes the broker has acknowledged."""
        self.journalled_batches: list[weakref.ref[TransactionBatch]] = []
        """The acknowledged batches, in order. The references are weak, so a batch without delivery handles is freed."""
        self._link = link
        self._sequences = sequences
        self._seconds = seconds
        self._connection = 0
        self._queue: deque[TransactionBatch] = deque()
        self._in_flight: deque[tuple[TransactionBatch, PendingRequest]] = deque()
        self._in_flight_bytes = 0
        self._sequence: ProducerSequence | None = None
        self._sequence_unused = False  # Whether the broker has acknowledged no batch under this producer id yet.
        self._progress_at = 0.0
        self._queued_event = Event()
        self._changed_event = Event()

    # For the transaction

    def push(self, batches: Sequence[TransactionBatch]) -> None:
        if batches:
            self._queue.extend(batches)
            self.unacked_bytes += sum(batch.size_bytes for batch in batches)
            self._queued_event.complete()

    @property
    def has_room(self) -> bool:
        return self.unacked_bytes < BUFFER_BYTES

    def changed_event(self) -> Event:
        """Return the event that is set when the transaction is begun, batches are acknowledged, or sending fails."""
        if self._changed_event.done:
            self._changed_event = Event()
        return self._changed_event

    @property
    def begun(self) -> bool:
        return self.epoch > 0

    def unacked_batches(self) -> list[TransactionBatch]:
        return [*(batch for batch, _ in self._in_flight), *self._queue]

    def stop(self) -> None:
        """Stop after the transaction's end. Release its producer id unless a batch has failed or is in flight."""
        producer_sequence, self._sequence = self._sequence, None
        if producer_sequence is not None and not self._in_flight and self.failure is None:
            self._sequences.release(producer_sequence)
        self._changed_event.complete()

    def set_failure(self, error: Exception) -> None:
        failure = error if isinstance(error, TfmqError) else TransactionError(f"The client failed: {error!r}")
        if self.failure is None:
            self.failure = failure
        self._changed_event.complete()

    # The background task

    def run(self) -> Operation[None]:
        try:
            yield from self._begin()
            while not self.already_committed:
                self._send()
                if self._queue and not self._in_flight:
                    yield from self._change_sequence()  # The producer id has not enough sequences left for the batch.
                    continue
                yield Wait((self._queued_event, self._in_flight[0][1]) if self._in_flight else (self._queued_event,))
                if self._queued_event.done:
                    self._queued_event = Event()
                yield from self._process_replies()
        finally:
            for _, pending in self._in_flight:
                self._link.abandon(pending)

    def _begin(self) -> Operation[None]:
        link = self._link
        until = link.now() + self._seconds
        self._sequence = yield from self._sequences.acquire(until)
        self._sequence_unused = True
        if not self.begun:
            reply = yield from self._send_begin(until)
            self.epoch, self.xid = reply.epoch, reply.xid
            self.already_committed = not reply.epoch
        self._connection = link.connection_count
        self._changed_event.complete()

    def _send_begin(self, until: float) -> Operation[BeginTransactionReply]:
        """Send BEGIN_TRANSACTION; while the broker is busy, repeat it until the time `until`. Raises the last error.

        If the producer id is rejected, the request is repeated once with a new id. A transaction without a name ends
        with its connection. So after a lost connection a new transaction is begun.
        """
        named = bool(self.begin_fields.xid)
        id_replaced = False
        while True:
            producer_sequence = self._sequence
            assert producer_sequence is not None, "acquired before"
            producer_sequence.number += 1
            request = BeginTransaction(producer_sequence.producer_id, producer_sequence.number, *self.begin_fields)
            pending = yield from request_until_not_busy(
                self._link, request, until=until, in_background=True, repeat=named
            )
            if isinstance(pending.error, SEQUENCE_ERRORS) and not id_replaced:
                id_replaced = True
                self._sequence = yield from self._sequences.lease_new(until)
            elif (
                named
                or not isinstance(pending.error, ConnectionFailed)
                or not self._link.connection_count
                or self._link.now() >= until
            ):
                reply: BeginTransactionReply = pending.result()
                return reply

    # Sending

    def _send(self) -> None:
        most = IN_FLIGHT_BATCHES_MAX
        while self._queue and (
            not self._in_flight or (len(self._in_flight) < most and self._in_flight_bytes < IN_FLIGHT_BYTES_MAX)
        ):
            batch, producer_sequence = self._queue[0], self._sequence
            assert producer_sequence is not None, "begun"
            if batch.producer_id != producer_sequence.producer_id:
                if not producer_sequence.has_room_for(batch.count):
                    return  # `run` takes another producer id when all batches in flight are acknowledged.
                batch.assign_sequence(producer_sequence.producer_id, producer_sequence.sequence)
                producer_sequence.sequence += batch.count
            self._queue.popleft()
            encoded = batch.encoded
            assert encoded is not None, "numbered"
            fields = (batch.topic, batch.incarnation, batch.partition, batch.producer_id, batch.sequence, batch.count)
            request = Produce(*fields, ACKS_WRITTEN, encoded.blocks, batch.due_field, self.epoch)  # type: ignore[arg-type]
            pending = self._link.send_request(request, encoded.data, seconds=self._seconds, in_background=True)
            self._in_flight.append((batch, pending))
            self._in_flight_bytes += batch.size_bytes

    # Replies

    def _process_replies(self) -> Operation[None]:
        """Process replies. If the broker is busy or rejects an unused producer id, send again. Raise other errors."""
        backoff = Backoff(TRANSACTION_PAUSE_SECONDS, TRANSACTION_PAUSE_SECONDS_MAX)
        self._progress_at = self._link.now()
        while (refusal := self._ack_in_order()) is not None:
            for _, pending in self._in_flight:
                while not pending.done:
                    yield Wait((pending,))
            self._queue.extendleft(batch for batch, _ in reversed(self._in_flight))
            self._in_flight.clear()
            self._in_flight_bytes = 0
            if isinstance(refusal, SEQUENCE_ERRORS) and self._sequence_unused:
                yield from self._change_sequence()
            elif isinstance(refusal, Busy):
                pause = pause_seconds(refusal, backoff.advance())
                if self._link.now() + pause >= self._progress_at + self._seconds:
                    raise self._with_reason(refusal)
                yield Wait((), pause)
            else:
                raise self._with_reason(refusal)
            self._send()
            if self._in_flight:
                yield Wait((self._in_flight[0][1],))

    def _ack_in_order(self) -> TfmqError | None:
        """Process the replies in order, up to the first one that is missing or an error. Return the error, or None."""
        acked = self.batch_count
        while self._in_flight and self._in_flight[0][1].done:
            batch, pending = self._in_flight[0]
            if pending.error is not None:
                break
            self._in_flight.popleft()
            self._in_flight_bytes -= batch.size_bytes
            self.unacked_bytes -= batch.size_bytes
            batch.release_records()
            self.journalled_batches.append(weakref.ref(batch))
            self.batch_count += 1
            self.message_count += batch.count
            self.sent_bytes += batch.size_bytes
            self._sequence_unused = False
        if self.batch_count > acked:
            self._progress_at = self._link.now()
            self._changed_event.complete()
        first = self._in_flight[0][1] if self._in_flight else None
        return first.error if first is not None and first.done else None

    def _change_sequence(self) -> Operation[None]:
        self._sequence = yield from self._sequences.lease_new(self._link.now() + self._seconds)
        self._sequence_unused = False

    def _with_reason(self, error: TfmqError) -> TfmqError:
        """Return a copy of the error. Its text also says why sending failed, and whether messages are visible."""
        if not self.begin_fields.xid and self._link.connection_count != self._connection:
            reason = " The connection was lost, and with it the transaction."
        elif isinstance(error, UnknownTransaction | TransactionRolledBack):
            reason = " It timed out, or another client ended it."
        else:
            reason = ""
        if isinstance(error, TransactionState | HeuristicOutcome):
            visible = "Another client continued it: these messages are not in it."
        else:
            visible = "Nothing of it is visible."
        failure = type(error)(f"{error.sentence}{reason} {visible}", outcome=NOT_DONE)
        failure.__cause__ = error
        return failure


FREE_SEQUENCES_MAX = 1000
"""Maximum number of free producer ids in the pool. A new id costs little, because one request leases 16 ids."""


@dataclass(slots=True, eq=False)
class ProducerSequence:
    """A producer id for transactions, its next sequence, and `number`, which counts the transactions begun under it."""

    producer_id: int
    used_at: float
    sequence: int = 0
    number: int = 0

    def has_room_for(self, count: int) -> bool:
        return count <= remaining_sequences(self.sequence)


class ProducerSequencePool:
    """The producer ids that no transaction uses. `acquire` takes the id that was released last."""

    def __init__(self, link: ClientConnection, identities: ProducerIds) -> None:
        self._link = link
        self._producer_ids = identities
        self._free: list[ProducerSequence] = []

    def release(self, producer_sequence: ProducerSequence) -> None:
        """Return a producer id to the pool. Its `sequence` must be the sequence that the broker expects next."""
        producer_sequence.used_at = self._link.now()
        if len(self._free) < FREE_SEQUENCES_MAX:
            self._free.append(producer_sequence)

    def acquire(self, until: float) -> Operation[ProducerSequence]:
        """Return a free producer id, or else a newly leased one. Raises the errors that `lease_new` names."""
        # The broker removes idle producer ids, so ids that were idle for half of that time are not used any more.
        oldest = self._link.now() - self._link.limits["producer_idle_seconds"] / 2
        while self._free:
            producer_sequence = self._free.pop()
            if producer_sequence.used_at > oldest:
                return producer_sequence
        return (yield from self.lease_new(until))

    def lease_new(self, until: float) -> Operation[ProducerSequence]:
        """Return a newly leased producer id. Raises the broker's error; after `until` TimedOut or ConnectionFailed."""
        request = ResultFuture()
        self._producer_ids.acquire(request.set_outcome)
        while not request.done:
            remaining = until - self._link.now()
            if remaining <= 0:
                if self._link.state != READY and self._link.last_error is not None:
                    raise self._link.connection_failure("not done")
                raise TimedOut("The broker returned no producer id in time.", outcome="not done")
            yield Wait((request,), remaining)
        if request.error is not None:
            error: Any = request.error
            raise type(error)(error.sentence, outcome="not done")
        return ProducerSequence(request.result, self._link.now())
