"""Ordered sending to configured partitions, and to no other: the selector, and where messages stay meanwhile."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from tfmq import limits
from tfmq.client.partition_selector import PartitionSelector
from tfmq.errors import BadRequest, UnknownPartition
from tfmq.message import Message, Partition

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
