"""The record accumulator: gathers messages into batches for the partition senders.

Until a topic's metadata is known, its batches wait in a `ProducerTopic`. Each partition has a sender of its own, and
one more sender sends the delayed messages of all partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from journal.record.format import HEADER_SIZE
from tfmq.client.connection.connection import READY, ClientConnection, PendingRequest
from tfmq.client.connection.requests import MetadataCache, Topic
from tfmq.client.operation import Event, Operation
from tfmq.client.send.batch import Batch, Delivery, DeliveryOwner, PreparedBatch
from tfmq.client.send.delivery_time import DueTimes, StampedDueTime, due_number
from tfmq.client.send.partition_sender import (
    DelayedPartitionBuffer,
    DelayedSender,
    PartitionSender,
    ProducerIds,
    SenderState,
)
from tfmq.client.send.partitioner import PartitionSelector, choose_partition
from tfmq.client.send.record_encoder import attribute_part, birth_part
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    MessageTooLarge,
    TfmqError,
    TimedOut,
    UnknownPartition,
    UnknownTopic,
)
from tfmq.hooks import sampled_context
from tfmq.limits import MESSAGE_BYTES
from tfmq.message import Message, encode_attribute
from tfmq.protocol.commands import ACKS_SYNCED, Metadata

KEYLESS = Message(None)
"""Passed to the selector when it chooses a partition for a whole batch of messages without a key."""


class ProducerTopic:
    """A topic to which a producer sends, its metadata if known, and the batches that wait for the metadata."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metadata: Topic | None = None
        self.known_event = Event()
        self.error: TfmqError | None = None
        self.metadata_requested = False
        self.waiting_batches: deque[tuple[Batch, Message]] = deque()


FAILURES_REMEMBERED = 1000
"""How many failed batches are kept for the next flush, which reports them. Older failures are only counted."""
IN_FLIGHT_RESERVE = 4
"""The in-flight limit is the number of batches that the broker remembers to detect duplicates, minus this reserve."""


class SendOptions(NamedTuple):
    """The settings of a producer's sending; `Producer` documents them."""

    acks: int | None
    linger_seconds: float
    batch_bytes: int
    buffer_bytes: int
    timeout: float


class RecordAccumulator:
    """Gathers messages into batches and sends them to their partitions, without I/O.

    A message is appended to the open batch of its partition. A batch is closed and sent when it is full, when its
    linger time has passed, or when a caller waits for it and its partition sender has nothing in flight. While a batch
    is in flight, the messages of other threads fill the next batch, so batches form also without a linger time. Order
    is kept per partition. Memory is bounded, because callers check `has_room` before they append. All methods must be
    called under the driver's lock.
    """

    def __init__(self, producer: ProducerContext) -> None:
        link, options = producer.link, producer.options
        self.link, self.now = link, link.now
        self.metadata = MetadataCache(link.now)
        self.options = options
        self.timeout = options.timeout
        self.producer_ids = ProducerIds(link)
        self.outstanding: dict[Batch, None] = {}
        """All batches that are neither stored nor failed, oldest first."""
        self.failures: deque[Batch] = deque(maxlen=FAILURES_REMEMBERED)
        self.used_bytes = 0
        self.lost_messages = self.failed_messages = 0
        self.sent_messages = self.sent_batches = self.sent_bytes = 0
        self.call_later: Callable[[float, Callable[[], None]], object] = producer.driver.call_later
        self._owner: DeliveryOwner = producer.owner
        self.selector = producer.selector
        self.wall_clock = producer.wall_clock
        self._topics: dict[str, ProducerTopic] = {}
        self.partition_senders: dict[tuple[str, int], PartitionSender] = {}
        self.delayed_sender = DelayedSender(self)
        self.shared_batches: dict[str, Batch] = {}
        """By topic name: the open batch to which `send` directly appends messages without a key."""
        self.shared_delayed: dict[str, Batch] = {}
        """By topic name: the open batch for delayed messages without a key."""
        self._created_batches = 0
        self._lingering: deque[Batch] = deque()
        self._expedited: list[Batch] = []
        self._room_event: Event | None = None
        self.overhead_bytes = HEADER_SIZE + len(birth_part(int(self.wall_clock() * 1000)))
        """Bytes of a record without key, tag and properties, not counting its payload."""

    # Used by partition senders

    @property
    def acks(self) -> int:
        if self.options.acks is not None:
            return self.options.acks
        return self.link.hello.acks if self.link.hello else ACKS_SYNCED

    @property
    def in_flight_limit(self) -> int:
        return max(1, self.link.limits["batches_remembered"] - IN_FLIGHT_RESERVE)

    def timeout_error(self, batch: Batch) -> TfmqError:
        outcome = UNKNOWN if batch.attempts else NOT_DONE
        if self.link.state != READY and self.link.last_error is not None:
            return self.link.connection_failure(outcome)
        return TimedOut(
            f"1 message to {batch.topic} was not delivered in {self.timeout:g} s."
            if batch.count == 1
            else f"{batch.count} messages to {batch.topic} were not delivered in {self.timeout:g} s.",
            outcome=outcome,
        )

    def complete_batch(self, batch: Batch, positions: Sequence[tuple[int, int]], durability: int) -> None:
        """Complete a batch that the broker has stored. Does nothing if the batch is already done."""
        if batch.done:
            return
        self.sent_messages += batch.count
        self.sent_batches += 1
        self.sent_bytes += batch.size_bytes
        self._remove_outstanding(batch)
        batch.set_stored(positions, durability)

    def fail_batch(self, batch: Batch, error: TfmqError) -> None:
        """Complete a batch with an error. Does nothing if the batch is already done."""
        if batch.done:
            return
        self.failed_messages += batch.count
        self._remove_outstanding(batch)
        self.failures.append(batch)
        batch.set_failed(error)

    def remove_partition(self, sender: PartitionSender, moving: Sequence[Batch] = ()) -> None:
        """Remove the sender `sender`, whose topic is deleted. Reroute its batches `moving`, which are not stored."""
        key = (sender.topic.name, sender.partition)
        if self.partition_senders.get(key) is sender:
            del self.partition_senders[key]
        self.invalidate_topic(sender.topic)
        sender.start_replacement(moving)
        if sender.open_batch is not None:
            self.close_batch(sender.open_batch)

    def reroute_batch(self, batch: Batch, deleted_topic: Topic) -> None:
        """Move a batch, which is not stored, from `deleted_topic` to the re-created topic of the same name."""
        batch.clear_sequence()
        batch.attempts, batch.last_error, batch.rerouted_from_partitions = 0, None, len(deleted_topic.partitions)
        self._route_or_wait(batch)

    def invalidate_topic(self, topic: Topic) -> None:
        self.metadata.invalidate(topic.name)
        entry = self._topics.get(topic.name)
        known = None if entry is None else entry.metadata
        if entry is not None and known is not None and known.incarnation == topic.incarnation:
            entry.metadata, entry.known_event = None, Event()

    def close_batch(self, batch: Batch) -> None:
        if not batch.is_open:
            return
        self._close(batch)
        buffer, entry = batch.buffer, self._topics.get(batch.topic)
        if buffer is not None and buffer.open_batch is batch:
            buffer.open_batch = None
            topic = None if entry is None else entry.metadata
            if topic is not None and topic.incarnation == buffer.topic.incarnation:
                batch.routed_topic = topic
                buffer.push(batch)
                return
        self._route_or_wait(batch)

    def _close(self, batch: Batch) -> None:
        batch.close(self.options.batch_bytes)
        self.used_bytes += batch.size_bytes
        shared = self.shared_batches if batch.due_times is None else self.shared_delayed
        if shared.get(batch.topic) is batch:
            del shared[batch.topic]

    # Used by the producer

    def has_room(self) -> bool:
        return self.used_bytes < self.options.buffer_bytes

    def room_event(self) -> Event:
        """Return the event that is set when the next batch is done, which frees buffer space."""
        if self._room_event is None:
            self._room_event = Event()
        return self._room_event

    def append(self, topic: str, message: Message, payload: bytes | None, called_at: float | None = None) -> Delivery:
        """Append one message; `payload` is its encoded value (None: a tombstone).

        The caller must have checked `has_room`. `called_at`: when the message's delay started, in the connection's
        clock; None: now. Raises `MessageTooLarge`, `UnknownPartition`, and errors of the partition selector.
        """
        self.check_size(0 if payload is None else len(payload))
        part = self.encode_attribute_part(message)
        due = due_number(message.delay, message.deliver_at)
        entry = self.topic_entry(topic)
        batch = self._open_batch_for(entry, message, due is not None)
        size = (0 if payload is None else len(payload)) + batch.overhead_bytes + len(part or b"")
        if size > batch.room_bytes and batch.payloads:
            self.close_batch(batch)
            batch = self._open_batch_for(entry, message, due is not None)
        index = batch.add(payload, part, message.tag)
        if self.link.trace_context is not None and message.properties and batch.trace is None:
            batch.trace = sampled_context(message.properties)
        if due is not None and batch.due_times is not None:
            batch.due_times.add(StampedDueTime(due, self.now() if called_at is None else called_at))
        if batch.is_open and (batch.room_bytes <= 0 or batch.closes_at <= 0):
            self.close_batch(batch)
        elif batch.is_open and not self.options.linger_seconds:
            self._close_if_idle(batch)
        return Delivery((batch, index))

    def append_plain(self, topic: str, payload: bytes) -> Delivery | None:
        """Append a message without key, tag, properties and time. The partition selector must be `per_batch`.

        Return None if the topic is not known, there is no buffer space, or the payload is too large: then the caller
        must use `append`.
        """
        entry = self._topics.get(topic)
        if (
            entry is None
            or entry.metadata is None
            or self.used_bytes >= self.options.buffer_bytes
            or len(payload) > self.link.limits["message_bytes"]
        ):
            return None
        batch = self._open_batch_for(entry, KEYLESS, False)
        delivery = batch.add_plain(payload)
        if delivery is None:
            if batch.payloads:
                return None
            delivery = Delivery((batch, batch.add(payload, None, None)))  # The message alone fills the new batch.
            self.close_batch(batch)
        elif not self.options.linger_seconds:
            self._close_if_idle(batch)
        return delivery

    def append_many(
        self, topic: str, payloads: list[bytes], size_bytes: int, given: StampedDueTime | None = None
    ) -> Batch:
        """Make one closed batch of `payloads`, as messages without a key, and queue it for sending.

        `size_bytes`: the sum of the payload sizes. `given`: the due time of all messages; None: not delayed. The caller
        must not use the list `payloads` again. Raises `MessageTooLarge`.
        """
        self.check_size(max(map(len, payloads)))
        batch = self._create_closed_batch(topic, None, given is not None)
        batch.payloads = payloads
        if given is not None and batch.due_times is not None:
            batch.due_times.add(given, len(payloads))
        batch.room_bytes -= size_bytes + len(payloads) * batch.overhead_bytes
        self._close(batch)
        self._route_or_wait(batch)
        return batch

    def append_prepared(self, topic: str, partition: int | None, prepared: PreparedBatch) -> Batch:
        """Make one closed batch of prepared records and queue it. `partition` None: the selector chooses one."""
        batch = self._create_closed_batch(topic, partition, False)
        batch.prepared = prepared
        batch.room_bytes -= prepared.size_bytes
        self._close(batch)
        self._route_or_wait(batch)
        return batch

    def _create_closed_batch(self, topic: str, partition: int | None, delayed: bool) -> Batch:
        """Close the open batches for the partition, to keep the order. Return a new batch, which the caller closes."""
        entry = self.topic_entry(topic)
        before = (self.shared_delayed if delayed else self.shared_batches).get(topic)
        if before is not None:
            self.close_batch(before)
        chosen = -1 if partition is None else partition
        if entry.metadata is not None:
            if partition is None:
                chosen = choose_partition(self.selector, entry.metadata, KEYLESS)
            buffer = self.buffer_for(entry.metadata, chosen, delayed)
            if buffer.open_batch is not None:
                self.close_batch(buffer.open_batch)
        return self._create_batch(topic, chosen, delayed)

    def expedite(self, batches: Iterable[Batch], at_once: bool = True) -> None:
        """Close each of `batches`, for which a caller waits, as soon as its partition sender is idle.

        `at_once` False: close it at the driver's next tick at the earliest, so that more messages can be added.
        """
        for batch in batches:
            if batch.is_open and not batch.is_urgent:
                batch.is_urgent = True
                if not at_once:
                    self._expedited.append(batch)
                elif batch.buffer is None or batch.buffer.idle:
                    self.close_batch(batch)

    def close_open_batches(self) -> list[Batch]:
        """Close every open batch. Return all batches that are not done."""
        for batch in [each for each in self.outstanding if each.is_open]:
            self.close_batch(batch)
        return list(self.outstanding)

    def pop_failures(self) -> list[Delivery]:
        """Return the failed deliveries whose error no caller has read. Each of them is returned only once."""
        found = [delivery for batch in self.failures for delivery in batch.unseen_failures()]
        self.failures.clear()
        return found

    def fail_outstanding(self, error: TfmqError) -> int:
        """Fail all batches that are not done. Return the number of messages in these batches."""
        count = 0
        for batch in list(self.outstanding):
            batch.count = batch.count or len(batch.payloads)
            count += batch.count
            self.fail_batch(batch, type(error)(error.sentence, outcome=UNKNOWN if batch.attempts else NOT_DONE))
        return count

    def abandon_after_fork(self) -> None:
        """Fail all batches in a forked child process, without callbacks. The parent process sends these batches."""
        for batch in list(self.outstanding):
            batch.callbacks, batch.user_callbacks = [], None
            batch.set_failed(Abandoned("The message belongs to the parent process, which sends it.", outcome=UNKNOWN))

    # Called by the driver, which has the accumulator in its list `tickers`

    def next_time(self) -> float:
        if self._expedited:
            return 0.0
        lingering = self._lingering
        while lingering and not lingering[0].is_open:
            lingering.popleft()
        soonest = lingering[0].closes_at if lingering else float("inf")
        if len(self.outstanding) > len(lingering):
            for sender in (*self.partition_senders.values(), self.delayed_sender):
                if sender.queue:
                    soonest = min(soonest, sender.queue[0].deadline)
            for entry in self._topics.values():
                if entry.waiting_batches:
                    soonest = min(soonest, entry.waiting_batches[0][0].deadline)
        return soonest

    def tick(self) -> None:
        now = self.now()
        hurried, self._expedited = self._expedited, []
        for batch in hurried:
            self._close_if_idle(batch)
        while self._lingering and (not self._lingering[0].is_open or self._lingering[0].closes_at <= now):
            self.close_batch(self._lingering.popleft())
        for entry in self._topics.values():
            while entry.waiting_batches and entry.waiting_batches[0][0].deadline <= now:
                batch = entry.waiting_batches.popleft()[0]
                self._fail_unrouted_batch(batch, self.timeout_error(batch))
        for sender in self.senders():
            if sender.queue:
                sender.expire(now)
                sender.pump()

    def _close_if_idle(self, batch: Batch) -> None:
        """Close a batch if its sender is idle. If not, the sender closes the batch once idle, if `is_urgent` is set."""
        if batch.buffer is None or batch.buffer.idle:
            self.close_batch(batch)

    def check_size(self, size_bytes: int) -> None:
        """Raises `MessageTooLarge` if a payload exceeds the broker's limit."""
        hello = self.link.hello
        most = hello.limits.get("message_bytes", MESSAGE_BYTES) if hello else MESSAGE_BYTES
        if size_bytes > most:
            raise MessageTooLarge(
                f"The message has {size_bytes} bytes, the broker takes {most}: send it in parts, or raise"
                " limits.message_bytes there."
            )

    def encode_attribute_part(self, message: Message) -> bytes | None:
        """Return the message's encoded attribute; None if the message has neither key nor tag nor properties."""
        if message.key is None and not message.tag and not message.properties:
            return None
        born_ms = int(self.wall_clock() * 1000)
        return attribute_part(encode_attribute(born_ms, message.key, message.tag, message.properties))  # type: ignore[arg-type]

    def _open_batch_for(self, entry: ProducerTopic, message: Message, delayed: bool) -> Batch:
        topic, all_shared = entry.metadata, self.shared_delayed if delayed else self.shared_batches
        any_partition = message.partition is None and message.key is None and self.selector.per_batch
        if any_partition:
            shared = all_shared.get(entry.name)
            if shared is not None and shared.is_open:
                return shared
        if topic is None:
            self.request_metadata(entry)
            batch = self._create_batch(entry.name, -1, delayed)
            if any_partition:
                all_shared[entry.name] = batch
                self._lingering.append(batch)
            else:  # The partition can be chosen only when the topic is known, so the batch takes no other message.
                batch.closes_at = 0.0
                self._add_waiting(entry, batch, message)
            return batch
        buffer = self.buffer_for(topic, choose_partition(self.selector, topic, message), delayed)
        if buffer.open_batch is None:
            buffer.open_batch = self._create_batch(entry.name, buffer.partition, delayed)
            buffer.open_batch.buffer = buffer
            self._lingering.append(buffer.open_batch)
            if self.metadata.is_stale(entry.name) and not entry.metadata_requested:
                self.request_metadata(entry)
        if any_partition:
            all_shared[entry.name] = buffer.open_batch
        return buffer.open_batch

    def _create_batch(self, topic: str, partition: int, delayed: bool) -> Batch:
        part = birth_part(int(self.wall_clock() * 1000))
        closes_at = self.now() + self.options.linger_seconds
        room, deadline = self.options.batch_bytes, closes_at + self.timeout
        batch = Batch(self._owner, topic, partition, room, part, closes_at, deadline)
        self._created_batches += 1
        batch.number = self._created_batches
        if delayed:
            batch.due_times = DueTimes()
        self.outstanding[batch] = None
        return batch

    def _route_or_wait(self, batch: Batch) -> None:
        """Queue a closed batch at its partition sender, or let the batch wait until its topic is known."""
        entry = self.topic_entry(batch.topic)
        if entry.metadata is None:
            self._add_waiting(entry, batch)
        else:
            self._route(entry.metadata, batch, KEYLESS)

    def _route(self, topic: Topic, batch: Batch, message: Message) -> None:
        """Queue a closed batch at its partition sender. If no partition is chosen yet, choose it for `message`."""
        try:
            partition = batch.partition
            if partition < 0:
                partition = choose_partition(self.selector, topic, message)
            if batch.rerouted_from_partitions not in (0, len(topic.partitions)):
                raise UnknownTopic(
                    f"The topic {topic.name} was deleted and re-created with another number of partitions: the"
                    " messages in flight are not stored. Send them again.",
                    outcome=NOT_DONE,
                )
            if partition >= len(topic.partitions):
                raise UnknownPartition(f"{topic.name} has only {len(topic.partitions)} partitions now.")
        except TfmqError as error:
            self.fail_batch(batch, error)
            return
        batch.partition, batch.routed_topic = partition, topic
        self.buffer_for(topic, partition, batch.due_times is not None).push(batch)

    def _fail_unrouted_batch(self, batch: Batch, error: TfmqError) -> None:
        """Fail a batch, open or closed, that has no partition sender yet."""
        if batch.is_open:
            self._close(batch)
        self.fail_batch(batch, error)

    def _remove_outstanding(self, batch: Batch) -> None:
        """Free the buffer space of a batch that is done, and wake callers that wait for buffer space."""
        if self.outstanding.pop(batch, self) is None:
            self.used_bytes -= batch.size_bytes
        if self._room_event is not None:
            room, self._room_event = self._room_event, None
            room.complete()

    # Topics

    def topic_entry(self, topic: str) -> ProducerTopic:
        entry = self._topics.get(topic)
        if entry is None:
            entry = self._topics[topic] = ProducerTopic(topic)
            entry.metadata = self.metadata.topic(topic)
        return entry

    def partition_count(self, topic: str) -> int:
        known = self.topic_entry(topic).metadata
        assert known is not None, "the caller has waited for it"
        return len(known.partitions)

    def is_known(self, topic: str) -> bool:
        return self.topic_entry(topic).metadata is not None

    def request_metadata(self, entry: ProducerTopic) -> None:
        if not entry.metadata_requested:
            entry.metadata_requested = True
            pending = self.link.send_request(Metadata([entry.name], True), seconds=self.timeout, in_background=True)
            pending.add_done_callback(partial(self._metadata_received, entry))

    def _metadata_received(self, entry: ProducerTopic, pending: PendingRequest) -> None:
        entry.metadata_requested = False
        entry.error = pending.error
        if pending.error is None:
            found = self.metadata.update(pending.reply.topics)
            entry.metadata = found[0] if found else None
            if entry.metadata is None:
                entry.error = UnknownTopic(
                    f"There is no topic {entry.name}, and the broker does not create topics automatically."
                )
        if entry.metadata is not None:
            while entry.waiting_batches:
                self._route(entry.metadata, *entry.waiting_batches.popleft())
            for batch in self._unassigned_batches(entry.name):
                self.close_batch(batch)
        elif entry.error is not None:
            waiting = [batch for batch, _ in entry.waiting_batches]
            entry.waiting_batches.clear()
            for batch in (*waiting, *self._unassigned_batches(entry.name)):
                self._fail_unrouted_batch(batch, entry.error)
        known = entry.known_event
        if entry.metadata is None:
            entry.known_event = Event()
        known.complete()

    def _unassigned_batches(self, topic: str) -> list[Batch]:
        """Return the topic's open batches for which no partition is chosen yet."""
        found = [self.shared_batches.get(topic), self.shared_delayed.get(topic)]
        return [batch for batch in found if batch is not None and batch.partition < 0]

    def _add_waiting(self, entry: ProducerTopic, batch: Batch, message: Message = KEYLESS) -> None:
        """Let a batch wait until the topic's metadata is known. Its partition is then chosen for `message`.

        A batch that comes from a deleted topic waits before the batches that were created after it.
        """
        waiting = entry.waiting_batches
        place = len(waiting)
        while place and waiting[place - 1][0].number > batch.number:
            place -= 1
        # A batch that was added at its creation is added again at its close.
        if not place or waiting[place - 1][0] is not batch:
            waiting.insert(place, (batch, message))
        self.request_metadata(entry)

    # Partition senders

    def senders(self) -> Sequence[PartitionSender]:
        return (*self.partition_senders.values(), self.delayed_sender)

    def buffer_for(self, topic: Topic, partition: int, delayed: bool) -> PartitionSender | DelayedPartitionBuffer:
        """Return the object that gathers messages for a partition: its sender, or its buffer for delayed messages.

        The object is created if it is missing, or if it belongs to a former incarnation of the topic.
        """
        if delayed:
            return self.delayed_sender.buffer_for(topic, partition)
        key = (topic.name, partition)
        sender = self.partition_senders.get(key)
        if sender is None or sender.topic.incarnation != topic.incarnation:
            former = sender
            if former is not None and former.open_batch is not None:
                open_batch, former.open_batch = former.open_batch, None
                # Closing the batch may create the sender that this call has to return, so look it up again.
                self.close_batch(open_batch)
                return self.buffer_for(topic, partition, delayed)
            sender = self.partition_senders[key] = PartitionSender(self, topic, partition)
            if former is not None and (not former.idle or former.state == SenderState.BLOCKED):
                # Batches of the old sender may be rerouted to the new topic. The new sender's batches must follow them.
                sender.state, former.replacement = SenderState.BLOCKED, sender
        return sender


class ProducerContext(Protocol):
    """The attributes and methods of a producer that its accumulator, transactions and store-and-forward use."""

    link: ClientConnection
    accumulator: RecordAccumulator
    options: SendOptions
    driver: Any
    owner: Any
    """The object that delivery handles call to wait for their batch."""
    selector: PartitionSelector
    group: str | None
    hooks: tuple[Any, ...]
    has_fast_path: bool
    wall_clock: Callable[[], float]

    def check_open(self) -> None: ...

    def make_message(self, topic: str, payload: Any, *args: Any, **options: Any) -> Message: ...

    def prepare_message(self, topic: str, message: Message) -> Message: ...

    def encode_payload(self, topic: str, message: Message) -> bytes | None: ...

    def add_hook_callback(self, topic: str, message: Message, delivery: Delivery) -> None: ...

    def wait_for_topic(self, topic: str) -> Operation[None]: ...
