"""Reads of a log: chunks (bytes of whole blocks), and searches by offset, ordinal or time.

A read must find the start of the block that contains its offset. The index has only the start of each index run (the
blocks, at least 64 KiB, that one index entry covers). So the ends of returned chunks are remembered: a reader that
continues at the end of its last chunk needs one disk read. For other offsets, the run's blocks are read one by one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

from journal.crc32 import crc32
from journal.errors import BelowStart, BeyondEnd, Corrupt, CutAway, NotARecord, TooLarge
from journal.log.checkpoint import truncated_since
from journal.log.index import RUN_SIZE_MIN, IndexPosition, SegmentIndex
from journal.log.segment import FILE_TOO_SHORT, Segment
from journal.log.segments import SegmentSet, segment_limit
from journal.record.batch import BLOCK_SIZE_MAX, Chunk
from journal.record.block import Block, blocks_of, trailer_position
from journal.record.block_trailer import BLOCK_SPAN_MAX, TRAILER_SIZE, decode_trailer
from journal.record.format import (
    FLAG_FILLER,
    HEADER,
    HEADER_SIZE,
    LENGTH,
    BadRecord,
    Incomplete,
    header_positions,
    records_of,
)

KNOWN_STARTS_MAX: Final = 256
"""Chunk ends remembered per log. If a log has more concurrent readers, some of them must search an index run."""

PEEK_BYTES: Final = 4096
PEEK_MORE_BYTES: Final = BLOCK_SIZE_MAX + TRAILER_SIZE
"""Bytes read from a record on to find the end of its block. PEEK_BYTES are read first and suffice for the block of a
small send. If they do not suffice, PEEK_MORE_BYTES are read, which suffice for most blocks."""

SLICE_BYTES: Final = 256 << 10
"""Larger reads are done in slices of this size if the caller pauses after each (`pause` of `LogReader.read`)."""

Data = bytes | bytearray | memoryview
Pread = Callable[[Segment, int, int], Data]
PlainPread = Callable[[Segment, int, int], bytes | bytearray]
RawRead = Callable[[int, int], "bytes | bytearray | None"]
"""`read(offset, size)`: at most `size` bytes, none of the next segment; None if the read would wait for the disk."""
RawReadContext = AbstractContextManager[RawRead]


class WouldBlock(Exception):
    """A read that may use only cached bytes would have to wait for the disk."""


class _LargeBlock(Exception):
    """The wanted block, from offset `start` to `stop`, is one record above RUN_SIZE_MIN. It was not read."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.start, self.stop = start, stop


class LogReader:
    """Reads a log. Methods with the name of a method of `Log` do the same. All may run in any thread at any time."""

    def __init__(self, segment_set: SegmentSet) -> None:
        self._segment_set = segment_set
        self._known_starts: dict[int, None] = {}
        self._oldest: tuple[int, int] | None = None

    def _limit(self, durable: bool) -> int:
        """Offset at which reads end: the durable offset if `durable` or the log is stopped, else the end of the log."""
        segment_set = self._segment_set
        return segment_set.high_watermark if durable or segment_set.stopped is not None else segment_set.end

    def read(
        self,
        offset: int,
        max_bytes: int,
        durable: bool,
        epoch: int | None,
        cached: bool,
        block_bytes: int = BLOCK_SPAN_MAX,
        pause: Callable[[], None] | None = None,
    ) -> Chunk:
        """Read as `Log.read` does. Raises WouldBlock if `cached` and the bytes are not in memory."""
        segment_set = self._segment_set
        with segment_set.referenced_segments() as segments:
            limit = self._limit(durable)
            self._check_offset(offset, epoch)
            self._check_damage(offset)
            if offset >= limit:
                return Chunk(offset, offset, offset, b"")
            pread: Pread = _pread_cached if cached else _pread if pause is None else partial(_pread_slices, pause)
            number = segment_set.index_of(offset, segments)
            segment = segments[number]
            if cached and not segment.has_index:
                raise WouldBlock
            end = self._limit_at_damage(offset, min(limit, segment_limit(segments, number)))
            start, skip_to = self._chunk_start(segment, offset, end, pread, block_bytes)
            stop = self._chunk_end(segment, start, end, max_bytes, pread)
            if stop - start > max(max_bytes, block_bytes):
                raise TooLarge("the block", stop - start, block_bytes)
            data = pread(segment, stop - start, start)
            if len(data) != stop - start:
                data, stop = self._whole_blocks(segment, start, end, data)
            if stop not in self._known_starts:
                with segment_set.lock:
                    if len(self._known_starts) >= KNOWN_STARTS_MAX:
                        self._known_starts.pop(next(iter(self._known_starts)))
                    self._known_starts[stop] = None
            return Chunk(start, skip_to, stop, data)

    def seek_offset(self, offset: int) -> int:
        segment_set = self._segment_set
        offset = max(segment_set.first, min(offset, segment_set.end))
        with segment_set.referenced_segments() as segments:
            self._check_damage(offset)
            if offset == segment_set.end:
                return offset
            number = segment_set.index_of(offset, segments)
            segment = segments[number]
            block = self._block_at(
                segment, offset, self._limit_at_damage(offset, segment_limit(segments, number)), _pread
            )
            return max(start for start in _record_starts(block) if start <= offset)

    def offset_of_ordinal(self, ordinal: int) -> tuple[int, int]:
        segment_set = self._segment_set
        if ordinal <= segment_set.first_ordinal:
            return segment_set.first, segment_set.first_ordinal
        with segment_set.referenced_segments() as segments:
            if ordinal >= segment_set.end_ordinal:
                return segment_set.end, segment_set.end_ordinal
            low, high = 0, len(segments)
            while high - low > 1:
                middle = (low + high) // 2
                first = self._load_index(segments[middle]).first_ordinal
                low, high = (middle, high) if first is not None and first <= ordinal else (low, middle)
            for segment in segments[low:]:
                for block in self._valid_blocks(segment, self._load_index(segment).by_ordinal(ordinal)):
                    if block.control.next_ordinal > ordinal:
                        return _record_of_ordinal(block, ordinal)
            return segment_set.end, segment_set.end_ordinal

    def offset_of_time(self, ms: int) -> int:
        segment_set = self._segment_set
        with segment_set.referenced_segments() as segments:
            if ms > segment_set.append_time:
                return segment_set.end
            low, high = -1, len(segments) - 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._load_index(segments[middle]).newest_ms >= ms else (middle, high)
            for segment in segments[high:]:
                for block in self._valid_blocks(segment, self._load_index(segment).by_time(ms)):
                    if block.control.append_time >= ms:
                        return max(segment_set.first, block.offset)
            return segment_set.end

    def block_at(self, offset: int) -> Block:
        """Return the block that contains `offset`, which must be before the end of the log. Raises Corrupt."""
        with self._segment_set.referenced_segments() as segments:
            self._check_damage(offset)
            number = self._segment_set.index_of(offset, segments)
            end = self._limit_at_damage(offset, segment_limit(segments, number))
            return self._block_at(segments[number], offset, end, _pread)

    def block_of_record(self, offset: int, durable: bool, cached: bool) -> Block | None:
        segment_set = self._segment_set
        with segment_set.referenced_segments() as segments:
            limit = self._limit(durable)
            self._check_offset(offset, None)
            self._check_damage(offset)
            if offset >= limit:
                raise BeyondEnd(offset, limit)
            number = segment_set.index_of(offset, segments)
            segment = segments[number]
            end = self._limit_at_damage(offset, min(limit, segment_limit(segments, number)))
            try:
                block = _block_by_trailer(segment, offset, end, _pread_cached if cached else _pread)
            except WouldBlock:
                return None
            if block is not None or cached:
                return block
            # No valid block trailer was found. Reading the blocks from a known start on finds the error to raise.
            block = self._block_at(segment, offset, end, _pread)
            if crc32(block.data) != block.control.crc:
                raise self._add_damage(segment, block.offset, block.next, "the block fails its checksum")
            if offset not in _record_starts(block) or offset == block.control.end:
                raise NotARecord(offset)
            return block

    @contextmanager
    def unproven(self, cached: bool) -> Iterator[RawRead]:
        """Yield `read` of `Log.unproven`. It raises BelowStart, BeyondEnd, Corrupt (known damage), OSError, Closed."""
        segment_set = self._segment_set
        with segment_set.referenced_segments() as segments:
            base = end = 0
            pread: RawRead | None = None

            def read(offset: int, size: int) -> bytes | bytearray | None:
                nonlocal base, end, pread
                if pread is None or not base <= offset < end or segment_set.damage:
                    self._check_offset(offset, None)
                    self._check_damage(offset)
                    number = segment_set.index_of(offset, segments)
                    file, base = segments[number].file, segments[number].base
                    end = min(segment_set.end, segment_limit(segments, number))
                    pread = file.pread_cached if cached else file.pread
                return pread(max(0, min(size, end - offset)), offset - base)

            yield read

    def oldest_ms(self) -> int:
        """Append time (ms) of the first block. It is read from the disk again only if the first offset has changed."""
        first = self._segment_set.first
        if self._oldest is None or self._oldest[0] != first:
            with self._segment_set.referenced_segments() as segments:
                segment = segments[self._segment_set.index_of(first, segments)]
                blocks = segment.valid_blocks(max(0, first - segment.base))
                times = (block.control.append_time for block in blocks)
                self._oldest = (first, next(times, self._segment_set.append_time))
        return self._oldest[1]

    def newest_ms(self, segment: Segment) -> int:
        """Latest append time (ms) in a sealed segment."""
        return self._load_index(segment).newest_ms

    def first_ordinal_at(self, offset: int) -> int:
        """Ordinal of the first record at or after `offset`, which is the start of a segment."""
        with self._segment_set.referenced_segments() as segments:
            for segment in segments[self._segment_set.index_of(offset, segments) :]:
                ordinal = self._load_index(segment).first_ordinal
                if ordinal is not None:
                    return ordinal
            return self._segment_set.end_ordinal

    def _check_offset(self, offset: int, epoch: int | None) -> None:
        segment_set = self._segment_set
        cut = None if epoch is None else truncated_since(segment_set.starts, epoch)
        if cut is not None and offset > cut:
            raise CutAway(offset, cut)
        if offset < segment_set.first:
            raise BelowStart(offset, segment_set.first)
        if offset > segment_set.end:
            raise BeyondEnd(offset, segment_set.end)

    def _check_damage(self, offset: int) -> None:
        for first, next, reason in self._segment_set.damage:
            if first <= offset < next:
                segments = self._segment_set.segments
                path = segments[self._segment_set.index_of(offset, segments)].path
                raise Corrupt(path, first, next, reason)

    def _valid_blocks(self, segment: Segment, run: IndexPosition) -> Iterator[Block]:
        """Yield the blocks from the start of `run` on, without blocks that are known to be damaged."""
        # What is searched is most often in the run itself, so no byte after it is read before it is needed. A run with
        # damage may be as large as the segment, so there is a limit.
        run_size = self._load_index(segment).run_end(run.position) - run.position
        read_size = min(max(run_size, RUN_SIZE_MIN), RUN_SIZE_MIN + BLOCK_SPAN_MAX)
        for block in segment.valid_blocks(run.position, read_size=read_size):
            if not any(first <= block.offset < next for first, next, _ in self._segment_set.damage):
                yield block

    def _limit_at_damage(self, offset: int, end: int) -> int:
        """Return `end`, or the start of the first known damage between `offset` and `end`."""
        return min([end, *(first for first, _, _ in self._segment_set.damage if first > offset)])

    def _chunk_start(self, segment: Segment, offset: int, end: int, pread: Pread, block_bytes: int) -> tuple[int, int]:
        """Return (start of the block that contains `offset`, offset from which the caller gets records).

        The second offset is `offset`. Except: if `offset` is inside a filler, with which a repair has replaced damaged
        records, the second offset is the end of the filler. Raises NotARecord, Corrupt, TooLarge.
        """
        if offset in self._known_starts or self._index_position(segment, offset).position == offset - segment.base:
            return offset, offset
        try:
            block = self._block_at(segment, offset, end, pread, block_bytes, large_at=offset)
        except _LargeBlock as large:
            if offset not in (large.start, large.stop - TRAILER_SIZE):
                raise NotARecord(offset) from None
            return large.start, offset
        if offset not in _record_starts(block):
            following = _filler_end(block, offset, segment.log_id)
            if following is None:
                raise NotARecord(offset)
            if crc32(block.data) != block.control.crc:
                raise self._add_damage(segment, block.offset, block.next, "the block fails its checksum")
            return block.offset, following
        return block.offset, offset

    def _chunk_end(self, segment: Segment, start: int, end: int, max_bytes: int, pread: Pread) -> int:
        """Return the end of the chunk that starts at `start`. A chunk has at most `max_bytes`, but at least one block.

        The chunk ends before the first damaged block. Raises Corrupt if the block at `start` is damaged.
        """
        if end - start <= max_bytes:
            return end
        stop = segment.base + self._index_position(segment, start + max_bytes).position
        if stop > start:
            return stop
        large = _large_block_end(segment, start, end, pread)
        if large is not None and large - start >= max_bytes:
            return large
        stop = start
        try:
            for block in self._walk_blocks(segment, start, end, pread):
                if block.next - start > max_bytes:
                    return stop if stop > start else block.next
                stop = block.next
        except Corrupt:
            if stop == start:
                raise
            return stop
        return end

    def _whole_blocks(self, segment: Segment, start: int, end: int, data: Data) -> tuple[Data, int]:
        """Return the valid whole blocks of `data`, and the offset of their end. Raises Corrupt if there are none.

        `data` was read from offset `start` and is shorter than requested: the file has lost its end. The bytes that are
        missing before `end` are recorded as damage.
        """
        position, error = start, None
        try:
            for block in blocks_of(data, start, segment.log_id, verify=False):
                position = block.next
        except Incomplete:
            pass
        except BadRecord as bad:
            error = self._record_damage(segment, position, end, bad)
        error = error or self._add_damage(segment, position, end, FILE_TOO_SHORT)
        if position == start:
            raise error
        return data[: position - start], position

    def _block_at(
        self,
        segment: Segment,
        offset: int,
        end: int,
        pread: Pread,
        block_bytes: int = BLOCK_SPAN_MAX,
        large_at: int | None = None,
    ) -> Block:
        while True:
            run = segment.base + self._index_position(segment, offset).position
            start = max([run, *(next for _, next, _ in self._segment_set.damage if next <= offset)])
            try:
                for block in self._walk_blocks(segment, start, end, pread, block_bytes, large_at):
                    if offset < block.next:
                        return block
            except Corrupt as error:  # if the damage is before `offset`, the search continues after it
                if not start < error.next <= offset:
                    raise
            else:
                raise Corrupt(segment.path, offset, end, "no block contains this offset")

    def _walk_blocks(
        self,
        segment: Segment,
        start: int,
        end: int,
        pread: Pread,
        block_bytes: int = BLOCK_SPAN_MAX,
        large_at: int | None = None,
    ) -> Iterator[Block]:
        """Yield the blocks from `start` on, without checking their checksums. Raises Corrupt at the first damage.

        Raises TooLarge at a large record with more than `block_bytes`, after reading its first bytes only. With
        `large_at`, the block that contains that offset raises _LargeBlock if it is one large record, and no filler.
        """
        size = RUN_SIZE_MIN
        while start < end:
            wanted = min(size, end - start)
            data = pread(segment, wanted, start)
            position = start
            try:
                for block in blocks_of(data, position, segment.log_id, verify=False):
                    yield block
                    start = block.next
            except Incomplete as error:
                if position + len(data) >= end:
                    raise self._record_damage(segment, start, end, error) from None
                if start > position:
                    size = RUN_SIZE_MIN
                else:
                    if large_at is not None and len(data) == wanted and not HEADER.unpack_from(data)[3] & FLAG_FILLER:
                        stop = _large_block_end(segment, start, end, pread)
                        if stop is not None and large_at < stop:
                            raise _LargeBlock(start, stop) from None
                    first = HEADER_SIZE + LENGTH.unpack_from(data)[0] + TRAILER_SIZE
                    if first > max(block_bytes, RUN_SIZE_MIN):
                        raise TooLarge("the block", first, block_bytes) from None
                    size = min(max(size * 4, first), BLOCK_SPAN_MAX)
            except BadRecord as error:
                raise self._record_damage(segment, start, end, error) from None
            if len(data) < wanted:
                raise self._add_damage(segment, start, end, FILE_TOO_SHORT)

    def _record_damage(self, segment: Segment, start: int, end: int, error: BadRecord) -> Corrupt:
        """Record the range from `start` to the next valid block as damage. Return the error for the caller to raise."""
        next_valid = segment.find_next_valid(start - segment.base)
        next = end if next_valid is None else min(end, segment.base + next_valid.position)
        return self._add_damage(segment, start, next, error.reason)

    def _add_damage(self, segment: Segment, start: int, next: int, reason: str) -> Corrupt:
        segment_set = self._segment_set
        with segment_set.lock:
            segment_set.damage = tuple(sorted({*segment_set.damage, (start, next, reason)}))
        return Corrupt(segment.path, start, next, reason)

    def _index_position(self, segment: Segment, offset: int) -> IndexPosition:
        position = self._load_index(segment).by_position(offset - segment.base)
        # If another thread appends and closes the first index run during `by_position`, the returned position may be
        # after `offset`. Then the start of the segment is used instead.
        return position if position.position <= offset - segment.base else IndexPosition(0, 0)

    def _load_index(self, segment: Segment) -> SegmentIndex:
        if segment.has_index:
            return segment.index
        with self._segment_set.index_lock:
            return segment.index


def _pread(segment: Segment, size: int, offset: int) -> bytes:
    return segment.pread(size, offset - segment.base)


def _pread_slices(pause: Callable[[], None], segment: Segment, size: int, offset: int) -> Data:
    """Read as `_pread` does. If `size` is above SLICE_BYTES, read slices, and call `pause()` after each."""
    if size <= SLICE_BYTES:
        return _pread(segment, size, offset)
    try:
        # Pages of such memory are used only when a slice is read into them. A bytearray of this size would be filled
        # with zeros first, for milliseconds in which no other thread runs.
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from None
    data, done = memoryview(buffer), 0
    while done < size:
        wanted = min(SLICE_BYTES, size - done)
        count = segment.pread_into(data[done : done + wanted], offset + done - segment.base)
        done += count
        if count < wanted:
            break
        pause()
    return data[:done]


def _pread_cached(segment: Segment, size: int, offset: int) -> bytes | bytearray:
    data = segment.pread_cached(size, offset - segment.base)
    if data is None:
        raise WouldBlock
    return data


def _large_block_end(segment: Segment, start: int, end: int, pread: Pread) -> int | None:
    """Return the end of the block at `start` if it is one record above RUN_SIZE_MIN. The record is not read."""
    header = pread(segment, HEADER_SIZE, start)
    if len(header) < HEADER_SIZE:
        return None
    size = HEADER_SIZE + LENGTH.unpack_from(header)[0]
    stop = start + size + TRAILER_SIZE
    if size <= RUN_SIZE_MIN or stop > end:
        return None
    try:
        trailer = decode_trailer(pread(segment, TRAILER_SIZE, start + size), 0, segment.log_id)
    except BadRecord:
        return None
    return stop if (trailer.offset, trailer.size) == (start, size) else None


def _block_by_trailer(segment: Segment, offset: int, end: int, pread: PlainPread) -> Block | None:
    """Find the block of the record at `offset` by the next block trailer; None if the trailer or CRC is invalid."""
    size = PEEK_BYTES
    while True:
        data = pread(segment, min(size, end - offset), offset)
        try:
            at = trailer_position(data, 0)
            trailer = decode_trailer(data, at, segment.log_id)
            break
        except Incomplete:
            if len(data) >= end - offset or len(data) < size:
                return None
            size = PEEK_MORE_BYTES if size < PEEK_MORE_BYTES else BLOCK_SPAN_MAX
        except BadRecord:
            return None
    if not at or trailer.end != offset + at or not segment.base <= trailer.offset <= offset:
        return None
    records = data[:at] if trailer.offset == offset else pread(segment, trailer.size, trailer.offset)
    if crc32(records) != trailer.crc:
        return None
    return Block(trailer.offset, memoryview(records), trailer)


def _record_starts(block: Block) -> list[int]:
    """Offsets at which the records of a block start, and at the end the offset of its block trailer."""
    positions = [block.offset + position for position in header_positions(block.data)]
    return [*positions, block.control.end]


def _filler_end(block: Block, offset: int, log_id: int) -> int | None:
    """Return the end of the filler (written by a repair) that contains `offset`; None if no filler contains it."""
    is_filler = False
    for position, size, _, id, flag in records_of(block.data):
        is_filler = flag == FLAG_FILLER and id == log_id
        if offset < block.offset + position + size:
            return block.offset + position + size if is_filler else None
    return block.next if is_filler else None


def _record_of_ordinal(block: Block, ordinal: int) -> tuple[int, int]:
    """Return (offset, ordinal) of the record `ordinal` of the block, or of the filler that replaced it.

    If the block starts with a higher ordinal, returns the offset and ordinal of its first record.
    """
    at = block.control.first_ordinal
    if ordinal <= at:
        return block.offset, at
    for position, _, checksum, _, flag in records_of(block.data):
        count = checksum if flag & FLAG_FILLER else 1
        if ordinal < at + count:
            return block.offset + position, at
        at += count
    return block.next, at
