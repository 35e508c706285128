"""Offsets of a query, in memory and as JSON in checkpoints and options; parsers of options that name offsets or topics.

    {"orders": {"0": 4096, "1": 123, "incarnation": 7, "broker": "9f0c..."}}

The object of a topic has the offset at which each partition is read next. It also has the topic's incarnation, which
changes when the topic is deleted and created again, and the broker's id, because incarnations are unique within one
broker only. In the option `startingOffsets`, incarnation and broker are optional. Spark compares offsets by their JSON
text, so equal offsets must have the same key order.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from tfmq.errors import BadRequest, OffsetOutOfRange, UnknownPartition, UnknownTopic
from tfmq.limits import is_valid_name
from tfmq.spark.log_reader import LogReader
from tfmq.spark.loss_policy import LossPolicy
from tfmq.spark.options import exclusive_option, suggest
from tfmq.spark.ranges import Bounds, PartitionLog

EARLIEST, LATEST = -2, -1
"""In a JSON object from the user, these offsets stand for a partition's first offset and for its end."""

INCARNATION, BROKER = "incarnation", "broker"
OFFSET_MAX = (1 << 63) - 1

Key = tuple[str, int]
"""Topic and partition."""


class PartitionOffset(NamedTuple):
    """Offset in a partition of one incarnation (0: unknown) of a topic in one broker (its id, "" if unknown)."""

    incarnation: int
    offset: int
    broker: str = ""

    def is_of_another(self, incarnation: int, broker: str) -> bool:
        """Return whether this offset is of another incarnation or broker. What is unknown is not compared."""
        return self.incarnation not in (0, incarnation) or ("" not in (self.broker, broker) and self.broker != broker)


Offsets = dict[Key, PartitionOffset]


def to_json(offsets: Mapping[Key, PartitionOffset]) -> dict[str, dict[str, int | str]]:
    """Return the offsets as a JSON object of the form in the module's docstring."""
    found: dict[str, dict[str, int | str]] = {}
    for topic, partition in sorted(offsets):
        found.setdefault(topic, {})[str(partition)] = offsets[topic, partition].offset
    for (topic, _), each in offsets.items():
        found[topic][INCARNATION] = each.incarnation
        if each.broker:
            found[topic][BROKER] = each.broker
    return found


def from_json(value: Mapping[str, Any], what: str, *, low: int = EARLIEST, noun: str = "place") -> Offsets:
    """Parse an object of the form that `to_json` returns; offsets must be at least `low`.

    Raises BadRequest. The sentence of this error calls the object `what`, and a number in it `noun` ("place", "time").
    """
    found: Offsets = {}
    for topic, row in value.items():
        if not isinstance(row, Mapping) or not row:
            raise BadRequest(f'{what}: {topic!r} must have an object of partitions, like {{"0": 4096}}.')
        incarnation = _check_integer(row.get(INCARNATION, 0), 0, f"{what}: the incarnation of {topic}")
        broker = row.get(BROKER, "")
        if not isinstance(broker, str):
            raise BadRequest(f"{what}: the broker of {topic} must be a text, not {broker!r}.")
        for partition, offset in row.items():
            if partition not in (INCARNATION, BROKER):
                number = _check_integer(offset, low, f"{what}: the {noun} in {topic}-{partition}")
                found[topic, _parse_partition(partition, topic, what)] = PartitionOffset(incarnation, number, broker)
    return found


def parse_assigned(value: Mapping[str, Any]) -> tuple[Key, ...]:
    """Parse the object of the option `assign`: `{"orders": [0, 1]}`. Raises BadRequest."""
    found: list[Key] = []
    for topic, numbers in value.items():
        if not is_valid_name(topic):
            raise BadRequest(f"assign: {topic!r} is no topic's name, which is of A-Z a-z 0-9 . _ -.")
        if not isinstance(numbers, list) or not numbers:
            raise BadRequest(f"assign: {topic!r} must have a list of partitions, like [0, 1].")
        found += [(topic, _check_integer(each, 0, f"assign: a partition of {topic}")) for each in numbers]
    return tuple(sorted(set(found)))


def partition_names(keys: Iterable[Key]) -> str:
    """Return at most three names, as in "orders-0, orders-1, orders-2 and 3 more"."""
    found = [f"{topic}-{partition}" for topic, partition in sorted(keys)]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _parse_partition(word: str, topic: str, what: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise BadRequest(f"{what}: {word!r} is no partition of {topic}; a partition is a number in quotes.")
    return int(word)


def _check_integer(value: Any, low: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= OFFSET_MAX:
        raise BadRequest(f"{what} must be a whole number from {low} on, not {value!r}.")
    return value


log = logging.getLogger("tfmq.spark")

LIKELY_SECONDS_BELOW = 100_000_000_000
"""The user probably meant seconds if a time in ms is below this value."""


class PartitionBounds(NamedTuple):
    log: PartitionLog
    bounds: Bounds


BoundsByPartition = dict[Key, PartitionBounds]


class OffsetSpec(NamedTuple):
    """Where a query begins or ends in each partition, as the user set it in the option with the name `option`.

    `by_partition`: the offset in each partition; None: `for_all` (EARLIEST, LATEST or a time) applies to all of them ·
    `by_time`: `by_partition` and `for_all` have times in ms since 1970 instead of offsets · `strict`: a time after the
    last message is an error; otherwise such a time means the end of the log.
    """

    option: str
    for_all: int = LATEST
    by_partition: Mapping[Key, PartitionOffset] | None = None
    by_time: bool = False
    strict: bool = False

    def resolve(self, logs: LogReader, partitions: BoundsByPartition, losses: LossPolicy) -> Offsets:
        """Return the start or end of the query in each of `partitions`.

        Raises BadRequest if the option does not fit the partitions, UnknownTopic if it has offsets of a deleted topic
        or another broker, OffsetOutOfRange if messages from its offsets on were removed and losses stop the query.
        """
        if self.by_partition is not None:
            self._check_partitions(partitions)
        return {
            key: PartitionOffset(
                partition.log.incarnation, self._resolve_partition(logs, key, partition, losses), logs.broker_id()
            )
            for key, partition in partitions.items()
        }

    def is_later_than(self, other: OffsetSpec) -> bool:
        """Return whether `self` and `other` each have one time for all partitions, and that of `self` is later."""
        times = self.by_time and other.by_time and self.by_partition is None and other.by_partition is None
        return times and self.for_all > other.for_all

    def _check_partitions(self, partitions: BoundsByPartition) -> None:
        """Check that `by_partition` names exactly the partitions that are read. Raises BadRequest."""
        assert self.by_partition is not None
        others = self.by_partition.keys() - partitions.keys()
        if others:
            topics = sorted({topic for topic, _ in partitions})
            strange = [topic for topic, _ in sorted(others) if topic not in topics]
            meant = suggest(strange[0], topics) if strange else ""
            raise BadRequest(f"{self.option} names {partition_names(others)}, which this query does not read.{meant}")
        missing = partitions.keys() - self.by_partition.keys()
        if missing:
            how = "with a time in ms since 1970" if self.by_time else "; -2 is the beginning, -1 the end"
            raise BadRequest(
                f"{self.option} does not have {partition_names(missing)}: name every partition that is read"
                f"{' ' if self.by_time else ''}{how}."
            )

    def _resolve_partition(self, logs: LogReader, key: Key, partition: PartitionBounds, losses: LossPolicy) -> int:
        log, bounds = partition
        given = PartitionOffset(0, self.for_all) if self.by_partition is None else self.by_partition[key]
        if given.is_of_another(log.incarnation, logs.broker_id()):
            raise UnknownTopic(
                f"{self.option} has offsets of another topic {log.topic}: one that was deleted, or another broker's."
            )
        if self.by_time:
            found = min(logs.offset_at_time(log, given.offset), bounds.end)
            if self.strict and found == bounds.end:
                raise BadRequest(
                    f"{self.option}: nothing was appended to {log.name} at {given.offset} or later. Give"
                    " an earlier time, or set startingOffsetsByTimestampStrategy to latest."
                )
            return found
        if given.offset in (EARLIEST, LATEST):
            return bounds.first if given.offset == EARLIEST else bounds.end
        return self._resolve_offset(logs, partition, given.offset, losses)

    def _resolve_offset(self, logs: LogReader, partition: PartitionBounds, offset: int, losses: LossPolicy) -> int:
        """Return `offset`; if the log begins after it, pass the loss to `losses`, and return the log's first offset."""
        (log, bounds), name = partition, partition.log.name
        if offset > bounds.end:
            raise BadRequest(f"{self.option}: {name} ends at {bounds.end}, before {offset}.")
        if offset < bounds.first:
            losses.handle_loss(
                OffsetOutOfRange(
                    f"{self.option}: messages of {name} from offset {offset} to {bounds.first} are gone.",
                    first=bounds.first,
                    end=bounds.end,
                )
            )
            return bounds.first
        found = logs.next_message_offset(log, offset)
        if found != offset:
            raise BadRequest(f"{self.option}: no message of {name} begins at {offset}; the next one does at {found}.")
        return offset


def parse_starting(given: Mapping[str, Any], streaming: bool) -> OffsetSpec:
    """Parse the options that set where a query begins. Raises BadRequest."""
    option = exclusive_option(given, "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
    strict = given.get("startingOffsetsByTimestampStrategy", "error") == "error"
    found = _parse_spec(given, option, strict) or OffsetSpec("startingOffsets", LATEST if streaming else EARLIEST)
    if found.for_all == LATEST and found.by_partition is None and not streaming:
        raise BadRequest("startingOffsets cannot be latest in a batch: there is nothing to read after it.")
    if not streaming and any(each.offset == LATEST for each in (found.by_partition or {}).values()):
        raise BadRequest("startingOffsets cannot be -1 in a batch: there is nothing to read after the end.")
    return found


def parse_ending(given: Mapping[str, Any]) -> OffsetSpec:
    """Parse the options that set where a batch ends. Raises BadRequest."""
    option = exclusive_option(given, "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
    found = _parse_spec(given, option, strict=False) or OffsetSpec("endingOffsets", LATEST)
    earliest = any(each.offset == EARLIEST for each in (found.by_partition or {}).values())
    if earliest or (found.by_partition is None and found.for_all == EARLIEST):
        raise BadRequest("endingOffsets cannot be earliest: there is nothing to read before it.")
    return found


def _parse_spec(given: Mapping[str, Any], option: str, strict: bool) -> OffsetSpec | None:
    """Parse the option named `option`, which sets where a query begins or ends. Return None if `option` is ""."""
    if not option:
        return None
    value = given[option]
    by_time = "Timestamp" in option
    if isinstance(value, dict):
        each = from_json(value, option, low=0 if by_time else EARLIEST, noun="time" if by_time else "place")
        return OffsetSpec(option, by_partition=each, by_time=by_time, strict=by_time and strict)
    if isinstance(value, int):
        if 0 < value < LIKELY_SECONDS_BELOW:
            log.warning("%s=%d is in the year 1973 or before: times are milliseconds.", option, value)
        return OffsetSpec(option, value, by_time=True, strict=strict)
    return OffsetSpec(option, EARLIEST if value == "earliest" else LATEST)


class Subscription(NamedTuple):
    """The partitions that a query reads: topics, a pattern, or (topic, partition) pairs; exactly one is not empty."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[Key, ...] = ()

    def includes(self, topic: str) -> bool:
        if self.pattern:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics or any(topic == each[0] for each in self.assigned)

    def find_partitions(self, logs: LogReader, *, lenient: bool = False) -> dict[Key, PartitionLog]:
        """Return the subscribed partitions. Unless `lenient`, missing ones raise UnknownTopic or UnknownPartition."""
        found: dict[Key, PartitionLog] = {}
        for topic in self._topics(logs):
            try:
                found |= {(each.topic, each.partition): each for each in logs.partitions(topic)}
            except UnknownTopic:
                if not lenient and not self.pattern:
                    raise _unknown_topic_error(logs, topic) from None
        if not self.assigned:
            return found
        missing = [key for key in self.assigned if key not in found]
        if missing and not lenient:
            raise UnknownPartition(f"assign: there is no partition {partition_names(missing)}.")
        return {key: found[key] for key in self.assigned if key in found}

    def check_existing(self, logs: LogReader, existing: Collection[Key]) -> None:
        """Raise UnknownTopic or UnknownPartition if a topic or partition that the user named is not in `existing`."""
        topics = {topic for topic, _ in existing}
        for topic in [] if self.pattern else self._topics(logs):
            if topic not in topics and topic not in logs.topics():
                raise _unknown_topic_error(logs, topic)
        missing = [key for key in self.assigned if key not in existing]
        if missing:
            raise UnknownPartition(f"assign: there is no partition {partition_names(missing)}.")

    def _topics(self, logs: LogReader) -> list[str]:
        if self.pattern:
            return sorted(topic for topic in logs.topics() if self.includes(topic))
        return sorted({*self.topics, *(topic for topic, _ in self.assigned)})


def _unknown_topic_error(logs: LogReader, topic: str) -> UnknownTopic:
    return UnknownTopic(
        f"There is no topic {topic!r}.{suggest(topic, logs.topics())} List the topics (tfmq topic list), or"
        " create it (tfmq topic create)."
    )


def parse_subscription(given: Mapping[str, Any]) -> Subscription:
    """Parse the options that name what to read. Raises BadRequest."""
    chosen = exclusive_option(given, "subscribe", "subscribePattern", "assign", required=True)
    if chosen == "assign":
        return Subscription(assigned=parse_assigned(given["assign"]))
    return Subscription(given.get("subscribe", ()), given.get("subscribePattern", ""))
