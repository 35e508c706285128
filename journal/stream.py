"""A batch that is too long for memory: spooled, verified, then appended in slices as one atomic append.

Up to SPOOL_MEMORY_BYTES stay in memory; beyond, the bytes go to a file in the log's folder that is gone afterwards. It
is never forced and never read after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from journal.batch import verify_batch
from journal.disk import Disk, File, write_all
from journal.errors import BadBatch, TooLarge
from journal.header import HEADER_SIZE, LENGTH, RECORD_SIZE_MAX
from journal.names import join
from journal.shapes import Batch

SPOOL_NAME: Final = "append.spool"
SPOOL_MEMORY_BYTES: Final = 4 << 20
"""Above this a stream goes to the disk."""
PIECE_BYTES: Final = 1 << 20
"""Read from the stream, and appended, at a time."""


class Readable(Protocol):
    """What a stream must do."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; b"" at the end."""
        ...


class Spool:
    """All bytes of a stream, in memory or in a file. Use with `with`: the file goes at the end."""

    def __init__(self, disk: Disk, folder: str, memory_bytes: int = SPOOL_MEMORY_BYTES) -> None:
        self._disk = disk
        self._path = join(folder, SPOOL_NAME)
        self._memory_bytes = memory_bytes
        self._memory = bytearray()
        self._file: File | None = None
        self.size = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self._disk.unlink(self._path)

    def fill(self, stream: Readable, size_max: int) -> None:
        """Takes everything from `stream`. Raises TooLarge, Full, OSError."""
        while piece := stream.read(PIECE_BYTES):
            if self.size + len(piece) > size_max:
                raise TooLarge("the stream", self.size + len(piece), size_max)
            self._take(piece)

    def read(self, size: int, position: int) -> bytes:
        """`size` bytes from `position`, fewer at the end."""
        if self._file is not None:
            return self._file.pread(size, position)
        return bytes(memoryview(self._memory)[position : position + size])

    def _take(self, piece: bytes) -> None:
        if self._file is None and self.size + len(piece) > self._memory_bytes:
            if self._disk.exists(self._path):
                self._disk.unlink(self._path)
            self._file = self._disk.create(self._path)
            write_all(self._file, [self._memory], 0)
            self._memory = bytearray()
        if self._file is None:
            self._memory += piece
        else:
            write_all(self._file, [piece], self.size)
        self.size += len(piece)


def slices(spool: Spool, producer_id: int, sequence: int) -> Iterator[Batch]:
    """The spooled records as batches of about PIECE_BYTES, without blocks. Raises BadBatch."""
    position = 0
    while position < spool.size:
        size = PIECE_BYTES
        data = spool.read(size, position)
        end, count = _whole(data)
        while not count:
            if len(data) < size or size > RECORD_SIZE_MAX:
                raise BadBatch(f"the stream ends inside the record at {position}")
            size *= 4
            data = spool.read(size, position)
            end, count = _whole(data)
        yield Batch(data[:end], (), producer_id, sequence, count)
        position += end
        sequence += count


def verified_count(spool: Spool, producer_id: int, sequence: int, verify: str) -> int:
    """The count of records in the spool, each of them checked. Raises BadBatch."""
    count = 0
    for batch in slices(spool, producer_id, sequence):
        verify_batch(*batch, verify=verify)
        count += batch.count
    return count


def _whole(data: bytes) -> tuple[int, int]:
    """(bytes, count) of the whole records at the start of `data`."""
    position = count = 0
    size = len(data)
    while position + HEADER_SIZE <= size:
        end = position + HEADER_SIZE + LENGTH.unpack_from(data, position)[0]
        if end > size:
            break
        position, count = end, count + 1
    return position, count
