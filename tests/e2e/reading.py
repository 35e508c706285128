"""Everything that a topic holds, read by a consumer of its own."""

from typing import Any

import tfmq

LOOK_SECONDS = 10.0


def stored(address: str, topic: str, partition: int | None = None, **options: Any) -> list[Any]:
    """All messages up to the end of each partition as it is now; a partition that is stopped, up to its forced end.

    Every one that a reader gets besides is there too, so that what ought not to be there is seen.
    """
    with tfmq.Admin(address) as admin:
        partitions = [p for p in admin.topic(topic).partitions if partition in (None, p.partition)]
    ends = {p.partition: p.forced_offset if p.state == "stopped" else p.end_offset for p in partitions}
    messages: list[Any] = []
    with tfmq.Consumer(address, partitions=[(topic, number) for number in ends], **options) as consumer:
        while any(consumer.position(topic, number) < end for number, end in ends.items()):
            batch = consumer.poll(timeout=LOOK_SECONDS, max_messages=50_000)
            assert batch, f"nothing came for {LOOK_SECONDS:g} s: {consumer.stats()}"
            messages += batch
        messages += consumer.poll(timeout=0.0, max_messages=50_000)
    return messages


def payloads(address: str, topic: str, partition: int | None = None, **options: Any) -> list[bytes]:
    """Their payloads; a tombstone's is b"" here."""
    return [message.payload or b"" for message in stored(address, topic, partition, **options)]
