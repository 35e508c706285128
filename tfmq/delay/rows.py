"""Messages of one target that are due, in the order of their turns: columns, filled behind and emptied in front."""

from array import array
from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

from tfmq.delay.requests import Turn

SHIFT_MIN: Final = 4096
"""Below so many rows that are gone in front the columns are not moved."""


class Part(NamedTuple):
    """Some of the rows, as columns of one length; `flags`: 1 where the sender named a time of the wall clock."""

    dues: "array[int]"
    numbers: "array[int]"
    locators: "array[int]"
    flags: bytearray

    def turn(self, index: int) -> Turn:
        return Turn(self.dues[index], self.numbers[index])

    def cut(self, count: int) -> "Part":
        """The first `count` of them."""
        if count == len(self.dues):
            return self
        dues, numbers, locators, flags = self
        return Part(dues[:count], numbers[:count], locators[:count], flags[:count])


def no_part() -> Part:
    """None, to be filled."""
    return Part(array("Q"), array("Q"), array("Q"), bytearray())


NO_PART: Final = no_part()


class Rows:
    """See the module: 25 bytes each."""

    def __init__(self) -> None:
        self.dues = array("Q")
        self.numbers = array("Q")
        self.locators = array("Q")
        self.flags = bytearray()
        self._gone = 0

    def __len__(self) -> int:
        return len(self.dues) - self._gone

    def add(self, part: Part) -> None:
        """Behind all others: their turns are higher."""
        dues, numbers, locators, flags = part
        self.dues.extend(dues)
        self.numbers.extend(numbers)
        self.locators.extend(locators)
        self.flags.extend(flags)

    def first(self) -> Turn:
        """The lowest turn. IndexError without rows."""
        return Turn(self.dues[self._gone], self.numbers[self._gone])

    def last(self) -> Turn:
        """The highest turn. IndexError without rows."""
        return Turn(self.dues[-1], self.numbers[-1])

    def head(self, count: int) -> Part:
        """The first `count` rows, or as many as there are."""
        start, end = self._gone, min(self._gone + count, len(self.dues))
        dues, numbers, locators = self.dues[start:end], self.numbers[start:end], self.locators[start:end]
        return Part(dues, numbers, locators, self.flags[start:end])

    def drop(self, count: int) -> None:
        """The first `count` are gone."""
        self._gone += count
        if self._gone == len(self.dues):
            self.clear()
        elif self._gone > SHIFT_MIN and 2 * self._gone > len(self.dues):
            for column in (self.dues, self.numbers, self.locators, self.flags):
                del column[: self._gone]
            self._gone = 0

    def drop_through(self, turn: Turn) -> int:
        """Those up to that turn are gone; how many."""
        count = self._count_through(turn)
        self.drop(count)
        return count

    def _count_through(self, turn: Turn) -> int:
        start, dues, numbers = self._gone, self.dues, self.numbers
        first = bisect_left(dues, turn.due, start)
        end = bisect_right(dues, turn.due, first)
        return bisect_right(numbers, turn.number, first, end) - start

    def holds(self, turn: Turn) -> bool:
        """Whether that message is among them."""
        count = self._count_through(turn)
        return (
            bool(count)
            and Turn(self.dues[self._gone + count - 1], self.numbers[self._gone + count - 1]) == turn
        )

    def clear(self) -> None:
        """None are left."""
        self.dues, self.numbers, self.locators, self.flags = array("Q"), array("Q"), array("Q"), bytearray()
        self._gone = 0
