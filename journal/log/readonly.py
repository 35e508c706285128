"""Read-only access to the log of another process, and a log on a folder without a broker.

`ReadOnlyLog` never changes or locks anything. Its files are opened when first read and closed to limit open
descriptors. A name may vanish at any time, by retention or because the topic was deleted: the reader then
gets FileNotFoundError and refreshes from the log's checkpoint, which has the reason. An open file stays
readable.

`open_log` and `records` are for programs that keep a log of their own: the broker returns whole blocks and
never parses a record, a program needs the records.
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
from journal.log.reader import LogReader
from journal.log.segment import Segment
from journal.log.segments import LogOptions, SegmentSet
from journal.record.batch import Chunk
from journal.record.block import blocks_of
from journal.record.format import FLAG_FILLER, HEADER_SIZE, records_of, split_body

OPEN_MAX: Final = 4
"""Open files per log; a reader continues from one segment to the next."""

OpenFiles = OrderedDict["ReadOnlyFile", File]
"""Open files in the order of their last use."""


class ReadOnlyFile:
    """A read-only file, opened on use. Only the first `size_bytes` count; None: the whole file."""

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
    """Segment of another process's log, readable up to the offset `end`. Never written.

    The index is searched in its file, or built in memory if the file is invalid.
    """

    def __init__(
        self, disk: Disk, folder: str, base: int, log_id: int, *, end: int, pool: OpenFiles, suffix: str
    ) -> None:
        path = filenames.join(folder, filenames.segment_name(base, suffix))
        super().__init__(disk, ReadOnlyFile(disk, path, pool, end - base), folder, base, log_id)
        self.sealed = True
        self._disk_index: OnDiskIndex | None = None
        self.has_index = True
        self._index_file_usable = True
        self._index_file = ReadOnlyFile(disk, self._index_path, pool)

    def set_end(self, end: int) -> None:
        """Change the readable end to the offset `end`."""
        if end != self.end:
            self.size = end - self.base
            self._index = self._disk_index = None
            self._index_file_usable = True

    @property
    def index(self) -> SegmentIndex:
        """The index. It and its searches raise InvalidIndex: call `discard_index_file` and retry."""
        if self._disk_index is None and self._index_file_usable and self._index is None:
            self._disk_index = OnDiskIndex(
                self._index_file, self.base, self.log_id, self.size, self.pread, self.valid_blocks
            )
        return self._disk_index or super().index

    def discard_index_file(self, path: str) -> bool:
        """Stop using the index file if its path is `path`; return True if it was in use until now.

        The index is built from the segment after that.
        """
        known = self._index_file_usable and path == self._index_path
        if known:
            self._index_file_usable, self._disk_index = False, None
        return known

    def write_index(self) -> None:
        """Do nothing: the owner of the log writes the index."""

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        self._index_file.close()


REFRESH_ATTEMPTS_MAX: Final = 5
"""Attempts to read a folder whose files and checkpoint do not match because the owner is changing it."""

Found = TypeVar("Found")


class ReadOnlyLog:
    """The log of another process, readable up to its durable offset.

    The owner may append, roll and delete meanwhile. Nothing is locked and nothing is written. Bytes below the
    durable offset never change; the owner can only raise that offset, delete old segments, or delete the
    whole log. `refresh` reads the checkpoint again; later changes are not visible. Searches use the index
    files on disk, so that neither the number nor the size of segments makes opening expensive. Not
    thread-safe.

    `log_id` as in the checkpoint. The constructor calls `refresh`, and raises as it does.
    """

    def __init__(self, disk: Disk, folder: str, log_id: int, suffix: str = filenames.SEGMENT_SUFFIX) -> None:
        self.folder = folder
        self.log_id = log_id
        self._disk = disk
        self._suffix = suffix
        self._checkpoint_file = LogCheckpointFile(disk, folder, log_id)
        self._open_files: OpenFiles = OrderedDict()
        self._segment_set = SegmentSet(log_id)
        self._reader = LogReader(self._segment_set)
        self._segments: dict[int, ReadOnlySegment] = {}
        self.checkpoint = LogCheckpoint(0, 0, -1, 0, 0)
        self.refresh()

    def refresh(self) -> LogCheckpoint:
        """Read the checkpoint again and return it.

        Raises FileNotFoundError (the log does not exist, or no longer), WrongLog (another log has replaced
        it), Corrupt, NewerFormat, OSError.
        """
        for _ in range(REFRESH_ATTEMPTS_MAX):
            checkpoint = self._read_checkpoint()
            if checkpoint == self.checkpoint:
                return checkpoint
            if self._apply_checkpoint(checkpoint):
                break
        return self.checkpoint

    def read(self, offset: int, max_bytes: int, epoch: int | None = None) -> Chunk:
        """As `Log.read`, up to the durable offset. Refreshes before and after the read.

        Raises as `refresh`, and BelowStart, BeyondEnd, NotARecord, CutAway (since `epoch`), Corrupt (a range
        that is damaged, or whose file is missing).
        """
        self.refresh()
        chunk = self._retry(offset, lambda reader: reader.read(offset, max_bytes, True, epoch, cached=False))
        cut = None if epoch is None else truncated_since(self.refresh().starts, epoch)
        if cut is not None and cut < chunk.next:
            raise CutAway(chunk.next, cut)
        return chunk

    def seek_offset(self, offset: int) -> int:
        """Nearest record start at or before `offset`, clamped to the log. Raises as `read`."""
        return self._retry(offset, lambda reader: reader.seek_offset(offset))

    def offset_of_ordinal(self, ordinal: int) -> int:
        """As `Log.offset_of_ordinal`. Raises as `read`."""
        return self._retry(None, lambda reader: reader.offset_of_ordinal(ordinal))[0]

    def offset_of_time(self, ms: int) -> int:
        """As `Log.offset_of_time`. Raises as `read`."""
        return self._retry(None, lambda reader: reader.offset_of_time(ms))

    def close(self) -> None:
        """Close the files; the next use opens those that it needs."""
        while self._open_files:
            self._open_files.popitem()[1].close()

    def _read_checkpoint(self) -> LogCheckpoint:
        """Return the newest checkpoint."""
        # Reading a slot that is just being written returns the older slot: retry, so that the durable offset
        # never decreases.
        for _ in range(REFRESH_ATTEMPTS_MAX):
            found = self._checkpoint_file.read()
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "there is no log", self._checkpoint_file.path)
            if found.epoch != self.checkpoint.epoch or found.durable >= self.checkpoint.durable:
                break
        assert found is not None
        return found

    def _apply_checkpoint(self, checkpoint: LogCheckpoint) -> bool:
        """Apply `checkpoint`; False if files and checkpoint do not match, so that both must be read again."""
        if checkpoint.epoch != self.checkpoint.epoch or checkpoint.starts != self.checkpoint.starts:
            # The owner has truncated the log: no segment or offset is known any more.
            self.close()
            self._segments = {}
            self._segment_set = SegmentSet(self.log_id)
            self._reader = LogReader(self._segment_set)
        bases = [filenames.parse_segment_name(name, self._suffix) for name in self._disk.list(self.folder)]
        starts = sorted(base for base in bases if base is not None and base < checkpoint.durable)
        self._set_segments(checkpoint, starts[max(0, bisect_right(starts, checkpoint.first) - 1) :])
        return checkpoint.first >= checkpoint.durable or bool(starts and starts[0] <= checkpoint.first)

    def _set_segments(self, checkpoint: LogCheckpoint, starts: list[int]) -> None:
        segment_set = self._segment_set
        kept = {}
        for base, end in pairwise([*starts, checkpoint.durable]):
            segment = self._segments.get(base) or ReadOnlySegment(
                self._disk, self.folder, base, self.log_id, end=end, pool=self._open_files, suffix=self._suffix
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
        """Call `question` with the reader of this log, and return its result.

        It is called again after an invalid index file, or if a file was deleted since the last refresh.
        """
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
        """Raise Corrupt if no segment has `offset` although the checkpoint says that it exists."""
        segment_set = self._segment_set
        if offset is None or not segment_set.first <= offset < segment_set.end:
            return
        segments = segment_set.segments
        if not segments or segments[0].base > offset:
            end = segments[0].base if segments else segment_set.end
            name = filenames.segment_name(segment_set.first, self._suffix)
            raise Corrupt(self.folder, segment_set.first, end, f"a segment file is missing, {name} or a later one")

    def _discard_index_file(self, path: str) -> bool:
        return any(segment.discard_index_file(path) for segment in self._segments.values())


LOG_ID: Final = 1 << 24
"""Default log id: incarnation 1, partition 0."""

READ_BYTES: Final = 1 << 20
"""Bytes read at a time; a larger block is read alone."""


class StoredRecord(NamedTuple):
    """One record, with its offset, its ordinal and the time of its append (ms since 1970)."""

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
    """Open the log in `folder`, creating or recovering it; it is closed cleanly at the end.

    One process at a time: the folder is locked. Raises Locked, NewerFormat, Corrupt, Full, OSError.
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
    """Yield all records from a start position.

    Ends at the durable offset, or with "written" at the end of the log. Start with at most one of `offset`
    (of a record, or any offset inside one), `ordinal` and `time_ms` (first block appended then or later);
    default: the first record. Raises ValueError, BelowStart, BeyondEnd, Corrupt.
    """
    start = _start_offset(log, offset, ordinal, time_ms)
    at = start
    while True:
        try:
            chunk = log.read(at, READ_BYTES, upto=upto)
        except BeyondEnd:
            # The start is between the durable offset and the end: nothing is readable yet.
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
