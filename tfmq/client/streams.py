"""All streams of one producer: one for each partition, and one for what is delayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from tfmq.client.batch import Batch
from tfmq.client.cluster import Topic
from tfmq.client.delayed_batch import DelayedBatch
from tfmq.client.delayed_stream import DelayedStream
from tfmq.client.stream import Stream

if TYPE_CHECKING:
    from tfmq.client.sender import Sender


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
