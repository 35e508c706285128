"""A limit for a micro-batch, shared among partitions; and ranges of partitions, shared among tasks. Pure."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from tfmq.spark.logs import Range

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
