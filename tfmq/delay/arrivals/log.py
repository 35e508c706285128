"""The arrival log.

Every delayed batch is appended here first, after its header, and read from here. Specified in
docs/formats/arrivals.md. The number of a delayed message is the ordinal of its record in this log. All data is
verified before use: by the checksum of its block, or of its record.
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
"""Small, because spilled arrivals are deleted by whole segments.

The minimum for the largest batch.
"""

READ_BYTES: Final = 1 << 20
"""Bytes of one read of the log for a spill or a start."""

_LENGTH_FLAG: Final = Struct(">I12xI")

Damaged = Callable[[Corrupt], None]
"""Called with a range of the log that cannot be read; its messages are lost."""


def arrival_options(
    flush_messages: int, flush_seconds: float, segment_bytes: int = SEGMENT_BYTES
) -> LogOptions:
    """Return the options of the log; it has no retention by age or size."""
    return LogOptions(
        segment_bytes=segment_bytes,
        flush_messages=flush_messages,
        flush_seconds=flush_seconds,
        suffix=ARRIVALS_SUFFIX,
    )


Noted = Callable[[Note, int], None]
"""Called with a header and its offset in the log."""


class ArrivedBatch(NamedTuple):
    """Consecutive records of one header in the log: a batch, or the part of it in one block.

    `dues` (array of u64, ms), `absolute` (bytes 0 or 1), `sizes` (array of u32, whole records) and `offsets` (array of
    u64, in the log) have one value a message; message n has the number `first_number + n`. `low` and `high`: the
    lowest and highest due time. `data`: the bytes of the records, one buffer, valid as long as it is referenced.
    `ahead_ms`: by how many ms broker time was ahead of the wall clock, for absolute times.
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
    """Return a batch that contains only a header."""
    return Batch(encode_note(note), (), PRODUCER_ID, 0, 1)


def record_offsets(data: Buffer, positions: Sequence[tuple[int, int]]) -> array[int]:
    """Return the offset in the log of each record of an appended batch.

    `positions` as in `journal.record.batch.Appended`. Runs without Python code for each message if all have one size.
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
    """Yield the arrivals between two ends of appends, in order.

    `on_header` is called with each header. May run in a worker. Raises Corrupt if the log is damaged, unless
    `on_damage` is given: then damage is skipped. Raises BelowStart, BeyondEnd (`upto` is below `to_offset`: nothing is
    left out silently), OSError, Closed.
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
                passed = (
                    from_offset  # damage between the index entry and here: it is recorded now, so retry once
                )
                continue
            if damaged is None or error.next <= from_offset:
                raise
            damaged(error)
            from_offset = error.next
            reading.forget()


def damaged_ranges(log: Log, from_offset: int) -> list[Corrupt]:
    """Return the damage from the end of an append up to the durable offset. Raises OSError."""
    found: list[Corrupt] = []
    for _ in read(log, max(from_offset, log.first_offset), log.forced_offset, damaged=found.append):
        pass
    return found


def _verified(log: Log, data: bytes | bytearray, start: int) -> Iterator[Block]:
    """Yield the blocks in `data`. Raises Corrupt instead of BadRecord."""
    position = 0
    try:
        for block in blocks_of(data, start, log.log_id):
            position = block.next - start
            yield block
    except BadRecord as error:
        end = _behind(data, start, position, log.log_id)
        raise Corrupt(log.folder, start + position, end, error.reason) from None


def _behind(data: bytes | bytearray, start: int, position: int, log_id: int) -> int:
    """Return the offset of the next block after the bad one at `position`, or the end of `data`."""
    claim = find_next_control(data, position, offset=start, log_id=log_id)
    if claim is None:
        return start + len(data)
    bad = claim.control.offset == start + position
    return claim.control.next if bad else claim.control.offset


class _Reading:
    """Parses blocks in order, and tracks the header that the next records belong to."""

    def __init__(self, noted: Noted | None) -> None:
        self._noted = noted
        self._note: Note | None = None
        self._done = 0

    def forget(self) -> None:
        """Discard the current header: the next block does not follow the last one."""
        self._note = None

    def block(self, block: Block) -> Iterator[ArrivedBatch]:
        """Yield the arrivals in a block."""
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
                "%d delayed messages have no due time: their headers before offset %d of the arrival log are lost",
                orphans,
                block.next,
            )

    def _begin(self, record: bytes, offset: int) -> None:
        self._done = 0
        self._note = None
        try:
            header = decode_note(record)
        except BadNote as error:
            logger.error("invalid arrival header at offset %d: %s", offset, error.reason)
            return
        if header.records:
            self._note = header
        if self._noted is not None:
            self._noted(header, offset)

    def _skip(self, count: int) -> None:
        """Skip records that were lost by damage; a repair has replaced them with a filler."""
        self._done += count
        if self._note is not None and self._done >= self._note.records:
            self._note = None

    def _take(self, note: Note, data: bytes, position: int, offset: int, number: int) -> ArrivedBatch:
        """Return the records of `header` from `position` on, up to the end of the block."""
        sizes, offsets, end = _columns(data, position, offset, note.records - self._done)
        dues = note.dues.part(self._done, self._done + len(sizes))
        self._done += len(sizes)
        if self._done == note.records:
            self._note = None
        view = memoryview(data)[position:end]
        columns = (*dues, offsets, sizes, [view])
        return ArrivedBatch(note.log_id, note.topic, number, *columns, note.ahead_ms)


def _columns(data: bytes, position: int, offset: int, wanted: int) -> tuple[array[int], array[int], int]:
    """Return (sizes, offsets, end) of at most `wanted` records.

    `position` in `data` is `offset` in the log.
    """
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
    """Return the header of the batch that starts with `first_number`.

    None if it is truncated or damaged. Used to reply to a batch that is sent again. In a worker. Raises OSError,
    Closed.
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


# Reading single records by offset.

PROOFS_MAX: Final = 32
"""Maximum of blocks that are verified in a call that must not wait: about 2 ms.

More are left to a worker.
"""

GAP_BYTES: Final = 4096
GAP_BYTES_SLOW: Final = 16 << 10
"""One read covers records up to this far apart.

Copying the gap costs less than another call. The second value is for reads that may wait for the disk.
"""

HINT_MIN: Final = 64
HINT_MAX: Final = 4096
"""Bounds of the bytes that are read for the last record, because its size is not known.

The largest record of the call before is assumed; a larger one costs a second read.
"""

NO_LIMIT: Final = 1 << 62

Found: TypeAlias = list[bytes | None]


class ArrivedRecords:
    """Reads durable records by offset. One thread at a time; several readers may share `verified`.

    A block that was not verified before is read as a whole and verified by its checksum. From a verified block single
    records are read, neighbours together, and verified by their own checksums.
    """

    def __init__(self, log: Log, proven: Proven | None = None) -> None:
        self._log = log
        self._proven = Proven() if proven is None else proven
        self._start = 0
        self._data = b""
        """The block that was verified last."""
        self._found: Found = []
        self._left = 0
        """Bytes that may still be read."""
        self._gap = GAP_BYTES
        self._hint = HINT_MIN
        self._largest = 0

    def read(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> Found:
        """Read the whole records at these offsets; None for a damaged one, which is logged.

        The result is shorter if `bytes_max` is reached, but has at least one record; the record that reaches the limit
        is the last one. Fastest if offsets ascend. Raises BelowStart (truncated), BeyondEnd (not durable, or no such
        offset), NotARecord, OSError, Closed.
        """
        found = self._read(offsets, bytes_max, False)
        assert found is not None, "a read that may wait answers"
        return found

    def read_cached(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> Found | None:
        """Like `read`, but return None if that would wait for the disk, be slow, or must log damage."""
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
        """Read and verify the block of `offset`.

        Return False if that would wait, or the block is damaged.
        """
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
        """Copy the records from `index` on that are in the current block.

        Return the index after them.
        """
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
        """Read the record at `index` and its neighbours from a verified block that ends at `end`.

        Return the index after them; `index` itself if the whole block must be read.
        """
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
            pass  # known damage: it is logged when the block is verified
        return index


BLOCKS_MAX: Final = 65_536
"""Maximum of remembered blocks, some megabytes; with more, the cache is cleared."""


class Proven:
    """Blocks of the arrival log with a verified checksum. Thread-safe.

    Single records can be read from them. The file does not change any more, and the checksum of each record is
    verified at each read.
    """

    def __init__(self) -> None:
        self._adding = Lock()
        self._starts: list[int] = []
        """Sorted."""
        self._ends: dict[int, int] = {}
        """By start. A start is added here before it is added to `_starts`."""

    def end_of(self, offset: int) -> int:
        """Return the end of the verified block that contains `offset`; 0 if there is none."""
        starts, ends = self._starts, self._ends
        number = bisect_right(starts, offset) - 1
        end = ends.get(starts[number], 0) if number >= 0 else 0
        return end if offset < end else 0

    def add(self, start: int, end: int) -> None:
        """Record that a block is verified."""
        with self._adding:
            if start in self._ends:
                return
            if len(self._starts) >= BLOCKS_MAX:
                # Replace the collections instead of clearing them: another thread may be reading them.
                self._starts, self._ends = [], {}
            self._ends[start] = end
            self._starts.insert(bisect_left(self._starts, start), start)
