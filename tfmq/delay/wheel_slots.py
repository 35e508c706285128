"""The lists of the wheel: messages as columns, 24 bytes each."""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

DUE_BITS: Final = 40
"""A due is kept relative to the base: 34 years of milliseconds."""
TARGET_BITS: Final = 23
"""Targets that have something in the wheel at the same time: eight million, above the limit of partitions."""
TARGET_SHIFT: Final = 1
DUE_SHIFT: Final = TARGET_SHIFT + TARGET_BITS
TARGET_MASK: Final = (1 << TARGET_BITS) - 1
ABSOLUTE: Final = 1
"""The lowest bit: its sender named a time of the wall clock."""
TAG_MASK: Final = (1 << DUE_SHIFT) - 1
DUE_SPAN: Final = 1 << DUE_BITS
TARGETS_MAX: Final = 1 << TARGET_BITS


class Entries(NamedTuple):
    """Messages as columns of one length, in the order of their turns. Each column is the receiver's own."""

    dues: "array[int]"
    numbers: "array[int]"
    locators: "array[int]"
    tags: "array[int]"
    """Target, absolute bit: see `tag`."""

    def __len__(self) -> int:
        return len(self.dues)


def tag(target: int, absolute: bool) -> int:
    """Where a message goes and whether its sender named a time of the wall clock, as one number."""
    return target << TARGET_SHIFT | absolute


class Slot:
    """One list of the ring: columns in the order in which they came."""

    __slots__ = ("due_min", "locators", "numbers", "packed")

    def __init__(self) -> None:
        self.numbers: array[int] = array("Q")
        self.locators: array[int] = array("Q")
        self.packed: array[int] = array("Q")
        self.due_min = DUE_SPAN
        """Relative to the base; nothing in it is due before."""

    def part(self, rows: Sequence[int]) -> "Slot":
        """These rows, in this order."""
        part = Slot()
        part.numbers = array("Q", map(self.numbers.__getitem__, rows))
        part.locators = array("Q", map(self.locators.__getitem__, rows))
        part.packed = array("Q", map(self.packed.__getitem__, rows))
        return part

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        part = self.part(rows)
        self.numbers, self.locators, self.packed = part.numbers, part.locators, part.packed
        self.due_min = min(self.packed) >> DUE_SHIFT
