"""How far a query is, as it stands in Spark's checkpoint:

    {"orders": {"0": 4096, "1": 123, "incarnation": 7, "broker": "9f0c..."}}

For each topic the offset of each partition, where the next message is read; the incarnation of the topic, by which a
topic that was deleted and made anew is told from the one that was read; and the id of the broker, which counts
incarnations for itself. `startingOffsets` takes the same, with or without these two. Spark compares two of them by
their text, so equal ones have the same order.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from tfmq.errors import BadRequest, OffsetOutOfRange, UnknownPartition, UnknownTopic
from tfmq.limits import valid_name
from tfmq.spark.errors import Losses
from tfmq.spark.log_reader import Logs
from tfmq.spark.options import nearest, only_one
from tfmq.spark.ranges import Bounds, PartitionLog

EARLIEST, LATEST = -2, -1
"""In a JSON object of a user, where the number of an offset may stand."""

INCARNATION, BROKER = "incarnation", "broker"
OFFSET_MAX = (1 << 63) - 1

Key = tuple[str, int]
"""Topic and partition."""


class Offset(NamedTuple):
    """One partition's; `incarnation` 0 and `broker` "" where they are not told."""

    incarnation: int
    offset: int
    broker: str = ""

    def of_another(self, incarnation: int, broker: str) -> bool:
        """Whether it is an offset in another topic than that of these."""
        return self.incarnation not in (0, incarnation) or (
            "" not in (self.broker, broker) and self.broker != broker
        )


Offsets = dict[Key, Offset]


def to_json(offsets: Mapping[Key, Offset]) -> dict[str, dict[str, int | str]]:
    """As a checkpoint has it."""
    found: dict[str, dict[str, int | str]] = {}
    for topic, partition in sorted(offsets):
        found.setdefault(topic, {})[str(partition)] = offsets[topic, partition].offset
    for (topic, _), each in offsets.items():
        found[topic][INCARNATION] = each.incarnation
        if each.broker:
            found[topic][BROKER] = each.broker
    return found


def from_json(value: Mapping[str, Any], what: str, *, low: int = EARLIEST, noun: str = "place") -> Offsets:
    """Of an object like `to_json`'s; `low`: the least number that an offset may have. Raises BadRequest that calls it
    `what`, and a number of it `noun`.
    """
    found: Offsets = {}
    for topic, row in value.items():
        if not isinstance(row, Mapping) or not row:
            raise BadRequest(f'{what}: {topic!r} must have an object of partitions, like {{"0": 4096}}.')
        incarnation = _whole(row.get(INCARNATION, 0), 0, f"{what}: the incarnation of {topic}")
        broker = row.get(BROKER, "")
        if not isinstance(broker, str):
            raise BadRequest(f"{what}: the broker of {topic} must be a text, not {broker!r}.")
        for partition, offset in row.items():
            if partition not in (INCARNATION, BROKER):
                number = _whole(offset, low, f"{what}: the {noun} in {topic}-{partition}")
                found[topic, _partition(partition, topic, what)] = Offset(incarnation, number, broker)
    return found


def assigned(value: Mapping[str, Any]) -> tuple[Key, ...]:
    """Of `assign`'s object: `{"orders": [0, 1]}`. Raises BadRequest."""
    found: list[Key] = []
    for topic, numbers in value.items():
        if not valid_name(topic):
            raise BadRequest(f"assign: {topic!r} is no topic's name, which is of A-Z a-z 0-9 . _ -.")
        if not isinstance(numbers, list) or not numbers:
            raise BadRequest(f"assign: {topic!r} must have a list of partitions, like [0, 1].")
        found += [(topic, _whole(each, 0, f"assign: a partition of {topic}")) for each in numbers]
    return tuple(sorted(set(found)))


def named(keys: Iterable[Key]) -> str:
    """orders-0, orders-1 and 3 more."""
    found = [f"{topic}-{partition}" for topic, partition in sorted(keys)]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _partition(word: str, topic: str, what: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise BadRequest(f"{what}: {word!r} is no partition of {topic}; a partition is a number in quotes.")
    return int(word)


def _whole(value: Any, low: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= OFFSET_MAX:
        raise BadRequest(f"{what} must be a whole number from {low} on, not {value!r}.")
    return value


# Where a query begins or ends in each partition, as a user says it: "earliest", "latest", offsets, times.

log = logging.getLogger("tfmq.spark")

IN_SECONDS = 100_000_000_000
"""A time below it, in ms, is meant in seconds."""


class Standing(NamedTuple):
    """A partition's log and how far it reaches."""

    log: PartitionLog
    bounds: Bounds


Survey = dict[Key, Standing]


class Places(NamedTuple):
    """`option` is what the user set. `everywhere`: EARLIEST or LATEST, or with `by_time` ms since 1970; `each`: for
    each partition instead. `strict`: a time behind all messages is refused, else it is the end.
    """

    option: str
    everywhere: int = LATEST
    each: Mapping[Key, Offset] | None = None
    by_time: bool = False
    strict: bool = False

    def resolve(self, logs: Logs, survey: Survey, losses: Losses) -> Offsets:
        """The offset in each partition of `survey`. Raises BadRequest, UnknownTopic; and what `losses` does where a
        user's offset is not there any more.
        """
        if self.each is not None:
            self._compare(survey)
        return {
            key: Offset(standing.log.incarnation, self._one(logs, key, standing, losses), logs.node())
            for key, standing in survey.items()
        }

    def later_than(self, other: Places) -> bool:
        """Whether both are times for all partitions, and this one is the later: a query between them reads nothing."""
        times = self.by_time and other.by_time and self.each is None and other.each is None
        return times and self.everywhere > other.everywhere

    def _compare(self, survey: Survey) -> None:
        """All partitions are named, and no others."""
        assert self.each is not None
        others = self.each.keys() - survey.keys()
        if others:
            topics = sorted({topic for topic, _ in survey})
            strange = [topic for topic, _ in sorted(others) if topic not in topics]
            meant = nearest(strange[0], topics) if strange else ""
            raise BadRequest(f"{self.option} names {named(others)}, which this query does not read.{meant}")
        missing = survey.keys() - self.each.keys()
        if missing:
            how = "with a time in ms since 1970" if self.by_time else "; -2 is the beginning, -1 the end"
            raise BadRequest(
                f"{self.option} says nothing of {named(missing)}: name every partition that is read"
                f"{' ' if self.by_time else ''}{how}."
            )

    def _one(self, logs: Logs, key: Key, standing: Standing, losses: Losses) -> int:
        log, bounds = standing
        given = Offset(0, self.everywhere) if self.each is None else self.each[key]
        if given.of_another(log.incarnation, logs.node()):
            raise UnknownTopic(
                f"{self.option} has offsets of another topic {log.topic}: one that was deleted, or another broker's."
            )
        if self.by_time:
            return self._time(logs, standing, given.offset)
        if given.offset in (EARLIEST, LATEST):
            return bounds.first if given.offset == EARLIEST else bounds.end
        return self._offset(logs, standing, given.offset, losses)

    def _time(self, logs: Logs, standing: Standing, ms: int) -> int:
        found = min(logs.at_time(standing.log, ms), standing.bounds.end)
        name = f"{standing.log.topic}-{standing.log.partition}"
        if self.strict and found == standing.bounds.end:
            raise BadRequest(
                f"{self.option}: nothing was appended to {name} at {ms} or later. Give"
                " an earlier time, or set startingOffsetsByTimestampStrategy to latest."
            )
        return found

    def _offset(self, logs: Logs, standing: Standing, offset: int, losses: Losses) -> int:
        """Where a user said a number of bytes."""
        (log, bounds), name = standing, f"{standing.log.topic}-{standing.log.partition}"
        if offset > bounds.end:
            raise BadRequest(f"{self.option}: {name} ends at {bounds.end}, before {offset}.")
        if offset < bounds.first:
            losses.lost(
                OffsetOutOfRange(
                    f"{self.option}: messages of {name} from offset {offset} to {bounds.first} are gone.",
                    first=bounds.first,
                    end=bounds.end,
                )
            )
            return bounds.first
        found = logs.at_or_after(log, offset)
        if found != offset:
            raise BadRequest(
                f"{self.option}: no message of {name} begins at {offset}; the next one does at {found}."
            )
        return offset


def starting(given: Mapping[str, Any], streaming: bool) -> Places:
    """Of the options that are given. Raises BadRequest."""
    option = only_one(given, "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
    strict = given.get("startingOffsetsByTimestampStrategy", "error") == "error"
    found = _places(given, option, strict) or Places("startingOffsets", LATEST if streaming else EARLIEST)
    if found.everywhere == LATEST and found.each is None and not streaming:
        raise BadRequest("startingOffsets cannot be latest in a batch: there is nothing to read behind it.")
    if not streaming and any(each.offset == LATEST for each in (found.each or {}).values()):
        raise BadRequest("startingOffsets cannot be -1 in a batch: there is nothing to read behind the end.")
    return found


def ending(given: Mapping[str, Any]) -> Places:
    """Of the options that are given, for a batch. Raises BadRequest."""
    option = only_one(given, "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
    found = _places(given, option, strict=False) or Places("endingOffsets", LATEST)
    earliest = any(each.offset == EARLIEST for each in (found.each or {}).values())
    if earliest or (found.each is None and found.everywhere == EARLIEST):
        raise BadRequest("endingOffsets cannot be earliest: there is nothing to read before it.")
    return found


def _places(given: Mapping[str, Any], option: str, strict: bool) -> Places | None:
    if not option:
        return None
    value = given[option]
    by_time = "Timestamp" in option
    if isinstance(value, dict):
        each = from_json(value, option, low=0 if by_time else EARLIEST, noun="time" if by_time else "place")
        return Places(option, each=each, by_time=by_time, strict=by_time and strict)
    if isinstance(value, int):
        if 0 < value < IN_SECONDS:
            log.warning("%s=%d lies in the year 1973 or before: times are milliseconds.", option, value)
        return Places(option, value, by_time=True, strict=strict)
    return Places(option, EARLIEST if value == "earliest" else LATEST)


# Which partitions a query reads: those of named topics, of all topics that a pattern matches, or named ones.


class Subscription(NamedTuple):
    """One of the three is not empty."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[Key, ...] = ()

    def wants(self, topic: str) -> bool:
        """Whether a topic of that name is meant."""
        if self.pattern:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics or any(topic == each[0] for each in self.assigned)

    def find(self, logs: Logs, *, lenient: bool = False) -> dict[Key, PartitionLog]:
        """The partitions that are there now. Raises UnknownTopic for a named topic that is not there, UnknownPartition
        likewise; `lenient`: they are left out.
        """
        found: dict[Key, PartitionLog] = {}
        for topic in self._topics(logs):
            try:
                found |= {(each.topic, each.partition): each for each in logs.partitions(topic)}
            except UnknownTopic:
                if not lenient and not self.pattern:
                    raise _unknown(logs, topic) from None
        if not self.assigned:
            return found
        missing = [key for key in self.assigned if key not in found]
        if missing and not lenient:
            raise UnknownPartition(f"assign: there is no partition {named(missing)}.")
        return {key: found[key] for key in self.assigned if key in found}

    def look_for(self, logs: Logs, there: Collection[Key]) -> None:
        """Raises what `find` does for the first that is named and not `there`."""
        topics = {topic for topic, _ in there}
        for topic in [] if self.pattern else self._topics(logs):
            if topic not in topics and topic not in logs.topics():
                raise _unknown(logs, topic)
        missing = [key for key in self.assigned if key not in there]
        if missing:
            raise UnknownPartition(f"assign: there is no partition {named(missing)}.")

    def _topics(self, logs: Logs) -> list[str]:
        if self.pattern:
            return sorted(topic for topic in logs.topics() if self.wants(topic))
        return sorted({*self.topics, *(topic for topic, _ in self.assigned)})


def _unknown(logs: Logs, topic: str) -> UnknownTopic:
    return UnknownTopic(
        f"There is no topic {topic!r}.{nearest(topic, logs.topics())} Look at the list of topics (tfmq topic list), or"
        " create it (tfmq topic create)."
    )


def subscription(given: Mapping[str, Any]) -> Subscription:
    """Of the options that are given. Raises BadRequest."""
    chosen = only_one(given, "subscribe", "subscribePattern", "assign", required=True)
    if chosen == "assign":
        return Subscription(assigned=assigned(given["assign"]))
    return Subscription(given.get("subscribe", ()), given.get("subscribePattern", ""))
