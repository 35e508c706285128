"""Sending of batches: producer ids, partition senders, and the sender of delayed messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar, Final, Protocol, cast

from tfmq.client.connection.connection import Call, Link
from tfmq.client.connection.requests import Topic
from tfmq.client.send.batch import Batch, DelayedBatch
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
from tfmq.ids import Lease, sequences_left
from tfmq.limits import PRODUCER_IDS_PER_LEASE
from tfmq.protocol.commands import (
    ACKS_NONE,
    ACKS_SYNCED,
    ACKS_WRITTEN,
    LeaseProducerIds,
    Produce,
    SucceedProducer,
)

LEASE_COUNT = 16
"""Minimum number of ids per lease; twice the number of waiting callers if that is more.

Leasing in advance saves the first send to a partition a round trip, and there are plenty of ids.
"""

Taker = Callable[[int, TfmqError | None], None]


class Identities:
    """Leases producer ids in advance and gives each partition sender a new one.

    Unused ids are not returned. They are discarded after half of the broker's idle time, because the broker rejects an
    id that was leased too long ago as unknown.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lease = Lease(0, 0)
        self._lease_ends = 0.0
        self._takers: deque[Taker] = deque()
        self._call: Call | None = None

    def take(self, taker: Taker) -> None:
        """Call `callback(id, None)`, at once if an id is available, or `callback(0, error)`."""
        self._takers.append(taker)
        self._serve()

    def _serve(self) -> None:
        if self._lease.count and self._link.now() >= self._lease_ends:
            self._lease = Lease(0, 0)
        while self._takers and self._lease.count:
            taken, self._lease = self._lease.take()
            self._takers.popleft()(taken.first, None)
        if self._takers and self._call is None:
            count = min(PRODUCER_IDS_PER_LEASE, max(LEASE_COUNT, 2 * len(self._takers)))
            self._call = self._link.call(LeaseProducerIds(count), unattended=True)
            self._call.when_done(self._leased)

    def _leased(self, call: Call) -> None:
        self._call = None
        if call.error is None:
            self._lease = Lease(call.reply.first, call.reply.count)
            self._lease_ends = self._link.now() + self._link.limits["producer_idle_seconds"] / 2
            self._serve()
            return
        takers, self._takers = self._takers, deque()
        for taker in takers:
            taker(0, call.error)


log = logging.getLogger("tfmq.client")

LOST: Final = {
    ACKS_SYNCED: "%d %s were acknowledged as synced, and the broker does not have them any more: ids from %d on."
    " An older copy of its data folder was started, or its disk lost what was synced.",
    ACKS_WRITTEN: "%d %s were acknowledged as written and lost in a crash of the broker: ids from %d on.",
}
"""What is said of lost messages, by what was promised: how many, of what, the first id."""

FLIGHT_BYTES = 8 << 20
"""More bytes in flight do not increase the throughput.

Measured: 1.6 M messages of 100 bytes/s with 20 batches of 256 KiB.
"""
FLIGHT_BATCHES = 20
_PASSING = SequenceGap | StaleProducer | UnknownProducer | Busy
"""Errors after which a batch is sent again.

The batch was not stored, and the batch itself is valid.
"""

PAUSE_SECONDS = 0.05
"""The pause after a "busy" error; doubled each time up to the maximum."""
PAUSE_SECONDS_MAX = 1.0
SILENT_SECONDS = 1.0
"""A line is logged if the broker is busy for longer than this."""


class BatchAccumulator(Protocol):
    """The part of the accumulator that a partition sender uses."""

    link: Link
    identities: Identities
    timeout: float
    lost: int
    """Messages that were acked as written and lost in a crash of the broker."""

    @property
    def acks(self) -> int: ...

    @property
    def window(self) -> int:
        """Batches of one partition that may be in flight."""
        ...

    def now(self) -> float: ...

    def later(self, seconds: float, function: Callable[[], None]) -> None: ...

    def late(self, batch: Batch) -> TfmqError:
        """Return the error for a batch that was not acked before its deadline."""
        ...

    def stored(self, batch: Batch, positions: Sequence[tuple[int, int]], durability: int) -> None: ...

    def fail(self, batch: Batch, error: TfmqError) -> None: ...

    def move(self, batch: Batch, gone: Topic) -> None:
        """Reroute a batch for a deleted topic to the re-created one."""
        ...

    def drop(self, stream: Stream, moving: Sequence[Batch] = ()) -> None: ...

    def forget(self, topic: Topic) -> None: ...

    def close_batch(self, batch: Batch) -> None: ...


class Stream:
    """Sends the batches for one partition in order, with consecutive producer sequences.

    The stream rule of the broker: sequences of one producer id on one partition follow each other. So a batch that is
    sent again after a lost connection is recognised; a refused one leaves a hole that everything behind it would fall
    into. Then the stream lets its flight land and takes a *successor* id: that closes the old id for good and tells the
    last sequence stored, by which batches of unknown fate are settled, and by which messages are found that had been
    acknowledged and are lost: in a crash, or with an older copy of the broker's data.

    States:

        fresh       no producer id yet
        leasing     a producer id is requested
        ready       assigns sequences and sends
        landing     after an error: waits until all requests in flight are answered
        pausing     the broker was busy: sends the same batches again after a pause
        succeeding  a successor id is requested
        troubled    the successor request failed: repeated when there is a batch to send
        gone        the topic was deleted: waits for the replies, then reroutes what is not stored
        held        the topic was re-created: waits until the sender of the old topic is idle

    All methods run under the driver's lock.
    """

    has_one_topic: ClassVar[bool] = True
    """Whether the sender ends when its topic is deleted."""

    def __init__(self, sender: BatchAccumulator, topic: Topic, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.state = "fresh"
        self.successor: Stream | None = None
        """The blocked sender of the same partition of the re-created topic."""
        self.open: Batch | None = None
        """The batch that gathers messages for this partition."""
        self.queue: deque[Batch] = deque()
        self.flight: deque[Batch] = deque()
        self.producer_id = 0
        self.sequence = 0
        self._sender = sender
        self._calls = 0
        self._flight_bytes = 0
        self._stored_through = [-1, -1, -1]
        """The last sequence of what was answered, by the durability that the answer promised."""
        self._hole = False
        self._unsure = False
        self._pause_seconds = PAUSE_SECONDS
        self._busy_since = float("inf")
        """When the broker first reported "busy"; inf if it is not busy, -inf once that is logged."""

    @property
    def idle(self) -> bool:
        """Whether no batch is queued or in flight."""
        return not self.flight and not self.queue

    def push(self, batch: Batch) -> None:
        """Queue a closed batch whose partition is chosen."""
        behind_numbered = not self.queue or self.queue[-1].producer_id == self.producer_id
        if self.state == "ready" and behind_numbered and batch.count <= sequences_left(self.sequence):
            self._number(batch)  # Encode now, while the broker works on the preceding batches.
        self.queue.append(batch)
        self.pump()

    def pump(self) -> None:
        """Send the queued batches that may be sent."""
        if self.state == "fresh" and self.queue:
            self.state = "leasing"
            self._sender.identities.take(self._leased)
        elif self.state == "troubled" and self.queue:
            self._succeed()
        while self.state == "ready" and self.queue and self._may_fly():
            if self.queue[0].producer_id != self.producer_id:
                if self.queue[0].count > sequences_left(self.sequence):
                    if not self.flight:
                        self._succeed()
                    return
                self._number(self.queue[0])
            self._send(self.queue.popleft())
        if self.idle:
            self._let_go()

    def hold(self, stream: Stream) -> None:
        """Block `stream`, the sender for the re-created topic, until this one is idle.

        Batches in flight here may have to be rerouted to the new topic, ahead of its own batches.
        """
        stream.state, self.successor = "held", stream

    def release(self, first: Sequence[Batch] = ()) -> None:
        """Start the blocked replacement. The batches in `first` are queued ahead of its own."""
        held, self.successor = self.successor, None
        waiting: list[Batch] = []
        if held is not None:
            waiting = list(held.queue)
            held.queue.clear()
        for batch in first:
            self._sender.move(batch, self.topic)
        if held is not None:
            held.queue.extend(waiting)
            held.state = "fresh"
            held.pump()

    def _let_go(self) -> None:
        """Start the replacement, and close the open batch if a caller waits for it."""
        if self.successor is not None:
            self.release()
        if self.open is not None and self.open.urgent:
            self._sender.close_batch(self.open)

    def expire(self, now: float) -> None:
        """Fail queued batches whose deadline has passed.

        A batch that was sent is not failed here, except if the broker was busy each time.
        """
        while self.queue and self.queue[0].deadline <= now and not self.queue[0].attempts:
            batch = self.queue.popleft()
            if batch.producer_id == self.producer_id:
                self._unnumber(batch.sequence)
            busy = batch.bounced
            self._sender.fail(batch, told(busy, batch) if busy is not None else self._sender.late(batch))

    def next_time(self) -> float:
        return self.queue[0].deadline if self.queue else float("inf")

    # Sending

    def _may_fly(self) -> bool:
        most = min(FLIGHT_BATCHES, self._sender.window)
        return not self.flight or (len(self.flight) < most and self._flight_bytes < FLIGHT_BYTES)

    def _number(self, batch: Batch) -> None:
        batch.number(self.producer_id, self.sequence)
        self.sequence += batch.count

    def _unnumber(self, sequence: int) -> None:
        """Clear the sequences of the queued batches. The next batch sent gets `sequence`."""
        self.sequence = sequence
        for batch in self.queue:
            batch.unnumber()

    def _send(self, batch: Batch) -> None:
        assert batch.encoded is not None, "numbered"
        sender = self._sender
        try:
            call = self._call(batch, max(0.0, batch.deadline - sender.now()), sender.acks != ACKS_NONE)
        except Closed as error:
            sender.fail(batch, error)
            return
        batch.attempts += 1
        batch.bounced = None
        self.flight.append(batch)
        self._flight_bytes += batch.size_bytes
        self._calls += 1
        call.when_done(lambda done: self._answered(done, batch))

    def _call(self, batch: Batch, seconds: float, wants_reply: bool) -> Call:
        return self._sender.link.call(
            produce(batch, self.topic, self._sender.acks),
            batch.encoded.data,  # type: ignore[union-attr]
            seconds=seconds,
            unattended=True,
            wants_reply=wants_reply,
        )

    def _leased(self, producer_id: int, error: TfmqError | None) -> None:
        if error is not None:
            self.state = "fresh"
            self._fail_all(error)
            return
        self._begin(producer_id)

    def _begin(self, producer_id: int) -> None:
        """Go on under `producer_id`, from sequence 0."""
        self.producer_id, self._stored_through = producer_id, [-1, -1, -1]
        self._hole = self._unsure = False
        self.state = "ready"
        for batch in self.flight:
            batch.attempts = 0  # At this point it is known that none of these batches is stored.
        self._requeue()
        self._unnumber(0)
        self.pump()

    def _requeue(self) -> None:
        """Move the batches in flight, all answered but not done, to the head of the queue."""
        self.queue.extendleft(reversed(self.flight))
        self.flight.clear()
        self._flight_bytes = 0

    # Replies

    def _answered(self, call: Call, batch: Batch) -> None:
        self._calls -= 1
        batch.attempts += max(0, call.sends - 1)
        error = call.error
        if isinstance(error, Busy | SequenceGap) and call.sends == 1:
            batch.attempts -= 1  # This error proves that the last sending stored nothing.
        if error is None:
            self._stored(call, batch)
        elif self.has_one_topic and isinstance(error, UnknownTopic):
            batch.bounced = error
            self.state = "gone"
        else:
            self._refused(batch, error)
        if self.state == "gone":
            if not self._calls:
                self._gone(error if isinstance(error, UnknownTopic) else UnknownTopic())
            return
        if self.state == "ready" and (self._hole or batch.bounced is not None):
            self.state = "landing"
        if self.state == "landing" and not self._calls:
            self._resolve()
        else:
            self.pump()

    def _refused(self, batch: Batch, error: TfmqError) -> None:
        """Keep a batch that may be sent again or may be stored by an earlier sending; else fail it."""
        batch.bounced = error
        if isinstance(error, _PASSING):
            return
        self._hole = True
        if batch.attempts > 1 and error.outcome == NOT_DONE:
            self._unsure = True
            return
        self._unsure = self._unsure or error.outcome == UNKNOWN
        self._land(batch)
        self._sender.fail(batch, error)

    def _stored(self, call: Call, batch: Batch) -> None:
        self._land(batch)
        self._pause_seconds = PAUSE_SECONDS
        self._busy_since = float("inf")
        positions, durability = (), ACKS_NONE
        if call.wants_reply:
            positions, durability = call.reply.positions, call.reply.durability
        self._stored_through[durability] = max(self._stored_through[durability], batch.last_sequence)
        self._sender.stored(batch, positions, durability)

    def _land(self, batch: Batch) -> None:
        self._flight_bytes -= batch.size_bytes
        if self.flight and self.flight[0] is batch:
            self.flight.popleft()
        else:
            self.flight.remove(batch)

    def _resolve(self) -> None:
        """Continue with the first batch that is not done. All requests are answered."""
        first = self.flight[0].bounced if self.flight else None
        if not self._hole and isinstance(first, Busy):
            self.state = "pausing"
            self._say_busy(first)
            self._sender.later(self._pause_seconds, self._resume)
            self._pause_seconds = min(PAUSE_SECONDS_MAX, 2 * self._pause_seconds)
        elif max(self._stored_through) < 0 and not self._unsure and not self._was_closed():
            self._begin(self.producer_id)  # nothing was ever stored under it, so it is as good as new
        else:
            self._succeed()

    def _say_busy(self, error: Busy) -> None:
        """Log once that the broker has been busy for `BUSY_LOG_SECONDS`."""
        now = self._sender.now()
        self._busy_since = min(self._busy_since, now)
        if float("-inf") < self._busy_since <= now - SILENT_SECONDS:
            self._busy_since = float("-inf")
            seconds = max(0.0, self.flight[0].deadline - now)
            log.info("Waiting up to %.0f s for room for %s: %s", seconds, self._what, error)

    def _was_closed(self) -> bool:
        """Return whether the broker may have closed the producer id, or may have stored a batch."""
        return any(
            isinstance(each.bounced, StaleProducer | UnknownProducer) or each.attempts > 1
            for each in self.flight
        )

    def _resume(self) -> None:
        if self.state == "pausing":
            self.state = "ready"
            self._requeue()
            self.expire(self._sender.now())
            self.pump()

    # Successor id

    def _succeed(self) -> None:
        self.state = "succeeding"
        try:
            call = self._sender.link.call(self._succession(), seconds=self._sender.timeout, unattended=True)
        except Closed as error:
            self._fail_all(error)
            return
        call.when_done(self._succeeded)

    def _succession(self) -> SucceedProducer:
        return SucceedProducer(self.topic.name, self.topic.incarnation, self.partition, self.producer_id)

    def _succeeded(self, call: Call) -> None:
        error = call.error
        if error is None:
            self._settle(call.reply.last_sequence, call.reply.durability)
            self._begin(call.reply.successor_id)
        elif isinstance(error, UnknownProducer):
            self._forgotten(error)
        elif isinstance(error, UnknownTopic):
            self._gone(error)
        else:
            self.state = "troubled"
            self._fail_all(error)

    def _settle(self, last_sequence: int, durability: int) -> None:
        """Complete the batches that are stored although their reply was lost. Report lost messages."""
        for batch in list(self.flight):
            if batch.last_sequence <= last_sequence:
                self._land(batch)
                self._sender.stored(batch, (), durability)
            elif batch.bounced is not None and not isinstance(batch.bounced, _PASSING):
                self._land(batch)
                self._sender.fail(batch, batch.bounced)
        first = max(last_sequence, -1) + 1
        # Messages are synced in order: what was answered before a synced one is synced too.
        for durability in (ACKS_SYNCED, ACKS_WRITTEN):
            lost = self._stored_through[durability] + 1 - first
            if lost > 0:
                self._sender.lost += lost
                log.error(LOST[durability], lost, self._what, (self.producer_id << 24) + first)
                first += lost

    def _forgotten(self, error: UnknownProducer) -> None:
        """Get a new id, because the broker does not know the current one.

        A batch that was sent once and rejected is not stored; the outcome of the others is unknown.
        """
        for batch in list(self.flight):
            if batch.attempts > 1 or self._unsure:
                self._land(batch)
                self._sender.fail(batch, UnknownProducer(error.sentence))
        self.state = "leasing"
        self._sender.identities.take(self._leased)

    @property
    def _what(self) -> str:
        return f"messages to {self.topic.name}/{self.partition}"

    # Errors

    def _gone(self, error: TfmqError) -> None:
        """Reroute or fail all batches of a deleted topic. All requests are answered.

        Batches that cannot be stored are rerouted to the re-created topic in their original order. Batches that may be
        stored fail with outcome "unknown".
        """
        moving: list[Batch] = []
        for batch in list(self.flight):
            self._land(batch)
            self._sort_out(batch, error, moving)
        while self.queue:
            self._sort_out(self.queue.popleft(), error, moving)
        self._sender.drop(self, moving)

    def _sort_out(self, batch: Batch, error: TfmqError, moving: list[Batch]) -> None:
        """Add the batch to `moving`, or fail it if it may be stored or was rerouted before.

        Rerouting once is enough: a topic that is deleted repeatedly must not keep a batch forever.
        """
        if batch.attempts <= 1 and not batch.moved_from:
            moving.append(batch)
        else:
            batch.unnumber()
            self._sender.fail(batch, told(error, batch))

    def _fail_all(self, error: TfmqError) -> None:
        """Fail the queued batches and the answered ones in flight.

        The others wait for their replies.
        """
        waiting = [each for each in self.flight if each.bounced is not None]
        for batch in waiting:
            self._land(batch)
        waiting += self.queue
        self.queue.clear()
        for batch in waiting:
            batch.unnumber()
            late = isinstance(error, TimedOut)
            self._sender.fail(batch, self._sender.late(batch) if late else told(error, batch))
        if self.idle and self.successor is not None:
            self.release()


def produce(batch: Batch, topic: Topic, acks: int) -> Produce:
    """Return the PRODUCE request for a batch with assigned sequence."""
    assert batch.encoded is not None, "numbered"
    return Produce(
        topic.name,
        topic.incarnation,
        batch.partition,
        batch.producer_id,
        batch.sequence,
        batch.count,
        acks,
        batch.encoded.blocks,  # type: ignore[arg-type]
    )


def told(error: TfmqError, batch: Batch) -> TfmqError:
    """Return a copy of `error` for a batch that was rejected or never sent.

    Its outcome is "unknown" if the batch was sent more than once, because an earlier sending may be stored.
    """
    told = copy(error)
    told.outcome = UNKNOWN if batch.attempts > 1 else NOT_DONE
    return told


NO_TOPIC = Topic("", 0, (), {})
"""The topic in successor requests for the ids of delayed messages."""


class Door:
    """Gathers delayed messages for one partition and queues them at the delayed sender."""

    __slots__ = ("_stream", "open", "partition", "topic")

    def __init__(self, stream: DelayedStream, topic: Topic, partition: int) -> None:
        self._stream = stream
        self.topic = topic
        self.partition = partition
        self.open: Batch | None = None

    @property
    def idle(self) -> bool:
        return self._stream.idle

    def push(self, batch: Batch) -> None:
        """Queue a closed batch whose partition is chosen."""
        self._stream.push(batch)


class DelayedStream(Stream):
    """Sends a producer's delayed messages for all topics and partitions, under ids of its own.

    The broker stores delayed messages in one log, and producer sequences apply to that log. So plain and delayed
    messages never share a sequence. Unlike for a plain sender, a deleted topic affects only the batches for that topic.
    A delay continues while a batch waits: the remaining delay is computed at each sending.
    """

    has_one_topic: ClassVar[bool] = False

    def __init__(self, sender: BatchAccumulator) -> None:
        super().__init__(sender, NO_TOPIC, 0)
        self.doors: dict[tuple[str, int], Door] = {}
        self._gone_topics: dict[tuple[str, int], Topic] = {}
        self._moving: list[DelayedBatch] = []
        """Batches for deleted topics, not stored there, to be rerouted to the re-created topics."""

    def door(self, topic: Topic, partition: int) -> Door:
        """Return the buffer of a partition of this incarnation of the topic; create it if missing."""
        buffer = self.doors.get((topic.name, partition))
        if buffer is None or buffer.topic.incarnation != topic.incarnation:
            buffer = self.doors[topic.name, partition] = Door(self, topic, partition)
        return buffer

    # Overrides

    @property
    def _what(self) -> str:
        return "delayed messages"

    def _let_go(self) -> None:
        waited_for = [
            buffer.open for buffer in self.doors.values() if buffer.open is not None and buffer.open.urgent
        ]
        for batch in waited_for:
            self._sender.close_batch(batch)

    def _call(self, batch: Batch, seconds: float, wants_reply: bool) -> Call:
        delayed, sender = cast(DelayedBatch, batch), self._sender

        dues = delayed.dues

        def renew(request: Produce) -> Produce:
            return request._replace(due=dues.packed(sender.now()))

        assert delayed.home is not None and delayed.encoded is not None, "placed and numbered"
        return sender.link.call(
            produce(batch, delayed.home, sender.acks),
            delayed.encoded.data,
            seconds=seconds,
            unattended=True,
            wants_reply=wants_reply,
            renew=renew,
        )

    def _stored(self, call: Call, batch: Batch) -> None:
        if call.wants_reply:
            cast(DelayedBatch, batch).take_handles(call.reply.delayed)
        super()._stored(call, batch)

    def _refused(self, batch: Batch, error: TfmqError) -> None:
        if not isinstance(error, UnknownTopic):
            super()._refused(batch, error)
            return
        home = cast(DelayedBatch, batch).home
        assert home is not None, "placed"
        self._gone_topics[home.name, home.incarnation] = home
        if batch.attempts <= 1 and not batch.moved_from:
            self._hole = True
            self._land(batch)
            self._moving.append(cast(DelayedBatch, batch))
        else:
            super()._refused(batch, error)

    def _begin(self, producer_id: int) -> None:
        """Continue with `producer_id`; first take out the batches for deleted topics.

        They would be rejected and make the next gap. After the start they are rerouted to the re-created topics in
        their original order.
        """
        moving, self._moving = self._moving, []
        strays = self._strays(self.flight)
        for batch in strays:
            self._land(batch)
        waiting = self._strays(self.queue)
        for batch in waiting:
            self.queue.remove(batch)
        buffers = self._close_doors()
        super()._begin(producer_id)
        for batch in (*moving, *strays, *waiting):
            assert batch.home is not None, "placed"
            if batch.moved_from:
                self._sender.fail(batch, UnknownTopic(outcome=NOT_DONE))
            else:
                self._sender.move(batch, batch.home)
        for buffer in buffers:
            if buffer.open is not None:
                self._sender.close_batch(buffer.open)

    def _fail_all(self, error: TfmqError) -> None:
        moving, self._moving = self._moving, []
        for batch in moving:
            self._sender.fail(batch, told(error, batch))
        for buffer in self._close_doors():
            if buffer.open is not None:
                self._sender.close_batch(buffer.open)
        super()._fail_all(error)

    def _close_doors(self) -> list[Door]:
        """Remove and return the buffers of deleted topics.

        The next send requests their metadata again.
        """
        gone, self._gone_topics = self._gone_topics, {}
        for home in gone.values():
            self._sender.forget(home)
        closed = [
            buffer for buffer in self.doors.values() if (buffer.topic.name, buffer.topic.incarnation) in gone
        ]
        for buffer in closed:
            del self.doors[buffer.topic.name, buffer.partition]
        return closed

    def _strays(self, batches: Any) -> list[DelayedBatch]:
        """Return those of `batches` whose topic is deleted."""
        gone = self._gone_topics
        return [each for each in batches if (each.home.name, each.home.incarnation) in gone] if gone else []
