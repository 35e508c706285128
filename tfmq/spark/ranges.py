"""What is read of a partition: the log, its bounds, ranges of it, and the pieces into which a range is cut."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

from journal.record.format import FLAG_CONTROL, FLAG_FILLER, records_of
from tfmq.bounded_msgpack import Buffer
from tfmq.limits import MIB

CHUNK_BYTES: Final = 4 * MIB
"""Asked for at once: fewer cost round trips and calls, more gain nothing."""


class PartitionLog(NamedTuple):
    """One partition of one incarnation of a topic; a topic that is made anew has other ones."""

    topic: str
    partition: int
    incarnation: int
    log_id: int

    @property
    def name(self) -> str:
        """As people write it: orders-0."""
        return f"{self.topic}-{self.partition}"


class Bounds(NamedTuple):
    """Offsets of the first record and of the forced mark, which is the end of what may be read; and the numbers
    (ordinals) of the records there, -1 where damage hides them."""

    first: int
    end: int
    first_ordinal: int
    end_ordinal: int


class Range(NamedTuple):
    """The records of `log` that start at an offset from `start` on and before `end`. Both are record starts."""

    log: PartitionLog
    start: int
    end: int


class Chunk(NamedTuple):
    """Whole control blocks; the first byte of `data` lies at `offset`."""

    offset: int
    data: Buffer


def message_starts(block: Chunk) -> list[int]:
    """Offsets at which the messages of whole blocks begin: neither control records nor fillers are any."""
    no_message = FLAG_CONTROL | FLAG_FILLER
    return [block.offset + each.position for each in records_of(block.data) if not each.flag & no_message]


def targets(whole: Range, size: int) -> list[int]:
    """The offsets near which `whole` is to be cut, for pieces of one size, at most `size` bytes; [] where it stays as
    it is."""
    length = whole.end - whole.start
    count = -(-length // max(1, size))
    return [whole.start + length * number // count for number in range(1, count)]


def pieces(whole: Range, cuts: Iterable[int]) -> list[Range]:
    """`whole` cut at those of the offsets `cuts` that lie inside of it; no piece is empty."""
    if whole.end <= whole.start:
        return []
    inside = sorted({cut for cut in cuts if whole.start < cut < whole.end})
    return [Range(whole.log, *pair) for pair in pairwise([whole.start, *inside, whole.end])]
