"""Delayed messages as columns of one length, as they lie in a chunk of a bucket: no object for each of them.

Everything here runs in C over whole columns, where it can; a message costs some hundred nanoseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, compress
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

Numbers: TypeAlias = "array[int]"

SLOT_SHIFT: Final = 48
"""A locator: the slot of a bucket above the position in its file."""
POSITION_MASK: Final = (1 << SLOT_SHIFT) - 1
SLOTS_MAX: Final = (1 << 16) - 1
"""Buckets that may be there at once: slot 0 means the arrivals."""


class Target(NamedTuple):
    """Where messages go: a partition's log, and its name for people (`topic-partition` or the topic)."""

    log_id: int
    topic: str


class Columns(NamedTuple):
    """`dues`, `numbers`: array('Q'); `targets`: array('I'), indices into `table`; `sizes`: array('I'), of the records;
    `flags`: 1 where the sender named a time of the wall clock; `positions`: array('Q'), where in the file each begins,
    as `Buckets.read` wants them. In the order in which they lie in the file, not of their turns.
    """

    dues: Numbers
    numbers: Numbers
    targets: Numbers
    sizes: Numbers
    flags: bytes
    positions: Numbers
    table: Sequence[Target]

    def __len__(self) -> int:
        return len(self.dues)
