"""What a simulated file holds: the bytes that readers see, the bytes on the platter, and the way between.

A disk writes whole sectors of 512 bytes, each of them when it likes, as the page cache held it at that
moment. So what a power cut leaves of a sector is one of its *versions*: as it was forced last, or as it stood
after any later write. The size is one of those that the file had since. Nothing is assumed about order.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from journal.disk import BUFFERS_MAX, Bytes, File
from journal.errors import Full, Locked
from journal.testing.faults import Faults

SECTOR_BYTES = 512
PAGE_BYTES = 4096
"""A growing write moves the file's size page by page, so a cut may leave any of those sizes."""

Data: TypeAlias = bytes | bytearray


class Change(NamedTuple):
    """One unforced call on a file: `data` written at `position`, or (None) the file set to that size."""

    number: int
    position: int
    data: bytes | None


class Version(NamedTuple):
    """A sector's 512 bytes as they stood after change `number` (0: as forced last)."""

    number: int
    data: bytes


class Content:
    """The bytes of one file.

    `data` is what readers see. `durable` is what is on the platter. `pending` are the changes since the last
    force. `lost` are the sectors whose force failed: readers see one thing, the platter holds another, and
    the system calls them clean.
    """

    __slots__ = ("_image", "data", "durable", "errors", "lost", "pending", "reported")

    def __init__(self, durable: bytes = b"") -> None:
        self.data: Data = durable
        self.durable: Data = durable
        self.pending: list[Change] = []
        self.lost: set[int] = set()
        self.errors = 0
        """Forces that lost bytes."""
        self.reported = 0
        """Of those, how many somebody was told of: who opens the file later hears only of the others."""
        self._image: ContentImage | None = None

    def write(self, number: int, data: bytes, position: int) -> None:
        """Readers see `data` at `position` from now on; between the old end and `position` are zeros."""
        content = self._own()
        if position > len(content):
            content.extend(bytes(position - len(content)))
        content[position : position + len(data)] = data
        self.pending.append(Change(number, position, data))
        self._image = None

    def truncate(self, number: int, size: int) -> None:
        """Readers see `size` bytes from now on: cut, or grown with zeros."""
        _resize(self._own(), size)
        self.pending.append(Change(number, size, None))
        self._image = None

    def force(self) -> None:
        """Everything pending reaches the platter. Sectors lost before do only if they were written again."""
        if not self.pending:
            return
        self._image = None
        if not self.lost:
            self.durable = self.data = bytes(self.data)
            self.pending = []
            return
        touched = _touched(len(self.durable), self.pending)
        old = self.durable
        self.durable = bytearray(self.data)
        for sector in self.lost - touched:
            first = sector * SECTOR_BYTES
            kept = bytes(old[first : first + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")
            room = max(0, min(SECTOR_BYTES, len(self.durable) - first))
            self.durable[first : first + room] = kept[:room]
        self.lost -= touched
        self.pending = []

    def lose(self) -> None:
        """A force fails: nothing pending reaches the platter, and the system calls it clean all the same."""
        self.lost |= _touched(len(self.durable), self.pending)
        self.pending = []
        self.errors += 1
        self._image = None

    def image(self) -> ContentImage:
        """This moment, kept: it does not change when the file goes on."""
        if self._image is None:
            self.durable = bytes(self.durable)
            seen = bytes(self.data) if self.lost and self.pending else b""
            self._image = ContentImage(self.durable, tuple(self.pending), frozenset(self.lost), seen)
        return self._image

    def damage(self, position: int, data: bytes) -> None:
        """Rot: the bytes change on the platter and for readers, and nobody is told."""
        for name in ("data", "durable"):
            content = bytearray(getattr(self, name))
            content[position : position + len(data)] = data
            setattr(self, name, content)
        self._image = None

    def _own(self) -> bytearray:
        if not isinstance(self.data, bytearray):
            self.data = bytearray(self.data)
        return self.data


class ContentImage:
    """A file at one moment, and what a power cut then could leave of it."""

    def __init__(
        self,
        durable: bytes,
        pending: tuple[Change, ...],
        lost: frozenset[int] = frozenset(),
        seen: bytes = b"",
    ) -> None:
        self.durable = durable
        self.pending = pending
        self._lost = lost
        self._seen = seen
        self._versions: dict[int, list[Version]] | None = None
        self._sizes: list[tuple[int, int]] = []
        self.contents: dict[tuple[int, ...], tuple[bytes, bytes]] = {}
        """Contents built before, by their choices, with their digests: the enumerator's memory."""

    @property
    def versions(self) -> dict[int, list[Version]]:
        """The versions of every sector that has more than one, in the order in which they came to be."""
        if self._versions is None:
            self._versions, self._sizes = self._replay()
        return self._versions

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(change number, size in bytes) of every size that a cut may leave, the forced one first."""
        if self._versions is None:
            self._versions, self._sizes = self._replay()
        return self._sizes

    def _replay(self) -> tuple[dict[int, list[Version]], list[tuple[int, int]]]:
        cache = bytearray(self.durable)
        if self._lost and self.pending:
            self._show_lost(cache)
        versions: dict[int, list[Version]] = {}
        sizes = [(0, len(self.durable))]
        for change in self.pending:
            before = len(cache)
            if change.data is None:
                _resize(cache, change.position)
            else:
                if change.position > before:
                    cache.extend(bytes(change.position - before))
                cache[change.position : change.position + len(change.data)] = change.data
            for sector in _sectors(before, change):
                self._add_version(versions, sector, change.number, cache)
            sizes.extend((change.number, size) for size in _pages_between(before, len(cache)))
            sizes.append((change.number, len(cache)))
        return {sector: list_ for sector, list_ in versions.items() if len(list_) > 1}, _distinct(sizes)

    def _show_lost(self, cache: bytearray) -> None:
        """Sectors that a failed force lost stand in the cache as they were written, under what came later."""
        for sector in self._lost:
            first = sector * SECTOR_BYTES
            shown = self._seen[first : first + SECTOR_BYTES]
            if first + len(shown) > len(cache):
                cache.extend(bytes(first + len(shown) - len(cache)))
            cache[first : first + len(shown)] = shown

    def _add_version(
        self, versions: dict[int, list[Version]], sector: int, number: int, cache: bytearray
    ) -> None:
        first = sector * SECTOR_BYTES
        known = versions.get(sector)
        if known is None:
            forced = self.durable[first : first + SECTOR_BYTES].ljust(SECTOR_BYTES, b"\0")
            known = versions[sector] = [Version(0, forced)]
        now = bytes(cache[first : first + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")
        if known[-1].data != now:
            known.append(Version(number, now))


def _pages_between(before: int, after: int) -> range:
    """The page boundaries that a file passes as it grows."""
    return range((before // PAGE_BYTES + 1) * PAGE_BYTES, after, PAGE_BYTES)


def _distinct(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    kept = [sizes[0]]
    for number, size in sizes[1:]:
        if size != kept[-1][1]:
            kept.append((number, size))
    return kept


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _sectors(size_before: int, change: Change) -> range:
    """The sectors whose bytes a change may alter."""
    if change.data is None:
        return range(change.position // SECTOR_BYTES, -(-size_before // SECTOR_BYTES))
    return range(change.position // SECTOR_BYTES, -(-(change.position + len(change.data)) // SECTOR_BYTES))


def _touched(size: int, changes: list[Change]) -> set[int]:
    touched: set[int] = set()
    for change in changes:
        touched.update(_sectors(size, change))
        size = change.position if change.data is None else max(size, change.position + len(change.data))
    return touched


# A disk in memory that forgets what was not forced.
#
# It behaves to its user as `RealDisk` does, and keeps apart what readers see and what is on the platter.
# `crash` makes the disk that a power cut could leave; `journal.testing.memory_disk` enumerates them all. `faults`
# makes calls fail, `after` is told of every call that changed something: the boundaries at which the power may
# go.

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


# The folders of a simulated disk: what is seen, what is on the platter, and the entries on the way.
#
# A folder's entries are durable only after a force of that folder. Until then each create, rename or removal
# may or may not have reached the platter, in any combination: no order is assumed, but one operation is atomic,
# a rename too.


@dataclass(eq=False)
class Folder:
    """A folder: the entries that are seen, and those on the platter."""

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node: TypeAlias = Content | Folder
EntriesOf: TypeAlias = Callable[[Folder], dict[str, Node]]


class Entry(NamedTuple):
    """`name` in `folder` now means `node`; None: no longer means `old`."""

    folder: Folder
    name: str
    node: Node | None
    old: Node | None


class Operation(NamedTuple):
    """An unforced change of folders: all of its entries reach the platter, or none."""

    number: int
    entries: tuple[Entry, ...]

    def touches(self, folder: Folder) -> bool:
        return any(entry.folder is folder for entry in self.entries)


class Tree:
    """The names of a disk. Paths are split at "/"; "" is the root."""

    def __init__(self, root: Folder | None = None) -> None:
        self.root = root or Folder()
        self.pending: list[Operation] = []

    def find(self, path: str) -> Node | None:
        """What is at `path`, or None."""
        node: Node = self.root
        for name in parts(path):
            if not isinstance(node, Folder) or name not in node.entries:
                return None
            node = node.entries[name]
        return node

    def file(self, path: str) -> Content:
        """The file at `path`, or the error that the system would give."""
        node = self.find(path)
        if node is None:
            raise failure(errno.ENOENT, path)
        if isinstance(node, Folder):
            raise failure(errno.EISDIR, path)
        return node

    def folder(self, path: str) -> Folder:
        """The folder at `path`, or the error that the system would give."""
        node = self.find(path)
        if node is None:
            raise failure(errno.ENOENT, path)
        if not isinstance(node, Folder):
            raise failure(errno.ENOTDIR, path)
        return node

    def add(self, number: int, path: str, node: Node) -> None:
        """A new name."""
        folder, name = self._place(path)
        if name in folder.entries:
            raise failure(errno.EEXIST, path)
        folder.entries[name] = node
        self.pending.append(Operation(number, (Entry(folder, name, node, None),)))

    def remove(self, number: int, path: str) -> None:
        """A name goes."""
        folder, name = self._place(path)
        old = folder.entries.pop(name)
        self.pending.append(Operation(number, (Entry(folder, name, None, old),)))

    def rename(self, number: int, source: str, target: str) -> None:
        """A name moves, over a file that may be there."""
        old_folder, old_name = self._place(source)
        new_folder, new_name = self._place(target)
        node = old_folder.entries.get(old_name)
        if node is None:
            raise failure(errno.ENOENT, source)
        replaced = new_folder.entries.get(new_name)
        if isinstance(replaced, Folder) and replaced.entries:
            raise failure(errno.ENOTEMPTY, target)
        if replaced is not None and isinstance(replaced, Folder) != isinstance(node, Folder):
            raise failure(errno.EISDIR if isinstance(replaced, Folder) else errno.ENOTDIR, target)
        del old_folder.entries[old_name]
        new_folder.entries[new_name] = node
        entries = (Entry(old_folder, old_name, None, node), Entry(new_folder, new_name, node, replaced))
        self.pending.append(Operation(number, entries))

    def force(self, folder: Folder | None) -> None:
        """The pending operations of `folder` (None: all) reach the platter, with those that they build on."""
        chosen = self.pending if folder is None else _closure(self.pending, folder)
        for operation in chosen:
            apply(operation, lambda changed: changed.durable)
        reached = {operation.number for operation in chosen}
        self.pending = [operation for operation in self.pending if operation.number not in reached]

    def _place(self, path: str) -> tuple[Folder, str]:
        names = parts(path)
        if not names:
            raise failure(errno.EBUSY, path)
        return self.folder("/".join(names[:-1])), names[-1]


def parts(path: str) -> list[str]:
    """The names in a path."""
    return [name for name in path.split("/") if name]


def failure(number: int, path: str) -> OSError:
    """The error that the system would raise."""
    return OSError(number, os.strerror(number), path)


def apply(operation: Operation, entries_of: EntriesOf) -> None:
    """Puts an operation on the entries that `entries_of` gives for a folder.

    A removal takes only what it meant: if the name means something else there, it stays.
    """
    for entry in operation.entries:
        entries = entries_of(entry.folder)
        if entry.node is not None:
            entries[entry.name] = entry.node
        elif entries.get(entry.name) is entry.old:
            entries.pop(entry.name, None)


def walk(folder: Folder, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every path below a folder that is seen, folders before what they hold, sorted."""
    for name, node in sorted(folder.entries.items()):
        yield f"{path}{name}", node
        if isinstance(node, Folder):
            yield from walk(node, f"{path}{name}/")


def _closure(pending: Iterable[Operation], folder: Folder) -> list[Operation]:
    """The operations of `folder`, and all earlier ones on the same names."""
    chosen: list[Operation] = []
    names: set[tuple[int, str]] = set()
    for operation in reversed(list(pending)):
        keys = {(id(entry.folder), entry.name) for entry in operation.entries}
        if operation.touches(folder) or keys & names:
            chosen.append(operation)
            names |= keys
    return chosen[::-1]


# What a power cut could leave of a simulated disk.
#
# A state is one choice for everything that was unforced: for each folder operation whether it reached the
# platter, for each sector written which of its versions stands there, for each file which of its sizes.
# `Moment` keeps a disk as it is at one boundary; `crash_states` gives its states: all of them when they are
# few, a seeded sample when they are many, each distinct one once (two choices often leave the same bytes).

ATTEMPTS_PER_STATE = 4
"""A sample gives up on finding new states after this many draws for each state asked for."""

CHANCES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""How probable it is, in one draw, that something behind the draw's prefix reached the platter."""


class Choice(NamedTuple):
    """One state: the operations that took place, and for each file (size, version of each sector)."""

    operations: tuple[bool, ...]
    files: tuple[tuple[int, ...], ...]


class Moment:
    """A disk at one boundary; it stays as it is while the disk goes on."""

    def __init__(self, disk: SimulatedDisk) -> None:
        with disk.mutex:
            self.root = disk.tree.root
            self.operations: tuple[Operation, ...] = tuple(disk.tree.pending)
            self.number = disk.number
            self._entries: dict[Folder, dict[str, Node]] = {}
            self._images: dict[Content, ContentImage] = {}
            self._collect()
        self._changed = [(content, image) for content, image in self._images.items() if image.pending]

    def count(self) -> int:
        """How many choices there are; distinct states are fewer."""
        total = 1 << len(self.operations)
        for _, image in self._changed:
            total *= len({size for _, size in image.sizes})
            for versions in image.versions.values():
                total *= len(versions)
        return total

    def crash(self, generator: random.Random | None = None, keep: str = "some") -> SimulatedDisk:
        """One state: `keep` "nothing" that is unforced, "everything", or what `generator` draws."""
        if keep == "nothing":
            return self.build(self._prefix(0))
        if keep == "everything":
            return self.build(self._prefix(self.number))
        return self.build(self._draw(generator or random.Random(0)))

    def choices(self, limit: int, generator: random.Random) -> Iterator[Choice]:
        """All choices if there are at most `limit`, else prefixes of the calls first, then draws without an
        end.
        """
        if self.count() <= limit:
            yield from self._all()
            return
        numbers = {operation.number for operation in self.operations}
        numbers.update(change.number for _, image in self._changed for change in image.pending)
        for number in sorted({0, *numbers}):
            yield self._prefix(number)
        for _ in range(limit * ATTEMPTS_PER_STATE):
            yield self._draw(generator)

    def build(self, choice: Choice) -> SimulatedDisk:
        """The disk that `choice` leaves; its `digest` names the state."""
        entries = self._entries
        if any(choice.operations):
            entries = {folder: dict(names) for folder, names in entries.items()}
            for operation, reached in zip(self.operations, choice.operations, strict=True):
                if reached:
                    apply(operation, entries.__getitem__)
        contents = {
            content: self._content(image, chosen)
            for (content, image), chosen in zip(self._changed, choice.files, strict=True)
        }
        disk = SimulatedDisk()
        digest = hashlib.blake2b(digest_size=16)
        self._plant(self.root, disk.tree.root, entries, contents, digest)
        disk.digest = digest.digest()
        return disk

    def _collect(self) -> None:
        """Every file and folder that is on the platter or could get there."""
        nodes: list[Node] = [self.root]
        for operation in self.operations:
            for entry in operation.entries:
                nodes.append(entry.folder)
                if entry.node is not None:
                    nodes.append(entry.node)
        while nodes:
            node = nodes.pop()
            if isinstance(node, Content):
                if node not in self._images:
                    self._images[node] = node.image()
            elif node not in self._entries:
                self._entries[node] = dict(node.durable)
                nodes.extend(node.durable.values())

    def _plant(
        self,
        old: Folder,
        new: Folder,
        entries: dict[Folder, dict[str, Node]],
        contents: dict[Content, tuple[bytes, bytes]],
        digest: hashlib.blake2b,
    ) -> None:
        """Copies a folder of the state into the new disk, and everything below it."""
        names = entries[old]
        for name in sorted(names):
            node = names[name]
            digest.update(name.encode())
            if isinstance(node, Folder):
                folder = new.entries[name] = Folder()
                digest.update(b"/{")
                self._plant(node, folder, entries, contents, digest)
                digest.update(b"}")
            else:
                data, data_digest = contents.get(node) or self._content(self._images[node], ())
                new.entries[name] = Content(data)
                digest.update(data_digest)
        new.durable = dict(new.entries)

    def _content(self, image: ContentImage, chosen: tuple[int, ...]) -> tuple[bytes, bytes]:
        """The bytes that a choice leaves of a file, and their digest. () is the file as it was forced."""
        found = image.contents.get(chosen)
        if found is None:
            data = _assemble(image, chosen) if chosen else image.durable
            found = image.contents[chosen] = data, b"\0" + hashlib.blake2b(data, digest_size=16).digest()
        return found

    def _all(self) -> Iterator[Choice]:
        files = [_all_of_file(image) for _, image in self._changed]
        for reached in itertools.product((False, True), repeat=len(self.operations)):
            for chosen in itertools.product(*files):
                yield Choice(reached, chosen)

    def _prefix(self, number: int) -> Choice:
        """Everything up to call `number` reached the platter, nothing behind it."""
        files = tuple(
            (_size_at(image, number), *(_at(versions, number) for versions in image.versions.values()))
            for _, image in self._changed
        )
        return Choice(tuple(operation.number <= number for operation in self.operations), files)

    def _draw(self, generator: random.Random) -> Choice:
        """A prefix of the calls, and behind it whatever the dice say."""
        number = generator.randint(0, self.number) if generator.random() < 0.5 else 0
        chance = generator.choice(CHANCES)
        operations = tuple(
            operation.number <= number or generator.random() < chance for operation in self.operations
        )
        return Choice(
            operations, tuple(_draw(image, number, chance, generator) for _, image in self._changed)
        )


def crash_states(
    disk: SimulatedDisk | Moment, limit: int, generator: random.Random
) -> Iterator[SimulatedDisk]:
    """At most `limit` distinct states that a power cut now could leave, each as a disk with its `digest`."""
    moment = disk if isinstance(disk, Moment) else Moment(disk)
    seen: set[bytes] = set()
    for choice in moment.choices(limit, generator):
        state = moment.build(choice)
        if state.digest not in seen:
            seen.add(state.digest)
            yield state
            if len(seen) >= limit:
                return


def _assemble(image: ContentImage, chosen: tuple[int, ...]) -> bytes:
    size, *versions = chosen
    data = bytearray(image.durable)
    for (sector, known), index in zip(image.versions.items(), versions, strict=True):
        first = sector * SECTOR_BYTES
        if first > len(data):
            data.extend(bytes(first - len(data)))
        data[first : first + SECTOR_BYTES] = known[index].data
    return bytes(data[:size]).ljust(size, b"\0")


def _all_of_file(image: ContentImage) -> list[tuple[int, ...]]:
    sizes = sorted({size for _, size in image.sizes})
    versions = [range(len(known)) for known in image.versions.values()]
    return list(itertools.product(sizes, *versions))


def _at(versions: list[Version], number: int) -> int:
    """The index of the last version that change `number` or an earlier one made."""
    index = 0
    while index + 1 < len(versions) and versions[index + 1].number <= number:
        index += 1
    return index


def _size_at(image: ContentImage, number: int) -> int:
    return [size for changed, size in image.sizes if changed <= number][-1]


def _draw(image: ContentImage, number: int, chance: float, generator: random.Random) -> tuple[int, ...]:
    chosen = [_size_at(image, number)]
    if generator.random() < chance:
        chosen[0] = generator.choice([size for changed, size in image.sizes if changed >= number] or chosen)
    for versions in image.versions.values():
        index = _at(versions, number)
        if generator.random() < chance:
            index = generator.randint(index, len(versions) - 1)
        chosen.append(index)
    return tuple(chosen)
