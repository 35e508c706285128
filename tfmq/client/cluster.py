"""What the client knows of the broker's topics: names, incarnations, partitions. Pure memory; `operations` asks.

A topic stays known until somebody who was refused under it forgets it. So a topic that was deleted and made anew is
noticed by the first request that bears the old incarnation, and a grown one by whoever looks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tfmq.message import Partition
from tfmq.protocol.commands import TopicRow

REFRESH_SECONDS = 60.0
"""After so long a producer looks whether a topic has grown, when it sends to it next."""


class Topic(NamedTuple):
    """One topic as the broker described it last. `partitions[n].number == n`."""

    name: str
    incarnation: int
    partitions: tuple[Partition, ...]
    settings: Mapping[str, Any]


class Cluster:
    """A cache of topics by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._topics: dict[str, tuple[Topic, float]] = {}

    def topic(self, name: str) -> Topic | None:
        """The topic, if it is known."""
        known = self._topics.get(name)
        return known[0] if known else None

    def stale(self, name: str) -> bool:
        """Whether it is time to ask for the topic again."""
        known = self._topics.get(name)
        return known is None or self._clock() - known[1] >= REFRESH_SECONDS

    def learn(self, rows: Iterable[TopicRow]) -> list[Topic]:
        """Take over what METADATA answered."""
        learned = []
        for row in rows:
            partitions = tuple(
                Partition(row.name, each.partition, each.state)
                for each in sorted(row.partitions, key=lambda each: each.partition)
            )
            topic = Topic(row.name, row.incarnation, partitions, row.settings)
            self._topics[row.name] = (topic, self._clock())
            learned.append(topic)
        return learned

    def forget(self, name: str) -> None:
        self._topics.pop(name, None)

    def clear(self) -> None:
        self._topics.clear()
