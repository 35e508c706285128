"""How far a query is, as it stands in Spark's checkpoint:

    {"orders": {"0": 4096, "1": 123, "incarnation": 7, "broker": "9f0c..."}}

For each topic the offset of each partition, where the next message is read; the incarnation of the topic, by which a
topic that was deleted and made anew is told from the one that was read; and the id of the broker, which counts
incarnations for itself. `startingOffsets` takes the same, with or without these two. Spark compares two of them by
their text, so equal ones have the same order.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tfmq.errors import BadRequest
from tfmq.limits import valid_name

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
