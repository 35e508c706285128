"""Sending of batches: producer ids, partition senders, and the sender of delayed messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import ClassVar, Final, Protocol

from tfmq.backoff import Backoff, pause_seconds
from tfmq.client.connection.connection import ClientConnection, PendingRequest
from tfmq.client.connection.requests import Topic
from tfmq.client.send.batch import Batch
from tfmq.client.send.delivery_time import DueTimes
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Busy,
    Closed,
    SequenceGap,
    StaleProducer,
    TfmqError,
    TimedOut,
    UnknownProducer,
    UnknownTopic,
)
from tfmq.ids import SEQUENCES, IdRange
from tfmq.limits import PRODUCER_IDS_PER_LEASE
from tfmq.protocol.commands import (
    ACKS_NONE,
    ACKS_REPLICATED,
    ACKS_SYNCED,
    ACKS_WRITTEN,
    DURABILITY,
    LeaseProducerIds,
    Produce,
    SucceedProducer,
)

LEASE_COUNT = 16
"""Minimum number of ids per lease. An id in reserve saves a round trip at the first send to a further partition."""

ProducerIdCallback = Callable[[int, TfmqError | None], None]


class ProducerIds:
    """Leases producer ids from the broker in advance. Discards unused ids before the broker removes them."""

    def __init__(self, link: ClientConnection) -> None:
        self._link = link
        self._lease = IdRange(0, 0)
        self._lease_ends = 0.0
        self._waiting: deque[ProducerIdCallback] = deque()
        self._lease_request: PendingRequest | None = None

    def acquire(self, callback: ProducerIdCallback) -> None:
        """Call `callback(id, None)` once an id is available, perhaps now; `callback(0, error)` if the lease fails."""
        self._waiting.append(callback)
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        if self._lease.count and self._link.now() >= self._lease_ends:
            self._lease = IdRange(0, 0)
        while self._waiting and self._lease.count:
            acquired, self._lease = self._lease.split()
            self._waiting.popleft()(acquired.first, None)
        if self._waiting and self._lease_request is None:
            count = min(PRODUCER_IDS_PER_LEASE, max(LEASE_COUNT, 2 * len(self._waiting)))
            self._lease_request = self._link.send_request(LeaseProducerIds(count), in_background=True)
            self._lease_request.add_done_callback(self._lease_received)

    def _lease_received(self, pending: PendingRequest) -> None:
        self._lease_request = None
        if pending.error is None:
            self._lease = IdRange(pending.reply.first, pending.reply.count)
            self._lease_ends = self._link.now() + self._link.limits["producer_idle_seconds"] / 2
            self._serve_waiting()
            return
        callbacks, self._waiting = self._waiting, deque()
        for callback in callbacks:
            callback(0, pending.error)


log = logging.getLogger("tfmq.client")

LOST: Final = {
    ACKS_REPLICATED: "%d %s were acknowledged as replicated, and the broker does not have them any more: ids from %d"
    " on. An older copy of its data folder was started, or the store of its replicas lost what it had stored.",
    ACKS_SYNCED: "%d %s were acknowledged as synced, and the broker does not have them any more: ids from %d on."
    " An older copy of its data folder was started, its disk lost what was synced, or a standby that did not have them"
    " yet became primary.",
    ACKS_WRITTEN: "%d %s were acknowledged as written and lost in a crash of the broker: ids from %d on.",
}
"""Log texts for lost messages, by the durability that was promised. Arguments: count, description and first id."""
LOST_WITH_TOPIC: Final = (
    "The topic %s was deleted, or an older copy of the broker's data folder was started: %d messages that were"
    " acknowledged as %s in partition %d, or more, are gone with it."
)

IN_FLIGHT_BYTES_MAX = 8 << 20
"""Maximum bytes in flight per partition. A limit of 5 MiB would permit 1.6 million messages of 100 bytes per second."""
IN_FLIGHT_BATCHES_MAX = 20
_RESEND_ERRORS = SequenceGap | StaleProducer | UnknownProducer | Busy
"""Errors after which a batch is sent again: the batch is valid, and this attempt did not store it."""

PAUSE_SECONDS = 0.05
"""The pause after the first "busy" error; each further error doubles the pause, up to the maximum."""
PAUSE_SECONDS_MAX = 1.0
BUSY_LOG_SECONDS = 1.0
"""If the broker rejects a partition's batches as busy for longer than this, a line is logged."""


_new: Final = tuple.__new__
"""Creates a NamedTuple without calling its `__new__`, which would run Python code for each batch."""


class BatchAccumulator(Protocol):
    """The part of the accumulator (the client's open batches) that a partition sender uses."""

    link: ClientConnection
    producer_ids: ProducerIds
    timeout: float
    lost_messages: int
    """Number of messages that the broker has acknowledged and then lost."""
    now: Callable[[], float]
    call_later: Callable[[float, Callable[[], None]], object]

    @property
    def acks(self) -> int: ...

    @property
    def in_flight_limit(self) -> int: ...

    def timeout_error(self, batch: Batch) -> TfmqError: ...

    def complete_batch(self, batch: Batch, positions: Sequence[tuple[int, int]], durability: int) -> None: ...

    def fail_batch(self, batch: Batch, error: TfmqError) -> None: ...

    def reroute_batch(self, batch: Batch, deleted_topic: Topic) -> None: ...

    def remove_partition(self, sender: PartitionSender, moving: Sequence[Batch] = ()) -> None: ...

    def invalidate_topic(self, topic: Topic) -> None: ...

    def close_batch(self, batch: Batch) -> None: ...


class SenderState(StrEnum):
    NO_ID = "no id"
    """The sender has no producer id. It requests one when its first batch arrives."""
    REQUESTING_ID = "requesting id"
    READY = "ready"
    """The sender assigns producer sequences and sends."""
    DRAINING = "draining"
    """The sender waits after an error until all requests in flight are complete."""
    BACKING_OFF = "backing off"
    """The broker was busy: the sender sends the same batches again after a pause."""
    REQUESTING_SUCCESSOR = "requesting successor"
    SUCCESSOR_FAILED = "successor failed"
    """The request for a successor id failed. It is repeated when there is a batch to send."""
    TOPIC_DELETED = "topic deleted"
    """The sender waits for the replies of all requests in flight. Then it reroutes the batches that are not stored."""
    BLOCKED = "blocked"
    """The sender is for a re-created topic. It starts when the sender of the deleted topic is idle."""


_READY: Final = SenderState.READY
"""A constant, because `push` and `pump` run for each batch, and access to an enum member is a call on Python 3.11."""


class PartitionSender:
    """Sends the batches for one partition in order, with consecutive producer sequences.

    The broker stores each sequence of a producer id on a partition once, and only in order. So it recognises a batch
    that is sent again after a lost connection, and after a rejected batch it rejects all following batches. The sender
    then waits for the replies of all requests in flight, and requests a *successor* of its producer id. By this request
    the broker closes the old id, and its reply has the last sequence that is stored under the id. This sequence shows
    which batches of unknown outcome are stored, and which acknowledged messages the broker has lost: in a crash, or
    because an older copy of its data was started.
    """

    ends_with_topic: ClassVar[bool] = True
    """Whether the sender ends when its topic is deleted."""

    def __init__(self, accumulator: BatchAccumulator, topic: Topic, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.state = SenderState.NO_ID
        self.replacement: PartitionSender | None = None
        """If the topic was deleted and re-created: the sender of the same partition of the new topic, still blocked."""
        self.open_batch: Batch | None = None
        """The batch that gathers messages for this partition."""
        self.queue: deque[Batch] = deque()
        self.in_flight: deque[Batch] = deque()
        self.producer_id = 0
        self.sequence = 0
        self._accumulator = accumulator
        self._open_requests = 0
        self._in_flight_bytes = 0
        self._stored_through = [-1, -1, -1, -1]
        """The last acked sequence for each durability (from `ACKS_NONE` to `ACKS_REPLICATED`); -1: none."""
        self._has_gap = False
        self._outcome_unknown = False
        self._backoff = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        self._busy_since = float("inf")
        """Since when the broker has been busy; inf: it is not busy; -inf: it is busy, and a line was logged."""
        self._description = f"messages to {topic.name}/{partition}"

    @property
    def idle(self) -> bool:
        return not self.in_flight and not self.queue

    def push(self, batch: Batch) -> None:
        follows_numbered = not self.queue or self.queue[-1].producer_id == self.producer_id
        if self.state is _READY and follows_numbered and batch.count <= SEQUENCES - self.sequence:
            # This also encodes the batch, already now, while the broker works on earlier batches.
            self._assign_sequence(batch)
        self.queue.append(batch)
        self.pump()

    def pump(self) -> None:
        if self.state is not _READY and self.queue:
            if self.state == SenderState.NO_ID:
                self.state = SenderState.REQUESTING_ID
                self._accumulator.producer_ids.acquire(self._id_received)
            elif self.state == SenderState.SUCCESSOR_FAILED:
                self._request_successor()
        while self.state is _READY and self.queue and (not self.in_flight or self._may_send()):
            if self.queue[0].producer_id != self.producer_id:
                if self.queue[0].count > SEQUENCES - self.sequence:
                    if not self.in_flight:
                        self._request_successor()
                    return
                self._assign_sequence(self.queue[0])
            self._send(self.queue.popleft())
        if not self.in_flight and not self.queue:
            self._on_idle()

    def start_replacement(self, first: Sequence[Batch] = ()) -> None:
        """Reroute the batches `first` to the re-created topic. Then start that topic's blocked sender, if any."""
        replacement, self.replacement = self.replacement, None
        waiting: list[Batch] = []
        if replacement is not None:
            waiting = list(replacement.queue)
            replacement.queue.clear()
        for batch in first:
            self._accumulator.reroute_batch(batch, self.topic)
        if replacement is not None:
            replacement.queue.extend(waiting)
            replacement.state = SenderState.NO_ID
            replacement.pump()

    def _on_idle(self) -> None:
        if self.replacement is not None:
            self.start_replacement()
        if self.open_batch is not None and self.open_batch.is_urgent:
            self._accumulator.close_batch(self.open_batch)

    def expire(self, now: float) -> None:
        """Fail queued batches whose deadline has passed, unless an earlier attempt may have stored them."""
        while self.queue and self.queue[0].deadline <= now and not self.queue[0].attempts:
            batch = self.queue.popleft()
            if batch.producer_id == self.producer_id:
                self._clear_sequences(batch.sequence)
            busy = batch.last_error
            failure = self._accumulator.timeout_error(batch) if busy is None else with_outcome(busy, batch)
            self._accumulator.fail_batch(batch, failure)

    # Sending

    def _may_send(self) -> bool:
        return (
            len(self.in_flight) < min(IN_FLIGHT_BATCHES_MAX, self._accumulator.in_flight_limit)
            and self._in_flight_bytes < IN_FLIGHT_BYTES_MAX
        )

    def _assign_sequence(self, batch: Batch) -> None:
        batch.assign_sequence(self.producer_id, self.sequence)
        self.sequence += batch.count

    def _clear_sequences(self, sequence: int) -> None:
        """Clear the sequences of the queued batches, so that these are numbered again, from `sequence` on."""
        self.sequence = sequence
        for batch in self.queue:
            batch.clear_sequence()

    def _send(self, batch: Batch) -> None:
        assert batch.encoded is not None, "numbered"
        accumulator, acks = self._accumulator, self._accumulator.acks
        topic, update = self.topic, None
        if batch.due_times is not None and batch.routed_topic is not None:
            topic, update = batch.routed_topic, partial(_renew_due_times, batch.due_times, accumulator.now)
        partition_fields = (topic.name, topic.incarnation, batch.partition)
        sequence_fields = (batch.producer_id, batch.sequence, batch.count)
        try:
            pending = accumulator.link.send_request(
                _new(
                    Produce, (*partition_fields, *sequence_fields, acks, batch.encoded.blocks, None, None, batch.trace)
                ),
                batch.encoded.data,
                seconds=max(0.0, batch.deadline - accumulator.now()),
                in_background=True,
                wants_reply=acks != ACKS_NONE,
                update=update,
            )
        except Closed as error:
            accumulator.fail_batch(batch, error)
            return
        batch.attempts += 1
        batch.send_count += 1
        batch.last_error = None
        self.in_flight.append(batch)
        self._in_flight_bytes += batch.size_bytes
        self._open_requests += 1
        pending.add_done_callback(partial(self._handle_reply, batch))

    def _id_received(self, producer_id: int, error: TfmqError | None) -> None:
        if error is not None:
            self.state = SenderState.NO_ID
            self._fail_all(error)
            return
        self._restart(producer_id)

    def _restart(self, producer_id: int) -> None:
        """Change to `producer_id`, from sequence 0 on: resend the batches in flight, then send the queued batches."""
        for batch in self.in_flight:
            batch.attempts = 0  # At this point it is certain that none of these batches is stored.
        self._requeue()
        self._reroute_queued()
        self.producer_id, self._stored_through = producer_id, [-1, -1, -1, -1]
        self._has_gap = self._outcome_unknown = False
        self.state = _READY
        self._clear_sequences(0)
        self.pump()

    def _reroute_queued(self) -> None:
        """Reroute batches for deleted topics before a restart. Here: none, because this sender ends with its topic."""

    def _requeue(self) -> None:
        """Move the batches in flight to the head of the queue. Called only when all their requests are complete."""
        self.queue.extendleft(reversed(self.in_flight))
        self.in_flight.clear()
        self._in_flight_bytes = 0

    # Replies

    def _handle_reply(self, batch: Batch, pending: PendingRequest) -> None:
        self._open_requests -= 1
        repeats = max(0, pending.send_count - 1)
        batch.attempts += repeats
        batch.send_count += repeats
        error = pending.error
        if isinstance(error, Busy | SequenceGap) and pending.send_count == 1:
            batch.attempts -= 1  # The error proves that this attempt stored nothing, so it does not count.
        if error is None:
            self._handle_stored(pending, batch)
        elif self.ends_with_topic and isinstance(error, UnknownTopic):
            batch.last_error = error
            self.state = SenderState.TOPIC_DELETED
        else:
            self._handle_error(batch, error)
        if self.state is _READY:
            if not self._has_gap and batch.last_error is None:
                self.pump()
                return
            self.state = SenderState.DRAINING
        if self.state == SenderState.TOPIC_DELETED:
            if not self._open_requests:
                self._topic_deleted(error if isinstance(error, UnknownTopic) else UnknownTopic())
            return
        if self.state == SenderState.DRAINING and not self._open_requests:
            self._resolve_errors()
        else:
            self.pump()

    def _handle_error(self, batch: Batch, error: TfmqError) -> None:
        """Fail a batch, but keep it in flight if it can be sent again, or if an earlier attempt may have stored it."""
        batch.last_error = error
        if isinstance(error, _RESEND_ERRORS):
            return
        self._has_gap = True
        if batch.attempts > 1 and error.outcome == NOT_DONE:
            self._outcome_unknown = True
            return
        self._outcome_unknown = self._outcome_unknown or error.outcome == UNKNOWN
        self._remove_in_flight(batch)
        self._accumulator.fail_batch(batch, error)

    def _handle_stored(self, pending: PendingRequest, batch: Batch) -> None:
        if batch.due_times is not None and pending.wants_reply:
            batch.set_handles(pending.reply.delayed)
        self._remove_in_flight(batch)
        if self._busy_since != float("inf"):
            self._backoff.reset()
            self._busy_since = float("inf")
        positions, durability = (), ACKS_NONE
        if pending.wants_reply:
            positions, durability = pending.reply.positions, pending.reply.durability
        self._stored_through[durability] = max(self._stored_through[durability], batch.sequence + batch.count - 1)
        self._accumulator.complete_batch(batch, positions, durability)

    def _remove_in_flight(self, batch: Batch) -> None:
        self._in_flight_bytes -= batch.size_bytes
        if self.in_flight and self.in_flight[0] is batch:
            self.in_flight.popleft()
        else:
            self.in_flight.remove(batch)

    def _resolve_errors(self) -> None:
        """Send the rejected batches again. Called when all requests are complete; the batches are still in `in_flight`.

        If the broker was busy, send after a pause. Otherwise start new sequences: under the same id if nothing was ever
        stored under it, else under a successor id.
        """
        first = self.in_flight[0].last_error if self.in_flight else None
        if not self._has_gap and isinstance(first, Busy):
            self.state = SenderState.BACKING_OFF
            self._log_busy(first)
            pause = self._backoff.advance()
            asked = max(pause_seconds(each.last_error, pause) for each in self.in_flight)
            # Not after the deadline of the first batch: it then fails, with the error of the broker.
            pause = max(pause, min(asked, self.in_flight[0].deadline - self._accumulator.now()))
            self._accumulator.call_later(pause, self._resume_after_pause)
            return
        closed = StaleProducer | UnknownProducer
        rejected = all(each.attempts <= 1 and not isinstance(each.last_error, closed) for each in self.in_flight)
        if rejected and max(self._stored_through) < 0 and not self._outcome_unknown:
            self._restart(self.producer_id)  # Nothing was ever stored under this id, so it can be used from 0 again.
        else:
            self._request_successor()

    def _log_busy(self, error: Busy) -> None:
        now = self._accumulator.now()
        self._busy_since = min(self._busy_since, now)
        if float("-inf") < self._busy_since <= now - BUSY_LOG_SECONDS:
            self._busy_since = float("-inf")
            seconds = max(0.0, self.in_flight[0].deadline - now)
            log.info("Waiting up to %.0f s for room for %s: %s", seconds, self._description, error)

    def _resume_after_pause(self) -> None:
        if self.state == SenderState.BACKING_OFF:
            self.state = _READY
            self._requeue()
            self.expire(self._accumulator.now())
            self.pump()

    # Successor id

    def _request_successor(self) -> None:
        self.state = SenderState.REQUESTING_SUCCESSOR
        topic = self.topic
        request = SucceedProducer(topic.name, topic.incarnation, self.partition, self.producer_id)
        try:
            pending = self._accumulator.link.send_request(
                request, seconds=self._accumulator.timeout, in_background=True
            )
        except Closed as error:
            self._fail_all(error)
            return
        pending.add_done_callback(self._successor_received)

    def _successor_received(self, pending: PendingRequest) -> None:
        error = pending.error
        if error is None:
            self._resolve_in_flight(pending.reply.last_sequence, pending.reply.durability)
            self._restart(pending.reply.successor_id)
        elif isinstance(error, UnknownProducer):
            self._id_unknown(error)
        elif isinstance(error, UnknownTopic):
            self._topic_deleted(error)
        else:
            self.state = SenderState.SUCCESSOR_FAILED
            self._fail_all(error)

    def _resolve_in_flight(self, last_sequence: int, durability: int) -> None:
        """Complete the batches in flight up to `last_sequence`, the last stored sequence, with `durability`.

        Fail later batches that must not be sent again. Log acked messages after `last_sequence`: the broker lost them.
        """
        for batch in list(self.in_flight):
            if batch.last_sequence <= last_sequence:
                self._remove_in_flight(batch)
                self._accumulator.complete_batch(batch, (), durability)
            elif batch.last_error is not None and not isinstance(batch.last_error, _RESEND_ERRORS):
                self._remove_in_flight(batch)
                self._accumulator.fail_batch(batch, batch.last_error)
        first = max(last_sequence, -1) + 1
        # Messages are synced in order, so every message before a synced one is synced, even if its ack was "written".
        for durability in (ACKS_REPLICATED, ACKS_SYNCED, ACKS_WRITTEN):
            lost = self._stored_through[durability] + 1 - first
            if lost > 0:
                self._accumulator.lost_messages += lost
                log.error(LOST[durability], lost, self._description, (self.producer_id << 24) + first)
                first += lost

    def _id_unknown(self, error: UnknownProducer) -> None:
        """Get a new id after the broker has removed the old one.

        Fail batches that may be stored under the old id, because their outcome can no longer be determined.
        """
        for batch in list(self.in_flight):
            if batch.attempts > 1 or self._outcome_unknown:
                self._remove_in_flight(batch)
                self._accumulator.fail_batch(batch, UnknownProducer(error.sentence))
        self.state = SenderState.REQUESTING_ID
        self._accumulator.producer_ids.acquire(self._id_received)

    def _topic_deleted(self, error: TfmqError) -> None:
        """Reroute or fail all batches of a deleted topic. Called only when all requests are complete.

        Batches that are certainly not stored are rerouted to the re-created topic in their original order. Batches that
        may be stored fail with outcome "unknown". The number of acknowledged messages that are deleted is logged.
        """
        for durability in (ACKS_REPLICATED, ACKS_SYNCED, ACKS_WRITTEN):
            if count := self._stored_through[durability] + 1:
                # Second cause in the text: a broker that was started with an older copy of its data may lack the topic.
                log.warning(LOST_WITH_TOPIC, self.topic.name, count, DURABILITY[durability], self.partition)
                break
        moving: list[Batch] = []
        for batch in list(self.in_flight):
            self._remove_in_flight(batch)
            self._reroute_or_fail(batch, error, moving)
        while self.queue:
            self._reroute_or_fail(self.queue.popleft(), error, moving)
        self._accumulator.remove_partition(self, moving)

    def _reroute_or_fail(self, batch: Batch, error: TfmqError, moving: list[Batch]) -> None:
        """Add the batch to `moving`, or fail the batch if it may be stored or was rerouted before."""
        if batch.attempts <= 1 and not batch.rerouted_from_partitions:
            moving.append(batch)
        else:
            batch.clear_sequence()
            self._accumulator.fail_batch(batch, with_outcome(error, batch))

    def _fail_all(self, error: TfmqError) -> None:
        """Fail the queued batches, and those in flight whose request has failed. Keep the other batches in flight."""
        waiting = [each for each in self.in_flight if each.last_error is not None]
        for batch in waiting:
            self._remove_in_flight(batch)
        waiting += self.queue
        self.queue.clear()
        for batch in waiting:
            batch.clear_sequence()
            timeout_error = self._accumulator.timeout_error(batch) if isinstance(error, TimedOut) else None
            self._accumulator.fail_batch(batch, timeout_error or with_outcome(error, batch))
        if self.idle and self.replacement is not None:
            self.start_replacement()


def with_outcome(error: TfmqError, batch: Batch) -> TfmqError:
    """Return a copy of `error` for the batch. Its outcome is "unknown" if an earlier attempt may have stored it."""
    failure = copy(error)
    failure.outcome = UNKNOWN if batch.attempts > 1 else NOT_DONE
    return failure


def _renew_due_times(dues: DueTimes, now: Callable[[], float], request: Produce) -> Produce:
    """Return `request`, a PRODUCE of delayed messages, with the delays that remain at `now()`."""
    return request._replace(due=dues.pack(now()))


_number: Final = attrgetter("number")

DELAYED_TOPIC = Topic("", 0, (), {})
"""The topic in requests for the successor of a producer id under which delayed messages were sent."""


@dataclass(slots=True, eq=False, repr=False)
class DelayedPartitionBuffer:
    """Gathers delayed messages for one partition and queues them at the delayed sender."""

    sender: DelayedSender
    topic: Topic
    partition: int
    open_batch: Batch | None = None

    @property
    def idle(self) -> bool:
        return self.sender.idle

    def push(self, batch: Batch) -> None:
        self.sender.push(batch)


class DelayedSender(PartitionSender):
    """Sends a producer's delayed messages for all topics and partitions, under separate producer ids.

    The broker first stores all delayed messages in one arrival log, and checks their producer sequences there. So plain
    and delayed messages need separate producer ids. If a topic is deleted, its batches are rerouted or fail, but this
    sender continues. A delay continues while a batch waits: the remaining delay is computed at each attempt to send.
    """

    ends_with_topic: ClassVar[bool] = False

    def __init__(self, accumulator: BatchAccumulator) -> None:
        super().__init__(accumulator, DELAYED_TOPIC, 0)
        self._description = "delayed messages"
        self.buffers: dict[tuple[str, int], DelayedPartitionBuffer] = {}
        self._deleted_topics: dict[tuple[str, int], Topic] = {}
        self._rerouted: list[Batch] = []
        """Batches rejected because their topic is deleted. `_reroute_queued` reroutes them to the re-created topic."""

    def buffer_for(self, topic: Topic, partition: int) -> DelayedPartitionBuffer:
        buffer = self.buffers.get((topic.name, partition))
        if buffer is None or buffer.topic.incarnation != topic.incarnation:
            if buffer is not None and buffer.open_batch is not None:
                open_batch, buffer.open_batch = buffer.open_batch, None
                # Closing the batch creates the buffer that this call has to return, so look it up again.
                self._accumulator.close_batch(open_batch)
                return self.buffer_for(topic, partition)
            buffer = self.buffers[topic.name, partition] = DelayedPartitionBuffer(self, topic, partition)
        return buffer

    # Overrides
    def _on_idle(self) -> None:
        waited_for = [
            buffer.open_batch
            for buffer in self.buffers.values()
            if buffer.open_batch is not None and buffer.open_batch.is_urgent
        ]
        for batch in waited_for:
            self._accumulator.close_batch(batch)

    def _handle_error(self, batch: Batch, error: TfmqError) -> None:
        if not isinstance(error, UnknownTopic):
            super()._handle_error(batch, error)
            return
        topic = batch.routed_topic
        assert topic is not None, "routed"
        self._deleted_topics[topic.name, topic.incarnation] = topic
        if batch.attempts <= 1 and not batch.rerouted_from_partitions:
            self._has_gap = True
            self._remove_in_flight(batch)
            self._rerouted.append(batch)
        else:
            super()._handle_error(batch, error)

    def _reroute_queued(self) -> None:
        """Reroute the batches for deleted topics, and restore the order in which the batches were created."""
        moving, self._rerouted = self._rerouted, []
        for batch in self._batches_of_deleted_topics(self.queue):
            self.queue.remove(batch)
            moving.append(batch)
        buffers = self._remove_deleted_buffers()
        for batch in moving:
            assert batch.routed_topic is not None, "routed"
            if batch.rerouted_from_partitions:
                self._accumulator.fail_batch(batch, UnknownTopic(outcome=NOT_DONE))
            else:
                self._accumulator.reroute_batch(batch, batch.routed_topic)
        for buffer in buffers:
            if buffer.open_batch is not None:
                self._accumulator.close_batch(buffer.open_batch)
        # Later batches for a re-created topic may be queued already, before the rerouted ones. No queued batch is
        # stored, and the restart numbers all of them again, so they may change their places.
        self.queue = deque(sorted(self.queue, key=_number))

    def _fail_all(self, error: TfmqError) -> None:
        moving, self._rerouted = self._rerouted, []
        for batch in moving:
            self._accumulator.fail_batch(batch, with_outcome(error, batch))
        for buffer in self._remove_deleted_buffers():
            if buffer.open_batch is not None:
                self._accumulator.close_batch(buffer.open_batch)
        super()._fail_all(error)

    def _remove_deleted_buffers(self) -> list[DelayedPartitionBuffer]:
        """Remove and return the buffers of deleted topics. Invalidate the metadata of these topics."""
        deleted_topics, self._deleted_topics = self._deleted_topics, {}
        for topic in deleted_topics.values():
            self._accumulator.invalidate_topic(topic)
        closed = [each for each in self.buffers.values() if (each.topic.name, each.topic.incarnation) in deleted_topics]
        for buffer in closed:
            del self.buffers[buffer.topic.name, buffer.partition]
        return closed

    def _batches_of_deleted_topics(self, batches: Iterable[Batch]) -> list[Batch]:
        deleted_topics = self._deleted_topics
        return [
            each
            for each in batches
            if each.routed_topic is not None
            and (each.routed_topic.name, each.routed_topic.incarnation) in deleted_topics
        ]
