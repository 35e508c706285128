"""A letter of a topic with all that is not kept in memory: read again from its events, one fetch each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from tfmq.client.link import Link
from tfmq.client.numbered import Stream, read_chunk
from tfmq.client.received import ReceivedMessage
from tfmq.client.waiting import Operation
from tfmq.dead_letters.course import after
from tfmq.dead_letters.letter import Body, Letter
from tfmq.dead_letters.topic_events import event_of
from tfmq.errors import Damaged, OffsetOutOfRange, StoreFailed, UnknownTopic

EVENT_BYTES: Final = 64 << 10
"""Asked for at once: the block of one event, which the broker gives whole even where it is larger."""


def whole_letter(
    link: Link, stream: Stream, id: str, places: Iterable[int], until: float
) -> Operation[Letter | None]:
    """The letter `id` whose events stand at `places`; None where the topic does not have them any more.

    Raises `StoreFailed` where the body was left where the message stood, and that is gone.
    """
    letter: Letter | None = None
    for offset in places:
        message = yield from _message_at(link, stream, offset, until)
        found = None if message is None else event_of(message)
        if found is not None and found[0] == id:
            letter = after(letter, found[1]) or letter
    if letter is None or letter.body is not None:
        return letter
    return replace(letter, body=(yield from _body_of(link, letter, until)))


def stands_here(link: Link, letter: Letter, until: float) -> Operation[bool]:
    """Whether the broker has the letter's message at its offset: the same id, appended at the same time."""
    stands = Stream(letter.topic, letter.incarnation, letter.partition, 0)
    try:
        message = yield from _message_at(link, stands, letter.offset, until)
    except (UnknownTopic, Damaged):
        return False
    if message is None:
        return False
    return (message.id, message.origin.append_ms) == (letter.message_id, letter.appended_ms)


def _body_of(link: Link, letter: Letter, until: float) -> Operation[Body]:
    """From where the message stands."""
    stands = Stream(letter.topic, letter.incarnation, letter.partition, 0)
    try:
        message = yield from _message_at(link, stands, letter.offset, until)
    except UnknownTopic:
        message = None
    if message is None or message.id != letter.message_id:
        raise StoreFailed(
            f"The message of {letter.id} was too large to be copied, and is not any more where it stood,"
            f" {letter.origin}.",
            retriable=False,
        )
    return Body(message.payload, message.attribute_bytes)


def _message_at(
    link: Link, stream: Stream, offset: int, until: float
) -> Operation[ReceivedMessage[Any] | None]:
    try:
        chunk = yield from read_chunk(link, stream, offset, until, EVENT_BYTES)
    except OffsetOutOfRange:
        return None
    return next((each for each in chunk.messages if each.offset == offset), None)
