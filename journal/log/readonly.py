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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from journal import filenames
from journal.clock import Clock, SystemClock
from journal.disk import Bytes, Disk, File, RealDisk
from journal.errors import BeyondEnd, Corrupt, CutAway
from journal.log.checkpoint import MarkFile, Marks, cut_since
from journal.log.index import Index, RunIndex, Unsound
from journal.log.log import Log, Upto
from journal.log.reader import Reader
from journal.log.segment import Segment
from journal.log.segments import Extent, LogOptions
from journal.record.batch import Chunk
from journal.record.block import blocks_of
from journal.record.format import FLAG_FILLER, HEADER_SIZE, records_of, split_body

OPEN_MAX: Final = 4
"""Open files per log; a reader continues from one segment to the next."""

Pool = OrderedDict["ForeignFile", File]
"""Open files in the order of their last use."""


class ForeignFile:
    """A read-only file, opened on use. Only the first `size_bytes` count; None: the whole file."""

    def __init__(self, disk: Disk, path: str, pool: Pool, size_bytes: int | None = None) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._disk = disk
        self._pool = pool

    def size(self) -> int:
        return self._opened().size() if self.size_bytes is None else self.size_bytes

    def pread(self, size: int, position: int) -> bytes:
        return self._opened().pread(size, position)

    def pread_into(self, buffer: bytearray | memoryview, position: int) -> int:
        return self._opened().pread_into(buffer, position)

    def pread_cached(self, size: int, position: int) -> bytes | bytearray | None:
        return self._opened().pread_cached(size, position)

    def pwritev(self, buffers: Sequence[Bytes], position: int) -> int:
        raise self._refused()

    def force(self) -> None:
        raise self._refused()

    def truncate(self, size: int) -> None:
        raise self._refused()

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        file = self._pool.pop(self, None)
        if file is not None:
            file.close()

    def _opened(self) -> File:
        file = self._pool.get(self)
        if file is None:
            while len(self._pool) >= OPEN_MAX:
                self._pool.popitem(last=False)[1].close()
            file = self._pool[self] = self._disk.open_read(self.path)
        self._pool.move_to_end(self)
        return file

    def _refused(self) -> OSError:
        return OSError(errno.EROFS, "the log of another process is only read", self.path)


class ForeignSegment(Segment):
    """Segment of another process's log, readable up to the offset `end`. Never written.

    The index is searched in its file, or built in memory if the file is invalid.
    """

    def __init__(
        self, disk: Disk, folder: str, base: int, log_id: int, *, end: int, pool: Pool, suffix: str
    ) -> None:
        path = filenames.join(folder, filenames.segment_name(base, suffix))
        super().__init__(disk, ForeignFile(disk, path, pool, end - base), folder, base, log_id)
        self.sealed = True
        self._runs: RunIndex | None = None
        self._trusted = True
        self._runs_file = ForeignFile(disk, self._index_path, pool)

    def grow(self, end: int) -> None:
        """Change the readable end to the offset `end`."""
        if end != self.end:
            self.size = end - self.base
            self._index = self._runs = None
            self._trusted = True

    @property
    def index(self) -> Index:
        """The index. It and its searches raise InvalidIndex: call `discard_index_file` and retry."""
        if self._runs is None and self._trusted and self._index is None:
            self._runs = RunIndex(
                self._runs_file, self.base, self.log_id, self.size, self.pread, self.sound_blocks
            )
        return self._runs or super().index

    def distrust(self, path: str) -> bool:
        """Stop using the index file if its path is `path`; return True if it was in use until now.

        The index is built from the segment after that.
        """
        known = self._trusted and path == self._index_path
        if known:
            self._trusted, self._runs = False, None
        return known

    @property
    def indexed(self) -> bool:
        return True

    def write_index(self, *, all: bool = True) -> None:
        """Do nothing: the owner of the log writes the index."""

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        self._runs_file.close()


LOOKS_MAX: Final = 5
"""Attempts to read a folder whose files and checkpoint do not match because the owner is changing it."""

Found = TypeVar("Found")


class Onlooker:
    """The log of another process, readable up to its durable offset.

    The owner may append, roll and delete meanwhile.

    Nothing is locked and nothing is written. Bytes below the durable offset never change; the owner can only
    raise that offset, delete old segments, or delete the whole log. `refresh` reads the checkpoint again;
    later changes are not visible. Searches use the index files on disk, so that neither the number nor the
    size of segments makes opening expensive. Not thread-safe.

    `log_id` as in the checkpoint. The constructor calls `refresh`, and raises as it does.
    """

    def __init__(self, disk: Disk, folder: str, log_id: int, suffix: str = filenames.SEGMENT_SUFFIX) -> None:
        self.folder = folder
        self.log_id = log_id
        self._disk = disk
        self._suffix = suffix
        self._mark = MarkFile(disk, folder, log_id)
        self._pool: Pool = OrderedDict()
        self._extent = Extent(log_id, folder)
        self._reader = Reader(self._extent)
        self._segments: dict[int, ForeignSegment] = {}
        self.marks = Marks(0, 0, -1, 0, 0)
        self.look()

    def look(self) -> Marks:
        """Read the checkpoint again and return it.

        Raises FileNotFoundError (the log does not exist, or no longer), WrongLog (another log has replaced
        it), Corrupt, NewerFormat, OSError.
        """
        for _ in range(LOOKS_MAX):
            checkpoint = self._read_mark()
            if checkpoint == self.marks:
                return checkpoint
            if self._take(checkpoint):
                break
        return self.marks

    def read(self, offset: int, max_bytes: int, epoch: int | None = None) -> Chunk:
        """As `Log.read`, up to the durable offset. Refreshes before and after the read.

        Raises as `refresh`, and BelowStart, BeyondEnd, NotARecord, CutAway (since `epoch`), Corrupt (a range
        that is damaged, or whose file is missing).
        """
        self.look()
        chunk = self._asked(offset, lambda reader: reader.read(offset, max_bytes, True, epoch, cached=False))
        cut = None if epoch is None else cut_since(self.look().starts, epoch)
        if cut is not None and cut < chunk.next:
            raise CutAway(chunk.next, cut)
        return chunk

    def seek_offset(self, offset: int) -> int:
        """Nearest record start at or before `offset`, clamped to the log. Raises as `read`."""
        return self._asked(offset, lambda reader: reader.seek_offset(offset))

    def offset_of_ordinal(self, ordinal: int) -> int:
        """As `Log.offset_of_ordinal`. Raises as `read`."""
        return self._asked(None, lambda reader: reader.offset_of_ordinal(ordinal))[0]

    def offset_of_time(self, ms: int) -> int:
        """As `Log.offset_of_time`. Raises as `read`."""
        return self._asked(None, lambda reader: reader.offset_of_time(ms))

    def close(self) -> None:
        """Close the files; the next use opens those that it needs."""
        while self._pool:
            self._pool.popitem()[1].close()

    def _read_mark(self) -> Marks:
        """Return the newest checkpoint."""
        # Reading a slot that is just being written returns the older slot: retry, so that the durable offset
        # never decreases.
        for _ in range(LOOKS_MAX):
            found = self._mark.read()
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "there is no log", self._mark.path)
            if found.epoch != self.marks.epoch or found.forced >= self.marks.forced:
                break
        assert found is not None
        return found

    def _take(self, marks: Marks) -> bool:
        """Apply `checkpoint`; False if files and checkpoint do not match, so that both must be read again."""
        if marks.epoch != self.marks.epoch or marks.starts != self.marks.starts:
            self._forget()
        bases = [filenames.parse_segment_name(name, self._suffix) for name in self._disk.list(self.folder)]
        starts = sorted(base for base in bases if base is not None and base < marks.forced)
        self._set(marks, starts[max(0, bisect_right(starts, marks.first) - 1) :])
        return marks.first >= marks.forced or bool(starts and starts[0] <= marks.first)

    def _set(self, marks: Marks, starts: list[int]) -> None:
        segment_set = self._extent
        kept = {}
        for base, end in pairwise([*starts, marks.forced]):
            segment = self._segments.get(base) or self._new_segment(base, end)
            segment.grow(end)
            kept[base] = segment
        for base in self._segments.keys() - kept.keys():
            self._segments[base].close()
        self._segments = kept
        segment_set.segments = tuple(kept.values())
        segment_set.first, segment_set.first_ordinal = marks.first, marks.first_ordinal
        segment_set.end, segment_set.end_ordinal = marks.forced, marks.forced_ordinal
        segment_set.forced, segment_set.forced_ordinal = marks.forced, marks.forced_ordinal
        segment_set.append_time, segment_set.epoch, segment_set.starts = (
            marks.append_time,
            marks.epoch,
            marks.starts,
        )
        segment_set.stopped = marks.stopped
        self.marks = marks

    def _forget(self) -> None:
        """Discard everything known about offsets: the log was truncated."""
        self.close()
        self._segments = {}
        self._extent = Extent(self.log_id, self.folder)
        self._reader = Reader(self._extent)

    def _new_segment(self, base: int, end: int) -> ForeignSegment:
        return ForeignSegment(
            self._disk, self.folder, base, self.log_id, end=end, pool=self._pool, suffix=self._suffix
        )

    def _asked(self, offset: int | None, question: Callable[[Reader], Found]) -> Found:
        """Run `question`.

        Retry after an invalid index file or a file that was deleted since the last refresh.
        """
        while True:
            try:
                self._require(offset)
                return question(self._reader)
            except Unsound as error:
                if not self._distrust(error.path):
                    raise
            except FileNotFoundError as error:
                removed = str(error.filename)
                if not self._distrust(removed) and not self._moved(removed):
                    raise self._missing(removed) from error

    def _require(self, offset: int | None) -> None:
        """Raise Corrupt if no segment has `offset` although the checkpoint says that it exists."""
        segment_set = self._extent
        if offset is None or not segment_set.first <= offset < segment_set.end:
            return
        segments = segment_set.segments
        if not segments or segments[0].base > offset:
            end = segments[0].base if segments else segment_set.end
            name = filenames.segment_name(segment_set.first, self._suffix)
            raise Corrupt(
                self.folder, segment_set.first, end, f"a segment file is missing, {name} or a later one"
            )

    def _distrust(self, path: str) -> bool:
        return any(segment.distrust(path) for segment in self._segments.values())

    def _moved(self, path: str) -> bool:
        """True if the missing file is no longer expected: the first offset of the log has increased."""
        self.look()
        self._take(self.marks)
        return all(segment.path != path for segment in self._segments.values())

    def _missing(self, path: str) -> Exception:
        for base, segment in self._segments.items():
            if segment.path == path:
                return Corrupt(path, base, segment.end, "the segment file is missing")
        return FileNotFoundError(errno.ENOENT, "the file is missing", path)


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

    Ends at the durable offset, or with "written" at the end of the log.

    Start with at most one of `offset` (of a record, or any offset inside one), `ordinal` and `time_ms` (first
    block appended then or later); default: the first record. Raises ValueError, BelowStart, BeyondEnd,
    Corrupt.
    """
    start = _start(log, offset, ordinal, time_ms)
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
        for record in _records(chunk.data, chunk.start, log.log_id):
            if record.offset >= start:
                yield record
        at = chunk.next


def _start(log: Log, offset: int | None, ordinal: int | None, time_ms: int | None) -> int:
    if sum(position is not None for position in (offset, ordinal, time_ms)) > 1:
        raise ValueError("pass only one start position: offset, ordinal or time_ms")
    if offset is not None:
        return log.seek_offset(offset) if log.first_offset <= offset < log.end_offset else offset
    if ordinal is not None:
        return log.offset_of_ordinal(ordinal)[0]
    return log.first_offset if time_ms is None else log.offset_of_time(time_ms)


def _records(data: bytes | bytearray | memoryview, start: int, log_id: int) -> Iterator[StoredRecord]:
    for block in blocks_of(data, start, log_id):
        ordinal = block.control.first_ordinal
        for record in records_of(block.data):
            if record.flag & FLAG_FILLER:
                ordinal += record.checksum
                continue
            body = block.data[record.position + HEADER_SIZE : record.position + record.size]
            attribute, payload = split_body(body, record.flag)
            kept = None if attribute is None else bytes(attribute)
            where = block.offset + record.position
            yield StoredRecord(where, ordinal, block.control.append_time, record.id, kept, bytes(payload))
            ordinal += 1
