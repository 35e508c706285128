"""Store-and-forward: the operations of `StrictPartitions(store=...)`.

Each partition has one queue of batches, which are sent one after the other. If the partition does not accept a batch in
time, the whole queue is stored in the outbox (an SQLite file). As long as the outbox has batches for the partition, new
batches are stored too, and the stored ones are forwarded in order. So messages are never reordered.

Delivery is exactly once. If it is unknown whether the broker has stored a sent batch, the outbox stores the batch with
the id (producer id and sequence) under which it was sent. Before a batch from the outbox is sent, the outbox records
its new id. Before a batch with an id is sent again, its producer id is closed at the broker, which replies with the
last stored sequence. If the broker no longer knows the producer id, the log is searched for the batch's records.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from enum import StrEnum
from typing import Any, Final, TypeVar

from tfmq.backoff import Backoff
from tfmq.client.operation import BackgroundTasks, Event, Operation, Task, Wait, run_work
from tfmq.client.producer.outbox import NEVER_SENT, Outbox, SentAs, StoredBatch
from tfmq.client.send.accumulator import ProducerContext
from tfmq.client.send.batch import Batch, Delivery
from tfmq.client.send.idempotent_send import (
    ProducerPartition,
    close_producer,
    find_records,
    locate_log_end,
    send_encoded,
    start_producer,
)
from tfmq.client.send.partitioner import StrictPartitions
from tfmq.client.send.record_encoder import EncodedRecords, birth_part, rewrite_ids
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    BadRequest,
    Closed,
    OffsetOutOfRange,
    SequenceGap,
    StaleProducer,
    StorageStopped,
    TfmqError,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
)
from tfmq.ids import remaining_sequences
from tfmq.message import Message, SendResult
from tfmq.protocol.commands import ACKS_NONE, BY_EARLIEST

log = logging.getLogger("tfmq.producer")
Result = TypeVar("Result")

REPLY_TIMEOUT_SECONDS: Final = 2.0
"""If the broker does not reply for a partition within this time, the partition's batches are stored in the outbox."""
PAUSE_SECONDS: Final = 0.05
"""The pause before stored batches are forwarded again after an error; doubled each time up to the maximum."""
PAUSE_SECONDS_MAX: Final = 2.0
CHUNK_COUNT: Final = 64
"""How many stored batches are sent in one round. A round costs two fsyncs: to record ids, and to remove batches."""
CHUNK_BYTES: Final = 4 << 20
_STORE_ERRORS: Final = (StorageStopped, SequenceGap, StaleProducer, UnknownProducer)
"""Errors whose cause is not the batch. After these, and after retriable errors, the batch is stored in the outbox."""


class PartitionOutbox:
    """The queued batches for one partition, a task that sends them, and a task that forwards the stored batches."""

    def __init__(self, forwarding: StoreAndForward, topic: str, partition: int, kept: bool) -> None:
        self.topic, self.partition = topic, partition
        self.batches: deque[StorableBatch] = deque()
        self.has_stored = kept
        """Whether the outbox has batches for the partition, or batches are being stored there."""
        self._owner = forwarding
        self._link = forwarding.link
        self._storing = False
        self._producer: ProducerPartition | None = None
        self._sequence = self._from_offset = 0
        self._changed = Event()
        self._tasks: list[Task] = []
        for operation in (self._send_new(), self._forward_stored()):
            self._tasks.append(forwarding.tasks.start(operation, self._task_failed))

    def add(self, batch: StorableBatch) -> None:
        self.batches.append(batch)
        self.wake()

    def wake(self) -> None:
        news, self._changed = self._changed, Event()
        news.complete()

    def _task_failed(self, error: Exception) -> None:
        """Stop both tasks, as one task alone would send batches out of order. The next message starts new tasks."""
        for task in self._tasks:
            task.cancel()
        if not isinstance(error, Closed):
            log.error("Sending to %s/%d ended: %s", self.topic, self.partition, error, exc_info=error)
        failure = error if isinstance(error, TfmqError) else Closed(f"Sending ended: {error!r}")
        self._owner.remove_partition(self)
        while self.batches:
            self._owner.fail_batch(self.batches.popleft(), failure)

    # New batches

    def _send_new(self) -> Operation[None]:
        while True:
            while not self.batches:
                yield Wait((self._changed,))
            if self.has_stored:
                yield from self._store_queued()
            else:
                with self._owner.reading_in_background():
                    yield from self._send(self.batches[0])

    def _send(self, batch: StorableBatch) -> Operation[None]:
        """Send the batch. After a retriable error or `_STORE_ERRORS`, store all queued batches; else fail the batch."""
        batch.seal()
        until = self._link.now() + REPLY_TIMEOUT_SECONDS
        sent_as = NEVER_SENT
        try:
            if self._producer is None or batch.count > remaining_sequences(self._sequence):
                self._producer, self._from_offset = yield from start_producer(
                    self._link, self.topic, self.partition, until
                )
                self._sequence = 0
            producer = self._producer
            encoded = batch.assign_sequence(producer.producer_id, self._sequence)
            sent_as = SentAs(producer.incarnation, producer.producer_id, self._sequence, self._from_offset)
            batch.attempts += 1
            reply = yield from send_encoded(self._link, producer, self._sequence, encoded, batch.count, until)
        except Closed:
            raise
        except TfmqError as error:
            had_producer, self._producer = self._producer is not None, None
            if isinstance(error, UnknownTopic) and had_producer and not isinstance(error, UnknownPartition):
                return  # The topic was re-created. The next attempt requests the new topic's metadata.
            if error.retriable or isinstance(error, _STORE_ERRORS):
                self.has_stored = True
                yield from self._store_queued(sent_as)
                return
            self.batches.popleft()
            batch.attempts = int(error.outcome != NOT_DONE)
            self._owner.fail_batch(batch, error)
            return
        self._sequence += batch.count
        self.batches.popleft()
        self._owner.core.accumulator.complete_batch(batch, reply.positions, reply.durability)

    def _store_queued(self, sent_as: SentAs = NEVER_SENT) -> Operation[None]:
        """Append all queued batches to the outbox in one commit.

        `sent_as`: the id under which the first batch may have been sent.
        """
        batches = list(self.batches)
        rows = []
        for batch in batches:
            batch.seal()
            encoded = batch.encoded or batch.assign_sequence(0, 0)
            rows.append((batch.count, encoded.blocks, bytes(encoded.data), sent_as))
            sent_as = NEVER_SENT
        self._storing = True
        failure: TfmqError | None = None
        try:
            yield from self._run_on_outbox(lambda store: store.append(self.topic, self.partition, rows))
        except TfmqError as error:
            failure = error
            for batch in batches:
                batch.attempts += error.outcome != NOT_DONE  # The commit of the outbox may have succeeded.
        finally:
            self._storing = False
        for batch in batches:
            self.batches.remove(batch)
            if failure is None:
                batch.is_in_outbox = True
                self._owner.core.accumulator.complete_batch(batch, (), ACKS_NONE)
            else:
                self._owner.fail_batch(batch, failure)
        self.wake()

    # Stored batches

    def _forward_stored(self) -> Operation[None]:
        backoff, logged = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX), ""
        while True:
            while not self.has_stored:
                yield Wait((self._changed,))
            try:
                with self._owner.reading_in_background():
                    some = yield from self._forward_oldest()
            except Closed:
                raise
            except TfmqError as error:
                if logged != error.sentence:
                    logged = error.sentence
                    log.warning("Messages to %s/%d are kept: %s", self.topic, self.partition, error)
                yield Wait((), backoff.advance())
                continue
            logged = ""
            backoff.reset()
            if not some and not self._storing:
                self.has_stored = False
                self.wake()
            elif not some:
                yield Wait((self._changed,))

    def _forward_oldest(self) -> Operation[bool]:
        rows = yield from self._run_on_outbox(
            lambda store: store.read_oldest(self.topic, self.partition, CHUNK_COUNT, CHUNK_BYTES)
        )
        if not rows:
            return False
        rows = yield from self._remove_arrived(rows)
        if not rows:
            return True
        until = self._link.now() + REPLY_TIMEOUT_SECONDS
        producer, end = yield from start_producer(self._link, self.topic, self.partition, until)
        entries, sequence = [], 0
        for row in rows:
            entries.append((row.id, SentAs(producer.incarnation, producer.producer_id, sequence, end)))
            sequence += row.count
        yield from self._run_on_outbox(lambda store: store.record_sent_as(entries))
        for row, (_, sent_as) in zip(rows, entries, strict=True):
            encoded = rewrite_ids(
                EncodedRecords(bytearray(row.data), row.blocks, 0, ()), sent_as.producer_id, sent_as.sequence
            )
            until = self._link.now() + REPLY_TIMEOUT_SECONDS
            yield from send_encoded(self._link, producer, sent_as.sequence, encoded, row.count, until)
        yield from self._run_on_outbox(lambda store: store.remove(rows))
        return True

    def _remove_arrived(self, rows: list[StoredBatch]) -> Operation[list[StoredBatch]]:
        """Remove from the outbox the rows that the broker has stored. Return the remaining rows."""
        producers = dict.fromkeys(
            ProducerPartition(self.topic, row.sent_as.incarnation, self.partition, row.sent_as.producer_id)
            for row in rows
            if row.sent_as.producer_id
        )
        arrived: set[int] = set()
        for producer in producers:
            sent = [row for row in rows if row.sent_as.producer_id == producer.producer_id]
            arrived |= yield from self._find_arrived(producer, sent)
        if arrived:
            stored = [row for row in rows if row.id in arrived]
            yield from self._run_on_outbox(lambda store: store.remove(stored))
        return [row for row in rows if row.id not in arrived]

    def _find_arrived(self, producer: ProducerPartition, rows: list[StoredBatch]) -> Operation[set[int]]:
        """Close the producer id at the broker. Return the ids of those rows that the broker has stored."""
        until = self._link.now() + REPLY_TIMEOUT_SECONDS
        try:
            last = yield from close_producer(self._link, producer, until)
            return {row.id for row in rows if row.sent_as.sequence + row.count - 1 <= last}
        except UnknownProducer:
            pass  # The broker no longer knows the producer id: search the log.
        except UnknownTopic:
            return set()  # This incarnation of the topic was deleted with all its records.
        until = self._link.now() + REPLY_TIMEOUT_SECONDS
        wanted = {row.sent_as.sequence: row.id for row in rows}
        start = min(row.sent_as.from_offset for row in rows)
        try:
            found = yield from find_records(self._link, producer, wanted, start, until)
        except OffsetOutOfRange:  # Retention has deleted the part of the log at `start`: search the rest.
            earliest = yield from locate_log_end(self._link, producer, BY_EARLIEST, until)
            found = yield from find_records(self._link, producer, wanted, earliest, until)
        return {wanted[sequence] for sequence in found}

    def _run_on_outbox(self, call: Callable[[Outbox], Result]) -> Operation[Result]:
        return run_work(self._owner.core.owner.run_in_executor, lambda: call(self._owner.outbox))


class OutboxState(StrEnum):
    CLOSED = "closed"
    """The outbox is opened when the next batch is created."""
    OPENING = "opening"
    OPEN = "open"


class StoreAndForward:
    """Store-and-forward of one producer, used under the driver's lock. The driver calls the `tick` of `tasks`."""

    def __init__(self, core: ProducerContext, selector: StrictPartitions, path: str) -> None:
        self.core = core
        self.link = core.link
        self.selector = selector
        self.outbox = Outbox(path, selector.store_bytes)
        self.tasks = BackgroundTasks(core.link.now)
        self._partitions: dict[tuple[str, int], PartitionOutbox] = {}
        self._state = OutboxState.CLOSED
        self._belongs_to_parent = False
        self._waiting: list[StorableBatch] = []
        self._failed: set[tuple[str, int]] = set()
        self._open: dict[tuple[str, int], StorableBatch] = {}

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        """Append one message. Raises `MessageTooLarge`, `UnknownPartition`, and `BadRequest` if it is delayed."""
        if message.delay is not None or message.deliver_at is not None:
            raise BadRequest("StrictPartitions with a store takes no delayed messages: use another producer.")
        accumulator = self.core.accumulator
        accumulator.check_size(0 if payload is None else len(payload))
        part = accumulator.encode_attribute_part(message)
        partition = self.selector.choose(topic, message)
        batch = self._open.get((topic, partition))
        size = (0 if payload is None else len(payload)) + len(part or b"")
        fresh = batch is None or not batch.is_gathering or size + batch.overhead_bytes > batch.room_bytes
        if batch is None or fresh:
            batch = self._create_batch(topic, partition)
        room = batch.room_bytes
        index = batch.add(payload, part, message.tag)
        batch.size_bytes += room - batch.room_bytes
        accumulator.used_bytes += room - batch.room_bytes
        if batch.room_bytes <= 0:
            batch.is_gathering = False
        if fresh and self._state is OutboxState.OPEN:
            self._partition(topic, partition).add(batch)
        elif fresh:
            self._waiting.append(batch)
            if self._state == OutboxState.CLOSED:  # Batches that an earlier process has stored must be sent first.
                self._state = OutboxState.OPENING
                self.tasks.start(self._open_outbox(), self._open_failed)
        return Delivery((batch, index))

    def _create_batch(self, topic: str, partition: int) -> StorableBatch:
        core = self.core
        part = birth_part(int(core.wall_clock() * 1000))
        batch = StorableBatch(core.owner, topic, partition, core.options.batch_bytes, part, 0.0)
        core.accumulator.outstanding[batch] = None
        self._open[topic, partition] = batch
        return batch

    def _partition(self, topic: str, partition: int, kept: bool = False) -> PartitionOutbox:
        key = (topic, partition)
        partition_outbox = self._partitions.get(key)
        if partition_outbox is None:
            partition_outbox = self._partitions[key] = PartitionOutbox(
                self, topic, partition, kept or key in self._failed
            )
        return partition_outbox

    def _open_outbox(self) -> Operation[None]:
        found = yield from run_work(self.core.owner.run_in_executor, self.outbox.partitions)
        self._state = OutboxState.OPEN
        for topic, partition in found:
            self._partition(topic, partition, kept=True)
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self._partition(batch.topic, batch.partition).add(batch)

    def _open_failed(self, error: Exception) -> None:
        self._state = OutboxState.CLOSED
        failure = error if isinstance(error, TfmqError) else Closed(f"The store cannot be opened: {error!r}")
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self.fail_batch(batch, failure)

    @contextmanager
    def reading_in_background(self) -> Iterator[None]:
        """Let the background thread read replies during the `with` block, because no caller waits for the replies."""
        self.link.background_requests += 1
        try:
            yield
        finally:
            if not self._belongs_to_parent:  # In a forked child the connection has reset this counter.
                self.link.background_requests -= 1

    def fail_batch(self, batch: StorableBatch, error: TfmqError) -> None:
        """Fail a batch that the outbox has not stored. The outcome is "unknown" if the broker may have stored it."""
        batch.seal()
        failure = copy(error)
        failure.outcome = UNKNOWN if batch.attempts else NOT_DONE
        self.core.accumulator.fail_batch(batch, failure)

    def remove_partition(self, partition_outbox: PartitionOutbox) -> None:
        """Remove a `PartitionOutbox` whose tasks have ended. The next message to the partition creates a new one."""
        self._failed.add((partition_outbox.topic, partition_outbox.partition))
        if self._partitions.get((partition_outbox.topic, partition_outbox.partition)) is partition_outbox:
            del self._partitions[partition_outbox.topic, partition_outbox.partition]

    def close(self) -> None:
        self.tasks.cancel()
        self.outbox.close()

    def abandon_after_fork(self) -> None:
        self._belongs_to_parent = True
        self.tasks.cancel()
        self.outbox.abandon_after_fork()


class StorableBatch(Batch):
    """A batch that the broker or the outbox stores. The accumulator never appends to it, so `is_open` is False."""

    __slots__ = ("is_gathering", "is_in_outbox")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_open = False
        self.is_gathering = True
        self.is_in_outbox = False

    def seal(self) -> None:
        """Close the batch for further messages. A second call does nothing."""
        self.is_gathering = False
        self.count = len(self.payloads) or self.count

    def set_stored(self, positions: Sequence[tuple[int, int]], durability: int) -> None:
        super().set_stored(positions, durability)
        if self.is_in_outbox:
            self.durability = "kept"

    def result_of(self, index: int, count: int | None = None) -> SendResult:
        """Return the result as the base class does. For a batch in the outbox, the result has no offset and id 0."""
        if self.is_in_outbox and self.error is None:
            return SendResult(self.topic, self.partition, None, 0, "kept", count or 1)
        return super().result_of(index, count)
