"""Facts side by side: ids that stand twice, messages of transactions that are missing or too many.

Two records with one id are never right. A producer's id is leased once, a sequence is given once; a repeated send is
recognised where it lands; messages of a transaction, delayed ones and those of schedules lie elsewhere until they come
into their partition, once, by the place of their source. So there are no legal repeats within the topics of a broker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Final, NamedTuple

import numpy as np

from journal import filenames
from journal.disk import Disk, File
from journal.record.format import FLAG_CONTROL, FLAG_FILLER, HEADER, HEADER_SIZE
from tfmq.spark.pipelines.audit_check import (
    APPEND,
    DECISION,
    FIRST_PLACE,
    FORBIDDEN,
    RUN,
    WANTED,
    Array,
    Facts,
    Place,
    Window,
)
from tfmq.spark.pipelines.audit_plan import AuditedLog

TOLD_MAX: Final = 1000
"""Of each kind in one part of the facts; more are counted."""


class Standing(NamedTuple):
    """Of one log: `applied` is the highest place of a transaction that it has."""

    applied: Place = FIRST_PLACE
    windows: Sequence[Window] = ()


class Known(NamedTuple):
    """Of one data folder's journal: its id, and the places of which it still knows everything."""

    journal_id: int = 0
    spans: Sequence[tuple[int, int]] = ()


class Repeat(NamedTuple):
    """`count` messages from `first_id` on stand in a log, between these offsets, and in another place, too."""

    first_id: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    log: int
    offset: int
    next: int
    other_log: int
    other_offset: int
    other_next: int


class Lack(NamedTuple):
    """A partition lacks `missing` of the messages that the decision at `place` brings it, the first is `first_id`."""

    log: int
    place: int
    epoch: int
    first_id: int
    missing: int


class Excess(NamedTuple):
    """A partition has messages of a transaction that was not committed."""

    log: int
    epoch: int
    first_id: int
    count: int  # type: ignore[assignment]
    rolled_back: bool


class Stray(NamedTuple):
    """An append under a place at which the journal has no decision."""

    log: int
    place: int
    offset: int
    next: int


class Verdict(NamedTuple):
    """What is wrong with the facts of one part; `pending` messages are committed, and on their way."""

    repeats: list[Repeat]
    lacks: list[Lack]
    excesses: list[Excess]
    strays: list[Stray]
    pending: int
    untold: int


def judge(facts: Facts, standings: Mapping[int, Standing], known: Mapping[int, Known]) -> Verdict:
    """Judges one part of the facts, of whatever folders: `standings` by number of the log, `known` by folder."""
    repeats: list[Repeat] = []
    lacks: list[Lack] = []
    excesses: list[Excess] = []
    strays: list[Stray] = []
    pending = 0
    for folder in np.unique(facts.folder):
        mine = facts.where(facts.folder == folder)
        found = mine.of(RUN)
        repeats.extend(repeats_of(found))
        missing, late = lacks_of(found, mine.of(WANTED), standings)
        lacks.extend(missing)
        pending += late
        excesses.extend(excesses_of(found, mine.of(FORBIDDEN)))
        strays.extend(strays_of(mine.of(APPEND), mine.of(DECISION), known.get(int(folder), Known())))
    untold = sum(max(0, len(each) - TOLD_MAX) for each in (repeats, lacks, excesses, strays))
    return Verdict(
        repeats[:TOLD_MAX], lacks[:TOLD_MAX], excesses[:TOLD_MAX], strays[:TOLD_MAX], pending, untold
    )


def repeats_of(runs: Facts) -> Iterator[Repeat]:
    """Every run that begins before an earlier one, in the order of ids, has ended."""
    if runs.rows < 2:
        return
    runs = runs.where(np.lexsort((runs.offset, runs.log, runs.key)))
    ends = runs.key + runs.count
    highest = np.maximum.accumulate(ends)
    leaders = np.maximum.accumulate(np.where(ends == highest, np.arange(runs.rows), 0))
    for at in np.flatnonzero(runs.key[1:] < highest[:-1]) + 1:
        other = int(leaders[at - 1])
        count = int(min(ends[at], ends[other]) - runs.key[at])
        places = [(int(runs.log[n]), int(runs.offset[n]), int(runs.next[n])) for n in (int(at), other)]
        here, there = sorted(places, reverse=True)
        yield Repeat(int(runs.key[at]), count, *here, *there)


def lacks_of(runs: Facts, wanted: Facts, standings: Mapping[int, Standing]) -> tuple[list[Lack], int]:
    """What committed transactions bring and their partitions lack; how many messages are only on their way."""
    found: list[Lack] = []
    late = 0
    for log in np.unique(wanted.log):
        here = wanted.where(wanted.log == log)
        covered = _covered(runs.where(runs.log == log), here)
        standing = standings.get(int(log), Standing())
        for at in np.flatnonzero(covered < here.count):
            missing = int(here.count[at]) - int(covered[at])
            place, number = int(here.offset[at]), int(here.extra[at])
            if (place, number) > standing.applied:
                late += missing
            elif not any(low[0] <= place <= high[0] for low, high, _ in standing.windows):
                found.append(Lack(int(log), place, int(here.next[at]), int(here.key[at]), missing))
    return found, late


def excesses_of(runs: Facts, forbidden: Facts) -> Iterator[Excess]:
    """What stands in a partition and was not committed."""
    for log in np.unique(forbidden.log):
        here = forbidden.where(forbidden.log == log)
        covered = _covered(runs.where(runs.log == log), here)
        for at in np.flatnonzero(covered):
            yield Excess(
                int(log), int(here.next[at]), int(here.key[at]), int(covered[at]), bool(here.extra[at])
            )


def strays_of(appends: Facts, decisions: Facts, known: Known) -> Iterator[Stray]:
    """Appends under places that are no decisions, as far as the journal knows. Behind its end there is none."""
    if not known.spans or not appends.rows:
        return
    mine = appends.where(
        (appends.extra == np.uint64(known.journal_id)) & ~np.isin(appends.key, decisions.key)
    )
    end = known.spans[-1][1]
    for row in range(mine.rows):
        place = int(mine.key[row])
        if place >= end or any(first <= place < next for first, next in known.spans):
            yield Stray(int(mine.log[row]), place, int(mine.offset[row]), int(mine.next[row]))


def _covered(runs: Facts, asked: Facts) -> Array:
    """For each row of `asked` how many of its ids are in `runs`, repeats once."""
    if not runs.rows:
        return np.zeros(asked.rows, np.uint64)
    order = np.argsort(runs.key, kind="stable")
    starts, ends = runs.key[order], (runs.key + runs.count)[order]
    highest = np.maximum.accumulate(ends)
    begins = np.concatenate(([True], starts[1:] > highest[:-1]))
    starts = starts[begins]
    ends = highest[np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(highest) - 1]))]
    before = np.concatenate((np.zeros(1, np.uint64), np.cumsum(ends - starts)))
    return _below(starts, ends, before, asked.key + asked.count) - _below(starts, ends, before, asked.key)


def _below(starts: Array, ends: Array, before: Array, ids: Array) -> Array:
    """How many ids below each of `ids` the spans have; `before`: how many all spans before each have."""
    at = np.searchsorted(starts, ids, side="right")
    last = np.maximum(at, 1) - 1
    inside = np.minimum(ids, ends[last]) - np.minimum(starts[last], ids)
    found: Array = np.where(at > 0, before[last] + inside, np.uint64(0))
    return found


# Where exactly the messages of a repeat stand: what a run says of their place is only about where to look.

READ_BYTES: Final = 1 << 20


def located(disk: Disk, logs: list[AuditedLog], repeat: Repeat) -> Repeat:
    """The same with the offsets of its first and behind its last message; as it was where the files say nothing."""
    ids = repeat.first_id, repeat.first_id + repeat.count
    here = _between(disk, logs[repeat.log], repeat.offset, repeat.next, *ids)
    there = _between(disk, logs[repeat.other_log], repeat.other_offset, repeat.other_next, *ids)
    return repeat._replace(offset=here[0], next=here[1], other_offset=there[0], other_next=there[1])


def _between(
    disk: Disk, log: AuditedLog, offset: int, next: int, first_id: int, end_id: int
) -> tuple[int, int]:
    """Offsets around the records with these ids, of which none lies outside `offset` to `next`."""
    segment = max((each for each in log.segments if each.base <= offset), default=None)
    if segment is None:
        return offset, next
    first = last = -1
    try:
        with closing(disk.open_read(filenames.join(log.path, log.file(segment.base)))) as file:
            for position, size, id, flag in _headers(file, offset - segment.base, next - segment.base):
                if first_id <= id < end_id and not flag & (FLAG_CONTROL | FLAG_FILLER):
                    first = position if first < 0 else first
                    last = position + size
    except OSError:
        return offset, next
    return (segment.base + first, segment.base + last) if first >= 0 else (offset, next)


def _headers(file: File, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(position, size, id, flag) of every record from `position` on, control records too."""
    data, start = b"", position
    while position + HEADER_SIZE <= end:
        if position + HEADER_SIZE > start + len(data):
            data, start = file.pread(READ_BYTES, position), position
            if len(data) < HEADER_SIZE:
                return
        length, _, id, flag = HEADER.unpack_from(data, position - start)
        yield position, HEADER_SIZE + length, id, flag
        position += HEADER_SIZE + length
