"""Delayed messages and schedules: descriptions, arguments, cancel and reschedule.

After a lost connection every request of this module is sent again, because a repeated cancel or reschedule has no
further effect, and a repeated request with the same arguments adds no second schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from journal.crc32 import crc32
from tfmq.client.admin.models import split_fields
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request, wait_for_reply
from tfmq.client.operation import Operation
from tfmq.client.send.delivery_time import Delay, Moment, due_number, remaining_due
from tfmq.errors import BadRequest, MessageTooLarge
from tfmq.limits import SCHEDULE_PAYLOAD_BYTES
from tfmq.message import BORN_MS_MAX, Attribute, Message, decode_attribute, encode_attribute, payload_bytes
from tfmq.protocol.commands import AddSchedule, CancelDelayed, RescheduleDelayed
from tfmq.protocol.delayed_handle import parse_handle
from tfmq.protocol.schema import Name

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Rescheduled(str):
    """The new handle of a rescheduled message, as text; "" if the message was not rescheduled.

    `state`: "rescheduled"; or, if nothing was changed, the message's state: "delivered", "cancelled" or "unknown".
    """

    __slots__ = ("state",)

    state: str

    def __new__(cls, state: str, handle: str = "") -> Rescheduled:
        made = super().__new__(cls, handle)
        made.state = state
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.state, str(self)

    @property
    def handle(self) -> str | None:
        """The new handle as plain text; None if the message was not rescheduled."""
        return str(self) or None

    def __repr__(self) -> str:
        return f"<Rescheduled {self.state} {str(self)!r}>"


class DelayedDescription(NamedTuple):
    """One delayed message.

    `state`: "pending", "delivered", "cancelled" or "unknown". Times are ms since 1970; -1 if unknown. `key`: text or
    bytes, as sent. `size_bytes`: size of the whole record. `details`: other fields of the reply.
    """

    handle: str
    state: str = "unknown"
    due_ms: int = -1
    topic: str = ""
    partition: int = -1
    key: str | bytes | None = None
    tag: str | None = None
    size_bytes: int = -1
    born_ms: int = -1
    details: Mapping[str, Any] = {}

    @property
    def due_at(self) -> datetime | None:
        """The due time; None if the due time is unknown or after the year 9999."""
        return EPOCH + timedelta(milliseconds=self.due_ms) if 0 <= self.due_ms <= BORN_MS_MAX else None


class DelayedCounts(NamedTuple):
    """How many delayed messages are pending: `pending` in total, and `counts[n]` in the interval `n`.

    The interval `n` has the messages whose due time is `edges_ms[n]` or later, and before `edges_ms[n + 1]`.
    """

    edges_ms: tuple[int, ...]
    counts: tuple[int, ...]
    pending: int


def topic_field(topic: str | None) -> str:
    """Return the request field for a topic, or "" for None (all topics). Raises `BadRequest` if `topic` is ""."""
    if topic == "":
        raise BadRequest("The topic's name is empty: leave it out to ask about all topics.")
    return topic or ""


def check_handle(handle: Any) -> str:
    """Return `handle` if it is valid. Raises `TypeError` if it is no text, `BadRequest` if it is mistyped."""
    if not isinstance(handle, str):
        raise TypeError(
            f"A handle is the text in SendResult.delayed, not {type(handle).__name__}."
            + (" This message has none: it was not delayed." if handle is None else "")
        )
    parse_handle(handle)
    return handle


def check_limit(limit: Any) -> None:
    """Raises `TypeError` if `limit` is neither a whole number nor None, and `BadRequest` if it is below 0."""
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"limit is a whole number, or None for all, not {limit!r}.")
    if limit < 0:
        raise BadRequest(f"limit is 0 or more, or None for all, not {limit}.")


def cancel_delayed_message(link: ClientConnection, handle: Any, seconds: float) -> Operation[str]:
    """Cancel a delayed message as `Producer.cancel` describes. Raises `TypeError` for a handle that is no text."""
    reply = yield from request(link, CancelDelayed(check_handle(handle)), seconds=seconds)
    return str(reply.state)


def reschedule_delayed_message(
    link: ClientConnection, handle: Any, delay: Delay | None, deliver_at: Moment | None, seconds: float
) -> Operation[Rescheduled]:
    """Change a message's due time as `Producer.reschedule` describes. Raises `TypeError` if no new time is given."""
    due, called_at = due_number(delay, deliver_at), link.now()
    if due is None:
        raise TypeError("Give the new time: delay=seconds, or deliver_at=moment; cancel() takes the message back.")

    def renew(message: RescheduleDelayed) -> RescheduleDelayed:
        return message._replace(due=remaining_due(due, called_at, link.now()))

    pending = link.send_request(RescheduleDelayed(check_handle(handle), due), seconds=seconds, update=renew)
    yield from wait_for_reply(link, pending)
    reply = pending.result()
    return Rescheduled(str(reply.state), reply.handle)


def delayed_description(row: Mapping[str, Any]) -> DelayedDescription:
    known, details = split_fields(row, DelayedDescription._fields, "size")
    return DelayedDescription(**known, details=details)


TOPIC_NAME = Name()
NAME_BYTES = 200
"""A generated schedule name is up to this many characters of the topic's name, and a checksum of all arguments."""


class ScheduleDescription(NamedTuple):
    """One schedule: a message that the broker sends at the times of a cron expression.

    `state`: "active", "paused", or "waiting" if a due message cannot be sent; `trouble` is the reason. Times are ms
    since 1970; 0: none. `next_ms`: when the next message is due. `last_ms`: when the last message was due. `made_ms`:
    when the schedule was created. `misfire`: what is sent for missed times, "one", "all" or "skip". `size_bytes`: size
    of the payload. In lists `message` and `properties` are None. `details`: other fields of the reply.
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
        """When the next message is due, in the schedule's time zone; None if no message is due."""
        return datetime_at(self.next_ms, self.timezone)

    @property
    def last_at(self) -> datetime | None:
        """When the last message was due, in the schedule's time zone; None before the first message."""
        return datetime_at(self.last_ms, self.timezone)


class ScheduleRequest(NamedTuple):
    """The arguments of `Admin.schedule`."""

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
        """Return the request and its body. Raises BadRequest (wrong topic), TypeError (wrong type), MessageTooLarge."""
        TOPIC_NAME.check(self.topic, "topic")
        payload = payload_bytes(self.payload)
        body = b"" if payload is None else bytes(payload)
        if len(body) > SCHEDULE_PAYLOAD_BYTES.cap:
            raise MessageTooLarge(
                f"The schedule's payload has {len(body)} bytes; no broker takes more than"
                f" {SCHEDULE_PAYLOAD_BYTES.cap} (limits.schedule_payload_bytes)."
            )
        attribute = encode_attribute(None, self.key, self.tag, self.properties)
        zone = zone_name(self.timezone)
        words = (self.cron, zone, self.topic, self.partition, self.misfire, attribute, payload is None)
        name = self.name
        if name is None:  # The name depends only on the arguments, so that a repeated call adds no second schedule.
            checksum = crc32(body, crc32(repr(words).encode()))
            name = f"{self.topic[:NAME_BYTES]}-{checksum:08x}"
        return AddSchedule(name, *words), body


def zone_name(timezone: str | tzinfo) -> str:
    """Return the name of a time zone. Raises `TypeError` for a time zone without a name."""
    name = "UTC" if timezone is UTC else getattr(timezone, "key", timezone)
    if not isinstance(name, str):
        raise TypeError(f"A time zone is its name, as in 'Europe/Berlin', or a ZoneInfo, not {timezone!r}.")
    return name


def schedule_description(row: Mapping[str, Any]) -> ScheduleDescription:
    """Return the schedule that one row of a reply describes. A field with the value None counts as missing."""
    names = [name for name in ScheduleDescription._fields if name not in ("message", "properties")]
    known, details = split_fields({key: value for key, value in row.items() if value is not None}, names, "size")
    details.pop("properties", None)  # The row has only the number of properties here; the attribute has the properties.
    if "attribute" not in details:
        return ScheduleDescription(**known, details=details)
    packed = details.pop("attribute")
    given = decode_attribute(packed) if packed else Attribute()
    message = Message(details.pop("payload", None), given.key, given.tag, dict(given.properties))
    return ScheduleDescription(**known, properties=message.properties, message=message, details=details)


def datetime_at(moment_ms: int, timezone: str) -> datetime | None:
    """Return the time in `timezone`, or in UTC if this machine lacks the zone; None for 0 and after the year 9999."""
    if not 0 < moment_ms <= BORN_MS_MAX:
        return None
    moment = EPOCH + timedelta(milliseconds=moment_ms)
    try:
        return moment if timezone == "UTC" else moment.astimezone(ZoneInfo(timezone))
    except (ZoneInfoNotFoundError, ValueError, OSError, OverflowError):
        return moment
