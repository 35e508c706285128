"""A simulated disk in memory, and the states in which a power loss could leave it.

For each sector of 512 bytes, a power loss leaves one of its *versions*: the bytes after the last fsync, or after any
later write. Likewise it leaves the size of a file after the last fsync, or after any later change. The entries of a
folder are durable only after an fsync of the folder: until then each create, rename or removal may or may not survive.
Sectors, sizes and these operations do not depend on each other: a power loss may leave every combination.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from journal.disk import BUFFERS_MAX, Bytes, File
from journal.errors import Full, Locked
from journal.testing.faults import Faults

SECTOR_BYTES = 512
PAGE_BYTES = 4096
"""A write that extends a file changes its size in steps of this many bytes. A power loss may leave the size of any
step."""

Data: TypeAlias = bytes | bytearray


class PendingChange(NamedTuple):
    """A non-durable change of a file: `data` written at `position`; if `data` is None, a truncation to `position`."""

    number: int
    position: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        """Apply the change to `content`. If the change begins after the end of `content`, zeros fill the gap."""
        content.extend(bytes(max(0, self.position - len(content))))
        if self.data is None:
            del content[self.position :]
        else:
            content[self.position : self.position + len(self.data)] = self.data

    def sectors(self, size_before: int) -> range:
        """Sectors whose bytes the change may modify. `size_before`: size of the file before the change."""
        end = size_before if self.data is None else self.position + len(self.data)
        return range(self.position // SECTOR_BYTES, -(-end // SECTOR_BYTES))


class SectorVersion(NamedTuple):
    """The 512 bytes of a sector after the change `number`, or if `number` is 0, after the last fsync."""

    number: int
    data: bytes


class FileContent:
    """The bytes of one file.

    `data`: the bytes that readers see. `durable`: the bytes on the disk. `pending`: the changes since the last fsync.
    `lost`: sectors whose fsync failed. The disk does not have the bytes of these sectors that readers see, and the next
    fsync does not write these bytes, because the system considers them clean.
    """

    __slots__ = ("_image", "data", "durable", "errors", "lost", "pending", "reported")

    def __init__(self, durable: bytes = b"") -> None:
        self.data: Data = durable
        self.durable: Data = durable
        self.pending: list[PendingChange] = []
        self.lost: set[int] = set()
        self.errors = 0
        """Number of fsyncs that have lost bytes."""
        self.reported = 0
        """How many errors in `errors` an fsync has reported. A file object opened later reports only further errors."""
        self._image: FileImage | None = None

    def change(self, change: PendingChange) -> None:
        if not isinstance(self.data, bytearray):
            self.data = bytearray(self.data)
        change.apply(self.data)
        self.pending.append(change)
        self._image = None

    def fsync(self) -> None:
        """Make all pending changes durable. A lost sector becomes durable only if it was written again."""
        if not self.pending:
            return
        self._image = None
        if not self.lost:
            self.durable = self.data = bytes(self.data)
            self.pending = []
            return
        touched = _all_changed_sectors(len(self.durable), self.pending)
        old = self.durable
        self.durable = bytearray(self.data)
        for sector in self.lost - touched:
            first = sector * SECTOR_BYTES
            room = max(0, min(SECTOR_BYTES, len(self.durable) - first))
            self.durable[first : first + room] = _sector(old, sector)[:room]
        self.lost -= touched
        self.pending = []

    def fail_fsync(self) -> None:
        """Let an fsync fail: no pending change becomes durable, but the system considers their bytes clean."""
        self.lost |= _all_changed_sectors(len(self.durable), self.pending)
        self.pending = []
        self.errors += 1
        self._image = None

    def image(self) -> FileImage:
        if self._image is None:
            self.durable = bytes(self.durable)
            seen = bytes(self.data) if self.lost and self.pending else b""
            self._image = FileImage(self.durable, tuple(self.pending), frozenset(self.lost), seen)
        return self._image

    def damage(self, position: int, data: bytes) -> None:
        """Change bytes, for readers and on the disk. No call reports an error."""
        for name in ("data", "durable"):
            content = bytearray(getattr(self, name))
            content[position : position + len(data)] = data
            setattr(self, name, content)
        self._image = None


@dataclass(eq=False)
class FileImage:
    """A file at one moment, and the contents in which a power loss could leave it."""

    durable: bytes
    pending: tuple[PendingChange, ...]
    lost: frozenset[int] = frozenset()
    seen: bytes = b""
    contents: dict[tuple[int, ...], tuple[bytes, bytes]] = field(default_factory=dict)
    """Cache: (content, digest) by the choice (size, version of each sector) that leads to the content."""

    @property
    def versions(self) -> dict[int, list[SectorVersion]]:
        """The versions, oldest first, of each sector that has more than one."""
        return self._replayed[0]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(change number, size in bytes) of each size that a power loss could leave, the durable one first."""
        return self._replayed[1]

    @cached_property
    def _replayed(self) -> tuple[dict[int, list[SectorVersion]], list[tuple[int, int]]]:
        cache = bytearray(self.durable)
        # Readers see the bytes of lost sectors as they were written. So pending changes are applied to these bytes.
        for sector in self.lost if self.pending else ():
            PendingChange(0, sector * SECTOR_BYTES, self.seen[sector * SECTOR_BYTES :][:SECTOR_BYTES]).apply(cache)
        versions: dict[int, list[SectorVersion]] = {}
        sizes = [(0, len(self.durable))]
        for change in self.pending:
            before = len(cache)
            change.apply(cache)
            for sector in change.sectors(before):
                known = versions.setdefault(sector, [SectorVersion(0, _sector(self.durable, sector))])
                if known[-1].data != (now := _sector(cache, sector)):
                    known.append(SectorVersion(change.number, now))
            pages = range((before // PAGE_BYTES + 1) * PAGE_BYTES, len(cache), PAGE_BYTES)
            sizes.extend((change.number, size) for size in (*pages, len(cache)))
        distinct = [next(same) for _, same in itertools.groupby(sizes, key=itemgetter(1))]
        return {sector: known for sector, known in versions.items() if len(known) > 1}, distinct


def _sector(content: Data, number: int) -> bytes:
    """The bytes of a sector; zeros after the end of the content."""
    return bytes(content[number * SECTOR_BYTES : (number + 1) * SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")


def _all_changed_sectors(size: int, changes: list[PendingChange]) -> set[int]:
    touched: set[int] = set()
    for change in changes:
        touched.update(change.sectors(size))
        size = change.position if change.data is None else max(size, change.position + len(change.data))
    return touched


SPACE_BYTES = 1 << 40
"""Free space of a simulated disk that has no limit."""


class SimulatedDisk:
    """A `journal.disk.Disk` in memory that separates what readers see from what is durable. Thread-safe.

    `crash` returns a disk as a power loss could leave it; `crash_states` enumerates all such disks. `faults` makes
    calls fail. `after` is called after each change, so that a test can simulate a power loss at that moment.
    """

    is_replicated = False

    def __init__(self, *, space_bytes: int | None = None, descriptors_max: int | None = None) -> None:
        self.faults = Faults()
        self.after: Callable[[str, str], None] | None = None
        """Called with kind and path after each call that changed something."""
        self.space_bytes = space_bytes
        """Maximum bytes of all files together; None: no limit."""
        self.descriptors_max = descriptors_max
        self.is_cached = True
        """If False, `pread_cached` always returns None."""
        self.closed_unforced: list[str] = []
        """Paths of files that were closed while they had non-durable bytes, so that a write error would be lost."""
        self.open_files: set[SimulatedFile] = set()
        self.digest = b""
        """Digest of the names and bytes of a disk that `Moment.build` has made; empty for other disks."""
        self.tree = FolderTree()
        self.mutex = threading.RLock()
        self.number = 0
        """Number of calls that changed something."""
        self._locks: set[str] = set()
        self._sync_errors = 0

    def open_read(self, path: str) -> SimulatedFile:
        return self._open(path, writable=False)

    def open_write(self, path: str) -> SimulatedFile:
        return self._open(path, writable=True)

    def create(self, path: str) -> SimulatedFile:
        with self._change("create", path):
            self._check_descriptors(path)
            content = FileContent()
            self.tree.add(self.next_number(), path, content)
            return SimulatedFile(self, content, path, True)

    def exists(self, path: str) -> bool:
        return self.tree.find(path) is not None

    def is_folder(self, path: str) -> bool:
        return isinstance(self.tree.find(path), SimulatedFolder)

    def list(self, path: str) -> list[str]:
        self.faults.check("list", path)
        return sorted(self.tree.folder(path).entries)

    def make_folder(self, path: str) -> None:
        with self._change("folder", path):
            self.tree.add(self.next_number(), path, SimulatedFolder())

    def remove_folder(self, path: str) -> None:
        with self._change("folder", path):
            if self.tree.folder(path).entries:
                raise system_error(errno.ENOTEMPTY, path)
            self.tree.remove(self.next_number(), path)

    def rename(self, source: str, target: str) -> None:
        with self._change("rename", target):
            self.tree.rename(self.next_number(), source, target)

    def unlink(self, path: str) -> None:
        with self._change("unlink", path):
            self.tree.file(path)
            self.tree.remove(self.next_number(), path)

    def force_folder(self, path: str) -> None:
        with self._change("force_folder", path):
            self.tree.fsync(self.tree.folder(path))

    def open_anchor(self, path: str) -> SimulatedFile:
        with self.mutex:
            self.faults.check("open", path)
            self.tree.folder(path)
            self._check_descriptors(path)
            anchor = SimulatedFile(self, FileContent(), path, False)
            anchor.errors_seen = self._sync_errors
        return anchor

    def sync_file_system(self, anchor: File) -> None:
        """Fsync everything. A fault of kind "sync_file" loses the non-durable bytes of each file that its rule matches.

        As on Linux, after such a loss this call fails once, and the next call succeeds. Only an fsync of a single file
        says whether that file has lost bytes.
        """
        if not isinstance(anchor, SimulatedFile):
            raise TypeError("the anchor must come from open_anchor of this disk")
        with self._change("sync", anchor.path):
            for path, content in self.all_files():
                try:
                    self.faults.check("sync_file", path)
                except OSError:
                    content.fail_fsync()
                    self._sync_errors += 1
                else:
                    content.fsync()
            self.tree.fsync(None)
            if anchor.errors_seen != self._sync_errors:
                anchor.errors_seen = self._sync_errors
                raise system_error(errno.EIO, anchor.path)

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
                self.tree.add(self.next_number(), path, FileContent())
            self._locks.add(path)
        return SimulatedLock(self._locks, path)

    def crash(self, generator: random.Random | None = None, *, keep: str = "some") -> SimulatedDisk:
        """Return the disk after a power loss now, in a state chosen by `generator` and `keep` as in `Moment.crash`."""
        return Moment(self).crash(generator, keep)

    def read_file(self, path: str) -> bytes:
        """Return the bytes of a file as readers see them. No fault applies, and no call is counted."""
        return bytes(self.tree.file(path).data)

    def durable_file(self, path: str) -> bytes:
        return bytes(self.tree.file(path).durable)

    def write_file(self, path: str, data: bytes) -> None:
        """Write a whole file durably. No fault applies, and no call is counted."""
        with self.mutex:
            if self.exists(path):
                self.tree.remove(self.next_number(), path)
            self.tree.add(self.next_number(), path, FileContent(data))
            self.tree.fsync(None)

    def damage(self, path: str, position: int, data: bytes) -> None:
        """Overwrite bytes of a file, for readers and on the disk. No call reports an error."""
        self.tree.file(path).damage(position, data)

    def all_files(self) -> Sequence[tuple[str, FileContent]]:
        """(path, content) of every file, including open files whose name was removed."""
        paths = {node: path for path, node in walk_tree(self.tree.root) if isinstance(node, FileContent)}
        for file in self.open_files:
            paths.setdefault(file.content, file.path)
        return [(path, content) for content, path in paths.items()]

    def used_bytes(self) -> int:
        return sum(len(content.data) for _, content in self.all_files())

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def changed(self, kind: str, path: str) -> None:
        if self.after is not None:
            self.after(kind, path)

    @contextmanager
    def _change(self, kind: str, path: str) -> Iterator[None]:
        with self.mutex:
            self.faults.check(kind, path)
            yield
        self.changed(kind, path)

    def _open(self, path: str, *, writable: bool) -> SimulatedFile:
        with self.mutex:
            self.faults.check("open", path)
            content = self.tree.file(path)
            self._check_descriptors(path)
            return SimulatedFile(self, content, path, writable)

    def _check_descriptors(self, path: str) -> None:
        if self.descriptors_max is not None and len(self.open_files) >= self.descriptors_max:
            raise Full(f"{path}: {os.strerror(errno.EMFILE)}")


class SimulatedFile:
    def __init__(self, disk: SimulatedDisk, content: FileContent, path: str, writable: bool) -> None:
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
        if size < 0 or position < 0:  # the system refuses this, but a slice of `data` would count from the end
            raise system_error(errno.EINVAL, self.path)
        return bytes(self.content.data[position : position + size])

    def pread_into(self, buffer: bytearray | memoryview, position: int) -> int:
        view = memoryview(buffer)
        data = self.pread(len(view), position)
        view[: len(data)] = data
        return len(data)

    def pread_cached(self, size: int, position: int) -> bytes | None:
        return self.pread(size, position) if self._disk.is_cached else None

    def pread_uncached(self, size: int, position: int) -> bytes:
        return self.pread(size, position)

    def pwritev(self, buffers: Sequence[Bytes], position: int) -> int:
        if len(buffers) > BUFFERS_MAX:
            raise system_error(errno.EINVAL, self.path)
        with self._disk.mutex:
            short = self._check("write", writing=True)
            data = b"".join(buffers)
            data = data[: self._writable_size(len(data), position)]
            if short is not None:
                data = data[:short]
            if data:
                self.content.change(PendingChange(self._disk.next_number(), position, data))
        self._disk.changed("write", self.path)
        return len(data)

    def force(self) -> None:
        with self._disk.mutex:
            try:
                self._check("force")
            except OSError:
                self.content.fail_fsync()
                self._set_reported()
                raise
            self.content.fsync()
            if self.errors_seen != self.content.errors:
                self._set_reported()
                raise system_error(errno.EIO, self.path)
        self._disk.changed("force", self.path)

    def truncate(self, size: int) -> None:
        with self._disk.mutex:
            self._check("truncate", writing=True)
            if size > len(self.content.data):
                self._writable_size(0, size)
            self.content.change(PendingChange(self._disk.next_number(), size, None))
        self._disk.changed("truncate", self.path)

    def close(self) -> None:
        with self._disk.mutex:
            if self not in self._disk.open_files:
                return
            self._disk.open_files.discard(self)
            shared = any(file.content is self.content for file in self._disk.open_files)
            if self.content.pending and not shared:
                self._disk.closed_unforced.append(self.path)

    def _set_reported(self) -> None:
        self.errors_seen = self.content.reported = self.content.errors

    def _check(self, kind: str, *, writing: bool = False) -> int | None:
        if self not in self._disk.open_files or (writing and not self._writable):
            raise system_error(errno.EBADF, self.path)
        return self._disk.faults.check(kind, self.path)

    def _writable_size(self, size: int, position: int) -> int:
        """Return how many of `size` bytes at `position` fit on the disk; raises `Full` if none do."""
        if self._disk.space_bytes is None:
            return size
        free = self._disk.space_bytes - self._disk.used_bytes() + len(self.content.data) - position
        if free <= 0 and position + size > len(self.content.data):
            raise Full(f"{self.path}: no space left on the simulated disk")
        return min(size, max(free, len(self.content.data) - position))


@dataclass
class SimulatedLock:
    locks: set[str]
    path: str

    def release(self) -> None:
        self.locks.discard(self.path)


@dataclass(eq=False)
class SimulatedFolder:
    """A folder of the simulated disk: the entries that readers see, and the entries that are durable."""

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node: TypeAlias = FileContent | SimulatedFolder
EntriesOf: TypeAlias = Callable[[SimulatedFolder], dict[str, Node]]


class EntryChange(NamedTuple):
    """A change of an entry of `folder`: `name` referred to `old`, now to `node`. `node` None: the name was removed."""

    folder: SimulatedFolder
    name: str
    node: Node | None
    old: Node | None


class FolderOperation(NamedTuple):
    """A non-durable create, rename or removal. A power loss keeps either all of its `entries` or none."""

    number: int
    entries: tuple[EntryChange, ...]


class FolderTree:
    """The folders and names of a disk. Paths are split at "/"; "" is the root."""

    def __init__(self) -> None:
        self.root = SimulatedFolder()
        self.pending: list[FolderOperation] = []

    def find(self, path: str) -> Node | None:
        node: Node = self.root
        for name in path_names(path):
            if not isinstance(node, SimulatedFolder) or name not in node.entries:
                return None
            node = node.entries[name]
        return node

    def file(self, path: str) -> FileContent:
        node = self.find(path)
        if node is None:
            raise system_error(errno.ENOENT, path)
        if isinstance(node, SimulatedFolder):
            raise system_error(errno.EISDIR, path)
        return node

    def folder(self, path: str) -> SimulatedFolder:
        node = self.find(path)
        if node is None:
            raise system_error(errno.ENOENT, path)
        if not isinstance(node, SimulatedFolder):
            raise system_error(errno.ENOTDIR, path)
        return node

    def add(self, number: int, path: str, node: Node) -> None:
        """Add `node` under `path`, as change `number`. Raises FileExistsError."""
        folder, name = self._parent_and_name(path)
        if name in folder.entries:
            raise system_error(errno.EEXIST, path)
        folder.entries[name] = node
        self.pending.append(FolderOperation(number, (EntryChange(folder, name, node, None),)))

    def remove(self, number: int, path: str) -> None:
        folder, name = self._parent_and_name(path)
        old = folder.entries.pop(name)
        self.pending.append(FolderOperation(number, (EntryChange(folder, name, None, old),)))

    def rename(self, number: int, source: str, target: str) -> None:
        old_folder, old_name = self._parent_and_name(source)
        new_folder, new_name = self._parent_and_name(target)
        node = old_folder.entries.get(old_name)
        if node is None:
            raise system_error(errno.ENOENT, source)
        replaced = new_folder.entries.get(new_name)
        if isinstance(replaced, SimulatedFolder) and replaced.entries:
            raise system_error(errno.ENOTEMPTY, target)
        if isinstance(replaced, SimulatedFolder) and not isinstance(node, SimulatedFolder):
            raise system_error(errno.EISDIR, target)
        if isinstance(replaced, FileContent) and isinstance(node, SimulatedFolder):
            raise system_error(errno.ENOTDIR, target)
        del old_folder.entries[old_name]
        new_folder.entries[new_name] = node
        entries = (EntryChange(old_folder, old_name, None, node), EntryChange(new_folder, new_name, node, replaced))
        self.pending.append(FolderOperation(number, entries))

    def fsync(self, folder: SimulatedFolder | None) -> None:
        """Make the pending operations of `folder` (None: all) durable, and before them older ones on the same names."""
        chosen: list[FolderOperation] = []
        names: set[tuple[int, str]] = set()
        for operation in reversed(self.pending):
            keys = {(id(entry.folder), entry.name) for entry in operation.entries}
            if folder is None or keys & names or any(entry.folder is folder for entry in operation.entries):
                chosen.append(operation)
                names |= keys
        for operation in reversed(chosen):
            apply_operation(operation, lambda changed: changed.durable)
        reached = {operation.number for operation in chosen}
        self.pending = [operation for operation in self.pending if operation.number not in reached]

    def _parent_and_name(self, path: str) -> tuple[SimulatedFolder, str]:
        names = path_names(path)
        if not names:
            raise system_error(errno.EBUSY, path)
        return self.folder("/".join(names[:-1])), names[-1]


def path_names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def system_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def apply_operation(operation: FolderOperation, entries_of: EntriesOf) -> None:
    """Apply an operation. A removal does nothing if the name now refers to another file or folder."""
    for entry in operation.entries:
        entries = entries_of(entry.folder)
        if entry.node is not None:
            entries[entry.name] = entry.node
        elif entries.get(entry.name) is entry.old:
            entries.pop(entry.name, None)


def walk_tree(folder: SimulatedFolder, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every visible path in a folder, sorted; a folder before its contents."""
    for name, node in sorted(folder.entries.items()):
        yield f"{path}{name}", node
        if isinstance(node, SimulatedFolder):
            yield from walk_tree(node, f"{path}{name}/")


ATTEMPTS_PER_STATE = 4
"""Maximum random draws for each requested state. Several draws may give the same state, so a sample may have fewer
states than requested."""

CHANCES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""A random draw makes all changes up to some number durable, and each later change with one of these probabilities."""


class CrashChoice(NamedTuple):
    """A state after a power loss. `operations`: whether each pending folder operation is durable. `files`: for each
    changed file its size, then one number for each sector: which of the contents written to the sector is durable."""

    operations: tuple[bool, ...]
    files: tuple[tuple[int, ...], ...]


class Moment:
    """An immutable image of a disk, and the states in which a power loss at that moment could leave it."""

    def __init__(self, disk: SimulatedDisk) -> None:
        with disk.mutex:
            self.root = disk.tree.root
            self.operations: tuple[FolderOperation, ...] = tuple(disk.tree.pending)
            self.number = disk.number
            self._entries: dict[SimulatedFolder, dict[str, Node]] = {}
            self._images: dict[FileContent, FileImage] = {}
            self._collect()
        self._changed = [(content, image) for content, image in self._images.items() if image.pending]

    def count(self) -> int:
        """Number of different `CrashChoice`s that are possible. Different choices may lead to the same state."""
        total = 1 << len(self.operations)
        for _, image in self._changed:
            total *= len({size for _, size in image.sizes})
            for versions in image.versions.values():
                total *= len(versions)
        return total

    def crash(self, generator: random.Random | None = None, keep: str = "some") -> SimulatedDisk:
        """Build the disk of one state. `keep`: which non-durable changes survive, "nothing", "everything" or "some".

        With "some", `generator` decides at random which changes survive.
        """
        if keep == "nothing":
            return self.build(self._prefix(0))
        if keep == "everything":
            return self.build(self._prefix(self.number))
        return self.build(self._draw(generator or random.Random(0)))

    def choices(self, limit: int, generator: random.Random) -> Iterator[CrashChoice]:
        """If there are at most `limit` choices, yield all. Otherwise yield, for each change, the choice in which this
        change and all earlier ones are durable, but no later one; then yield random choices."""
        if self.count() <= limit:
            files = []
            for _, image in self._changed:
                sizes = sorted({size for _, size in image.sizes})
                files.append(itertools.product(sizes, *map(range, map(len, image.versions.values()))))
            reached = itertools.product((False, True), repeat=len(self.operations))
            yield from itertools.starmap(CrashChoice, itertools.product(reached, itertools.product(*files)))
            return
        numbers = {operation.number for operation in self.operations}
        numbers.update(change.number for _, image in self._changed for change in image.pending)
        for number in sorted({0, *numbers}):
            yield self._prefix(number)
        for _ in range(limit * ATTEMPTS_PER_STATE):
            yield self._draw(generator)

    def build(self, choice: CrashChoice) -> SimulatedDisk:
        """Build the disk of the state `choice`. Equal states have equal digests."""
        entries = self._entries
        if any(choice.operations):
            entries = {folder: dict(names) for folder, names in entries.items()}
            for operation, reached in zip(self.operations, choice.operations, strict=True):
                if reached:
                    apply_operation(operation, entries.__getitem__)
        contents = {
            content: _file_content(image, chosen)
            for (content, image), chosen in zip(self._changed, choice.files, strict=True)
        }
        disk = SimulatedDisk()
        digest = hashlib.blake2b(digest_size=16)

        def copy_folder(old: SimulatedFolder, new: SimulatedFolder) -> None:
            for name, node in sorted(entries[old].items()):
                digest.update(name.encode())
                if isinstance(node, SimulatedFolder):
                    folder = new.entries[name] = SimulatedFolder()
                    digest.update(b"/{")
                    copy_folder(node, folder)
                    digest.update(b"}")
                else:
                    data, data_digest = contents.get(node) or _file_content(self._images[node], ())
                    new.entries[name] = FileContent(data)
                    digest.update(data_digest)
            new.durable = dict(new.entries)

        copy_folder(self.root, disk.tree.root)
        disk.digest = digest.digest()
        return disk

    def _collect(self) -> None:
        """Collect every file and folder that exists in at least one state."""
        nodes: list[Node] = [self.root]
        for operation in self.operations:
            for entry in operation.entries:
                nodes.append(entry.folder)
                if entry.node is not None:
                    nodes.append(entry.node)
        while nodes:
            node = nodes.pop()
            if isinstance(node, FileContent):
                if node not in self._images:
                    self._images[node] = node.image()
            elif node not in self._entries:
                self._entries[node] = dict(node.durable)
                nodes.extend(node.durable.values())

    def _prefix(self, number: int) -> CrashChoice:
        """Return the choice in which every change up to `number` is durable, and no later change."""
        files = tuple(_file_choice_at(image, number) for _, image in self._changed)
        return CrashChoice(tuple(operation.number <= number for operation in self.operations), files)

    def _draw(self, generator: random.Random) -> CrashChoice:
        """Draw a choice: all changes up to a random number are durable, and some of the later changes, too."""
        number = generator.randint(0, self.number) if generator.random() < 0.5 else 0
        chance = generator.choice(CHANCES)
        operations = tuple(operation.number <= number or generator.random() < chance for operation in self.operations)
        return CrashChoice(
            operations, tuple(_draw_file_choice(image, number, chance, generator) for _, image in self._changed)
        )


def crash_states(disk: SimulatedDisk | Moment, limit: int, generator: random.Random) -> Iterator[SimulatedDisk]:
    """Yield at most `limit` distinct states after a power loss: all, or a sample drawn with `generator`."""
    moment = disk if isinstance(disk, Moment) else Moment(disk)
    seen: set[bytes] = set()
    for choice in moment.choices(limit, generator):
        state = moment.build(choice)
        if state.digest not in seen:
            seen.add(state.digest)
            yield state
            if len(seen) >= limit:
                return


def _file_content(image: FileImage, chosen: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return (bytes of a file, their digest) after the choice `chosen`. The choice () leaves the durable content."""
    found = image.contents.get(chosen)
    if found is None:
        content = image.durable
        if chosen:
            size, *versions = chosen
            data = bytearray(content)
            for (sector, known), index in zip(image.versions.items(), versions, strict=True):
                PendingChange(0, sector * SECTOR_BYTES, known[index].data).apply(data)
            content = bytes(data[:size]).ljust(size, b"\0")
        found = image.contents[chosen] = content, b"\0" + hashlib.blake2b(content, digest_size=16).digest()
    return found


def _file_choice_at(image: FileImage, number: int) -> tuple[int, ...]:
    """Return the choice (size, version of each sector) that contains all changes of a file up to `number`."""
    size = [size for changed, size in image.sizes if changed <= number][-1]
    known = image.versions.values()
    return (size, *(max(0, bisect_right(versions, number, key=itemgetter(0)) - 1) for versions in known))


def _draw_file_choice(image: FileImage, number: int, chance: float, generator: random.Random) -> tuple[int, ...]:
    size, *indexes = _file_choice_at(image, number)
    if generator.random() < chance:
        size = generator.choice([size for changed, size in image.sizes if changed >= number] or [size])
    for sector, versions in enumerate(image.versions.values()):
        if generator.random() < chance:
            indexes[sector] = generator.randint(indexes[sector], len(versions) - 1)
    return (size, *indexes)
