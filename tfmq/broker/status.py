"""What STATUS says of the broker: what it holds, what waits, what is in trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfmq.broker.topics import state_of, why_stopped

if TYPE_CHECKING:
    from tfmq.broker.house import House


def status(house: House) -> dict[str, Any]:
    """Numbers since its start of storage, not of traffic. Cheap: nothing is read from the disk."""
    partitions = list(house.topics.partitions())
    stopped = [
        {"topic": topic.name, "partition": number, "reason": why_stopped(each)}
        for topic in house.topics.all()
        for number, each in enumerate(topic.partitions)
        if state_of(each) == "stopped"
    ]
    return {
        "node": house.node,
        "uptime_seconds": int(house.clock.monotonic() - house.started),
        "data": house.data,
        "topics": len(house.topics),
        "partitions": house.topics.partition_count(),
        "groups": len(house.catalog.register.groups),
        "messages": sum(each.log.count for each in partitions),
        "bytes": sum(each.log.size_bytes for each in partitions),
        "stopped": stopped,
        "damaged": [{"topic": each.name, "partition": each.number} for each in partitions if each.log.damage],
        "unknown_folders": house.strangers,
        "catalog": house.catalog.log.stopped or "open",
        "free_bytes": house.disk.free_space(house.data),
        "parked_fetches": house.polls.count,
        "pending_bytes": house.quotas.bytes,
        "forces": house.forcer.forces,
        "transactions": house.transactions.handler.status(),
        "delay": house.delay.status(),
        "schedules": house.schedules.status(),
    }
