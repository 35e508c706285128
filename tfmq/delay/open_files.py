"""The open files of the buckets: a few, whatever the count of buckets; the one that was not used longest is closed.

A file with unforced bytes is never closed. Any thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

from journal.disk import Disk, File
from journal.fsync import KEPT_OPEN

OPEN_MAX: Final = 64
"""Descriptors for buckets that nobody uses just now: most reads are of the few that are due."""


class _Opened:
    __slots__ = ("file", "users")

    def __init__(self, file: File) -> None:
        self.file = file
        self.users = 0


class OpenFiles:
    """See the module. `limit`: how many unused ones stay open."""

    def __init__(self, disk: Disk, limit: int = OPEN_MAX) -> None:
        self.disk = disk
        self._limit = limit
        self._lock = Lock()
        self._files: dict[str, _Opened] = {}
        """By path; the one that was used last is the last."""
        self._forgotten = 0
        """Counts: a file that was opened meanwhile may be another one by now."""

    @contextmanager
    def use(self, path: str) -> Iterator[File]:
        """The file, open for the time of the block. Raises Full (no descriptor left), OSError."""
        opened = self._known(path)
        while opened is None:
            opened = self._open(path)
        try:
            yield opened.file
        finally:
            self._give(path, opened)

    @contextmanager
    def use_open(self, path: str) -> Iterator[File | None]:
        """As `use`; None where it would have to be opened, which may wait for the disk."""
        opened = self._known(path)
        try:
            yield None if opened is None else opened.file
        finally:
            if opened is not None:
                self._give(path, opened)

    def forget(self, path: str) -> None:
        """The file is about to go, or to be another one: it is closed when nobody uses it."""
        with self._lock:
            self._forgotten += 1
            opened = self._files.pop(path, None)
            if opened is not None and not opened.users:
                opened.file.close()

    def close(self) -> None:
        """Closes all."""
        for path in list(self._files):
            self.forget(path)

    def _known(self, path: str) -> _Opened | None:
        with self._lock:
            opened = self._files.pop(path, None)
            if opened is not None:
                opened.users += 1
                self._files[path] = opened
            return opened

    def _open(self, path: str) -> _Opened | None:
        """None: somebody opened it, or something was forgotten meanwhile: once more."""
        before = self._forgotten
        file = self.disk.open_read(path)
        with self._lock:
            if self._forgotten == before and path not in self._files:
                opened = self._files[path] = _Opened(file)
                opened.users = 1
                return opened
        file.close()
        return self._known(path)

    def _give(self, path: str, opened: _Opened) -> None:
        with self._lock:
            opened.users -= 1
            if self._files.get(path) is not opened:
                if not opened.users:
                    opened.file.close()
                return
            for name in [name for name, each in self._files.items() if not each.users][: -self._limit]:
                self._files.pop(name).file.close()


def keep_open(file: File) -> None:
    """Its force failed, or was never tried: closing it could swallow the error, so it stays open to the end."""
    KEPT_OPEN.append(file)
