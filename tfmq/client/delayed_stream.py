"""A producer's stream of delayed messages: one for all topics and partitions, under ids of its own.

The broker keeps what waits in one log of its own, and the stream rule holds there: so plain sends and delayed ones
never meet in a sequence. It is a stream as any other (see `stream`), but a topic that is gone ends only the batches
that were for it. The delay goes on while a batch waits: each time it goes out, what is left of it is worked out anew.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from tfmq.client.batch import Batch
from tfmq.client.call import Call
from tfmq.client.cluster import Topic
from tfmq.client.delayed_batch import DelayedBatch
from tfmq.client.stream import BatchAccumulator, Stream, produce, told
from tfmq.errors import NOT_DONE, TfmqError, UnknownTopic
from tfmq.protocol.commands import Produce

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
