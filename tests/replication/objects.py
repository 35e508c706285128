"""A store in memory for these tests, an executor without threads, and histories with a model of the folder."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Executor, Future
from contextlib import closing
from pathlib import Path
from typing import Any

from journal.disk import Disk
from journal.testing import SimulatedDisk
from tfmq.replication.entries import (
    IDENTITY_KEY,
    Begin,
    EntryKind,
    Fence,
    Identity,
    Position,
    Term,
    encode_entry,
    entry_key,
    term_key,
)
from tfmq.replication.errors import StoreUnavailable
from tfmq.replication.manifest import Manifest
from tfmq.replication.operations import Kind, Operation, OperationApplier, encode_header
from tfmq.replication.snapshot import FolderSource, Snapshotter
from tfmq.replication.store import StoredObject
from tfmq.replication.stores.file_store import FileStore
from tfmq.testing.memory_store import MemoryStore

DATA = "/srv/data"


class HookedStore(MemoryStore):
    """A `MemoryStore` with a clock of its own, a hook before each call, and objects that a test may change."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        super().__init__(lambda: self.now)
        self.before: Callable[[str, str], None] = lambda call, key: None
        self.gets: list[str] = []
        self.deletes: list[tuple[str, ...]] = []
        self.objects = StoredObjects(self)

    def put_new(self, key: str, data: bytes) -> bool:
        self.before("put_new", key)
        return super().put_new(key, data)

    def get(self, key: str) -> bytes | None:
        self.before("get", key)
        self.gets.append(key)
        return super().get(key)

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        self.before("list", prefix)
        return super().list(prefix, after)

    def delete(self, *keys: str) -> None:
        self.deletes.append(keys)
        for key in keys:
            self.before("delete", key)
            super().delete(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.objects if key.startswith(prefix)]

    def damage(self, key: str) -> None:
        """Flip a bit in the middle of an object."""
        data, modified = self.objects[key]
        middle = len(data) // 2
        self.objects[key] = (data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :], modified)


class StoredObjects(MutableMapping[str, tuple[bytes, float]]):
    """The objects of a store, with their times, as a dictionary; without the hook."""

    def __init__(self, store: HookedStore) -> None:
        self._store = store

    def __getitem__(self, key: str) -> tuple[bytes, float]:
        return self._store._objects[key]

    def __setitem__(self, key: str, value: tuple[bytes, float]) -> None:
        MemoryStore.delete(self._store, key)
        MemoryStore.put_new(self._store, key, value[0])
        self._store._objects[key] = value

    def __delitem__(self, key: str) -> None:
        del self._store._objects[key]
        self._store._keys.remove(key)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._store._keys))

    def __len__(self) -> int:
        return len(self._store._keys)


def copy_to_folder(store: HookedStore, folder: Path) -> str:
    """Copy the objects into a new folder, and return the URL of the store that this makes it."""
    folder.mkdir()
    with closing(FileStore(str(folder))) as copy:
        for key, (data, _) in store.objects.items():
            copy.put_new(key, data)
    return f"file://{folder}"


class CallsItself(Executor):
    """An executor that makes each call at once."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def failing_after(store: HookedStore, calls: int) -> Callable[[str, str], None]:
    """Return a hook that lets all calls after so many fail."""
    left = calls

    def check(call: str, key: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoreUnavailable("the store cannot be reached")

    return check


def encode(operations: list[Operation]) -> bytes:
    parts = []
    for each in operations:
        data = each.target.encode() if each.kind == Kind.RENAME else each.data
        parts.append(encode_header(each.kind, each.path.encode(), each.position, len(data)) + data)
    return b"".join(parts)


Tree = dict[str, bytes | None]
"""Content by path; None: a folder."""


def read_tree(disk: SimulatedDisk, folder: str = DATA) -> Tree:
    source = FolderSource(disk, folder)
    tree: Tree = dict.fromkeys(source.folders)
    return tree | {file.path: disk.read_file(f"{folder}/{file.path}") for file in source.files}


def empty_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder("/srv")
    disk.make_folder(DATA)
    disk.force_folder("/srv")
    disk.force_folder("")
    return disk


def make_snapshotter(store: Any, *, seed: int = 0, **changes: Any) -> Snapshotter:
    options: dict[str, Any] = {
        "clock": lambda: store.now,
        "random_bytes": random.Random(seed).randbytes,
        "pause": lambda seconds: None,
        "limit_seconds": 43_200.0,
    }
    return Snapshotter(store, CallsItself(), **options | changes)


class Primary:
    """Writes a history into a store: changes of a folder on a simulated disk, as entries of terms."""

    def __init__(self, store: HookedStore, generator: random.Random | None = None) -> None:
        self.store = store
        self.disk = empty_disk()
        self.through: Disk | None = None
        """A disk through which random changes are made, if not `disk` itself."""
        self.generator = generator or random.Random(1)
        self.position = Position(0, 0)
        self.time_ms = 1_000
        self.trees: dict[Position, Tree] = {}
        """The folder after each entry that counts."""
        self.times: dict[Position, int] = {}
        self.snapshotter = make_snapshotter(store)
        store.put_new(IDENTITY_KEY, Identity("node").encode())

    def begin(self, parent: Position | None = None, skipped: int = 0) -> None:
        """Begin the next term, after `skipped` that never began, at `parent`: by default the last entry."""
        number = self.position.term + 1 + skipped
        parent = parent or (self.position if self.position.term else None)
        for each in range(self.position.term + 1, number + 1):
            self.claim(each)
        if parent is not None and parent != self.position:
            self.disk = empty_disk()
            for path, content in sorted(self.trees[parent].items()):
                if content is None:
                    self.disk.make_folder(f"{DATA}/{path}")
                else:
                    self.disk.write_file(f"{DATA}/{path}", content)
            self.trees = {position: tree for position, tree in self.trees.items() if position <= parent}
            self.time_ms = self.times[parent]
        if parent is not None:
            self.fence(Position(parent.term, parent.slot + 1))
        self.position = Position(number, -1)
        self.store_entry(EntryKind.BEGIN, Begin(parent, "m", "host:1").encode())

    def claim(self, number: int) -> None:
        self.store.put_new(term_key(number), Term(number, "m", "host:1", f"{number:016x}").encode())

    def fence(self, position: Position) -> None:
        """Replace what is at `position` by a fence: what was stored there, and after it, does not count any more."""
        fence = encode_entry(EntryKind.FENCE, position, self.time_ms, [Fence("other").encode()])
        self.store.objects[entry_key(position)] = (fence, self.store.now)

    def store_entry(self, kind: EntryKind, body: bytes, count: int = 0) -> None:
        if kind != EntryKind.BASE:  # its time is that of its manifest
            self.time_ms += self.generator.randrange(3)
        self.position = Position(self.position.term, self.position.slot + 1)
        key = entry_key(self.position)
        assert self.store.put_new(key, encode_entry(kind, self.position, self.time_ms, [body], count))
        self.trees[self.position] = read_tree(self.disk)
        self.times[self.position] = self.time_ms

    def write(self, *operations: Operation) -> None:
        """Apply operations and store them as an entry."""
        applier = OperationApplier(self.disk, DATA)
        applier.apply(operations)
        applier.close()
        self.store_entry(EntryKind.OPERATIONS, encode(list(operations)), len(operations))

    def write_file(self, path: str, data: bytes, position: int = 0) -> None:
        """Append to a file, or create it with `data`."""
        is_new = not self.disk.exists(f"{DATA}/{path}")
        begin = [Operation(Kind.CREATE, path)] if is_new else []
        self.write(*begin, Operation(Kind.WRITE, path, position, data))

    def snapshot(self) -> Manifest:
        source = FolderSource(self.disk, DATA)
        content = self.snapshotter.upload(source)
        return self.snapshotter.store_manifest(self.position, self.time_ms, content)

    def base(self) -> None:
        """Store a manifest of the folder, whatever entries say, and the BASE that continues from it."""
        content = self.snapshotter.upload(FolderSource(self.disk, DATA))
        self.snapshotter.store_manifest(Position(self.position.term, self.position.slot + 1), self.time_ms, content)
        self.store_entry(EntryKind.BASE, b"")

    def change_randomly(self, count: int) -> list[Operation]:
        """Apply some random operations without storing them, and return them."""
        applier = OperationApplier(self.through or self.disk, DATA)
        operations = []
        for _ in range(count):
            operation = self._random_operation()
            applier.apply_one(operation)
            operations.append(operation)
        applier.close()
        return operations

    def write_randomly(self) -> None:
        operations = self.change_randomly(self.generator.randrange(4))
        self.store_entry(EntryKind.OPERATIONS, encode(operations), len(operations))

    def _random_operation(self) -> Operation:
        generator = self.generator
        tree = read_tree(self.disk)
        files = [path for path, content in tree.items() if content is not None]
        folders = [path for path, content in tree.items() if content is None]
        data = generator.randbytes(generator.choice((1, 30, 500, 3000)))
        path = generator.choice(["", *(f"{folder}/" for folder in folders)]) + generator.choice("abcdef")
        empty = [each for each in folders if not any(other.startswith(f"{each}/") for other in tree)]
        choice = generator.randrange(10)
        if files and choice < 4:
            path = generator.choice(files)
            size = len(tree[path] or b"")
            return Operation(Kind.WRITE, path, generator.choice((size, size, generator.randrange(size + 1))), data)
        if files and choice == 4:
            return Operation(Kind.TRUNCATE, generator.choice(files), generator.randrange(2000))
        if files and choice == 5:
            return Operation(Kind.UNLINK, generator.choice(files))
        if files and choice == 6 and tree.get(path, b"") is not None:
            return Operation(Kind.RENAME, generator.choice(files), target=path)
        if empty and choice == 7:
            return Operation(Kind.REMOVE_FOLDER, generator.choice(empty))
        if path in tree or path.count("/") > 3:
            return Operation(Kind.CREATE, _unused(tree))
        return Operation(Kind.MAKE_FOLDER if choice == 8 else Kind.CREATE, path)


def _unused(tree: Tree) -> str:
    return next(f"n{number}" for number in range(len(tree) + 1) if f"n{number}" not in tree)
