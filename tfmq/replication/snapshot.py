"""Store snapshots: the bytes of a folder as chunks, then the manifest that refers to them.

A snapshot refers to chunks of the newest manifest and to chunks that it has uploaded itself, under new names. A sweep
(`tfmq.replication.sweep`) keeps both: the newest manifest and its chunks for the whole history, and every chunk for
the grace period. So a snapshot that is stored within half of the grace period never refers to a chunk that is deleted.

The first snapshot of a store may take as long as it needs. Its primary sweeps only afterwards, so another server that
sweeps has ended the primary's term, and the manifest belongs to a BASE that can be stored no more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from journal.disk import Disk
from journal.filenames import join
from tfmq.replication.chain import newest_manifest, read_manifest
from tfmq.replication.entries import CHUNKS, Position, manifest_key
from tfmq.replication.errors import (
    InvalidObject,
    NewerObject,
    ReplicationError,
    SnapshotLost,
    SnapshotTooSlow,
    StoreUnavailable,
)
from tfmq.replication.manifest import (
    Chunk,
    Content,
    Manifest,
    ManifestFile,
    decode_manifest,
    encode_manifest,
    hash_chunk,
    is_inline,
    split_file,
)
from tfmq.replication.operations import is_replicated
from tfmq.replication.store import Store

Result = TypeVar("Result")

GRACE_SECONDS_MAX: Final = 86_400
"""A chunk that nothing refers to is kept this long at least, or for the history if that is shorter."""
UPLOADS: Final = 2
"""How many chunks are in memory at most: all but one are uploaded while one is read."""
ATTEMPTS: Final = 4
"""How often an upload is tried before the snapshot fails."""
FIRST_PAUSE_SECONDS: Final = 0.25
"""Pause before the second attempt. Each further pause is four times as long."""


def grace_seconds(history_seconds: float) -> float:
    return min(GRACE_SECONDS_MAX, history_seconds)


class SourceFile(Protocol):
    """A file of a source.

    Its bytes below `changed` are those of the file `base_path` (None: no file) in the manifest at the source's `base`.
    """

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def changed(self) -> int: ...

    @property
    def base_path(self) -> str | None: ...


File = TypeVar("File", bound=SourceFile)


class SnapshotSource(Protocol[File]):
    """The replicated folders and files of a data folder at one moment."""

    @property
    def base(self) -> Position | None:
        """Position of the manifest that the files refer to; None: nothing is known to be unchanged."""

    @property
    def folders(self) -> Iterable[str]:
        """Paths of the folders, relative to the data folder."""

    @property
    def files(self) -> Iterable[File]: ...

    def read(self, file: File, position: int, size: int) -> bytes:
        """Return `size` bytes of a file as they were at that moment. Raises SnapshotLost if that is not possible."""

    def release(self, file: File) -> None:
        """Say that no more of the file will be read."""


class FolderFile(NamedTuple):
    path: str
    size: int
    changed: int = 0
    base_path: str | None = None


class FolderSource:
    """The source of a folder that nothing changes meanwhile. `files` and `folders` read the folder at each use."""

    base: Position | None = None

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder

    @property
    def folders(self) -> Iterator[str]:
        """A folder comes before those in it."""
        return (path for path, is_folder in self._walk("") if is_folder)

    @property
    def files(self) -> Iterator[FolderFile]:
        for path, is_folder in self._walk(""):
            if not is_folder:
                yield FolderFile(path, self._disk.size(join(self._folder, path)))

    def read(self, file: FolderFile, position: int, size: int) -> bytes:
        with closing(self._disk.open_read(join(self._folder, file.path))) as opened:
            return bytes(opened.pread_uncached(size, position))

    def release(self, file: FolderFile) -> None:
        pass

    def _walk(self, folder: str) -> Iterator[tuple[str, bool]]:
        for name in self._disk.list(join(self._folder, folder) if folder else self._folder):
            path = f"{folder}/{name}" if folder else name
            if not is_replicated(path):
                continue
            if not path.isascii():
                _check_utf8(path)
            is_folder = self._disk.is_folder(join(self._folder, path))
            yield path, is_folder
            if is_folder:
                yield from self._walk(path)


def _check_utf8(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ReplicationError(f"the name of {path!r} is no UTF-8, so it cannot be replicated: rename it") from None


Progress = Callable[[int], None]
"""Called with the number of bytes that are done since the last call, in the caller's thread."""


def ignore_progress(done: int) -> None:
    pass


class Snapshotter:
    """Stores snapshots of one data folder. `upload` and `store_manifest` are called in turn, by one thread at a time.

    Args:
        executor: hashes and uploads chunks. UPLOADS of them are in memory at most.
        clock: a monotonic clock in seconds.
        random_bytes: returns that many random bytes; called by threads of the executor.
        pause: sleeps for this many seconds; called by threads of the executor.
        limit_seconds: how long a snapshot may take: half of the grace period of the sweeps.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        *,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        pause: Callable[[float], None],
        limit_seconds: float,
    ) -> None:
        self._store = store
        self._executor = executor
        self._clock = clock
        self._random_bytes = random_bytes
        self._pause = pause
        self._limit_seconds = limit_seconds
        self._lock = threading.Lock()
        self._begun: float | None = None
        self._is_first = False
        """Whether the store had no snapshot when the present one began."""
        self._uploaded: dict[bytes, Chunk] = {}
        """By hash: chunks that were uploaded since `_begun` and that no manifest refers to yet."""
        self._reusable: Mapping[bytes, Chunk] = {}
        """By hash: the chunks of the newest manifest."""
        self.uploaded_bytes = 0
        """Bytes of all chunks that were uploaded."""

    def upload(self, source: SnapshotSource[File], progress: Progress = ignore_progress) -> Content:
        """Upload what the store does not have of a folder, and return what a manifest says of it.

        What a failed call has uploaded is used again by the next one. Raises SnapshotLost, SnapshotTooSlow,
        StoreUnavailable, StoreRefused, OSError; NewerObject if a newer version has stored the newest manifest.
        """
        newest = newest_manifest(self._store)
        self._is_first = newest is None
        if self._begun is None or self._is_late(1):
            self._uploaded.clear()
            self._begun = self._clock()
        base = None if newest is None else self._read_base(newest)
        self._reusable = {} if base is None else self._find_stored(base)
        known: dict[str, ManifestFile] = {}
        if base is not None and base.position == source.base:
            known = {file.path: file for file in base.content.files}
        files: list[tuple[SourceFile, bytes, dict[int, Chunk]]] = []
        uploads: deque[tuple[dict[int, Chunk], int, Future[Chunk]]] = deque()

        def finish_oldest() -> None:
            chunks, position, future = uploads.popleft()
            chunks[position] = future.result()
            progress(chunks[position].size)

        try:
            for file in source.files:
                chunks: dict[int, Chunk] = {}
                if is_inline(file.size):
                    files.append((file, _read(source, file, 0, file.size), chunks))
                    source.release(file)
                    progress(file.size)
                    continue
                files.append((file, b"", chunks))
                before = dict(known[file.base_path].parts()) if file.changed and file.base_path in known else {}
                for position, size in split_file(file.size):
                    found = before.get(position)
                    is_unchanged = found is not None and found.size == size and position + size <= file.changed
                    if found is not None and is_unchanged and found.digest in self._reusable:
                        chunks[position] = self._reusable[found.digest]
                        progress(size)
                        continue
                    self._check_time()
                    if len(uploads) >= UPLOADS:
                        finish_oldest()
                    data = _read(source, file, position, size)
                    uploads.append((chunks, position, self._executor.submit(self._store_chunk, data)))
                    del data
                source.release(file)
            while uploads:
                finish_oldest()
        finally:
            for _, _, future in uploads:
                future.cancel()
            wait([future for _, _, future in uploads])
        content = [
            ManifestFile(file.path, file.size, inline, tuple(chunks[position] for position in sorted(chunks)))
            for file, inline, chunks in files
        ]
        return Content(tuple(sorted(source.folders)), tuple(sorted(content)))

    def store_manifest(self, position: Position, time_ms: int, content: Content) -> Manifest:
        """Store the manifest of a `content` that `upload` has returned, and return the manifest at `position`.

        The entry at `position` must be stored before, unless it is the BASE of this manifest. If another server has
        stored a manifest at `position`, that one is returned: it describes the same folder. Raises SnapshotTooSlow,
        InvalidObject, StoreUnavailable, StoreRefused.
        """
        self._check_time()
        data = encode_manifest(Manifest(position, time_ms, content))
        key = manifest_key(position)
        is_new = self._try_repeatedly(lambda: self._store.put_new(key, data))
        stored = data if is_new else self._try_repeatedly(lambda: self._store.get(key))
        if stored is None:
            raise InvalidObject(f"{key} is missing")
        if stored == data and self._is_late(2):
            # The process was stopped for so long, after the check above, that a sweep may have deleted chunks.
            self._store.delete(key)
            self._check_time()
        self._begun = None
        self._uploaded.clear()
        return decode_manifest(stored, position)

    def _read_base(self, newest: Position) -> Manifest | None:
        try:
            return read_manifest(self._store, newest)
        except NewerObject:
            raise
        except InvalidObject:
            return None  # everything is uploaded, which makes the replica whole again

    def _find_stored(self, base: Manifest) -> dict[bytes, Chunk]:
        """Return the chunks of a manifest that are there, by hash. A lost one is uploaded again, so damage ends."""
        referred = {chunk.key: chunk for chunk in base.chunks()}
        return {
            found.digest: found
            for each in self._store.list(CHUNKS)
            if (found := referred.get(each.key)) is not None and found.size == each.size_bytes
        }

    def _store_chunk(self, data: bytes) -> Chunk:
        """Return the chunk with the content `data`. Called by threads of the executor."""
        digest = hash_chunk(data)
        with self._lock:
            known = self._reusable.get(digest) or self._uploaded.get(digest)
        if known is not None:
            return known
        # A name that exists belongs to another snapshot, or to an attempt whose answer was lost. It is not used: how
        # old it is for a sweep is known only of what this call has stored.
        chunk = Chunk(len(data), digest, self._random_bytes(4))
        while not self._try_repeatedly(partial(self._store.put_new, chunk.key, data)):
            chunk = chunk._replace(nonce=self._random_bytes(4))
        with self._lock:
            self._uploaded[digest] = chunk
            self.uploaded_bytes += len(data)
        return chunk

    def _try_repeatedly(self, call: Callable[[], Result]) -> Result:
        pause = FIRST_PAUSE_SECONDS
        for _ in range(ATTEMPTS - 1):
            try:
                return call()
            except StoreUnavailable:
                self._pause(pause)
                pause *= 4
        return call()

    def _check_time(self) -> None:
        if self._is_late(1):
            raise SnapshotTooSlow(f"the snapshot took more than {self._limit_seconds:,.0f} s")

    def _is_late(self, times: int) -> bool:
        if self._begun is None:
            return True
        return not self._is_first and self._clock() - self._begun > self._limit_seconds * times


def _read(source: SnapshotSource[File], file: File, position: int, size: int) -> bytes:
    data = source.read(file, position, size)
    if len(data) != size:
        raise SnapshotLost(f"{file.path} is shorter than when the snapshot began")
    return data
