"""Data model of dead letters: the letter, the events that change it, selections.

A store applies events and nothing else; `state_machine` defines what each changes. `at_ms` is the time of an
event in ms since 1970. Events of a lease have its `token`, and have no effect after the lease passed to
another consumer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

from tfmq.client.consumer.message import Codec, LazyAttribute, Origin, ReceivedMessage
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.errors import BadRequest, DecodeFailed
from tfmq.message import Attribute, decode_attribute


class KeepEvent(NamedTuple):
    """The consumer stores the message: dead, or to be handled again at `next_ms` (0: dead).

    `letter` has its failures and `calls`. `begun`: besides these calls, a last one was counted by a
    `BeginEvent`.
    """

    at_ms: int
    letter: Letter
    next_ms: int = 0
    begun: bool = False


class BeginEvent(NamedTuple):
    """A handler call is about to start.

    Recorded only for a message that may have crashed its process in a former run. `letter.calls_left` is used
    only if the message has no stored letter.
    """

    at_ms: int
    letter: Letter


class NoteEvent(NamedTuple):
    """A call failed, and the consumer will call the handler again.

    `letter` has the failure, and for a message without a stored letter the calls left. `begun`: the call was
    counted by a `BeginEvent`.
    """

    at_ms: int
    letter: Letter
    begun: bool = False


class PassEvent(NamedTuple):
    """The consumer handled the message after failed or counted calls had been recorded for it."""

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
    """The handler call of a leased letter failed; it is handled again at `next_ms` (0: never).

    If no calls are left the letter is dead, whatever `next_ms` is.
    """

    at_ms: int
    token: str
    failure: Failure
    next_ms: int


class PutOffEvent(NamedTuple):
    """The handler postponed a leased letter until `next_ms`."""

    at_ms: int
    token: str
    failure: Failure
    next_ms: int


class GiveBackEvent(NamedTuple):
    """The consumer with `token` releases the leased letter without having called the handler."""

    at_ms: int
    token: str


class RetryEvent(NamedTuple):
    """A person requests that the letter be handled again, with `calls_left` further calls."""

    at_ms: int
    calls_left: int


class DropEvent(NamedTuple):
    """A person discards the letter. `force`: also if it may be in transit to a topic."""

    at_ms: int
    force: bool = False


class AdoptEvent(NamedTuple):
    """The letter is assigned to this broker. `force`: also if another broker was recorded."""

    at_ms: int
    broker: str
    force: bool = False


class ClaimEvent(NamedTuple):
    """The redrive with `token` reserves the letter. `waiting`: also if the letter is waiting."""

    at_ms: int
    token: str
    waiting: bool = False


class DepartEvent(NamedTuple):
    """The redrive with `token` records the letter's producer sequence, before it sends it."""

    at_ms: int
    token: str
    journey: RedrivePosition


class ArriveEvent(NamedTuple):
    """The broker has stored the redriven letter in its target partition at `offset`.

    -1: the offset is unknown. `producer_id` and `sequence` are those of the letter's `DepartEvent`.
    """

    at_ms: int
    producer_id: int
    sequence: int
    offset: int


class ReturnEvent(NamedTuple):
    """The letter was not sent with this sequence, and certainly will not be: it is dead again.

    `producer_id` and `sequence` are 0 if no sequence was recorded.
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
"""Failures kept per letter: the first, and the latest ones."""
TRACEBACKS_MAX: Final = 5
"""Failures kept with a traceback; tracebacks are usually alike."""


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
    """Users print letters."""


FAILING, WAITING, RETRYING, DEAD, REDRIVING, REDRIVEN, HANDLED, DROPPED = STATES = tuple(LetterState)
FINAL_STATES: Final = (REDRIVEN, HANDLED, DROPPED)
"""The letter is neither handled nor redriven; a new failure of its message starts a new round of calls."""


class LetterBody(NamedTuple):
    """Possibly large part of a letter: `payload` (None: tombstone) and the encoded `attribute`."""

    payload: bytes | None
    attribute: bytes | None


class RedrivePosition(NamedTuple):
    """Target partition and producer sequence of a redriven letter, recorded before it is sent.

    `from_offset`: end of the partition's log at that time, so the record can be stored only at or after it ·
    `node`: id of the broker, "" if unknown.
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
    """Dead letter: a message whose handling failed, with the history of its calls.

    The id is a hash of what identifies the message: group, the topic's incarnation, partition, offset and
    append time. So a message of another broker at the same offset is another letter, and storing a message
    again gives the same id, in every store.

    All times are in ms since 1970.

    Of the message: `group` of the consumer, `topic`, `incarnation`, `partition`, `offset`, `next_offset`,
    `ordinal`, `message_id`, `appended_ms`, `epoch`, `payload_bytes` (-1: a tombstone); `body` is None where
    it was not requested. `broker`: id of the broker that has the topic; "" for letters of an earlier release,
    which did not record it.

    Of its handling: `calls`: handler calls so far · `calls_left`: calls that may still be made before it is
    dead · `put_offs`: number of postponements · `next_ms`: when a waiting letter is due · `kept_ms`: when it
    was first stored · `changed_ms`: time of the last event · `token`: lease or redrive that reserves it ·
    `lease_ms`: end of the lease.

    Of its redrive: `redrives`: how often the message had been redriven before it failed · `journey`: where it
    is sent, None if no sequence is recorded · `sent_offset`: its offset there, -1 if unknown.
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
        """Return a copy with `failures` added to its own, limited by `bound_failures`."""
        return replace(self, failures=bound_failures((*self.failures, *failures)))

    def attribute(self) -> Attribute:
        """Decode the message's attribute. Raises DecodeFailed."""
        assert self.body is not None, "asked for with its body"
        return decode_attribute(self.body.attribute) if self.body.attribute else Attribute()

    def message(self, codec: Codec | None = None) -> ReceivedMessage[Any]:
        """Return the message as its consumer received it."""
        assert self.body is not None, "asked for with its body"
        origin = Origin(self.incarnation, self.appended_ms, self.epoch, codec)
        attribute = LazyAttribute(self.body.attribute)
        place = (self.topic, self.partition, self.offset, self.next_offset, self.ordinal, self.message_id)
        return ReceivedMessage(self.body.payload, *place, attribute, origin)


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

    Only the first and the last TRACEBACKS_MAX - 1 keep their tracebacks.
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
    """Decode an attribute; empty if it is invalid, since `LetterBody` has the encoded form."""
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

    `states`: () for any · `error`: a part of the last failure's text, in any case · `since_ms` (inclusive),
    `until_ms` (exclusive): when the letter was first stored, in ms since 1970 · `ids`: prefixes of ids; ()
    for any. A letter whose only call was counted before it started and then succeeded never matches, because
    it never failed.
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
        """Raise BadRequest for unknown states, and for a string in place of a tuple."""
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
    """Return the first letters whose payloads have up to `PAGE_BYTES` together; at least one."""
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
