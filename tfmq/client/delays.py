"""What is done with messages that wait at the broker, as operations: taken back, given another time, looked at.

Every request may be repeated over new connections: a message is taken back once, and waits for the time of the last
answer, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple

from tfmq.client.dues import Delay, Moment, due_of, left, moment_ms
from tfmq.client.link import Link
from tfmq.client.operations import request, settled
from tfmq.client.waiting import Operation
from tfmq.errors import BadRequest
from tfmq.limits import DELAYED_HISTOGRAM_EDGES, DELAYED_PER_PAGE
from tfmq.message import BORN_MS_MAX
from tfmq.protocol.commands import (
    DUE_MAX,
    CancelDelayed,
    DelayedHistogram,
    DescribeDelayed,
    ListDelayed,
    RescheduleDelayed,
)
from tfmq.protocol.delayed_handle import parse_handle

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Rescheduled(str):
    """The new handle of a message that got another time: a text, as every handle. "" where it got none.

    `state` says what became of it: "rescheduled"; or "delivered", "cancelled", "unknown", and then nothing was done.
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
        """The new handle as plain text; None where there is none."""
        return str(self) or None

    def __repr__(self) -> str:
        return f"<Rescheduled {self.state} {str(self)!r}>"


class DelayedDescription(NamedTuple):
    """One delayed message. `state`: "pending", "delivered", "cancelled" or "unknown". Times are ms since 1970; -1
    where they are not known. `key` is text or bytes, as it was sent; `size_bytes` is that of the whole record.
    `details`: whatever else the broker said.
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
        """When it is to be delivered; None where that is not known, or lies behind the year 9999."""
        return EPOCH + timedelta(milliseconds=self.due_ms) if 0 <= self.due_ms <= BORN_MS_MAX else None


class DelayedQuery(NamedTuple):
    """Which of those that wait are asked for: None everywhere means all."""

    topic: str | None = None
    partition: int | None = None
    key: str | bytes | None = None
    first: Moment | None = None
    end: Moment | None = None

    def fields(self) -> tuple[str, int | None, bytes | None, int, int]:
        """As LIST_DELAYED has them. Raises as `moment_ms`."""
        key = self.key.encode() if isinstance(self.key, str) else self.key
        first_due = 0 if self.first is None else moment_ms(self.first)
        end_due = DUE_MAX if self.end is None else moment_ms(self.end)
        return asked_topic(self.topic), self.partition, key, first_due, end_due


class DelayedCounts(NamedTuple):
    """How many messages wait: `counts[n]` of them from `edges_ms[n]` on and before `edges_ms[n + 1]`, `pending` in
    all, whenever they are due.
    """

    edges_ms: tuple[int, ...]
    counts: tuple[int, ...]
    pending: int


def asked_topic(topic: str | None) -> str:
    """As the wire has it, where "" means all. Raises `BadRequest` for an empty name: whoever gives one has lost a name,
    and may cancel what is answered.
    """
    if topic == "":
        raise BadRequest("The topic's name is empty: leave it out to ask about all topics.")
    return topic or ""


def checked(handle: Any) -> str:
    """`handle`. Raises `TypeError` for what is no text, `BadRequest` for a typo."""
    if not isinstance(handle, str):
        raise TypeError(
            f"A handle is the text in SendResult.delayed, not {type(handle).__name__}."
            + (" This message has none: it was not delayed." if handle is None else "")
        )
    parse_handle(handle)
    return handle


def cancelling(link: Link, handle: Any, seconds: float) -> Operation[str]:
    """Take it back. "cancelled", "delivered" or "unknown"."""
    reply = yield from request(link, CancelDelayed(checked(handle)), seconds=seconds)
    return str(reply.state)


def rescheduling(
    link: Link, handle: Any, delay: Delay | None, deliver_at: Moment | None, seconds: float
) -> Operation[Rescheduled]:
    """Give it another time. Raises `TypeError` where none is given."""
    due, called_at = due_of(delay, deliver_at), link.now()
    if due is None:
        raise TypeError(
            "Give the new time: delay=seconds, or deliver_at=moment; cancel() takes the message back."
        )

    def renew(message: RescheduleDelayed) -> RescheduleDelayed:
        return message._replace(due=left(due, called_at, link.now()))

    call = link.call(RescheduleDelayed(checked(handle), due), seconds=seconds, renew=renew)
    yield from settled(link, call)
    reply = call.result()
    return Rescheduled(str(reply.state), reply.handle)


def describing(link: Link, handle: Any, seconds: float) -> Operation[DelayedDescription]:
    reply = yield from request(link, DescribeDelayed(checked(handle)), seconds=seconds)
    return delayed_description({**reply.description, "handle": str(handle)})


def listing(
    link: Link, asked: DelayedQuery, after: str | None, limit: int | None, seconds: float
) -> Operation[list[DelayedDescription]]:
    """Page by page; what comes or is delivered meanwhile may be in it or not."""
    filters = asked.fields()
    behind = "" if after is None else checked(after)
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


def counting(
    link: Link, edges: Sequence[Moment], topic: str | None, seconds: float
) -> Operation[DelayedCounts]:
    """Raises `BadRequest` for edges that do not ascend."""
    moments = [moment_ms(each) for each in edges]
    if not 2 <= len(moments) <= DELAYED_HISTOGRAM_EDGES or any(a >= b for a, b in pairwise(moments)):
        raise BadRequest(
            f"A histogram has 2 to {DELAYED_HISTOGRAM_EDGES:d} edges, each later than the one before, by 1 ms at least."
        )
    reply = yield from request(link, DelayedHistogram(asked_topic(topic), moments), seconds=seconds)
    return DelayedCounts(tuple(moments), tuple(reply.counts), reply.pending)


_WIRE_NAMES = {"size": "size_bytes"}


def delayed_description(row: Mapping[str, Any]) -> DelayedDescription:
    """Of one map of LIST_DELAYED or DESCRIBE_DELAYED; nil is as good as not said."""
    known: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for key, value in row.items():
        name = _WIRE_NAMES.get(key, key)
        (known if name in DelayedDescription._fields and name != "details" else details)[name] = value
    return DelayedDescription(
        **{name: value for name, value in known.items() if value is not None}, details=details
    )
