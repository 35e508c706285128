"""Sending to configured partitions with a store beside: `StrictPartitions(store=...)` without its waiting.

Each partition has one line of batches. While nothing is kept for it, the oldest goes out, and the next when that is
answered. What the partition does not take in time goes into the store with everything behind it, and from then on the
store comes first: it is forwarded in order until it is empty. So order never depends on which way a batch took.

Exactly once: a batch of unknown fate is kept with the place under which it was sent, and places of kept ones are
written down before they are sent. Before such a batch goes again its stream is closed for good, which says how far it
came; where the broker has forgotten the stream, the log is looked through.
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
"""A partition that has not answered for so long takes no writes: its messages are kept."""
PAUSE_SECONDS: Final = 0.05
"""Before a partition is tried again; doubled each time up to the maximum."""
PAUSE_SECONDS_MAX: Final = 2.0
CHUNK_COUNT: Final = 64
"""So many kept batches go out on one writing down of their places, and one removal: two forces of the file."""
CHUNK_BYTES: Final = 4 << 20
_KEPT_FOR: Final = (StorageStopped, SequenceGap, StaleProducer, UnknownProducer)
"""Refusals that are no fault of the batch, beside the retriable ones."""


class Line:
    """The batches for one partition, oldest first, and the two tasks that bring them away."""

    def __init__(self, forwarding: Forwarding, topic: str, partition: int, kept: bool) -> None:
        self.topic, self.partition = topic, partition
        self.batches: deque[KeptBatch] = deque()
        self.kept = kept
        """Whether the store has something for it, or is about to."""
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
        """Something changed: both tasks look again."""
        news, self._news = self._news, Flag()
        news.settle()

    def _ended(self, error: Exception) -> None:
        """One task met what it knows no way from, so neither goes on: order would be lost. The next message begins
        with what the store has."""
        for task in self._tasks:
            task.cancel()
        if not isinstance(error, Closed):
            log.error("Sending to %s/%d ended: %s", self.topic, self.partition, error, exc_info=error)
        failure = error if isinstance(error, TfmqError) else Closed(f"Sending ended: {error!r}")
        self._forwarding.dropped(self)
        while self.batches:
            self._forwarding.fail(self.batches.popleft(), failure)

    # What is new

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
        """To the broker; where that does not take it, nothing is settled and `kept` says where it goes."""
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
                return  # the topic was made anew: the next turn asks for it
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
        """The stream of what goes straight to the broker, with room for `count` more."""
        if self._stream is None or count > sequences_left(self._sequence):
            self._stream, self._from_offset = yield from begin_stream(
                self._link, self.topic, self.partition, until
            )
            self._sequence = 0
        return self._stream

    def _keep(self, place: Place = NOWHERE) -> Operation[None]:
        """Everything that waits goes behind what is kept, in one commit; the first may have been sent at `place`."""
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
                batch.attempts += error.outcome != NOT_DONE  # the commit may have come through
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

    # What is kept

    def _emptying(self) -> Operation[None]:
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
        """Bring away the oldest that is kept; whether there was anything."""
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
        """`rows` without those that have arrived; these are removed."""
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
        """Which of `rows`, sent in `stream`, the broker has. From now on it takes none of them under that id."""
        until = self._link.now() + ANSWER_SECONDS
        try:
            last = yield from close_stream(self._link, stream, until)
            return {row.id for row in rows if row.place.sequence + row.count - 1 <= last}
        except UnknownProducer:
            pass  # its stream was forgotten: the log tells
        except UnknownTopic:
            return set()  # that life of the topic is over, with all that was in it
        until = self._link.now() + ANSWER_SECONDS
        wanted = {row.place.sequence: row.id for row in rows}
        start = min(row.place.from_offset for row in rows)
        try:
            found = yield from find_records(self._link, stream, wanted, start, until)
        except OffsetOutOfRange:  # retention took the older part
            earliest = yield from locate_end(self._link, stream, BY_EARLIEST, until)
            found = yield from find_records(self._link, stream, wanted, earliest, until)
        return {wanted[sequence] for sequence in found}

    def _stored(self, call: Callable[[LocalStore], Result]) -> Operation[Result]:
        return work(self._forwarding.core.owner.beside, lambda: call(self._forwarding.store))


class Forwarding:
    """All lines of one producer; also a ticker of its driver. Runs under the driver's lock."""

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
        """Take one message. Raises as `Sender.append`, and `BadRequest` for topics not configured, and a delay."""
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
        """Behind the others of its partition; it may leave at once."""
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
        """Open the store: what an earlier process left in it goes first."""
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
        """Meanwhile answers are read although nobody waits for them."""
        self.link.unattended += 1
        try:
            yield
        finally:
            if not self._is_parents:  # there, the link counts anew
                self.link.unattended -= 1

    def fail(self, batch: KeptBatch, error: TfmqError) -> None:
        """It is not kept; whether the broker has it is unknown once it was sent."""
        batch.leave()
        told = copy(error)
        told.outcome = UNKNOWN if batch.attempts else NOT_DONE
        self.core.sender.fail(batch, told)

    def dropped(self, line: Line) -> None:
        """Its tasks ended; the next message begins anew."""
        self._failed.add((line.topic, line.partition))
        if self._lines.get((line.topic, line.partition)) is line:
            del self._lines[line.topic, line.partition]

    def close(self) -> None:
        """Nothing is brought away any more; what is kept stays for the next."""
        self.tasks.cancel()
        self.store.close()

    def forked(self) -> None:
        """In a child: everything of this is the parent's."""
        self._is_parents = True
        self.tasks.cancel()
        self.store.forked()


# A batch of messages that is either stored by the broker or kept in a local store until its partition takes it.


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
