"""What is done with each thing that is found in the folder of the buckets: a table, labelled.

The checkpoint lists what counts, and whatever is listed was forced before. So there is nothing to guess: more bytes
than listed are of a spill that never ended, files that are not listed are of one, or counted once and count no more.
Their messages are in the arrivals, or in what the checkpoint lists instead.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple

from journal.filenames import CHECKPOINT_NAME, DAMAGED_SUFFIX, NEW_SUFFIX, REPAIRED_SUFFIX
from tfmq.delay.bucket_file import bucket_name, parse_bucket_name
from tfmq.delay.checkpoint import Listed


class Decision(Enum):
    """What an opening does."""

    USE = "use"
    CUT = "cut"
    REMOVE = "remove"
    REFUSE = "refuse"
    LEAVE = "leave"


class Row(NamedTuple):
    """A row of the table."""

    label: str
    decision: Decision


class Shape(Enum):
    """How a file is, beside what is listed."""

    WHOLE = "whole"
    LONGER = "longer"
    SHORTER = "shorter"
    MISSING = "missing"
    UNLISTED = "unlisted"
    UNFINISHED = "unfinished"
    FOREIGN = "foreign"


TABLE: Final = {
    Shape.WHOLE: Row("whole", Decision.USE),
    # A spill was written into it and never listed.
    Shape.LONGER: Row("unlisted chunks", Decision.CUT),
    # Forced bytes are gone: what is left is served, what is lost is named when it is read.
    Shape.SHORTER: Row("too short", Decision.USE),
    # No removal does that: files go after the checkpoint that lists them no more.
    Shape.MISSING: Row("missing", Decision.REFUSE),
    # Of a spill or a split that never ended, or settled, or cut into finer ones.
    Shape.UNLISTED: Row("unlisted", Decision.REMOVE),
    Shape.UNFINISHED: Row("unfinished", Decision.REMOVE),
    Shape.FOREIGN: Row("foreign", Decision.LEAVE),
}


class Found(NamedTuple):
    """One name, and what is done about it."""

    name: str
    row: Row
    listed: Listed | None


def decide(listed: Iterable[Listed], sizes: dict[str, int]) -> list[Found]:
    """A decision for each listed bucket and each name in the folder; `sizes` by name, of what is there."""
    expected = {bucket_name(each.span): each for each in listed}
    found = [Found(name, TABLE[_shape(sizes.get(name), each.size)], each) for name, each in expected.items()]
    rest = sorted(set(sizes) - set(expected) - {CHECKPOINT_NAME})
    return found + [Found(name, TABLE[_unlisted(name)], None) for name in rest]


def _shape(size: int | None, listed: int) -> Shape:
    if size is None:
        return Shape.MISSING
    if size == listed:
        return Shape.WHOLE
    return Shape.LONGER if size > listed else Shape.SHORTER


def _unlisted(name: str) -> Shape:
    if name == CHECKPOINT_NAME + NEW_SUFFIX:
        return Shape.UNFINISHED
    if name.endswith(REPAIRED_SUFFIX) and is_house_name(name):
        return Shape.UNFINISHED
    return Shape.UNLISTED if parse_bucket_name(name) is not None else Shape.FOREIGN


def is_house_name(name: str) -> bool:
    """True if buckets, their checkpoint or a repair of them may put a file of this name there."""
    for suffix in (NEW_SUFFIX, REPAIRED_SUFFIX, DAMAGED_SUFFIX):
        name = name.removesuffix(suffix)
    return name == CHECKPOINT_NAME or parse_bucket_name(name) is not None
