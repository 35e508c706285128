"""The record accumulator: gathers messages into batches for the partition senders.

Messages for a topic without known metadata wait in a `ProducerTopic`. `PartitionSenders` holds one sender per partition
and one for all delayed messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from tfmq.client.connection.connection import Call, Link
from tfmq.client.connection.requests import Cluster, Topic
from tfmq.client.operation import Flag, Operation
from tfmq.client.send.batch import Batch, DelayedBatch, Delivery, Owner
from tfmq.client.send.delivery_time import Given, due_of
from tfmq.client.send.partition_sender import DelayedStream, Identities, Stream
from tfmq.client.send.partitioner import PartitionSelector, choose_partition
from tfmq.client.send.record_encoder import attribute_part
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    ConnectionFailed,
    MessageTooLarge,
    TfmqError,
    TimedOut,
    UnknownPartition,
    UnknownTopic,
)
from tfmq.limits import MESSAGE_BYTES
from tfmq.message import Message, encode_attribute
from tfmq.protocol.commands import Metadata

KEYLESS = Message(None)
"""Stands for any message without a key when a selector chooses for a whole batch."""


class Lane:
    """A topic of a producer, its metadata if known, and the batches that wait for the metadata."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.topic: Topic | None = None
        self.known = Flag()
        self.error: TfmqError | None = None
        self.asking = False
        self.waiting: deque[tuple[Batch, Message]] = deque()


class Lanes:
    """All topics that a producer sends to. Runs under the driver's lock."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lanes: dict[str, Lane] = {}

    def lane(self, topic: str) -> Lane:
        """Return the entry of the topic; create it if missing."""
        entry = self._lanes.get(topic)
        if entry is None:
            entry = self._lanes[topic] = Lane(topic)
            entry.topic = self._sender.cluster.topic(topic)
        return entry

    def knows(self, topic: str) -> bool:
        """Return whether the topic's partitions are known."""
        return self.lane(topic).topic is not None

    def ask(self, entry: Lane) -> None:
        """Request the topic's metadata. The broker creates the topic if it is configured to.

        `entry.known_event` is set when the reply arrives.
        """
        if entry.asking:
            return
        entry.asking = True
        call = self._sender.link.call(
            Metadata([entry.name], True), seconds=self._sender.timeout, unattended=True
        )
        call.when_done(lambda done: self._told(entry, done))

    def wait(self, entry: Lane, batch: Batch, message: Message = KEYLESS) -> None:
        """Hold a batch until the topic is known. `message` then decides its partition."""
        if not entry.waiting or entry.waiting[-1][0] is not batch:  # A batch can be added twice in a row.
            entry.waiting.append((batch, message))
        self.ask(entry)

    def forget(self, topic: Topic) -> None:
        """Discard the metadata if it describes this incarnation of the topic."""
        entry = self._lanes.get(topic.name)
        if entry is not None and entry.topic is not None and entry.topic.incarnation == topic.incarnation:
            entry.topic, entry.known = None, Flag()

    def next_time(self) -> float:
        """Return the earliest deadline of a waiting batch."""
        firsts = (entry.waiting[0][0].deadline for entry in self._lanes.values() if entry.waiting)
        return min(firsts, default=float("inf"))

    def expire(self, now: float) -> None:
        """Fail the waiting batches whose deadline has passed."""
        for entry in self._lanes.values():
            while entry.waiting and entry.waiting[0][0].deadline <= now:
                batch = entry.waiting.popleft()[0]
                self._sender.refuse(batch, self._sender.late(batch))

    def _told(self, entry: Lane, call: Call) -> None:
        """Store the metadata and send or fail the waiting batches."""
        entry.asking = False
        entry.error = call.error
        if call.error is None:
            found = self._sender.cluster.learn(call.reply.topics)
            entry.topic = found[0] if found else None
            if entry.topic is None:
                entry.error = UnknownTopic(
                    f"There is no topic {entry.name}, and the broker does not create topics automatically."
                )
        if entry.topic is not None:
            self._release(entry, entry.topic)
        elif entry.error is not None:
            self._fail(entry, entry.error)
        known = entry.known
        if entry.topic is None:
            entry.known = Flag()
        known.settle()

    def _release(self, entry: Lane, topic: Topic) -> None:
        while entry.waiting:
            self._sender.route(topic, *entry.waiting.popleft())
        for batch in self._sender.streams.without_partition(entry.name):
            self._sender.close_batch(batch)

    def _fail(self, entry: Lane, error: TfmqError) -> None:
        waiting, entry.waiting = entry.waiting, deque()
        for batch, _ in waiting:
            self._sender.refuse(batch, error)
        for batch in self._sender.streams.without_partition(entry.name):
            self._sender.refuse(batch, error)


FAILURES_REMEMBERED = 1000
"""Failed batches kept for the next flush.

Older ones are only counted, so that memory stays bounded without a flush.
"""
WINDOW_SPARE = 4
"""The broker remembers this many more batches for duplicate detection than may be in flight."""


class Options(NamedTuple):
    """How a producer sends; `Producer` documents the fields."""

    acks: int | None
    linger_seconds: float
    batch_bytes: int
    buffer_bytes: int
    timeout: float


class Times(Protocol):
    """The timer and wake-up functions of a driver."""

    def call_later(self, seconds: float, function: Callable[[], None]) -> object: ...

    def attend(self) -> None: ...


class Sender:
    """Gathers messages into batches and sends them to their partitions, without I/O.

    A message is appended to the open batch of its partition. A batch is closed and sent when it is full, when its
    linger time has passed, or when a caller waits for it and its partition sender is idle. Messages sent in the
    meantime fill the next batch, so waiting threads form batches without a linger time. Order is kept per partition.
    Memory is bounded: callers check `has_room` before they append. Everything runs under the driver's lock.

    `owner` is the producer object that delivery handles call.
    """

    def __init__(
        self,
        link: Link,
        cluster: Cluster,
        times: Times,
        owner: Owner,
        options: Options,
        selector: PartitionSelector,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.link = link
        self.cluster = cluster
        self.options = options
        self.timeout = options.timeout
        self.identities = Identities(link)
        self.outstanding: dict[Batch, None] = {}
        """Every batch that is not acked or failed, oldest first."""
        self.failures: deque[Batch] = deque(maxlen=FAILURES_REMEMBERED)
        self.used_bytes = 0
        self.lost = self.sent_messages = self.sent_batches = self.sent_bytes = self.failed_messages = 0
        self._times = times
        self._owner = owner
        self.selector = selector
        self._wall_clock = wall_clock
        self.lanes = Lanes(self)
        self.streams = Streams(self)
        self.shared = self.streams.shared(False)
        """Open batches, by topic, that accept any message without a key.

        The fast path of `send` appends to them.
        """
        self._lingering: deque[Batch] = deque()
        self._hurried: list[Batch] = []
        self._room: Flag | None = None

        self.overhead_bytes = self._make("", -1, remember=False).overhead_bytes
        """Bytes that a record without key, tag and properties adds to its payload."""

    # Used by partition senders

    def now(self) -> float:
        return self.link.now()

    @property
    def acks(self) -> int:
        return self.link.acks if self.options.acks is None else self.options.acks

    @property
    def window(self) -> int:
        """How many batches of one partition may be in flight."""
        return max(1, self.link.limits["batches_remembered"] - WINDOW_SPARE)

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        self._times.call_later(seconds, function)

    def late(self, batch: Batch) -> TfmqError:
        """Return the error for a batch that was not acked before its deadline."""
        outcome = UNKNOWN if batch.attempts else NOT_DONE
        if self.link.state != "ready" and self.link.last_error is not None:
            return ConnectionFailed(self.link.last_error.sentence, outcome=outcome)
        return TimedOut(
            f"1 message to {batch.topic} was not delivered in {self.timeout:g} s."
            if batch.count == 1
            else f"{batch.count} messages to {batch.topic} were not delivered in {self.timeout:g} s.",
            outcome=outcome,
        )

    def stored(self, batch: Batch, positions: Sequence[tuple[int, int]], durability: int) -> None:
        """Complete a batch that the broker has stored. Ignored if the batch is already done."""
        if batch.done:
            return
        self.sent_messages += batch.count
        self.sent_batches += 1
        self.sent_bytes += batch.size_bytes
        self._settled(batch)
        batch.stored(positions, durability)

    def fail(self, batch: Batch, error: TfmqError) -> None:
        """Complete a batch with an error. Ignored if the batch is already done."""
        if batch.done:
            return
        self.failed_messages += batch.count
        self._settled(batch)
        self.failures.append(batch)
        batch.failed(error)

    def drop(self, stream: Stream, moving: Sequence[Batch] = ()) -> None:
        """Remove the sender of a partition of a deleted topic.

        The next send requests the metadata again.

        The batches in `moving`, of which nothing is stored, are rerouted first.
        """
        self.streams.drop(stream)
        self.forget(stream.topic)
        stream.release(moving)
        if stream.open is not None:
            self.close_batch(stream.open)

    def move(self, batch: Batch, gone: Topic) -> None:
        """Reroute a batch, of which nothing was stored, from a deleted topic to the re-created one."""
        batch.unnumber()
        batch.attempts, batch.bounced, batch.moved_from = 0, None, len(gone.partitions)
        entry = self.lanes.lane(batch.topic)
        if entry.topic is None:
            self.lanes.wait(entry, batch)
        else:
            self.route(entry.topic, batch, KEYLESS)

    def forget(self, topic: Topic) -> None:
        """Discard the metadata of this incarnation of the topic."""
        self.cluster.forget(topic.name)
        self.lanes.forget(topic)

    def close_batch(self, batch: Batch) -> None:
        """Close an open batch and queue it for sending."""
        if not batch.is_open:
            return
        self._close(batch)
        buffer = self.streams.find(batch)
        if buffer is not None and buffer.open is batch:
            buffer.open = None
        self._enqueue(batch)

    def _close(self, batch: Batch) -> None:
        batch.close(self.options.batch_bytes)
        shared = self.streams.shared(isinstance(batch, DelayedBatch))
        if shared.get(batch.topic) is batch:
            del shared[batch.topic]

    # Used by the producer

    def has_room(self) -> bool:
        return self.used_bytes < self.options.buffer_bytes

    def room(self) -> Flag:
        """Return the event that is set when the next batch completes."""
        if self._room is None:
            self._room = Flag()
        return self._room

    def append(
        self, topic: str, message: Message, payload: bytes | None, called_at: float | None = None
    ) -> Delivery:
        """Append one message; `payload` is its encoded value (None: a tombstone).

        The caller has checked `has_room`. `called_at` is the start of a relative delay, in the connection's clock;
        None: now. Raises `MessageTooLarge`, `UnknownPartition`, and errors of the partition selector.
        """
        self.check_size(0 if payload is None else len(payload))
        part = self.part(message)
        due = due_of(message.delay, message.deliver_at)
        entry = self.lanes.lane(topic)
        batch = self._target(entry, message, due is not None)
        size = (0 if payload is None else len(payload)) + batch.overhead_bytes + len(part or b"")
        if size > batch.room and batch.payloads:
            self.close_batch(batch)
            batch = self._target(entry, message, due is not None)
        index = batch.add(payload, part, message.tag)
        if due is not None and isinstance(batch, DelayedBatch):
            batch.dues.add(Given(due, self.now() if called_at is None else called_at))
        if batch.is_open and (batch.room <= 0 or batch.leaves_at <= 0):
            self.close_batch(batch)
        elif batch.is_open and not self.options.linger_seconds:
            self._go(batch)
        return Delivery((batch, index))

    def append_many(
        self, topic: str, payloads: list[bytes], size_bytes: int, given: Given | None = None
    ) -> Batch:
        """Make one closed batch of `payloads`: all without a key and with the same due time.

        Takes ownership of the list. The batch waits until the topic is known. Raises `MessageTooLarge`.
        """
        self.check_size(max(map(len, payloads)))
        entry, delayed = self.lanes.lane(topic), given is not None
        before = self.streams.shared(delayed).get(topic)
        if before is not None:
            self.close_batch(before)
        partition = -1
        if entry.topic is not None:
            partition = choose_partition(self.selector, entry.topic, KEYLESS)
            buffer = self.streams.entrance(entry.topic, partition, delayed)
            if buffer.open is not None:
                self.close_batch(buffer.open)
        batch = self._make(topic, partition, delayed)
        batch.payloads = payloads
        if given is not None and isinstance(batch, DelayedBatch):
            batch.dues.add(given, len(payloads))
        batch.room -= size_bytes + len(payloads) * batch.overhead_bytes
        batch.close(self.options.batch_bytes)
        self._enqueue(batch)
        return batch

    def hurry(self, batches: Iterable[Batch], at_once: bool = True) -> None:
        """Close `batches` as soon as their partition senders are idle: a caller waits for them.

        `at_once=False`: at the next tick, so that further messages can be added to them.
        """
        for batch in batches:
            if batch.is_open and not batch.urgent:
                batch.urgent = True
                if at_once:
                    self._go(batch)
                else:
                    self._hurried.append(batch)

    def flush(self) -> list[Batch]:
        """Close every open batch. Return all batches that are not done."""
        for batch in [each for each in self.outstanding if each.is_open]:
            self.close_batch(batch)
        return list(self.outstanding)

    def take_failures(self) -> list[Delivery]:
        """Return the failed deliveries that no caller has inspected. Each is returned once."""
        found = [delivery for batch in self.failures for delivery in batch.unseen()]
        self.failures.clear()
        return found

    def abandon(self, error: TfmqError) -> int:
        """Fail all batches that are not done. Return their number of messages."""
        count = 0
        for batch in list(self.outstanding):
            count += batch.count or len(batch.payloads)
            batch.count = batch.count or len(batch.payloads)
            self.fail(batch, type(error)(error.sentence, outcome=UNKNOWN if batch.attempts else NOT_DONE))
        return count

    def orphan(self) -> None:
        """In a forked child: fail all batches without callbacks. The parent process sends them."""
        for batch in list(self.outstanding):
            batch.callbacks, batch.user_callbacks = [], None
            batch.failed(
                Abandoned("The message belongs to the parent process, which sends it.", outcome=UNKNOWN)
            )

    # A ticker of the driver

    def next_time(self) -> float:
        if self._hurried:
            return 0.0
        lingering = self._lingering
        while lingering and not lingering[0].is_open:
            lingering.popleft()
        soonest = lingering[0].leaves_at if lingering else float("inf")
        if len(self.outstanding) > len(lingering):
            soonest = min(soonest, self.streams.next_time(), self.lanes.next_time())
        return soonest

    def tick(self) -> None:
        now = self.now()
        hurried, self._hurried = self._hurried, []
        for batch in hurried:
            self._go(batch)
        while self._lingering and (not self._lingering[0].is_open or self._lingering[0].leaves_at <= now):
            self.close_batch(self._lingering.popleft())
        self.lanes.expire(now)
        self.streams.tick(now)

    # Internal

    def _go(self, batch: Batch) -> None:
        """Close an urgent batch if its partition sender is idle.

        Otherwise it is closed when the batches in flight are answered.
        """
        buffer = self.streams.find(batch)
        if buffer is None or buffer.idle:
            self.close_batch(batch)

    def check_size(self, size_bytes: int) -> None:
        """Raises `MessageTooLarge` if a payload exceeds the broker's limit."""
        most = (
            self.link.hello.limits.get("message_bytes", MESSAGE_BYTES) if self.link.hello else MESSAGE_BYTES
        )
        if size_bytes > most:
            raise MessageTooLarge(
                f"The message has {size_bytes} bytes, the broker takes {most}: send it in parts, or raise"
                " limits.message_bytes there."
            )

    def part(self, message: Message) -> bytes | None:
        """Return the attribute bytes of the message; None if the batch's shared ones are sufficient."""
        if message.key is None and not message.tag and not message.properties:
            return None
        born_ms = int(self._wall_clock() * 1000)
        return attribute_part(encode_attribute(born_ms, message.key, message.tag, message.properties))  # type: ignore[arg-type]

    def _target(self, entry: Lane, message: Message, delayed: bool) -> Batch:
        """Return the open batch for `message`; create one if there is none."""
        topic, all_shared = entry.topic, self.streams.shared(delayed)
        any_partition = message.partition is None and message.key is None and self.selector.per_batch
        if any_partition:
            shared = all_shared.get(entry.name)
            if shared is not None and shared.is_open:
                return shared
        if topic is None:
            self.lanes.ask(entry)
            batch = self._make(entry.name, -1, delayed)
            if any_partition:
                all_shared[entry.name] = batch
                self._lingering.append(batch)
            else:  # Its partition is chosen when the topic is known, so the message gets a batch of its own.
                batch.leaves_at = 0.0
                self.lanes.wait(entry, batch, message)
            return batch
        buffer = self.streams.entrance(topic, choose_partition(self.selector, topic, message), delayed)
        if buffer.open is None:
            buffer.open = self._make(entry.name, buffer.partition, delayed)
            self._lingering.append(buffer.open)
            if self.cluster.stale(entry.name) and not entry.asking:
                self.lanes.ask(entry)
        if any_partition:
            all_shared[entry.name] = buffer.open
        return buffer.open

    def _make(self, topic: str, partition: int, delayed: bool = False, remember: bool = True) -> Batch:
        born_ms = int(self._wall_clock() * 1000)
        leaves_at = self.now() + self.options.linger_seconds
        kind = DelayedBatch if delayed else Batch
        batch = kind(self._owner, topic, partition, self.options.batch_bytes, born_ms, leaves_at)
        batch.deadline = leaves_at + self.timeout
        if remember:
            self.outstanding[batch] = None
        return batch

    def _enqueue(self, batch: Batch) -> None:
        """Queue a closed batch at its partition sender, or until its topic is known."""
        self.used_bytes += batch.size_bytes
        entry = self.lanes.lane(batch.topic)
        if entry.topic is None:
            self.lanes.wait(entry, batch)
        else:
            self.route(entry.topic, batch, KEYLESS)

    def route(self, topic: Topic, batch: Batch, message: Message) -> None:
        """Queue a closed batch at its partition sender.

        `message` decides the partition if none is chosen yet.
        """
        try:
            partition = batch.partition
            if partition < 0:
                partition = choose_partition(self.selector, topic, message)
            if batch.moved_from not in (0, len(topic.partitions)):
                raise UnknownTopic(
                    f"The topic {topic.name} was deleted and re-created with another number of partitions: the"
                    " messages in flight are not stored. Send them again.",
                    outcome=NOT_DONE,
                )
            if partition >= len(topic.partitions):
                raise UnknownPartition(f"{topic.name} has only {len(topic.partitions)} partitions now.")
        except TfmqError as error:
            self.fail(batch, error)
            return
        batch.place(topic, partition)
        self.streams.entrance(topic, partition, isinstance(batch, DelayedBatch)).push(batch)

    def refuse(self, batch: Batch, error: TfmqError) -> None:
        """Fail a batch, open or closed, that has no partition sender yet."""
        if batch.is_open:
            self._close(batch)
            self.used_bytes += batch.size_bytes
        self.fail(batch, error)

    def _settled(self, batch: Batch) -> None:
        """Release the memory accounting of a batch and wake callers that wait for buffer space."""
        if self.outstanding.pop(batch, self) is None:
            self.used_bytes -= batch.size_bytes
        if self._room is not None:
            room, self._room = self._room, None
            room.settle()


class ProducerContext(Protocol):
    """The part of a producer that transactions and the store-and-forward queue use."""

    link: Link
    sender: Sender
    options: Options
    driver: Any
    owner: Any
    group: str | None
    hooks: tuple[Any, ...]
    plain: bool
    wall_clock: Callable[[], float]

    def check_open(self) -> None:
        """Raises `Closed` after the producer was closed."""
        ...

    def message(self, topic: str, payload: Any, *args: Any, **options: Any) -> Message: ...

    def checked(self, topic: str, message: Message) -> Message: ...

    def payload(self, topic: str, message: Message) -> bytes | None: ...

    def hook(self, topic: str, message: Message, delivery: Delivery) -> None: ...

    def knowing(self, topic: str) -> Operation[None]:
        """Wait for the metadata of `topic`."""
        ...


class Entrance(Protocol):
    """Collects batches for one partition: its sender, or its buffer in the delayed sender."""

    topic: Topic
    partition: int
    open: Batch | None

    @property
    def idle(self) -> bool: ...

    def push(self, batch: Batch) -> None: ...


class Streams:
    """The partition senders of one producer, and its sender for delayed messages.

    Runs under the driver's lock.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.plain: dict[tuple[str, int], Stream] = {}
        self.delayed = DelayedStream(sender)
        self._shared: tuple[dict[str, Batch], dict[str, Batch]] = ({}, {})

    def __iter__(self) -> Iterator[Stream]:
        return iter((*self.plain.values(), self.delayed))

    def shared(self, delayed: bool) -> dict[str, Batch]:
        """Return the open batches, by topic, that accept any message without a key."""
        return self._shared[delayed]

    def without_partition(self, topic: str) -> list[Batch]:
        """Return the open batches of a topic whose partitions are not known yet."""
        found = [shared.get(topic) for shared in self._shared]
        return [batch for batch in found if batch is not None and batch.partition < 0]

    def entrance(self, topic: Topic, partition: int, delayed: bool) -> Entrance:
        """Return the buffer of a partition of this incarnation of the topic; create it if missing."""
        if delayed:
            return self.delayed.door(topic, partition)
        key = (topic.name, partition)
        stream = self.plain.get(key)
        if stream is None or stream.topic.incarnation != topic.incarnation:
            before = stream
            if before is not None and before.open is not None:
                open_batch, before.open = before.open, None
                # Closing the batch may create the sender that was asked for.
                self._sender.close_batch(open_batch)
                return self.entrance(topic, partition, delayed)
            stream = self.plain[key] = Stream(self._sender, topic, partition)
            if before is not None and (not before.idle or before.state == "held"):
                before.hold(stream)
        return stream

    def find(self, batch: Batch) -> Entrance | None:
        """Return the buffer in which `batch` gathers messages; None if its partition is not chosen."""
        key = (batch.topic, batch.partition)
        if isinstance(batch, DelayedBatch):
            return self.delayed.doors.get(key)
        return self.plain.get(key)

    def drop(self, stream: Stream) -> None:
        """Remove the sender of a partition that was deleted."""
        key = (stream.topic.name, stream.partition)
        if self.plain.get(key) is stream:
            del self.plain[key]

    def next_time(self) -> float:
        """Return the earliest deadline of a queued batch."""
        return min(stream.next_time() for stream in self)

    def tick(self, now: float) -> None:
        """Fail the batches whose deadline has passed; send what may be sent."""
        for stream in self:
            if stream.queue:
                stream.expire(now)
                stream.pump()
