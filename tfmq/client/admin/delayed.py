"""Operations on delayed messages and schedules: cancel, reschedule, query, pause, remove.

Every request may be repeated over a new connection. A repeated cancel or reschedule has no further effect. A schedule
that is added again with the same arguments is the same schedule.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import pairwise
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import MetadataCache, get_topic, request, wait_for_reply
from tfmq.client.operation import Operation
from tfmq.client.send.delivery_time import Delay, Moment, due_number, moment_ms, remaining_due
from tfmq.errors import BadRequest, MessageTooLarge, UnknownPartition, UnknownSchedule, UnknownTopic
from tfmq.limits import DELAYED_HISTOGRAM_EDGES, DELAYED_PER_PAGE, SCHEDULE_PAYLOAD_BYTES, SCHEDULES_PER_PAGE
from tfmq.message import BORN_MS_MAX, Attribute, Message, decode_attribute, encode_attribute, payload_bytes
from tfmq.protocol.commands import (
    DUE_MAX,
    AddSchedule,
    CancelDelayed,
    DelayedHistogram,
    DescribeDelayed,
    ListDelayed,
    ListSchedules,
    PauseSchedule,
    RemoveSchedule,
    RescheduleDelayed,
    ResumeSchedule,
)
from tfmq.protocol.delayed_handle import parse_handle
from tfmq.protocol.schema import Name

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Rescheduled(str):
    """The new handle of a rescheduled message, as text; "" if it was not rescheduled.

    `state`: "rescheduled"; or "delivered", "cancelled", "unknown" if nothing was changed.
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
        """The new handle as plain text; None if there is none."""
        return str(self) or None

    def __repr__(self) -> str:
        return f"<Rescheduled {self.state} {str(self)!r}>"


class DelayedDescription(NamedTuple):
    """One delayed message.

    `state`: "pending", "delivered", "cancelled" or "unknown". Times are ms since 1970; -1 if unknown. `key`: text or
    bytes, as it was sent. `size_bytes`: size of the whole record. `details`: other fields of the reply.
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
        """The due time; None if it is unknown or after the year 9999."""
        return EPOCH + timedelta(milliseconds=self.due_ms) if 0 <= self.due_ms <= BORN_MS_MAX else None


class DelayedQuery(NamedTuple):
    """A filter for pending delayed messages. None: no restriction."""

    topic: str | None = None
    partition: int | None = None
    key: str | bytes | None = None
    first: Moment | None = None
    end: Moment | None = None

    def request_fields(self) -> tuple[str, int | None, bytes | None, int, int]:
        """Return the fields of LIST_DELAYED.

        Raises as `moment_ms`, and `BadRequest` for an empty topic.
        """
        key = self.key.encode() if isinstance(self.key, str) else self.key
        first_due = 0 if self.first is None else moment_ms(self.first)
        end_due = DUE_MAX if self.end is None else moment_ms(self.end)
        return topic_field(self.topic), self.partition, key, first_due, end_due


class DelayedCounts(NamedTuple):
    """How many messages are pending.

    `counts[n]` are due from `edges_ms[n]` on and before `edges_ms[n + 1]`. `pending` is the total, whatever the due
    time.
    """

    edges_ms: tuple[int, ...]
    counts: tuple[int, ...]
    pending: int


def topic_field(topic: str | None) -> str:
    """Return the topic as a request field, where "" means all topics.

    Raises `BadRequest` for an empty name: the caller probably lost a name, and might cancel messages of all topics.
    """
    if topic == "":
        raise BadRequest("The topic's name is empty: leave it out to ask about all topics.")
    return topic or ""


def check_handle(handle: Any) -> str:
    """Return `handle`. Raises `TypeError` if it is no text, `BadRequest` if it is invalid."""
    if not isinstance(handle, str):
        raise TypeError(
            f"A handle is the text in SendResult.delayed, not {type(handle).__name__}."
            + (" This message has none: it was not delayed." if handle is None else "")
        )
    parse_handle(handle)
    return handle


def check_limit(limit: Any) -> None:
    """Raises `TypeError`, `BadRequest` for what is no number of rows; None: all."""
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"limit is a whole number, or None for all, not {limit!r}.")
    if limit < 0:
        raise BadRequest(f"limit is 0 or more, or None for all, not {limit}.")


def cancel_delayed_message(link: ClientConnection, handle: Any, seconds: float) -> Operation[str]:
    """Cancel a delayed message. Return "cancelled", "delivered" or "unknown".

    Raises `TypeError` and `BadRequest` for an invalid handle.
    """
    reply = yield from request(link, CancelDelayed(check_handle(handle)), seconds=seconds)
    return str(reply.state)


def reschedule_delayed_message(
    link: ClientConnection, handle: Any, delay: Delay | None, deliver_at: Moment | None, seconds: float
) -> Operation[Rescheduled]:
    """Change the due time of a delayed message.

    Raises `TypeError` if no time is given, and as `due_number` and `cancel_delayed`.
    """
    due, called_at = due_number(delay, deliver_at), link.now()
    if due is None:
        raise TypeError(
            "Give the new time: delay=seconds, or deliver_at=moment; cancel() takes the message back."
        )

    def renew(message: RescheduleDelayed) -> RescheduleDelayed:
        return message._replace(due=remaining_due(due, called_at, link.now()))

    call = link.send_request(RescheduleDelayed(check_handle(handle), due), seconds=seconds, update=renew)
    yield from wait_for_reply(link, call)
    reply = call.result()
    return Rescheduled(str(reply.state), reply.handle)


def describe_delayed_message(
    link: ClientConnection, handle: Any, seconds: float
) -> Operation[DelayedDescription]:
    """Return the description of one delayed message. Raises as `cancel_delayed`."""
    reply = yield from request(link, DescribeDelayed(check_handle(handle)), seconds=seconds)
    return delayed_description({**reply.description, "handle": str(handle)})


def list_delayed(
    link: ClientConnection, asked: DelayedQuery, after: str | None, limit: int | None, seconds: float
) -> Operation[list[DelayedDescription]]:
    """Return pending messages, read page by page.

    `after`: the handle that precedes the first result. Messages that are sent or delivered during the call may be
    missing or included.
    """
    check_limit(limit)
    filters = asked.request_fields()
    behind = "" if after is None else check_handle(after)
    found: list[DelayedDescription] = []
    more = limit is None or limit > 0
    while more:
        page = int(DELAYED_PER_PAGE) if limit is None else min(limit - len(found), DELAYED_PER_PAGE)
        message = ListDelayed(*filters, behind, page)
        reply = yield from request(link, message, seconds=seconds)
        found += [delayed_description(row) for row in reply.delayed]
        last = reply.after or (found[-1].handle if found else behind)
        more = reply.more and last != behind and len(found) != limit
        behind = last
    return found


def count_delayed(
    link: ClientConnection, edges: Sequence[Moment], topic: str | None, seconds: float
) -> Operation[DelayedCounts]:
    """Count the pending messages by due time. Raises `BadRequest` for edges that do not ascend."""
    moments = [moment_ms(each) for each in edges]
    if not 2 <= len(moments) <= DELAYED_HISTOGRAM_EDGES or any(a >= b for a, b in pairwise(moments)):
        raise BadRequest(
            f"A histogram has 2 to {DELAYED_HISTOGRAM_EDGES:d} edges, each later than the one before, by 1 ms at least."
        )
    reply = yield from request(link, DelayedHistogram(topic_field(topic), moments), seconds=seconds)
    return DelayedCounts(tuple(moments), tuple(reply.counts), reply.pending)


_WIRE_NAMES = {"size": "size_bytes"}


def delayed_description(row: Mapping[str, Any]) -> DelayedDescription:
    """Parse one row of LIST_DELAYED or DESCRIBE_DELAYED; nil is the same as a missing field."""
    known: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for key, value in row.items():
        name = _WIRE_NAMES.get(key, key)
        (known if name in DelayedDescription._fields and name != "details" else details)[name] = value
    return DelayedDescription(
        **{name: value for name, value in known.items() if value is not None}, details=details
    )


TOPIC_NAME = Name()
DERIVED_FIELDS = ("message", "properties", "details")
"""Fields of the description that are not in replies as such.

In a reply `properties` is a count; the properties themselves are in the attribute.
"""
NAME_BYTES = 200
"""Maximum bytes of a topic name in a generated schedule name, so that the checksum fits."""


class ScheduleDescription(NamedTuple):
    """One schedule: a message that the broker sends at the times of a cron expression.

    `state`: "active", "paused", or "waiting" if a due message cannot be sent; `trouble` is the reason. Times are ms
    since 1970 (0: none): `next_ms` of the next message, `last_ms` the due time of the last one, `made_ms` of the
    creation. `misfire`: how missed times are handled, "one", "all" or "skip". `size_bytes`: size of the payload.
    `message` and its `properties` are None in lists. `details`: other fields of the reply.
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
        """Time of the next message in the schedule's time zone; None if there is none."""
        return datetime_at(self.next_ms, self.timezone)

    @property
    def last_at(self) -> datetime | None:
        """The due time of the last message; None before the first."""
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
        """Return the request and its body.

        Raises `TypeError`, `MessageTooLarge`, `ValueError` as sends do, `BadRequest` for an invalid topic name.
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
        name = self.name if self.name is not None else generated_name(self.topic, words, body)
        return AddSchedule(name, *words), body


def zone_name(timezone: str | tzinfo) -> str:
    """Return the name of a time zone given by name, as `ZoneInfo`, or as `datetime.UTC`.

    Raises `TypeError` for a time zone without a name.
    """
    name = "UTC" if timezone is UTC else getattr(timezone, "key", timezone)
    if not isinstance(name, str):
        raise TypeError(f"A time zone is its name, as in 'Europe/Berlin', or a ZoneInfo, not {timezone!r}.")
    return name


def generated_name(topic: str, words: tuple[Any, ...], body: bytes) -> str:
    """Return a schedule name derived from the arguments.

    The same arguments give the same name, so a repeated request does not create a second schedule.
    """
    return f"{topic[:NAME_BYTES]}-{zlib.crc32(body, zlib.crc32(repr(words).encode())):08x}"


def add_schedule(
    link: ClientConnection, cluster: MetadataCache, wish: ScheduleRequest, seconds: float
) -> Operation[ScheduleDescription]:
    """Add a schedule. The topic is created if it does not exist, as for sends.

    It is created only after the broker has accepted all other arguments. Raises as `ScheduleRequest.request`.
    """
    message, body = wish.request()
    try:
        reply = yield from request(link, message, body, seconds=seconds)
    except UnknownPartition:
        raise
    except UnknownTopic:
        cluster.invalidate(wish.topic)
        yield from get_topic(link, cluster, wish.topic, create=True, seconds=seconds)
        reply = yield from request(link, message, body, seconds=seconds)
    return schedule_description(reply.schedule)


def list_schedules(link: ClientConnection, seconds: float) -> Operation[list[ScheduleDescription]]:
    """Return all schedules, read page by page.

    Schedules that are added or removed during the call may be missing or included.
    """
    found: list[ScheduleDescription] = []
    more = True
    while more:
        after = found[-1].name if found else ""
        reply = yield from request(link, ListSchedules("", after, int(SCHEDULES_PER_PAGE)), seconds=seconds)
        found += [schedule_description(row) for row in reply.schedules]
        more = reply.more and bool(reply.schedules)
    return found


def describe_schedule(link: ClientConnection, name: str, seconds: float) -> Operation[ScheduleDescription]:
    """Return the description of a schedule with its message. Raises `UnknownSchedule`."""
    reply = yield from request(link, ListSchedules(name), seconds=seconds)
    if not reply.schedules:
        raise UnknownSchedule(f"There is no schedule {name}. Look at the list: tfmq schedule list.")
    return schedule_description(reply.schedules[0])


def pause_schedule(link: ClientConnection, name: str, seconds: float) -> Operation[ScheduleDescription]:
    reply = yield from request(link, PauseSchedule(name), seconds=seconds)
    return schedule_description(reply.schedule)


def resume_schedule(link: ClientConnection, name: str, seconds: float) -> Operation[ScheduleDescription]:
    reply = yield from request(link, ResumeSchedule(name), seconds=seconds)
    return schedule_description(reply.schedule)


def remove_schedule(link: ClientConnection, name: str, seconds: float) -> Operation[bool]:
    """Remove the schedule. Raises `UnknownSchedule`.

    The request names the id, so that a repeated request cannot remove a new schedule of the same name.
    """
    found = yield from describe_schedule(link, name, seconds)
    reply = yield from request(link, RemoveSchedule(name, found.id), seconds=seconds)
    return bool(reply.removed)


def schedule_description(row: Mapping[str, Any]) -> ScheduleDescription:
    """Parse one row of a reply; nil is the same as a missing field."""
    named = {"size_bytes" if key == "size" else key: value for key, value in row.items() if value is not None}
    known = {
        key: named.pop(key)
        for key in ScheduleDescription._fields
        if key in named and key not in DERIVED_FIELDS
    }
    named.pop("properties", None)
    message = _pop_message(named)
    properties = None if message is None else message.properties
    return ScheduleDescription(**known, properties=properties, message=message, details=named)


def _pop_message(row: dict[str, Any]) -> Message | None:
    """Remove the fields of the message from the row and return the message, if there is one."""
    if "attribute" not in row:
        return None
    packed = row.pop("attribute")
    given = decode_attribute(packed) if packed else Attribute()
    return Message(row.pop("payload", None), given.key, given.tag, dict(given.properties))


def datetime_at(moment_ms: int, timezone: str) -> datetime | None:
    """Return the time in `timezone`; None for 0 and for times that `datetime` cannot represent.

    UTC is used if this machine does not know the time zone.
    """
    if not 0 < moment_ms <= BORN_MS_MAX:
        return None
    moment = EPOCH + timedelta(milliseconds=moment_ms)
    try:
        return moment if timezone == "UTC" else moment.astimezone(ZoneInfo(timezone))
    except (ZoneInfoNotFoundError, ValueError, OSError, OverflowError):
        return moment
