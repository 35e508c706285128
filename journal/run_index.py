"""The index file of a segment, searched where it lies: only the entries that a search meets are read.

For who looks into a log beside its owner and for one place at a time: loading a whole index costs the more the larger
the segment is, a search costs its logarithm. Each entry is checked by its CRC, and where it says that blocks begin, the
control record before that place has to say so too. Whatever is not as it should be raises `Unsound`: then the index is
made from the segment (`journal.index`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final
from zlib import crc32

from journal.block import Block
from journal.control import CONTROL_SIZE, decode_control
from journal.disk import File
from journal.errors import JournalError
from journal.header import BadRecord
from journal.index import ENTRY, ENTRY_SIZE, RUN_SIZE_MIN, Entry, Index, Place

_COVERED: Final = ENTRY_SIZE - 4
"""Bytes of an entry before its CRC."""

Pread = Callable[[int, int], bytes]
"""pread(size, position) of the segment."""
Blocks = Callable[[int], Iterator[Block]]
"""The sound blocks of the segment from a block's start on."""


BEHIND_BYTES_MAX: Final = 8 << 20
"""An owner leaves some MiB of its segment without entries; more means that entries are missing."""


class Unsound(JournalError):
    """The index file at `path` does not hold: nothing is lost, the segment has all of it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class RunIndex(Index):
    """An `Index` for searches alone: nothing can be added, nothing is written. `size` of the segment counts, however
    long the files are by now. Raises Unsound, OSError from every search."""

    def __init__(self, file: File, base: int, log_id: int, size: int, pread: Pread, blocks: Blocks) -> None:
        super().__init__(file.path, base, log_id)
        self._entries_file = file
        self._pread, self._blocks = pread, blocks
        self._entries: dict[int, Entry] = {}
        self._size = size
        self._rest: tuple[int | None, int] | None = None
        most = min(file.size() // ENTRY_SIZE, size // RUN_SIZE_MIN + 2)
        self._count = self._search(most, self._is_inside)
        if self._count:
            last = self.entry(-1)
            place = Place(last.position + last.size, last.first_ordinal + last.records)
            self._open = self._proven(place)
        self.end, self.end_ordinal = self._open
        if size - self.end > BEHIND_BYTES_MAX:
            raise Unsound(self.path, f"it ends at position {self.end} of {size}")

    def __len__(self) -> int:
        return self._count

    def entry(self, number: int) -> Entry:
        """One entry, read at its first use; -1 is the last."""
        number = number + self._count if number < 0 else number
        found = self._entries.get(number) or self._read(number)
        if found is None:
            raise Unsound(self.path, f"entry {number} is wrong")
        self._entries[number] = found
        return found

    @property
    def first_ordinal(self) -> int | None:
        return self.entry(0).first_ordinal if self._count else self._behind()[0]

    @property
    def newest_ms(self) -> int:
        known = self.entry(-1).append_time if self._count else 0
        return max(known, self._behind()[1])

    def by_position(self, position: int) -> Place:
        if not self._count or position >= self._open.position:
            return self._open
        count = self._search(self._count, lambda number: self.entry(number).position <= position)
        return self._place_of(count - 1)

    def by_ordinal(self, ordinal: int) -> Place:
        if not self._count or (self._open.ordinal is not None and ordinal >= self._open.ordinal):
            return self._open
        count = self._search(self._count, lambda number: self.entry(number).first_ordinal <= ordinal)
        return self._place_of(max(0, count - 1))

    def by_time(self, time_ms: int) -> Place:
        count = self._search(self._count, lambda number: self.entry(number).append_time < time_ms)
        return self._place_of(count) if count < self._count else self._open

    @staticmethod
    def _search(count: int, holds: Callable[[int], bool]) -> int:
        """How many of the first `count` numbers `holds` is true of; it is true up to some number, and not beyond."""
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if holds(middle) else (low, middle)
        return low

    def _is_inside(self, number: int) -> bool:
        found = self._read(number)
        return found is not None and found.position + found.size <= self._size

    def _read(self, number: int) -> Entry | None:
        """The entry if its CRC holds and it is of this log."""
        data = self._entries_file.pread(ENTRY_SIZE, number * ENTRY_SIZE)
        if len(data) < ENTRY_SIZE:
            return None
        ordinal, position, time, log_id, size, records, epoch, crc = ENTRY.unpack(data)
        if crc32(data[:_COVERED], self._seed) != crc or log_id != self._log_id:
            return None
        return Entry(ordinal, position, time, size, records, epoch)

    def _place_of(self, number: int) -> Place:
        entry = self.entry(number)
        return self._proven(Place(entry.position, entry.first_ordinal))

    def _proven(self, place: Place) -> Place:
        """`place`, if the control record before it ends there and counts up to its ordinal. Raises Unsound."""
        if not place.position:
            return place
        at = place.position - CONTROL_SIZE
        try:
            control = decode_control(self._pread(CONTROL_SIZE, at), 0, self._log_id)
        except BadRecord as error:
            raise Unsound(self.path, f"no block ends at position {place.position}") from error
        if control.end != self._base + at or control.next_ordinal != place.ordinal:
            raise Unsound(self.path, f"another block ends at position {place.position} than it says")
        return place

    def _behind(self) -> tuple[int | None, int]:
        """Of the blocks behind the last entry: the first ordinal, and the latest append time."""
        if self._rest is None:
            ordinal, newest = None, 0
            for block in self._blocks(self._open.position):
                ordinal = block.control.first_ordinal if ordinal is None else ordinal
                newest = max(newest, block.control.append_time)
            self._rest = ordinal, newest
        return self._rest
