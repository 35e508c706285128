"""The disk, as an argument: every file call of the journal goes through `Disk` and the `File`s that it opens.

`RealDisk` is the machine's; `journal.testing.SimulatedDisk` keeps unforced bytes apart and can lose them.
Paths are strings joined with "/". Errors are `OSError`, except `Full` (no space or quota, from whatever
writes bytes or makes an entry; no descriptor left, from whatever opens) and `Locked`; forces only ever raise
`OSError` (see `journal.file`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterable
from typing import Any, Final, Protocol

from journal.errors import Full, Locked
from journal.file import BUFFERS_MAX, NO_DESCRIPTOR_ERRORS, Bytes, File, RealFile, refuse, write_all

__all__ = ["BUFFERS_MAX", "Bytes", "Disk", "File", "Lock", "RealDisk", "write_all"]

FILE_MODE: Final = 0o640
FOLDER_MODE: Final = 0o750
"""Messages are nobody else's business; the group may read, for backups."""

HOLDER_SIZE_MAX: Final = 64
"""A lock file holds a process id; more than this is not ours."""


class Lock(Protocol):
    """A held lock file."""

    def release(self) -> None: ...


class Disk(Protocol):
    """The calls on paths."""

    def open_read(self, path: str) -> File:
        """An existing file, for reading only; `IsADirectoryError` if it is a folder."""
        ...

    def open_write(self, path: str) -> File:
        """An existing file, for reading and writing."""
        ...

    def create(self, path: str) -> File:
        """A new, empty file, for reading and writing; `FileExistsError` if there is one.

        Its name survives a power cut only after `force_folder` of the folder.
        """
        ...

    def exists(self, path: str) -> bool:
        """True if there is a file or a folder."""
        ...

    def is_folder(self, path: str) -> bool:
        """True if there is a folder."""
        ...

    def list(self, path: str) -> list[str]:
        """The names in a folder, sorted."""
        ...

    def make_folder(self, path: str) -> None:
        """One new folder; its parent exists. `FileExistsError` if it is there."""
        ...

    def remove_folder(self, path: str) -> None:
        """An empty folder."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomic, also in a power cut; replaces a file at `target`. Lasts only after `force_folder`."""
        ...

    def unlink(self, path: str) -> None:
        """Removes a file's name; `FileNotFoundError` if there is none."""
        ...

    def force_folder(self, path: str) -> None:
        """Returns when the creates, renames and removals in this folder survive a power cut."""
        ...

    def open_anchor(self, path: str) -> File:
        """A handle on the file system that holds the folder `path`, for `sync_file_system`.

        Open it at the start and keep it: the system counts write errors per open handle.
        """
        ...

    def sync_file_system(self, anchor: File) -> None:
        """Forces every file and folder of the file system at once (Linux only, else `OSError` ENOSYS).

        Raises `OSError` if any write anywhere on it failed since the last call on this anchor; which file
        lost its bytes, only each file's own `force` tells.
        """
        ...

    def free_space(self, path: str) -> int:
        """Bytes that may still be written on the file system that holds `path`."""
        ...

    def size(self, path: str) -> int:
        """Bytes in a file."""
        ...

    def lock(self, path: str) -> Lock:
        """Takes the lock file `path`, made if need be; raises `Locked` if another holds it."""
        ...


class RealDisk:
    """The machine's file systems."""

    def __init__(self) -> None:
        self._spare_lock = threading.Lock()
        self._spare = _open_spare()

    def __del__(self) -> None:
        spare, self._spare = getattr(self, "_spare", -1), -1
        if spare >= 0:
            os.close(spare)

    def open_read(self, path: str) -> RealFile:
        descriptor = _open(path, os.O_RDONLY)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            # The system opens a folder as well, and refuses the first read without saying which it was.
            os.close(descriptor)
            raise is_a_folder(path)
        return RealFile(descriptor, path)

    def open_write(self, path: str) -> RealFile:
        return RealFile(_open(path, os.O_RDWR), path)

    def create(self, path: str) -> RealFile:
        return RealFile(_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), path)

    def exists(self, path: str) -> bool:
        # Not os.path.lexists, which takes a path that may not be looked at for one that is not there.
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_folder(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link to itself
                return False
            raise

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_folder(self, path: str) -> None:
        try:
            os.mkdir(path, FOLDER_MODE)
        except OSError as error:
            refuse(error, path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        try:
            os.rename(source, target)
        except OSError as error:
            refuse(error, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def force_folder(self, path: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR_ERRORS:
                raise
            self._force_folder_with_spare(path, flags)
            return
        _force_and_close(descriptor)

    def _force_folder_with_spare(self, path: str, flags: int) -> None:
        """A force cannot be put off as an open can: one descriptor is kept for the day when there is none
        left.
        """
        with self._spare_lock:
            if self._spare >= 0:
                os.close(self._spare)
            try:
                _force_and_close(os.open(path, flags))
            finally:
                self._spare = _open_spare()

    def open_anchor(self, path: str) -> RealFile:
        return RealFile(_open(path, os.O_RDONLY | os.O_DIRECTORY), path)

    def sync_file_system(self, anchor: File) -> None:
        if not isinstance(anchor, RealFile):
            raise TypeError("the anchor must come from open_anchor of this disk")
        if _syncfs is None:
            raise OSError(errno.ENOSYS, "this system cannot force one file system at once", anchor.path)
        if _syncfs(anchor.fileno()) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), anchor.path)

    def free_space(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def size(self, path: str) -> int:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise is_a_folder(path)
        return found.st_size

    def lock(self, path: str) -> RealLock:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)  # it is written
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, HOLDER_SIZE_MAX, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise Locked(path, holder) from error
            raise
        # The name of the holder is a courtesy to whoever is refused: a full disk must not prevent a start.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return RealLock(descriptor)


class RealLock:
    """A lock of `flock`: the system gives it back when the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the lock back; twice is harmless. The file stays, so that no two can hold different ones.

        Said in words: a child that was forked meanwhile has the descriptor as well, and closing ours would not do.
        """
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)


def require_files(disk: Disk, folder: str, children: Iterable[str]) -> None:
    """Raises IsADirectoryError for the first of these names in `folder` that is a folder itself."""
    for name in children:
        if disk.is_folder(f"{folder}/{name}"):
            raise is_a_folder(f"{folder}/{name}")


def is_a_folder(path: str) -> IsADirectoryError:
    """The error of the system for a folder where a file is wanted."""
    return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def is_no_folder(path: str) -> NotADirectoryError:
    """The error of the system for something else where a folder is wanted."""
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def _open(path: str, flags: int) -> int:
    """A descriptor. Raises Full where there is no space for a new file, and where no descriptor is left."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR_ERRORS:
            raise Full(f"{path}: {os.strerror(error.errno)}") from error
        refuse(error, path)


def _open_spare() -> int:
    """A descriptor to give back when it is needed; -1 if there is none to be had now."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _force_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load_syncfs() -> Any:
    """syncfs(2) of the C library, which Python's os lacks; a call through `CDLL` lets other threads run."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if function is not None:
        function.argtypes = [ctypes.c_int]
        function.restype = ctypes.c_int
    return function


_syncfs: Final = _load_syncfs()
