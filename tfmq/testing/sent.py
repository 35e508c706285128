"""What a topic of a simulated broker holds, as messages: read from its logs, beside every client."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from tfmq.broker.partition import Partition
from tfmq.broker.request_handler import Engine
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.errors import StorageStopped, UnknownTopic

READ_BYTES: Final = 8 << 20
"""Read at once."""


def sent(engine: Engine, topic: str, partition: int | None = None) -> list[ReceivedMessage]:
    """Everything that was appended to the topic, in the order of appending; [] without such a topic. Of a partition
    that stopped only what is surely on the disk.

    `partition`: only that one. Raises `StorageStopped` for one that could not be opened.
    """
    try:
        found = engine.house.topics.topic(topic)
    except UnknownTopic:
        return []
    partitions = found.partitions if partition is None else found.partitions[partition : partition + 1]
    streams = [messages(topic, each) for each in partitions]
    return list(heapq.merge(*streams, key=lambda message: message.origin.append_ms))


def is_there(engine: Engine, topic: str) -> bool:
    """Whether the broker has that topic."""
    try:
        engine.house.topics.topic(topic)
    except UnknownTopic:
        return False
    return True


def messages(topic: str, partition: Partition | str) -> Iterator[ReceivedMessage]:
    """The messages of one partition, in order."""
    if isinstance(partition, str):
        raise StorageStopped(f"A partition of {topic} could not be opened: {partition}")
    log = partition.log
    decoder = Decoder(topic, partition.number, partition.incarnation)
    offset = log.first_offset
    while offset < log.end_offset:
        chunk = log.read(offset, READ_BYTES, upto="written")
        for decoded in decoder.decode(bytes(chunk.data), chunk.start, chunk.skip_to, chunk.next):
            yield from decoded.messages
        if chunk.next == offset:  # the log stopped, and what is behind its forced mark may not be there
            return
        offset = chunk.next
