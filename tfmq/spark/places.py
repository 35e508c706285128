"""Where a query begins or ends in each partition, as a user says it: "earliest", "latest", offsets, times."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfmq.errors import BadRequest, OffsetOutOfRange, UnknownTopic
from tfmq.spark.logs import Bounds, Logs, PartitionLog
from tfmq.spark.offsets import EARLIEST, LATEST, Key, Offset, Offsets, from_json, named
from tfmq.spark.options import nearest, only_one
from tfmq.spark.sentences import Losses

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

    def later_than(self, other: "Places") -> bool:
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
