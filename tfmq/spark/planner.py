"""What is read next: where a query begins, how far its next micro-batch goes, and which task reads what of it.

Without Spark. A planner asks the broker (or the folder) how far each partition reaches and compares that with how far
the query is; what lies between and is gone is a loss, and `Losses` decides whether the query goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tfmq.errors import BadRequest, Damaged, LogTruncated, OffsetOutOfRange, UnknownTopic
from tfmq.spark.errors import Losses
from tfmq.spark.log_reader import Logs
from tfmq.spark.offsets import EARLIEST, Key, Offset, Offsets, Places, Standing, Survey, named
from tfmq.spark.ranges import Bounds, PartitionLog, Range
from tfmq.spark.settings import SourceSettings

log = logging.getLogger("tfmq.spark")

Task = tuple[Range, ...]

SURVEYS_MAX = 5
"""A topic that is deleted while it is looked at is looked at again."""
UNKNOWN = -1
"""An ordinal that damage hides."""


class Limit(NamedTuple):
    """Of a micro-batch; None: no limit."""

    rows: int | None = None
    bytes: int | None = None


class Planner:
    """Plans for one query over `logs`."""

    def __init__(
        self, settings: SourceSettings, logs: Logs, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._logs, self._now = settings, logs, now
        self._losses = Losses(settings.fail_on_data_loss)
        self._ordinals: dict[tuple[int, int], int] = {}
        """(log id, offset) -> ordinal, of the places where the last micro-batch began and ended."""
        self._target: dict[Key, Standing] | None = None
        self._seen: Offsets | None = None
        self._begun = now()
        self._turn = 0

    # Batches

    def batch(self) -> list[Task]:
        """The tasks of a batch. Raises BadRequest, UnknownTopic, and what `Losses` does."""
        assert self._settings.end is not None
        survey = self._first_survey()
        start = self._settings.start.resolve(self._logs, survey, self._losses)
        end = self._settings.end.resolve(self._logs, survey, self._losses)
        if self._settings.start.later_than(self._settings.end):
            log.warning("startingTimestamp lies behind endingTimestamp, so nothing is read.")
        for key in sorted(start):
            if start[key].offset > end[key].offset and self._explicit(self._settings.start, key):
                raise BadRequest(
                    f"{named([key])} is to be read from offset {start[key].offset} to {end[key].offset}: the start lies"
                    " behind the end."
                )
        return self._tasks(
            [
                Range(survey[key].log, start[key].offset, end[key].offset)
                for key in sorted(start)
                if start[key].offset < end[key].offset
            ]
        )

    @staticmethod
    def _explicit(places: Places, key: Key) -> bool:
        return places.each is not None and places.each[key].offset != EARLIEST

    # Streams

    def initial(self) -> Offsets:
        """Where a new query begins. Raises BadRequest, UnknownTopic."""
        return self._settings.start.resolve(self._logs, self._first_survey(), self._losses)

    def freeze(self) -> None:
        """From now on nothing that is appended later is read: the query is to end (`Trigger.AvailableNow`)."""
        # What is not there stops the query when it is asked where it begins, or goes on.
        self._target = self._survey(lenient=True)

    def latest(self, start: Offsets, limit: Limit) -> Offsets:
        """How far the micro-batch that begins at `start` goes; `start` again if there is nothing to read.

        Raises UnknownTopic, OffsetOutOfRange or LogTruncated for messages that are gone, where such end the query.
        """
        survey = self._survey(lenient=True)
        self._seen = self._offsets(survey, {key: each.bounds.end for key, each in survey.items()})
        self._look_for_gone(start, survey)
        if self._target is not None:
            there, survey = survey, _frozen(survey, self._target)
            for key in sorted((start.keys() & there.keys()) - survey.keys()):
                self._begin(key, start[key], there[key])  # made anew since: what was not read of it is told
        begins = {key: self._begin(key, start.get(key), each) for key, each in survey.items()}
        ends = {key: self._end(begins[key], each) for key, each in survey.items()}
        if self._waits(survey, begins):
            return start
        if limit.rows is not None:
            ends = self._rows_limited(survey, begins, ends, limit.rows)
        elif limit.bytes is not None:
            ends = self._bytes_limited(survey, begins, ends, limit.bytes)
        if ends != begins:
            self._begun = self._now()
            self._turn += 1
        return self._offsets(survey, ends)

    def seen(self) -> Offsets | None:
        """How far the partitions reached when `latest` asked last; None before that. Asks nobody."""
        return self._seen

    def stream(self, start: Offsets, end: Offsets) -> list[Task]:
        """The tasks of the micro-batch from `start` to `end`, which an earlier run may have planned."""
        survey = self._survey(lenient=True)
        ranges = []
        for key in sorted(end):
            standing = survey.get(key)
            if standing is None or end[key].of_another(standing.log.incarnation, self._logs.node()):
                self._losses.lost(_deleted(key[0]))
                continue
            begin = self._begin(key, start.get(key), standing)
            if begin < end[key].offset:
                ranges.append(Range(standing.log, begin, end[key].offset))
        return self._tasks(ranges)

    # Where a micro-batch begins

    def _first_survey(self) -> Survey:
        found, pattern = self._survey(), self._settings.subscription.pattern
        if pattern and not found:
            log.warning("No topic matches subscribePattern %r, so nothing is read.", pattern)
        return found

    def _survey(self, *, lenient: bool = False) -> Survey:
        """How far each partition reaches now; with `lenient`, of those that are there."""
        for attempt in range(SURVEYS_MAX):
            found = self._settings.subscription.find(self._logs, lenient=lenient)
            try:
                bounds = self._logs.all_bounds(list(found.values()))
            except UnknownTopic:  # deleted between the two questions
                if attempt + 1 == SURVEYS_MAX:
                    raise
                continue
            return {key: Standing(log, each) for (key, log), each in zip(found.items(), bounds, strict=True)}
        raise AssertionError("the last attempt returns or raises")

    def _look_for_gone(self, start: Offsets, survey: Survey) -> None:
        """Whole topics and partitions that the query has read, and that are not there, or not subscribed, any more."""
        for topic in sorted({topic for topic, _ in start.keys() - survey.keys()}):
            if not self._settings.subscription.wants(topic):
                self._losses.lost(
                    UnknownTopic(
                        f"The checkpoint has offsets of the topic {topic}, which this query does not read any more."
                    )
                )
            else:
                self._losses.lost(_deleted(topic))
        if self._losses.fail:  # else it may be one of those that were passed over
            self._settings.subscription.look_for(self._logs, survey.keys())

    def _begin(self, key: Key, start: Offset | None, standing: Standing) -> int:
        """The first offset that is to be read and is there: of a partition that is new to the query, its first."""
        log, bounds = standing
        if start is not None and start.of_another(log.incarnation, self._logs.node()):
            another = start.broker not in ("", self._logs.node())
            self._losses.lost(_strange(log.topic) if another else _deleted(log.topic))
            start = None
        # A partition that was not there when the query looked last has been there from offset 0 on.
        begin = 0 if start is None else start.offset
        if begin < bounds.first:
            self._losses.lost(
                OffsetOutOfRange(
                    f"Messages of {named([key])} from offset {begin} to {bounds.first} are gone, by retention, before"
                    " this query had read them.",
                    first=bounds.first,
                    end=bounds.end,
                )
            )
            return bounds.first
        if begin > bounds.end and not self._settings.address.path:
            self._losses.lost(
                LogTruncated(
                    f"{named([key])} ends at offset {bounds.end}, and this query had read up to {begin}: its end was"
                    " lost, or it is another broker's.",
                    cut=bounds.end,
                )
            )
            return bounds.end
        return begin

    # Where it ends

    @staticmethod
    def _end(begin: int, standing: Standing) -> int:
        # The mark of a folder may lie before what was read from its broker.
        return max(begin, standing.bounds.end)

    def _waits(self, survey: Survey, begins: dict[Key, int]) -> bool:
        """Whether fewer messages are there than a micro-batch should have, and there is time."""
        wanted, delay = self._settings.rows_min, self._settings.trigger_delay
        if wanted is None or self._target is not None or self._now() - self._begun >= delay:
            return False
        rows = self._rows(survey, begins)
        return sum(rows.values()) < wanted

    def _rows(self, survey: Survey, begins: dict[Key, int]) -> dict[Key, int]:
        """How many messages wait in each partition."""
        found, known = {}, {}
        for key, each in survey.items():
            ordinal, end = self._ordinal(each, begins[key]), each.bounds.end_ordinal
            if ordinal != UNKNOWN:
                known[each.log.log_id, begins[key]] = ordinal
            if UNKNOWN in (ordinal, end):  # it is read to its end, so that the query does not stick there
                found[key] = int(begins[key] < each.bounds.end)
            else:
                found[key] = max(0, end - ordinal)
        self._ordinals = known
        return found

    def _ordinal(self, standing: Standing, offset: int) -> int:
        log, bounds = standing
        if offset >= bounds.end:
            return bounds.end_ordinal
        if offset == bounds.first:
            return bounds.first_ordinal
        known = self._ordinals.get((log.log_id, offset))
        return self._asked_ordinal(log, offset) if known is None else known

    def _asked_ordinal(self, log: PartitionLog, offset: int) -> int:
        try:
            return self._logs.ordinal_at(log, offset)
        except Damaged:  # told by the task that is to read it
            return UNKNOWN

    def _rows_limited(
        self, survey: Survey, begins: dict[Key, int], ends: dict[Key, int], limit: int
    ) -> dict[Key, int]:
        rows = self._rows(survey, begins)
        if sum(rows.values()) <= limit:
            return ends
        found = dict(begins)
        ordinals = {}
        for key, count in shares(rows, limit, self._turn).items():
            log = survey[key].log
            if count == rows[key]:
                found[key] = ends[key]
                continue
            ordinal = self._ordinals[log.log_id, begins[key]] + count
            found[key] = self._logs.at_ordinal(log, ordinal)
            if found[key] <= begins[key]:
                found[key] = self._behind_a_gap(log, begins[key], count, ends[key])
            else:
                ordinals[log.log_id, found[key]] = ordinal
        self._ordinals |= ordinals
        return found

    def _behind_a_gap(self, log: PartitionLog, begin: int, count: int, last: int) -> int:
        """Where a micro-batch ends that begins at lost messages, which are more than it may have: what was known of
        their numbers does not hold, and the place of the next `count` of them is still `begin`.
        """
        ordinal = self._asked_ordinal(log, begin)
        found = last if ordinal == UNKNOWN else self._logs.at_ordinal(log, ordinal + count)
        return found if found > begin else self._message_from(log, begin, begin, last)

    def _message_from(self, log: PartitionLog, begin: int, offset: int, last: int) -> int:
        """Where the first message at or behind `offset` begins, above `begin` and up to `last`; in damage where that
        begins or ends: the task that is to read it tells of it.
        """
        try:
            found = self._logs.at_or_after(log, offset)
        except Damaged as error:
            found = error.first if error.first > begin else error.next
        return found if begin < found < last else last

    def _bytes_limited(
        self, survey: Survey, begins: dict[Key, int], ends: dict[Key, int], limit: int
    ) -> dict[Key, int]:
        sizes = {key: ends[key] - begins[key] for key in survey}
        if sum(sizes.values()) <= limit:
            return ends
        found = dict(begins)
        for key, size in shares(sizes, limit, self._turn).items():
            found[key] = self._message_from(survey[key].log, begins[key], begins[key] + size, ends[key])
        return found

    def _offsets(self, survey: Survey, ends: dict[Key, int]) -> Offsets:
        node = self._logs.node()
        return {key: Offset(survey[key].log.incarnation, offset, node) for key, offset in ends.items()}

    # Who reads it

    def _tasks(self, ranges: list[Range]) -> list[Task]:
        wanted, rows_max = self._settings.partitions_min, self._settings.rows_per_task
        if rows_max is not None:
            ranges = [piece for each in ranges for piece in self._pieces_of_rows(each, rows_max)]
        if wanted is not None and wanted > len(ranges):
            size = -(-sum(each.end - each.start for each in ranges) // wanted)
            ranges = [piece for each in ranges for piece in self._pieces(each, size)]
        alone = wanted is not None or rows_max is not None
        return [(each,) for each in ranges] if alone else together(ranges)

    def _pieces(self, each: Range, size: int) -> list[Range]:
        return self._logs.split(each, size) if each.end - each.start > size else [each]

    def _pieces_of_rows(self, each: Range, rows_max: int) -> Iterator[Range]:
        begin, ordinal = each.start, self._asked_ordinal(each.log, each.start)
        while begin < each.end:
            ordinal += rows_max
            end = min(each.end, self._logs.at_ordinal(each.log, ordinal))
            if ordinal < rows_max or end <= begin:  # damage hides the numbers
                end = each.end
            yield Range(each.log, begin, end)
            begin = end


def _frozen(survey: Survey, target: dict[Key, Standing]) -> Survey:
    """What was there when the query was told to end with that; partitions that came later are left out."""
    found = {}
    for key, (log, bounds) in survey.items():
        aim = target.get(key)
        if aim is not None and aim.log.incarnation == log.incarnation:
            found[key] = Standing(log, _cut(bounds, aim.bounds))
    return found


def _cut(bounds: Bounds, aim: Bounds) -> Bounds:
    return bounds._replace(end=aim.end, end_ordinal=aim.end_ordinal)


def _strange(topic: str) -> UnknownTopic:
    return UnknownTopic(
        f"The checkpoint has offsets of the topic {topic} of another broker, which say nothing of this one's. Start"
        " with a new checkpoint, or go back to the broker that it was made with."
    )


def _deleted(topic: str) -> UnknownTopic:
    return UnknownTopic(
        f"The topic {topic} was deleted, and perhaps made anew, since this query read it: what it had not read is gone."
    )


__all__ = ["Limit", "PartitionLog", "Planner", "Task"]


# A limit for a micro-batch, shared among partitions; and ranges of partitions, shared among tasks. Pure.

Name = TypeVar("Name")

SMALL_BYTES = 1 << 20
"""Ranges are read by one task together up to this size: a task costs more than reading so much."""


def shares(waiting: Mapping[Name, int], limit: int, turn: int = 0) -> dict[Name, int]:
    """How much of `limit` each gets, in proportion to what waits, never more than that.

    The sum is `limit`, or all that waits if that is less. Nobody who waits gets nothing while the limit is as large as
    their number; below that they take turns, from number `turn` on.
    """
    names = [name for name, amount in waiting.items() if amount > 0]
    total = sum(waiting[name] for name in names)
    if total <= limit:
        return {name: waiting[name] for name in names}
    if limit <= len(names):
        return {names[(turn + number) % len(names)]: 1 for number in range(limit)}
    rest, left = limit - len(names), total - len(names)
    found = {name: 1 + (waiting[name] - 1) * rest // left for name in names}
    over = limit - sum(found.values())
    # What division left over goes to those who lost most by it.
    for name in sorted(names, key=lambda name: -((waiting[name] - 1) * rest % left))[:over]:
        found[name] += 1
    return found


def together(ranges: Sequence[Range]) -> list[tuple[Range, ...]]:
    """What each task reads: a large range alone, small ones that follow each other together."""
    found: list[list[Range]] = []
    room = 0
    for each in ranges:
        size = each.end - each.start
        if size > room or not found:
            found.append([])
            room = SMALL_BYTES
        found[-1].append(each)
        room -= size
    return [tuple(each) for each in found]
