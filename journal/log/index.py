"""The block index of a segment: where to begin to look for an offset, an ordinal or a time.

One entry covers a run of whole control blocks of at least 64 KiB (the last one of a sealed segment may be
shorter), so that a million single sends do not make a million entries. The entries follow each other without
a gap, from the start of the segment. The file is a copy of what memory holds, appended to without a force and
wholly derived from the control records: `load` takes as many of its entries as are sound, and the segment
adds the rest by walking.

    first ordinal u64 | position u64 | append time u64 | log id u64 | size u32 | records u32 | epoch u32 | CRC
    u32

Big-endian, 48 bytes. The CRC-32 goes over the segment's first offset (8 bytes) and the entry's first 44, so
an entry of another segment does not pass. docs/formats/index.md is the page of this format.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from journal.disk import Disk, File, write_all
from journal.errors import JournalError
from journal.record.block import Block
from journal.record.block_trailer import CONTROL_SIZE, Control, decode_control
from journal.record.format import BadRecord

ENTRY: Final = Struct(">QQQQIIII")
ENTRY_SIZE: Final = ENTRY.size
_CRC: Final = Struct(">I")
_BASE: Final = Struct(">Q")

RUN_SIZE_MIN: Final = 64 << 10
"""Bytes that an entry covers at least: what a search inside a run must walk at most, unless one block is
larger."""

WRITE_COUNT: Final = 16
"""Entries are written so many at a time: one small write per MiB of records, and a MiB to walk after a
crash."""


class Entry(NamedTuple):
    """A run of control blocks: `position` and `size` in the segment, `append_time` the latest in the segment
    up to the run's end (ms), `epoch` that of its last block."""

    first_ordinal: int
    position: int
    append_time: int
    size: int
    records: int
    epoch: int


class Place(NamedTuple):
    """A block of the segment begins at `position`, and its first record has `ordinal`; None: nobody knows
    yet."""

    position: int
    ordinal: int | None


class Index:
    """The entries of one segment, and the run that is not full yet. Not thread-safe for changes; searches may
    run beside `add`, which only appends."""

    def __init__(self, path: str, base: int, log_id: int) -> None:
        self.path = path
        self.fault: str | None = None
        """Why the file was not taken as it was; None: it was sound."""
        self._log_id = log_id
        self._seed = crc32(_BASE.pack(base))
        self._base = base
        self._ordinals = array("Q")
        self._positions = array("Q")
        self._times = array("Q")
        self._epochs = array("I")
        self._written = 0
        self._file: File | None = None
        self._open = Place(0, None)
        self.end = 0
        """The position up to which blocks were added."""
        self.end_ordinal: int | None = None
        """The ordinal behind them; None as long as there are none."""
        self._time = 0
        self._epoch = 0

    @classmethod
    def load(cls, disk: Disk, path: str, base: int, log_id: int, size: int) -> Index:
        """The sound entries of the file at `path` that lie inside a segment of `size` bytes, from the first
        on.

        `fault` says what was missing or wrong; the bad rest is overwritten by the next write. No more is read
        than a segment of that size can need. Raises OSError.
        """
        index = cls(path, base, log_id)
        if not disk.exists(path):
            index.fault = "missing"
            return index
        file = disk.open_read(path)
        try:
            data = file.pread(min(file.size(), (size // RUN_SIZE_MIN + 2) * ENTRY_SIZE), 0)
        finally:
            file.close()
        index.fault = index._take(data, size)
        return index

    def __len__(self) -> int:
        """The count of entries."""
        return len(self._ordinals)

    def entries(self) -> Iterator[Entry]:
        """Every entry, in order."""
        for number in range(len(self)):
            yield self.entry(number)

    def entry(self, number: int) -> Entry:
        """One entry; -1 is the last."""
        count = len(self)
        number = number + count if number < 0 else number
        place = self._place(number)
        behind = self._place(number + 1) if number + 1 < count else self._open
        ordinal = place.ordinal or 0
        size = behind.position - place.position
        records = (behind.ordinal or 0) - ordinal
        return Entry(ordinal, place.position, self._times[number], size, records, self._epochs[number])

    @property
    def first_ordinal(self) -> int | None:
        """The ordinal of the segment's first record; None as long as no block was added."""
        return self._ordinals[0] if len(self) else self._open.ordinal

    @property
    def newest_ms(self) -> int:
        """The latest append time (ms) of the blocks added; 0: none."""
        return self._time

    def add(self, control: Control) -> None:
        """The next control block of the segment. Between it and the one before may be damage, which its run
        then covers."""
        if self._open.ordinal is None:
            self._open = Place(self._open.position, control.first_ordinal)
        self.end = control.next - self._base
        self.end_ordinal = control.next_ordinal
        self._time = max(self._time, control.append_time)
        self._epoch = control.epoch
        if self.end - self._open.position >= RUN_SIZE_MIN:
            self.close_run()

    def close_run(self) -> None:
        """Makes an entry of the open run, however short: when the segment is sealed."""
        position, ordinal = self._open
        if self.end == position or ordinal is None:
            return
        # The ordinals come last, since their count is the count of entries for a search in another thread.
        self._times.append(self._time)
        self._epochs.append(self._epoch)
        self._positions.append(position)
        self._ordinals.append(ordinal)
        self._open = Place(self.end, self.end_ordinal)

    def cut(self, position: int) -> None:
        """Forgets every run that ends behind `position`; the caller adds the blocks of the rest again."""
        while len(self) and self._open.position > position:
            self._open = Place(self._positions.pop(), self._ordinals.pop())
            self._times.pop()
            self._epochs.pop()
        if not len(self):
            self._open = Place(0, None)
        self.end, self.end_ordinal = self._open
        self._time = self._times[-1] if len(self) else 0
        self._epoch = self._epochs[-1] if len(self) else 0
        self._written = min(self._written, len(self))

    def by_position(self, position: int) -> Place:
        """The last known block start at or before `position`."""
        count = len(self)
        if not count or position >= self._open.position:
            return self._open
        return self._place(bisect_right(self._positions, position, 0, count) - 1)

    def by_ordinal(self, ordinal: int) -> Place:
        """The last known block start whose first ordinal is at most `ordinal`; the segment's start if none
        is."""
        count = len(self)
        if not count or (self._open.ordinal is not None and ordinal >= self._open.ordinal):
            return self._open
        return self._place(max(0, bisect_right(self._ordinals, ordinal, 0, count) - 1))

    def by_time(self, time_ms: int) -> Place:
        """A block start such that the first block appended at or after `time_ms` is not before it."""
        count = len(self)
        number = bisect_left(self._times, time_ms, 0, count)
        return self._place(number) if number < count else self._open

    def write(self, disk: Disk, *, all: bool = True) -> None:
        """Appends the entries that the file lacks; not `all`: only once WRITE_COUNT of them have gathered.

        Never forces. Raises Full or OSError; the entries stay due.
        """
        due = len(self) - self._written
        if due < (1 if all else WRITE_COUNT) and not (all and self.fault):
            return
        if self._file is None:
            self._file = disk.open_write(self.path) if disk.exists(self.path) else disk.create(self.path)
        position = self._written * ENTRY_SIZE
        if self._file.size() != position:
            self._file.truncate(position)
        data = b"".join(self._encode(number) for number in range(self._written, len(self)))
        if data:
            write_all(self._file, [data], position)
        self._written = len(self)
        self.fault = None

    def close(self) -> None:
        """Gives the file back. Entries that are not written are made anew from the segment when it is
        opened."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _take(self, data: bytes, size: int) -> str | None:
        """Takes sound entries from `data`; answers what is wrong with the first that is not."""
        for place in range(0, len(data) - ENTRY_SIZE + 1, ENTRY_SIZE):
            ordinal, position, time, log_id, run_size, records, epoch, crc = ENTRY.unpack_from(data, place)
            if (
                crc32(data[place : place + ENTRY_SIZE - _CRC.size], self._seed) != crc
                or log_id != self._log_id
            ):
                return f"entry {place // ENTRY_SIZE} is wrong"
            start, first = self._open
            if position != start or not run_size or first not in (None, ordinal):
                return f"entry {place // ENTRY_SIZE} does not follow the one before"
            if position + run_size > size:
                return f"entry {place // ENTRY_SIZE} lies behind the segment's end"
            self._ordinals.append(ordinal)
            self._positions.append(position)
            self._times.append(time)
            self._epochs.append(epoch)
            self._open = Place(position + run_size, ordinal + records)
            self.end, self.end_ordinal = self._open
            self._time, self._epoch = max(self._time, time), epoch
            self._written += 1
        return "the last entry is short" if len(data) % ENTRY_SIZE else None

    def _place(self, number: int) -> Place:
        return Place(self._positions[number], self._ordinals[number])

    def _encode(self, number: int) -> bytes:
        ordinal, position, time, size, records, epoch = self.entry(number)
        head = ENTRY.pack(ordinal, position, time, self._log_id, size, records, epoch, 0)[: -_CRC.size]
        return head + _CRC.pack(crc32(head, self._seed))


# The index file of a segment, searched where it lies: only the entries that a search meets are read.
#
# For who looks into a log beside its owner and for one place at a time: loading a whole index costs the more the larger
# the segment is, a search costs its logarithm. Each entry is checked by its CRC, and where it says that blocks begin,
# the control record before that place has to say so too. Whatever is not as it should be raises `Unsound`: then the
# index is made from the segment (`journal.log.index`).

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
