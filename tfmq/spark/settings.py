"""What the options of a source say, as one value that goes to the driver's planner and to every task."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfmq.errors import BadRequest
from tfmq.spark.logs import Address
from tfmq.spark.options import chosen, only_one
from tfmq.spark.places import Places, ending, starting
from tfmq.spark.server_address import require_one_broker
from tfmq.spark.subscription import Subscription, subscription

log = logging.getLogger("tfmq.spark")

TIMEOUT_SECONDS = 30.0
LONG_SECONDS = 3600.0
"""A timeout above it is likely meant in ms."""
TRIGGER_DELAY_SECONDS = 15 * 60.0


class SourceSettings(NamedTuple):
    """Times in seconds; None: no limit. `end` is None for a stream; `group` "": nobody is told."""

    address: Address
    subscription: Subscription
    start: Places
    end: Places | None = None
    fail_on_data_loss: bool = True
    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int | None = None
    trigger_delay: float = TRIGGER_DELAY_SECONDS
    partitions_min: int | None = None
    rows_per_task: int | None = None
    group: str = ""
    verify: str = "chunk"


def source_settings(given: Mapping[str, str], *, streaming: bool) -> SourceSettings:
    """Of the options as Spark hands them over. Raises BadRequest for the first one that is wrong."""
    found = chosen(given, "source", "stream" if streaming else "batch")
    address = _address(found)
    only_one(found, "maxOffsetsPerTrigger", "maxBytesPerTrigger")
    if "groupId" in found and "path" in found:
        raise BadRequest("groupId and path exclude each other: groups are the broker's, so give servers.")
    settings = SourceSettings(
        address,
        subscription(found),
        starting(found, streaming),
        None if streaming else ending(found),
        found.get("failOnDataLoss", True),
        found.get("maxOffsetsPerTrigger"),
        found.get("maxBytesPerTrigger"),
        found.get("minOffsetsPerTrigger"),
        found.get("maxTriggerDelay", TRIGGER_DELAY_SECONDS),
        found.get("minPartitions"),
        found.get("maxRecordsPerPartition"),
        found.get("groupId", ""),
        found.get("verify", "chunk"),
    )
    if settings.rows_min is not None and (settings.rows_max or settings.rows_min) < settings.rows_min:
        raise BadRequest("minOffsetsPerTrigger is larger than maxOffsetsPerTrigger.")
    return settings


def _address(found: Mapping[str, Any]) -> Address:
    if "servers" in found and "path" in found:
        raise BadRequest(
            "servers and path exclude each other: give one of them. A name in load(NAME) is a path, too: topics are"
            ' named by option("subscribe", NAME).'
        )
    only_one(found, "servers", "path", required=True)
    timeout = found.get("timeout", TIMEOUT_SECONDS)
    if timeout > LONG_SECONDS:
        log.warning(
            "timeout is %.1f hours: a number without a unit is seconds, so write 30s or 30000ms.",
            timeout / 3600,
        )
    if "path" in found:
        return Address(servers=None, path=found["path"], timeout=timeout)
    require_one_broker(found["servers"])
    return Address(servers=found["servers"], path=None, timeout=timeout)
