"""One bucket file, and the cache of open bucket files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Final, TypeAlias

from journal import filenames
from journal.crc32 import crc32
from journal.disk import Disk, File
from journal.errors import Corrupt
from journal.record.format import HEADER_SIZE, LENGTH, RECORD_SIZE_MAX, Buffer
from tfmq.delay.buckets.format import (
    CHUNK_MAGIC,
    CHUNK_SIZE,
    CRC,
    CRC_SIZE,
    ENTRY_SIZE,
    HEAD_SIZE,
    SEED_MASK,
    ChunkColumns,
    ChunkHead,
    StoreIdentity,
    TimeSpan,
    bucket_name,
    checksum_seed,
    decode_chunk,
    decode_columns,
    decode_head,
    decode_table,
)
from tfmq.delay.rows import Target

logger = logging.getLogger("tfmq.delay")

READ_WINDOW_BYTES: Final = 256 << 10
"""One read covers records that are at most this far apart, because reading the gap costs less than a second read."""
CACHED_GAP_BYTES: Final = 4096
"""One read from the page cache covers only records that begin less than this apart. For the disk: READ_WINDOW_BYTES."""
TAIL_MIN: Final = 128
TAIL_MAX: Final = 4096
"""Bounds of the size that a read assumes for its last record: the size of the largest record of the previous read."""
SCAN_BYTES: Final = 1 << 20
"""Bytes of one read in the search for the next chunk after damage."""
TAIL_WINDOW_BYTES: Final = 64 << 10
"""`Bucket.last_chunks` searches first in this many bytes at the end of the file."""
TAIL_WINDOW_FACTOR: Final = 4
NO_BYTE_LIMIT: Final = sys.maxsize
DAMAGE_MAX: Final = 1000
"""Maximum number of damaged ranges in `Bucket.damage`. All damaged ranges are logged."""

Records: TypeAlias = list[bytes | None]
Pread = Callable[[int, int], "bytes | bytearray | None"]
"""pread(size, position): returns the bytes of the file, or None if the read would block."""


class Bucket:
    """A file with the delayed messages that are due in one time span. It grows by chunks.

    Reads may run in any thread, also while a chunk is added. All data is verified before use: the columns by the
    checksum of their chunk, a record by its own checksum, which also covers its number. `size` and `count`: the valid
    bytes of the file and the number of messages in them, as the checkpoint lists them; bytes after `size` are ignored.
    """

    def __init__(
        self,
        folder: str,
        identity: StoreIdentity,
        span: TimeSpan,
        bucket_id: int,
        size: int,
        count: int,
        dead_count: int = 0,
    ) -> None:
        self.span = span
        self.bucket_id = bucket_id
        self.size = size
        self.count = count
        self.path = filenames.join(folder, bucket_name(span))
        self.identity = identity
        self.seed = checksum_seed(identity, span)
        self.dead_count = dead_count
        """Number of messages that are not pending any more. Constant while a worker stores it in the checkpoint."""
        self.damage: list[Corrupt] = []
        self._size_hint = TAIL_MIN
        self.is_quiet = False
        """Whether damage is not logged. An offline tool sets this, because it reports the damage itself."""

    def __repr__(self) -> str:
        return f"<Bucket {self.path}>"

    # Chunks and their columns

    def read_columns(self, files: OpenFileCache) -> Iterator[ChunkColumns]:
        """Yield the columns of undamaged chunks; record damage. Runs in a worker.

        Raises NewerFormat, Full (no file descriptor left), OSError.
        """
        with files.opened(self.path) as file:
            for chunk in self.chunks(file):
                if isinstance(chunk, Corrupt):
                    self.record_damage(chunk)
                    continue
                try:
                    yield self.decode_columns(file.pread(chunk.columns_size, chunk.position + CHUNK_SIZE), chunk)
                except Corrupt as error:
                    self.record_damage(error)

    def decode_columns(self, data: Buffer, chunk: ChunkHead) -> ChunkColumns:
        return decode_columns(data, chunk, self.span, self.seed, self.path)

    def read_targets(self, files: OpenFileCache) -> Iterator[Sequence[Target]]:
        """Yield the targets of each chunk, unverified, so that the caller can decide whether to read the columns.

        Raises NewerFormat, OSError.
        """
        with files.opened(self.path) as file:
            for chunk in self.chunks(file):
                if not isinstance(chunk, Corrupt):
                    position = chunk.position + CHUNK_SIZE + ENTRY_SIZE * chunk.count
                    data = file.pread(chunk.table_size, position)
                    yield decode_table(bytes(data)) or ()

    def chunks(self, file: File) -> Iterator[ChunkHead | Corrupt]:
        """Yield the head of each chunk, and a Corrupt for each range without a valid head.

        The head of a chunk is yielded even if the end of the chunk is missing. Raises NewerFormat, OSError.
        """
        # Read `self.size` only once, because the size grows if a chunk is added meanwhile.
        listed_size = self.size
        try:
            if decode_head(file.pread(HEAD_SIZE, 0), self.path) != (self.identity, self.span):
                raise Corrupt(self.path, 0, HEAD_SIZE, "its head is that of another bucket")
        except Corrupt as error:
            yield error
        size = min(listed_size, file.size())
        yield from self._chunks_from(file, HEAD_SIZE, size, listed_size)
        if size < listed_size:
            yield Corrupt(self.path, size, listed_size, "the file is shorter than its listed size")

    def last_chunks(self, file: File, after: int) -> Iterator[ChunkHead | Corrupt]:
        """Yield the heads of the chunks that may have messages at arrival-log offset `after` or later.

        Also yield chunks that a repair has written (their arrival offset is unknown), and a Corrupt for damage among
        these chunks. Unlike `chunks`, check neither the file's head nor its size. Raises OSError.
        """
        size = min(self.size, file.size())
        window = TAIL_WINDOW_BYTES
        position = HEAD_SIZE
        # The arrival offsets of the chunks in a file ascend, except that chunks written by a repair have 0 (unknown).
        while window < size - HEAD_SIZE:
            found = self._find_chunk(file, size - window, size, self.size)
            if found < size and 0 < self._read_chunk_head(file, found, size, self.size).arrival_offset <= after:
                position = found
                break
            window *= TAIL_WINDOW_FACTOR
        for chunk in self._chunks_from(file, position, size, self.size):
            if isinstance(chunk, Corrupt) or not 0 < chunk.arrival_offset <= after:
                yield chunk

    def _chunks_from(self, file: File, position: int, size: int, listed_size: int) -> Iterator[ChunkHead | Corrupt]:
        while position < size:
            try:
                chunk = self._read_chunk_head(file, position, size, listed_size)
            except Corrupt as error:
                following = self._find_chunk(file, position + 1, size, listed_size)
                yield Corrupt(self.path, position, following, error.reason)
                position = following
            else:
                yield chunk
                position = chunk.next_position

    def _read_chunk_head(self, file: File, position: int, size: int, listed_size: int) -> ChunkHead:
        """Read a chunk's head. `size`: size of the file. `listed_size`: its size in the checkpoint. Raises Corrupt."""
        chunk = decode_chunk(file.pread(CHUNK_SIZE, position), position, self.seed, self.path)
        if chunk.records_position > size or chunk.next_position > listed_size:
            raise Corrupt(self.path, position, size, f"the file ends inside a chunk of {chunk.count} messages")
        return chunk

    def _find_chunk(self, file: File, position: int, size: int, listed_size: int) -> int:
        """Return the position of the next valid chunk head from `position` on; `size` if there is none."""
        while position < size:
            data = file.pread(min(SCAN_BYTES, size - position), position)
            at = data.find(CHUNK_MAGIC)
            while at >= 0:
                try:
                    self._read_chunk_head(file, position + at, size, listed_size)
                except Corrupt:
                    at = data.find(CHUNK_MAGIC, at + 1)
                else:
                    return position + at
            position += max(len(data) - len(CHUNK_MAGIC) + 1, 1)
        return size

    # Records of messages

    def read(self, files: OpenFileCache, positions: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Records:
        """Read records of this bucket by position, see `BucketStore.read`."""
        with files.opened(self.path) as file:
            found = self._read_records(positions, numbers, bytes_max, file.pread, READ_WINDOW_BYTES)
            assert found is not None
            return found

    def read_cached(
        self, files: OpenFileCache, positions: Sequence[int], numbers: Sequence[int], bytes_max: int
    ) -> Records | None:
        """Read records of this bucket by position; return None if the read would wait for the disk."""
        with files.opened_if_cached(self.path) as file:
            if file is None:
                return None
            return self._read_records(positions, numbers, bytes_max, file.pread_cached, CACHED_GAP_BYTES)

    def _read_records(
        self, positions: Sequence[int], numbers: Sequence[int], bytes_max: int, pread: Pread, gap: int
    ) -> Records | None:
        found: Records = []
        start, count, left, largest = 0, len(positions), bytes_max, 0
        while start < count:
            first = last = positions[start]
            end, limit = start + 1, first + READ_WINDOW_BYTES
            while end < count and last <= positions[end] < limit and positions[end] - last < gap:
                last = positions[end]
                end += 1
            read = pread(max(0, min(last + self._size_hint, self.size) - first), first)
            if read is None:
                return None
            data = bytes(read)
            for index in range(start, end):
                record = self._verified_record(data, positions[index] - first, numbers[index], first, pread)
                if record is WOULD_BLOCK:
                    return None
                found.append(record)
                if record is not None:
                    size = len(record)
                    left -= size
                    if size > largest:
                        largest = size
                if left <= 0:
                    break
            if left <= 0:
                break
            start = end
        self._size_hint = min(max(CRC_SIZE + largest, TAIL_MIN), TAIL_MAX)
        return found

    def _verified_record(self, data: bytes, at: int, number: int, first: int, pread: Pread) -> bytes | None:
        begin = at + CRC_SIZE
        if begin + HEADER_SIZE > len(data):
            return self._record_lost_message(first + at, "the file ends before it")
        end = begin + HEADER_SIZE + LENGTH.unpack_from(data, begin)[0]
        record = data[begin:end]
        if end > len(data):
            if end - begin > RECORD_SIZE_MAX or first + end > self.size:
                return self._record_lost_message(first + at, "its length is invalid")
            rest = pread(end - begin, first + begin)
            if rest is None:
                return WOULD_BLOCK
            record = bytes(rest)
        (crc,) = CRC.unpack_from(data, at)
        if crc32(record, number & SEED_MASK) != crc:
            return self._record_lost_message(first + at, f"it fails its checksum as number {number}")
        return record

    def _record_lost_message(self, position: int, reason: str) -> bytes | None:
        self.record_damage(
            Corrupt(self.path, position, position + CRC_SIZE + HEADER_SIZE, f"a message is lost: {reason}")
        )
        return None

    def record_damage(self, error: Corrupt) -> None:
        """Record damage, and log it unless `is_quiet`. Do nothing if this damage is recorded already."""
        if any(known.first == error.first and known.reason == error.reason for known in self.damage):
            return
        if not self.is_quiet:
            logger.error("delayed messages are damaged: %s", error)
        if len(self.damage) < DAMAGE_MAX:
            self.damage.append(error)


WOULD_BLOCK: Final = b""
"""Result of `_verified_record` if reading the rest of the record would block. Real records are never empty."""


UNUSED_FILES_MAX: Final = 64
"""Maximum number of unused bucket files that stay open. Most reads are in the few buckets that are due soon."""


@dataclass(slots=True)
class _OpenFile:
    file: File
    users: int = 0


class OpenFileCache:
    """Bucket files that are open for reading. Thread-safe."""

    def __init__(self, disk: Disk, limit: int = UNUSED_FILES_MAX) -> None:
        self.disk = disk
        self._limit = limit
        self._lock = Lock()
        self._files: dict[str, _OpenFile] = {}
        """Open files by path; the most recently used file is last."""
        self._evictions = 0
        """Number of evictions. If it rises while a file is opened, the opened file may be a deleted or replaced one."""

    @contextmanager
    def opened(self, path: str) -> Iterator[File]:
        """Context manager: the file at `path`, opened if needed. Raises Full (no file descriptor left), OSError."""
        opened = self._acquire(path)
        while opened is None:
            opened = self._open_file(path)
        try:
            yield opened.file
        finally:
            self._release(path, opened)

    @contextmanager
    def opened_if_cached(self, path: str) -> Iterator[File | None]:
        """Like `opened`, but None if the file is not open, because opening a file could block."""
        opened = self._acquire(path)
        try:
            yield None if opened is None else opened.file
        finally:
            if opened is not None:
                self._release(path, opened)

    def evict(self, path: str) -> None:
        """Remove a file from the cache before it is deleted or replaced. The file is closed as soon as it is unused."""
        with self._lock:
            self._evictions += 1
            opened = self._files.pop(path, None)
            if opened is not None and not opened.users:
                opened.file.close()

    def close(self) -> None:
        for path in list(self._files):
            self.evict(path)

    def _acquire(self, path: str) -> _OpenFile | None:
        with self._lock:
            opened = self._files.pop(path, None)
            if opened is not None:
                opened.users += 1
                self._files[path] = opened
            return opened

    def _open_file(self, path: str) -> _OpenFile | None:
        """Open a file. Return None if the caller must try again, because a file was evicted meanwhile."""
        before = self._evictions
        file = self.disk.open_read(path)
        with self._lock:
            if self._evictions == before and path not in self._files:
                opened = self._files[path] = _OpenFile(file, users=1)
                return opened
        file.close()
        return self._acquire(path)

    def _release(self, path: str, opened: _OpenFile) -> None:
        with self._lock:
            opened.users -= 1
            if self._files.get(path) is not opened:
                if not opened.users:
                    opened.file.close()
                return
            for name in [name for name, each in self._files.items() if not each.users][: -self._limit]:
                self._files.pop(name).file.close()
