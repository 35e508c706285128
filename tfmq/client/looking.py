"""What a consumer knows of the topics that it reads: which are there, since when, and when to look again.

It looks at the start, and every `refresh` seconds where nobody would tell it: for topics of a pattern, and where
nothing is asked of the broker. A group is told of partitions by its share, everybody else by the answers to fetches.
"""

import logging
from collections.abc import Iterable
from typing import Final

from tfmq.client.asking import ask
from tfmq.client.consumer_options import ConsumerOptions
from tfmq.client.link import Link
from tfmq.client.positions import PartitionName
from tfmq.client.waiting import Operation
from tfmq.protocol.commands import Metadata

log = logging.getLogger("tfmq.consumer")

NEVER: Final = float("inf")
TOLD_SECONDS: Final = 600.0
"""How often is looked for what is told: a thousand idle consumers cost a broker next to nothing so."""


class Looking:
    """See the module. `wanted` and `first` have the incarnation of each partition's topic."""

    def __init__(self, options: ConsumerOptions, link: Link) -> None:
        self.wanted: dict[PartitionName, int] = {}
        """What the subscription means now."""
        self.first: dict[PartitionName, int] | None = None
        """What it meant at the first look."""
        self.missing = False
        """Whether something named is not there."""
        self.grown = False
        """Whether a topic is known to have more partitions by now."""
        self._options = options
        self._link = link
        self._told_by_group = options.group is not None and options.coordinator is None
        self._looked_at = 0.0
        self._counts: dict[str, int] = {}
        self._told_counts: dict[str, int] = {}
        self._told_missing: set[str] = set()

    def look(self) -> Operation[None]:
        """Asks for the topics."""
        self.grown, self._looked_at = False, self._link.now()
        subscription = self._options.subscription
        reply = yield from ask(self._link, Metadata(subscription.asked()), NEVER)
        self._counts = {row.name: len(row.partitions) for row in reply.topics}
        self.wanted = subscription.wanted(reply.topics)
        if self.first is None:
            self.first = dict(self.wanted)
        missing = subscription.missing(self.wanted)
        self.missing = bool(missing)
        self._tell_missing(missing)

    def is_told(self, waiting: Iterable[PartitionName]) -> bool:
        """Whether a change since the last look would have been told, if fetches of `waiting` are under way."""
        pattern = self._options.subscription.pattern
        if self.missing or pattern is not None or self._link.now() >= self._looked_at + TOLD_SECONDS:
            return False
        topics = {name.topic for name in self.wanted}
        return self._told_by_group or topics <= {name.topic for name in waiting}

    def counted(self, topic: str, count: int) -> bool:
        """The answer to a fetch said how many partitions the topic has now; whether that is news to look at."""
        if self._told_counts.get(topic) == count:
            return False
        self._told_counts[topic] = count
        self.grown = not self._told_by_group and self._counts.get(topic, count) != count
        return self.grown

    def _tell_missing(self, missing: list[str]) -> None:
        for name in missing:
            if name not in self._told_missing:
                self._told_missing.add(name)
                log.warning("%s is not there yet; waiting for it. Reading never makes a topic.", name)
