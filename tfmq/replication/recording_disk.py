"""A disk that executes each call on another disk, and records what changes the replicated files.

The operations are numbered 1, 2, 3, ... in the order in which they were executed: each is executed and recorded under
one lock. So if a call has returned before another call begins, in whatever threads, it has the lower number, and a
folder to which the operations up to any number were applied is one that a crash of this process would have left. A
write of more than CUT_BYTES is recorded as several operations.

Operations are collected in a *body*. A body is *cut*, which means that it is closed and waits for `take`, when a force
begins, when it is full, and by `cut`. Forces are not operations, and the lock is not held during a force.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from journal.disk import Bytes, Disk, File, Lock
from journal.errors import Full
from journal.filenames import LOCK_NAME
from tfmq.replication.entries import CUT_BYTES, Position
from tfmq.replication.file_table import FileTable, FolderView, TrackedFile
from tfmq.replication.operations import HEADER, Kind, is_replicated

SEPARATE_BYTES: Final = 64 << 10
"""Data of at least this size is a part of its own in a body: it is not copied to the end of another part."""

LARGE_FILE_BYTES: Final = 16 << 20
"""A file of at least this size is kept open while it is unlinked."""
DISK_ERRORS: Final = (OSError, Full)
"""What the calls of a disk raise. After another exception it is unknown what was done."""

# The members of an enum are slower to get, and a write is recorded with each append of a message.
WRITE: Final = int(Kind.WRITE)


class Body(NamedTuple):
    """Operations for the body of one entry, as docs/formats/replication.md describes. `parts`: its bytes, in order."""

    parts: list[bytes | bytearray]
    operation_count: int
    last_operation: int
    """The number of the last operation. That of the first one is `last_operation - operation_count + 1`."""
    size_bytes: int


class _Forced(threading.local):
    """What the jobs of one thread have forced."""

    number: int | None = None


class RecordingDisk:
    """A `journal.disk.Disk` that records what is changed below the folder `root` of `inner`.

    Paths elsewhere, and those that are not replicated, are passed to `inner`. Thread-safe.

    `wake` is called in any thread when a body was cut; it may call `take`. `records`: if False, no bodies are made, and
    only the table of files is kept, until `resume`. `base`: the snapshot that the files are a copy of now, if they are
    a copy of one. `held`: the lock of the folder if this process holds it already; `lock` then returns it. `cut_bytes`:
    a body of this size is cut.

    A change that was executed but could not be recorded, because no memory is left or a call was interrupted, makes
    each later force and `take` raise OSError: nothing is acknowledged any more until the process starts again.

    All other programs must leave the replicated files alone. A file that one has put there can be read and removed.
    """

    def __init__(
        self,
        inner: Disk,
        root: str,
        *,
        wake: Callable[[], None] = lambda: None,
        records: bool = True,
        base: Position | None = None,
        held: Lock | None = None,
        cut_bytes: int = CUT_BYTES,
    ) -> None:
        self.inner = inner
        self.is_replicated = False
        """Set by the owner when the broker that uses this disk has started, if its answers wait for the store."""
        self.wake = wake
        self.held = held
        self.number = 0
        """The number of the last operation."""
        self.backlog_bytes = 0
        """Bytes of all bodies that were not taken, with the open one."""
        self._root = os.path.abspath(root)
        self._prefix = self._root.rstrip("/") + "/"
        self._cut_bytes = cut_bytes
        self._lock = threading.Lock()
        self._forced = _Forced()
        self._failure: BaseException | None = None
        self._is_recording = records
        self._cut_bodies: list[Body] = []
        self._has_news = False
        """Whether a body was cut since `wake` was called."""
        self._open_parts: list[bytes | bytearray] = []
        self._open_part = bytearray()
        self._open_count = 0
        self._open_bytes = 0
        self._last_name: bytes | None = None
        """The path of the last operation in the open body: the object that `TrackedFile.name` is."""
        self._table = FileTable(inner, root, base)
        _keep_freed_memory()

    # What was recorded

    @property
    def open_bytes(self) -> int:
        """Size of the body that is not cut yet."""
        return self._open_bytes

    def cut(self) -> int:
        """Cut the open body if it has operations. Return the number of the last operation. Raises OSError."""
        with self._lock:
            self._require_complete()
            self._cut_body()
            number = self.number
        if self._has_news:
            self._notify()
        return number

    def begin_force(self) -> int:
        """Note that this thread begins a force, as `force` does: cut, for `take_forced`. Return the last number."""
        number = self._forced.number = self.cut()
        return number

    def take_forced(self) -> int | None:
        """Return up to which operation this thread has forced since its last call; None if it has forced nothing."""
        forced = self._forced
        number, forced.number = forced.number, None
        return number

    def take(self) -> list[Body]:
        """Return the bodies that were cut, in order, and forget them. Raises OSError."""
        with self._lock:
            self._require_complete()
            bodies, self._cut_bodies = self._cut_bodies, []
            self.backlog_bytes -= sum(body.size_bytes for body in bodies)
        return bodies

    def drop(self) -> None:
        """Forget all bodies, and make no more until `resume`: the operations between are known to the table only."""
        with self._lock:
            self._is_recording = False
            self._cut_bodies = []
            self.backlog_bytes = 0
            self._begin_body()

    def resume(self) -> None:
        """Make bodies again, beginning with the next operation."""
        with self._lock:
            self._is_recording = True

    def begin_snapshot(self, *, resume: bool = False) -> FolderView:
        """Cut, and return a view of the folder as it is now, after the last operation. `resume`: as the method does.

        Raises ValueError if another view has not ended, and OSError.
        """
        with self._lock:
            self._require_complete()
            if self._table.view is not None:
                raise ValueError("there is a snapshot under way")
            self._cut_body()
            self._is_recording = self._is_recording or resume
            view = self._table.view = FolderView(self._table, self._lock, self.number)
        if self._has_news:
            self._notify()
        return view

    # Calls of a disk that change nothing

    def exists(self, path: str) -> bool:
        return self.inner.exists(path)

    def is_folder(self, path: str) -> bool:
        return self.inner.is_folder(path)

    def list(self, path: str) -> list[str]:
        return self.inner.list(path)

    def free_space(self, path: str) -> int:
        return self.inner.free_space(path)

    def size(self, path: str) -> int:
        return self.inner.size(path)

    def open_anchor(self, path: str) -> File:
        return self.inner.open_anchor(path)

    def lock(self, path: str) -> Lock:
        if self.held is not None and os.path.abspath(path) == self._prefix + LOCK_NAME:
            held, self.held = self.held, None
            return held
        if self._relative(path):
            raise ValueError(f"{path}: a lock file is local, and this path is replicated")
        return self.inner.lock(path)

    # Forces

    def force_folder(self, path: str) -> None:
        if self._relative(path) is not None:
            self.begin_force()
        self.inner.force_folder(path)

    def sync_file_system(self, anchor: File) -> None:
        self.begin_force()
        self.inner.sync_file_system(anchor)

    # Changes

    def open_read(self, path: str) -> File:
        # Also a file that was opened for reading can be forced.
        relative = self._relative(path)
        if not relative:
            return self.inner.open_read(path)
        with self._lock:
            opened = self.inner.open_read(path)
            tracked = self._table.files.get(relative)
        return opened if tracked is None else RecordingFile(self, opened, tracked)

    def open_write(self, path: str) -> File:
        relative = self._relative(path)
        if not relative:
            return self.inner.open_write(path)
        with self._lock:
            opened = self.inner.open_write(path)
            tracked = self._table.files.get(relative)
        if tracked is None:
            opened.close()
            raise _unknown_error(path)
        return RecordingFile(self, opened, tracked)

    def create(self, path: str) -> File:
        relative = self._relative(path)
        if not relative:
            return self.inner.create(path)
        name = relative.encode()
        made: list[File] = []

        def create() -> None:
            made.append(self.inner.create(path))

        def was_done() -> bool:
            return relative not in self._table.files and self.inner.exists(path)

        def record() -> None:
            self._table.add(relative)
            self._add(Kind.CREATE, name)

        self._change(create, was_done, record)
        return RecordingFile(self, made[0], self._table.files[relative])

    def make_folder(self, path: str) -> None:
        relative = self._relative(path)
        if not relative:
            self.inner.make_folder(path)
            return
        name = relative.encode()

        def was_done() -> bool:
            return relative not in self._table.folders and self.inner.is_folder(path)

        def record() -> None:
            self._table.folders.add(relative)
            self._add(Kind.MAKE_FOLDER, name)

        self._change(lambda: self.inner.make_folder(path), was_done, record)

    def remove_folder(self, path: str) -> None:
        relative = self._relative(path)
        if not relative or relative not in self._table.folders:
            self.inner.remove_folder(path)
            return
        self._change(
            lambda: self.inner.remove_folder(path),
            lambda: not self.inner.exists(path),
            lambda: self._record_removal(relative),
        )

    def unlink(self, path: str) -> None:
        relative = self._relative(path)
        if not relative:
            self.inner.unlink(path)
            return

        kept: list[File] = []

        def unlink() -> None:
            self._table.before_unlink(relative)
            tracked = self._table.files.get(relative)
            if tracked is not None and tracked.size >= LARGE_FILE_BYTES:
                with contextlib.suppress(*DISK_ERRORS):
                    kept.append(self.inner.open_read(path))
            self.inner.unlink(path)

        try:
            self._change(unlink, lambda: not self.inner.exists(path), lambda: self._record_removal(relative))
        finally:
            # Only now does the system free the space, without the lock: for 1 GiB that may take a third of a second.
            for file in kept:
                file.close()

    def rename(self, source: str, target: str) -> None:
        old, new = self._relative(source), self._relative(target)
        if old == new or (not old and not new):
            self.inner.rename(source, target)
            return
        if not old:
            raise OSError(
                errno.EXDEV, "a file that is not replicated cannot become a replicated one by a rename", source
            )
        old_name, new_name = old.encode(), (new or "").encode()

        def is_known() -> bool:
            return old in self._table.files or old in self._table.folders

        def rename() -> None:
            if new and not is_known() and self.inner.exists(source):
                raise _unknown_error(source)
            if new:
                self._table.before_unlink(new)
            else:
                for path in self._table.contents(old)[0]:
                    self._table.before_unlink(path)
            self.inner.rename(source, target)

        def record() -> None:
            if new:
                self._table.rename(old, new)
                self._add(Kind.RENAME, old_name, data=new_name)
            else:
                self._record_removal(old)

        def was_done() -> bool:
            return is_known() and not self.inner.exists(source) and self.inner.exists(target)

        self._change(rename, was_done, record)

    # Recording, with the lock held

    def _change(self, execute: Callable[[], None], was_done: Callable[[], bool], record: Callable[[], None]) -> None:
        """Execute and record a change. `was_done`: whether it was done although `execute` raised an error of a disk."""
        with self._lock:
            try:
                execute()
            except DISK_ERRORS:
                # A system may make a name, and fail then; a server of files may do what is asked, and not answer.
                self._finish(lambda: record() if was_done() else None)
                raise
            except BaseException as error:
                self._failure = error
                raise
            self._finish(record)
        if self._has_news:
            self._notify()

    def _finish(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:
            self._failure = error
            raise

    def _record_removal(self, path: str) -> None:
        """Record that `path`, and what is below it, is not there any more."""
        files, folders = self._table.contents(path)
        for file in files:
            self._table.remove(file)
            self._add(Kind.UNLINK, file.encode())
        for folder in folders:
            self._table.folders.remove(folder)
            self._add(Kind.REMOVE_FOLDER, folder.encode())

    def _add(self, kind: int, name: bytes, position: int = 0, data: bytes = b"") -> None:
        """Record an operation on the path `name`."""
        size = len(data)
        if size > CUT_BYTES:  # of a write; so that no entry is much larger
            for start in range(0, size, CUT_BYTES):
                self._add(kind, name, position + start, data[start : start + CUT_BYTES])
            return
        self.number += 1
        if not self._is_recording:
            return
        if name is self._last_name:
            header = HEADER.pack(kind, 0, position, size)
        else:
            header = HEADER.pack(kind, len(name), position, size) + name
            self._last_name = name
        self._open_part += header
        if size < SEPARATE_BYTES:
            self._open_part += data
        else:
            self._open_parts += (self._open_part, data)
            self._open_part = bytearray()
        size += len(header)
        self._open_count += 1
        self._open_bytes += size
        self.backlog_bytes += size
        if self._open_bytes >= self._cut_bytes:
            self._cut_body()

    def _cut_body(self) -> None:
        if self._open_count:
            parts = [*self._open_parts, self._open_part] if self._open_part else self._open_parts
            self._cut_bodies.append(Body(parts, self._open_count, self.number, self._open_bytes))
            self._has_news = True
            self._begin_body()

    def _begin_body(self) -> None:
        self._open_parts = []
        self._open_part = bytearray()
        self._open_count = self._open_bytes = 0
        self._last_name = None

    # Helpers

    def _notify(self) -> None:
        """Call `wake`, without the lock."""
        # Before the call: what is cut during the call may be noticed too late for this call, and gets its own.
        self._has_news = False
        self.wake()

    def _require_complete(self) -> None:
        if self._failure is not None:
            reason = f"a change of the data folder could not be recorded for the replicas: {self._failure!r}"
            raise OSError(errno.EIO, reason, self._root) from self._failure

    def _relative(self, path: str) -> str | None:
        """Return the path below the root, "" for the root; None if the path is elsewhere or not replicated."""
        full = os.path.abspath(path)
        if not full.startswith(self._prefix):
            return "" if full == self._root else None
        relative = full[len(self._prefix) :]
        return relative if is_replicated(relative) else None


class RecordingFile:
    """An open replicated file. Its changes are recorded under the name that it has at that moment."""

    __slots__ = ("_disk", "_tracked", "inner", "path")

    def __init__(self, disk: RecordingDisk, inner: File, tracked: TrackedFile) -> None:
        self.path = inner.path
        self.inner = inner
        self._disk = disk
        self._tracked = tracked

    def __repr__(self) -> str:
        return f"<RecordingFile {self.path}>"

    def size(self) -> int:
        return self.inner.size()

    def pread(self, size: int, position: int) -> bytes:
        return self.inner.pread(size, position)

    def pread_into(self, buffer: bytearray | memoryview, position: int) -> int:
        return self.inner.pread_into(buffer, position)

    def pread_cached(self, size: int, position: int) -> bytes | bytearray | None:
        return self.inner.pread_cached(size, position)

    def pread_uncached(self, size: int, position: int) -> bytes | bytearray:
        return self.inner.pread_uncached(size, position)

    def pwritev(self, buffers: Sequence[Bytes], position: int) -> int:
        # Copied before it is written, because a caller reuses its buffers. A single `bytes` is not copied by `join`.
        data = b"".join(buffers)
        disk, tracked = self._disk, self._tracked
        with disk._lock:
            if position < tracked.watched_below:
                tracked.before_change(position, position + len(data))
            try:
                written = self.inner.pwritev(buffers, position)
                if written > 0:  # a write of nothing does not extend the file
                    tracked.size = max(tracked.size, position + written)
                    if tracked.name is not None:
                        disk._add(WRITE, tracked.name, position, data if len(data) == written else data[:written])
            except DISK_ERRORS:
                raise  # nothing was written: otherwise the system returns how much
            except BaseException as error:
                disk._failure = error
                raise
        if disk._has_news:
            disk._notify()
        return written

    def truncate(self, size: int) -> None:
        tracked = self._tracked

        def truncate() -> None:
            if size < tracked.watched_below:
                tracked.before_change(size, tracked.size)
            self.inner.truncate(size)

        def record() -> None:
            tracked.size = size
            if tracked.name is not None:
                self._disk._add(Kind.TRUNCATE, tracked.name, size)

        # A system may change the size, and fail then to free the space.
        self._disk._change(truncate, lambda: self.inner.size() == size, record)

    def force(self) -> None:
        self._disk.begin_force()
        self.inner.force()

    def close(self) -> None:
        self.inner.close()


def unwrap(file: File) -> File:
    """Return the file of the inner disk: `AioFsyncQueue` fsyncs only files of the operating system."""
    return file.inner if isinstance(file, RecordingFile) else file


def _keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next bodies.

    The GNU C library gives large blocks back to the system when they are freed, and the system must clear each page
    when it is used again: for a write of 1 MiB that takes longer than the write. But the library keeps blocks of sizes
    that it has seen freed before, up to 32 MiB; so one is allocated here, untouched, and freed. Elsewhere this does
    nothing.
    """
    bytearray(31 << 20)


def _unknown_error(path: str) -> OSError:
    return OSError(
        errno.EIO, "another program has put this file into the replicated folder: the replicas lack it", path
    )
