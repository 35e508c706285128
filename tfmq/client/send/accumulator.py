"""Topics on their way to being known: asked for once, with the batches that wait for the answer."""

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
"""Stands for any message without a key where a selector is asked for a whole batch."""


class Lane:
    """One topic, as far as it is known, and the batches that wait until it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.topic: Topic | None = None
        self.known = Flag()
        self.error: TfmqError | None = None
        self.asking = False
        self.waiting: deque[tuple[Batch, Message]] = deque()


class Lanes:
    """All topics that a producer sends to. Runs under the driver's lock, as its sender does."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lanes: dict[str, Lane] = {}

    def lane(self, topic: str) -> Lane:
        lane = self._lanes.get(topic)
        if lane is None:
            lane = self._lanes[topic] = Lane(topic)
            lane.topic = self._sender.cluster.topic(topic)
        return lane

    def knows(self, topic: str) -> bool:
        """Whether the topic's partitions are known."""
        return self.lane(topic).topic is not None

    def ask(self, lane: Lane) -> None:
        """Have the topic asked for (and made, where the broker does that); `known` of the lane is raised then."""
        if lane.asking:
            return
        lane.asking = True
        call = self._sender.link.call(
            Metadata([lane.name], True), seconds=self._sender.timeout, unattended=True
        )
        call.when_done(lambda done: self._told(lane, done))

    def wait(self, lane: Lane, batch: Batch, message: Message = KEYLESS) -> None:
        """Hold a batch until the topic is known; `message` decides its partition then."""
        if not lane.waiting or lane.waiting[-1][0] is not batch:  # a batch comes twice in a row
            lane.waiting.append((batch, message))
        self.ask(lane)

    def forget(self, topic: Topic) -> None:
        """The topic, or this incarnation of it, is gone."""
        lane = self._lanes.get(topic.name)
        if lane is not None and lane.topic is not None and lane.topic.incarnation == topic.incarnation:
            lane.topic, lane.known = None, Flag()

    def next_time(self) -> float:
        """When the first waiting batch is too late."""
        firsts = (lane.waiting[0][0].deadline for lane in self._lanes.values() if lane.waiting)
        return min(firsts, default=float("inf"))

    def expire(self, now: float) -> None:
        """Fail what waited too long."""
        for lane in self._lanes.values():
            while lane.waiting and lane.waiting[0][0].deadline <= now:
                batch = lane.waiting.popleft()[0]
                self._sender.refuse(batch, self._sender.late(batch))

    def _told(self, lane: Lane, call: Call) -> None:
        lane.asking = False
        lane.error = call.error
        if call.error is None:
            found = self._sender.cluster.learn(call.reply.topics)
            lane.topic = found[0] if found else None
            if lane.topic is None:
                lane.error = UnknownTopic(
                    f"There is no topic {lane.name}, and the broker makes none by itself."
                )
        if lane.topic is not None:
            self._release(lane, lane.topic)
        elif lane.error is not None:
            self._fail(lane, lane.error)
        known = lane.known
        if lane.topic is None:
            lane.known = Flag()
        known.settle()

    def _release(self, lane: Lane, topic: Topic) -> None:
        while lane.waiting:
            self._sender.route(topic, *lane.waiting.popleft())
        for batch in self._sender.streams.without_partition(lane.name):
            self._sender.close_batch(batch)

    def _fail(self, lane: Lane, error: TfmqError) -> None:
        waiting, lane.waiting = lane.waiting, deque()
        for batch, _ in waiting:
            self._sender.refuse(batch, error)
        for batch in self._sender.streams.without_partition(lane.name):
            self._sender.refuse(batch, error)


FAILURES_REMEMBERED = 1000
"""Failed batches kept for the next flush; older ones are only counted, so that a forgotten flush costs no memory."""
WINDOW_SPARE = 4
"""The broker remembers so many batches more than may be in flight."""


class Options(NamedTuple):
    """How a producer sends; see `Producer` for what each means."""

    acks: int | None
    linger_seconds: float
    batch_bytes: int
    buffer_bytes: int
    timeout: float


class Times(Protocol):
    """What the sender needs of a driver."""

    def call_later(self, seconds: float, function: Callable[[], None]) -> object: ...

    def attend(self) -> None: ...


class Sender:
    """Gathers messages into batches and brings them to their partitions: the producer's core, without I/O.

    A message goes into the open batch of its partition. A batch is closed, and goes, when it is full, when its linger
    time is over, or when somebody waits for it and nothing of its stream is under way; what is sent meanwhile rides in
    the next one, so waiting threads make batches by themselves. Order is kept per partition. Memory is bounded: new
    batches need room. Everything runs under the driver's lock.

    `owner` is the face: what batches' handles talk to.
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
        """Every batch that is not settled, oldest first."""
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
        """Open batches, by topic, that take any message without a key: what `send`'s short way appends to."""
        self._lingering: deque[Batch] = deque()
        self._hurried: list[Batch] = []
        self._room: Flag | None = None

        self.overhead_bytes = self._make("", -1, remember=False).overhead_bytes
        """What a record without key, tag and properties adds to its payload."""

    # What streams use

    def now(self) -> float:
        return self.link.now()

    @property
    def acks(self) -> int:
        return self.link.acks if self.options.acks is None else self.options.acks

    @property
    def window(self) -> int:
        """How many batches of one stream may be in flight."""
        return max(1, self.link.limits["batches_remembered"] - WINDOW_SPARE)

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        self._times.call_later(seconds, function)

    def late(self, batch: Batch) -> TfmqError:
        """Why a batch could not be delivered in its time."""
        outcome = UNKNOWN if batch.attempts else NOT_DONE
        if self.link.state != "ready" and self.link.last_error is not None:
            return ConnectionFailed(self.link.last_error.sentence, outcome=outcome)
        return TimedOut(
            f"{batch.count} messages to {batch.topic} were not delivered in {self.timeout:g} s.",
            outcome=outcome,
        )

    def stored(self, batch: Batch, positions: Sequence[tuple[int, int]], durability: int) -> None:
        """The broker has it. Nothing, if it was given up before."""
        if batch.done:
            return
        self.sent_messages += batch.count
        self.sent_batches += 1
        self.sent_bytes += batch.size_bytes
        self._settled(batch)
        batch.stored(positions, durability)

    def fail(self, batch: Batch, error: TfmqError) -> None:
        """It cannot be delivered. Nothing, if it is settled already."""
        if batch.done:
            return
        self.failed_messages += batch.count
        self._settled(batch)
        self.failures.append(batch)
        batch.failed(error)

    def drop(self, stream: Stream, moving: Sequence[Batch] = ()) -> None:
        """Forget a partition of a topic that is gone; its next message asks for the topic anew. Those of `moving`,
        of which nothing is stored, go first.
        """
        self.streams.drop(stream)
        self.forget(stream.topic)
        stream.release(moving)
        if stream.open is not None:
            self.close_batch(stream.open)

    def move(self, batch: Batch, gone: Topic) -> None:
        """Nothing of the batch was stored in the topic that is `gone`: it goes to the one that is made anew."""
        batch.unnumber()
        batch.attempts, batch.bounced, batch.moved_from = 0, None, len(gone.partitions)
        lane = self.lanes.lane(batch.topic)
        if lane.topic is None:
            self.lanes.wait(lane, batch)
        else:
            self.route(lane.topic, batch, KEYLESS)

    def forget(self, topic: Topic) -> None:
        """The topic, or this incarnation of it, is gone."""
        self.cluster.forget(topic.name)
        self.lanes.forget(topic)

    def close_batch(self, batch: Batch) -> None:
        """Let an open batch go."""
        if not batch.is_open:
            return
        self._close(batch)
        entrance = self.streams.find(batch)
        if entrance is not None and entrance.open is batch:
            entrance.open = None
        self._enqueue(batch)

    def _close(self, batch: Batch) -> None:
        batch.close(self.options.batch_bytes)
        shared = self.streams.shared(isinstance(batch, DelayedBatch))
        if shared.get(batch.topic) is batch:
            del shared[batch.topic]

    # What the faces use

    def has_room(self) -> bool:
        return self.used_bytes < self.options.buffer_bytes

    def room(self) -> Flag:
        """Raised as soon as something is settled."""
        if self._room is None:
            self._room = Flag()
        return self._room

    def append(
        self, topic: str, message: Message, payload: bytes | None, called_at: float | None = None
    ) -> Delivery:
        """Take one message; `payload` is its bytes (None: a tombstone). The caller has seen to room. `called_at`: when
        it was given, from which a delay counts; None: now.

        Raises `MessageTooLarge`, `UnknownPartition`, and what a selector raises.
        """
        self.check_size(0 if payload is None else len(payload))
        part = self.part(message)
        due = due_of(message.delay, message.deliver_at)
        lane = self.lanes.lane(topic)
        batch = self._target(lane, message, due is not None)
        size = (0 if payload is None else len(payload)) + batch.overhead_bytes + len(part or b"")
        if size > batch.room and batch.payloads:
            self.close_batch(batch)
            batch = self._target(lane, message, due is not None)
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
        """Take payloads that make one batch: all without a key, and all due alike. The topic is known, or the batch
        waits for it.
        """
        self.check_size(max(map(len, payloads)))
        lane, delayed = self.lanes.lane(topic), given is not None
        before = self.streams.shared(delayed).get(topic)
        if before is not None:
            self.close_batch(before)
        partition = -1
        if lane.topic is not None:
            partition = choose_partition(self.selector, lane.topic, KEYLESS)
            entrance = self.streams.entrance(lane.topic, partition, delayed)
            if entrance.open is not None:
                self.close_batch(entrance.open)
        batch = self._make(topic, partition, delayed)
        batch.payloads = payloads
        if given is not None and isinstance(batch, DelayedBatch):
            batch.dues.add(given, len(payloads))
        batch.room -= size_bytes + len(payloads) * batch.overhead_bytes
        batch.close(self.options.batch_bytes)
        self._enqueue(batch)
        return batch

    def hurry(self, batches: Iterable[Batch], at_once: bool = True) -> None:
        """Somebody waits for these. `at_once=False`: at the next tick, when others have joined them."""
        for batch in batches:
            if batch.is_open and not batch.urgent:
                batch.urgent = True
                if at_once:
                    self._go(batch)
                else:
                    self._hurried.append(batch)

    def flush(self) -> list[Batch]:
        """Let every open batch go; everything that is not settled."""
        for batch in [each for each in self.outstanding if each.is_open]:
            self.close_batch(batch)
        return list(self.outstanding)

    def take_failures(self) -> list[Delivery]:
        """The failed deliveries at which nobody has looked; each is told once."""
        found = [delivery for batch in self.failures for delivery in batch.unseen()]
        self.failures.clear()
        return found

    def abandon(self, error: TfmqError) -> int:
        """Give up what is not settled; how many messages that were."""
        count = 0
        for batch in list(self.outstanding):
            count += batch.count or len(batch.payloads)
            batch.count = batch.count or len(batch.payloads)
            self.fail(batch, type(error)(error.sentence, outcome=UNKNOWN if batch.attempts else NOT_DONE))
        return count

    def orphan(self) -> None:
        """In a forked child: the parent sends these, nobody here does."""
        for batch in list(self.outstanding):
            batch.callbacks, batch.user_callbacks = [], None
            batch.failed(
                Abandoned("It belongs to the process that forked; that one sends it.", outcome=UNKNOWN)
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

    # Inside

    def _go(self, batch: Batch) -> None:
        """Close an urgent batch, unless something of its stream is under way: then it goes with its answer."""
        entrance = self.streams.find(batch)
        if entrance is None or entrance.idle:
            self.close_batch(batch)

    def check_size(self, size_bytes: int) -> None:
        most = (
            self.link.hello.limits.get("message_bytes", MESSAGE_BYTES) if self.link.hello else MESSAGE_BYTES
        )
        if size_bytes > most:
            raise MessageTooLarge(
                f"The message has {size_bytes} bytes, the broker takes {most}: send it in parts, or raise"
                " limits.message_bytes there."
            )

    def part(self, message: Message) -> bytes | None:
        """The attribute part of a message that does not share its batch's."""
        if message.key is None and not message.tag and not message.properties:
            return None
        born_ms = int(self._wall_clock() * 1000)
        return attribute_part(encode_attribute(born_ms, message.key, message.tag, message.properties))  # type: ignore[arg-type]

    def _target(self, lane: Lane, message: Message, delayed: bool) -> Batch:
        """The open batch for `message`."""
        topic, all_shared = lane.topic, self.streams.shared(delayed)
        any_partition = message.partition is None and message.key is None and self.selector.per_batch
        if any_partition:
            shared = all_shared.get(lane.name)
            if shared is not None and shared.is_open:
                return shared
        if topic is None:
            self.lanes.ask(lane)
            batch = self._make(lane.name, -1, delayed)
            if any_partition:
                all_shared[lane.name] = batch
                self._lingering.append(batch)
            else:  # its partition is chosen when the topic is known, so it travels alone
                batch.leaves_at = 0.0
                self.lanes.wait(lane, batch, message)
            return batch
        entrance = self.streams.entrance(topic, choose_partition(self.selector, topic, message), delayed)
        if entrance.open is None:
            entrance.open = self._make(lane.name, entrance.partition, delayed)
            self._lingering.append(entrance.open)
            if self.cluster.stale(lane.name) and not lane.asking:
                self.lanes.ask(lane)
        if any_partition:
            all_shared[lane.name] = entrance.open
        return entrance.open

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
        """A closed batch takes its place in the order of its partition, or waits until its topic is known."""
        self.used_bytes += batch.size_bytes
        lane = self.lanes.lane(batch.topic)
        if lane.topic is None:
            self.lanes.wait(lane, batch)
        else:
            self.route(lane.topic, batch, KEYLESS)

    def route(self, topic: Topic, batch: Batch, message: Message) -> None:
        """Bring a closed batch to its stream; `message` decides where its partition is still open."""
        try:
            partition = batch.partition
            if partition < 0:
                partition = choose_partition(self.selector, topic, message)
            if batch.moved_from not in (0, len(topic.partitions)):
                raise UnknownTopic(
                    f"The topic {topic.name} was deleted, and made anew with another number of partitions: the"
                    " messages that were on their way are not stored. Send them again.",
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
        """Fail a batch that is not with a stream yet, open or not."""
        if batch.is_open:
            self._close(batch)
            self.used_bytes += batch.size_bytes
        self.fail(batch, error)

    def _settled(self, batch: Batch) -> None:
        if self.outstanding.pop(batch, self) is None:
            self.used_bytes -= batch.size_bytes
        if self._room is not None:
            room, self._room = self._room, None
            room.settle()


class ProducerContext(Protocol):
    """What transactions and the store-and-forward queue use of the producer that they belong to."""

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
        """Raises `Closed`."""
        ...

    def message(self, topic: str, payload: Any, *args: Any, **options: Any) -> Message: ...

    def checked(self, topic: str, message: Message) -> Message: ...

    def payload(self, topic: str, message: Message) -> bytes | None: ...

    def hook(self, topic: str, message: Message, delivery: Delivery) -> None: ...

    def knowing(self, topic: str) -> Operation[None]:
        """Wait for the metadata of `topic`."""
        ...


# All streams of one producer: one for each partition, and one for what is delayed.


class Entrance(Protocol):
    """Where batches for one partition gather and go in: its stream, or its door to the stream of delayed ones."""

    topic: Topic
    partition: int
    open: Batch | None

    @property
    def idle(self) -> bool: ...

    def push(self, batch: Batch) -> None: ...


class Streams:
    """Runs under the driver's lock, as its sender does."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.plain: dict[tuple[str, int], Stream] = {}
        self.delayed = DelayedStream(sender)
        self._shared: tuple[dict[str, Batch], dict[str, Batch]] = ({}, {})

    def __iter__(self) -> Iterator[Stream]:
        return iter((*self.plain.values(), self.delayed))

    def shared(self, delayed: bool) -> dict[str, Batch]:
        """The open batches, by topic, that take any message without a key."""
        return self._shared[delayed]

    def without_partition(self, topic: str) -> list[Batch]:
        """Those that gather until it is known which partitions the topic has."""
        found = [shared.get(topic) for shared in self._shared]
        return [batch for batch in found if batch is not None and batch.partition < 0]

    def entrance(self, topic: Topic, partition: int, delayed: bool) -> Entrance:
        """Of a partition of this incarnation of the topic; made if there is none."""
        if delayed:
            return self.delayed.door(topic, partition)
        key = (topic.name, partition)
        stream = self.plain.get(key)
        if stream is None or stream.topic.incarnation != topic.incarnation:
            before = stream
            if before is not None and before.open is not None:
                gathered, before.open = before.open, None
                self._sender.close_batch(gathered)  # which may make the stream that is asked for
                return self.entrance(topic, partition, delayed)
            stream = self.plain[key] = Stream(self._sender, topic, partition)
            if before is not None and (not before.idle or before.state == "held"):
                before.hold(stream)
        return stream

    def find(self, batch: Batch) -> Entrance | None:
        """Where `batch` gathers, if its partition is known."""
        key = (batch.topic, batch.partition)
        if isinstance(batch, DelayedBatch):
            return self.delayed.doors.get(key)
        return self.plain.get(key)

    def drop(self, stream: Stream) -> None:
        """Forget the stream of a partition that is gone."""
        key = (stream.topic.name, stream.partition)
        if self.plain.get(key) is stream:
            del self.plain[key]

    def next_time(self) -> float:
        """When the first batch that waits is too late."""
        return min(stream.next_time() for stream in self)

    def tick(self, now: float) -> None:
        """Fail what waited too long, send what may go."""
        for stream in self:
            if stream.queue:
                stream.expire(now)
                stream.pump()
