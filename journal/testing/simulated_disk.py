"""A disk in memory that forgets what was not forced.

It behaves to its user as `RealDisk` does, and keeps apart what readers see and what is on the platter.
`crash` makes the disk that a power cut could leave; `journal.testing.crash` enumerates them all. `faults`
makes calls fail, `after` is told of every call that changed something: the boundaries at which the power may
go.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence

from journal.errors import Full, Locked
from journal.file import BUFFERS_MAX, Bytes, File
from journal.testing.content import Content
from journal.testing.faults import Faults
from journal.testing.tree import Folder, Tree, failure, walk

SPACE_BYTES = 1 << 40
"""What an unlimited simulated disk says is free."""


class SimulatedDisk:
    """`journal.disk.Disk` in memory. May be used from several threads."""

    def __init__(self, *, space_bytes: int | None = None, descriptors_max: int | None = None) -> None:
        self.faults = Faults()
        self.after: Callable[[str, str], None] | None = None
        """Called with kind and path after each call that changed something."""
        self.space_bytes = space_bytes
        """Bytes that all files together may have; None: no limit."""
        self.descriptors_max = descriptors_max
        """Files that may be open at once; None: no limit."""
        self.is_cached = True
        """False: `pread_cached` would block, always."""
        self.closed_unforced: list[str] = []
        """Paths of files that were closed when they had unforced bytes: their errors would be lost."""
        self.open_files: set[SimulatedFile] = set()
        self.digest = b""
        """Names the state, of a disk that a power cut left: equal digests, equal names and bytes."""
        self.tree = Tree()
        self.mutex = threading.RLock()
        self.number = 0
        """Counts the calls that changed something."""
        self._locks: set[str] = set()
        self._sync_errors = 0

    def open_read(self, path: str) -> SimulatedFile:
        return self._open(path, writable=False)

    def open_write(self, path: str) -> SimulatedFile:
        return self._open(path, writable=True)

    def create(self, path: str) -> SimulatedFile:
        with self.mutex:
            self.faults.check("create", path)
            self._take_descriptor(path)
            content = Content()
            self.tree.add(self.next_number(), path, content)
            file = SimulatedFile(self, content, path, True)
        self.changed("create", path)
        return file

    def exists(self, path: str) -> bool:
        return self.tree.find(path) is not None

    def is_folder(self, path: str) -> bool:
        return isinstance(self.tree.find(path), Folder)

    def list(self, path: str) -> list[str]:
        self.faults.check("list", path)
        return sorted(self.tree.folder(path).entries)

    def make_folder(self, path: str) -> None:
        with self.mutex:
            self.faults.check("folder", path)
            self.tree.add(self.next_number(), path, Folder())
        self.changed("folder", path)

    def remove_folder(self, path: str) -> None:
        with self.mutex:
            self.faults.check("folder", path)
            if self.tree.folder(path).entries:
                raise failure(errno.ENOTEMPTY, path)
            self.tree.remove(self.next_number(), path)
        self.changed("folder", path)

    def rename(self, source: str, target: str) -> None:
        with self.mutex:
            self.faults.check("rename", target)
            self.tree.rename(self.next_number(), source, target)
        self.changed("rename", target)

    def unlink(self, path: str) -> None:
        with self.mutex:
            self.faults.check("unlink", path)
            self.tree.file(path)
            self.tree.remove(self.next_number(), path)
        self.changed("unlink", path)

    def force_folder(self, path: str) -> None:
        with self.mutex:
            self.faults.check("force_folder", path)
            self.tree.force(self.tree.folder(path))
        self.changed("force_folder", path)

    def open_anchor(self, path: str) -> SimulatedFile:
        with self.mutex:
            self.faults.check("open", path)
            self.tree.folder(path)
            self._take_descriptor(path)
            anchor = SimulatedFile(self, Content(), path, False)
            anchor.errors_seen = self._sync_errors
        return anchor

    def sync_file_system(self, anchor: File) -> None:
        """Forces everything. A fault "sync" loses the bytes of the files that its rule's `path` names.

        As on Linux: the call fails once, the next one says ok, and only each file's own force tells whose are
        gone.
        """
        if not isinstance(anchor, SimulatedFile):
            raise TypeError("the anchor must come from open_anchor of this disk")
        with self.mutex:
            self.faults.check("sync", anchor.path)
            for path, content in self.all_files():
                try:
                    self.faults.check("sync_file", path)
                except OSError:
                    content.lose()
                    self._sync_errors += 1
                else:
                    content.force()
            self.tree.force(None)
            if anchor.errors_seen != self._sync_errors:
                anchor.errors_seen = self._sync_errors
                raise failure(errno.EIO, anchor.path)
        self.changed("sync", anchor.path)

    def free_space(self, path: str) -> int:
        return SPACE_BYTES if self.space_bytes is None else max(0, self.space_bytes - self.used_bytes())

    def size(self, path: str) -> int:
        self.faults.check("size", path)
        return len(self.tree.file(path).data)

    def lock(self, path: str) -> SimulatedLock:
        with self.mutex:
            self.faults.check("lock", path)
            if path in self._locks:
                raise Locked(path)
            if not self.exists(path):
                self.tree.add(self.next_number(), path, Content())
            self._locks.add(path)
        return SimulatedLock(self._locks, path)

    def crash(self, generator: random.Random | None = None, *, keep: str = "some") -> SimulatedDisk:
        """The disk after a power cut now: `keep` "nothing" of what is unforced, "everything", or a random
        "some".
        """
        from journal.testing.crash import Moment

        return Moment(self).crash(generator, keep)

    def read_file(self, path: str) -> bytes:
        """All bytes of a file as readers see them, past faults and counts."""
        return bytes(self.tree.file(path).data)

    def durable_file(self, path: str) -> bytes:
        """The bytes of a file that are on the platter."""
        return bytes(self.tree.file(path).durable)

    def write_file(self, path: str, data: bytes) -> None:
        """Puts a whole file in place, durably: a test's own doing, past faults and counts."""
        with self.mutex:
            if self.exists(path):
                self.tree.remove(self.next_number(), path)
            self.tree.add(self.next_number(), path, Content(data))
            self.tree.force(None)

    def damage(self, path: str, position: int, data: bytes) -> None:
        """Rot: overwrites bytes for readers and on the platter, and tells nobody."""
        self.tree.file(path).damage(position, data)

    def all_files(self) -> Sequence[tuple[str, Content]]:
        """Every file by path, and those that have no name any more but are open."""
        named = [(path, node) for path, node in walk(self.tree.root) if isinstance(node, Content)]
        known = {id(content) for _, content in named}
        orphans = {id(file.content): (file.path, file.content) for file in self.open_files}
        return named + [found for key, found in orphans.items() if key not in known]

    def used_bytes(self) -> int:
        """The bytes of all files."""
        return sum(len(content.data) for _, content in self.all_files())

    def next_number(self) -> int:
        """The number of the change that is about to be made."""
        self.number += 1
        return self.number

    def changed(self, kind: str, path: str) -> None:
        """Tells whoever listens."""
        if self.after is not None:
            self.after(kind, path)

    def _open(self, path: str, *, writable: bool) -> SimulatedFile:
        with self.mutex:
            self.faults.check("open", path)
            content = self.tree.file(path)
            self._take_descriptor(path)
            return SimulatedFile(self, content, path, writable)

    def _take_descriptor(self, path: str) -> None:
        if self.descriptors_max is not None and len(self.open_files) >= self.descriptors_max:
            raise Full(f"{path}: {os.strerror(errno.EMFILE)}")


class SimulatedFile:
    """`journal.disk.File` of a `SimulatedDisk`."""

    def __init__(self, disk: SimulatedDisk, content: Content, path: str, writable: bool) -> None:
        self.path = path
        self.content = content
        self.errors_seen = content.reported
        self._disk = disk
        self._writable = writable
        disk.open_files.add(self)

    def __repr__(self) -> str:
        return f"<SimulatedFile {self.path}>"

    def size(self) -> int:
        self._check("size")
        return len(self.content.data)

    def pread(self, size: int, position: int) -> bytes:
        self._check("read")
        return bytes(self.content.data[position : position + size])

    def pread_into(self, buffer: bytearray | memoryview, position: int) -> int:
        view = memoryview(buffer)
        data = self.pread(len(view), position)
        view[: len(data)] = data
        return len(data)

    def pread_cached(self, size: int, position: int) -> bytes | None:
        return self.pread(size, position) if self._disk.is_cached else None

    def pwritev(self, buffers: Sequence[Bytes], position: int) -> int:
        if len(buffers) > BUFFERS_MAX:
            raise failure(errno.EINVAL, self.path)
        with self._disk.mutex:
            short = self._check("write", writing=True)
            data = b"".join(buffers)
            data = data[: self._room(len(data), position)]
            if short is not None:
                data = data[:short]
            if data:
                self.content.write(self._disk.next_number(), data, position)
        self._disk.changed("write", self.path)
        return len(data)

    def force(self) -> None:
        with self._disk.mutex:
            try:
                self._check("force")
            except OSError:
                self.content.lose()
                self._told()
                raise
            self.content.force()
            if self.errors_seen != self.content.errors:
                self._told()
                raise failure(errno.EIO, self.path)
        self._disk.changed("force", self.path)

    def truncate(self, size: int) -> None:
        with self._disk.mutex:
            self._check("truncate", writing=True)
            if size > len(self.content.data):
                self._room(0, size)
            self.content.truncate(self._disk.next_number(), size)
        self._disk.changed("truncate", self.path)

    def close(self) -> None:
        with self._disk.mutex:
            if self not in self._disk.open_files:
                return
            self._disk.open_files.discard(self)
            shared = any(file.content is self.content for file in self._disk.open_files)
            if self.content.pending and not shared:
                self._disk.closed_unforced.append(self.path)

    def _told(self) -> None:
        self.errors_seen = self.content.reported = self.content.errors

    def _check(self, kind: str, *, writing: bool = False) -> int | None:
        if self not in self._disk.open_files or (writing and not self._writable):
            raise failure(errno.EBADF, self.path)
        return self._disk.faults.check(kind, self.path)

    def _room(self, size: int, position: int) -> int:
        """How many of `size` bytes at `position` fit on the disk; raises `Full` if none do."""
        if self._disk.space_bytes is None:
            return size
        free = self._disk.space_bytes - self._disk.used_bytes() + len(self.content.data) - position
        if free <= 0 and position + size > len(self.content.data):
            raise Full(f"{self.path}: no space left on the simulated disk")
        return min(size, max(free, len(self.content.data) - position))


class SimulatedLock:
    """A held lock of a `SimulatedDisk`."""

    def __init__(self, locks: set[str], path: str) -> None:
        self._locks = locks
        self._path = path

    def release(self) -> None:
        self._locks.discard(self._path)
