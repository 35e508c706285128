"""A segment of a log that another process writes: opened when it is first read, never changed, closed to make room.

A name may vanish at any time, by retention or because a topic was deleted: `FileNotFoundError` then, and whoever reads
looks at the log's mark, which says why. What is open stays readable.
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
"""Files of one log that are open at once: a reader goes from one segment to the next."""

Pool = OrderedDict["ForeignFile", File]
"""What is open, in the order of the last use."""


class ForeignFile:
    """A file that is only read; `size_bytes`: so much of it counts, None: as much as there is."""

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
        """It is opened again by the next read."""
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
    """See the module. `end`: the offset up to which it is read. Its index is searched in its file, else made in memory;
    nothing is ever written."""

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
        """It is read up to `end` from now on."""
        if end != self.end:
            self.size = end - self.base
            self._index = self._runs = None
            self._trusted = True

    @property
    def index(self) -> Index:
        """Raises Unsound from here or from its searches: `distrust` its file then, and ask again."""
        if self._runs is None and self._trusted and self._index is None:
            self._runs = RunIndex(
                self._runs_file, self.base, self.log_id, self.size, self.pread, self.sound_blocks
            )
        return self._runs or super().index

    def distrust(self, path: str) -> bool:
        """If the index file is at `path`, the index is made from the segment from now on; whether it is news."""
        known = self._trusted and path == self._index_path
        if known:
            self._trusted, self._runs = False, None
        return known

    @property
    def indexed(self) -> bool:
        return True

    def write_index(self, *, all: bool = True) -> None:
        """It is its owner's."""

    def close(self) -> None:
        """Gives the descriptors back."""
        self.file.close()
        self._runs_file.close()


LOOKS_MAX: Final = 5
"""So often a folder is looked at whose files and mark do not fit each other: its owner is about to change it."""

Found = TypeVar("Found")


class Onlooker:
    """A log that another process writes, seen from its folder: read up to the forced mark, while its owner appends,
    rolls and removes.

    Nothing is locked and nothing is written. Below the forced mark no byte ever changes, so all that an owner does to
    an onlooker is to move the mark on, to take away old segments, and to take away the whole log. `look` reads the mark
    again; what is not seen by then is not there. Places are found as `journal.log.reader` finds them, in index files
    that are searched where they lie: neither the count of segments nor their sizes make it dearer. One thread at a
    time.

    `log_id` as in the mark. Making one looks; raises as `look`.
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
        """What the log's owner says now: where it begins, up to where it is forced.

        Raises FileNotFoundError (there is no log, any more), WrongLog (another one took its place), Corrupt,
        NewerFormat, OSError.
        """
        for _ in range(LOOKS_MAX):
            marks = self._read_mark()
            if marks == self.marks:
                return marks
            if self._take(marks):
                break
        return self.marks

    def read(self, offset: int, max_bytes: int, epoch: int | None = None) -> Chunk:
        """As `Log.read` up to the forced mark; the mark is looked at before and behind it.

        Raises as `look`, and BelowStart, BeyondEnd, NotARecord, CutAway (since `epoch`), Corrupt (a range that is
        damaged, or whose file is missing).
        """
        self.look()
        chunk = self._asked(offset, lambda reader: reader.read(offset, max_bytes, True, epoch, cached=False))
        cut = None if epoch is None else cut_since(self.look().starts, epoch)
        if cut is not None and cut < chunk.next:
            raise CutAway(chunk.next, cut)
        return chunk

    def seek_offset(self, offset: int) -> int:
        """The nearest record start at or before `offset`, within the log. Raises as `read`."""
        return self._asked(offset, lambda reader: reader.seek_offset(offset))

    def offset_of_ordinal(self, ordinal: int) -> int:
        """As `Log.offset_of_ordinal`. Raises as `read`."""
        return self._asked(None, lambda reader: reader.offset_of_ordinal(ordinal))[0]

    def offset_of_time(self, ms: int) -> int:
        """As `Log.offset_of_time`. Raises as `read`."""
        return self._asked(None, lambda reader: reader.offset_of_time(ms))

    def close(self) -> None:
        """Gives the descriptors back; the next use opens what it needs."""
        while self._pool:
            self._pool.popitem()[1].close()

    def _read_mark(self) -> Marks:
        """The newest slot; a slot that is just being written is read once more, for the mark never to go back."""
        for _ in range(LOOKS_MAX):
            found = self._mark.read()
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "there is no log", self._mark.path)
            if found.epoch != self.marks.epoch or found.forced >= self.marks.forced:
                break
        assert found is not None
        return found

    def _take(self, marks: Marks) -> bool:
        """Sees the log as `marks` say; False: files and mark do not fit, so both are to be looked at again."""
        if marks.epoch != self.marks.epoch or marks.starts != self.marks.starts:
            self._forget()
        bases = [filenames.parse_segment_name(name, self._suffix) for name in self._disk.list(self.folder)]
        starts = sorted(base for base in bases if base is not None and base < marks.forced)
        self._set(marks, starts[max(0, bisect_right(starts, marks.first) - 1) :])
        return marks.first >= marks.forced or bool(starts and starts[0] <= marks.first)

    def _set(self, marks: Marks, starts: list[int]) -> None:
        extent = self._extent
        kept = {}
        for base, end in pairwise([*starts, marks.forced]):
            segment = self._segments.get(base) or self._new_segment(base, end)
            segment.grow(end)
            kept[base] = segment
        for base in self._segments.keys() - kept.keys():
            self._segments[base].close()
        self._segments = kept
        extent.segments = tuple(kept.values())
        extent.first, extent.first_ordinal = marks.first, marks.first_ordinal
        extent.end, extent.end_ordinal = marks.forced, marks.forced_ordinal
        extent.forced, extent.forced_ordinal = marks.forced, marks.forced_ordinal
        extent.append_time, extent.epoch, extent.starts = marks.append_time, marks.epoch, marks.starts
        extent.stopped = marks.stopped
        self.marks = marks

    def _forget(self) -> None:
        """The log was cut: what was known of places in it may not hold."""
        self.close()
        self._segments = {}
        self._extent = Extent(self.log_id, self.folder)
        self._reader = Reader(self._extent)

    def _new_segment(self, base: int, end: int) -> ForeignSegment:
        return ForeignSegment(
            self._disk, self.folder, base, self.log_id, end=end, pool=self._pool, suffix=self._suffix
        )

    def _asked(self, offset: int | None, question: Callable[[Reader], Found]) -> Found:
        """The answer; asked again where an index file did not hold, or a file has gone since the last look."""
        while True:
            try:
                self._require(offset)
                return question(self._reader)
            except Unsound as error:
                if not self._distrust(error.path):
                    raise
            except FileNotFoundError as error:
                gone = str(error.filename)
                if not self._distrust(gone) and not self._moved(gone):
                    raise self._missing(gone) from error

    def _require(self, offset: int | None) -> None:
        """Raises Corrupt where no segment has `offset`, which the mark says is there."""
        extent = self._extent
        if offset is None or not extent.first <= offset < extent.end:
            return
        segments = extent.segments
        if not segments or segments[0].base > offset:
            end = segments[0].base if segments else extent.end
            name = filenames.segment_name(extent.first, self._suffix)
            raise Corrupt(
                self.folder, extent.first, end, f"a segment file is missing, {name} or one behind it"
            )

    def _distrust(self, path: str) -> bool:
        return any(segment.distrust(path) for segment in self._segments.values())

    def _moved(self, path: str) -> bool:
        """Whether the file that is not there is not expected any more: the log's beginning has moved on."""
        self.look()
        self._take(self.marks)
        return all(segment.path != path for segment in self._segments.values())

    def _missing(self, path: str) -> Exception:
        for base, segment in self._segments.items():
            if segment.path == path:
                return Corrupt(path, base, segment.end, "the segment file is missing")
        return FileNotFoundError(errno.ENOENT, "the file is missing", path)


# A log without a broker around it: open a folder on the real disk, walk its records one by one.
#
# The broker hands on whole blocks and never looks at a record; a program that keeps its own log wants the records.

LOG_ID: Final = 1 << 24
"""The id of a log that is alone: incarnation 1, partition 0."""

READ_BYTES: Final = 1 << 20
"""What is read at once; a larger block comes alone."""


class StoredRecord(NamedTuple):
    """One record: where it is, when it was appended (ms since 1970), and what it holds."""

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
    """The log in `folder`, made where it is not there, recovered where it is, closed clean at the end.

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
    """Every record from a place on, up to the forced mark as it is then, or with "written" to the end.

    `offset`: a record's own, or any at or behind one · `ordinal`: the n-th record · `time_ms`: the first block appended
    then or later; none of them: the first record that is left. Raises BelowStart, BeyondEnd, Corrupt.
    """
    start = _start(log, offset, ordinal, time_ms)
    at = start
    while True:
        try:
            chunk = log.read(at, READ_BYTES, upto=upto)
        except BeyondEnd:
            # A place between the forced mark and the end: nothing that may be shown yet.
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
    if sum(place is not None for place in (offset, ordinal, time_ms)) > 1:
        raise ValueError("give one place to start from: offset, ordinal or time_ms")
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
