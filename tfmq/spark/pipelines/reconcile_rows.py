"""Produced, consumed, dead-lettered: a row for each group and partition, and what does not add up in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfmq.cli.output import counted
from tfmq.dead_letters.model import DEAD, DROPPED, FAILING, HANDLED, REDRIVEN, REDRIVING, RETRYING, WAITING

OPEN_STATES: Final = (FAILING, WAITING, RETRYING)
UNKNOWN: Final = -1

WRONG, NOTE = "wrong", "note"


class Standing(NamedTuple):
    """A group in one partition as the broker tells it. `offset` -1: nothing is saved; `lag` -1: cannot be told.
    Ordinals count messages since the topic was made."""

    broker: str
    group: str
    topic: str
    incarnation: int
    partition: int
    first_offset: int
    end_offset: int
    first_ordinal: int
    end_ordinal: int
    offset: int
    lag: int


class Kept(NamedTuple):
    """A dead letter of `store`, as far as it matters here. `message_id` is the message's, `sent` where a redriven one
    must stand now: (topic, incarnation, partition, offset, id), None for all others."""

    store: str
    id: str
    group: str
    topic: str
    incarnation: int
    partition: int
    offset: int
    ordinal: int
    message_id: int
    state: str
    sent: tuple[str, int, int, int, int] | None = None

    @property
    def place(self) -> tuple[str, int, int]:
        """Whose it is: group, incarnation, partition."""
        return self.group, self.incarnation, self.partition


class Fault(NamedTuple):
    """Something that does not add up; `weight` "wrong", or "note" for what settles itself or was meant."""

    weight: str
    group: str
    topic: str
    partition: int
    text: str


class Row(NamedTuple):
    """Messages of one partition, from one group's side. `produced`: ever; `there`: still in the log; `consumed`: before
    the group's place, -1 if nobody knows; `lag`: behind it. Of the consumed ones letters were kept: `waiting` are to be
    handled again, `dead` wait for a person, `settled` were redriven, handled later or dropped; `handled` never needed
    one."""

    broker: str
    group: str
    topic: str
    partition: int
    produced: int
    there: int
    consumed: int
    lag: int
    handled: int
    waiting: int
    dead: int
    settled: int


class Balance(NamedTuple):
    """All rows, and all that does not add up."""

    rows: list[Row]
    faults: list[Fault]

    def object(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "rows": [row._asdict() for row in self.rows],
            "faults": [each._asdict() for each in self.faults],
        }


def balance(standings: Sequence[Standing], kept: Sequence[Kept], incarnations: Mapping[int, str]) -> Balance:
    """`incarnations`: of the topics that are there, with their names."""
    faults: list[Fault] = []
    letters: dict[tuple[str, int, int], list[Kept]] = {}
    for letter in _once(kept, faults):
        letters.setdefault(letter.place, []).append(letter)
    rows = []
    for standing in standings:
        mine = letters.pop((standing.group, standing.incarnation, standing.partition), [])
        rows.append(_row(standing, mine))
        faults.extend(_faults(standing, mine))
    for (group, incarnation, partition), left in sorted(letters.items()):
        faults.append(_homeless(group, partition, left, incarnations.get(incarnation)))
    return Balance(rows, faults)


def _once(kept: Iterable[Kept], faults: list[Fault]) -> Iterable[Kept]:
    """Each letter once, though two stores have it."""
    found: dict[str, Kept] = {}
    for letter in kept:
        other = found.setdefault(letter.id, letter)
        if other is not letter and other.store != letter.store:
            text = f"letter {letter.id} is in {other.store} ({other.state}) and in {letter.store} ({letter.state})"
            faults.append(Fault(WRONG, letter.group, letter.topic, letter.partition, text))
    return found.values()


def _row(standing: Standing, letters: Sequence[Kept]) -> Row:
    consumed = consumed_of(standing)
    behind = [letter for letter in letters if consumed == UNKNOWN or letter.ordinal < consumed]
    count = {
        state: sum(letter.state == state for letter in letters) for state in {each.state for each in letters}
    }
    return Row(
        standing.broker,
        standing.group,
        standing.topic,
        standing.partition,
        standing.end_ordinal,
        standing.end_ordinal - standing.first_ordinal,
        consumed,
        standing.lag,
        UNKNOWN if consumed == UNKNOWN else consumed - len(behind),
        sum(count.get(state, 0) for state in OPEN_STATES),
        sum(count.get(state, 0) for state in (DEAD, REDRIVING)),
        sum(count.get(state, 0) for state in (REDRIVEN, HANDLED, DROPPED)),
    )


def consumed_of(standing: Standing) -> int:
    """Messages before the group's place; -1 where that cannot be told."""
    if standing.offset < 0:
        return 0
    if standing.lag < 0 or standing.offset < standing.first_offset:
        return UNKNOWN
    return standing.end_ordinal - standing.lag


def _faults(standing: Standing, letters: Sequence[Kept]) -> Iterable[Fault]:
    name = standing.group, standing.topic, standing.partition
    if standing.offset > standing.end_offset:
        text = (
            f"the group goes on at offset {standing.offset}, and the partition ends at {standing.end_offset}: it was"
            " cut, or put back from an older backup"
        )
        yield Fault(WRONG, *name, text)
    if 0 <= standing.offset < standing.first_offset:
        text = (
            f"the group goes on at offset {standing.offset}, and the partition begins at {standing.first_offset}:"
            " retention took messages that it had not handled"
        )
        yield Fault(WRONG, *name, text)
    consumed = consumed_of(standing)
    if consumed == UNKNOWN:
        return
    early = [letter for letter in letters if letter.ordinal >= consumed]
    beyond = [letter for letter in early if letter.ordinal >= standing.end_ordinal]
    if beyond:
        text = (
            f"{counted(len(beyond), 'letter')}, the first {beyond[0].id}, of messages behind the partition's end: it"
            " was cut, or put back from an older backup"
        )
        yield Fault(WRONG, *name, text)
    elif early:
        text = (
            f"{counted(len(early), 'letter')}, the first {early[0].id}, of messages that the group has not saved as"
            " done: it is at work, was set back, or meets them again when it goes on"
        )
        yield Fault(NOTE, *name, text)


def _homeless(group: str, partition: int, letters: Sequence[Kept], topic: str | None) -> Fault:
    """Letters of a place that no group of the broker has."""
    said = counted(len(letters), "letter")
    open_ones = sum(letter.state in (*OPEN_STATES, DEAD) for letter in letters)
    if topic is None:
        text = (
            f"{said}, {open_ones} of them open, of a topic that is not there any more, or in another broker"
        )
        return Fault(NOTE, group, letters[0].topic, partition, text)
    text = f"{said}, {open_ones} of them open, and the broker knows of no such group here: was it forgotten?"
    return Fault(WRONG, group, topic, partition, text)
