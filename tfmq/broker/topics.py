"""The existing topics by name, and what METADATA and DESCRIBE_TOPIC return about them."""

from collections.abc import Iterator, Mapping
from typing import Any

from journal.log.log import Log
from tfmq.broker.catalog_state import CatalogState, TopicRow
from tfmq.broker.partition import Partition
from tfmq.errors import NOT_DONE, StorageStopped, UnknownPartition, UnknownTopic
from tfmq.message import PartitionState

OpenError = str
"""The reason why a log could not be opened. `Topic.partitions` has it instead of the `Partition`."""


class Topic:
    """An existing topic with its partitions."""

    def __init__(self, row: TopicRow, partitions: list[Partition | OpenError]) -> None:
        self.name, self.incarnation, self.settings = row.name, row.incarnation, row.settings
        self.partitions = partitions


class Topics(dict[str, Topic]):
    """The existing topics by name. Only a start and `TopicAdmin` add and remove topics."""

    def __init__(self, register: CatalogState) -> None:
        super().__init__()
        self._register = register

    def topic(self, name: str) -> Topic:
        """Return the topic `name`. Raises UnknownTopic."""
        topic = self.get(name)
        if topic is None:
            raise UnknownTopic(f"There is no topic {name}. Look at tfmq topic list, or create it.")
        return topic

    def partition(self, name: str, incarnation: int, number: int) -> Partition:
        """Return an open partition. Raises UnknownTopic, UnknownPartition, StorageStopped."""
        topic = self.get(name) or self.topic(name)
        if topic.incarnation != incarnation:
            raise UnknownTopic(
                f"The topic {name} was deleted and made again since you asked about it. Ask again.",
                incarnation=topic.incarnation,
            )
        if number >= len(topic.partitions):
            raise no_partition(topic, number)
        found = topic.partitions[number]
        if isinstance(found, str):
            raise StorageStopped(f"The partition {name}-{number} could not be opened: {found}", outcome=NOT_DONE)
        return found

    def partitions(self) -> Iterator[Partition]:
        """Yield every open partition."""
        for topic in self.values():
            for partition in topic.partitions:
                if isinstance(partition, Partition):
                    yield partition

    def by_incarnation(self, incarnation: int) -> str | None:
        """Return the name of the existing topic with that incarnation; None if there is none."""
        row = self._register.topics.get(incarnation)
        return row.name if row is not None and row.name in self else None

    def find_partition(self, incarnation: int, number: int) -> Partition | None:
        """Return partition `number` of the topic with that incarnation; None if that partition is not open."""
        row = self._register.topics.get(incarnation)
        topic = None if row is None else self.get(row.name)
        found = topic.partitions[number] if topic is not None and number < len(topic.partitions) else None
        return found if isinstance(found, Partition) else None

    def count(self, name: str) -> int:
        """Return the topic's number of partitions; 0 if the topic does not exist."""
        topic = self.get(name)
        return 0 if topic is None else len(topic.partitions)

    def partition_counts(self) -> dict[str, int]:
        return {name: len(topic.partitions) for name, topic in self.items()}

    def partition_count(self) -> int:
        return sum(len(topic.partitions) for topic in self.values())


def no_partition(topic: Topic, number: int) -> UnknownPartition:
    """Return the error for a partition that the topic does not have. The error names the existing partitions."""
    count = len(topic.partitions)
    numbers = "1 partition" if count == 1 else f"{count} partitions"
    there = "its number is 0" if count == 1 else f"their numbers are 0 to {count - 1}"
    return UnknownPartition(
        f"The topic {topic.name} has {numbers}, no number {number}: {there}. See tfmq topic show {topic.name}.",
        partitions=count,
    )


def describe_topic(topic: Topic, findings: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the reply to DESCRIBE_TOPIC. May read the disk, so it is called in a worker.

    `findings`: number of a partition -> the rows of its findings of the background verification.
    """
    return {
        "name": topic.name,
        "incarnation": topic.incarnation,
        "settings": topic.settings,
        "partitions": [
            describe_partition(number, each) | {"findings": findings.get(number, [])}
            for number, each in enumerate(list(topic.partitions))
        ],
    }


def metadata_row(topic: Topic) -> tuple[str, int, list[tuple[int, PartitionState]], dict[str, Any]]:
    """Return the row for one topic in the reply to METADATA."""
    partitions = [(number, partition_state(each)) for number, each in enumerate(topic.partitions)]
    return topic.name, topic.incarnation, partitions, topic.settings


def partition_state(partition: Partition | OpenError) -> PartitionState:
    """Return the state of the partition. A partition whose log could not be opened is stopped, too."""
    return PartitionState.STOPPED if isinstance(partition, str) else partition.state


def stop_reason(partition: Partition | OpenError) -> str:
    """Return why the partition rejects records: why it stopped, or could not be opened. "" if it accepts records."""
    return partition if isinstance(partition, str) else partition.log.stopped or ""


def describe_partition(number: int, partition: Partition | OpenError) -> dict[str, Any]:
    """Return the row for one partition in the reply to DESCRIBE_TOPIC."""
    if isinstance(partition, str):
        return {"partition": number, "state": PartitionState.STOPPED, "reason": partition}
    log = partition.log
    return {
        "partition": number,
        "state": partition.state,
        "reason": log.stopped or "",
        "first_offset": log.first_offset,
        "end_offset": log.end_offset,
        "forced_offset": log.forced_offset,
        "first_ordinal": log.first_ordinal,
        "end_ordinal": log.end_ordinal,
        "size_bytes": log.size_bytes,
        "segments": log.segment_count,
        "epoch": log.epoch,
        "oldest_ms": _oldest_ms(log),
        "newest_ms": log.newest_ms,
        "producers": len(partition.producers),
        "damage": [list(range_) for range_ in log.damage],
    }


def _oldest_ms(log: Log) -> int | None:
    """Return the append time of the first record; None if there is none, or the disk cannot read it."""
    try:
        return log.oldest_ms
    except OSError:  # the rest of the description is needed most where the disk fails
        return None
