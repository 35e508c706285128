"""Store-and-forward: `StrictPartitions(store=...)` without the waiting.

Each partition has one queue of batches. While the outbox has no batch for the partition, the oldest batch is sent, and
the next one after its reply. If the partition does not accept a batch in time, the whole queue is stored in the outbox.
From then on stored batches are forwarded first, in order, until the outbox has none for the partition. So the order
never depends on the path of a batch.

Delivery is exactly once. A batch with unknown outcome is stored with the id under which it was sent, and the id for a
stored batch is recorded before it is sent. Before such a batch is sent again, its producer id is closed at the broker;
the reply contains the last stored sequence. If the broker no longer knows the producer id, the records are searched in
the log.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Final, TypeVar

from tfmq.client.operation import Flag, Operation, Task, Tasks, Wait, work
from tfmq.client.producer.outbox import NOWHERE, Kept, LocalStore, Place
from tfmq.client.send.accumulator import ProducerContext
from tfmq.client.send.batch import Batch, Delivery
from tfmq.client.send.idempotent_send import (
    Stream,
    begin_stream,
    close_stream,
    find_records,
    locate_end,
    send_encoded,
)
from tfmq.client.send.partitioner import StrictPartitions
from tfmq.client.send.record_encoder import Encoded, readdress
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
from tfmq.ids import sequences_left
from tfmq.message import Message, SendResult
from tfmq.protocol.commands import ACKS_NONE, BY_EARLIEST

log = logging.getLogger("tfmq.producer")
Result = TypeVar("Result")

ANSWER_SECONDS: Final = 2.0
"""A partition that does not reply within this time is treated as unavailable.

Its batches are then stored in the outbox.
"""
PAUSE_SECONDS: Final = 0.05
"""The pause before a partition is tried again; doubled each time up to the maximum."""
PAUSE_SECONDS_MAX: Final = 2.0
CHUNK_COUNT: Final = 64
"""Maximum stored batches sent per chunk.

A chunk costs two fsyncs: recording the ids, and the removal.
"""
CHUNK_BYTES: Final = 4 << 20
_KEPT_FOR: Final = (StorageStopped, SequenceGap, StaleProducer, UnknownProducer)
"""Errors after which a batch is stored, besides the retriable ones.

The batch itself is valid.
"""


class Line:
    """The batches for one partition, oldest first, and the two tasks that send and forward them."""

    def __init__(self, forwarding: Forwarding, topic: str, partition: int, kept: bool) -> None:
        self.topic, self.partition = topic, partition
        self.batches: deque[KeptBatch] = deque()
        self.kept = kept
        """Whether the outbox has batches for the partition, or is about to get some."""
        self._forwarding = forwarding
        self._link = forwarding.link
        self._keeping = False
        self._stream: Stream | None = None
        self._sequence = self._from_offset = 0
        self._news = Flag()
        self._tasks: list[Task] = []
        for operation in (self._bringing(), self._emptying()):
            self._tasks.append(forwarding.tasks.start(operation, self._ended))

    def add(self, batch: KeptBatch) -> None:
        self.batches.append(batch)
        self.wake()

    def wake(self) -> None:
        """Wake both tasks after a change."""
        news, self._news = self._news, Flag()
        news.settle()

    def _ended(self, error: Exception) -> None:
        """Stop both tasks after an unexpected error and fail the queued batches.

        If only one task continued, the order would be lost. The next message starts new tasks, which begin with the
        outbox.
        """
        for task in self._tasks:
            task.cancel()
        if not isinstance(error, Closed):
            log.error("Sending to %s/%d ended: %s", self.topic, self.partition, error, exc_info=error)
        failure = error if isinstance(error, TfmqError) else Closed(f"Sending ended: {error!r}")
        self._forwarding.dropped(self)
        while self.batches:
            self._forwarding.fail(self.batches.popleft(), failure)

    # New batches

    def _bringing(self) -> Operation[None]:
        while True:
            while not self.batches:
                yield Wait((self._news,))
            if self.kept:
                yield from self._keep()
            else:
                with self._forwarding.unattended():
                    yield from self._send(self.batches[0])

    def _send(self, batch: KeptBatch) -> Operation[None]:
        """Send the batch. If the partition does not accept it, store it or leave it queued."""
        batch.leave()
        until = self._link.now() + ANSWER_SECONDS
        place = NOWHERE
        try:
            stream = yield from self._numbered(batch.count, until)
            encoded = batch.number(stream.producer_id, self._sequence)
            place = Place(stream.incarnation, stream.producer_id, self._sequence, self._from_offset)
            batch.attempts += 1
            reply = yield from send_encoded(self._link, stream, self._sequence, encoded, batch.count, until)
        except Closed:
            raise
        except TfmqError as error:
            had_stream, self._stream = self._stream is not None, None
            if isinstance(error, UnknownTopic) and had_stream and not isinstance(error, UnknownPartition):
                return  # The topic was re-created: the next attempt requests its metadata.
            if error.retriable or isinstance(error, _KEPT_FOR):
                self.kept = True
                yield from self._keep(place)
                return
            self.batches.popleft()
            batch.attempts = int(error.outcome != NOT_DONE)
            self._forwarding.fail(batch, error)
            return
        self._sequence += batch.count
        self.batches.popleft()
        self._forwarding.core.sender.stored(batch, reply.positions, reply.durability)

    def _numbered(self, count: int, until: float) -> Operation[Stream]:
        """Return the open stream for direct sends, with sequences for `count` more records."""
        if self._stream is None or count > sequences_left(self._sequence):
            self._stream, self._from_offset = yield from begin_stream(
                self._link, self.topic, self.partition, until
            )
            self._sequence = 0
        return self._stream

    def _keep(self, place: Place = NOWHERE) -> Operation[None]:
        """Append all queued batches to the outbox in one commit.

        The first may have been sent as `place`.
        """
        batches = list(self.batches)
        rows = []
        for batch, its_place in zip(
            batches, itertools.chain((place,), itertools.repeat(NOWHERE)), strict=False
        ):
            batch.leave()
            encoded = batch.encoded or batch.number(0, 0)
            rows.append((batch.count, encoded.blocks, bytes(encoded.data), its_place))
        self._keeping = True
        failure: TfmqError | None = None
        try:
            yield from self._stored(lambda store: store.keep(self.topic, self.partition, rows))
        except TfmqError as error:
            failure = error
            for batch in batches:
                batch.attempts += error.outcome != NOT_DONE  # The commit may have succeeded.
        finally:
            self._keeping = False
        for batch in batches:
            self.batches.remove(batch)
            if failure is None:
                batch.is_kept = True
                self._forwarding.core.sender.stored(batch, (), ACKS_NONE)
            else:
                self._forwarding.fail(batch, failure)
        self.wake()

    # Stored batches

    def _emptying(self) -> Operation[None]:
        """Forward stored batches until there are none, with a pause after errors."""
        pause, told = PAUSE_SECONDS, ""
        while True:
            while not self.kept:
                yield Wait((self._news,))
            try:
                with self._forwarding.unattended():
                    some = yield from self._forward()
            except Closed:
                raise
            except TfmqError as error:
                if told != error.sentence:
                    told = error.sentence
                    log.warning("Messages to %s/%d are kept: %s", self.topic, self.partition, error)
                yield Wait((), pause)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
                continue
            pause, told = PAUSE_SECONDS, ""
            if not some and not self._keeping:
                self.kept = False
                self.wake()
            elif not some:
                yield Wait((self._news,))

    def _forward(self) -> Operation[bool]:
        """Forward the oldest stored batches. Return False if there were none."""
        rows = yield from self._stored(
            lambda store: store.first(self.topic, self.partition, CHUNK_COUNT, CHUNK_BYTES)
        )
        if not rows:
            return False
        rows = yield from self._unsettled(rows)
        if not rows:
            return True
        until = self._link.now() + ANSWER_SECONDS
        stream, end = yield from begin_stream(self._link, self.topic, self.partition, until)
        places, sequence = [], 0
        for row in rows:
            places.append((row.id, Place(stream.incarnation, stream.producer_id, sequence, end)))
            sequence += row.count
        yield from self._stored(lambda store: store.place(places))
        for row, (_, place) in zip(rows, places, strict=True):
            encoded = readdress(
                Encoded(bytearray(row.data), row.blocks, 0, ()), place.producer_id, place.sequence
            )
            until = self._link.now() + ANSWER_SECONDS
            yield from send_encoded(self._link, stream, place.sequence, encoded, row.count, until)
        yield from self._stored(lambda store: store.remove(rows))
        return True

    def _unsettled(self, rows: list[Kept]) -> Operation[list[Kept]]:
        """Remove the batches that arrived from the outbox. Return the other `rows`."""
        streams = dict.fromkeys(
            Stream(self.topic, row.place.incarnation, self.partition, row.place.producer_id)
            for row in rows
            if row.place.producer_id
        )
        arrived: set[int] = set()
        for stream in streams:
            sent = [row for row in rows if row.place.producer_id == stream.producer_id]
            arrived |= yield from self._arrived(stream, sent)
        if arrived:
            gone = [row for row in rows if row.id in arrived]
            yield from self._stored(lambda store: store.remove(gone))
        return [row for row in rows if row.id not in arrived]

    def _arrived(self, stream: Stream, rows: list[Kept]) -> Operation[set[int]]:
        """Return the ids of `rows` that the broker has stored from `stream`.

        Closes the producer id, so that the broker accepts no further batch under it.
        """
        until = self._link.now() + ANSWER_SECONDS
        try:
            last = yield from close_stream(self._link, stream, until)
            return {row.id for row in rows if row.place.sequence + row.count - 1 <= last}
        except UnknownProducer:
            pass  # The broker no longer knows the producer id: search the log.
        except UnknownTopic:
            return set()  # This incarnation of the topic was deleted with all its records.
        until = self._link.now() + ANSWER_SECONDS
        wanted = {row.place.sequence: row.id for row in rows}
        start = min(row.place.from_offset for row in rows)
        try:
            found = yield from find_records(self._link, stream, wanted, start, until)
        except OffsetOutOfRange:  # Retention deleted the older part.
            earliest = yield from locate_end(self._link, stream, BY_EARLIEST, until)
            found = yield from find_records(self._link, stream, wanted, earliest, until)
        return {wanted[sequence] for sequence in found}

    def _stored(self, call: Callable[[LocalStore], Result]) -> Operation[Result]:
        return work(self._forwarding.core.owner.beside, lambda: call(self._forwarding.store))


class Forwarding:
    """Store-and-forward of one producer; a ticker of its driver. Runs under the driver's lock."""

    def __init__(self, core: ProducerContext, selector: StrictPartitions, path: str) -> None:
        self.core = core
        self.link = core.link
        self.selector = selector
        self.store = LocalStore(path, selector.store_bytes)
        self.tasks = Tasks(core.link.now)
        self._lines: dict[tuple[str, int], Line] = {}
        self._state = "new"
        self._is_parents = False
        self._waiting: list[KeptBatch] = []
        self._failed: set[tuple[str, int]] = set()
        self._open: dict[tuple[str, int], KeptBatch] = {}

    def next_time(self) -> float:
        return self.tasks.next_time()

    def tick(self) -> None:
        self.tasks.tick()

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        """Append one message. Returns its delivery handle.

        Raises as `RecordAccumulator.append`, and `BadRequest` for a topic that is not configured and for a delay.
        """
        if message.delay is not None or message.deliver_at is not None:
            raise BadRequest("StrictPartitions with a store takes no delayed messages: use another producer.")
        sender = self.core.sender
        sender.check_size(0 if payload is None else len(payload))
        part = sender.part(message)
        partition = self.selector.choose(topic, message)
        batch = self._open.get((topic, partition))
        size = (0 if payload is None else len(payload)) + len(part or b"")
        fresh = batch is None or not batch.gathering or size + batch.overhead_bytes > batch.room
        if batch is None or fresh:
            batch = self._new(topic, partition)
        room = batch.room
        index = batch.add(payload, part, message.tag)
        batch.size_bytes += room - batch.room
        sender.used_bytes += room - batch.room
        if batch.room <= 0:
            batch.gathering = False
        if fresh:
            self._push(batch)
        return Delivery((batch, index))

    def _new(self, topic: str, partition: int) -> KeptBatch:
        core = self.core
        born_ms = int(core.wall_clock() * 1000)
        batch = KeptBatch(core.owner, topic, partition, core.options.batch_bytes, born_ms, 0.0)
        core.sender.outstanding[batch] = None
        self._open[topic, partition] = batch
        return batch

    def _push(self, batch: KeptBatch) -> None:
        """Queue a batch for its partition; it may be sent at once."""
        if self._state == "open":
            self._line(batch.topic, batch.partition).add(batch)
        else:
            self._waiting.append(batch)
            self._begin()

    def _line(self, topic: str, partition: int, kept: bool = False) -> Line:
        key = (topic, partition)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self, topic, partition, kept or key in self._failed)
        return line

    def _begin(self) -> None:
        """Open the outbox, unless that has started. Batches of an earlier process are sent first."""
        if self._state == "new":
            self._state = "opening"
            self.tasks.start(self._beginning(), self._refused)

    def _beginning(self) -> Operation[None]:
        found = yield from work(self.core.owner.beside, self.store.partitions)
        self._state = "open"
        for topic, partition in found:
            self._line(topic, partition, kept=True)
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self._line(batch.topic, batch.partition).add(batch)

    def _refused(self, error: Exception) -> None:
        self._state = "new"
        failure = error if isinstance(error, TfmqError) else Closed(f"The store cannot be opened: {error!r}")
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self.fail(batch, failure)

    @contextmanager
    def unattended(self) -> Iterator[None]:
        """Let the background thread read replies during the `with` block."""
        self.link.unattended += 1
        try:
            yield
        finally:
            if not self._is_parents:  # In a forked child the connection has reset its counter.
                self.link.unattended -= 1

    def fail(self, batch: KeptBatch, error: TfmqError) -> None:
        """Fail a batch that was not stored. The outcome is "unknown" if it was sent."""
        batch.leave()
        told = copy(error)
        told.outcome = UNKNOWN if batch.attempts else NOT_DONE
        self.core.sender.fail(batch, told)

    def dropped(self, line: Line) -> None:
        """Remove a partition whose tasks have ended. The next message creates it again."""
        self._failed.add((line.topic, line.partition))
        if self._lines.get((line.topic, line.partition)) is line:
            del self._lines[line.topic, line.partition]

    def close(self) -> None:
        """Stop all tasks. Stored batches remain for the next process."""
        self.tasks.cancel()
        self.store.close()

    def forked(self) -> None:
        """In a forked child: drop the parent's tasks and file."""
        self._is_parents = True
        self.tasks.cancel()
        self.store.forked()


class KeptBatch(Batch):
    """A batch that the broker or the outbox stores.

    For the accumulator it is never open: it is sealed when its partition can send it.
    """

    __slots__ = ("gathering", "is_kept")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_open = False
        self.gathering = True
        self.is_kept = False

    def leave(self) -> None:
        """Close the batch for further messages. Ignored if already closed."""
        self.gathering = False
        self.count = len(self.payloads) or self.count

    def stored(self, positions: Sequence[tuple[int, int]], durability: int) -> None:
        """Complete the batch as stored by the broker, or by the outbox (`is_in_outbox`)."""
        super().stored(positions, durability)
        if self.is_kept:
            self.durability = "kept"

    def result_of(self, index: int, count: int = 1) -> SendResult:
        """Return the result as the base class; in the outbox a batch has no offset and no id yet."""
        if self.is_kept and self.error is None:
            return SendResult(self.topic, self.partition, None, 0, "kept", count)
        return super().result_of(index, count)
