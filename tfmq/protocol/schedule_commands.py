"""The requests and replies about schedules: messages that the broker sends by itself at the times of a cron
expression. Their codes stand with all others in `commands`.

A schedule, in replies, is a map: name, id, cron, timezone, topic, partition, misfire, state (active, paused, waiting),
trouble (why it waits), next_ms (0: none), last_ms (0: nothing was sent yet), made_ms, size (of the payload), tag,
properties (how many). The answer about one that is asked for by name has payload (nil: a tombstone) and attribute too.
"""

from typing import Annotated, Any, NamedTuple

from tfmq import limits
from tfmq.protocol.fields import ListOf, Map, Octets, Text, Whole
from tfmq.protocol.rows import Member, Number, PartitionOrNil, Plain, Topic, Words, Yes

Name = Topic
"""Of a schedule: letters and lengths as topics have them."""


class AddSchedule(NamedTuple):
    """Makes a schedule: from now on the body is sent to the topic at each time of the cron expression, in the time
    zone. Repeated in the same words it changes nothing. `attribute`: that of the records, without a time of birth.
    """

    name: Name
    cron: Annotated[str, Text(limits.CRON_BYTES, empty=False)]
    timezone: Annotated[str, Text(limits.CRON_BYTES, empty=False)]
    topic: Topic
    partition: PartitionOrNil = None
    misfire: Words = "one"
    attribute: Annotated[bytes, Octets(limits.ATTRIBUTE_BYTES)] = b""
    tombstone: Yes = False


class AddScheduleReply(NamedTuple):
    schedule: Plain
    made: Yes


class ListSchedules(NamedTuple):
    """Schedules in the order of their names, from the one behind `after` on; with `name` only that one."""

    name: Member = ""
    after: Member = ""
    limit: Annotated[int, Whole(1, limits.SCHEDULES_PER_PAGE)] = int(limits.SCHEDULES_PER_PAGE)


class ListSchedulesReply(NamedTuple):
    schedules: Annotated[list[dict[str, Any]], ListOf(Map(), limits.SCHEDULES_PER_PAGE)]
    more: Yes


class PauseSchedule(NamedTuple):
    """Sends nothing of it until it is resumed; times that pass meanwhile are not missed."""

    name: Name


class PauseScheduleReply(NamedTuple):
    schedule: Plain


class ResumeSchedule(NamedTuple):
    """Goes on with the next time from now, also where the wall clock was set back behind what it sent last."""

    name: Name


class ResumeScheduleReply(NamedTuple):
    schedule: Plain


class RemoveSchedule(NamedTuple):
    """Forgets it. With an `id` only if it is that one, so that a repeat cannot hit one made anew under the name."""

    name: Name
    id: Number = 0


class RemoveScheduleReply(NamedTuple):
    removed: Yes
