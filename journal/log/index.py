"""The index of a segment. It says where in the segment to start the search for an offset, an ordinal or a time.

One entry covers a run: consecutive whole blocks with together at least 64 KiB, except in the last run of a sealed
segment. The index file is a copy of the index in memory. It is written without an fsync, because the index can be
rebuilt from the block trailers: `load` accepts the entries before the first invalid one; `Segment` rebuilds the others.
The format is in docs/formats/index.md.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
from struct import Struct
from typing import Final, NamedTuple

from journal.crc32 import crc32
from journal.disk import Disk, File, write_all
from journal.errors import JournalError
from journal.record.block import Block
from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, decode_trailer
from journal.record.format import BadRecord

ENTRY: Final = Struct(">QQQQIIII")
ENTRY_SIZE: Final = ENTRY.size
_CRC: Final = Struct(">I")
_BASE: Final = Struct(">Q")

RUN_SIZE_MIN: Final = 64 << 10
"""Minimum bytes of the blocks in a run. A search reads at most this much after the start of the run, unless one block
is larger."""

WRITE_COUNT: Final = 16
"""Entries are written in groups of this number, one small write per MiB of records. After a crash the entries of at
most one group are missing and are rebuilt from the segment."""


class IndexEntry(NamedTuple):
    """An entry: a run of blocks at `position` in the segment, of `size` bytes, with `records` ordinals.

    `append_time`: latest append time (ms) in the segment up to the end of the run. `epoch`: epoch of the last block.
    """

    first_ordinal: int
    position: int
    append_time: int
    size: int
    records: int
    epoch: int


class IndexPosition(NamedTuple):
    """Start of a block in the segment, and the ordinal of the block's first record; None if the ordinal is unknown."""

    position: int
    ordinal: int | None


class SegmentIndex:
    """Index of a segment: entries, and the open run of blocks without an entry. One thread adds, others may search."""

    def __init__(self, path: str, base: int, log_id: int) -> None:
        self.path = path
        self.fault: str | None = None
        """What was missing or invalid in the file when it was loaded; None if the file was valid."""
        self._log_id = log_id
        self._seed = crc32(_BASE.pack(base))
        self._base = base
        self._ordinals = array("Q")
        self._positions = array("Q")
        self._times = array("Q")
        self._epochs = array("I")
        self._written = 0
        self.is_due = False
        """True if the file lacks WRITE_COUNT entries or more, so that it should be written."""
        self._file: File | None = None
        self._open_run = IndexPosition(0, None)
        self.end = 0
        """Position in the segment up to which blocks were added."""
        self.end_ordinal: int | None = None
        """Ordinal after the added blocks; None if there are none."""
        self._time = 0
        self._epoch = 0

    @classmethod
    def load(cls, disk: Disk, path: str, base: int, log_id: int, size: int) -> SegmentIndex:
        """Load the valid entries of the file at `path` for a segment of `size` bytes. Raises OSError.

        The result's `fault` says what is missing or invalid in the file. The next `write` replaces the invalid entries.
        """
        index = cls(path, base, log_id)
        if not disk.exists(path):
            index.fault = "missing"
            return index
        with closing(disk.open_read(path)) as file:
            data = file.pread(min(file.size(), (size // RUN_SIZE_MIN + 2) * ENTRY_SIZE), 0)
        index.fault = index._append_valid(data, size)
        return index

    def __len__(self) -> int:
        return len(self._ordinals)

    def entries(self) -> Iterator[IndexEntry]:
        for number in range(len(self)):
            yield self.entry(number)

    def entry(self, number: int) -> IndexEntry:
        """Return the entry `number`, counted from 0; -1 is the last."""
        count = len(self)
        number = number + count if number < 0 else number
        position = self._position_of(number)
        following = self._position_of(number + 1) if number + 1 < count else self._open_run
        ordinal = position.ordinal or 0
        size = following.position - position.position
        records = (following.ordinal or 0) - ordinal
        return IndexEntry(ordinal, position.position, self._times[number], size, records, self._epochs[number])

    def begins_like(self, other: SegmentIndex) -> bool:
        """Whether all entries of this index are the first entries of `other`. Quick, because no entry is decoded."""
        count = len(self)
        return (
            count <= len(other)
            and self._ordinals == other._ordinals[:count]
            and self._positions == other._positions[:count]
            and self._times == other._times[:count]
            and self._epochs == other._epochs[:count]
            and (not count or self.entry(-1) == other.entry(count - 1))
        )

    @property
    def first_ordinal(self) -> int | None:
        """Ordinal of the segment's first record; None if no block was added."""
        return self._ordinals[0] if len(self) else self._open_run.ordinal

    @property
    def newest_ms(self) -> int:
        """Latest append time (ms) of the added blocks; 0 if there are none."""
        return self._time

    def add(self, control: BlockTrailer) -> None:
        """Add the next block. Damaged bytes between the previous block and this block become part of the open run."""
        position, ordinal = self._open_run
        if ordinal is None:
            self._open_run = IndexPosition(position, control.first_ordinal)
        self.end = control.offset + control.size + TRAILER_SIZE - self._base
        self.end_ordinal = control.first_ordinal + control.records
        self._time = max(self._time, control.append_time)
        self._epoch = control.epoch
        if self.end - position >= RUN_SIZE_MIN:
            self.close_run()

    def close_run(self) -> None:
        """End the open run with an entry, even if the run is short; called when the segment is sealed."""
        position, ordinal = self._open_run
        if self.end == position or ordinal is None:
            return
        # The ordinals are appended last, because a search in another thread takes their count as the number of entries.
        self._times.append(self._time)
        self._epochs.append(self._epoch)
        self._positions.append(position)
        self._ordinals.append(ordinal)
        self._open_run = IndexPosition(self.end, self.end_ordinal)
        self.is_due = len(self._ordinals) - self._written >= WRITE_COUNT

    def truncate(self, position: int) -> None:
        """Remove all runs that end after `position`. The caller then calls `add` for their blocks before `position`."""
        while len(self) and self._open_run.position > position:
            self._open_run = IndexPosition(self._positions.pop(), self._ordinals.pop())
            self._times.pop()
            self._epochs.pop()
        if not len(self):
            self._open_run = IndexPosition(0, None)
        self.end, self.end_ordinal = self._open_run
        self._time = self._times[-1] if len(self) else 0
        self._epoch = self._epochs[-1] if len(self) else 0
        self._written = min(self._written, len(self))
        self.is_due = False

    def by_position(self, position: int) -> IndexPosition:
        """Return the start of the last run that starts at or before `position`."""
        count = len(self)
        if not count or position >= self._open_run.position:
            return self._open_run
        return self._position_of(self._runs_until(position, count) - 1)

    def run_end(self, position: int) -> int:
        """Return the end of the run that starts at `position`, which a search has returned."""
        count = len(self)
        number = self._runs_until(position, count)
        if number < count:
            return self.entry(number).position
        return self._open_run.position if position < self._open_run.position else self.end

    def by_ordinal(self, ordinal: int) -> IndexPosition:
        """Return the start of the last run whose first ordinal is at most `ordinal`, or else of the first run."""
        count = len(self)
        if not count or (self._open_run.ordinal is not None and ordinal >= self._open_run.ordinal):
            return self._open_run
        return self._position_of(max(0, bisect_right(self._ordinals, ordinal, 0, count) - 1))

    def by_time(self, time_ms: int) -> IndexPosition:
        """Return the start of the run in which to search for the first block appended at or after `time_ms`."""
        count = len(self)
        number = bisect_left(self._times, time_ms, 0, count)
        return self._position_of(number) if number < count else self._open_run

    def write(self, disk: Disk) -> None:
        """Append the entries that the file lacks, without an fsync. If this raises Full or OSError, the next call
        writes these entries again."""
        if len(self) == self._written and not self.fault:
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
        self.is_due = False
        self.fault = None

    def close(self) -> None:
        """Close the file. Entries that it lacks are rebuilt from the segment when the index is loaded."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _append_valid(self, data: bytes, size: int) -> str | None:
        """Add the entries in `data` up to the first invalid one. Return why it is invalid, or None if all are valid."""
        for begin in range(0, len(data) - ENTRY_SIZE + 1, ENTRY_SIZE):
            entry = self._decode(data[begin : begin + ENTRY_SIZE])
            if entry is None:
                return f"entry {begin // ENTRY_SIZE} is wrong"
            ordinal, position, time, run_size, records, epoch = entry
            start, first = self._open_run
            if position != start or not run_size or first not in (None, ordinal):
                return f"entry {begin // ENTRY_SIZE} does not follow the one before"
            if position + run_size > size:
                return f"entry {begin // ENTRY_SIZE} is after the segment's end"
            self._ordinals.append(ordinal)
            self._positions.append(position)
            self._times.append(time)
            self._epochs.append(epoch)
            self._open_run = IndexPosition(position + run_size, ordinal + records)
            self.end, self.end_ordinal = self._open_run
            self._time, self._epoch = max(self._time, time), epoch
            self._written += 1
        return "the last entry is short" if len(data) % ENTRY_SIZE else None

    def _runs_until(self, position: int, count: int) -> int:
        """Return how many of the first `count` entries start at or before `position`."""
        return bisect_right(self._positions, position, 0, count)

    def _position_of(self, number: int) -> IndexPosition:
        return IndexPosition(self._positions[number], self._ordinals[number])

    def _decode(self, data: bytes) -> IndexEntry | None:
        """Decode an entry; None if it is short, or its CRC or its log id is wrong."""
        if len(data) < ENTRY_SIZE:
            return None
        ordinal, position, time, log_id, size, records, epoch, crc = ENTRY.unpack(data)
        if crc32(data[: ENTRY_SIZE - _CRC.size], self._seed) != crc or log_id != self._log_id:
            return None
        return IndexEntry(ordinal, position, time, size, records, epoch)

    def _encode(self, number: int) -> bytes:
        ordinal, position, time, size, records, epoch = self.entry(number)
        head = ENTRY.pack(ordinal, position, time, self._log_id, size, records, epoch, 0)[: -_CRC.size]
        return head + _CRC.pack(crc32(head, self._seed))


UNINDEXED_BYTES_MAX: Final = 8 << 20
"""Maximum bytes at the end of a segment that have no entries in the index file; if there are more, the file is invalid.
Entries may be missing at the end, because the log's owner writes entries in groups."""


class InvalidIndex(JournalError):
    """The index file at `path` is invalid. No data is lost: the index can be rebuilt from the segment."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class OnDiskIndex(SegmentIndex):
    """An index that is searched in its file, for a process that reads another process's log.

    A search reads O(log n) of the n entries, `SegmentIndex.load` reads all. Each entry that is used is verified by its
    CRC, and by the segment: a block trailer must end at the position that the entry names. `size`: bytes of the segment
    that are searched, even if the segment has grown since. `pread(size, position)` reads the segment.
    `blocks(position)` yields the segment's valid blocks from `position` on, which is the start of a block. The
    constructor and every search may raise InvalidIndex, OSError.
    """

    def __init__(
        self,
        file: File,
        base: int,
        log_id: int,
        size: int,
        pread: Callable[[int, int], bytes],
        blocks: Callable[[int], Iterator[Block]],
    ) -> None:
        super().__init__(file.path, base, log_id)
        self._entries_file = file
        self._pread, self._blocks = pread, blocks
        self._entries: dict[int, IndexEntry] = {}

        def is_outside(number: int) -> bool:
            found = self._read(number)
            return found is None or found.position + found.size > size

        most = min(file.size() // ENTRY_SIZE, size // RUN_SIZE_MIN + 2)
        self._count = bisect_left(range(most), True, key=is_outside)
        if self._count:
            last = self.entry(-1)
            position = IndexPosition(last.position + last.size, last.first_ordinal + last.records)
            self._open_run = self._verify(position)
        self.end, self.end_ordinal = self._open_run
        if size - self.end > UNINDEXED_BYTES_MAX:
            raise InvalidIndex(self.path, f"it ends at position {self.end} of {size}")

    def __len__(self) -> int:
        return self._count

    def entry(self, number: int) -> IndexEntry:
        """Return the entry `number`, counted from 0 and read at its first use; -1 is the last."""
        number = number + self._count if number < 0 else number
        found = self._entries.get(number) or self._read(number)
        if found is None:
            raise InvalidIndex(self.path, f"entry {number} is wrong")
        self._entries[number] = found
        return found

    @property
    def first_ordinal(self) -> int | None:
        return self.entry(0).first_ordinal if self._count else self._after_last_entry[0]

    @property
    def newest_ms(self) -> int:
        known = self.entry(-1).append_time if self._count else 0
        return max(known, self._after_last_entry[1])

    def by_position(self, position: int) -> IndexPosition:
        if not self._count or position >= self._open_run.position:
            return self._open_run
        return self._position_of(self._runs_until(position, self._count) - 1)

    def by_ordinal(self, ordinal: int) -> IndexPosition:
        if not self._count or (self._open_run.ordinal is not None and ordinal >= self._open_run.ordinal):
            return self._open_run
        count = bisect_right(range(self._count), ordinal, key=lambda number: self.entry(number).first_ordinal)
        return self._position_of(max(0, count - 1))

    def by_time(self, time_ms: int) -> IndexPosition:
        count = bisect_left(range(self._count), time_ms, key=lambda number: self.entry(number).append_time)
        return self._position_of(count) if count < self._count else self._open_run

    def _read(self, number: int) -> IndexEntry | None:
        return self._decode(self._entries_file.pread(ENTRY_SIZE, number * ENTRY_SIZE))

    def _runs_until(self, position: int, count: int) -> int:
        return bisect_right(range(count), position, key=lambda number: self.entry(number).position)

    def _position_of(self, number: int) -> IndexPosition:
        entry = self.entry(number)
        return self._verify(IndexPosition(entry.position, entry.first_ordinal))

    def _verify(self, position: IndexPosition) -> IndexPosition:
        """Return `position` if the block that ends at `position.position` has the next ordinal `position.ordinal`.

        Raises InvalidIndex if not.
        """
        if not position.position:
            return position
        at = position.position - TRAILER_SIZE
        try:
            trailer = decode_trailer(self._pread(TRAILER_SIZE, at), 0, self._log_id)
        except BadRecord as error:
            raise InvalidIndex(self.path, f"no block ends at position {position.position}") from error
        if trailer.end != self._base + at or trailer.next_ordinal != position.ordinal:
            raise InvalidIndex(self.path, f"another block ends at position {position.position} than it says")
        return position

    @cached_property
    def _after_last_entry(self) -> tuple[int | None, int]:
        """(first ordinal, latest append time) of the blocks after the last entry; (None, 0) if there are none."""
        ordinal, newest = None, 0
        for block in self._blocks(self._open_run.position):
            ordinal = block.control.first_ordinal if ordinal is None else ordinal
            newest = max(newest, block.control.append_time)
        return ordinal, newest
