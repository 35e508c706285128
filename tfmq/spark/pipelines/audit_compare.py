"""Comparison of facts (rows of numbers about messages): finds repeated ids, and missing or forbidden messages.

Two records with the same id are always an error within the topics of a broker. A producer id is leased once, and each
of its sequences is assigned to one message; a partition recognizes a send that is repeated. Messages of transactions,
delayed messages and messages of schedules are first stored elsewhere. Each is applied to its partition once, because
the partition records the source position up to which messages are applied. A task compares one part of all facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Final, NamedTuple

import numpy as np

from journal import filenames
from journal.disk import Disk, File
from journal.record.format import FLAG_FILLER, FLAG_TRAILER, HEADER, HEADER_SIZE
from tfmq.spark.pipelines import audit_check
from tfmq.spark.pipelines.audit_check import Array, Facts, SourcePosition
from tfmq.spark.pipelines.audit_plan import AuditedLog

LISTED_MAX: Final = 1000
"""Maximum number of findings of each kind that are listed for one part of the facts; further ones are counted."""


class AppliedState(NamedTuple):
    """The highest source position `applied` to a log; `windows`: source positions whose messages the log may lack."""

    applied: SourcePosition = audit_check.FIRST_SOURCE
    windows: Sequence[audit_check.LostSources] = ()


class JournalCoverage(NamedTuple):
    """The LSN ranges (`spans`) of which a data folder's transaction journal still has all entries."""

    journal_id: int = 0
    spans: Sequence[tuple[int, int]] = ()


class RepeatedMessages(NamedTuple):
    """Messages from `first_id` on that are stored twice: in `log`, and in `other_log`."""

    first_id: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    log: int
    offset: int
    next: int
    other_log: int
    other_offset: int
    other_next: int


class MissingMessages(NamedTuple):
    """A log lacks `missing` messages, from `first_id` on, of the transaction `epoch` committed at `lsn`."""

    log: int
    lsn: int
    epoch: int
    first_id: int
    missing: int


class UncommittedMessages(NamedTuple):
    """Messages in a log whose transaction was rolled back, or neither committed nor rolled back."""

    log: int
    epoch: int
    first_id: int
    count: int  # type: ignore[assignment]
    rolled_back: bool


class UndecidedAppend(NamedTuple):
    """An append that names as its source a commit at `lsn`, where the journal has no commit."""

    log: int
    lsn: int
    offset: int
    next: int


class ComparisonResult(NamedTuple):
    """The faults found in one part of the facts; each list has at most LISTED_MAX items.

    `pending`: number of messages that are committed but not applied to their partitions yet · `untold`: number of items
    that were left out of the lists.
    """

    repeats: list[RepeatedMessages]
    missing: list[MissingMessages]
    uncommitted: list[UncommittedMessages]
    undecided: list[UndecidedAppend]
    pending: int
    untold: int


def compare_sides(
    facts: Facts, applied_states: Mapping[int, AppliedState], coverage: Mapping[int, JournalCoverage]
) -> ComparisonResult:
    """Return the faults in one part of the facts. Keys: log number in `applied_states`, folder number in `coverage`."""
    repeats: list[RepeatedMessages] = []
    lacks: list[MissingMessages] = []
    excesses: list[UncommittedMessages] = []
    strays: list[UndecidedAppend] = []
    pending = 0
    for folder in np.unique(facts.folder):
        mine = facts.select(facts.folder == folder)
        found = mine.of_kind(audit_check.RUN)
        repeats.extend(find_repeats(found))
        missing, late = find_missing(found, mine.of_kind(audit_check.EXPECTED), applied_states)
        lacks.extend(missing)
        pending += late
        excesses.extend(find_uncommitted(found, mine.of_kind(audit_check.FORBIDDEN)))
        strays.extend(
            find_undecided(
                mine.of_kind(audit_check.APPEND),
                mine.of_kind(audit_check.DECISION),
                coverage.get(int(folder), JournalCoverage()),
            )
        )
    untold = sum(max(0, len(each) - LISTED_MAX) for each in (repeats, lacks, excesses, strays))
    return ComparisonResult(
        repeats[:LISTED_MAX], lacks[:LISTED_MAX], excesses[:LISTED_MAX], strays[:LISTED_MAX], pending, untold
    )


def find_repeats(runs: Facts) -> Iterator[RepeatedMessages]:
    """Find ids that are in several runs (consecutive ids of a producer). Yield the repeats in the order of ids."""
    if runs.row_count < 2:
        return
    runs = runs.select(np.lexsort((runs.offset, runs.log, runs.key)))
    ends = runs.key + runs.count
    highest = np.maximum.accumulate(ends)
    leaders = np.maximum.accumulate(np.where(ends == highest, np.arange(runs.row_count), 0))
    for at in np.flatnonzero(runs.key[1:] < highest[:-1]) + 1:
        other = int(leaders[at - 1])
        count = int(min(ends[at], ends[other]) - runs.key[at])
        ranges = [(int(runs.log[n]), int(runs.offset[n]), int(runs.next[n])) for n in (int(at), other)]
        here, there = sorted(ranges, reverse=True)
        yield RepeatedMessages(int(runs.key[at]), count, *here, *there)


def find_missing(
    runs: Facts, wanted: Facts, applied_states: Mapping[int, AppliedState]
) -> tuple[list[MissingMessages], int]:
    """Find the committed messages (`wanted`) that are not in the logs (`runs`).

    Return the lost messages, and the number of messages that are not applied yet: their source position is after the
    last one applied to their log, which `applied_states` has (by log number).
    """
    found: list[MissingMessages] = []
    late = 0
    for log in np.unique(wanted.log):
        here = wanted.select(wanted.log == log)
        covered = _count_covered(runs.select(runs.log == log), here)
        state = applied_states.get(int(log), AppliedState())
        for at in np.flatnonzero(covered < here.count):
            missing = int(here.count[at]) - int(covered[at])
            lsn, number = int(here.offset[at]), int(here.extra[at])
            if (lsn, number) > state.applied:
                late += missing
            elif not any(low[0] <= lsn <= high[0] for low, high, _ in state.windows):
                found.append(MissingMessages(int(log), lsn, int(here.next[at]), int(here.key[at]), missing))
    return found, late


def find_uncommitted(runs: Facts, forbidden: Facts) -> Iterator[UncommittedMessages]:
    """Yield messages that are in partitions (`runs`), although their transaction is not committed (`forbidden`)."""
    for log in np.unique(forbidden.log):
        here = forbidden.select(forbidden.log == log)
        covered = _count_covered(runs.select(runs.log == log), here)
        for at in np.flatnonzero(covered):
            yield UncommittedMessages(
                int(log), int(here.next[at]), int(here.key[at]), int(covered[at]), bool(here.extra[at])
            )


def find_undecided(appends: Facts, decisions: Facts, known: JournalCoverage) -> Iterator[UndecidedAppend]:
    """Yield the appends whose source is a commit that is not in `decisions`, although the journal still has its LSN.

    `known`: the LSN ranges that the journal still has. An append whose source is after the end of the journal is
    yielded as well, because the journal never had such a commit.
    """
    if not known.spans or not appends.row_count:
        return
    mine = appends.select((appends.extra == np.uint64(known.journal_id)) & ~np.isin(appends.key, decisions.key))
    end = known.spans[-1][1]
    for row in range(mine.row_count):
        lsn = int(mine.key[row])
        if lsn >= end or any(first <= lsn < next for first, next in known.spans):
            yield UndecidedAppend(int(mine.log[row]), lsn, int(mine.offset[row]), int(mine.next[row]))


def _count_covered(runs: Facts, asked: Facts) -> Array:
    """Return for each row of `asked` how many of its ids are in `runs`. An id that is in several runs counts once."""
    if not runs.row_count:
        return np.zeros(asked.row_count, np.uint64)
    order = np.argsort(runs.key, kind="stable")
    starts, ends = runs.key[order], (runs.key + runs.count)[order]
    highest = np.maximum.accumulate(ends)
    begins = np.concatenate(([True], starts[1:] > highest[:-1]))
    starts = starts[begins]
    ends = highest[np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(highest) - 1]))]
    before = np.concatenate((np.zeros(1, np.uint64), np.cumsum(ends - starts)))
    return _count_below(starts, ends, before, asked.key + asked.count) - _count_below(starts, ends, before, asked.key)


def _count_below(starts: Array, ends: Array, before: Array, ids: Array) -> Array:
    """For each of `ids`, count smaller ids in the ranges [starts, ends). `before`: number of ids in earlier ranges."""
    at = np.searchsorted(starts, ids, side="right")
    last = np.maximum(at, 1) - 1
    inside = np.minimum(ids, ends[last]) - np.minimum(starts[last], ids)
    found: Array = np.where(at > 0, before[last] + inside, np.uint64(0))
    return found


READ_BYTES: Final = 1 << 20


def locate_repeat(disk: Disk, logs: list[AuditedLog], repeat: RepeatedMessages) -> RepeatedMessages:
    """Return `repeat` with the exact offsets of its messages, read from the files; unchanged if they are not found."""
    ids = repeat.first_id, repeat.first_id + repeat.count
    here = _locate_records(disk, logs[repeat.log], repeat.offset, repeat.next, *ids)
    there = _locate_records(disk, logs[repeat.other_log], repeat.other_offset, repeat.other_next, *ids)
    return repeat._replace(offset=here[0], next=here[1], other_offset=there[0], other_next=there[1])


def _locate_records(disk: Disk, log: AuditedLog, offset: int, next: int, first_id: int, end_id: int) -> tuple[int, int]:
    """Return the offsets [start, end) of the records with ids [first_id, end_id); (`offset`, `next`) if none."""
    segment = max((each for each in log.segments if each.base <= offset), default=None)
    if segment is None:
        return offset, next
    first = last = -1
    try:
        with closing(disk.open_read(filenames.join(log.path, log.segment_file_name(segment.base)))) as file:
            for position, size, id, flag in _record_headers(file, offset - segment.base, next - segment.base):
                if first_id <= id < end_id and not flag & (FLAG_TRAILER | FLAG_FILLER):
                    first = position if first < 0 else first
                    last = position + size
    except OSError:
        return offset, next
    return (segment.base + first, segment.base + last) if first >= 0 else (offset, next)


def _record_headers(file: File, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (position, size, id, flag) of every record from `position` on, including block trailers."""
    data, start = b"", position
    while position + HEADER_SIZE <= end:
        if position + HEADER_SIZE > start + len(data):
            data, start = file.pread(READ_BYTES, position), position
            if len(data) < HEADER_SIZE:
                return
        length, _, id, flag = HEADER.unpack_from(data, position - start)
        yield position, HEADER_SIZE + length, id, flag
        position += HEADER_SIZE + length
