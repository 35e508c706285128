"""The dead letter: a message whose handling failed, with everything of it and the history of its calls.

It is known by what the message is: group, topic's incarnation, partition, offset, and the time at which it was
appended, so that another broker's message at the same place is another letter. The id is made of these: the same in
every store, and the same when the message is kept again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from tfmq.client.dead_letters import Failure
from tfmq.client.received import Codec, LazyAttribute, Origin, ReceivedMessage
from tfmq.errors import DecodeFailed
from tfmq.message import Attribute, decode_attribute

ID_CHARACTERS: Final = 16
FAILURES_KEPT: Final = 20
"""Of a letter's calls these are remembered one by one: the first, and the latest."""
TRACEBACKS_KEPT: Final = 5
"""Of these, the traceback too: they repeat each other."""

FAILING, WAITING, RETRYING, DEAD = "failing", "waiting", "retrying", "dead"
REDRIVING, REDRIVEN, HANDLED, DROPPED = "redriving", "redriven", "handled", "dropped"
STATES: Final = (FAILING, WAITING, RETRYING, DEAD, REDRIVING, REDRIVEN, HANDLED, DROPPED)
ENDED: Final = (REDRIVEN, HANDLED, DROPPED)
"""Nothing is left to be done."""


class Body(NamedTuple):
    """What may be large: `payload`, None for a tombstone · `attribute` as it stood in the record."""

    payload: bytes | None
    attribute: bytes | None


class Journey(NamedTuple):
    """Where a letter is being sent again: the place of its record in a stream, settled before it was sent.

    `from_offset`: the end of the partition's log at that time; the record lies at or behind it, if it is there ·
    `node`: the broker's id.
    """

    topic: str
    incarnation: int
    partition: int
    producer_id: int
    sequence: int
    from_offset: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class Letter:
    """See the module. Times in ms since 1970.

    Of the message: `group` of the consumer, `topic`, `incarnation`, `partition`, `offset`, `next_offset`, `ordinal`,
    `message_id`, `appended_ms`, `epoch`, `payload_bytes` (-1: a tombstone); `body` is None where it was not asked for.
    `broker`: the id of the broker that has the topic; "" where an earlier release kept the letter, which did not say.

    `calls` of the handler so far, `calls_left` that may still fail before it is dead, `put_offs`; `next_ms`: when it is
    handled again; `kept_ms`: when it was first kept; `changed_ms`; `token`: who has it at the moment, until `lease_ms`.
    """

    id: str
    group: str
    topic: str
    incarnation: int
    partition: int
    offset: int
    next_offset: int
    ordinal: int
    message_id: int
    appended_ms: int
    epoch: int
    payload_bytes: int
    state: str = DEAD
    calls: int = 0
    calls_left: int = 0
    put_offs: int = 0
    redrives: int = 0
    next_ms: int = 0
    kept_ms: int = 0
    changed_ms: int = 0
    token: str = ""
    lease_ms: int = 0
    key: bytes | str | None = None
    tag: str | None = None
    failures: tuple[Failure, ...] = ()
    journey: Journey | None = None
    sent_offset: int = -1
    broker: str = ""
    body: Body | None = None

    @property
    def error(self) -> str:
        """What it failed with last."""
        return self.failures[-1].error if self.failures else ""

    @property
    def origin(self) -> str:
        """Where the message stands: orders-0 at offset 1234."""
        return f"{self.topic}-{self.partition} at offset {self.offset}"

    def with_failures(self, failures: Sequence[Failure]) -> Letter:
        """The same with these in its history."""
        return replace(self, failures=bounded((*self.failures, *failures)))

    def attribute(self) -> Attribute:
        """The message's key, tag and so on. Raises `DecodeFailed`."""
        assert self.body is not None, "asked for with its body"
        return decode_attribute(self.body.attribute) if self.body.attribute else Attribute()

    def message(self, codec: Codec | None = None) -> ReceivedMessage[Any]:
        """The message as its consumer got it."""
        assert self.body is not None, "asked for with its body"
        origin = Origin(self.incarnation, self.appended_ms, self.epoch, codec)
        attribute = LazyAttribute(self.body.attribute)
        place = (self.topic, self.partition, self.offset, self.next_offset, self.ordinal, self.message_id)
        return ReceivedMessage(self.body.payload, *place, attribute, origin)


def letter_of(message: ReceivedMessage[Any], group: str, broker: str = "") -> Letter:
    """The letter that `message` would be, without a history."""
    origin, attribute = message.origin, _readable(message.attribute_bytes)
    payload = message.payload
    return Letter(
        id=identify(group, origin.incarnation, message.partition, message.offset, origin.append_ms),
        group=group,
        topic=message.topic,
        incarnation=origin.incarnation,
        partition=message.partition,
        offset=message.offset,
        next_offset=message.next_offset,
        ordinal=message.ordinal,
        message_id=message.id,
        appended_ms=origin.append_ms,
        epoch=origin.epoch,
        payload_bytes=-1 if payload is None else len(payload),
        redrives=attribute.redrives,
        key=attribute.key,
        tag=attribute.tag,
        broker=broker,
        body=Body(payload, message.attribute_bytes),
    )


def identify(group: str, incarnation: int, partition: int, offset: int, appended_ms: int) -> str:
    """The id of the letter of that message."""
    text = f"{group}/{incarnation}/{partition}/{offset}/{appended_ms}"
    return hashlib.sha256(text.encode()).hexdigest()[:ID_CHARACTERS]


def bounded(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """As many as are kept: the first, and the latest; tracebacks of fewer."""
    kept = list(failures)
    if len(kept) > FAILURES_KEPT:
        kept = [kept[0], *kept[1 - FAILURES_KEPT :]]
    bare = range(1, len(kept) - TRACEBACKS_KEPT + 1)
    return tuple(each._replace(traceback="") if number in bare else each for number, each in enumerate(kept))


def moment_text(time_ms: int) -> str:
    """A time in ms since 1970 as ISO 8601 in UTC; "" for 0."""
    if not time_ms:
        return ""
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _readable(data: bytes | None) -> Attribute:
    """The attribute, as far as it can be read: what cannot be is kept as it is."""
    try:
        return decode_attribute(data) if data else Attribute()
    except DecodeFailed:
        return Attribute()
