"""Planner of a query: where the query begins, where each micro-batch ends, and which ranges each task reads.

This module does not use Spark. The planner compares the offsets of the query with the readable bounds of each
partition. If the query's next offset in a partition is before the first readable offset, the messages between the two
are lost, and `LossPolicy` decides whether the query continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from tfmq.errors import BadRequest, Damaged, LogTruncated, OffsetOutOfRange, UnknownTopic
from tfmq.spark.log_reader import LogReader
from tfmq.spark.loss_policy import LossPolicy
from tfmq.spark.offsets import (
    EARLIEST,
    BoundsByPartition,
    Key,
    Offsets,
    PartitionBounds,
    PartitionOffset,
    partition_names,
)
from tfmq.spark.ranges import OffsetRange, PartitionLog, group_small
from tfmq.spark.settings import SourceSettings

log = logging.getLogger("tfmq.spark")

TaskPlan = tuple[OffsetRange, ...]

BOUNDS_ATTEMPTS = 5
"""Attempts to get all bounds: a topic may be deleted after its partitions were listed and before bounds are read."""
UNKNOWN_ORDINAL = -1
"""Ordinal that cannot be determined because of damage."""


class BatchLimit(NamedTuple):
    """Limit of a micro-batch, in rows or bytes; None: no limit."""

    rows: int | None = None
    bytes: int | None = None


class Planner:
    """Plans what one query reads from `logs`. `now` returns monotonic seconds."""

    def __init__(self, settings: SourceSettings, logs: LogReader, now: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._logs, self._now = settings, logs, now
        self._losses = LossPolicy(settings.fail_on_data_loss)
        self._ordinals: dict[tuple[int, int], int] = {}
        """(log id, offset) -> ordinal, for start and end of the last micro-batch. The next plan uses them again."""
        self._frozen_bounds: dict[Key, PartitionBounds] | None = None
        self.latest_seen: Offsets | None = None
        """The ends of the partitions at the last `plan_end`; None before the first call."""
        self._last_batch_at = now()
        self._next_turn = 0

    def plan_batch(self) -> list[TaskPlan]:
        """Return each task's ranges of a batch query. If the options do not fit the topics, a TfmqError says why."""
        assert self._settings.end is not None
        partitions = self._initial_bounds()
        start = self._settings.start.resolve(self._logs, partitions, self._losses)
        end = self._settings.end.resolve(self._logs, partitions, self._losses)
        if self._settings.start.is_later_than(self._settings.end):
            log.warning("startingTimestamp is after endingTimestamp, so nothing is read.")
        given = self._settings.start.by_partition or {}
        for key in sorted(given):
            if start[key].offset > end[key].offset and given[key].offset != EARLIEST:
                raise BadRequest(
                    f"{partition_names([key])} is to be read from offset {start[key].offset} to {end[key].offset}:"
                    " the start is after the end."
                )
        return self._split_into_tasks(
            [
                OffsetRange(partitions[key].log, start[key].offset, end[key].offset)
                for key in sorted(start)
                if start[key].offset < end[key].offset
            ]
        )

    def initial_offsets(self) -> Offsets:
        """Return where a new query begins. Raises BadRequest (an invalid option), UnknownTopic (no such topic)."""
        return self._settings.start.resolve(self._logs, self._initial_bounds(), self._losses)

    def freeze_end(self) -> None:
        """Let the query end at the current ends of the partitions. Spark requests this for `Trigger.AvailableNow`."""
        # Missing topics are no error here, because `initial_offsets` and `plan_end` report missing topics.
        self._frozen_bounds = self._current_bounds(lenient=True)

    def plan_end(self, start: Offsets, limit: BatchLimit) -> Offsets:
        """Return the end of the micro-batch that begins at `start`; `start` itself if there are no new messages.

        If messages are lost and the query stops at losses, raises UnknownTopic, OffsetOutOfRange or LogTruncated.
        """
        partitions = self._current_bounds(lenient=True)
        self.latest_seen = self._to_offsets(partitions, {key: each.bounds.end for key, each in partitions.items()})
        self._check_removed(start, partitions)
        if self._frozen_bounds is not None:
            there, partitions = partitions, _limit_to_target(partitions, self._frozen_bounds)
            for key in sorted((start.keys() & there.keys()) - partitions.keys()):
                self._begin_offset(key, start[key], there[key])  # the topic was created again: report lost messages
        begins = {key: self._begin_offset(key, start.get(key), each) for key, each in partitions.items()}
        # The durable offset in a data folder may be out of date, and lower than an offset that this query has reached.
        ends = {key: max(begins[key], each.bounds.end) for key, each in partitions.items()}
        if self._should_wait(partitions, begins):
            return start
        if limit.rows is not None:
            ends = self._limit_rows(partitions, begins, ends, limit.rows)
        elif limit.bytes is not None:
            ends = self._limit_bytes(partitions, begins, ends, limit.bytes)
        if ends != begins:
            self._last_batch_at = self._now()
            self._next_turn += 1
        return self._to_offsets(partitions, ends)

    def plan_micro_batch(self, start: Offsets, end: Offsets) -> list[TaskPlan]:
        """Return each task's ranges from `start` to `end`. Lost messages raise an error, if failOnDataLoss is true."""
        partitions = self._current_bounds(lenient=True)
        ranges = []
        for key in sorted(end):
            partition = partitions.get(key)
            if partition is None or end[key].is_of_another(partition.log.incarnation, self._logs.broker_id()):
                self._losses.handle_loss(_deleted_topic_error(key[0]))
                continue
            begin = self._begin_offset(key, start.get(key), partition)
            if begin < end[key].offset:
                ranges.append(OffsetRange(partition.log, begin, end[key].offset))
        return self._split_into_tasks(ranges)

    def _initial_bounds(self) -> BoundsByPartition:
        found, pattern = self._current_bounds(), self._settings.subscription.pattern
        if pattern and not found:
            log.warning("No topic matches subscribePattern %r, so nothing is read.", pattern)
        return found

    def _current_bounds(self, *, lenient: bool = False) -> BoundsByPartition:
        """Return the readable bounds of each subscribed partition; with `lenient`, missing topics are left out."""
        for attempt in range(BOUNDS_ATTEMPTS):
            found = self._settings.subscription.find_partitions(self._logs, lenient=lenient)
            try:
                bounds = self._logs.all_bounds(list(found.values()))
            except UnknownTopic:  # the topic was deleted between the two requests
                if attempt + 1 == BOUNDS_ATTEMPTS:
                    raise
                continue
            return {key: PartitionBounds(log, each) for (key, log), each in zip(found.items(), bounds, strict=True)}
        raise AssertionError("the last attempt returns or raises")

    def _check_removed(self, start: Offsets, partitions: BoundsByPartition) -> None:
        """Report to `LossPolicy` the keys of `start` that `partitions` lacks: deleted, or not subscribed now."""
        for topic in sorted({topic for topic, _ in start.keys() - partitions.keys()}):
            if not self._settings.subscription.includes(topic):
                text = f"The checkpoint has offsets of the topic {topic}, which this query does not read any more."
                self._losses.handle_loss(UnknownTopic(text))
            else:
                self._losses.handle_loss(_deleted_topic_error(topic))
        if self._losses.stops_query:  # otherwise the loss of a deleted topic was logged, and the query continues
            self._settings.subscription.check_existing(self._logs, partitions.keys())

    def _begin_offset(self, key: Key, start: PartitionOffset | None, partition: PartitionBounds) -> int:
        """Return the first offset to read; report lost messages before it. `start` None: nothing has been read yet."""
        log, bounds = partition
        if start is not None and start.is_of_another(log.incarnation, self._logs.broker_id()):
            error = _deleted_topic_error(log.topic)
            if start.broker not in ("", self._logs.broker_id()):
                error = UnknownTopic(
                    f"The checkpoint has offsets of the topic {log.topic} of another broker, which are not valid in"
                    " this one. Start with a new checkpoint, or use the broker that it was created with."
                )
            self._losses.handle_loss(error)
            start = None
        # A partition without offset in the checkpoint was created after the query began, so all of it is new.
        begin = 0 if start is None else start.offset
        if begin < bounds.first:
            self._losses.handle_loss(
                OffsetOutOfRange(
                    f"Messages of {partition_names([key])} from offset {begin} to {bounds.first} are gone, by"
                    " retention, before this query had read them.",
                    first=bounds.first,
                    end=bounds.end,
                )
            )
            return bounds.first
        if begin > bounds.end and not self._settings.address.path:
            self._losses.handle_loss(
                LogTruncated(
                    f"{partition_names([key])} ends at offset {bounds.end}, and this query had read up to {begin}:"
                    " its end was lost, or the log is another broker's.",
                    cut=bounds.end,
                )
            )
            return bounds.end
        return begin

    def _should_wait(self, partitions: BoundsByPartition, begins: dict[Key, int]) -> bool:
        wanted, delay = self._settings.rows_min, self._settings.trigger_delay
        if wanted is None or self._frozen_bounds is not None or self._now() - self._last_batch_at >= delay:
            return False
        return sum(self._waiting_rows(partitions, begins).values()) < wanted

    def _waiting_rows(self, partitions: BoundsByPartition, begins: dict[Key, int]) -> dict[Key, int]:
        """Return for each partition the number of messages from the offset in `begins` to the end."""
        found, known = {}, {}
        for key, each in partitions.items():
            ordinal, end = self._ordinal_of(each, begins[key]), each.bounds.end_ordinal
            if ordinal != UNKNOWN_ORDINAL:
                known[each.log.log_id, begins[key]] = ordinal
            if UNKNOWN_ORDINAL in (ordinal, end):  # damage: count 1, so that a task reads this part and reports it
                found[key] = int(begins[key] < each.bounds.end)
            else:
                found[key] = max(0, end - ordinal)
        self._ordinals = known
        return found

    def _ordinal_of(self, partition: PartitionBounds, offset: int) -> int:
        log, bounds = partition
        if offset >= bounds.end:
            return bounds.end_ordinal
        if offset == bounds.first:
            return bounds.first_ordinal
        known = self._ordinals.get((log.log_id, offset))
        return self._fetch_ordinal(log, offset) if known is None else known

    def _fetch_ordinal(self, log: PartitionLog, offset: int) -> int:
        """Return the ordinal at `offset` from the log reader; UNKNOWN_ORDINAL if damage makes it unreadable."""
        try:
            return self._logs.ordinal_at_or_after(log, offset)
        except Damaged:  # the task that reads this part reports the damage
            return UNKNOWN_ORDINAL

    def _limit_rows(
        self, partitions: BoundsByPartition, begins: dict[Key, int], ends: dict[Key, int], limit: int
    ) -> dict[Key, int]:
        rows = self._waiting_rows(partitions, begins)
        if sum(rows.values()) <= limit:
            return ends
        found = dict(begins)
        ordinals = {}
        for key, count in share_limit(rows, limit, self._next_turn).items():
            log = partitions[key].log
            if count == rows[key]:
                found[key] = ends[key]
                continue
            ordinal = self._ordinals[log.log_id, begins[key]] + count
            found[key] = self._logs.offset_of_ordinal(log, ordinal)
            if found[key] <= begins[key]:
                found[key] = self._end_after_gap(log, begins[key], count, ends[key])
            else:
                ordinals[log.log_id, found[key]] = ordinal
        self._ordinals |= ordinals
        return found

    def _end_after_gap(self, log: PartitionLog, begin: int, count: int, last: int) -> int:
        """Return the end of the micro-batch in a partition, if the known ordinal of `begin` is out of date.

        `begin`: start of the micro-batch · `count`: maximum messages of this partition · `last`: end of the partition.
        The planner keeps known ordinals. If messages from the known ordinal on were lost, this ordinal is too low for
        `begin`. So this method requests the ordinal of the first message at or after `begin`, and adds `count`.
        """
        ordinal = self._fetch_ordinal(log, begin)
        found = last if ordinal == UNKNOWN_ORDINAL else self._logs.offset_of_ordinal(log, ordinal + count)
        return found if found > begin else self._next_message(log, begin, begin, last)

    def _next_message(self, log: PartitionLog, begin: int, offset: int, last: int) -> int:
        """Return the offset of the first message at or after `offset`; `last` unless `begin` < this offset < `last`.

        If `offset` is in a damaged part of the log, the result is the start of the damage if that is above `begin`,
        else the end of the damage. The task that reads the damaged part reports the damage.
        """
        try:
            found = self._logs.next_message_offset(log, offset)
        except Damaged as error:
            found = error.first if error.first > begin else error.next
        return found if begin < found < last else last

    def _limit_bytes(
        self, partitions: BoundsByPartition, begins: dict[Key, int], ends: dict[Key, int], limit: int
    ) -> dict[Key, int]:
        sizes = {key: ends[key] - begins[key] for key in partitions}
        if sum(sizes.values()) <= limit:
            return ends
        found = dict(begins)
        for key, size in share_limit(sizes, limit, self._next_turn).items():
            found[key] = self._next_message(partitions[key].log, begins[key], begins[key] + size, ends[key])
        return found

    def _to_offsets(self, partitions: BoundsByPartition, ends: dict[Key, int]) -> Offsets:
        node = self._logs.broker_id()
        return {key: PartitionOffset(partitions[key].log.incarnation, offset, node) for key, offset in ends.items()}

    def _split_into_tasks(self, ranges: list[OffsetRange]) -> list[TaskPlan]:
        """Distribute the ranges among tasks; split ranges as minPartitions and maxRecordsPerPartition require."""
        wanted, rows_max = self._settings.partitions_min, self._settings.rows_per_task
        if rows_max is not None:
            ranges = [piece for each in ranges for piece in self._split_by_rows(each, rows_max)]
        if wanted is not None and wanted > len(ranges):
            size = -(-sum(each.end - each.start for each in ranges) // wanted)
            ranges = [
                piece
                for each in ranges
                for piece in (self._logs.split(each, size) if each.end - each.start > size else [each])
            ]
        alone = wanted is not None or rows_max is not None
        if alone:
            return [(each,) for each in ranges]
        return [tuple(group) for group in group_small(ranges, lambda each: each.end - each.start, SMALL_RANGE_BYTES)]

    def _split_by_rows(self, each: OffsetRange, rows_max: int) -> Iterator[OffsetRange]:
        begin, ordinal = each.start, self._fetch_ordinal(each.log, each.start)
        while begin < each.end:
            ordinal += rows_max
            end = min(each.end, self._logs.offset_of_ordinal(each.log, ordinal))
            if ordinal < rows_max or end <= begin:  # damage makes the ordinals unreadable
                end = each.end
            yield OffsetRange(each.log, begin, end)
            begin = end


def _limit_to_target(survey: BoundsByPartition, target: dict[Key, PartitionBounds]) -> BoundsByPartition:
    """Return the partitions of `survey` that are also in `target`, with the ends from `target`."""
    found = {}
    for key, (log, bounds) in survey.items():
        aim = target.get(key)
        if aim is not None and aim.log.incarnation == log.incarnation:
            limited = bounds._replace(end=aim.bounds.end, end_ordinal=aim.bounds.end_ordinal)
            found[key] = PartitionBounds(log, limited)
    return found


def _deleted_topic_error(topic: str) -> UnknownTopic:
    return UnknownTopic(
        f"The topic {topic} was deleted, and perhaps created again, since this query read it: unread messages are lost."
    )


Name = TypeVar("Name")

SMALL_RANGE_BYTES = 1 << 20
"""Small ranges, together up to this size, share a task: starting a task takes longer than reading a small range."""


def share_limit(waiting: Mapping[Name, int], limit: int, turn: int = 0) -> dict[Name, int]:
    """Share `limit` among partitions in proportion to `waiting`: partition -> amount of its unread messages.

    No partition gets more than its amount. The shares add up to `limit`, or to the sum of `waiting` if that is less.
    Every partition with an amount above 0 gets at least 1. If `limit` is too small for that, `limit` of these
    partitions get 1 each, beginning with the one at index `turn`, which the caller increases each time.
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
    # Rounding down leaves `over` units. Each unit goes to one of the partitions that lost the most by rounding.
    for name in sorted(names, key=lambda name: -((waiting[name] - 1) * rest % left))[:over]:
        found[name] += 1
    return found
