"""The arrival log, in which every delayed batch is stored first.

Before each batch, the log has an arrival header with the partition and the due times of the batch. Specified in
docs/formats/arrivals.md. The number of a delayed message is the ordinal of its record in this log. Before data is
used, it is verified by the checksum of its block or of its record.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from threading import Lock
from typing import Final, NamedTuple, TypeAlias

from journal.crc32 import crc32
from journal.errors import BelowStart, BeyondEnd, Corrupt, NotARecord
from journal.log.log import Log, Upto
from journal.log.options import LogOptions
from journal.log.reader import RawRead
from journal.record.batch import Batch
from journal.record.block import Block, blocks_of
from journal.record.block_trailer import find_next_trailer
from journal.record.format import (
    COLUMNS_COUNT_MIN,
    FLAG_FILLER,
    HEADER,
    HEADER_SIZE,
    LENGTH,
    BadRecord,
    Buffer,
    has_no_special_flags,
    header_positions,
    make_log_id,
    sizes_are_equal,
)
from tfmq.delay.arrivals.header import (
    HEADER_ID,
    PRODUCER_ID,
    ArrivalHeader,
    BadArrivalHeader,
    decode_header,
    encode_header,
)

logger = logging.getLogger("tfmq.delay")

LOG_ID: Final = make_log_id(2, 0)
ARRIVALS_SUFFIX: Final = ".arrivals"

SEGMENT_BYTES: Final = 64 << 20
"""Size of a segment. Any batch fits. It is small, because a segment is deleted only when all of it is in buckets."""

READ_BYTES: Final = 1 << 20
"""Size of one read of the log, at a start or when messages are written to buckets."""

_LENGTH_FLAG: Final = Struct(">I12xI")

DamageCallback = Callable[[Corrupt], None]
"""Called with a damaged range of the log, whose messages cannot be read and are lost."""


def arrival_options(flush_messages: int, flush_seconds: float, segment_bytes: int = SEGMENT_BYTES) -> LogOptions:
    return LogOptions(
        segment_bytes=segment_bytes, flush_messages=flush_messages, flush_seconds=flush_seconds, suffix=ARRIVALS_SUFFIX
    )


HeaderCallback = Callable[[ArrivalHeader, int], None]
"""Called with a header and its offset in the log."""


class ArrivalBatch(NamedTuple):
    """The batch after one header, or the part of this batch that is in one block.

    Four columns have one value for each message: `dues` (u64, ms), `absolute` (1 where the sender set an absolute time,
    else 0), `sizes` (u32, of whole records) and `offsets` (u64, in the log). Message n has the number `first_number +
    n`. `low` and `high`: the lowest and the highest due time. `data`: one buffer with the bytes of the records.
    `ahead_ms`: by how many ms broker time was ahead of the wall clock when absolute times were converted.
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


def arrival_batches(
    header: ArrivalHeader,
    body: Buffer,
    blocks: Sequence[tuple[int, int, int]],
    producer_id: int,
    sequence: int,
    count: int,
) -> list[Batch]:
    """Return two batches for one append: the encoded `header`, and the records (from the other parameters)."""
    return [header_batch(header), Batch(body, blocks, producer_id, sequence, count)]


def header_batch(header: ArrivalHeader) -> Batch:
    return Batch(encode_header(header), (), PRODUCER_ID, 0, 1)


def record_offsets(data: Buffer, positions: Sequence[tuple[int, int]]) -> array[int]:
    """Return the offset in the log of each record of an append. `data`: the bytes of these records.

    `positions`: (index among the records, offset) of the first record, and of each record after a block trailer.
    """
    plain = data if isinstance(data, bytes | bytearray) else bytes(data)
    size = HEADER_SIZE + LENGTH.unpack_from(plain)[0]
    if len(plain) % size == 0 and sizes_are_equal(plain, 0, len(plain), size):
        starts: Sequence[int] = range(0, len(plain), size)
    else:
        starts = header_positions(plain)
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


def read_batches(
    log: Log,
    from_offset: int,
    to_offset: int,
    *,
    upto: Upto = "forced",
    on_damage: DamageCallback | None = None,
    on_header: HeaderCallback | None = None,
) -> Iterator[ArrivalBatch]:
    """Yield the batches in the log between two offsets, both of which are ends of appends. May run in a worker.

    Damaged ranges are passed to `on_damage` and skipped; without `on_damage`, Corrupt is raised. Raises BeyondEnd if
    the log is not durable (with `upto`="written": not written) up to `to_offset`, so that no message is left out
    silently. Raises BelowStart if `from_offset` is truncated; OSError, Closed.
    """
    reading, passed = _BatchParser(on_header), -1
    while from_offset < to_offset:
        try:
            chunk = log.read(from_offset, min(READ_BYTES, to_offset - from_offset), upto=upto)
            if not chunk.data:
                raise BeyondEnd(to_offset, from_offset)
            for block in _verified_blocks(log, chunk.data, chunk.start):
                from_offset = block.next
                yield from reading.parse_block(block)
        except Corrupt as error:
            if error.next <= from_offset and passed < from_offset:
                # The read began at an index entry before `from_offset`, and the damage is before `from_offset`, too.
                # The log knows this damage now, so retry once.
                passed = from_offset
                continue
            if on_damage is None or error.next <= from_offset:
                raise
            on_damage(error)
            from_offset = error.next
            reading.reset()


def batches_of_blocks(blocks: Iterable[Block | None]) -> Iterator[ArrivalBatch]:
    """Yield the batches in successive blocks, for offline tools; log nothing. None stands for a damaged range."""
    parser = _BatchParser(None, is_quiet=True)
    for block in blocks:
        if block is None:
            parser.reset()
        else:
            yield from parser.parse_block(block)


def damaged_ranges(log: Log, from_offset: int) -> list[Corrupt]:
    """Return the damaged ranges from `from_offset` (where an append ends) to the durable offset. Raises OSError."""
    found: list[Corrupt] = []
    for _ in read_batches(log, max(from_offset, log.first_offset), log.forced_offset, on_damage=found.append):
        pass
    return found


def _verified_blocks(log: Log, data: bytes | bytearray | memoryview, start: int) -> Iterator[Block]:
    """Yield the blocks in `data`, read from offset `start`. Raises Corrupt; its range ends where a block may begin."""
    position = 0
    try:
        for block in blocks_of(data, start, log.log_id):
            position = block.next - start
            yield block
    except BadRecord as error:
        claim = find_next_trailer(data, position, offset=start, log_id=log.log_id)
        bad, end = start + position, start + len(data)
        if claim is not None:
            end = claim.trailer.next if claim.trailer.offset == bad else claim.trailer.offset
        raise Corrupt(log.folder, bad, end, error.reason) from None


@dataclass
class _BatchParser:
    """Parses blocks in their order, and remembers the header to which the next records belong."""

    on_header: HeaderCallback | None
    is_quiet: bool = False
    header: ArrivalHeader | None = None
    records_parsed: int = 0

    def reset(self) -> None:
        """Discard the current header, because the next block does not follow the last one directly."""
        self.header = None

    def parse_block(self, block: Block) -> Iterator[ArrivalBatch]:
        data = bytes(block.data)
        position, end = 0, len(data)
        ordinal, orphans = block.control.first_ordinal, 0
        while position < end:
            length, checksum, id, flag = HEADER.unpack_from(data, position)
            count, size = 1, HEADER_SIZE + length
            if id == HEADER_ID and not flag:
                self._start_header(data[position : position + size], block.offset + position)
            elif flag & FLAG_FILLER:
                # A repair has replaced damaged records by a filler. Its checksum field has the count of these records.
                count = checksum
                self.records_parsed += count
                if self.header is not None and self.records_parsed >= self.header.record_count:
                    self.header = None
            elif self.header is None:
                orphans += 1
            else:
                batch = self._parse_records(self.header, data, position, block.offset + position, ordinal)
                yield batch
                count, size = len(batch.sizes), len(batch.data[0])
            ordinal += count
            position += size
        if orphans and not self.is_quiet:
            logger.error(
                "%d delayed messages have no due time: their headers before offset %d of the arrival log are lost",
                orphans,
                block.next,
            )

    def _start_header(self, record: bytes, offset: int) -> None:
        self.records_parsed = 0
        self.header = None
        try:
            header = decode_header(record)
        except BadArrivalHeader as error:
            if not self.is_quiet:
                logger.error("invalid arrival header at offset %d: %s", offset, error.reason)
            return
        if header.record_count:
            self.header = header
        if self.on_header is not None:
            self.on_header(header, offset)

    def _parse_records(
        self, header: ArrivalHeader, data: bytes, position: int, offset: int, number: int
    ) -> ArrivalBatch:
        """Return the records after `header`. The first one is at `position` in `data` and at `offset` in the log."""
        sizes, offsets, end = _record_columns(data, position, offset, header.record_count - self.records_parsed)
        dues = header.dues.section(self.records_parsed, self.records_parsed + len(sizes))
        self.records_parsed += len(sizes)
        if self.records_parsed == header.record_count:
            self.header = None
        view = memoryview(data)[position:end]
        columns = (*dues, offsets, sizes, [view])
        return ArrivalBatch(header.log_id, header.topic, number, *columns, header.ahead_ms)


def _record_columns(data: bytes, position: int, offset: int, wanted: int) -> tuple[array[int], array[int], int]:
    """Return the sizes and offsets of at most `wanted` records in `data`, and the position after the last record.

    The first record is at `position` in `data` and at `offset` in the log.
    """
    size = HEADER_SIZE + LENGTH.unpack_from(data, position)[0]
    if wanted == 1:
        return array("I", (size,)), array("Q", (offset,)), position + size
    count = min(wanted, (len(data) - position) // size)
    end = position + count * size
    if (
        count >= COLUMNS_COUNT_MIN
        and sizes_are_equal(data, position, end, size)
        and has_no_special_flags(data, position, end, size)
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


def header_before(log: Log, first_number: int) -> ArrivalHeader | None:
    """Return the header of the batch that starts with `first_number`; None if it cannot be read.

    Raises OSError, Closed.
    """
    if first_number <= log.first_ordinal or first_number > log.end_ordinal:
        return None
    try:
        offset, ordinal = log.offset_of_ordinal(first_number - 1)
        block = log.block_of_record(offset, upto="written") if ordinal == first_number - 1 else None
        if block is None:
            return None
        position = offset - block.offset
        size = HEADER_SIZE + LENGTH.unpack_from(block.data, position)[0]
        return decode_header(block.data[position : position + size])
    except (Corrupt, BelowStart, BeyondEnd, NotARecord, BadArrivalHeader):
        return None


# Reading single records by offset.

VERIFIED_PER_CALL_MAX: Final = 32
"""Maximum number of blocks that one call of `read_cached` verifies: about 2 ms. If more are needed, a worker reads."""

CACHED_GAP_BYTES: Final = 4096
DISK_GAP_BYTES: Final = 16 << 10
"""One read from the disk covers records that begin less than this apart. For the page cache: CACHED_GAP_BYTES."""

SIZE_HINT_MIN: Final = 64
SIZE_HINT_MAX: Final = 4096
"""Bounds of the size that a read assumes for its last record: the size of the largest record of the previous read."""

NO_LIMIT: Final = 1 << 62

Records: TypeAlias = list[bytes | None]


class ArrivalRecordReader:
    """Reads durable records by offset. Used by one thread at a time; several readers may share `verified`.

    The first read in a block reads the whole block and verifies it. Later reads in this block read only the wanted
    records, several neighbours at once, and verify each record by its own checksum.
    """

    def __init__(self, log: Log, verified: VerifiedBlockCache | None = None) -> None:
        self._log = log
        self._verified = VerifiedBlockCache() if verified is None else verified
        self._start = 0
        self._data = b""
        """The block that was verified last; it begins at offset `_start`."""
        self._records: Records = []
        self._bytes_left = 0
        """How many more bytes of records the current call may read."""
        self._gap = CACHED_GAP_BYTES
        self._size_hint = SIZE_HINT_MIN
        self._largest_record = 0

    def read(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> Records:
        """Return the whole records at these offsets; None for a damaged record, which is logged.

        The result ends with the record that reaches `bytes_max`, so it has at least one. Fastest if offsets ascend.
        Raises BelowStart (truncated), BeyondEnd (not durable, or no such offset), NotARecord, OSError, Closed.
        """
        found = self._read(offsets, bytes_max, False)
        assert found is not None, "a read that may wait returns records"
        return found

    def read_cached(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> Records | None:
        """Like `read`, but return None if it would wait for the disk, find damage, or exceed VERIFIED_PER_CALL_MAX."""
        return self._read(offsets, bytes_max, True)

    def _read(self, offsets: Sequence[int], bytes_max: int, cached: bool) -> Records | None:
        found: Records = []
        self._records, self._bytes_left, self._largest_record = found, max(1, bytes_max), 0
        self._gap = CACHED_GAP_BYTES if cached else DISK_GAP_BYTES
        index, count, proofs, end_of = 0, len(offsets), 0, self._verified.end_of
        with self._log.unproven(cached=cached) as unproven:
            while index < count and self._bytes_left > 0:
                offset, before = offsets[index], index
                if 0 <= offset - self._start < len(self._data):
                    index = self._copy_from_block(offsets, index)
                elif end := end_of(offset):
                    index = self._read_from_verified_block(offsets, index, end, unproven)
                if index > before:
                    continue
                proofs += 1
                if cached and proofs > VERIFIED_PER_CALL_MAX:
                    return None
                if not self._verify_block(offset, cached):
                    if cached:
                        return None
                    found.append(None)
                    index += 1
        if self._largest_record:
            self._size_hint = min(max(self._largest_record, SIZE_HINT_MIN), SIZE_HINT_MAX)
        return found

    def _verify_block(self, offset: int, cached: bool) -> bool:
        """Read and verify the block that contains `offset`. Return False if the read would wait or finds damage."""
        try:
            block = self._log.block_of_record(offset, cached=cached)
        except Corrupt as error:
            if not cached:
                logger.error("a delayed message cannot be read: %s", error)
            return False
        if block is None:
            return False
        self._start, self._data = block.offset, bytes(block.data)
        self._verified.add(block.offset, block.offset + len(block.data))
        return True

    def _copy_from_block(self, offsets: Sequence[int], index: int) -> int:
        """Copy records of the block that was verified last to `_records`, beginning with the one at `offsets[index]`.

        Return the index (in `offsets`) of the first record that was not copied.
        """
        start, data, left, length = self._start, self._data, self._bytes_left, LENGTH.unpack_from
        size, count = len(data), len(offsets)
        while index < count and 0 <= (at := offsets[index] - start) < size and left > 0:
            end = at + HEADER_SIZE
            if end <= size:
                end += length(data, at)[0]
            if end > size:
                raise NotARecord(offsets[index])
            self._records.append(data[at:end])
            left -= end - at
            index += 1
        self._bytes_left = left
        return index

    def _read_from_verified_block(self, offsets: Sequence[int], index: int, end: int, unproven: RawRead) -> int:
        """Read records that are close together in one verified block, beginning with the one at `offsets[index]`.

        The block ends at `end`. Append the records to `_records`, and return the index (in `offsets`) of the first
        record that was not read. If no record could be read, this is `index`, and the caller verifies the block again.
        """
        first = last = offsets[index]
        next_index, count, limit = index + 1, len(offsets), min(end, first + self._bytes_left)
        while next_index < count and last < offsets[next_index] < limit and offsets[next_index] - last < self._gap:
            last = offsets[next_index]
            next_index += 1
        try:
            read = unproven(first, min(last + self._size_hint, end) - first)
            if read is None:
                return index
            data = bytes(read)
            while index < next_index:
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
                self._records.append(record)
                self._bytes_left -= size
                if size > self._largest_record:
                    self._largest_record = size
                index += 1
        except Corrupt:
            pass  # known damage: it is logged when the block is verified
        return index


VERIFIED_BLOCKS_MAX: Final = 65_536
"""Maximum number of blocks in a `VerifiedBlockCache`: some megabytes of memory. A full cache is cleared."""


class VerifiedBlockCache:
    """Remembers which blocks of the arrival log passed their checksums; a written block never changes. Thread-safe."""

    def __init__(self) -> None:
        self._add_lock = Lock()
        self._starts: list[int] = []
        """The offsets where verified blocks begin, sorted."""
        self._ends: dict[int, int] = {}
        """End of a block by its start. A start is added here before it is added to `_starts`, as reads use no lock."""

    def end_of(self, offset: int) -> int:
        """Return the end of the verified block that contains `offset`; 0 if there is none."""
        starts, ends = self._starts, self._ends
        number = bisect_right(starts, offset) - 1
        end = ends.get(starts[number], 0) if number >= 0 else 0
        return end if offset < end else 0

    def add(self, start: int, end: int) -> None:
        with self._add_lock:
            if start in self._ends:
                return
            if len(self._starts) >= VERIFIED_BLOCKS_MAX:
                # Replace the collections instead of clearing them: another thread may be reading them.
                self._starts, self._ends = [], {}
            self._ends[start] = end
            self._starts.insert(bisect_left(self._starts, start), start)
