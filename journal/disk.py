"""The interface to files: the journal makes every file call through a `Disk`, which its caller passes.

`RealDisk` calls the operating system. `journal.testing.SimulatedDisk` keeps the files in memory and simulates power
losses. Paths are strings joined with "/". Errors are `OSError`, except `Locked` and `Full`. `lock` raises `Locked` if
another process holds the lock. A call that writes bytes or adds a name to a folder raises `Full` if no space or quota
is left. A call that opens a file raises `Full` if no descriptor is left. After `Full` the log continues. A failed fsync
always raises `OSError`, even for the reason "no space": written bytes may be lost, so the log must stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeAlias

from journal.errors import Full, Locked

FILE_MODE: Final = 0o640
FOLDER_MODE: Final = 0o750
"""Only the owner may write. The group may read, for backups. Others have no access, because messages are private."""

HOLDER_SIZE_MAX: Final = 64
"""Maximum bytes read from a lock file, which contains the id of the process that holds the lock."""


class Lock(Protocol):
    """A lock file that this process has locked."""

    def release(self) -> None: ...


class Disk(Protocol):
    """Interface of a file system: operations on paths. The module docstring says which errors they raise."""

    @property
    def is_replicated(self) -> bool:
        """True if a fsync is only half of what makes data durable: its caller learns later that the data is stored
        elsewhere, too. A log then raises its high watermark only in `force_done`, never in a worker."""

    def open_read(self, path: str) -> File:
        """Open an existing file for reading only; raises `IsADirectoryError` if `path` is a folder."""

    def open_write(self, path: str) -> File:
        """Open an existing file for reading and writing."""

    def create(self, path: str) -> File:
        """Create an empty file; raises `FileExistsError` if `path` exists. `force_folder` makes its name durable."""

    def exists(self, path: str) -> bool:
        """True if a file or a folder exists at `path`."""

    def is_folder(self, path: str) -> bool:
        """True if a folder exists at `path`."""

    def list(self, path: str) -> list[str]:
        """Return the names of the files and folders in a folder, sorted."""

    def make_folder(self, path: str) -> None:
        """Create a folder, whose parent folder must exist; raises `FileExistsError` if `path` exists."""

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""

    def rename(self, source: str, target: str) -> None:
        """Rename, replacing a file at `target`. Atomic even if power is lost, but durable only after `force_folder`."""

    def unlink(self, path: str) -> None:
        """Remove a file's name; raises `FileNotFoundError` if no file has this name."""

    def force_folder(self, path: str) -> None:
        """Fsync a folder: all earlier creates, renames and removals in this folder are durable on return."""

    def open_anchor(self, path: str) -> File:
        """Open a handle, called the anchor, on the file system of the folder `path`, for `sync_file_system`.

        Open the anchor before the first write and keep it open: errors that occur before it is open are not reported.
        """

    def sync_file_system(self, anchor: File) -> None:
        """Fsync every file and folder of the file system at once (Linux only, else `OSError` ENOSYS).

        Raises `OSError` if any write on the file system has failed since the last call with this anchor. The error does
        not name the files that lost bytes; to find these files, call `force` of each file.
        """

    def free_space(self, path: str) -> int:
        """Number of bytes that can still be written on the file system of `path`."""

    def size(self, path: str) -> int:
        """Size of a file in bytes."""

    def lock(self, path: str) -> Lock:
        """Lock the file `path`, which is created if missing; raises `Locked` if another process holds the lock."""


class RealDisk:
    """The file systems of this machine, through the operating system."""

    is_replicated = False

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
            # The system opens a folder without an error. The first read would fail, with an error that has no path.
            os.close(descriptor)
            raise folder_error(path)
        return RealFile(descriptor, path)

    def open_write(self, path: str) -> RealFile:
        return RealFile(_open(path, os.O_RDWR), path)

    def create(self, path: str) -> RealFile:
        return RealFile(_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), path)

    def exists(self, path: str) -> bool:
        # os.path.lexists is not used, because it treats a path that this process may not access as missing.
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
            if error.errno == errno.ELOOP:  # a symbolic link that refers to itself
                return False
            raise

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_folder(self, path: str) -> None:
        try:
            os.mkdir(path, FOLDER_MODE)
        except OSError as error:
            raise_full_or_error(error, path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        try:
            os.rename(source, target)
        except OSError as error:
            raise_full_or_error(error, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def force_folder(self, path: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR_ERRORS:
                raise
            self._fsync_folder_with_spare(path, flags)
            return
        _fsync_and_close(descriptor)

    def _fsync_folder_with_spare(self, path: str, flags: int) -> None:
        # Called if no descriptor is left to open the folder. Without an fsync of the folder the log would have to stop.
        # So one descriptor is kept in reserve. It is closed here, so that the folder can be opened.
        with self._spare_lock:
            if self._spare >= 0:
                os.close(self._spare)
            try:
                _fsync_and_close(os.open(path, flags))
            finally:
                self._spare = _open_spare()

    def open_anchor(self, path: str) -> RealFile:
        return RealFile(_open(path, os.O_RDONLY | os.O_DIRECTORY), path)

    def sync_file_system(self, anchor: File) -> None:
        if not isinstance(anchor, RealFile):
            raise TypeError("the anchor must come from open_anchor of this disk")
        if _syncfs is None:
            raise OSError(errno.ENOSYS, "this system cannot fsync a whole file system", anchor.path)
        if _syncfs(anchor.fileno()) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), anchor.path)

    def free_space(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def size(self, path: str) -> int:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise folder_error(path)
        return found.st_size

    def lock(self, path: str) -> RealLock:
        # O_RDWR, because the process id is written to the lock file.
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, HOLDER_SIZE_MAX, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise Locked(path, holder) from error
            raise
        # The process id is only for the error text of another process that finds the file locked. So if the disk is
        # full and the process id cannot be written, the start continues.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return RealLock(descriptor)


class RealLock:
    """A lock made with `flock`: the system releases it when the process ends in any way."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        # The lock file is not removed: otherwise two processes could lock different files of the same name. LOCK_UN is
        # called because closing the descriptor releases no lock while a forked child has a copy of the descriptor.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)


def check_no_folders(disk: Disk, folder: str, children: Iterable[str]) -> None:
    """Raise IsADirectoryError if one of the names `children` in `folder` is a folder instead of a file."""
    for name in children:
        if disk.is_folder(f"{folder}/{name}"):
            raise folder_error(f"{folder}/{name}")


def folder_error(path: str) -> IsADirectoryError:
    return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def not_a_folder_error(path: str) -> NotADirectoryError:
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def _open(path: str, flags: int) -> int:
    """Open a file and return its descriptor. Raises Full if no space for a new file or no descriptor is left."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR_ERRORS:
            raise Full(f"{path}: {os.strerror(error.errno)}") from error
        raise_full_or_error(error, path)


def _open_spare() -> int:
    """Open a descriptor that is kept in reserve; return -1 if no descriptor is left."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _fsync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load_syncfs() -> Any:
    """Return the function syncfs(2) of the C library, which Python's `os` lacks; None if the C library lacks it too."""
    # `CDLL` releases the interpreter lock during a call, so that other threads can run.
    function = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if function is not None:
        function.argtypes = [ctypes.c_int]
        function.restype = ctypes.c_int
    return function


_syncfs: Final = _load_syncfs()


Bytes: TypeAlias = bytes | bytearray | memoryview
"""Data to write. A memoryview must be one-dimensional and contiguous, and its items must be single bytes."""

BUFFERS_MAX: Final = 1024
"""IOV_MAX of Linux and macOS: maximum number of buffers of one vectored write."""

FULL_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_DESCRIPTOR_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""An open that fails with one of these raises `Full`, so that too many connections do not stop a log."""

NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
"""Flag for a read that does not wait for the disk; None if the system lacks it (macOS)."""

PAGE_BYTES: Final = 4096
"""The unit in which the system caches files; on a system with larger pages, some pages stay cached."""


class File(Protocol):
    """One open file. One thread may call `force` while other threads read and write."""

    @property
    def path(self) -> str: ...

    def size(self) -> int:
        """Size of the file in bytes, durable or not."""

    def pread(self, size: int, position: int) -> bytes:
        """Read `size` bytes from `position`; fewer only at the end of the file."""

    def pread_into(self, buffer: bytearray | memoryview, position: int) -> int:
        """Read bytes from `position` on until `buffer` is full or the file ends. Return how many were read."""

    def pread_cached(self, size: int, position: int) -> bytes | bytearray | None:
        """Read as `pread` does, but only cached bytes. Return None if it is not certain that all are cached."""

    def pread_uncached(self, size: int, position: int) -> bytes | bytearray:
        """Read as `pread` does, but leave in the system's cache only what was there before, where the system can."""

    def pwritev(self, buffers: Sequence[Bytes], position: int) -> int:
        """Write `buffers` (at most BUFFERS_MAX) at `position`. Return how many bytes were written, maybe not all."""

    def force(self) -> None:
        """Fsync: every byte written before the call, and the file size, are durable on return.

        If this raises `OSError`, bytes may be lost. A second call may succeed although these bytes are lost.
        """

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes, or extend it with zeros."""

    def close(self) -> None:
        """Close the file. Fsync it first, because closing can hide a write error. Repeated calls do nothing."""


class RealFile:
    """An open file of the operating system. Its owner closes it only when no other thread uses it."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.path = path
        self._descriptor = descriptor

    def __repr__(self) -> str:
        return f"<RealFile {self.path}>"

    def fileno(self) -> int:
        """The descriptor; -1 after close."""
        return self._descriptor

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def pread(self, size: int, position: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]
            done = len(data)
            while done < size and (data := os.pread(self._descriptor, size - done, position + done)):
                parts.append(data)
                done += len(data)
        except OSError as error:
            raise with_path(error, self.path) from None
        return b"".join(parts)

    def pread_into(self, buffer: bytearray | memoryview, position: int) -> int:
        view = memoryview(buffer)
        done = 0
        try:
            while done < len(view) and (count := os.preadv(self._descriptor, [view[done:]], position + done)):
                done += count
        except OSError as error:
            raise with_path(error, self.path) from None
        return done

    def pread_cached(self, size: int, position: int) -> bytes | bytearray | None:
        if NOWAIT is None:
            return None
        buffer = bytearray(size)
        try:
            count = os.preadv(self._descriptor, [buffer], position, NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return None
            raise with_path(error, self.path) from None
        if count < size and position + count < self.size():
            return None
        del buffer[count:]
        return buffer

    def pread_uncached(self, size: int, position: int) -> bytes | bytearray:
        # Bytes that are cached already stay there, because another reader may need them.
        cached = self.pread_cached(size, position)
        if cached is not None:
            return cached
        if sys.platform == "darwin":
            return self.pread(size, position)
        # Read-ahead would put bytes into the cache that nothing removes. Of this descriptor it is switched off.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        data = self.pread(size, position)
        # The system removes whole pages only. The last page, if it is not read whole, is the first of the next read.
        first = position // PAGE_BYTES * PAGE_BYTES
        os.posix_fadvise(self._descriptor, first, position + len(data) - first, os.POSIX_FADV_DONTNEED)
        return data

    def pwritev(self, buffers: Sequence[Bytes], position: int) -> int:
        try:
            return os.pwritev(self._descriptor, buffers, position)
        except OSError as error:
            raise_full_or_error(error, self.path)

    def force(self) -> None:
        try:
            if sys.platform == "darwin":
                fcntl.fcntl(self._descriptor, fcntl.F_FULLFSYNC)
            else:
                os.fdatasync(self._descriptor)
        except OSError as error:
            raise with_path(error, self.path) from None

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise_full_or_error(error, self.path)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_all(file: File, buffers: Sequence[Bytes], position: int) -> int:
    """Write all bytes of `buffers` from `position` on, in several calls if necessary. Return the number of bytes.

    If this raises `Full` or `OSError`, the file may contain some of the bytes: none, all, or only the first ones.
    """
    total = sum(map(len, buffers))
    if len(buffers) <= BUFFERS_MAX and file.pwritev(buffers, position) == total:
        return total
    # More than BUFFERS_MAX buffers need several calls. After a short write, which is rare, all buffers are written
    # again from `position`, because that is the simplest code.
    rest = [memoryview(buffer) for buffer in reversed(buffers) if len(buffer)]
    done = 0
    while done < total:
        count = file.pwritev(rest[: -BUFFERS_MAX - 1 : -1], position + done)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote nothing without an error", file.path)
        done += count
        _drop_written(rest, count)
    return total


def create_anew(disk: Disk, path: str) -> File:
    """Create an empty file. A file at `path`, left by an interrupted change, is removed first. Raises Full, OSError."""
    if disk.exists(path):
        disk.unlink(path)
    return disk.create(path)


def write_new_file(disk: Disk, path: str, pieces: Iterable[Bytes]) -> None:
    """Create a file, write `pieces` in order, fsync the file; the caller fsyncs the folder. Raises Full, OSError."""
    file = create_anew(disk, path)
    position = 0
    try:
        for piece in pieces:
            position += write_all(file, [piece], position)
    except Full:
        file.close()
        raise
    # If this fsync fails, the file stays open, because closing it could hide the error.
    file.force()
    file.close()


def read_file(disk: Disk, path: str) -> bytes:
    with contextlib.closing(disk.open_read(path)) as file:
        return file.pread(file.size(), 0)


def raise_full_or_error(error: OSError, path: str) -> NoReturn:
    """Raise `Full` if `error` means that no space or quota is left, else raise `error` with `path` added."""
    if error.errno in FULL_ERRORS:
        raise Full(f"{path}: {os.strerror(error.errno)}") from error
    raise with_path(error, path)


def with_path(error: OSError, path: str) -> OSError:
    """Return `error` with `path` added, because the error of a call on a descriptor does not name the file."""
    if error.filename is None:
        error.filename = path
    return error


def _drop_written(rest: list[memoryview], count: int) -> None:
    """Remove the `count` bytes just written from `rest`, the list of unwritten buffers, the next one last."""
    while count:
        last = rest.pop()
        if len(last) > count:
            rest.append(last[count:])
            return
        count -= len(last)


class ClosableFile(Protocol):
    def close(self) -> None: ...


class FileReferences:
    """Closes files that their owner no longer needs, but not while a thread has a reference. Thread-safe.

    A reference protects all files of the owner. Each thread acquires a reference before it reads the owner's list of
    files. The owner removes a file from that list before it passes the file to `retire`.
    """

    def __init__(self) -> None:
        # Reentrant: garbage collection inside `acquire` may end a generator, which then calls `release` in this thread.
        self._lock = threading.RLock()
        self._count = 0
        self._obsolete: list[ClosableFile] = []

    def acquire(self) -> None:
        """Add a reference: obsolete files are closed only after `release` was called once for each reference."""
        with self._lock:
            self._count += 1

    def release(self) -> None:
        with self._lock:
            self._count -= 1
        if self._obsolete:
            self._close_obsolete()

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()

    def retire(self, files: Iterable[ClosableFile]) -> None:
        obsolete = list(files)  # made before the lock is taken, because `files` may be a generator
        with self._lock:
            self._obsolete.extend(obsolete)
        self._close_obsolete()

    def _close_obsolete(self) -> None:
        with self._lock:
            if self._count:
                return
            obsolete, self._obsolete = self._obsolete, []
        for file in obsolete:
            file.close()
