"""The disk, as an argument: every file call of the journal goes through `Disk` and the `File`s that it opens.

`RealDisk` is the machine's; `journal.testing.SimulatedDisk` keeps unforced bytes apart and can lose them.
Paths are strings joined with "/". Errors are `OSError`, except `Full` (no space or quota, from whatever
writes bytes or makes an entry; no descriptor left, from whatever opens) and `Locked`; forces only ever raise
`OSError` (see `journal.disk`).
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


# One open file, and the loop that writes all of a buffer list.
#
# `File` is the interface; `RealFile` is a descriptor of the machine's, made by `journal.disk.RealDisk`.
# Errors are `OSError`, except `Full` (no space or quota) from whatever writes bytes. A failed *force* is always
# an `OSError`, even one that says "no space": bytes that were accepted are gone, which stops a log, while
# `Full` lets it go on.

if sys.platform == "darwin":
    import fcntl

Bytes: TypeAlias = bytes | bytearray | memoryview
"""What may be written: one-dimensional, contiguous, of single bytes."""

BUFFERS_MAX: Final = 1024
"""IOV_MAX of Linux and macOS: one vectored write takes no more buffers."""

FULL_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_DESCRIPTOR_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""From an open these too mean "later": too many connections must not stop a log."""

NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
"""The flag by which a read takes only what is in memory; None where the system has none (macOS)."""


class File(Protocol):
    """One open file. `force` may run in another thread while this one reads and writes."""

    @property
    def path(self) -> str: ...

    def size(self) -> int:
        """Bytes in the file now, forced or not."""
        ...

    def pread(self, size: int, position: int) -> bytes:
        """`size` bytes from `position`; fewer only where the file ends."""
        ...

    def pread_into(self, buffer: bytearray | memoryview, position: int) -> int:
        """Fills `buffer` from `position`; the count of bytes read, less than its size only where the file
        ends.
        """
        ...

    def pread_cached(self, size: int, position: int) -> bytes | bytearray | None:
        """As `pread`, but None where it would wait for the disk, or where the system cannot tell."""
        ...

    def pwritev(self, buffers: Sequence[Bytes], position: int) -> int:
        """Writes up to `BUFFERS_MAX` buffers; the count of bytes written, which may be short. See
        `write_all`.
        """
        ...

    def force(self) -> None:
        """Returns when every byte written before the call, and the size, survive a power cut.

        Raises `OSError`; then the bytes may be gone for good and calling again proves nothing.
        """
        ...

    def truncate(self, size: int) -> None:
        """Cuts the file to `size` bytes, or grows it with zeros."""
        ...

    def close(self) -> None:
        """Gives the descriptor back; twice is harmless. Never close a file with unforced bytes: errors get
        lost.
        """
        ...


class RealFile:
    """A descriptor. The owner closes it only when no other thread is inside a call."""

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

    def pwritev(self, buffers: Sequence[Bytes], position: int) -> int:
        try:
            return os.pwritev(self._descriptor, buffers, position)
        except OSError as error:
            refuse(error, self.path)

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
            refuse(error, self.path)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_all(file: File, buffers: Sequence[Bytes], position: int) -> int:
    """Writes every byte of `buffers` from `position` on and returns their count.

    One `pwritev` where the system takes it whole; goes on behind short writes, and in steps of `BUFFERS_MAX`.
    Raises `Full` or `OSError`; then any prefix of the bytes may be in the file.
    """
    total = sum(map(len, buffers))
    if len(buffers) <= BUFFERS_MAX and file.pwritev(buffers, position) == total:
        return total
    # A short write is rare: what it wrote is simply written again, the same bytes at the same place.
    rest = [memoryview(buffer) for buffer in reversed(buffers) if len(buffer)]
    done = 0
    while done < total:
        count = file.pwritev(rest[: -BUFFERS_MAX - 1 : -1], position + done)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and named no error", file.path)
        done += count
        _drop(rest, count)
    return total


def refuse(error: OSError, what: str) -> NoReturn:
    """Raises `Full` for an error that says "no space", else the error itself."""
    if error.errno in FULL_ERRORS:
        raise Full(f"{what}: {os.strerror(error.errno)}") from error
    raise with_path(error, what)


def with_path(error: OSError, path: str) -> OSError:
    """The error, naming `path`: a call on a descriptor does not say which file it was about."""
    if error.filename is None:
        error.filename = path
    return error


def _drop(rest: list[memoryview], count: int) -> None:
    """Takes `count` written bytes off a reversed list of buffers."""
    while count:
        last = rest.pop()
        if len(last) > count:
            rest.append(last[count:])
            return
        count -= len(last)


class Closable(Protocol):
    """What can be retired."""

    def close(self) -> None: ...


class Pins:
    """Who is using a set of files; a file that left the set is closed when nobody does.

    Whoever uses the set pins it first, then takes the list of files. Whoever takes a file out replaces the list first,
    then retires the file. So a file that somebody can have in his hand is not closed. Any thread.

    `with pins:` pins for the time of the block.
    """

    def __init__(self) -> None:
        # One that may be taken twice: a generator that is collected inside `pin` ends its own block there.
        self._lock = threading.RLock()
        self._count = 0
        self._retired: list[Closable] = []

    def pin(self) -> None:
        """What is retired from now on is not closed before `unpin`; pins are counted."""
        with self._lock:
            self._count += 1

    def unpin(self) -> None:
        """Takes one `pin` back."""
        with self._lock:
            self._count -= 1
        if self._retired:
            self._close_retired()

    def __enter__(self) -> None:
        self.pin()

    def __exit__(self, *error: object) -> None:
        self.unpin()

    def retire(self, files: Iterable[Closable]) -> None:
        """Closes them as soon as nothing is pinned, which may be at once."""
        gone = list(files)  # first: whatever may call `unpin` meanwhile does not meet half of them
        with self._lock:
            self._retired.extend(gone)
        self._close_retired()

    def _close_retired(self) -> None:
        with self._lock:
            if self._count:
                return
            retired, self._retired = self._retired, []
        for file in retired:
            file.close()
