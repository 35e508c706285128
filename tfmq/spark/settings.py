"""What the options of a source say, as one value that goes to the driver's planner and to every task."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfmq.client.connection.addresses import parse_servers
from tfmq.errors import BadRequest
from tfmq.limits import TRANSACTION_TTL_SECONDS, valid_name
from tfmq.spark.log_reader import Address
from tfmq.spark.offsets import Places, Subscription, ending, starting, subscription
from tfmq.spark.options import chosen, only_one

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


# The option `servers`: one broker, because a position, an incarnation and a decision are one broker's.


def require_one_broker(servers: str) -> None:
    """Raises BadRequest for what is no address, and for several."""
    if len(parse_servers(servers)) > 1:
        raise BadRequest(
            f"servers must be one broker, HOST:PORT, not {servers!r}: offsets and exactly once hold within one."
        )


# What the options of a sink say, as one value that goes to every task and to the driver's verdict.

TOPIC_MARK = ".."
"""Between a query or an application and its topic, in the name of a commit group."""
GROUP_CHARACTERS = 249
APPLICATION_CHARACTERS, TOPIC_CHARACTERS = 200, 32
"""At most of an application's name; and of a topic that is too long beside it, by its SHA-256."""
GROUP_PREFIX = "spark-"
"""Commit groups of Spark bear it, so that `tfmq tx groups` tells them from others."""


class SinkSettings(NamedTuple):
    """`topic` "": the rows say it. `ttl_ms` None: as the broker says. `group` and `sequence` are of a batch write that
    is to be done once; "" and 0 for others. `lenient` as of
    `encode`, for copies.
    """

    servers: str
    topic: str = ""
    timeout: float = TIMEOUT_SECONDS
    ttl_ms: int | None = None
    other_total: bool = False
    group: str = ""
    sequence: int = 0
    lenient: bool = False


def sink_settings(given: Mapping[str, str], *, streaming: bool) -> SinkSettings:
    """Of the options as Spark hands them over. Raises BadRequest for the first one that is wrong."""
    found = chosen(given, "sink", "stream" if streaming else "batch")
    if "servers" not in found:
        raise BadRequest('Give the broker to write to: option("servers", "HOST:PORT").')
    require_one_broker(found["servers"])
    topic = found.get("topic", "")
    if topic and not valid_name(topic):
        raise BadRequest(f"topic must be a topic's name, 1 to 249 of A-Z a-z 0-9 . _ -, not {topic!r}.")
    ttl = found.get("transactionTtl")
    if ttl is not None and ttl > TRANSACTION_TTL_SECONDS.cap:
        raise BadRequest(
            f"transactionTtl must be at most {TRANSACTION_TTL_SECONDS.cap // 86_400} days, {ttl:g} s are more."
        )
    return SinkSettings(
        found["servers"],
        topic,
        found.get("timeout", TIMEOUT_SECONDS),
        None if ttl is None else max(1, round(ttl * 1000)),
        found.get("allowOtherTotal", False),
        *_once(found, topic),
    )


def group_name(kind: str, name: str, topic: str = "") -> str:
    """The commit group of a query ("stream") or an application ("batch") that writes to `topic`: each topic is a place
    of its own, so what is in one is not taken for what another one lacks. `name` has no ".." and no "." at its end, so
    that no two pairs share a group.
    """
    group = f"{GROUP_PREFIX}{kind}-{name}"
    if not topic:
        return group
    if len(group) + len(TOPIC_MARK) + len(topic) > GROUP_CHARACTERS:
        topic = hashlib.sha256(topic.encode()).hexdigest()[:TOPIC_CHARACTERS]
    return f"{group}{TOPIC_MARK}{topic}"


def _once(found: Mapping[str, Any], topic: str) -> tuple[str, int]:
    """The commit group and the sequence of a batch write that is to be done once."""
    given = [name for name in ("txnAppId", "txnVersion") if name in found]
    if not given:
        return "", 0
    if len(given) == 1:
        missing = "txnVersion" if given == ["txnAppId"] else "txnAppId"
        raise BadRequest(f"{given[0]} goes together with {missing}: give both, or none.")
    name = found["txnAppId"]
    if not valid_name(name) or len(name) > APPLICATION_CHARACTERS or TOPIC_MARK in f"{name}.":
        raise BadRequest(
            f"txnAppId must be a name, 1 to {APPLICATION_CHARACTERS} of A-Z a-z 0-9 . _ -, without '..' and not with a"
            f" '.' at its end, not {name!r}."
        )
    return group_name("batch", name, topic), found["txnVersion"]
