"""Use of a log without a broker: `ReadOnlyLog` reads the log of another process, `open_log` opens a log for appends.

`ReadOnlyLog` opens files when it reads them, and keeps at most OPEN_MAX files open. Retention or the deletion of the
topic may remove a file at any time. Opening a removed file raises FileNotFoundError. The checkpoint of the log
is then read again, to find out why the file was removed. An open file stays readable after its removal.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Final, NamedTuple, NoReturn, TypeVar

from journal import filenames
from journal.clock import Clock, SystemClock
from journal.disk import Disk, File, RealDisk
from journal.errors import BeyondEnd, Corrupt, CutAway
from journal.log.checkpoint import LogCheckpoint, LogCheckpointFile, truncated_since
from journal.log.index import InvalidIndex, OnDiskIndex, SegmentIndex
from journal.log.log import Log, Upto
from journal.log.options import LogOptions
from journal.log.reader import LogReader
from journal.log.segment import Segment
from journal.log.segments import SegmentSet
from journal.record.batch import Chunk
from journal.record.block import blocks_of
from journal.record.block_trailer import BLOCK_SPAN_MAX
from journal.record.format import FLAG_FILLER, HEADER_SIZE, records_of, split_body

OPEN_MAX: Final = 4
"""Maximum open files per log. A reader needs few, because it continues from one segment to the next."""

OpenFiles = OrderedDict["ReadOnlyFile", File]
"""Open files, the least recently used first."""


class ReadOnlyFile:
    """A file that is only read. Each read opens it if necessary. `size_bytes`: its size; None: `size` asks the disk."""

    def __init__(self, disk: Disk, path: str, pool: OpenFiles, size_bytes: int | None = None) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._disk = disk
        self._pool = pool

    def size(self) -> int:
        return self._open_file().size() if self.size_bytes is None else self.size_bytes

    def pread(self, size: int, position: int) -> bytes:
        return self._open_file().pread(size, position)

    def pread_into(self, buffer: bytearray | memoryview, position: int) -> int:
        return self._open_file().pread_into(buffer, position)

    def pread_cached(self, size: int, position: int) -> bytes | bytearray | None:
        return self._open_file().pread_cached(size, position)

    def pread_uncached(self, size: int, position: int) -> bytes | bytearray:
        return self._open_file().pread_uncached(size, position)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, "the log of another process is only read", self.path)

    pwritev = force = truncate = _refuse

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        file = self._pool.pop(self, None)
        if file is not None:
            file.close()

    def _open_file(self) -> File:
        file = self._pool.get(self)
        if file is None:
            while len(self._pool) >= OPEN_MAX:
                self._pool.popitem(last=False)[1].close()
            file = self._pool[self] = self._disk.open_read(self.path)
        self._pool.move_to_end(self)
        return file


class ReadOnlySegment(Segment):
    """Segment of another process's log, readable up to the offset `end`. Uses the index file if that is valid."""

    def __init__(self, disk: Disk, folder: str, base: int, log_id: int, *, end: int, pool: OpenFiles) -> None:
        path = filenames.join(folder, filenames.segment_name(base))
        super().__init__(disk, ReadOnlyFile(disk, path, pool, end - base), folder, base, log_id)
        self.sealed = True
        self._disk_index: OnDiskIndex | None = None
        self.has_index = True
        self._index_file_usable = True
        self._index_file = ReadOnlyFile(disk, self._index_path, pool)

    def set_end(self, end: int) -> None:
        if end != self.end:
            self.size = end - self.base
            self._index = self._disk_index = None
            self._index_file_usable = True

    @property
    def index(self) -> SegmentIndex:
        """The index. If this or a search raises InvalidIndex, call `discard_index_file` and try again."""
        if self._disk_index is None and self._index_file_usable and self._index is None:
            self._disk_index = OnDiskIndex(
                self._index_file, self.base, self.log_id, self.size, self.pread, self.valid_blocks
            )
        return self._disk_index or super().index

    def discard_index_file(self, path: str) -> bool:
        """If `path` is the index file in use, build the index from the segment instead, and return True."""
        known = self._index_file_usable and path == self._index_path
        if known:
            self._index_file_usable, self._disk_index = False, None
        return known

    def write_index(self) -> None:
        """Do nothing: the owner of the log writes the index."""

    def close(self) -> None:
        self.file.close()
        self._index_file.close()


REFRESH_ATTEMPTS_MAX: Final = 5
"""Attempts to read a checkpoint and a list of files that match. While the log's owner changes the folder, they may not
match."""

Found = TypeVar("Found")


class ReadOnlyLog:
    """The log of another process, readable up to its durable offset. Not thread-safe.

    The process that owns the log may append, roll and delete meanwhile. This class locks and writes nothing. `refresh`,
    which the constructor calls too, reads the checkpoint. Later changes by the owner are not visible until the next
    `refresh`. Searches use the index files on disk, so that opening a large log costs as little as a small one.
    """

    def __init__(self, disk: Disk, folder: str, log_id: int) -> None:
        self.folder = folder
        self.log_id = log_id
        self._disk = disk
        self._checkpoint_file = LogCheckpointFile(disk, folder, log_id)
        self._open_files: OpenFiles = OrderedDict()
        self._segment_set = SegmentSet(log_id)
        self._reader = LogReader(self._segment_set)
        self._segments: dict[int, ReadOnlySegment] = {}
        self.checkpoint = LogCheckpoint(0, 0, -1, 0, 0)
        self.refresh()

    def refresh(self) -> LogCheckpoint:
        """Read the checkpoint again and return it.

        Raises FileNotFoundError (there is no log, or it was deleted), WrongLog (the folder now belongs to another log),
        Corrupt, NewerFormat, OSError.
        """
        for _ in range(REFRESH_ATTEMPTS_MAX):
            checkpoint = self._read_checkpoint()
            if checkpoint == self.checkpoint:
                return checkpoint
            if self._apply_checkpoint(checkpoint):
                break
        return self.checkpoint

    def read(self, offset: int, max_bytes: int, epoch: int | None = None, block_bytes: int = BLOCK_SPAN_MAX) -> Chunk:
        """Read as `Log.read` does, up to the durable offset. Calls `refresh` before and after the read.

        `epoch`: the highest epoch that the reader has seen. Raises CutAway if the log was truncated after that epoch,
        below the end of the returned chunk. Also raises the errors of `refresh`, and BelowStart, BeyondEnd, NotARecord,
        Corrupt (damage, or a missing file), and TooLarge for a block above `max_bytes` and `block_bytes`.
        """
        self.refresh()
        chunk = self._retry(offset, lambda reader: reader.read(offset, max_bytes, True, epoch, False, block_bytes))
        cut = None if epoch is None else truncated_since(self.refresh().starts, epoch)
        if cut is not None and cut < chunk.next:
            raise CutAway(chunk.next, cut)
        return chunk

    def seek_offset(self, offset: int) -> int:
        """Nearest record start at or before `offset`, clamped to the log. Raises the errors of `read`."""
        return self._retry(offset, lambda reader: reader.seek_offset(offset))

    def offset_of_ordinal(self, ordinal: int) -> int:
        """Offset of the record `ordinal`, clamped to the log. Raises the errors of `read`.

        If the record is damaged: offset of the filler that replaced it, or of the next readable record.
        """
        return self._retry(None, lambda reader: reader.offset_of_ordinal(ordinal))[0]

    def offset_of_time(self, ms: int) -> int:
        """Offset of the first block appended at or after `ms`, else the log's end. Raises the errors of `read`."""
        return self._retry(None, lambda reader: reader.offset_of_time(ms))

    def close(self) -> None:
        """Close the files; the log can still be used and then opens them again."""
        while self._open_files:
            self._open_files.popitem()[1].close()

    def _read_checkpoint(self) -> LogCheckpoint:
        # While the owner of the log writes one slot, the other slot is read, which may be older. So the read is
        # repeated until the durable offset is not lower than before.
        for _ in range(REFRESH_ATTEMPTS_MAX):
            found = self._checkpoint_file.read()
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "there is no log", self._checkpoint_file.path)
            if found.epoch != self.checkpoint.epoch or found.durable >= self.checkpoint.durable:
                break
        assert found is not None
        return found

    def _apply_checkpoint(self, checkpoint: LogCheckpoint) -> bool:
        """Use the bounds in `checkpoint`. Return False if the files do not match them: then the caller tries again."""
        if checkpoint.epoch != self.checkpoint.epoch or checkpoint.starts != self.checkpoint.starts:
            # The owner has truncated the end of the log: forget all segments, whose bytes may have changed.
            self.close()
            self._segments = {}
            self._segment_set = SegmentSet(self.log_id)
            self._reader = LogReader(self._segment_set)
        bases = filenames.segment_offsets(self._disk.list(self.folder))
        starts = [base for base in bases if base < checkpoint.durable]
        self._set_segments(checkpoint, starts[max(0, bisect_right(starts, checkpoint.first) - 1) :])
        return checkpoint.first >= checkpoint.durable or bool(starts and starts[0] <= checkpoint.first)

    def _set_segments(self, checkpoint: LogCheckpoint, starts: list[int]) -> None:
        segment_set = self._segment_set
        kept = {}
        for base, end in pairwise([*starts, checkpoint.durable]):
            segment = self._segments.get(base) or ReadOnlySegment(
                self._disk, self.folder, base, self.log_id, end=end, pool=self._open_files
            )
            segment.set_end(end)
            kept[base] = segment
        for base in self._segments.keys() - kept.keys():
            self._segments[base].close()
        self._segments = kept
        segment_set.segments = tuple(kept.values())
        segment_set.adopt(checkpoint)
        segment_set.end, segment_set.end_ordinal = checkpoint.durable, checkpoint.durable_ordinal
        segment_set.stopped = checkpoint.stopped
        self.checkpoint = checkpoint

    def _retry(self, offset: int | None, question: Callable[[LogReader], Found]) -> Found:
        """Return the result of `question(reader)`; retry the call if an index file is invalid or a file was removed."""
        while True:
            try:
                self._check_segment_exists(offset)
                return question(self._reader)
            except InvalidIndex as error:
                if not self._discard_index_file(error.path):
                    raise
            except FileNotFoundError as error:
                removed = str(error.filename)
                if self._discard_index_file(removed):
                    continue
                self.refresh()
                self._apply_checkpoint(self.checkpoint)
                for base, segment in self._segments.items():
                    if segment.path == removed:
                        raise Corrupt(removed, base, segment.end, "the segment file is missing") from error

    def _check_segment_exists(self, offset: int | None) -> None:
        """Raise Corrupt if no segment file has `offset`, although the log has it according to the checkpoint."""
        segment_set = self._segment_set
        if offset is None or not segment_set.first <= offset < segment_set.end:
            return
        segments = segment_set.segments
        if not segments or segments[0].base > offset:
            end = segments[0].base if segments else segment_set.end
            name = filenames.segment_name(segment_set.first)
            raise Corrupt(self.folder, segment_set.first, end, f"a segment file is missing, {name} or a later one")

    def _discard_index_file(self, path: str) -> bool:
        return any(segment.discard_index_file(path) for segment in self._segments.values())


LOG_ID: Final = 1 << 24
"""Default log id: incarnation 1, partition 0."""

READ_BYTES: Final = 1 << 20
"""Bytes read at a time; a larger block is read by itself."""


class StoredRecord(NamedTuple):
    """One record, with its offset, its ordinal, the time of its append (ms since 1970) and its id."""

    offset: int
    ordinal: int
    append_time: int
    id: int
    attribute: bytes | None
    payload: bytes


@contextmanager
def open_log(
    folder: str,
    options: LogOptions = LogOptions(),  # noqa: B008 - frozen, so one default serves all
    *,
    disk: Disk | None = None,
    clock: Clock | None = None,
    log_id: int = LOG_ID,
) -> Iterator[Log]:
    """Open the log in `folder`, creating or recovering it. The context manager closes it cleanly at the end.

    Only one process at a time can do this: the folder is locked. Raises Locked, NewerFormat, Corrupt, Full, OSError.
    """
    disk = disk or RealDisk()
    parent = folder.rstrip("/").rpartition("/")[0] or "."
    if not disk.exists(folder):
        disk.make_folder(folder)
        disk.force_folder(parent)
    lock = disk.lock(f"{folder.rstrip('/')}/lock")
    try:
        log = Log.open(disk, folder, log_id=log_id, clock=clock or SystemClock(), options=options)
        try:
            yield log
        finally:
            log.close()
    finally:
        lock.release()


def records(
    log: Log,
    *,
    offset: int | None = None,
    ordinal: int | None = None,
    time_ms: int | None = None,
    upto: Upto = "forced",
) -> Iterator[StoredRecord]:
    """Yield all records from a start position to the durable offset, or with `upto` "written" to the end of the log.

    Give at most one start position: `offset` (of a record, or inside a record), `ordinal`, or `time_ms` (of the first
    block that was appended then or later). The default is the first record. Raises BelowStart, BeyondEnd, Corrupt, and
    ValueError if there is more than one start position.
    """
    start = _start_offset(log, offset, ordinal, time_ms)
    at = start
    while True:
        try:
            chunk = log.read(at, READ_BYTES, upto=upto)
        except BeyondEnd:
            # The start is after the durable offset, but not after the end: no record there is durable yet.
            if at <= log.end_offset:
                return
            raise
        if not chunk.data:
            return
        for block in blocks_of(chunk.data, chunk.start, log.log_id):
            next_ordinal = block.control.first_ordinal
            for record in records_of(block.data):
                if record.flag & FLAG_FILLER:
                    next_ordinal += record.checksum
                    continue
                body = block.data[record.position + HEADER_SIZE : record.position + record.size]
                attribute, payload = split_body(body, record.flag)
                kept = None if attribute is None else bytes(attribute)
                where, time = block.offset + record.position, block.control.append_time
                if where >= start:
                    yield StoredRecord(where, next_ordinal, time, record.id, kept, bytes(payload))
                next_ordinal += 1
        at = chunk.next


def _start_offset(log: Log, offset: int | None, ordinal: int | None, time_ms: int | None) -> int:
    if sum(position is not None for position in (offset, ordinal, time_ms)) > 1:
        raise ValueError("pass only one start position: offset, ordinal or time_ms")
    if offset is not None:
        return log.seek_offset(offset) if log.first_offset <= offset < log.end_offset else offset
    if ordinal is not None:
        return log.offset_of_ordinal(ordinal)[0]
    return log.first_offset if time_ms is None else log.offset_of_time(time_ms)
