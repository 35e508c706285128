"""Gathers messages into batches and brings them to their partitions: the producer's core, without I/O.

A message goes into the open batch of its partition. A batch is closed, and goes, when it is full, when its linger
time is over, or when somebody waits for it and nothing of its stream is under way; what is sent meanwhile rides in
the next one, so waiting threads make batches by themselves. Order is kept per partition. Memory is bounded: new
batches need room. Everything runs under the driver's lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from tfmq.client.batch import Batch, Delivery, Owner
from tfmq.client.cluster import Cluster, Topic
from tfmq.client.encoder import attribute_part
from tfmq.client.identities import Identities
from tfmq.client.lanes import KEYLESS, Lane, Lanes
from tfmq.client.link import Link
from tfmq.client.partition_selector import PartitionSelector
from tfmq.client.stream import Stream
from tfmq.client.waiting import Flag
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    ConnectionFailed,
    MessageTooLarge,
    TfmqError,
    TimedOut,
    UnknownPartition,
)
from tfmq.limits import MESSAGE_BYTES
from tfmq.message import Message, encode_attribute

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
    """See the module. `owner` is the face: what batches' handles talk to."""

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
        self.shared: dict[str, Batch] = {}
        """Open batches, by topic, that take any message without a key: what `send`'s short way appends to."""
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
        self._streams: dict[tuple[str, int], Stream] = {}
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

    def drop(self, stream: Stream) -> None:
        """Forget a partition of a topic that is gone; its next message asks for the topic anew."""
        name = stream.topic.name
        if self._streams.get((name, stream.partition)) is stream:
            del self._streams[name, stream.partition]
        self.cluster.forget(name)
        self.lanes.forget(stream.topic)
        if stream.open is not None:
            self.close_batch(stream.open)

    def close_batch(self, batch: Batch) -> None:
        """Let an open batch go."""
        if not batch.is_open:
            return
        batch.close(self.options.batch_bytes)
        if self.shared.get(batch.topic) is batch:
            del self.shared[batch.topic]
        stream = self._streams.get((batch.topic, batch.partition))
        if stream is not None and stream.open is batch:
            stream.open = None
        self._enqueue(batch)

    # What the faces use

    def has_room(self) -> bool:
        return self.used_bytes < self.options.buffer_bytes

    def room(self) -> Flag:
        """Raised as soon as something is settled."""
        if self._room is None:
            self._room = Flag()
        return self._room

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        """Take one message; `payload` is its bytes (None: a tombstone). The caller has seen to room.

        Raises `MessageTooLarge`, `UnknownPartition`, and what a selector raises.
        """
        self.check_size(0 if payload is None else len(payload))
        part = self.part(message)
        lane = self.lanes.lane(topic)
        batch = self._target(lane, message)
        size = (0 if payload is None else len(payload)) + batch.overhead_bytes + len(part or b"")
        if size > batch.room and batch.payloads:
            self.close_batch(batch)
            batch = self._target(lane, message)
        index = batch.add(payload, part, message.tag)
        if batch.is_open and (batch.room <= 0 or batch.due <= 0):
            self.close_batch(batch)
        elif batch.is_open and not self.options.linger_seconds:
            self._go(batch)
        return Delivery((batch, index))

    def append_many(self, topic: str, payloads: list[bytes], size_bytes: int) -> Batch:
        """Take payloads that make one batch: all without a key. The topic is known, or the batch waits for it."""
        self.check_size(max(map(len, payloads)))
        lane = self.lanes.lane(topic)
        before = self.shared.get(topic)
        if before is not None:
            self.close_batch(before)
        partition = -1
        if lane.topic is not None:
            partition = self.select(lane.topic, KEYLESS)
            stream = self._stream(lane.topic, partition)
            if stream.open is not None:
                self.close_batch(stream.open)
        batch = self._make(topic, partition)
        batch.payloads = payloads
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
        due = lingering[0].due if lingering else float("inf")
        if len(self.outstanding) > len(lingering):
            due = min(due, *(stream.next_time() for stream in self._streams.values()), self.lanes.next_time())
        return due

    def tick(self) -> None:
        now = self.now()
        hurried, self._hurried = self._hurried, []
        for batch in hurried:
            self._go(batch)
        while self._lingering and (not self._lingering[0].is_open or self._lingering[0].due <= now):
            self.close_batch(self._lingering.popleft())
        self.lanes.expire(now)
        for stream in list(self._streams.values()):
            if stream.queue:
                stream.expire(now)
                stream.pump()

    # Inside

    def _go(self, batch: Batch) -> None:
        """Close an urgent batch, unless something of its stream is under way: then it goes with its answer."""
        stream = self._streams.get((batch.topic, batch.partition))
        if stream is None or stream.idle:
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

    def _target(self, lane: Lane, message: Message) -> Batch:
        """The open batch for `message`."""
        topic = lane.topic
        any_partition = message.partition is None and message.key is None and self.selector.per_batch
        if any_partition:
            shared = self.shared.get(lane.name)
            if shared is not None and shared.is_open:
                return shared
        if topic is None:
            self.lanes.ask(lane)
            batch = self._make(lane.name, -1)
            if any_partition:
                self.shared[lane.name] = batch
                self._lingering.append(batch)
            else:  # its partition is chosen when the topic is known, so it travels alone
                batch.due = 0.0
                self.lanes.wait(lane, batch, message)
            return batch
        stream = self._stream(topic, self.select(topic, message))
        if stream.open is None:
            stream.open = self._make(lane.name, stream.partition)
            self._lingering.append(stream.open)
            if self.cluster.stale(lane.name) and not lane.asking:
                self.lanes.ask(lane)
        if any_partition:
            self.shared[lane.name] = stream.open
        return stream.open

    def _make(self, topic: str, partition: int, remember: bool = True) -> Batch:
        now = self.now()
        born_ms = int(self._wall_clock() * 1000)
        due = now + self.options.linger_seconds
        batch = Batch(self._owner, topic, partition, self.options.batch_bytes, born_ms, due)
        batch.deadline = now + self.options.linger_seconds + self.timeout
        if remember:
            self.outstanding[batch] = None
        return batch

    def select(self, topic: Topic, message: Message) -> int:
        partitions = topic.partitions
        if message.partition is not None:
            if not 0 <= message.partition < len(partitions):
                raise UnknownPartition(
                    f"{topic.name} has partitions 0 to {len(partitions) - 1}, not {message.partition}."
                )
            return message.partition
        if len(partitions) == 1:
            return 0
        return self.selector.get_partition(topic.name, partitions, message).number

    def _stream(self, topic: Topic, partition: int) -> Stream:
        key = (topic.name, partition)
        stream = self._streams.get(key)
        if stream is None or stream.topic.incarnation != topic.incarnation:
            stream = self._streams[key] = Stream(self, topic, partition)
        return stream

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
            partition = self.select(topic, message) if batch.partition < 0 else batch.partition
            if partition >= len(topic.partitions):
                raise UnknownPartition(f"{topic.name} has only {len(topic.partitions)} partitions now.")
        except TfmqError as error:
            self.fail(batch, error)
            return
        self._stream(topic, partition).push(batch)

    def refuse(self, batch: Batch, error: TfmqError) -> None:
        """Fail a batch that is not with a stream yet, open or not."""
        if batch.is_open:
            batch.close(self.options.batch_bytes)
            self.used_bytes += batch.size_bytes
            if self.shared.get(batch.topic) is batch:
                del self.shared[batch.topic]
        self.fail(batch, error)

    def _settled(self, batch: Batch) -> None:
        if self.outstanding.pop(batch, self) is None:
            self.used_bytes -= batch.size_bytes
        if self._room is not None:
            room, self._room = self._room, None
            room.settle()
