"""Settings of a source or a sink, parsed from its options and sent to every task."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfmq.client.connection.addresses import PASSWORD_VARIABLE, parse_servers, with_password, without_password
from tfmq.errors import BadRequest
from tfmq.limits import NAME_RULE, TRANSACTION_TTL_SECONDS, is_valid_name
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.offsets import OffsetSpec, Subscription, parse_ending, parse_starting, parse_subscription
from tfmq.spark.options import exclusive_option, parse_options

log = logging.getLogger("tfmq.spark")

TIMEOUT_SECONDS = 30.0
SUSPICIOUS_TIMEOUT_SECONDS = 3600.0
"""For a longer timeout a warning is logged, because the user probably meant milliseconds."""
TRIGGER_DELAY_SECONDS = 15 * 60.0


class SourceSettings(NamedTuple):
    """Settings of a source; the options in docs/spark.md explain them. Times are in seconds; None means no limit.

    `end`: where a batch ends; None for a stream · `rows_max`, `bytes_max`: limits of a micro-batch · `rows_min`: rows
    for which a micro-batch waits, at most `trigger_delay` · `partitions_min`: minimum number of tasks ·
    `rows_per_task`: maximum rows of a task · `group`: the group to which a stream's progress is written, "" for none.
    """

    address: SourceAddress
    subscription: Subscription
    start: OffsetSpec
    end: OffsetSpec | None = None
    fail_on_data_loss: bool = True
    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int | None = None
    trigger_delay: float = TRIGGER_DELAY_SECONDS
    partitions_min: int | None = None
    rows_per_task: int | None = None
    group: str = ""
    verify: str = "chunk"


def parse_source_settings(given: Mapping[str, str], *, streaming: bool) -> SourceSettings:
    """Parse the options of a source. Raises BadRequest for the first invalid option."""
    found = parse_options(given, "source", "stream" if streaming else "batch")
    address = _parse_address(found)
    exclusive_option(found, "maxOffsetsPerTrigger", "maxBytesPerTrigger")
    if "groupId" in found and "path" in found:
        raise BadRequest("groupId and path exclude each other: groups are the broker's, so give servers.")
    settings = SourceSettings(
        address,
        parse_subscription(found),
        parse_starting(found, streaming),
        None if streaming else parse_ending(found),
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


def _parse_address(found: Mapping[str, Any]) -> SourceAddress:
    if "servers" in found and "path" in found:
        raise BadRequest(
            "servers and path exclude each other: give one of them. A name in load(NAME) is a path, too: topics are"
            ' named by option("subscribe", NAME).'
        )
    exclusive_option(found, "servers", "path", required=True)
    timeout = found.get("timeout", TIMEOUT_SECONDS)
    if timeout > SUSPICIOUS_TIMEOUT_SECONDS:
        log.warning(
            "timeout is %.1f hours: a number without a unit is seconds, so write 30s or 30000ms.", timeout / 3600
        )
    if "path" in found:
        return SourceAddress(servers=None, path=found["path"], timeout=timeout)
    return SourceAddress(servers=parse_broker(found), path=None, timeout=timeout)


def parse_broker(found: Mapping[str, Any]) -> str:
    """Return the addresses of the broker, with the password if they have a user. It is never shown by Spark.

    Several addresses are the servers of one replicated broker: offsets and commit groups are valid in one broker only.
    Raises BadRequest if `servers` has a password: Spark shows all options in plans and logs, except those whose names
    say that they are secret.
    """
    servers: str = found["servers"]
    if without_password(servers) != servers:
        raise BadRequest(
            'servers has a password, which Spark would show in plans: write option("servers", "tfmq://USER@HOST:PORT")'
            f' and option("password", ...), or set ${PASSWORD_VARIABLE}.'
        )
    password = found.get("password") or os.environ.get(PASSWORD_VARIABLE, "")
    if password:  # Also that of the environment: tasks have another one.
        servers = with_password(servers, password)
    brokers = parse_servers(servers)
    if "password" in found and brokers[0].credentials is None:
        raise BadRequest('password needs a user: write option("servers", "tfmq://USER@HOST:PORT").')
    return servers


TOPIC_SEPARATOR = ".."
"""Text between the name of the query or application and the topic in the name of a commit group."""
GROUP_NAME_MAX = 249
APPLICATION_NAME_MAX, TOPIC_HASH_LENGTH = 200, 32
"""Maximum length of txnAppId; length of a topic's shortened SHA-256.

The shortened SHA-256 replaces the topic's name in the name of a commit group that would otherwise be too long.
"""
GROUP_PREFIX = "spark-"
"""Prefix of the names of Spark's commit groups, by which an operator recognizes them in `tfmq tx groups`."""


class SinkSettings(NamedTuple):
    """Settings of a sink.

    `servers`: the broker's addresses, with the password of its user: do not show it · `topic`: "" if each row names
    its topic · `ttl_ms`: time limit of prepared transactions, None for the broker's default · `group`, `sequence`:
    commit group and sequence of an idempotent batch write, from txnAppId and txnVersion; "" and 0 for other writes ·
    `lenient`: send invalid attributes unchanged, so that every archive can be replayed.
    """

    servers: str
    topic: str = ""
    timeout: float = TIMEOUT_SECONDS
    ttl_ms: int | None = None
    allow_other_total: bool = False
    group: str = ""
    sequence: int = 0
    lenient: bool = False


def parse_sink_settings(given: Mapping[str, str], *, streaming: bool) -> SinkSettings:
    """Parse the options of a sink. Raises BadRequest for the first invalid option."""
    found = parse_options(given, "sink", "stream" if streaming else "batch")
    if "servers" not in found:
        raise BadRequest('Give the broker to write to: option("servers", "HOST:PORT").')
    servers = parse_broker(found)
    topic = found.get("topic", "")
    if topic and not is_valid_name(topic):
        raise BadRequest(f"{topic!r} in the option topic cannot be a topic: {NAME_RULE}.")
    ttl = found.get("transactionTtl")
    if ttl is not None and ttl > TRANSACTION_TTL_SECONDS.cap:
        raise BadRequest(
            f"transactionTtl must be at most {TRANSACTION_TTL_SECONDS.cap // 86_400} days, {ttl:g} s are more."
        )
    return SinkSettings(
        servers,
        topic,
        found.get("timeout", TIMEOUT_SECONDS),
        None if ttl is None else max(1, round(ttl * 1000)),
        found.get("allowOtherTotal", False),
        *_parse_idempotence(found, topic),
    )


def commit_group_name(kind: str, name: str, topic: str = "") -> str:
    """Return the name of a commit group. `kind`: who writes, for example "stream" (a query) or "batch" (a txnAppId).

    `name` must neither contain ".." nor end with ".": otherwise two pairs of name and topic could get the same group.
    """
    group = f"{GROUP_PREFIX}{kind}-{name}"
    if not topic:
        return group
    # Each topic has a commit group of its own: a sequence committed to one topic must not count as committed to
    # another.
    if len(group) + len(TOPIC_SEPARATOR) + len(topic) > GROUP_NAME_MAX:
        topic = hashlib.sha256(topic.encode()).hexdigest()[:TOPIC_HASH_LENGTH]
    return f"{group}{TOPIC_SEPARATOR}{topic}"


def _parse_idempotence(found: Mapping[str, Any], topic: str) -> tuple[str, int]:
    """Return the commit group and sequence of an idempotent batch write; ("", 0) for other writes."""
    given = [name for name in ("txnAppId", "txnVersion") if name in found]
    if not given:
        return "", 0
    if len(given) == 1:
        missing = "txnVersion" if given == ["txnAppId"] else "txnAppId"
        raise BadRequest(f"{given[0]} needs {missing}, too: give both, or none.")
    name = found["txnAppId"]
    if not is_valid_name(name) or len(name) > APPLICATION_NAME_MAX or TOPIC_SEPARATOR in f"{name}.":
        raise BadRequest(
            f"txnAppId must be a name, 1 to {APPLICATION_NAME_MAX} of A-Z a-z 0-9 . _ -, without '..' and not with a"
            f" '.' at its end, not {name!r}."
        )
    return commit_group_name("batch", name, topic), found["txnVersion"]
