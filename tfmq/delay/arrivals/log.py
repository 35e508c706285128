"""The arrivals: the one log in which every delayed batch lands, whole, behind its note. docs/formats/arrivals.md.

The number of a delayed message is the ordinal of its record here. Whatever is read here was proven by the checksum of
its block.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from threading import Lock
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from journal.errors import BelowStart, BeyondEnd, Corrupt, NotARecord
from journal.log.log import Log, Upto
from journal.log.reader import Bytes
from journal.log.segments import LogOptions
from journal.record.batch import Batch
from journal.record.block import Block, blocks_of, find_next_control
from journal.record.format import (
    COLUMNS_COUNT_MIN,
    FLAG_FILLER,
    HEADER,
    HEADER_SIZE,
    LENGTH,
    BadRecord,
    Buffer,
    make_log_id,
    plain_flags,
    same_length,
    walk,
)
from tfmq.delay.arrivals.header import NOTE_ID, PRODUCER_ID, BadNote, Note, decode_note, encode_note

logger = logging.getLogger("tfmq.delay")

LOG_ID: Final = make_log_id(2, 0)
ARRIVALS_SUFFIX: Final = ".arrivals"

SEGMENT_BYTES: Final = 64 << 20
"""Small, since what is in the buckets goes by whole segments; the least that takes the largest batch."""

READ_BYTES: Final = 1 << 20
"""One read of the log for a spill or a start."""

_LENGTH_FLAG: Final = Struct(">I12xI")

Damaged = Callable[[Corrupt], None]
"""Told of a range of the log that cannot be read; the messages in it are lost to whoever reads."""


def arrival_options(
    flush_messages: int, flush_seconds: float, segment_bytes: int = SEGMENT_BYTES
) -> LogOptions:
    """How the log is kept: nothing of it goes by age or size."""
    return LogOptions(
        segment_bytes=segment_bytes,
        flush_messages=flush_messages,
        flush_seconds=flush_seconds,
        suffix=ARRIVALS_SUFFIX,
    )


Noted = Callable[[Note, int], None]
"""Told of a note, and where it lies."""


class ArrivedBatch(NamedTuple):
    """Records that lie in a row in the log, all of one note: a batch, or as much of it as one block has.

    `dues` (array of u64, ms), `absolute` (a byte 0 or 1), `sizes` (array of u32, whole records) and `offsets` (array of
    u64, in the log) have one value a message; the n-th message's number is `first_number + n`. `low` and `high` are
    the first and the last of the dues. `data`: the records' bytes, one buffer, valid as long as it is kept. `ahead_ms`:
    by how much broker time was ahead of the wall clock, for those of `absolute`.
    """

    log_id: int
    topic: str
    first_number: int
    dues: array[int]
    absolute: bytes
    low: int
    high: int
    offsets: array[int]
    sizes: array[int]
    data: Sequence[Buffer]
    ahead_ms: int = 0


def batches_of(
    note: Note,
    body: Buffer,
    blocks: Sequence[tuple[int, int, int]],
    producer_id: int,
    sequence: int,
    count: int,
) -> list[Batch]:
    """The two batches of one append: the note, and the records as their producer sent them
    (`journal.record.batch.Batch`).
    """
    return [note_batch(note), Batch(body, blocks, producer_id, sequence, count)]


def note_batch(note: Note) -> Batch:
    """A note alone, as a cancel is."""
    return Batch(encode_note(note), (), PRODUCER_ID, 0, 1)


def record_offsets(data: Buffer, positions: Sequence[tuple[int, int]]) -> array[int]:
    """Where each record of an appended batch lies in the log: `positions` as in `journal.record.batch.Appended`.

    Without a step of Python for a message where all have one size.
    """
    plain = data if isinstance(data, bytes | bytearray) else bytes(data)
    size = HEADER_SIZE + LENGTH.unpack_from(plain)[0]
    if len(plain) % size == 0 and same_length(plain, 0, len(plain), size):
        starts: Sequence[int] = range(0, len(plain), size)
    else:
        starts = walk(plain)
    found = array("Q")
    ends = [index for index, _ in positions[1:]] + [len(starts)]
    for (index, offset), end in zip(positions, ends, strict=True):
        shift = offset - starts[index]
        part = starts[index:end]
        if isinstance(part, range):
            part = range(part.start + shift, part.stop + shift, size)
            found.extend(part)
        else:
            found.extend(map(shift.__add__, part))
    return found


def read(
    log: Log,
    from_offset: int,
    to_offset: int,
    *,
    upto: Upto = "forced",
    damaged: Damaged | None = None,
    noted: Noted | None = None,
) -> Iterator[ArrivedBatch]:
    """What arrived from the append's end `from_offset` up to the append's end `to_offset`, in order; `noted` is told of
    each note on the way.

    May run in a worker. Raises Corrupt where the log is damaged, unless `damaged` is given: then it goes on behind.
    Raises BelowStart, BeyondEnd (`upto` does not reach so far: nothing is left out without a word), OSError, Closed.
    """
    reading, passed = _Reading(noted), -1
    while from_offset < to_offset:
        try:
            chunk = log.read(from_offset, min(READ_BYTES, to_offset - from_offset), upto=upto)
            if not chunk.data:
                raise BeyondEnd(to_offset, from_offset)
            for block in _verified(log, chunk.data, chunk.start):
                from_offset = block.next
                yield from reading.block(block)
        except Corrupt as error:
            if error.next <= from_offset and passed < from_offset:
                passed = from_offset  # the way there led through it: from now on it is known, and passed by
                continue
            if damaged is None or error.next <= from_offset:
                raise
            damaged(error)
            from_offset = error.next
            reading.forget()


def damaged_ranges(log: Log, from_offset: int) -> list[Corrupt]:
    """What of the log is damaged from the append's end `from_offset` on, up to the forced mark. Raises OSError."""
    found: list[Corrupt] = []
    for _ in read(log, max(from_offset, log.first_offset), log.forced_offset, damaged=found.append):
        pass
    return found


def _verified(log: Log, data: bytes | bytearray, start: int) -> Iterator[Block]:
    """Raises Corrupt instead of BadRecord."""
    position = 0
    try:
        for block in blocks_of(data, start, log.log_id):
            position = block.next - start
            yield block
    except BadRecord as error:
        end = _behind(data, start, position, log.log_id)
        raise Corrupt(log.folder, start + position, end, error.reason) from None


def _behind(data: bytes | bytearray, start: int, position: int, log_id: int) -> int:
    """The offset where blocks begin again behind the bad one at `position`, else the end of what was read."""
    claim = find_next_control(data, position, offset=start, log_id=log_id)
    if claim is None:
        return start + len(data)
    bad = claim.control.offset == start + position
    return claim.control.next if bad else claim.control.offset


class _Reading:
    """Goes through blocks in order and knows which note the next records belong to."""

    def __init__(self, noted: Noted | None) -> None:
        self._noted = noted
        self._note: Note | None = None
        self._done = 0

    def forget(self) -> None:
        """What comes next does not follow what came before."""
        self._note = None

    def block(self, block: Block) -> Iterator[ArrivedBatch]:
        """What the next block holds."""
        data = bytes(block.data)
        position, end = 0, len(data)
        ordinal, orphans = block.control.first_ordinal, 0
        while position < end:
            length, checksum, id, flag = HEADER.unpack_from(data, position)
            count, size = 1, HEADER_SIZE + length
            if id == NOTE_ID and not flag:
                self._begin(data[position : position + size], block.offset + position)
            elif flag & FLAG_FILLER:
                count = checksum
                self._skip(count)
            elif self._note is None:
                orphans += 1
            else:
                batch = self._take(self._note, data, position, block.offset + position, ordinal)
                yield batch
                count, size = len(batch.sizes), len(batch.data[0])
            ordinal += count
            position += size
        if orphans:
            logger.error(
                "nobody knows when %d delayed messages are due: their notes before offset %d of the arrivals are lost",
                orphans,
                block.next,
            )

    def _begin(self, record: bytes, offset: int) -> None:
        self._done = 0
        self._note = None
        try:
            note = decode_note(record)
        except BadNote as error:
            logger.error("the arrivals' note at offset %d says nothing: %s", offset, error.reason)
            return
        if note.records:
            self._note = note
        if self._noted is not None:
            self._noted(note, offset)

    def _skip(self, count: int) -> None:
        """Damage took these; a repair left a filler in their place."""
        self._done += count
        if self._note is not None and self._done >= self._note.records:
            self._note = None

    def _take(self, note: Note, data: bytes, position: int, offset: int, number: int) -> ArrivedBatch:
        """The records of `note` from `position` on, up to the last of them or the end of the block."""
        sizes, offsets, end = _columns(data, position, offset, note.records - self._done)
        dues = note.dues.part(self._done, self._done + len(sizes))
        self._done += len(sizes)
        if self._done == note.records:
            self._note = None
        view = memoryview(data)[position:end]
        columns = (*dues, offsets, sizes, [view])
        return ArrivedBatch(note.log_id, note.topic, number, *columns, note.ahead_ms)


def _columns(data: bytes, position: int, offset: int, wanted: int) -> tuple[array[int], array[int], int]:
    """(sizes, offsets, end) of at most `wanted` records from `position` on, which lies at `offset` of the log."""
    size = HEADER_SIZE + LENGTH.unpack_from(data, position)[0]
    if wanted == 1:
        return array("I", (size,)), array("Q", (offset,)), position + size
    count = min(wanted, (len(data) - position) // size)
    end = position + count * size
    if (
        count >= COLUMNS_COUNT_MIN
        and same_length(data, position, end, size)
        and plain_flags(data, position, end, size)
    ):
        return array("I", (size,)) * count, array("Q", range(offset, offset + count * size, size)), end
    sizes: list[int] = []
    offsets: list[int] = []
    shift, end, unpack = offset - position, len(data), _LENGTH_FLAG.unpack_from
    while position < end and len(sizes) < wanted:
        length, flag = unpack(data, position)
        if flag & FLAG_FILLER:
            break
        sizes.append(HEADER_SIZE + length)
        offsets.append(position + shift)
        position += HEADER_SIZE + length
    return array("I", sizes), array("Q", offsets), position


def note_before(log: Log, first_number: int) -> Note | None:
    """The note of the batch whose first message has `first_number`: None where it is given up, or damaged.

    For the answer to a batch that is sent again. In a worker. Raises OSError, Closed.
    """
    if first_number <= log.first_ordinal or first_number > log.end_ordinal:
        return None
    try:
        offset, ordinal = log.offset_of_ordinal(first_number - 1)
        block = log.block_of_record(offset, upto="written") if ordinal == first_number - 1 else None
        return None if block is None else _note_at(block, offset - block.offset)
    except (Corrupt, BelowStart, BeyondEnd, NotARecord):
        return None


def _note_at(block: Block, position: int) -> Note | None:
    size = HEADER_SIZE + LENGTH.unpack_from(block.data, position)[0]
    try:
        return decode_note(block.data[position : position + size])
    except BadNote:
        return None


# Records of the arrivals, as firing wants them: by their offsets, each proven.
#
# A block that was not looked at before is read whole, and proven by its checksum. Of a proven one
# single records are read, neighbours together, and proven by their own checksums.

PROOFS_MAX: Final = 32
"""More blocks are not proven in one call that must not wait: that is some two milliseconds' work, for a worker."""

GAP_BYTES: Final = 4096
GAP_BYTES_SLOW: Final = 16 << 10
"""One read takes records up to this far apart: to copy what lies between costs less than another call, also where that
would wait for the disk."""

HINT_MIN: Final = 64
HINT_MAX: Final = 4096
"""Read from the last record's beginning on, whose size is not known before: as much as the largest had in the call
before, within these; what is larger costs a second read."""

NO_LIMIT: Final = 1 << 62

Found: TypeAlias = list[bytes | None]


class ArrivedRecords:
    """Records below the log's forced mark. One thread at a time; several may share what is `proven`."""

    def __init__(self, log: Log, proven: Proven | None = None) -> None:
        self._log = log
        self._proven = Proven() if proven is None else proven
        self._start = 0
        self._data = b""
        """The block that was proven last."""
        self._found: Found = []
        self._left = 0
        """Bytes that are still wanted."""
        self._gap = GAP_BYTES
        self._hint = HINT_MIN
        self._largest = 0

    def read(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> Found:
        """The whole records that begin at these offsets; None for a damaged one, which the server's log names.

        Fewer where `bytes_max` is passed: the one with which it is comes last, and at least one comes. Fastest where
        offsets rise. Raises BelowStart (given up), BeyondEnd (not forced, or no such offset), NotARecord, OSError,
        Closed.
        """
        found = self._read(offsets, bytes_max, False)
        assert found is not None, "a read that may wait answers"
        return found

    def read_cached(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> Found | None:
        """As `read`; None where that would wait for the disk, take long, or must name damage."""
        return self._read(offsets, bytes_max, True)

    def _read(self, offsets: Sequence[int], bytes_max: int, cached: bool) -> Found | None:
        found: Found = []
        self._found, self._left, self._largest = found, max(1, bytes_max), 0
        self._gap = GAP_BYTES if cached else GAP_BYTES_SLOW
        index, count, proofs, end_of = 0, len(offsets), 0, self._proven.end_of
        with self._log.unproven(cached=cached) as unproven:
            while index < count and self._left > 0:
                offset, before = offsets[index], index
                if 0 <= offset - self._start < len(self._data):
                    index = self._cut(offsets, index)
                elif end := end_of(offset):
                    index = self._cut_unproven(offsets, index, end, unproven)
                if index > before:
                    continue
                proofs += 1
                if cached and proofs > PROOFS_MAX:
                    return None
                if not self._prove(offset, cached):
                    if cached:
                        return None
                    found.append(None)
                    index += 1
        if self._largest:
            self._hint = min(max(self._largest, HINT_MIN), HINT_MAX)
        return found

    def _prove(self, offset: int, cached: bool) -> bool:
        """Reads the block that holds `offset`; False if that would wait for the disk, or the block is damaged."""
        try:
            block = self._log.block_of_record(offset, cached=cached)
        except Corrupt as error:
            if not cached:
                logger.error("a delayed message cannot be read: %s", error)
            return False
        if block is None:
            return False
        self._start, self._data = block.offset, bytes(block.data)
        self._proven.add(block.offset, block.offset + len(block.data))
        return True

    def _cut(self, offsets: Sequence[int], index: int) -> int:
        """Those from `index` on that lie in the block in memory; the index behind them."""
        start, data, left, length = self._start, self._data, self._left, LENGTH.unpack_from
        size, count = len(data), len(offsets)
        while index < count and 0 <= (at := offsets[index] - start) < size and left > 0:
            end = at + HEADER_SIZE
            if end <= size:
                end += length(data, at)[0]
            if end > size:
                raise NotARecord(offsets[index])
            self._found.append(data[at:end])
            left -= end - at
            index += 1
        self._left = left
        return index

    def _cut_unproven(self, offsets: Sequence[int], index: int, end: int, unproven: Bytes) -> int:
        """The record at `index`, and neighbours behind it, of a proven block that ends at `end`; the index behind them.
        The same index: its block has to be looked at."""
        first = last = offsets[index]
        behind, count, limit = index + 1, len(offsets), min(end, first + self._left)
        while behind < count and last < offsets[behind] < limit and offsets[behind] - last < self._gap:
            last = offsets[behind]
            behind += 1
        try:
            read = unproven(first, min(last + self._hint, end) - first)
            if read is None:
                return index
            data = bytes(read)
            while index < behind:
                at = offsets[index] - first
                if at + HEADER_SIZE > len(data):
                    break
                length, checksum, _, _ = HEADER.unpack_from(data, at)
                size = HEADER_SIZE + length
                record = data if size == len(data) else data[at : at + size]
                if len(record) < size:
                    more = unproven(first + at, size) if size <= end - first - at else None
                    if more is None or len(more) < size:
                        break
                    record = bytes(more)
                if crc32(record[HEADER_SIZE:]) != checksum:
                    break
                self._found.append(record)
                self._left -= size
                if size > self._largest:
                    self._largest = size
                index += 1
        except Corrupt:
            pass  # known damage, which the look at the block names
        return index


BLOCKS_MAX: Final = 65_536
"""So many are remembered, some megabytes; with more, all are proven anew."""


class Proven:
    """Blocks of the arrivals whose checksum was right once: of these, records are read without the rest of the block.

    What lies in the file does not change any more, and a record's own checksum is looked at each time.

    Any thread.
    """

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
