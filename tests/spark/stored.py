"""What tests of logs share: a broker in this process with small segments, and topics with records of many sizes."""

from __future__ import annotations

import random
from collections.abc import Iterable

from journal.record.block import blocks_of
from journal.record.format import FLAG_FILLER, records_of
from tfmq.spark.ranges import BlockRun, OffsetRange, PartitionLog
from tfmq.testing.broker import SimulatedBroker

SEGMENT_BYTES = 1 << 18
"""Some segments hold a few large records, all of them several runs of an index."""


def small_broker(**settings: object) -> SimulatedBroker:
    """A broker whose segments are small."""
    return SimulatedBroker({"log.segment_bytes": SEGMENT_BYTES, **settings})


def fill(broker: SimulatedBroker, topic: str, generator: random.Random, total_bytes: int) -> None:
    """Batches of one size, of many sizes, single ones and large ones, until there is so much; some time between."""
    producer = broker.producer(linger_ms=1000)
    done = 0
    while done < total_bytes:
        count = generator.choice([1, 1, 7, 300])
        size = generator.choice([0, 10, 100, 200, 1000 if count < 300 else 100, 70_000 if count == 1 else 100])
        even = generator.random() < 0.5
        for number in range(count):
            part = size if even else generator.randrange(size + 1)
            producer.send(topic, generator.randbytes(part), key=str(number), partition=0)
            done += part + 60
        producer.flush()
        if generator.random() < 0.3:
            broker.clock.advance(generator.random())
    producer.close()


def joined(chunks: Iterable[BlockRun]) -> tuple[int, bytes]:
    """Offset and bytes of all, which follow each other without a gap."""
    start, data = -1, bytearray()
    for chunk in chunks:
        start = chunk.offset if start < 0 else start
        assert chunk.offset == start + len(data)
        data += chunk.data
    return start, bytes(data)


def starts_in(log: PartitionLog, chunk: BlockRun) -> list[int]:
    """Where the messages of a chunk begin."""
    return [
        block.offset + record.position
        for block in blocks_of(bytes(chunk.data), chunk.offset, log.log_id)
        for record in records_of(block.data)
        if not record.flag & FLAG_FILLER
    ]


def wanted(range: OffsetRange, chunks: Iterable[BlockRun]) -> list[int]:
    """Where the messages of the range begin, out of chunks that may hold some more."""
    found = [start for chunk in chunks for start in starts_in(range.log, chunk)]
    return [start for start in found if range.start <= start < range.end]
