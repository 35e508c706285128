"""Materialize: make a local folder equal to the folder after an entry.

The folder is made equal to a manifest, then the entries after it are applied. Files whose bytes are those of the
manifest stay; the others are replaced. The file DATA/replica/materializing is there from before the first change until
everything is durable: a folder that has it is incomplete, and no server may start in it. The same call, repeated,
completes it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import closing
from itertools import count
from typing import Final, NamedTuple

from journal.disk import Bytes, Disk, File, create_anew, read_file, write_all
from journal.filenames import LOG_CHECKPOINT_NAME, join
from tfmq.replication.ahead import call_ahead
from tfmq.replication.chain import Chain, read_chain, read_entries, read_manifest
from tfmq.replication.entries import Entry, EntryKind, Position, entry_key, manifest_key
from tfmq.replication.errors import InvalidObject, NewerObject, NoReplica
from tfmq.replication.manifest import Chunk, Manifest, ManifestFile, hash_chunk, is_inline
from tfmq.replication.operations import LOCAL_FOLDER, OperationApplier, decode_operations
from tfmq.replication.snapshot import FolderFile, FolderSource, Progress, ignore_progress
from tfmq.replication.store import Store

COMPARED_BYTES: Final = 1 << 20
MARKER_PATH: Final = f"{LOCAL_FOLDER}/materializing"
"""A file in the data folder while its content is incomplete."""
NEW_PATH: Final = f"{LOCAL_FOLDER}/new-file"
"""A file of the manifest is written here, fsynced, and renamed."""
DOWNLOADS: Final = 2
"""How many chunks are read, hashed or downloaded at the same time at most."""
DOES_NOT_FIT: Final = frozenset(
    {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EINVAL, errno.EFBIG, errno.EBUSY}
)
"""Errors of an operation that the folder does not permit: it was not recorded in this folder."""


class Start(NamedTuple):
    """Where materializing begins: a manifest, and the entries after it up to `until` or `at_ms`.

    `older`: positions of earlier manifests, the newest first, for the case that a chunk of `manifest` is damaged.
    """

    chain: Chain
    manifest: Manifest
    older: tuple[Position, ...]
    until: Position | None = None
    at_ms: int | None = None


class Materialized(NamedTuple):
    """The result: the folder after the entry at `position`, which was made at `time_ms`.

    `kept_bytes`: in files that stayed. `downloaded_bytes`: of chunks. `moved`: how many files were moved aside.
    `damage`: the sentence about a newer manifest that could not be used; "" if there is none. `entry_count`: of the
    entries after the manifest.
    """

    position: Position
    time_ms: int
    kept_bytes: int = 0
    downloaded_bytes: int = 0
    moved: int = 0
    damage: str = ""
    entry_count: int = 0


def find_start(store: Store, *, until: Position | None = None, at_ms: int | None = None) -> Start:
    """Find the manifest from which a folder is materialized: the newest at or below `until`, or not after `at_ms`.

    Neither: the newest. Raises InvalidObject if there is none, or if `until` does not count.
    """
    chain = read_chain(store)
    if until is not None and not chain.counts(until):
        raise InvalidObject(f"{entry_key(until)} does not count: another server continued before it")
    known = [position for position in chain.manifests if until is None or position <= until]
    readable = _Manifests(store)
    if at_ms is not None:
        known = readable.up_to_time(known, at_ms)
    while known:
        position = known.pop()
        manifest = readable.read(position)
        if manifest is not None:
            return Start(chain, manifest, tuple(reversed(known)), until, at_ms)
    if readable.damage is not None:
        raise readable.damage
    if not chain.manifests:
        raise NoReplica(f"the replica at {store.name} has no snapshot yet: its primary has not completed the first")
    where = f"at or below {entry_key(until)}" if until is not None else "at or before that time"
    raise NoReplica(f"the replica at {store.name} has no snapshot {where}: its history begins later")


class _Manifests:
    """Reads manifests, and remembers the first that is damaged."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.damage: InvalidObject | None = None

    def read(self, position: Position) -> Manifest | None:
        """Return None for a manifest that is damaged or missing. Raises NewerObject."""
        try:
            return read_manifest(self._store, position)
        except NewerObject:
            raise
        except InvalidObject as error:
            self.damage = self.damage or error
            return None

    def up_to_time(self, known: list[Position], at_ms: int) -> list[Position]:
        """Return those of `known` (oldest first) that are not after `at_ms`. Times increase along the history."""
        known = list(known)
        first, end = 0, len(known)
        while first < end:
            middle = (first + end) // 2
            manifest = self.read(known[middle])
            if manifest is None:
                del known[middle]
                end -= 1
            elif manifest.time_ms <= at_ms:
                first = middle + 1
            else:
                end = middle
        return known[:first]


def is_incomplete(disk: Disk, folder: str) -> bool:
    """Return whether materializing the data folder `folder` was begun and not completed."""
    return disk.exists(join(folder, MARKER_PATH))


def materialize(
    store: Store,
    disk: Disk,
    folder: str,
    executor: Executor,
    start: Start,
    *,
    aside: str | None = None,
    record: Callable[[Materialized], None] | None = None,
    progress: Progress = ignore_progress,
) -> Materialized:
    """Make the data folder `folder`, which must exist, equal to the folder after the entry that `start` is about.

    Files that are not replicated stay as they are. Everything is durable on return. The caller holds the folder's lock.

    Args:
        aside: a folder of the same file system. What `folder` has otherwise is moved there, unless it goes on there;
            without it, it is removed.
        record: called when everything is durable and before the folder counts as complete, to store what it is.
        progress: called with the bytes of files that were verified or written.

    Raises InvalidObject (damage of a manifest is evaded, if an earlier one and the entries after it are whole),
    NewerObject, StoreUnavailable, StoreRefused, Full, OSError. The same call may then be repeated.
    """
    work = _Materializing(store, disk, folder, executor, progress)
    first_error: InvalidObject | None = None
    older = iter(start.older)
    manifest: Manifest | None = start.manifest
    while manifest is not None:
        try:
            work.begin(manifest, aside)
            work.write_files(manifest, aside)
        except NewerObject:
            raise
        except InvalidObject as error:
            first_error = first_error or error
            manifest = _next_readable(store, older)
            continue
        position, time_ms, count = work.apply_entries(start, manifest)
        if aside is not None:
            work.drop_common(aside)
        damage = "" if first_error is None else str(first_error)
        result = Materialized(position, time_ms, work.kept_bytes, work.downloaded_bytes, work.moved, damage, count)
        if record is not None:
            record(result)
        work.end()
        return result
    assert first_error is not None
    raise first_error


def _next_readable(store: Store, positions: Iterator[Position]) -> Manifest | None:
    manifests = _Manifests(store)
    return next((found for each in positions if (found := manifests.read(each)) is not None), None)


def apply_entry(applier: OperationApplier, entry: Entry) -> None:
    """Apply the operations of an entry. Raises InvalidObject, also if they cannot be those of this folder; OSError,
    Full. Then it is unknown which were applied."""
    key = entry_key(entry.position)
    done = 0
    try:
        for operation in decode_operations(entry.body):
            applier.apply_one(operation)
            done += 1
    except InvalidObject as error:
        raise InvalidObject(f"{key} is invalid: {error}") from None
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in DOES_NOT_FIT:
            raise
        raise InvalidObject(f"{key} does not fit the folder: {error}") from error
    if done != entry.operation_count:
        raise InvalidObject(f"{key} has {done:,} operations instead of {entry.operation_count:,}")


class _Materializing:
    """The work on one folder."""

    def __init__(self, store: Store, disk: Disk, folder: str, executor: Executor, progress: Progress) -> None:
        self._store = store
        self._disk = disk
        self._folder = folder
        self._executor = executor
        self._progress = progress
        self._local = FolderSource(disk, folder)
        self._kept: set[str] = set()
        """Files that have the bytes of the manifest."""
        self.kept_bytes = 0
        self.downloaded_bytes = 0
        self.moved = 0

    def begin(self, manifest: Manifest, aside: str | None) -> None:
        """Move or remove what does not belong to the manifest, and find out which files stay."""
        is_moved = self._read_marker()
        if is_moved is None:
            self._write_marker(is_moved=False)
        self._kept = set(self._find_equal(manifest))
        self.kept_bytes = sum(file.size for file in manifest.content.files if file.path in self._kept)
        wanted = {file.path for file in manifest.content.files}
        others = [file.path for file in self._local.files if file.path not in self._kept]
        if aside is not None and not is_moved:
            self._move(others, aside)
            # Before their folders are removed.
            self._force_aside(aside)
        else:
            # After an interruption, what differs is what the interrupted call has written. A file that is to be
            # replaced stays until then, because parts of it may be needed.
            for path in others:
                if path not in wanted:
                    self._disk.unlink(self._path(path))
        self._remove_folders(manifest, aside if not is_moved else None)
        if not is_moved:
            # Not before all that was moved aside is durable there: from here on, what differs may be removed.
            if aside is not None:
                self._force_aside(aside)
            self._force_all(manifest)
            self._write_marker(is_moved=True)

    def write_files(self, manifest: Manifest, aside: str | None) -> None:
        """Make the folders and files of the manifest that are not there, durably."""
        for folder in manifest.content.folders:
            if not self._disk.exists(self._path(folder)):
                self._disk.make_folder(self._path(folder))
        for file in manifest.content.files:
            if file.path in self._kept:
                # Its bytes were found in the system's cache; they may not be on the disk yet.
                with closing(self._disk.open_write(self._path(file.path))) as opened:
                    opened.force()
            else:
                self._write_file(file, aside)
        self._force_all(manifest)

    def apply_entries(self, start: Start, manifest: Manifest) -> tuple[Position, int, int]:
        """Apply the entries after the manifest durably. Return position and time of the last one, and their number."""
        position, time_ms, count = manifest.position, manifest.time_ms, 0
        applier = OperationApplier(self._disk, self._folder)
        try:
            for entry in read_entries(self._store, start.chain, position, start.until, self._executor):
                if start.at_ms is not None and entry.time_ms > start.at_ms:
                    break
                self._apply(applier, entry)
                position, time_ms, count = entry.position, entry.time_ms, count + 1
            applier.force()
        except BaseException:
            applier.discard()
            raise
        applier.close()
        return position, time_ms, count

    def drop_common(self, aside: str) -> None:
        """Remove the files of `aside` with whose bytes the files of the folder begin, as those of logs do that only
        went on, and the checkpoints of logs of which nothing else is left. Not forced: what a power cut brings back
        takes space and nothing else."""
        if not self._disk.exists(aside):
            return
        moved = FolderSource(self._disk, aside)
        left = [file.path for file in moved.files if not self._begins_with(moved, file)]
        logs = {path.rpartition("/")[0] for path in left if not path.endswith(f"/{LOG_CHECKPOINT_NAME}")}
        kept = {path for path in left if path.rpartition("/")[0] in logs}
        for file in list(moved.files):
            if file.path not in kept:
                self._disk.unlink(join(aside, file.path))
                self.moved -= 1
        for folder in reversed(["", *moved.folders]):
            path = join(aside, folder) if folder else aside
            if not self._disk.list(path):
                self._disk.remove_folder(path)

    def _begins_with(self, moved: FolderSource, file: FolderFile) -> bool:
        path = self._path(file.path)
        if not self._disk.exists(path) or self._disk.is_folder(path) or self._disk.size(path) < file.size:
            return False
        mine = FolderSource(self._disk, self._folder)
        return all(
            moved.read(file, position, COMPARED_BYTES)
            == mine.read(file, position, min(COMPARED_BYTES, file.size - position))
            for position in range(0, file.size, COMPARED_BYTES)
        )

    def end(self) -> None:
        self._disk.unlink(self._path(MARKER_PATH))
        self._disk.force_folder(self._path(LOCAL_FOLDER))

    def _apply(self, applier: OperationApplier, entry: Entry) -> None:
        key = entry_key(entry.position)
        if entry.kind == EntryKind.BASE:
            raise InvalidObject(f"{key} continues from {manifest_key(entry.position)}, which cannot be used")
        if entry.kind == EntryKind.OPERATIONS:
            apply_entry(applier, entry)

    def _find_equal(self, manifest: Manifest) -> Iterator[str]:
        """Yield the paths of local files that are equal to those of the manifest."""
        sizes = {file.path: file.size for file in self._local.files}
        same_size = [file for file in manifest.content.files if sizes.get(file.path) == file.size]
        for file, is_equal in call_ahead(self._executor, self._is_equal, same_size, DOWNLOADS):
            if is_equal:
                self._progress(file.size)
                yield file.path

    def _is_equal(self, file: ManifestFile) -> bool:
        with closing(self._disk.open_read(self._path(file.path))) as opened:
            if is_inline(file.size):
                return opened.pread(file.size, 0) == file.content
            return all(_has_chunk(opened, position, chunk) for position, chunk in file.parts())

    def _write_file(self, file: ManifestFile, aside: str | None) -> None:
        """Write a file of the manifest: what it has of its chunks locally is copied, the rest is downloaded."""
        sources = [self._path(file.path)] + ([] if aside is None else [join(aside, file.path)])
        found = next((path for path in sources if self._disk.exists(path) and not self._disk.is_folder(path)), None)
        if is_inline(file.size):
            self._replace(file.path, [file.content])
        elif found is None:
            self._replace(file.path, self._chunks(file, None))
        else:
            with closing(self._disk.open_read(found)) as old:
                self._replace(file.path, self._chunks(file, old))
        self._progress(file.size)

    def _chunks(self, file: ManifestFile, old: File | None) -> Iterator[bytes]:
        def read(part: tuple[int, Chunk]) -> bytes:
            position, chunk = part
            if old is not None:
                data = old.pread(chunk.size, position)
                if len(data) == chunk.size and hash_chunk(data) == chunk.digest:
                    return data
            return self._download(chunk)

        return (data for _, data in call_ahead(self._executor, read, file.parts(), DOWNLOADS))

    def _download(self, chunk: Chunk) -> bytes:
        data = self._store.get(chunk.key)
        if data is None:
            raise InvalidObject(f"{chunk.key} is missing")
        chunk.check(data)
        self.downloaded_bytes += len(data)
        return data

    def _move(self, paths: Iterable[str], aside: str) -> None:
        for path in paths:
            folder = path.rpartition("/")[0]
            self._make_folders(aside, folder)
            target = join(aside, path)
            if self._disk.exists(target):
                target = next(each for n in count(1) if not self._disk.exists(each := f"{target}.{n}"))
            self._disk.rename(self._path(path), target)
            self.moved += 1

    def _force_aside(self, aside: str) -> None:
        if self._disk.exists(aside):
            for folder in ("", *FolderSource(self._disk, aside).folders):
                self._disk.force_folder(join(aside, folder) if folder else aside)
            self._disk.force_folder(_parent(aside))

    def _make_folders(self, root: str, folder: str) -> None:
        if not self._disk.exists(root):
            self._disk.make_folder(root)
            self._disk.force_folder(_parent(root))
        path = root
        for name in folder.split("/") if folder else ():
            parent, path = path, join(path, name)
            if not self._disk.exists(path):
                self._disk.make_folder(path)
                # Durable before anything is moved there: a file whose new folder is lost would be lost too.
                self._disk.force_folder(parent)

    def _remove_folders(self, manifest: Manifest, aside: str | None) -> None:
        """Remove the folders that the manifest does not have, and which are empty by now."""
        wanted = set(manifest.content.folders)
        for folder in sorted(set(self._local.folders) - wanted, reverse=True):
            if aside is not None:
                self._make_folders(aside, folder)
            for name in self._disk.list(self._path(folder)):
                self._disk.unlink(join(self._path(folder), name))  # it is not replicated, such as meta/reserve
            self._disk.remove_folder(self._path(folder))

    def _force_all(self, manifest: Manifest) -> None:
        for folder in ("", LOCAL_FOLDER, *manifest.content.folders):
            path = self._path(folder)
            if self._disk.exists(path):
                self._disk.force_folder(path)

    def _read_marker(self) -> bool | None:
        """Return whether an interrupted call has moved everything aside; None if no call was interrupted."""
        path = self._path(MARKER_PATH)
        if not self._disk.exists(path):
            return None
        try:
            return bool(json.loads(read_file(self._disk, path))["moved"])
        except (ValueError, KeyError, TypeError):
            return False

    def _write_marker(self, *, is_moved: bool) -> None:
        self._make_folders(self._folder, LOCAL_FOLDER)
        self._replace(MARKER_PATH, [json.dumps({"moved": is_moved}).encode()])
        self._disk.force_folder(self._path(LOCAL_FOLDER))

    def _replace(self, path: str, pieces: Iterable[Bytes]) -> None:
        """Write a file elsewhere, fsync it, and rename it to `path`; the caller fsyncs the folder of `path`."""
        new = self._path(NEW_PATH)
        file = create_anew(self._disk, new)
        position = 0
        try:
            for piece in pieces:
                position += write_all(file, [piece], position)
            file.force()
        except BaseException:
            file.close()
            self._disk.unlink(new)  # its space may be what is missing
            raise
        file.close()
        self._disk.rename(new, self._path(path))

    def _path(self, path: str) -> str:
        return join(self._folder, path) if path else self._folder


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")


def _has_chunk(file: File, position: int, chunk: Chunk) -> bool:
    data = file.pread_uncached(chunk.size, position)
    return len(data) == chunk.size and hash_chunk(data) == chunk.digest
