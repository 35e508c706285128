"""Which partitions a query reads: those of named topics, of all topics that a pattern matches, or named ones."""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tfmq.errors import UnknownPartition, UnknownTopic
from tfmq.spark.logs import Logs, PartitionLog
from tfmq.spark.offsets import Key, assigned, named
from tfmq.spark.options import nearest, only_one


class Subscription(NamedTuple):
    """One of the three is not empty."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[Key, ...] = ()

    def wants(self, topic: str) -> bool:
        """Whether a topic of that name is meant."""
        if self.pattern:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics or any(topic == each[0] for each in self.assigned)

    def find(self, logs: Logs, *, lenient: bool = False) -> dict[Key, PartitionLog]:
        """The partitions that are there now. Raises UnknownTopic for a named topic that is not there, UnknownPartition
        likewise; `lenient`: they are left out.
        """
        found: dict[Key, PartitionLog] = {}
        for topic in self._topics(logs):
            try:
                found |= {(each.topic, each.partition): each for each in logs.partitions(topic)}
            except UnknownTopic:
                if not lenient and not self.pattern:
                    raise _unknown(logs, topic) from None
        if not self.assigned:
            return found
        missing = [key for key in self.assigned if key not in found]
        if missing and not lenient:
            raise UnknownPartition(f"assign: there is no partition {named(missing)}.")
        return {key: found[key] for key in self.assigned if key in found}

    def look_for(self, logs: Logs, there: Collection[Key]) -> None:
        """Raises what `find` does for the first that is named and not `there`."""
        topics = {topic for topic, _ in there}
        for topic in [] if self.pattern else self._topics(logs):
            if topic not in topics and topic not in logs.topics():
                raise _unknown(logs, topic)
        missing = [key for key in self.assigned if key not in there]
        if missing:
            raise UnknownPartition(f"assign: there is no partition {named(missing)}.")

    def _topics(self, logs: Logs) -> list[str]:
        if self.pattern:
            return sorted(topic for topic in logs.topics() if self.wants(topic))
        return sorted({*self.topics, *(topic for topic, _ in self.assigned)})


def _unknown(logs: Logs, topic: str) -> UnknownTopic:
    return UnknownTopic(
        f"There is no topic {topic!r}.{nearest(topic, logs.topics())} Look at the list of topics (tfmq topic list), or"
        " create it (tfmq topic create)."
    )


def subscription(given: Mapping[str, Any]) -> Subscription:
    """Of the options that are given. Raises BadRequest."""
    chosen = only_one(given, "subscribe", "subscribePattern", "assign", required=True)
    if chosen == "assign":
        return Subscription(assigned=assigned(given["assign"]))
    return Subscription(given.get("subscribe", ()), given.get("subscribePattern", ""))
