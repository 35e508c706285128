"""A segment of a log that another process writes: opened when it is first read, never changed, closed to make room.

A name may vanish at any time, by retention or because a topic was deleted: `FileNotFoundError` then, and whoever reads
looks at the log's mark, which says why. What is open stays readable.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from journal import names
from journal.disk import Bytes, Disk, File
from journal.index import Index
from journal.run_index import RunIndex
from journal.segment import Segment

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
        path = names.join(folder, names.segment_name(base, suffix))
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
