"""One segment file, a sequence of blocks. New blocks are appended to the last segment of a log; others are only read.

The file name is the log's offset of its first byte (`base`). A byte inside the file is addressed by its position; its
offset is `base + position`. The index file beside the segment is loaded, or rebuilt from the block trailers, when it is
first used. The format is in docs/formats/segment.md.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from journal import filenames
from journal.disk import Bytes, Disk, File, write_all
from journal.errors import Closed, Full
from journal.log.index import SegmentIndex
from journal.record.block import Block, blocks_of
from journal.record.block_trailer import BLOCK_SPAN_MAX, TRAILER_SIZE, BlockTrailer, decode_trailer, find_next_trailer
from journal.record.format import BadRecord, Incomplete

SCAN_SIZE: Final = 1 << 20
"""Bytes read at a time; doubled while a block does not fit."""
FILE_TOO_SHORT: Final = "the file is shorter than the log: it was truncated, or the segment after it is missing"


class NextValidBlock(NamedTuple):
    """The position and first ordinal of the next valid block after damage.

    `trailer`: the trailer of the damaged block, if it is valid and only the block's records are damaged; else None.
    """

    position: int
    ordinal: int
    trailer: BlockTrailer | None = None


class Segment:
    """One segment file of a log. Only the log's owner changes it; `pread` and `pread_cached` are safe in any thread."""

    def __init__(self, disk: Disk, file: File, folder: str, base: int, log_id: int) -> None:
        self.disk = disk
        self.path = file.path
        self.base = base
        self.log_id = log_id
        self.size = file.size()
        """Bytes of the file that belong to the log, without the remains of a failed write."""
        self.sealed = False
        self.index_error: OSError | Full | None = None
        """Why the index file is no longer written; the index in memory is complete nevertheless."""
        self._file: File | None = file
        self._index_path = filenames.join(folder, filenames.index_name(base))
        self._index: SegmentIndex | None = None
        self.has_index = False
        """True if the index is in memory: then `index` reads nothing and is safe in any thread."""
        self._oldest_ms: int | None = None
        self.verified_at: float | None = None
        """Monotonic time (s) at which the broker last verified the whole sealed segment; None: not since its start."""

    @classmethod
    def create(cls, disk: Disk, folder: str, base: int, log_id: int, suffix: str = filenames.SEGMENT_SUFFIX) -> Segment:
        """Create an empty segment. The caller fsyncs the folder. Raises FileExistsError, Full, OSError."""
        file = disk.create(filenames.join(folder, filenames.segment_name(base, suffix)))
        segment = cls(disk, file, folder, base, log_id)
        if disk.exists(segment._index_path):
            disk.unlink(segment._index_path)
        segment._index = SegmentIndex(segment._index_path, base, log_id)
        segment.has_index = True
        return segment

    @classmethod
    def open(
        cls, disk: Disk, folder: str, base: int, log_id: int, *, writable: bool, suffix: str = filenames.SEGMENT_SUFFIX
    ) -> Segment:
        """Open an existing segment without reading it. Only the last one of a log is `writable`. Raises OSError."""
        path = filenames.join(folder, filenames.segment_name(base, suffix))
        file = disk.open_write(path) if writable else disk.open_read(path)
        segment = cls(disk, file, folder, base, log_id)
        segment.sealed = not writable
        return segment

    @property
    def end(self) -> int:
        return self.base + self.size

    @property
    def file(self) -> File:
        """The open file, for an fsync. Raises Closed."""
        if self._file is None:
            raise Closed(self.path)
        return self._file

    @property
    def index(self) -> SegmentIndex:
        """The index, complete up to `size`. The first use reads the index file and the rest of the segment."""
        if self._index is None:
            index = SegmentIndex.load(self.disk, self._index_path, self.base, self.log_id, self.size)
            self._drop_stale_entries(index)
            self._index_rest(index)
            self._index = index
            self.has_index = True
        return self._index

    @property
    def oldest_ms(self) -> int | None:
        """Append time (ms) of the first valid block; None if there is none. The first use reads the file."""
        if self._oldest_ms is None and self.size:
            first = next(self.valid_blocks(), None)
            self._oldest_ms = None if first is None else first.control.append_time
        return self._oldest_ms

    def append(self, buffers: Sequence[Bytes], controls: Sequence[BlockTrailer]) -> None:
        """Write whole blocks at the end in one vectored write, and add their trailers to the index.

        The blocks are not durable on return. On Full, the file is truncated to its previous size. After an OSError, of
        the write or of that truncation, unknown bytes may follow `size`, and the caller must stop the log.
        """
        if self.sealed:
            raise Closed(self.path)
        index = self.index if self._index is None else self._index
        try:
            written = write_all(self.file if self._file is None else self._file, buffers, self.size)
        except Full:
            written = self.file.size() - self.size
            try:
                self.file.truncate(self.size)
            except Full as error:
                # If a later append is shorter than the bytes that remain, recovery could take the end of these bytes
                # for valid blocks. So the log must stop.
                raise OSError(errno.EIO, f"a failed write cannot be truncated: {error}", self.path) from error
            # Until the truncation is durable, a power loss may bring back the bytes that the failed write has written.
            # If the rest of the failed append is only zeros, a later append that makes the file longer would complete
            # the failed one, because a gap in a file is read as zeros. So in this case the truncation is fsynced.
            if written and not any(b"".join(buffers)[written:]):
                self.file.force()
            raise
        for trailer in controls:
            index.add(trailer)
        self.size += written
        if index.is_due:
            self.write_index()

    def write_index(self) -> None:
        """Write new entries to the index file. Does nothing after a first error, which is kept in `index_error`."""
        # No entry is lost by an error, because the next start completes the index file from the segment.
        if self.index_error is not None or self._index is None:
            return
        try:
            self._index.write(self.disk)
        except (Full, OSError) as error:
            self.index_error = error

    def pread(self, size: int, position: int) -> bytes:
        """Return up to `size` bytes from `position`, none after the segment's end. Raises OSError, Closed."""
        return self.file.pread(max(0, min(size, self.size - position)), position)

    def pread_into(self, buffer: memoryview, position: int) -> int:
        """Read as `pread` does, but into `buffer`. Return how many bytes were read."""
        return self.file.pread_into(buffer[: max(0, self.size - position)], position)

    def pread_cached(self, size: int, position: int) -> bytes | bytearray | None:
        """Read as `pread` does, but return None if the read would wait for the disk."""
        return self.file.pread_cached(max(0, min(size, self.size - position)), position)

    def seal(self) -> None:
        """Fsync the file and make it read-only. Raises OSError."""
        index = self.index
        self.file.force()
        self.sealed = True
        index.close_run()
        self.write_index()
        index.close()

    def truncate(self, position: int) -> None:
        """Truncate the file at `position`, the start of a block, without an fsync. Raises OSError."""
        self.file.truncate(position)
        self.size = position
        self._oldest_ms = None
        if self._index is not None:
            self._index.truncate(position)
            self._index.fault = self._index.fault or "cut"
            self._index_rest(self._index)

    def close(self) -> None:
        """Close the segment file, which must be durable, and the index file. Repeated calls do nothing."""
        if self._index is not None:
            self.write_index()
            self._index.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def blocks(
        self, position: int = 0, end: int | None = None, *, verify: bool = True, read_size: int = SCAN_SIZE
    ) -> Iterator[Block]:
        """Yield the blocks from `position` to `end` (default: the segment's end), which must both be block boundaries.

        `read_size`: bytes of each read until a block does not end in them. At the first invalid block, raises the
        errors of `blocks_of`, with a `position` in this segment.
        """
        end = self.size if end is None else end
        size = read_size
        ordinal: int | None = None
        while position < end:
            wanted = min(size, end - position)
            data = self.pread(wanted, position)
            start = position
            try:
                for block in blocks_of(data, self.base + start, self.log_id, verify=verify):
                    if ordinal not in (None, block.control.first_ordinal):
                        found = block.control.first_ordinal
                        raise BadRecord(position - start, f"first ordinal {found}, {ordinal} was expected")
                    yield block
                    ordinal = block.control.next_ordinal
                    position = block.next - self.base
            except Incomplete as error:
                if start + len(data) >= end:
                    raise error.with_position(start + error.position) from None
                size = SCAN_SIZE if position > start else size * 2
            except BadRecord as error:
                raise error.with_position(start + error.position) from None
            if len(data) < wanted:
                raise Incomplete(position, FILE_TOO_SHORT)

    def find_next_valid(self, damaged: int) -> NextValidBlock | None:
        """Find the next valid block after the damaged block at position `damaged`; None if there is none.

        If the trailer of the damaged block is valid, the next block starts after that trailer. Otherwise the next block
        is the first one whose trailer is valid.
        """
        position = damaged
        while position < self.size:
            data = self.pread(BLOCK_SPAN_MAX + SCAN_SIZE, position)
            start = max(0, damaged - position)
            claim = find_next_trailer(data, start, offset=self.base + position, log_id=self.log_id)
            if claim is not None:
                trailer = claim.trailer
                if trailer.offset == self.base + damaged:
                    return NextValidBlock(trailer.next - self.base, trailer.next_ordinal, trailer)
                return NextValidBlock(trailer.offset - self.base, trailer.first_ordinal)
            if len(data) < BLOCK_SPAN_MAX + SCAN_SIZE:
                return None
            position += len(data) - BLOCK_SPAN_MAX
        return None

    def valid_blocks(self, position: int = 0, *, verify: bool = False, read_size: int = SCAN_SIZE) -> Iterator[Block]:
        """Yield the blocks from `position` to the segment's end. Damaged blocks are skipped without an error."""
        while True:
            try:
                yield from self.blocks(position, verify=verify, read_size=read_size)
                return
            except BadRecord as error:
                next_valid = self.find_next_valid(error.position)
                if next_valid is None:
                    return
                position = next_valid.position

    def _index_rest(self, index: SegmentIndex) -> None:
        """Add the readable blocks after the last entry of `index` to `index`."""
        for block in self.valid_blocks(index.end):
            index.add(block.control)
        if self.sealed:
            index.close_run()

    def _drop_stale_entries(self, index: SegmentIndex) -> None:
        """Remove index entries of blocks that were truncated since the entries were written."""
        # An entry is valid if the block trailer at the end of its run has the same next ordinal as the entry.
        while len(index):
            entry = index.entry(-1)
            at = entry.position + entry.size - TRAILER_SIZE
            try:
                trailer = decode_trailer(self.pread(TRAILER_SIZE, at), 0, self.log_id)
            except BadRecord:
                trailer = None
            if (
                trailer is not None
                and trailer.end == self.base + at
                and trailer.next_ordinal == entry.first_ordinal + entry.records
            ):
                return
            index.truncate(entry.position + entry.size - 1)
            index.fault = "stale"
