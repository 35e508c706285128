"""Ranges of a partition that Spark reads, and how they are split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from journal.record.format import FLAG_FILLER, FLAG_TRAILER, records_of
from tfmq.bounded_msgpack import Buffer
from tfmq.limits import MIB

Item = TypeVar("Item")

READ_BYTES: Final = 4 * MIB
"""Bytes per read: smaller reads need more round trips and calls, and larger reads are not faster."""


class PartitionLog(NamedTuple):
    """The log of one partition of one incarnation of a topic."""

    topic: str
    partition: int
    incarnation: int
    log_id: int

    @property
    def name(self) -> str:
        """The partition's display name, like orders-0."""
        return f"{self.topic}-{self.partition}"


class Bounds(NamedTuple):
    """Offset and ordinal of a log's first record, and those at its durable offset. Ordinal -1: damage hides it."""

    first: int
    end: int
    first_ordinal: int
    end_ordinal: int


class OffsetRange(NamedTuple):
    """The records of `log` with `start` <= offset < `end`; both are offsets where records begin, or began before a
    repair."""

    log: PartitionLog
    start: int
    end: int


class BlockRun(NamedTuple):
    """Consecutive whole blocks of a log, with their block trailers; `data` begins at `offset`."""

    offset: int
    data: Buffer


def message_offsets(blocks: BlockRun) -> list[int]:
    """Return the offsets of the messages in `blocks`; block trailers, and fillers for lost records, are left out."""
    no_message = FLAG_TRAILER | FLAG_FILLER
    return [blocks.offset + each.position for each in records_of(blocks.data) if not each.flag & no_message]


def next_message(blocks: BlockRun, offset: int) -> int | None:
    """Return the offset of the first message in `blocks` at or after `offset`; None if there is none."""
    return min((each for each in message_offsets(blocks) if each >= offset), default=None)


def split_targets(whole: OffsetRange, size: int) -> list[int]:
    """Return the offsets, not necessarily of records, that split `whole` into equal parts of up to `size` bytes."""
    length = whole.end - whole.start
    count = -(-length // max(1, size))
    return [whole.start + length * number // count for number in range(1, count)]


def group_small(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> list[list[Item]]:
    """Group adjacent items so that each group has a total size of up to `most` bytes, or is a single larger item."""
    groups: list[list[Item]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if size > room or not groups:
            groups.append([])
            room = most
        groups[-1].append(item)
        room -= size
    return groups


def split_range(whole: OffsetRange, cuts: Iterable[int]) -> list[OffsetRange]:
    """Split `whole` at `cuts`, which must be starts of records. Cuts outside of `whole` are ignored."""
    if whole.end <= whole.start:
        return []
    inside = sorted({cut for cut in cuts if whole.start < cut < whole.end})
    return [OffsetRange(whole.log, *pair) for pair in pairwise([whole.start, *inside, whole.end])]
