"""A batch of a transaction: as any other, but delivered by the commit, and soon without its bytes.

Once the broker's journal has it, its records are let go; what is left of it costs a few KiB, and nothing at all where
nobody holds a handle on it. So a transaction may be larger than memory.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tfmq.client.connection.connection import Call, Link
from tfmq.client.connection.requests import (
    TRANSACTION_PAUSE_SECONDS,
    TRANSACTION_PAUSE_SECONDS_MAX,
    Topic,
    answered,
)
from tfmq.client.operation import Flag, Operation, Wait
from tfmq.client.send.accumulator import Sender
from tfmq.client.send.batch import Batch, Delivery, HandledBatch
from tfmq.client.send.delivery_time import Dues, Given, due_of
from tfmq.client.send.partition_sender import FLIGHT_BATCHES, FLIGHT_BYTES, Identities
from tfmq.client.send.partitioner import choose_partition
from tfmq.client.send.record_encoder import Encoded
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
from tfmq.ids import sequences_left
from tfmq.message import Message
from tfmq.protocol.commands import (
    ACKS_WRITTEN,
    BeginTransaction,
    BeginTransactionReply,
    CommitMember,
    Produce,
)
from tfmq.protocol.delayed_handle import read_dues


class Teller(Protocol):
    """What the handles on a transaction's messages need of it: an `Owner` of batches, and one thing more."""

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None: ...

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]: ...

    def call_back(self, callback: Callable[[], object]) -> None: ...

    def keep(self, batch: TransactionBatch) -> None:
        """Somebody wants to be told what becomes of `batch`, and may not hold it."""
        ...


class TransactionBatch(HandledBatch):
    """Messages of one transaction for one partition of the topic's `incarnation`."""

    __slots__ = ("dues", "first_count", "incarnation")

    owner: Teller

    def __init__(
        self, owner: Teller, topic: str, incarnation: int, partition: int, room: int, born_ms: int
    ) -> None:
        super().__init__(owner, topic, partition, room, born_ms, float("inf"))
        self.incarnation = incarnation
        self.dues: Dues | None = None
        """Of one whose messages are delayed; they count from the commit."""
        self.first_count = 0
        """How many messages its first block has: what is behind it lies at a place that the commit does not tell."""

    @property
    def due(self) -> bytes | None:
        """What the wire carries of its dues."""
        return None if self.dues is None else self.dues.packed_whole()

    def _dues(self, packed: bytes) -> array[int]:
        """One alone is that of all messages."""
        dues = read_dues(packed)
        return dues * self.count if len(dues) == 1 else dues

    def number(self, producer_id: int, sequence: int) -> Encoded:
        encoded = super().number(producer_id, sequence)
        self.first_count = encoded.blocks[0][1]
        return encoded

    def journalled(self) -> None:
        """The broker's journal has it, so its bytes are not needed any more."""
        encoded = self.encoded
        if encoded is not None:
            ends = None if encoded.ends is None else array("I", encoded.ends[: self.first_count])
            self.encoded = Encoded(bytearray(), [], encoded.record_size, ends)
        self.dues = None

    def offset_of(self, index: int) -> int | None:
        """None behind the first block, and where the commit did not tell."""
        return super().offset_of(index) if index < self.first_count else None

    def when_finished(self, callback: Callable[[Batch], object]) -> None:
        if not self.done:
            self.owner.keep(self)
        super().when_finished(callback)


# What a transaction gathers before it goes: messages in batches, one open for each partition, and full ones.
#
# Order is kept per partition. A topic is taken as it was when its first message came: if it is deleted and made anew
# meanwhile, the broker refuses the transaction, so that no part of it lands in another topic than the rest.

BATCH_BYTES: Final = 256 << 10
"""As much as a plain batch has; larger ones gain nothing."""
LOOK_BYTES: Final = 64 << 10
"""How late it may be seen that a transaction has grown."""
NOT_YET: Final = 0.0
"""Delays in a transaction count from its commit: nothing of them passes before."""
KEYLESS: Final = Message(None)
"""Stands for any message without a key where a selector is asked for a whole batch."""


class Gathering:
    """The messages of one transaction that are not on their way. Runs under the driver's lock."""

    def __init__(self, teller: Teller, sender: Sender, wall_clock: Callable[[], float] = time.time) -> None:
        self.shared: dict[str, TransactionBatch] = {}
        """Open batches, by topic, that take any message without a key: what `send`'s short way appends to."""
        self._teller = teller
        self._sender = sender
        self._wall_clock = wall_clock
        self._topics: dict[str, Topic] = {}
        self._shared_delayed: dict[str, TransactionBatch] = {}
        self._open: dict[tuple[str, int, bool], TransactionBatch] = {}
        self._full: list[TransactionBatch] = []
        self._full_bytes = 0
        self._bytes_max = self._look_at = 0

    def knows(self, topic: str) -> bool:
        """Whether a message for `topic` can be taken without asking the broker about it."""
        return topic in self._topics or self._sender.lanes.knows(topic)

    @property
    def empty(self) -> bool:
        return not self._full and not any(batch.payloads for batch in self._open.values())

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        """Take one message of a topic that is known. Raises `MessageTooLarge`, `UnknownPartition`, and what a
        selector raises.
        """
        sender = self._sender
        length = 0 if payload is None else len(payload)
        sender.check_size(length)
        part = sender.part(message)
        due = due_of(message.delay, message.deliver_at)
        batch = self._target(topic, message, due is not None)
        size = length + batch.overhead_bytes + len(part or b"")
        if size > batch.room and batch.payloads:
            self._close(batch)
            batch = self._target(topic, message, due is not None)
        index = batch.add(payload, part, message.tag)
        if due is not None and batch.dues is not None:
            batch.dues.add(Given(due, NOT_YET))
        self._bytes_max += size
        if batch.room <= 0:
            self._close(batch)
        return Delivery((batch, index))

    def append_many(
        self, topic: str, payloads: list[bytes], size_bytes: int, due: int | None = None
    ) -> tuple[TransactionBatch, int]:
        """Take payloads without anything beside but one due, all into one batch; which, and the index of the first one
        there. `size_bytes`: with what each record adds.
        """
        self._sender.check_size(max(map(len, payloads)))
        batch = self._target(topic, KEYLESS, due is not None)
        if size_bytes > batch.room and batch.payloads:
            self._close(batch)
            batch = self._target(topic, KEYLESS, due is not None)
        if due is not None and batch.dues is not None:
            batch.dues.add(Given(due, NOT_YET), len(payloads))
        first = len(batch.payloads)
        batch.payloads += payloads
        batch.room -= size_bytes
        self._bytes_max += size_bytes
        if batch.room <= 0:
            self._close(batch)
        return batch, first

    def outgrew(self, limit_bytes: int) -> bool:
        """Whether more than `limit_bytes` are gathered; may be seen `LOOK_BYTES` late."""
        if self._bytes_max <= max(limit_bytes, self._look_at):
            return False
        size = self.size_bytes()
        self._bytes_max = size + sum(batch.room for batch in self.shared.values())
        self._look_at = self._bytes_max + LOOK_BYTES
        return size > limit_bytes

    @property
    def batch_count(self) -> int:
        """How many batches `take_all` would give at most."""
        return len(self._full) + len(self._open)

    def size_bytes(self) -> int:
        """What is gathered, exactly."""
        return self._full_bytes + sum(BATCH_BYTES - batch.room for batch in self._open.values())

    def take_full(self) -> list[TransactionBatch]:
        """The full batches, in order; they are not gathered any more."""
        taken, self._full, self._full_bytes = self._full, [], 0
        return taken

    def take_all(self) -> list[TransactionBatch]:
        """Every batch with something in it, closed; nothing is gathered behind this."""
        for batch in list(self._open.values()):
            self._close(batch)
        self._bytes_max = self._look_at = 0
        return self.take_full()

    def put_back(self, batches: list[TransactionBatch]) -> None:
        """What `take_all` gave did not go: it comes before everything that is gathered now."""
        self._full[:0] = batches
        self._full_bytes += sum(batch.size_bytes for batch in batches)
        self._bytes_max += sum(batch.size_bytes for batch in batches)

    def forget_topics(self) -> None:
        """Whoever uses these topics next asks for them anew: one of them may be gone."""
        for topic in self._topics.values():
            self._sender.cluster.forget(topic.name)
            self._sender.lanes.forget(topic)

    def _target(self, topic: str, message: Message, delayed: bool) -> TransactionBatch:
        """The open batch for `message`."""
        free = message.partition is None and message.key is None and self._sender.selector.per_batch
        shared = self._shared_delayed if delayed else self.shared
        if free and topic in shared:
            return shared[topic]
        known = self._topics.get(topic) or self._pin(topic)
        partition = choose_partition(self._sender.selector, known, message)
        batch = self._open.get((topic, partition, delayed))
        if batch is None:
            born_ms = int(self._wall_clock() * 1000)
            batch = TransactionBatch(self._teller, topic, known.incarnation, partition, BATCH_BYTES, born_ms)
            batch.dues = Dues() if delayed else None
            self._open[topic, partition, delayed] = batch
        if free:
            shared[topic] = batch
            if not delayed:
                self._bytes_max += batch.room  # the short way counts nothing
        return batch

    def _pin(self, name: str) -> Topic:
        sender = self._sender
        lane = sender.lanes.lane(name)
        assert lane.topic is not None, "asked for before"
        if sender.cluster.stale(name):
            sender.lanes.ask(lane)  # whether it has grown, for later transactions
        self._topics[name] = lane.topic
        return lane.topic

    def _close(self, batch: TransactionBatch) -> None:
        delayed = batch.dues is not None
        del self._open[batch.topic, batch.partition, delayed]
        shared = self._shared_delayed if delayed else self.shared
        if shared.get(batch.topic) is batch:
            del shared[batch.topic]
        batch.close(BATCH_BYTES)
        if batch.count:
            self._full.append(batch)
            self._full_bytes += batch.size_bytes


BUFFER_BYTES: Final = 12 << 20
"""What one transaction holds at most, apart from one message more: the flight, and half of it to go on with."""
STRANGE: Final = (SequenceGap, UnknownProducer, StaleProducer)
"""Answers to a stream that the broker knows otherwise than the pool does: a fresh one is taken."""


class Beginning(NamedTuple):
    """What a transaction is begun with; `xid` "" is a local one, which ends with its connection. `member`: of a
    commit group.
    """

    xid: str = ""
    timeout_ms: int | None = None
    group: str = ""
    member: CommitMember | None = None


class Pipeline:
    """A transaction that outgrew one frame, or has a name: begun at the broker, its batches on their way while more
    come.

        beginning   waits for a stream and for the transaction's epoch
        flowing     sends what is queued, as much at once as a plain stream does
        pausing     the broker was busy: what it did not take goes again, in the same places
        ended       nothing more is sent: all went, something failed, or its commit group has it done already

    The broker takes the batches of one stream in order or not at all, so what is behind a refused one comes back too.
    Memory is bounded: whoever sends waits while `BUFFER_BYTES` are under way. Runs as a task (see `tasks`), under the
    driver's lock; all of its calls are unattended.

    `failure` says why nothing more of it can go; then it can only be rolled back.
    """

    def __init__(
        self,
        link: Link,
        streams: TransactionStreams,
        beginning: Beginning,
        seconds: float,
        epoch: int = 0,
    ) -> None:
        self.beginning = beginning
        self.xid = beginning.xid
        self.epoch = epoch
        """From begin on; given where somebody else has begun it."""
        self.state = "beginning"
        self.failure: TfmqError | None = None
        self.superfluous = False
        """Whether its commit group has that sequence committed already: nothing is begun then."""
        self.bytes = 0
        """What is queued or in flight."""
        self.count = self.message_count = self.sent_bytes = 0
        """How many batches, messages and bytes the broker has."""
        self.journalled: list[weakref.ref[TransactionBatch]] = []
        """The batches that the broker has, in order; who wants to hear of one holds it."""
        self._link = link
        self._streams = streams
        self._seconds = seconds
        self._connection = 0
        self._queue: deque[TransactionBatch] = deque()
        self._flight: deque[tuple[TransactionBatch, Call]] = deque()
        self._flight_bytes = 0
        self._stream: TransactionStream | None = None
        self._fresh = False  # whether nothing of it has landed in this stream
        self._moved_at = 0.0
        self._more = Flag()
        self._moved = Flag()

    # For the transaction

    def push(self, batches: Sequence[TransactionBatch]) -> None:
        """Take over closed batches; they go as soon as they may."""
        if batches:
            self._queue.extend(batches)
            self.bytes += sum(batch.size_bytes for batch in batches)
            self._more.settle()

    @property
    def has_room(self) -> bool:
        return self.bytes < BUFFER_BYTES

    def moved(self) -> Flag:
        """Raised at the next change: begun, something arrived, or it failed."""
        if self._moved.done:
            self._moved = Flag()
        return self._moved

    @property
    def begun(self) -> bool:
        return self.epoch > 0

    def waiting(self) -> list[TransactionBatch]:
        """Those that the broker does not have for sure."""
        return [*(batch for batch, _ in self._flight), *self._queue]

    def end(self) -> None:
        """The transaction ended, and its task with it. A stream of which all is answered is good for the next one."""
        stream, self._stream = self._stream, None
        if stream is not None and not self._flight and self.failure is None:
            self._streams.give(stream)
        self.state = "ended"
        self._moved.settle()

    def broke(self, error: Exception) -> None:
        """Nothing more goes."""
        told = error if isinstance(error, TfmqError) else TransactionError(f"The client failed: {error!r}")
        if self.failure is None:
            self.failure = told
        self.state = "ended"
        self._moved.settle()

    # The task

    def run(self) -> Operation[None]:
        """From begin on until it is cancelled, or something fails."""
        try:
            yield from self._begin()
            while not self.superfluous:
                self._send()
                if self._queue and not self._flight:
                    yield from self._change_stream()  # this one is full
                    continue
                yield Wait((self._more, self._flight[0][1]) if self._flight else (self._more,))
                if self._more.done:
                    self._more = Flag()
                yield from self._take_answers()
        finally:
            for _, call in self._flight:
                self._link.abandon(call)

    def _begin(self) -> Operation[None]:
        link = self._link
        until = link.now() + self._seconds
        self._stream = yield from self._streams.taking(until)
        self._fresh = True
        if not self.begun:
            reply = yield from self._asked_to_begin(until)
            self.epoch, self.xid = reply.epoch, reply.xid
            self.superfluous = not reply.epoch
        self._connection = link.connections
        self.state = "ended" if self.superfluous else "flowing"
        self._moved.settle()

    def _asked_to_begin(self, until: float) -> Operation[BeginTransactionReply]:
        """A named one is known again by its number. A local one ends with the connection that it was begun on, so
        where that breaks another one is begun."""
        named = bool(self.beginning.xid)
        strange = 0
        while True:
            stream = self._stream
            assert stream is not None, "taken before"
            stream.number += 1
            request = BeginTransaction(stream.producer_id, stream.number, *self.beginning)
            call = yield from answered(self._link, request, until=until, unattended=True, repeat=named)
            if isinstance(call.error, STRANGE) and not strange:
                strange += 1
                self._stream = yield from self._streams.leasing(until)
            elif not (isinstance(call.error, ConnectionFailed) and not named and self._may_retry(until)):
                reply: BeginTransactionReply = call.result()
                return reply

    def _may_retry(self, until: float) -> bool:
        return bool(self._link.connections) and self._link.now() < until

    # Sending

    def _send(self) -> None:
        most = FLIGHT_BATCHES
        while self._queue and (
            not self._flight or (len(self._flight) < most and self._flight_bytes < FLIGHT_BYTES)
        ):
            batch, stream = self._queue[0], self._stream
            assert stream is not None, "begun"
            if batch.producer_id != stream.producer_id:
                if not stream.fits(batch.count):
                    return  # the next stream begins when this one's flight has landed
                stream.place(batch)
            self._queue.popleft()
            self._flight.append((batch, self._produce(batch)))
            self._flight_bytes += batch.size_bytes

    def _produce(self, batch: TransactionBatch) -> Call:
        encoded = batch.encoded
        assert encoded is not None, "placed"
        request = Produce(
            batch.topic,
            batch.incarnation,
            batch.partition,
            batch.producer_id,
            batch.sequence,
            batch.count,
            ACKS_WRITTEN,
            encoded.blocks,  # type: ignore[arg-type]
            batch.due,
            self.epoch,
        )
        return self._link.call(request, encoded.data, seconds=self._seconds, unattended=True)

    # Answers

    def _take_answers(self) -> Operation[None]:
        """Settle what was answered. What was refused for a passing reason goes again until it is taken."""
        pause = TRANSACTION_PAUSE_SECONDS
        self._moved_at = self._link.now()
        while (refusal := self._land()) is not None:
            yield from self._landed()
            if isinstance(refusal, STRANGE) and self._fresh:
                yield from self._change_stream()
            elif isinstance(refusal, Busy) and self._link.now() + pause < self._moved_at + self._seconds:
                self.state = "pausing"
                yield Wait((), pause)
                self.state = "flowing"
                pause = min(pause * 2, TRANSACTION_PAUSE_SECONDS_MAX)
            else:
                raise self._told(refusal)
            self._send()
            if self._flight:
                yield Wait((self._flight[0][1],))

    def _land(self) -> TfmqError | None:
        """Settle what was answered, in order, up to the first that was refused: its error."""
        landed = False
        while self._flight and self._flight[0][1].done:
            batch, call = self._flight[0]
            if call.error is not None:
                break
            self._flight.popleft()
            self._flight_bytes -= batch.size_bytes
            self.bytes -= batch.size_bytes
            batch.journalled()
            self.journalled.append(weakref.ref(batch))
            self.count += 1
            self.message_count += batch.count
            self.sent_bytes += batch.size_bytes
            self._fresh = False
            landed = True
        if landed:
            self._moved_at = self._link.now()
            self._moved.settle()
        first = self._flight[0][1] if self._flight else None
        return first.error if first is not None and first.done else None

    def _landed(self) -> Operation[None]:
        """Wait until all that is in flight is answered; it is queued again, before everything else."""
        for _, call in self._flight:
            while not call.done:
                yield Wait((call,))
        self._queue.extendleft(batch for batch, _ in reversed(self._flight))
        self._flight.clear()
        self._flight_bytes = 0

    def _change_stream(self) -> Operation[None]:
        """Go on in a stream that is new to the broker: this one is full, or strange to it."""
        self._stream = yield from self._streams.leasing(self._link.now() + self._seconds)
        self._fresh = False

    def _told(self, error: TfmqError) -> TfmqError:
        """Nothing of a transaction is there before its commit, whatever became of a batch; but others may commit it."""
        if not self.beginning.xid and self._link.connections != self._connection:
            reason = " The connection was lost, and with it the transaction."
        elif isinstance(error, UnknownTransaction | TransactionRolledBack):
            reason = " Its time was over, or somebody else ended it."
        else:
            reason = ""
        if isinstance(error, TransactionState | HeuristicOutcome):
            visible = "Somebody else went on with it: these messages are not in it."
        else:
            visible = "Nothing of it is visible."
        told = type(error)(f"{error.sentence}{reason} {visible}", outcome=NOT_DONE)
        told.__cause__ = error
        return told


# The streams that transactions send in: ids of their own, so that they never meet the sequences of plain sends.
#
# A stream numbers the messages of its transactions without a gap, and its transactions too: by (id, number) the broker
# knows a request again. One transaction at a time has it; then it goes back to the pool, unless what became of its last
# request is not certain. Ids are plenty.

STREAMS_KEPT = 1000
"""More are dropped: so many transactions at once are rare, and a new stream costs a sixteenth of a round trip."""


class TransactionStream:
    """One id with its next sequence and the number of its last transaction."""

    __slots__ = ("number", "producer_id", "sequence", "used_at")

    def __init__(self, producer_id: int, now: float) -> None:
        self.producer_id = producer_id
        self.sequence = 0
        self.number = 0
        self.used_at = now

    def fits(self, count: int) -> bool:
        """Whether it can number `count` messages more."""
        return count <= sequences_left(self.sequence)

    def place(self, batch: TransactionBatch) -> None:
        """Give `batch` the next sequences."""
        batch.number(self.producer_id, self.sequence)
        self.sequence += batch.count


class TransactionStreams:
    """A producer's streams that are free; the last one used is the first to be used again."""

    def __init__(self, link: Link, identities: Identities) -> None:
        self._link = link
        self._identities = identities
        self._free: list[TransactionStream] = []

    def give(self, stream: TransactionStream) -> None:
        """It is free again: the broker's next sequence is its."""
        stream.used_at = self._link.now()
        if len(self._free) < STREAMS_KEPT:
            self._free.append(stream)

    def taking(self, until: float) -> Operation[TransactionStream]:
        """A free stream, or a new one. Raises `TimedOut`, and what leasing ids raised."""
        stream = self._fresh()
        return stream if stream is not None else (yield from self.leasing(until))

    def leasing(self, until: float) -> Operation[TransactionStream]:
        """A stream that is new to the broker."""
        lease = _Leasing()
        self._identities.take(lease.taken)
        while not lease.done:
            remaining = until - self._link.now()
            if remaining <= 0:
                raise self._late()
            yield Wait((lease,), remaining)
        if lease.error is not None:
            raise type(lease.error)(lease.error.sentence, outcome="not done")
        return TransactionStream(lease.producer_id, self._link.now())

    def _late(self) -> TfmqError:
        link = self._link
        if link.state != "ready" and link.last_error is not None:
            return ConnectionFailed(link.last_error.sentence, outcome="not done")
        return TimedOut("The broker gave no producer id in time.", outcome="not done")

    def _fresh(self) -> TransactionStream | None:
        """A free one that the broker has not forgotten meanwhile."""
        oldest = self._link.now() - self._link.limits["producer_idle_seconds"] / 2
        while self._free:
            stream = self._free.pop()
            if stream.used_at > oldest:
                return stream
        return None


class _Leasing(Flag):
    """Waits for one id."""

    __slots__ = ("error", "producer_id")

    def __init__(self) -> None:
        super().__init__()
        self.producer_id = 0
        self.error: TfmqError | None = None

    def taken(self, producer_id: int, error: TfmqError | None) -> None:
        self.producer_id, self.error = producer_id, error
        self.settle()
