"""A producer's stream of delayed messages: one for all topics and partitions, under ids of its own.

The broker keeps what waits in one log of its own, and the stream rule holds there: so plain sends and delayed ones
never meet in a sequence. It is a stream as any other (see `stream`), but a topic that is gone ends only the batches
that were for it. The delay goes on while a batch waits: each time it goes out, what is left of it is worked out anew.
"""

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

# Producer ids in hand: leased many at a time, ahead of need, so that a stream seldom waits for one.

LEASE_COUNT = 16
"""Asked for at once, or twice what is waited for: ids are plenty, a round trip before a first send is not."""

Taker = Callable[[int, TfmqError | None], None]


class Identities:
    """Gives each taker an id that no stream had before. Unused ones are never given back, and
    dropped when they grow old: the broker takes an id that was leased too long ago for one that it forgot.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lease = Lease(0, 0)
        self._lease_ends = 0.0
        self._takers: deque[Taker] = deque()
        self._call: Call | None = None

    def take(self, taker: Taker) -> None:
        """Call `taker(id, None)`, at once if an id is in hand, or `taker(0, error)` if none can be had."""
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
"""More in flight gains nothing (1.6 M messages of 100 bytes a second with 20 batches of 256 KiB)."""
FLIGHT_BATCHES = 20
_PASSING = SequenceGap | StaleProducer | UnknownProducer | Busy
"""Answers behind which a batch goes out again: nothing was done, and nothing is wrong with the batch."""

PAUSE_SECONDS = 0.05
"""How long a busy broker is left alone; doubled each time up to the maximum."""
PAUSE_SECONDS_MAX = 1.0
SILENT_SECONDS = 1.0
"""A broker that is busy for longer is worth a line in the log."""


class BatchAccumulator(Protocol):
    """What a stream uses of the accumulator that gathers its batches."""

    link: Link
    identities: Identities
    timeout: float
    lost: int
    """Messages that were acknowledged as written and lost in a crash of the broker."""

    @property
    def acks(self) -> int: ...

    @property
    def window(self) -> int:
        """Batches of one stream that may be in flight."""
        ...

    def now(self) -> float: ...

    def later(self, seconds: float, function: Callable[[], None]) -> None: ...

    def late(self, batch: Batch) -> TfmqError:
        """Return why a batch could not be delivered in its time."""
        ...

    def stored(self, batch: Batch, positions: Sequence[tuple[int, int]], durability: int) -> None: ...

    def fail(self, batch: Batch, error: TfmqError) -> None: ...

    def move(self, batch: Batch, gone: Topic) -> None:
        """Send a batch for a deleted topic to the topic that was made anew."""
        ...

    def drop(self, stream: Stream, moving: Sequence[Batch] = ()) -> None: ...

    def forget(self, topic: Topic) -> None: ...

    def close_batch(self, batch: Batch) -> None: ...


class Stream:
    """A producer's stream to one partition: batches in order, numbered without a gap, stored once.

    The stream rule of the broker: sequences of one producer id on one partition follow each other. So a batch that is
    sent again after a lost connection is recognised; a refused one leaves a hole that everything behind it would fall
    into. Then the stream lets its flight land and takes a *successor* id: that closes the old id for good and tells the
    last sequence stored, by which batches of unknown fate are settled, and by which messages are found that had been
    acknowledged and are lost: in a crash, or with an older copy of the broker's data.

        fresh       no id yet
        leasing     an id is on its way
        ready       numbers and sends
        landing     something went wrong; waits until the broker answered everything in flight
        pausing     the broker was busy; sends the same again soon
        succeeding  waits for the successor id
        troubled    the successor could not be had; asks again when there is something to send
        gone        the topic is not there any more; waits likewise, then what is not stored goes to the new topic
        held        the topic was made anew; waits until the stream of the old one has nothing under way: that goes
        first

    All methods run under the driver's lock.
    """

    has_one_topic: ClassVar[bool] = True
    """Whether it ends with a topic."""

    def __init__(self, sender: BatchAccumulator, topic: Topic, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.state = "fresh"
        self.successor: Stream | None = None
        """Of the same partition of the topic that was made anew: held until this one has nothing under way."""
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
        """When the broker first said so, inf while it is not busy; -inf once that is logged."""

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self.flight and not self.queue

    def push(self, batch: Batch) -> None:
        """Take over a closed batch that has its place."""
        behind_numbered = not self.queue or self.queue[-1].producer_id == self.producer_id
        if self.state == "ready" and behind_numbered and batch.count <= sequences_left(self.sequence):
            self._number(batch)  # while the broker works on those before it
        self.queue.append(batch)
        self.pump()

    def pump(self) -> None:
        """Send what may go."""
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
        """Have the stream of the topic made anew wait: what is under way here may have to go there, before the rest."""
        stream.state, self.successor = "held", stream

    def release(self, first: Sequence[Batch] = ()) -> None:
        """Let the one that is held go on, with `first` before what it has."""
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
        """Nothing is under way: what somebody waits for goes now."""
        if self.successor is not None:
            self.release()
        if self.open is not None and self.open.urgent:
            self._sender.close_batch(self.open)

    def expire(self, now: float) -> None:
        """Fail the batches whose time is over before they could be sent, or were taken by a busy broker."""
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
        """What waits gets its numbers, from `sequence` on, when it goes."""
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
            batch.attempts = 0  # none of it is stored: that is known by now
        self._requeue()
        self._unnumber(0)
        self.pump()

    def _requeue(self) -> None:
        """What is in flight, answered and not settled, waits again, before everything else."""
        self.queue.extendleft(reversed(self.flight))
        self.flight.clear()
        self._flight_bytes = 0

    # Answers

    def _answered(self, call: Call, batch: Batch) -> None:
        self._calls -= 1
        batch.attempts += max(0, call.sends - 1)
        error = call.error
        if isinstance(error, Busy | SequenceGap) and call.sends == 1:
            batch.attempts -= 1  # of this sending it is known that nothing came
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
        """Keep what may be sent again, and what an earlier sending may have stored; fail the rest."""
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
        """Everything is answered; go on from the first batch that is not settled."""
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
        """Once, when the broker has been busy for a while: whoever looks on should know what this waits for."""
        now = self._sender.now()
        self._busy_since = min(self._busy_since, now)
        if float("-inf") < self._busy_since <= now - SILENT_SECONDS:
            self._busy_since = float("-inf")
            seconds = max(0.0, self.flight[0].deadline - now)
            log.info("Waiting up to %.0f s for room for %s: %s", seconds, self._what, error)

    def _was_closed(self) -> bool:
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

    # Succession

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
        """Batches that the broker had stored although its answer was lost; messages that it had and lost."""
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
        """The broker knows nothing of the id: what was sent once and refused is not there, the rest nobody knows."""
        for batch in list(self.flight):
            if batch.attempts > 1 or self._unsure:
                self._land(batch)
                self._sender.fail(batch, UnknownProducer(error.sentence))
        self.state = "leasing"
        self._sender.identities.take(self._leased)

    @property
    def _what(self) -> str:
        return f"messages to {self.topic.name}/{self.partition}"

    # Endings

    def _gone(self, error: TfmqError) -> None:
        """The topic is not there any more, and everything is answered: what cannot be stored there goes to the topic
        that is made anew, in the order in which it was sent; what may be stored there fails, its fate unknown.
        """
        moving: list[Batch] = []
        for batch in list(self.flight):
            self._land(batch)
            self._sort_out(batch, error, moving)
        while self.queue:
            self._sort_out(self.queue.popleft(), error, moving)
        self._sender.drop(self, moving)

    def _sort_out(self, batch: Batch, error: TfmqError, moving: list[Batch]) -> None:
        """Once is enough: a topic that is deleted again and again takes nothing."""
        if batch.attempts <= 1 and not batch.moved_from:
            moving.append(batch)
        else:
            batch.unnumber()
            self._sender.fail(batch, told(error, batch))

    def _fail_all(self, error: TfmqError) -> None:
        """Fail what waits; what is in flight and unanswered settles by itself."""
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
    """The request that brings a numbered batch to its partition of `topic`."""
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
    """`error` for a batch that is refused or was never sent: it may still be there if it was sent more than once."""
    told = copy(error)
    told.outcome = UNKNOWN if batch.attempts > 1 else NOT_DONE
    return told


NO_TOPIC = Topic("", 0, (), {})
"""Under this name the broker is asked for the successor of an id."""


class Door:
    """Where delayed messages for one partition gather: its batch that is open, and the way into the stream."""

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
        """Take over a closed batch that has its place."""
        self._stream.push(batch)


class DelayedStream(Stream):
    """See the module."""

    has_one_topic: ClassVar[bool] = False

    def __init__(self, sender: BatchAccumulator) -> None:
        super().__init__(sender, NO_TOPIC, 0)
        self.doors: dict[tuple[str, int], Door] = {}
        self._gone_topics: dict[tuple[str, int], Topic] = {}
        self._moving: list[DelayedBatch] = []
        """For topics that are gone, and not stored there: they go to those that are made anew."""

    def door(self, topic: Topic, partition: int) -> Door:
        """That of a partition of this incarnation of the topic."""
        door = self.doors.get((topic.name, partition))
        if door is None or door.topic.incarnation != topic.incarnation:
            door = self.doors[topic.name, partition] = Door(self, topic, partition)
        return door

    # Where it differs from a stream to one partition

    @property
    def _what(self) -> str:
        return "delayed messages"

    def _let_go(self) -> None:
        waited_for = [door.open for door in self.doors.values() if door.open is not None and door.open.urgent]
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
        """The hole is closed: what was for a topic that is gone, and would only make the next one, goes to the topic
        that is made anew, in the order in which it was sent.
        """
        moving, self._moving = self._moving, []
        strays = self._strays(self.flight)
        for batch in strays:
            self._land(batch)
        waiting = self._strays(self.queue)
        for batch in waiting:
            self.queue.remove(batch)
        doors = self._close_doors()
        super()._begin(producer_id)
        for batch in (*moving, *strays, *waiting):
            assert batch.home is not None, "placed"
            if batch.moved_from:
                self._sender.fail(batch, UnknownTopic(outcome=NOT_DONE))
            else:
                self._sender.move(batch, batch.home)
        for door in doors:
            if door.open is not None:
                self._sender.close_batch(door.open)

    def _fail_all(self, error: TfmqError) -> None:
        moving, self._moving = self._moving, []
        for batch in moving:
            self._sender.fail(batch, told(error, batch))
        for door in self._close_doors():
            if door.open is not None:
                self._sender.close_batch(door.open)
        super()._fail_all(error)

    def _close_doors(self) -> list[Door]:
        """Topics are gone: what comes for one asks for it anew. The doors to their partitions."""
        gone, self._gone_topics = self._gone_topics, {}
        for home in gone.values():
            self._sender.forget(home)
        closed = [door for door in self.doors.values() if (door.topic.name, door.topic.incarnation) in gone]
        for door in closed:
            del self.doors[door.topic.name, door.partition]
        return closed

    def _strays(self, batches: Any) -> list[DelayedBatch]:
        """Those of `batches` whose topic is gone."""
        gone = self._gone_topics
        return [each for each in batches if (each.home.name, each.home.incarnation) in gone] if gone else []
