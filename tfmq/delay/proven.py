"""Blocks of the arrivals whose checksum was right once: of these, records are read without the rest of the block.

What lies in the file does not change any more, and a record's own checksum is looked at each time.
"""

from bisect import bisect_left, bisect_right
from threading import Lock
from typing import Final

BLOCKS_MAX: Final = 65_536
"""So many are remembered, some megabytes; with more, all are proven anew."""


class Proven:
    """See the module. Any thread."""

    def __init__(self) -> None:
        self._adding = Lock()
        self._starts: list[int] = []
        """Sorted."""
        self._ends: dict[int, int] = {}
        """By start; it has each start before `_starts` does."""

    def end_of(self, offset: int) -> int:
        """Where the proven block that holds `offset` ends; 0: it is not known to be proven."""
        starts, ends = self._starts, self._ends
        number = bisect_right(starts, offset) - 1
        end = ends.get(starts[number], 0) if number >= 0 else 0
        return end if offset < end else 0

    def add(self, start: int, end: int) -> None:
        """The block has been proven."""
        with self._adding:
            if start in self._ends:
                return
            if len(self._starts) >= BLOCKS_MAX:
                # New ones, not emptied ones: somebody may be looking into these.
                self._starts, self._ends = [], {}
            self._ends[start] = end
            self._starts.insert(bisect_left(self._starts, start), start)
