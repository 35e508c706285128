"""Operations on files: their encoding, and their application to another folder.

A folder to which the operations 1 to n of a broker were applied is what a crash of the broker after operation n leaves.
docs/formats/replication.md describes the encoding byte by byte.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple

from journal.disk import Disk, File, write_all
from journal.filenames import join
from tfmq.replication.errors import InvalidObject

HEADER: Final = Struct(">BHQI")
"""Kind, size of the path in bytes, position, size of the data in bytes."""
OPEN_FILES_MAX: Final = 64
"""Maximum files that an `OperationApplier` keeps open."""


class Kind(enum.IntEnum):
    """What an operation does. The numbers are stored and never change."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    RENAME = 4
    UNLINK = 5
    MAKE_FOLDER = 6
    REMOVE_FOLDER = 7


KINDS: Final = frozenset(Kind)


class Operation(NamedTuple):
    """One change of a folder. Paths are relative to the data folder, with "/" between names.

    `position`: where a WRITE begins, or the size after a TRUNCATE. `data`: the bytes of a WRITE. `target`: the new path
    of a RENAME.
    """

    kind: int
    path: str
    position: int = 0
    data: bytes = b""
    target: str = ""


def encode_header(kind: int, path: bytes, position: int, data_bytes: int) -> bytes:
    """Return the bytes before an operation's data. An empty `path` means the path of the operation before it."""
    return HEADER.pack(kind, len(path), position, data_bytes) + path


def decode_operations(body: memoryview) -> Iterator[Operation]:
    """Yield the operations in the body of an entry. Raises InvalidObject, before anything of an invalid one is used."""
    position, end, path = 0, len(body), ""
    while position < end:
        if end - position < HEADER.size:
            raise InvalidObject("an operation ends in the middle of its header")
        kind, path_bytes, place, data_bytes = HEADER.unpack_from(body, position)
        position += HEADER.size
        if kind not in KINDS:
            raise InvalidObject(f"an operation has the unknown kind {kind}")
        if end - position < path_bytes + data_bytes:
            raise InvalidObject("an operation ends in the middle of its data")
        if path_bytes:
            path = decode_path(bytes(body[position : position + path_bytes]))
        elif not path:
            raise InvalidObject("the first operation has no path")
        position += path_bytes
        data = bytes(body[position : position + data_bytes])
        position += data_bytes
        if kind == Kind.RENAME:
            yield Operation(kind, path, target=decode_path(data))
        elif data and kind != Kind.WRITE:
            raise InvalidObject("an operation that has no data has some")
        else:
            yield Operation(kind, path, place, data)


def decode_path(data: bytes) -> str:
    """Return a relative path of a replicated file or folder. Raises InvalidObject: the path could leave the folder."""
    try:
        path = data.decode()
    except UnicodeDecodeError:
        raise InvalidObject("a path is no UTF-8") from None
    check_path(path)
    return path


def check_path(path: str) -> None:
    """Raise InvalidObject unless `path` names something that is replicated, inside the data folder."""
    names = path.split("/")
    if "\0" in path or any(name in ("", ".", "..") for name in names):
        raise InvalidObject(f"the path {path!r} does not name a file in the data folder")
    if not is_replicated(path):
        raise InvalidObject(f"the path {path!r} is one that is not replicated")


LOCAL_FOLDER: Final = "replica"
"""The folder with what a server knows of its own place among the replicas."""
LOCAL_NAMES: Final = frozenset(
    {
        "lock",
        "address",
        "starting",
        "server.log",
        "server.log.1",
        "lost+found",
        ".snapshot",
        ".gitignore",
        ".gitkeep",
        LOCAL_FOLDER,
    }
)
"""First names, in the data folder, of what is not replicated, because it belongs to one process or one machine."""
LOCAL_PREFIXES: Final = ("address.",)
"""How the names of temporary files for these begin."""
RESERVE_PATH: Final = "meta/reserve"
"""The reserve of disk space (`tfmq.broker.reserve`): a start writes it again, so its 64 MiB need not be sent."""


def is_replicated(path: str) -> bool:
    """Return whether the file or folder at `path`, relative to the data folder, is replicated."""
    first = path.partition("/")[0]
    return first not in LOCAL_NAMES and not first.startswith(LOCAL_PREFIXES) and path != RESERVE_PATH


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is `folder`, or in it."""
    return path == folder or path.startswith(f"{folder}/")


class OperationApplier:
    """Applies operations to the files in `folder`. Keeps files open, because most writes are to the same files.

    Operations must come in the order in which they were recorded; those of an entry may be applied a second time only
    by `tfmq.replication.follower`, which knows where it stopped. Raises OSError and Full as the disk does.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._open: dict[str, File] = {}
        """Open files by path, the least recently used first."""
        self.changed: set[str] = set()
        """Paths of files that have bytes which may not be durable."""
        self.changed_folders: set[str] = set()

    def apply(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            self.apply_one(operation)

    def apply_one(self, operation: Operation) -> None:
        kind, path = operation.kind, operation.path
        if kind == Kind.WRITE:
            write_all(self._file(path), [operation.data], operation.position)
            self.changed.add(path)
        elif kind == Kind.TRUNCATE:
            self._file(path).truncate(operation.position)
            self.changed.add(path)
        elif kind == Kind.CREATE:
            self._keep(path, self._disk.create(self._full(path)))
            self._changed_name(path)
        elif kind == Kind.UNLINK:
            self.changed.discard(path)  # so that it is not fsynced before
            self._close(path)
            self._disk.unlink(self._full(path))
            self._changed_name(path)
        elif kind == Kind.RENAME:
            self._rename(path, operation.target)
        elif kind == Kind.MAKE_FOLDER:
            self._disk.make_folder(self._full(path))
            self._changed_name(path)
        else:
            self._disk.remove_folder(self._full(path))
            self.changed_folders.discard(path)
            self._changed_name(path)

    def force(self) -> None:
        """Fsync everything that was changed. Raises OSError; then it is unknown what is durable."""
        for path in sorted(self.changed):
            self._file(path).force()
        self.changed.clear()
        for path in sorted(self.changed_folders):
            self._disk.force_folder(self._full(path))
        self.changed_folders.clear()

    def close(self) -> None:
        """Fsync all that was changed, and close all files. Raises OSError; then it is unknown what is durable."""
        self.force()
        self.discard()

    def discard(self) -> None:
        """Close all files without an fsync, when the folder is made again or given up."""
        while self._open:
            self._open.popitem()[1].close()

    def _rename(self, source: str, target: str) -> None:
        for path in [each for each in self._open if is_below(each, source) or each == target]:
            self._close(path)
        self._disk.rename(self._full(source), self._full(target))
        self._changed_name(source)
        self._changed_name(target)
        for known in (self.changed, self.changed_folders):
            known.discard(target)
            for path in [each for each in known if is_below(each, source)]:
                known.discard(path)
                known.add(target + path[len(source) :])

    def _file(self, path: str) -> File:
        file = self._open.pop(path, None)
        if file is None:
            file = self._disk.open_write(self._full(path))
        self._keep(path, file)
        return file

    def _keep(self, path: str, file: File) -> None:
        while len(self._open) >= OPEN_FILES_MAX:
            oldest = next(iter(self._open))
            self._close(oldest)
        self._open[path] = file

    def _close(self, path: str) -> None:
        file = self._open.pop(path, None)
        if file is not None:
            # A file with bytes that are not durable is fsynced before it is closed: closing would hide a write error.
            if path in self.changed:
                file.force()
                self.changed.discard(path)
            file.close()

    def _full(self, path: str) -> str:
        return join(self._folder, path) if path else self._folder

    def _changed_name(self, path: str) -> None:
        self.changed_folders.add(path.rpartition("/")[0])
