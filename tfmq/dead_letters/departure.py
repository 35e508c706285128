"""A run of letters on its way to a topic: what became of each, by what the broker says and by nothing else.

The places of the run are written down already. Whatever happens here, killed in any moment, the same can be done again:
either the broker says that it has the records, or it is known that it never will, or they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfmq.client.asking import ask
from tfmq.client.link import Link
from tfmq.client.numbered import Content, Stream, close_stream, find_records, send_numbered
from tfmq.client.waiting import Operation
from tfmq.dead_letters import events
from tfmq.dead_letters.letter import Journey, Letter
from tfmq.dead_letters.shelf import Step
from tfmq.errors import (
    BadRequest,
    Damaged,
    MessageTooLarge,
    OffsetOutOfRange,
    SequenceGap,
    StaleProducer,
    UnknownProducer,
    UnknownTopic,
)
from tfmq.message import recount_attribute
from tfmq.protocol.commands import Ping


class Fate(NamedTuple):
    """What is known of a run: `steps` for its store, how many `arrived` and `returned`; `unsure`, a sentence for each
    of which nobody knows; `refused`: what the broker says of one that it will never take, "" where it refused none."""

    steps: tuple[Step, ...] = ()
    arrived: int = 0
    returned: int = 0
    unsure: tuple[str, ...] = ()
    refused: str = ""

    def joined(self, other: Fate) -> Fate:
        """Of two runs together."""
        return Fate(
            self.steps + other.steps,
            self.arrived + other.arrived,
            self.returned + other.returned,
            self.unsure + other.unsure,
            self.refused or other.refused,
        )


def content_of_letter(letter: Letter) -> Content:
    """The record: payload, key, tag and properties as they were, with the counts of calls and redrives that travel with
    it. Raises `DecodeFailed`, `MessageTooLarge`."""
    assert letter.body is not None, "asked for with its body"
    attribute = letter.attribute()
    counted = recount_attribute(letter.body.attribute, letter.calls, attribute.redrives + 1)
    return Content(letter.body.payload, counted, attribute.tag)


def stream_of(journey: Journey) -> Stream:
    return Stream(journey.topic, journey.incarnation, journey.partition, journey.producer_id)


def send_run(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    """Send letters whose places follow each other in one stream. Raises what leaves all of them as they are."""
    first = _journey(letters[0])
    stream = stream_of(first)
    contents = [content_of_letter(each) for each in letters]
    elsewhere = yield from _elsewhere(link, first, until)
    if elsewhere:
        return Fate(unsure=tuple(f"{each.id} {elsewhere}" for each in letters))
    try:
        offsets = yield from send_numbered(link, stream, first.sequence, contents, until)
    except BadRequest as error:
        if (
            len(letters) > 1
        ):  # perhaps a part of them is there: somebody who knew only of that part had sent it
            return (yield from _one_by_one(link, letters, until, now_ms))
        return (yield from close_run(link, letters, until, now_ms))._replace(refused=error.sentence)
    except MessageTooLarge as error:
        return (yield from close_run(link, letters, until, now_ms))._replace(refused=error.sentence)
    except (SequenceGap, StaleProducer, UnknownProducer):
        return (yield from close_run(link, letters, until, now_ms))
    except UnknownTopic:
        return Fate(unsure=_unsure(letters, f"topic {first.topic} was deleted since"))
    return _arrived(letters, offsets, now_ms())


def _elsewhere(link: Link, journey: Journey, until: float) -> Operation[str]:
    """What is to be said where this is not the broker that the places are of; "" where it is."""
    if link.hello is None:
        yield from ask(link, Ping(), until)
    if link.hello is None or journey.node in ("", link.hello.node):
        return ""
    return f"is under way to another broker ({journey.node}): redrive it with that one's address (--servers)"


def _one_by_one(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    whole = Fate()
    for each in letters:
        whole = whole.joined((yield from send_run(link, [each], until, now_ms)))
    return whole


def close_run(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    """Nothing more comes in the stream of these: what is there arrived, the rest never will."""
    stream = stream_of(_journey(letters[0]))
    journeys = [_journey(each) for each in letters]
    try:
        last = yield from close_stream(link, stream, until)
        found = {each.sequence: -1 for each in journeys if each.sequence <= last}
    except UnknownProducer:
        since = min(each.from_offset for each in journeys)
        try:
            found = yield from find_records(link, stream, [each.sequence for each in journeys], since, until)
        except (OffsetOutOfRange, Damaged, UnknownTopic) as error:
            return Fate(unsure=_unsure(letters, str(error)))
    except UnknownTopic as error:
        return Fate(unsure=_unsure(letters, str(error)))
    there = [each for each in letters if _journey(each).sequence in found]
    others = [each for each in letters if _journey(each).sequence not in found]
    arrived = _arrived(there, [found[_journey(each).sequence] for each in there], now_ms())
    return arrived.joined(_returned(others, now_ms()))


def _arrived(letters: Sequence[Letter], offsets: Sequence[int], now_ms: int) -> Fate:
    steps: list[Step] = []
    for each, offset in zip(letters, offsets, strict=True):
        journey = _journey(each)
        steps.append((each.id, events.Arrive(now_ms, journey.producer_id, journey.sequence, offset)))
    return Fate(tuple(steps), arrived=len(steps))


def _returned(letters: Sequence[Letter], now_ms: int) -> Fate:
    steps: list[Step] = []
    for each in letters:
        journey = _journey(each)
        steps.append((each.id, events.Return(now_ms, each.token, journey.producer_id, journey.sequence)))
    return Fate(tuple(steps), returned=len(steps))


def _unsure(letters: Sequence[Letter], reason: str) -> tuple[str, ...]:
    return tuple(
        f"{each.id} may be in {_journey(each).topic}-{_journey(each).partition} already, and nobody can tell any more:"
        f" {reason.rstrip('.')}"
        for each in letters
    )


def _journey(letter: Letter) -> Journey:
    assert letter.journey is not None, "its place is settled"
    return letter.journey
