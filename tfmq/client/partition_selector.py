"""Which partition a message goes to: the plug-in interface and the selectors that come with tfmq.

A selector is given to `Producer(selector=...)` as an object, or as the name of an entry point of the group
`tfmq.partition_selectors`. It is asked under the producer's lock and must not wait.
"""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import metadata

from tfmq.client.cluster import Topic
from tfmq.errors import BadRequest, StorageStopped, UnknownPartition
from tfmq.message import Message, Partition

ENTRY_POINTS = "tfmq.partition_selectors"


class PartitionSelector(ABC):
    """Chooses a partition for each message. `get_partition` returns one of `partitions`."""

    per_batch = False
    """True: the choice for a message without a key may serve all such messages of one batch, so that small topics'
    many partitions do not cut batches into crumbs."""

    strict = False
    """True: it is asked about every message, also one that names its partition, or whose topic has only one."""

    @abstractmethod
    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        """The partition for `message`; `partitions` is in order of number and never empty."""


class RoundRobin(PartitionSelector):
    """One partition after the other, passing over those that take no writes. It moves on with every batch."""

    per_batch = True

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        start = self._next.get(topic, 0)
        for step in range(len(partitions)):
            chosen = partitions[(start + step) % len(partitions)]
            if chosen.writable:
                break
        else:
            raise StorageStopped(f"No partition of {topic} takes writes: see tfmq topic show {topic}.")
        self._next[topic] = (chosen.number + 1) % len(partitions)
        return chosen


class KeyHash(PartitionSelector):
    """The partition that the key's CRC-32 names, so that one key keeps its order, from every process and language,
    as long as the topic does not grow. Without a key: round robin.
    """

    per_batch = True

    def __init__(self) -> None:
        self._without_key = RoundRobin()

    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        key = message.key
        if key is None:
            return self._without_key.get_partition(topic, partitions, message)
        data = key.encode() if isinstance(key, str) else key
        return partitions[zlib.crc32(data) % len(partitions)]


class Random(PartitionSelector):
    """Any partition that takes writes, by chance; `choose` picks one of a sequence."""

    per_batch = True

    def __init__(self, choose: Callable[[Sequence[Partition]], Partition] = random.choice) -> None:
        self._choose = choose

    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        writable = [each for each in partitions if each.writable]
        if not writable:
            raise StorageStopped(f"No partition of {topic} takes writes: see tfmq topic show {topic}.")
        return self._choose(writable)


def find_selector(selector: PartitionSelector | str | None) -> PartitionSelector:
    """The selector to use: an object as it is, a name by entry point, None the default (`KeyHash`, which is round
    robin for messages without a key). Raises `BadRequest` for a name that nobody provides.
    """
    if selector is None:
        return KeyHash()
    if isinstance(selector, str):
        return _load(selector)
    if not callable(getattr(selector, "get_partition", None)):
        raise BadRequest(
            f"A selector needs get_partition(topic, partitions, message); {selector!r} has none."
        )
    return selector


def _load(name: str) -> PartitionSelector:
    found = metadata.entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        names = ", ".join(sorted(found.names)) or "none"
        raise BadRequest(f"There is no partition selector called {name!r}; installed: {names}.")
    made: PartitionSelector = found[name].load()()
    return made


def choose_partition(selector: PartitionSelector, topic: Topic, message: Message) -> int:
    """The number of the partition that `message` names, or else `selector` chooses. Raises `UnknownPartition`."""
    partitions = topic.partitions
    if selector.strict:
        return selector.get_partition(topic.name, partitions, message).number
    if message.partition is not None:
        if not 0 <= message.partition < len(partitions):
            raise UnknownPartition(
                f"{topic.name} has partitions 0 to {len(partitions) - 1}, not {message.partition}."
            )
        return message.partition
    if len(partitions) == 1:
        return 0
    return selector.get_partition(topic.name, partitions, message).number
