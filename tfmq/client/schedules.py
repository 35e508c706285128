"""Messages that the broker sends by itself at the times of a cron expression, as operations: made, looked at, ended.

Whatever is asked twice, after a lost connection, has the first answer: a schedule that is added again in the same
words is the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tfmq.client.cluster import Cluster
from tfmq.client.link import Link
from tfmq.client.operations import find_topic, request
from tfmq.client.waiting import Operation
from tfmq.errors import MessageTooLarge, UnknownPartition, UnknownSchedule, UnknownTopic
from tfmq.limits import SCHEDULE_PAYLOAD_BYTES, SCHEDULES_PER_PAGE
from tfmq.message import BORN_MS_MAX, Attribute, Message, decode_attribute, encode_attribute, payload_bytes
from tfmq.protocol.commands import (
    AddSchedule,
    ListSchedules,
    PauseSchedule,
    RemoveSchedule,
    ResumeSchedule,
)
from tfmq.protocol.schema import Name

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TOPIC_NAME = Name()
OURS = ("message", "properties", "details")
"""Fields that no reply has: of properties it has the number, and the attribute has them."""
NAME_BYTES = 200
"""Of a topic's name in the name that a schedule without one gets, so that its number fits behind."""


class ScheduleDescription(NamedTuple):
    """One schedule. `state`: "active", "paused", or "waiting" where `trouble` says why what is due is not sent. Times
    are ms since 1970 (0: none): of the next message, of the time that the last one was for, of its making. `misfire`
    is what becomes of missed times: "one", "all" or "skip". `size_bytes` is the payload's. `message` is what it sends,
    `properties` those of the message; both are None in lists, which do not have them. `details`: whatever else the
    broker said.
    """

    name: str
    cron: str = ""
    timezone: str = "UTC"
    topic: str = ""
    partition: int = -1
    state: str = "active"
    trouble: str = ""
    next_ms: int = 0
    last_ms: int = 0
    misfire: str = "one"
    made_ms: int = 0
    id: int = 0
    size_bytes: int = 0
    tag: str = ""
    properties: Mapping[str, str] | None = None
    message: Message | None = None
    details: Mapping[str, Any] = {}

    @property
    def next_at(self) -> datetime | None:
        """When it sends next, as the clocks of its time zone show it; None while it does not."""
        return moment_at(self.next_ms, self.timezone)

    @property
    def last_at(self) -> datetime | None:
        """The time that its last message was for; None before the first."""
        return moment_at(self.last_ms, self.timezone)


class ScheduleWish(NamedTuple):
    """What is asked for: see `Admin.schedule`."""

    cron: str
    topic: str
    payload: Any
    name: str | None = None
    timezone: str | tzinfo = "UTC"
    key: bytes | str | None = None
    tag: str | None = None
    properties: Mapping[str, str] | None = None
    partition: int | None = None
    misfire: str = "one"

    def request(self) -> tuple[AddSchedule, bytes]:
        """The request and its body. Raises `TypeError`, `MessageTooLarge`, `ValueError` as sends do, `BadRequest` for a
        text that names no topic.
        """
        TOPIC_NAME.check(self.topic, "topic")
        payload = payload_bytes(self.payload)
        body = b"" if payload is None else bytes(payload)
        if len(body) > SCHEDULE_PAYLOAD_BYTES.cap:
            raise MessageTooLarge(
                f"The schedule's payload has {len(body)} bytes; no broker takes more than"
                f" {SCHEDULE_PAYLOAD_BYTES.cap} (limits.schedule_payload_bytes)."
            )
        attribute = encode_attribute(None, self.key, self.tag, self.properties)
        words = (
            self.cron,
            zone_name(self.timezone),
            self.topic,
            self.partition,
            self.misfire,
            attribute,
            payload is None,
        )
        name = self.name if self.name is not None else given_name(self.topic, words, body)
        return AddSchedule(name, *words), body


def zone_name(timezone: str | tzinfo) -> str:
    """Of a time zone by its name, a `ZoneInfo`, or `datetime.UTC`. Raises `TypeError` for what has no name."""
    name = "UTC" if timezone is UTC else getattr(timezone, "key", timezone)
    if not isinstance(name, str):
        raise TypeError(f"A time zone is its name, as in 'Europe/Berlin', or a ZoneInfo, not {timezone!r}.")
    return name


def given_name(topic: str, words: tuple[Any, ...], body: bytes) -> str:
    """For a schedule without a name: the same for the same words, so that a repeat does not make a second one."""
    return f"{topic[:NAME_BYTES]}-{zlib.crc32(body, zlib.crc32(repr(words).encode())):08x}"


def adding(
    link: Link, cluster: Cluster, wish: ScheduleWish, seconds: float
) -> Operation[ScheduleDescription]:
    """The topic is made on first use, as for sends, but not for a wish that makes no sense."""
    message, body = wish.request()
    try:
        reply = yield from request(link, message, body, seconds=seconds)
    except UnknownPartition:
        raise
    except UnknownTopic:
        cluster.forget(wish.topic)
        yield from find_topic(link, cluster, wish.topic, create=True, seconds=seconds)
        reply = yield from request(link, message, body, seconds=seconds)
    return schedule_description(reply.schedule)


def listing(link: Link, seconds: float) -> Operation[list[ScheduleDescription]]:
    """Page by page; what is made or removed meanwhile may be in it or not."""
    found: list[ScheduleDescription] = []
    more = True
    while more:
        after = found[-1].name if found else ""
        reply = yield from request(link, ListSchedules("", after, int(SCHEDULES_PER_PAGE)), seconds=seconds)
        found += [schedule_description(row) for row in reply.schedules]
        more = reply.more and bool(reply.schedules)
    return found


def describing(link: Link, name: str, seconds: float) -> Operation[ScheduleDescription]:
    """Raises `UnknownSchedule`."""
    reply = yield from request(link, ListSchedules(name), seconds=seconds)
    if not reply.schedules:
        raise UnknownSchedule(f"There is no schedule {name}. Look at the list: tfmq schedule list.")
    return schedule_description(reply.schedules[0])


def pausing(link: Link, name: str, seconds: float) -> Operation[ScheduleDescription]:
    reply = yield from request(link, PauseSchedule(name), seconds=seconds)
    return schedule_description(reply.schedule)


def resuming(link: Link, name: str, seconds: float) -> Operation[ScheduleDescription]:
    reply = yield from request(link, ResumeSchedule(name), seconds=seconds)
    return schedule_description(reply.schedule)


def removing(link: Link, name: str, seconds: float) -> Operation[bool]:
    """By its id, so that a repeat cannot hit another one that was made under the name. Raises `UnknownSchedule`."""
    found = yield from describing(link, name, seconds)
    reply = yield from request(link, RemoveSchedule(name, found.id), seconds=seconds)
    return bool(reply.removed)


def schedule_description(row: Mapping[str, Any]) -> ScheduleDescription:
    """Of one map of a reply; nil is as good as not said."""
    named = {"size_bytes" if key == "size" else key: value for key, value in row.items() if value is not None}
    known = {key: named.pop(key) for key in ScheduleDescription._fields if key in named and key not in OURS}
    named.pop("properties", None)
    message = _message(named)
    properties = None if message is None else message.properties
    return ScheduleDescription(**known, properties=properties, message=message, details=named)


def _message(row: dict[str, Any]) -> Message | None:
    """What it sends, taken out of the rest of the row."""
    if "attribute" not in row:
        return None
    packed = row.pop("attribute")
    given = decode_attribute(packed) if packed else Attribute()
    return Message(row.pop("payload", None), given.key, given.tag, dict(given.properties))


def moment_at(moment_ms: int, timezone: str) -> datetime | None:
    """In that zone, or in UTC where this machine does not know it; None for 0 and what has no date."""
    if not 0 < moment_ms <= BORN_MS_MAX:
        return None
    moment = EPOCH + timedelta(milliseconds=moment_ms)
    try:
        return moment if timezone == "UTC" else moment.astimezone(ZoneInfo(timezone))
    except (ZoneInfoNotFoundError, ValueError, OSError, OverflowError):
        return moment
