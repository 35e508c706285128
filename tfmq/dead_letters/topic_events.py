"""Events as records of a topic: docs/dead-letters.md is the page of this format.

The payload is one msgpack array: version, kind, id of the letter, time in ms, and the kind's own fields; the key is the
letter's id, the tag the kind. A reader passes over kinds and versions that it does not know, and over further fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Final, get_origin, get_type_hints

from tfmq.bounded_msgpack import Malformed, pack, unpack
from tfmq.client.dead_letters import Failure
from tfmq.client.numbered import Content
from tfmq.client.received import ReceivedMessage
from tfmq.dead_letters import events
from tfmq.dead_letters.letter import Body, Journey, Letter
from tfmq.message import BORN_MS_MAX, encode_attribute

VERSION: Final = 1
ROOM_BYTES: Final = 256 << 10
"""Beside the body of a kept message: its history is bounded, and far smaller than this."""

KINDS: Final[Mapping[type[Any], str]] = {
    events.Keep: "keep",
    events.Begin: "begin",
    events.Note: "note",
    events.Pass: "pass",
    events.Take: "take",
    events.Renew: "renew",
    events.Handled: "handled",
    events.Failed: "failed",
    events.PutOff: "put_off",
    events.GiveBack: "give_back",
    events.Retry: "retry",
    events.Drop: "drop",
    events.Adopt: "adopt",
    events.Claim: "claim",
    events.Depart: "depart",
    events.Arrive: "arrive",
    events.Return: "return",
}
_BY_KIND: Final = {kind: shape for shape, kind in KINDS.items()}
_LETTER: Final = (
    "group topic incarnation partition offset next_offset ordinal message_id appended_ms epoch payload_bytes"
    " calls calls_left redrives key tag broker"
).split()


def content_of(id: str, event: events.Event, bytes_max: int) -> Content:
    """The record of `event`. A body for which a record of `bytes_max` has no room stays where the message stands."""
    kind = KINDS[type(event)]
    fields = [_plain(each) for each in event[1:]]
    if isinstance(event, events.Keep):
        fields = [event.next_ms, *_letter_fields(event.letter, bytes_max), event.begun]
    elif isinstance(event, events.Begin | events.Note):
        fields = [*event[2:], *_letter_fields(event.letter, bytes_max)]
    payload = pack([VERSION, kind, id, event.at_ms, *fields])
    return Content(payload, encode_attribute(event.at_ms, id, kind), kind)


def event_of(message: ReceivedMessage[Any]) -> tuple[str, events.Event] | None:
    """What the record says, or None for one that says nothing that this release knows."""
    try:
        found = unpack(message.payload or b"")
        version, kind, id, at_ms, *fields = found
        if version != VERSION or kind not in _BY_KIND:
            return None
        event = _event(_BY_KIND[kind], int(at_ms), fields, str(id))
        _sound(event)
        return str(id), event
    except (Malformed, TypeError, ValueError, IndexError):
        return None


@cache
def _kinds(shape: Any) -> dict[str, Any]:
    """What the fields of `shape` are, those that are one thing or one of several."""
    hints = get_type_hints(shape)
    return {name: kind for name, kind in hints.items() if get_origin(kind) in (None, UnionType)}


def _sound(found: Any) -> None:
    """Raises `TypeError`, `ValueError` where a field is not what it is to be: whoever may write to the topic may have
    written anything, and it is not to stop those who read it."""
    for name, kind in _kinds(found.__class__).items():
        value = getattr(found, name)
        if not isinstance(value, kind):
            raise TypeError(f"{name}={value!r}")
        if name.endswith("_ms") and not -1 <= value <= BORN_MS_MAX:
            raise ValueError(f"{name}={value!r}")
        if isinstance(value, Letter | Failure | Journey | Body):
            _sound(value)
    if isinstance(found, Letter):
        for each in found.failures:
            _sound(each)


def _letter_fields(letter: Letter, bytes_max: int) -> list[Any]:
    body = letter.body
    assert body is not None, "kept with its body"
    size = len(body.payload or b"") + len(body.attribute or b"")
    stored = list(body) if size + ROOM_BYTES <= bytes_max else None
    failures = [list(each) for each in letter.failures]
    return [[getattr(letter, name) for name in _LETTER], failures, stored]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _letter(fields: list[Any], id: str) -> Letter:
    known, failures, stored = fields[:3]
    given = dict(zip(_LETTER, known, strict=False))
    body = None if stored is None else Body(*stored[:2])
    return Letter(id=id, **given, failures=tuple(Failure(*each[:3]) for each in failures), body=body)


def _event(shape: Any, at_ms: int, fields: list[Any], id: str) -> events.Event:
    """Raises `TypeError`, `ValueError`, `IndexError` for fields that the kind has not."""
    if shape is events.Keep:
        return events.Keep(at_ms, _letter(fields[1:], id), fields[0], any(fields[4:5]))
    if shape is events.Begin:
        return events.Begin(at_ms, _letter(fields, id))
    if shape is events.Note:
        return events.Note(at_ms, _letter(fields[1:], id), bool(fields[0]))
    fields = fields[: len(shape._fields) - 1]
    if shape in (events.Failed, events.PutOff):
        fields[1] = Failure(*fields[1][:3])
    if shape is events.Depart:
        fields[1] = Journey(*fields[1][: len(Journey._fields)])
    event: events.Event = shape(at_ms, *fields)
    return event
