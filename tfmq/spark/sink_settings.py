"""What the options of a sink say, as one value that goes to every task and to the driver's verdict."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfmq.errors import BadRequest
from tfmq.limits import TRANSACTION_TTL_SECONDS, valid_name
from tfmq.spark.options import chosen
from tfmq.spark.server_address import require_one_broker

TIMEOUT_SECONDS = 30.0
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
