"""Data model of dead letters: the letter, the events that change it, selections.

A store changes a letter only by applying an event; `state_machine` defines what each event changes. `at_ms` is the time
of an event in ms since 1970. An event of a lease or of a redrive has the `token` of that lease or redrive. The event
has no effect if the letter has another token when the event is applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

from tfmq.client.consumer.message import Codec, LazyAttribute, Origin, ReceivedMessage, make_message
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.errors import BadRequest, DecodeFailed
from tfmq.message import Attribute, decode_attribute


class KeepEvent(NamedTuple):
    """The consumer stores a message as dead, or to be handled again at `next_ms` (0: dead).

    `letter.failures` and `letter.calls` contain only what no earlier event has recorded. `begun`: a `BeginEvent`
    counted the last call before the call started, so this call is not in `letter.calls`.
    """

    at_ms: int
    letter: Letter
    next_ms: int = 0
    begun: bool = False


class BeginEvent(NamedTuple):
    """The consumer is about to call the handler with a message that may have crashed a consumer's process before."""

    at_ms: int
    letter: Letter


class NoteEvent(NamedTuple):
    """A handler call failed, and the consumer will call the handler again.

    `letter` has the failure. A round is the series of calls until a message is dead. `letter.calls_left` is the number
    of calls in a new round. It is used only if this event starts a round, for example because no letter of the message
    is stored yet. `begun`: a `BeginEvent` counted the call before the call started.
    """

    at_ms: int
    letter: Letter
    begun: bool = False


class PassEvent(NamedTuple):
    """The consumer handled the message. Earlier a `NoteEvent` or `BeginEvent` recorded a call with this message."""

    at_ms: int


class TakeEvent(NamedTuple):
    """The consumer with `token` leases the letter until `lease_ms`."""

    at_ms: int
    token: str
    lease_ms: int


class RenewEvent(NamedTuple):
    """The consumer with `token` extends its lease until `lease_ms`."""

    at_ms: int
    token: str
    lease_ms: int


class HandledEvent(NamedTuple):
    """The consumer with `token` handled the leased letter."""

    at_ms: int
    token: str


class FailedEvent(NamedTuple):
    """A handler call failed. The leased letter waits until `next_ms`; it is dead if that is 0 or no calls are left."""

    at_ms: int
    token: str
    failure: Failure
    next_ms: int


class PutOffEvent(NamedTuple):
    """The handler postponed a leased letter until `next_ms`. `failure`: the entry for the letter's history."""

    at_ms: int
    token: str
    failure: Failure
    next_ms: int


class GiveBackEvent(NamedTuple):
    """The consumer with `token` releases the leased letter without having called the handler."""

    at_ms: int
    token: str


class RetryEvent(NamedTuple):
    """An operator requests that the letter be handled again, with up to `calls_left` further handler calls."""

    at_ms: int
    calls_left: int


class DropEvent(NamedTuple):
    """An operator discards the letter. `force`: even if a redrive may be sending the letter to a topic."""

    at_ms: int
    force: bool = False


class AdoptEvent(NamedTuple):
    """The letter is assigned to `broker`. `force`: even if the letter records another broker."""

    at_ms: int
    broker: str
    force: bool = False


class ClaimEvent(NamedTuple):
    """The redrive with `token` reserves the letter. `waiting`: even if the letter waits to be handled again."""

    at_ms: int
    token: str
    waiting: bool = False


class DepartEvent(NamedTuple):
    """The redrive with `token` records the letter's producer sequence before the redrive sends the letter."""

    at_ms: int
    token: str
    journey: RedrivePosition


class ArriveEvent(NamedTuple):
    """The broker has stored the redriven letter in its target partition at `offset`.

    `offset` is -1 if it is unknown. `producer_id` and `sequence` are those of the letter's `DepartEvent`.
    """

    at_ms: int
    producer_id: int
    sequence: int
    offset: int


class ReturnEvent(NamedTuple):
    """A redrive found out that the broker has not stored the letter and never will: the letter is dead again.

    `producer_id` and `sequence`: those in the letter's `DepartEvent`; 0 if there was none.
    """

    at_ms: int
    token: str
    producer_id: int = 0
    sequence: int = 0


Event = (
    KeepEvent
    | BeginEvent
    | NoteEvent
    | PassEvent
    | TakeEvent
    | RenewEvent
    | HandledEvent
    | FailedEvent
    | PutOffEvent
    | GiveBackEvent
    | RetryEvent
    | DropEvent
    | AdoptEvent
    | ClaimEvent
    | DepartEvent
    | ArriveEvent
    | ReturnEvent
)


ID_CHARACTERS: Final = 16
FAILURES_MAX: Final = 20
"""Maximum number of failures that a letter keeps: the first failure and the latest failures."""
TRACEBACKS_MAX: Final = 5
"""Maximum number of a letter's failures that keep their traceback, because the tracebacks are usually alike."""


class LetterState(StrEnum):
    """State of a dead letter; docs/dead-letters.md describes each."""

    FAILING = "failing"
    WAITING = "waiting"
    RETRYING = "retrying"
    DEAD = "dead"
    REDRIVING = "redriving"
    REDRIVEN = "redriven"
    HANDLED = "handled"
    DROPPED = "dropped"

    __repr__ = str.__repr__
    """Users print letters, and a state in the output is to look like a plain string."""


FAILING, WAITING, RETRYING, DEAD, REDRIVING, REDRIVEN, HANDLED, DROPPED = STATES = tuple(LetterState)
FINAL_STATES: Final = (REDRIVEN, HANDLED, DROPPED)
"""States of letters that need no further action; a new failure of the message starts a new round of calls."""


class LetterBody(NamedTuple):
    """The part of a letter that may be large: `payload` (None: tombstone) and the encoded `attribute`."""

    payload: bytes | None
    attribute: bytes | None


class RedrivePosition(NamedTuple):
    """Target partition and producer sequence of a redriven letter, recorded before the letter is sent.

    `from_offset`: end of the partition's log when the sequence was recorded; the letter can be stored only at or after
    this offset · `node`: id of the broker that the letter is sent to, "" if unknown.
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
    """Dead letter: a message whose handling failed, with the history of its handler calls. Times are ms since 1970.

    The id is a hash of group, topic incarnation, partition, offset and append time of the message. So a message of
    another broker at the same offset gets another id, and a message that is stored again gets the same id.

    The message: `group` of the consumer, `topic`, `incarnation`, `partition`, `offset`, `next_offset`, `ordinal`,
    `message_id`, `appended_ms`, `epoch`, `payload_bytes` (-1: a tombstone) · `body`: None if the caller did not request
    it · `broker`: id of the broker that has the topic; "" for letters of an earlier release, which did not record it.

    Its handling: `calls`: handler calls so far · `calls_left`: calls that may still be made before the letter is dead ·
    `put_offs`: number of postponements · `next_ms`: when a waiting letter is due · `kept_ms`: when the letter was first
    stored · `changed_ms`: time of the last event · `token`: lease or redrive of the letter · `lease_ms`: lease's end.

    Its redrive: `redrives`: how often the message had been redriven before it failed · `journey`: target partition and
    producer sequence, None if no sequence is recorded · `sent_offset`: offset in the target partition, -1 if unknown.
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
    journey: RedrivePosition | None = None
    sent_offset: int = -1
    broker: str = ""
    body: LetterBody | None = None

    @property
    def error(self) -> str:
        """The error of the last failure, or ""."""
        return self.failures[-1].error if self.failures else ""

    @property
    def origin(self) -> str:
        """Location of the message as text: orders-0 at offset 1234."""
        return f"{self.topic}-{self.partition} at offset {self.offset}"

    def with_failures(self, failures: Sequence[Failure]) -> Letter:
        """Return a copy with `failures` added to the letter's failures, limited by `bound_failures`."""
        return replace(self, failures=bound_failures((*self.failures, *failures)))

    def attribute(self) -> Attribute:
        """Decode the attribute; the letter must have its body. Raises DecodeFailed if the attribute is invalid."""
        assert self.body is not None, "asked for with its body"
        return decode_attribute(self.body.attribute) if self.body.attribute else Attribute()

    def message(self, codec: Codec | None = None) -> ReceivedMessage[Any]:
        """Return the message as its consumer received it."""
        assert self.body is not None, "asked for with its body"
        origin = Origin(self.incarnation, self.appended_ms, self.epoch, codec)
        attribute = LazyAttribute(self.body.attribute)
        location = (self.topic, self.partition, self.offset, self.next_offset, self.ordinal, self.message_id)
        return make_message(self.body.payload, *location, attribute, origin)


def letter_from_message(message: ReceivedMessage[Any], group: str, broker: str = "") -> Letter:
    """Create the letter for `message`, with no calls and no failures yet."""
    origin, attribute = message.origin, _decode_attribute(message.attribute_bytes)
    payload = message.payload
    return Letter(
        id=letter_id(group, origin.incarnation, message.partition, message.offset, origin.append_ms),
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
        body=LetterBody(payload, message.attribute_bytes),
    )


def letter_id(group: str, incarnation: int, partition: int, offset: int, appended_ms: int) -> str:
    text = f"{group}/{incarnation}/{partition}/{offset}/{appended_ms}"
    return hashlib.sha256(text.encode()).hexdigest()[:ID_CHARACTERS]


def bound_failures(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the first failure and the latest ones, at most FAILURES_MAX in all.

    Tracebacks are removed except those of the first failure and of the last TRACEBACKS_MAX - 1.
    """
    kept = list(failures)
    if len(kept) > FAILURES_MAX:
        kept = [kept[0], *kept[1 - FAILURES_MAX :]]
    bare = range(1, len(kept) - TRACEBACKS_MAX + 1)
    return tuple(each._replace(traceback="") if number in bare else each for number, each in enumerate(kept))


def iso_time(time_ms: int) -> str:
    """Format a time in ms since 1970 as ISO 8601 in UTC; "" for 0."""
    if not time_ms:
        return ""
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _decode_attribute(data: bytes | None) -> Attribute:
    """Decode an attribute; return an empty one if `data` is invalid, since `LetterBody` keeps the encoded form."""
    try:
        return decode_attribute(data) if data else Attribute()
    except DecodeFailed:
        return Attribute()


PAGE_LETTERS = 500
"""Maximum number of letters that are read or sent at a time."""
PAGE_BYTES = 16 << 20
"""Maximum size of bodies that are in memory at a time."""


class Selection(NamedTuple):
    """Filter for letters; all given conditions must match.

    `states`: () for any · `error`: a part of the last failure's text, case-insensitive · `since_ms` (inclusive) and
    `until_ms` (exclusive): when the letter was first stored, in ms since 1970 · `ids`: prefixes of ids; () for any. A
    handled letter with one call and no failure never matches: a `BeginEvent` stored the letter before this call.
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
        """Raise BadRequest if `states` has an unknown state, or if `states` or `ids` is a string instead of a tuple."""
        if isinstance(self.states, str) or any(each not in STATES for each in self.states):
            raise BadRequest(f'states={self.states!r}: it takes several of {", ".join(STATES)}, as in ("dead",).')
        if isinstance(self.ids, str):
            raise BadRequest(f"ids={self.ids!r}: it takes several, as in ({self.ids!r},).")

    def holds(self, letter: Letter) -> bool:
        """Return whether `letter` matches all conditions."""
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


class PagePosition(NamedTuple):
    """Position in a list of letters: after the letter with this `id`, first stored at `kept_ms`."""

    kept_ms: int = -1
    id: str = ""


def fit_page(letters: Sequence[Letter]) -> Sequence[Letter]:
    """Return the first letters: as many as have payloads of at most PAGE_BYTES in total, but at least one."""
    size = 0
    for number, each in enumerate(letters):
        size += max(0, each.payload_bytes)
        if number and size > PAGE_BYTES:
            return letters[:number]
    return letters


def key_text(key: bytes | str | None) -> str | None:
    """Return a key as text; bytes that are invalid UTF-8 become the replacement character."""
    return key.decode(errors="replace") if isinstance(key, bytes) else key


FIRST_PAGE = PagePosition()
