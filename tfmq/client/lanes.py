"""Topics on their way to being known: asked for once, with the batches that wait for the answer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tfmq.client.batch import Batch
from tfmq.client.call import Call
from tfmq.client.cluster import Topic
from tfmq.client.waiting import Flag
from tfmq.errors import TfmqError, UnknownTopic
from tfmq.message import Message
from tfmq.protocol.commands import Metadata

if TYPE_CHECKING:
    from tfmq.client.sender import Sender

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
