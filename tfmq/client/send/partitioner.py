"""Which partition a message goes to: the plug-in interface and the selectors that come with tfmq.

A selector is given to `Producer(selector=...)` as an object, or as the name of an entry point of the group
`tfmq.partition_selectors`. It is asked under the producer's lock and must not wait.
"""

from __future__ import annotations

import os
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Final

from tfmq import limits
from tfmq.client.connection.requests import Topic
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


# Ordered sending to configured partitions, and to no other: the selector, and where messages stay meanwhile.

STORE_BYTES_MAX: Final = 1 << 30
"""So much is kept for partitions that take no writes; then sends fail. A day of 12 kB a second."""


class StrictPartitions(PartitionSelector):
    """Sends to the configured partitions of each topic and never to another one, so that order holds whatever fails.

        selector = tfmq.StrictPartitions({"orders": [0, 1]}, store="/var/lib/shop/orders.db")
        producer = tfmq.Producer(selector=selector)

    Among several the key chooses (as ever the same one for a key); without a key they take turns.

    `partitions`: topic -> numbers. A topic that is not among them is refused (`BadRequest`), and so is a message for
    another partition (`UnknownPartition`) · `store`: path of an SQLite file, made if need be. While a partition takes
    no writes, or the broker does not answer, its messages are kept there; `SendResult.durability` is "kept", and
    that is said after the file is forced. They go out in order, each once, before any later one, by this process or by
    the next one that opens the store. None: such sends fail · `store_bytes`: its bound; sends beyond it fail (`Busy`).

    One living process has a store. With one, `acks` is always "synced", and there are no delayed sends.
    """

    strict = True

    def __init__(
        self,
        partitions: Mapping[str, Sequence[int]],
        store: str | os.PathLike[str] | None = None,
        *,
        store_bytes: int = STORE_BYTES_MAX,
    ) -> None:
        if not isinstance(partitions, Mapping) or not partitions:
            raise BadRequest(
                f'The partitions of each topic are a dict, as in {{"orders": [0, 1]}}, not {partitions!r}.'
            )
        for topic, numbers in partitions.items():
            if not limits.valid_name(topic):
                raise BadRequest(
                    f"{topic!r} is no name of a topic: letters, digits, '.', '_' and '-', at most 249."
                )
            if (
                not isinstance(numbers, Sequence)
                or isinstance(numbers, str | bytes)
                or not numbers
                or any(type(each) is not int or each < 0 for each in numbers)
            ):
                raise BadRequest(f"{topic}: the partitions are a list of numbers from 0 on, not {numbers!r}.")
            if len(set(numbers)) < len(numbers):
                raise BadRequest(f"{topic}: a partition stands twice in {numbers!r}.")
        self.partitions = {topic: tuple(numbers) for topic, numbers in partitions.items()}
        self.store = None if store is None else os.fspath(store)
        self.store_bytes = store_bytes
        self._turns: dict[str, int] = {}

    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        """The configured one, also where it takes no writes. Raises `UnknownPartition` where the topic lacks it."""
        number = self.choose(topic, message)
        if number >= len(partitions):
            raise UnknownPartition(f"{topic} has partitions 0 to {len(partitions) - 1}, not {number}.")
        return partitions[number]

    def choose(self, topic: str, message: Message) -> int:
        """The number of the partition for `message`, from the configuration alone."""
        numbers = self.partitions.get(topic)
        if numbers is None:
            raise BadRequest(
                f"{topic} is not among the topics of StrictPartitions; add it with its partitions."
            )
        if message.partition is not None:
            if message.partition not in numbers:
                raise UnknownPartition(
                    f"Partition {message.partition} of {topic} is not configured: {numbers}."
                )
            return message.partition
        if message.key is None:
            turn = self._turns.get(topic, 0)
            self._turns[topic] = turn + 1
            return numbers[turn % len(numbers)]
        data = message.key.encode() if isinstance(message.key, str) else message.key
        return numbers[zlib.crc32(data) % len(numbers)]
