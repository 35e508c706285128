"""What happens to dead letters. A store applies events and nothing else; `course` says what each does.

Each has the time at which it happened, `at_ms`, in ms since 1970. Those of whoever has taken a letter bear its `token`,
and do nothing once it is another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from tfmq.client.consumer.message import Codec, LazyAttribute, Origin, ReceivedMessage
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.errors import BadRequest, DecodeFailed
from tfmq.message import Attribute, decode_attribute


class Keep(NamedTuple):
    """The message was given up, or put off until `next_ms` (0: it is dead). `letter` has its history and `calls`.
    `begun`: besides these, its last call was counted when it began."""

    at_ms: int
    letter: Letter
    next_ms: int = 0
    begun: bool = False


class Begin(NamedTuple):
    """A call in a lane begins, of a message that may have ended its process before. `letter` has the calls that are
    left to one of which nothing was noted yet."""

    at_ms: int
    letter: Letter


class Note(NamedTuple):
    """A call failed, and the consumer keeps the message in its lane; `letter` has the failure, and calls left likewise.
    `begun`: the call was counted when it began."""

    at_ms: int
    letter: Letter
    begun: bool = False


class Pass(NamedTuple):
    """Behind failures that were noted, the message was handled in its lane."""

    at_ms: int


class Take(NamedTuple):
    """`token` handles it now, and has it until `lease_ms`."""

    at_ms: int
    token: str
    lease_ms: int


class Renew(NamedTuple):
    at_ms: int
    token: str
    lease_ms: int


class Handled(NamedTuple):
    at_ms: int
    token: str


class Failed(NamedTuple):
    """It is handled again at `next_ms`, unless its calls are used up; 0: never."""

    at_ms: int
    token: str
    failure: Failure
    next_ms: int


class PutOff(NamedTuple):
    at_ms: int
    token: str
    failure: Failure
    next_ms: int


class GiveBack(NamedTuple):
    """It was taken and not handled."""

    at_ms: int
    token: str


class Retry(NamedTuple):
    """A person wants it handled again, with so many calls before it is dead again."""

    at_ms: int
    calls_left: int


class Drop(NamedTuple):
    """A person wants it no more. `force`: also where it may be under way to a topic."""

    at_ms: int
    force: bool = False


class Adopt(NamedTuple):
    """Its message is of this broker. `force`: also where it says another one."""

    at_ms: int
    broker: str
    force: bool = False


class Claim(NamedTuple):
    """`token` sends it again. `waiting`: also one that is to be handled again."""

    at_ms: int
    token: str
    waiting: bool = False


class Depart(NamedTuple):
    """Its place in a stream is settled: from now on it may have been sent."""

    at_ms: int
    token: str
    journey: Journey


class Arrive(NamedTuple):
    """The broker has it, at `offset` (-1: it did not say)."""

    at_ms: int
    producer_id: int
    sequence: int
    offset: int


class Return(NamedTuple):
    """It was not sent under this place (0, 0: it had none yet), and never will be, that is known: it is dead again."""

    at_ms: int
    token: str
    producer_id: int = 0
    sequence: int = 0


Event = (
    Keep
    | Begin
    | Note
    | Pass
    | Take
    | Renew
    | Handled
    | Failed
    | PutOff
    | GiveBack
    | Retry
    | Drop
    | Adopt
    | Claim
    | Depart
    | Arrive
    | Return
)


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
    """The dead letter: a message whose handling failed, with everything of it and the history of its calls.

    It is known by what the message is: group, topic's incarnation, partition, offset, and the time at which it was
    appended, so that another broker's message at the same place is another letter. The id is made of these: the same in
    every store, and the same when the message is kept again.

    Times in ms since 1970.

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


# Which letters are meant: what `tfmq dlq list`, `export`, `redrive` filter by. Pure; a store may ask its database.

PAGE_LETTERS = 500
"""Letters are read, and sent, so many at a time."""
PAGE_BYTES = 16 << 20
"""And whole ones so much at a time: their bodies are in memory together."""


class Selection(NamedTuple):
    """All that is given must hold. `states` (): any · `error`: part of the last error's text · `since_ms`, `until_ms`:
    when it was first kept, in ms since 1970, the first included and the last not · `ids`: those whose ids begin with
    one of these; (): any. Never meant is what was counted before its first call, and handled by that: it never failed.
    """

    states: tuple[str, ...] = ()
    group: str | None = None
    topic: str | None = None
    partition: int | None = None
    key: str | None = None
    tag: str | None = None
    error: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    ids: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises `BadRequest` for states that there are not, or a text in place of several."""
        if isinstance(self.states, str) or any(each not in STATES for each in self.states):
            raise BadRequest(
                f'states={self.states!r}: it takes several of {", ".join(STATES)}, as in ("dead",).'
            )
        if isinstance(self.ids, str):
            raise BadRequest(f"ids={self.ids!r}: it takes several, as in ({self.ids!r},).")

    def holds(self, letter: Letter) -> bool:
        """Whether `letter` is meant."""
        same = (
            (self.group, letter.group),
            (self.topic, letter.topic),
            (self.partition, letter.partition),
            (self.key, key_text(letter.key)),
            (self.tag, letter.tag),
        )
        return (
            not (letter.state == HANDLED and letter.calls <= 1 and not letter.failures)
            and (not self.states or letter.state in self.states)
            and (not self.ids or letter.id.startswith(self.ids))
            and all(wanted is None or wanted == found for wanted, found in same)
            and (self.error is None or self.error.casefold() in letter.error.casefold())
            and (self.since_ms is None or letter.kept_ms >= self.since_ms)
            and (self.until_ms is None or letter.kept_ms < self.until_ms)
        )


class Page(NamedTuple):
    """Where a list goes on: behind the letter that was first kept at `kept_ms` and has this `id`."""

    kept_ms: int = -1
    id: str = ""


def fitting(letters: Sequence[Letter]) -> Sequence[Letter]:
    """The first ones whose bodies are of `PAGE_BYTES` together; at least one, if there is any."""
    size = 0
    for number, each in enumerate(letters):
        size += max(0, each.payload_bytes)
        if number and size > PAGE_BYTES:
            return letters[:number]
    return letters


def key_text(key: bytes | str | None) -> str | None:
    """A key as people write it; bytes that are no UTF-8 with a ? for each that is not."""
    return key.decode(errors="replace") if isinstance(key, bytes) else key


START = Page()
