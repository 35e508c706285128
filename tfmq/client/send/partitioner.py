"""Choice of the partition for a message: the plug-in interface and the built-in selectors.

`Producer(selector=...)` takes a `PartitionSelector`, or the name of an entry point of the group
`tfmq.partition_selectors`. A selector is called under the producer's lock and must not block.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Final

from journal.crc32 import crc32
from tfmq import limits
from tfmq.client.connection.requests import Topic
from tfmq.errors import BadRequest, StorageStopped, UnknownPartition
from tfmq.message import Message, Partition

ENTRY_POINTS = "tfmq.partition_selectors"


class PartitionSelector(ABC):
    """Chooses the partition of each message: `get_partition` returns one of the `partitions` that it is given."""

    per_batch = False
    """True: the partition that is chosen for one message without a key is used for all such messages of a batch.

    This avoids many small batches on topics with many partitions.
    """

    strict = False
    """True: the selector is called even if the message names a partition, or the topic has only one partition."""

    @abstractmethod
    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        """Return the partition for `message`. `partitions` is ordered by number and never empty."""


class RoundRobin(PartitionSelector):
    """Chooses the partitions in turn, one partition per batch, and skips partitions that accept no writes."""

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
    """Chooses the partition by the CRC-32 of the key, the same in every process and language.

    Messages of one key stay in order until partitions are added to the topic. Messages without a key are distributed as
    by `RoundRobin`.
    """

    per_batch = True

    def __init__(self) -> None:
        self._without_key = RoundRobin()

    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        key = message.key
        if key is None:
            return self._without_key.get_partition(topic, partitions, message)
        data = key.encode() if isinstance(key, str) else key
        return partitions[crc32(data) % len(partitions)]


class Random(PartitionSelector):
    """Chooses a random partition that accepts writes. `choose` returns a random item of a sequence."""

    per_batch = True

    def __init__(self, choose: Callable[[Sequence[Partition]], Partition] = random.choice) -> None:
        self._choose = choose

    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        writable = [each for each in partitions if each.writable]
        if not writable:
            raise StorageStopped(f"No partition of {topic} takes writes: see tfmq topic show {topic}.")
        return self._choose(writable)


def load_selector(selector: PartitionSelector | str | None) -> PartitionSelector:
    """Return `selector` itself, or the selector of the entry point with this name, or a `KeyHash` for None.

    Raises `BadRequest` if no entry point has the name, or if the object is no selector.
    """
    if selector is None:
        return KeyHash()
    if isinstance(selector, str):
        found = metadata.entry_points(group=ENTRY_POINTS)
        if selector not in found.names:
            names = ", ".join(sorted(found.names)) or "none"
            raise BadRequest(f"There is no partition selector called {selector!r}; installed: {names}.")
        made: PartitionSelector = found[selector].load()()
        return made
    if not callable(getattr(selector, "get_partition", None)):
        raise BadRequest(f"A selector needs get_partition(topic, partitions, message); {selector!r} has none.")
    return selector


def choose_partition(selector: PartitionSelector, topic: Topic, message: Message) -> int:
    """Return the number of the partition that `message` names, or else that `selector` chooses.

    If the selector is strict, it always chooses. Raises `UnknownPartition` if the topic lacks the named partition.
    """
    partitions = topic.partitions
    if selector.strict:
        return selector.get_partition(topic.name, partitions, message).number
    if message.partition is not None:
        if not 0 <= message.partition < len(partitions):
            raise UnknownPartition(f"{topic.name} has partitions 0 to {len(partitions) - 1}, not {message.partition}.")
        return message.partition
    if len(partitions) == 1:
        return 0
    return selector.get_partition(topic.name, partitions, message).number


STORE_BYTES_MAX: Final = 1 << 30
"""Default size limit of the store of `StrictPartitions`: enough for a day at 12 kB/s. Sends beyond the limit fail."""


class StrictPartitions(PartitionSelector):
    """Sends only to the configured partitions of each topic, so that order survives any failure.

        selector = tfmq.StrictPartitions({"orders": [0, 1]}, store="/var/lib/shop/orders.db")
        producer = tfmq.Producer(selector=selector)

    Among several partitions of a topic the key decides: messages of one key always go to the same partition. Messages
    without a key go to the partitions in turn.

    `partitions`: topic -> partition numbers. Other topics are rejected (`BadRequest`), and so is a message for another
    partition (`UnknownPartition`).

    `store`: path of an SQLite file, created if missing. While a partition accepts no writes, or the broker does not
    respond, its messages are stored there. `SendResult.durability` is then "kept", and the result is returned after the
    file is fsynced. This process, or the next process that opens the store, sends the stored messages in order, each
    once, before any later message. `store` None: sends fail while the partition accepts no writes. Only one running
    process can use a store. With a store, `acks` is always "synced", and delayed sends are not possible.

    `store_bytes`: size limit of the store; sends beyond it fail (`Busy`).
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
            if not limits.is_valid_name(topic):
                raise BadRequest(f"{topic!r} cannot be a topic: {limits.NAME_RULE}.")
            if (
                not isinstance(numbers, Sequence)
                or isinstance(numbers, str | bytes)
                or not numbers
                or any(type(each) is not int or each < 0 for each in numbers)
            ):
                raise BadRequest(f"{topic}: the partitions are a list of numbers from 0 on, not {numbers!r}.")
            if len(set(numbers)) < len(numbers):
                raise BadRequest(f"{topic}: a partition is listed twice in {numbers!r}.")
        self.partitions = {topic: tuple(numbers) for topic, numbers in partitions.items()}
        self.store = None if store is None else os.fspath(store)
        self.store_bytes = store_bytes
        self._turns: dict[str, int] = {}

    def get_partition(self, topic: str, partitions: Sequence[Partition], message: Message) -> Partition:
        """Return a configured partition for the message, even if this partition accepts no writes.

        Raises `UnknownPartition` if the partition does not exist, or if the message names a partition that is not
        configured. Raises `BadRequest` for a topic that is not configured.
        """
        number = self.choose(topic, message)
        if number >= len(partitions):
            raise UnknownPartition(f"{topic} has partitions 0 to {len(partitions) - 1}, not {number}.")
        return partitions[number]

    def choose(self, topic: str, message: Message) -> int:
        """Choose a configured partition, as `get_partition` does, but without checking that the partition exists."""
        numbers = self.partitions.get(topic)
        if numbers is None:
            raise BadRequest(f"{topic} is not among the topics of StrictPartitions; add it with its partitions.")
        if message.partition is not None:
            if message.partition not in numbers:
                raise UnknownPartition(f"Partition {message.partition} of {topic} is not configured: {numbers}.")
            return message.partition
        if message.key is None:
            turn = self._turns.get(topic, 0)
            self._turns[topic] = turn + 1
            return numbers[turn % len(numbers)]
        data = message.key.encode() if isinstance(message.key, str) else message.key
        return numbers[crc32(data) % len(numbers)]
