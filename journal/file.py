"""One open file, and the loop that writes all of a buffer list.

`File` is the interface; `RealFile` is a descriptor of the machine's, made by `journal.disk.RealDisk`.
Errors are `OSError`, except `Full` (no space or quota) from whatever writes bytes. A failed *force* is always
an `OSError`, even one that says "no space": bytes that were accepted are gone, which stops a log, while
`Full` lets it go on.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn, Protocol, TypeAlias

from journal.errors import Full

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
