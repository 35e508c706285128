"""A log that another process writes, seen from its folder: read up to the forced mark, while its owner appends, rolls
and removes.

Nothing is locked and nothing is written. Below the forced mark no byte ever changes, so all that an owner does to an
onlooker is to move the mark on, to take away old segments, and to take away the whole log. `look` reads the mark again;
what is not seen by then is not there. Places are found as `journal.reader` finds them, in index files that are searched
where they lie: neither the count of segments nor their sizes make it dearer. One thread at a time.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Final, TypeVar

from journal import names
from journal.disk import Disk
from journal.errors import Corrupt, CutAway
from journal.extent import Extent
from journal.foreign import ForeignSegment, Pool
from journal.mark import MarkFile, Marks, cut_since
from journal.reader import Reader
from journal.run_index import Unsound
from journal.shapes import Chunk

LOOKS_MAX: Final = 5
"""So often a folder is looked at whose files and mark do not fit each other: its owner is about to change it."""

Found = TypeVar("Found")


class Onlooker:
    """See the module. `log_id` as in the mark. Making one looks; raises as `look`."""

    def __init__(self, disk: Disk, folder: str, log_id: int, suffix: str = names.SEGMENT_SUFFIX) -> None:
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
        bases = [names.parse_segment_name(name, self._suffix) for name in self._disk.list(self.folder)]
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
            name = names.segment_name(extent.first, self._suffix)
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
