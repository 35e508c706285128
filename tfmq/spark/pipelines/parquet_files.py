"""Reader and writer of an archive's Parquet files.

The reader verifies size and checksum of a file before it reads the rows. The writer writes a piece (a range of one
partition) as one file per hour of append time, in offset order. Append times never decrease in a partition, so the
writer has one file open at a time, and one row group in memory. The rows alone determine the row groups, so the same
rows give the same bytes, whatever the sizes of the batches in which the rows were read.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tfmq.arrow.schema import project
from tfmq.errors import Damaged
from tfmq.spark.pipelines import archive_folder
from tfmq.spark.pipelines.archive_folder import ArchiveFile, ArchivePiece

READ_BYTES: Final = 1 << 20
BATCH_ROWS: Final = 1 << 16
BATCH_BYTES: Final = 8 << 20
"""Approximate maximum size of a batch of rows that is read; a batch of large rows has less than BATCH_ROWS rows."""

MISSING: Final = "The archive {folder} misses {path}: it was deleted or not copied. Restore it from a copy."


def verify_file(folder: Path, file: ArchiveFile) -> None:
    """Raise Damaged, which names the file, if the size or CRC-32 is not that in `file`, or the file is missing."""
    crc = size = 0
    try:
        with (folder / file.path).open("rb") as opened:
            while data := opened.read(READ_BYTES):
                crc, size = zlib.crc32(data, crc), size + len(data)
    except FileNotFoundError:
        raise Damaged(MISSING.format(folder=folder, path=file.path)) from None
    why = ""
    if size != file.size_bytes:
        why = f"it has {size:,} bytes, instead of {file.size_bytes:,}"
    elif crc != file.crc:
        why = "its checksum is wrong"
    if why:
        raise Damaged(f"{file.path} in the archive {folder} is damaged: {why}. Restore it from a copy.")


def read_batches(folder: Path, file: ArchiveFile) -> Iterator[pa.RecordBatch]:
    """Verify a file, and yield its rows in order, with the columns COLUMNS. Raises Damaged."""
    verify_file(folder, file)
    rows = BATCH_ROWS
    if file.rows:
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES * file.rows // max(1, file.log_bytes)))
    with pq.ParquetFile(folder / file.path) as opened:
        for batch in opened.iter_batches(batch_size=rows, columns=COLUMNS.names):
            yield batch.cast(COLUMNS)


COLUMNS: Final = project(["partition", "offset", "timestamp", "id", "key", "tag", "attributes", "value"])
"""Columns of a file. The topic, the date and the hour are in its path."""
COMPRESSIONS: Final = ("zstd", "snappy", "gzip", "none")
GROUP_ROWS: Final = 1 << 20
GROUP_BYTES: Final = 16 << 20
"""A row group, which is in memory until it is written, ends after the row that reaches one of these limits."""
ROW_BYTES: Final = 48
"""Approximate size of a row without `value` and `attributes`, so that messages without these have a size, too."""
HOUR_US: Final = archive_folder.HOUR_MS * 1000


class ChecksumFile(io.BufferedWriter):
    """File that computes the CRC-32 and the number of the bytes written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.size_bytes = self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        written = super().write(data)
        self.size_bytes += written
        return written

    def close(self, fsync: bool = True) -> None:
        """Close the file, after an fsync unless `fsync` is false. Calling it twice is harmless."""
        if not self.closed:
            if fsync:
                self.flush()
                os.fsync(self.fileno())
            super().close()


class HourFileWriter:
    """Writes the Parquet file of a piece for one hour. The file has a temporary name until `finish` renames it."""

    def __init__(self, folder: Path, topic: str, hour: int, piece: ArchivePiece, compression: str) -> None:
        self._folder, self._piece = folder, piece
        self._name = archive_folder.file_path(topic, hour, piece)
        self._path = folder / self._name
        archive_folder.create_folder(self._path.parent)
        self._temporary = archive_folder.temporary_path(self._path)
        self._file = ChecksumFile(self._temporary)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._file, mode="w"),
            COLUMNS,
            compression=compression,
            use_dictionary=["partition", "key", "tag"],
            column_encoding=dict.fromkeys(("offset", "timestamp", "id"), "DELTA_BINARY_PACKED"),
        )
        self._buffered: list[pa.RecordBatch] = []
        self._buffered_rows = self._buffered_bytes = 0
        self.rows = self._log_bytes = 0
        self._first: tuple[int, int] | None = None
        self._last = (0, 0)

    def add_rows(self, batch: pa.RecordBatch) -> None:
        """Append rows. All rows must be of this hour, and have higher offsets than the rows that were added before."""
        sizes = estimate_row_sizes(batch)
        offsets, times = batch.column("offset"), batch.column("timestamp").cast(pa.int64())
        if self._first is None:
            self._first = (offsets[0].as_py(), times[0].as_py() // 1000)
        self._last = (offsets[-1].as_py(), times[-1].as_py() // 1000)
        self.rows += batch.num_rows
        self._log_bytes += int(sizes.sum())
        while batch.num_rows:
            reached = np.searchsorted(np.cumsum(sizes), GROUP_BYTES - self._buffered_bytes) + 1
            count = int(min(batch.num_rows, reached, GROUP_ROWS - self._buffered_rows))
            self._buffered.append(batch.slice(0, count))
            self._buffered_rows += count
            self._buffered_bytes += int(sizes[:count].sum())
            if self._buffered_bytes >= GROUP_BYTES or self._buffered_rows >= GROUP_ROWS:
                self._write_group()
            batch, sizes = batch.slice(count), sizes[count:]

    def _write_group(self) -> None:
        if self._buffered:
            table = pa.Table.from_batches(self._buffered).combine_chunks()
            self._writer.write_table(table, row_group_size=GROUP_ROWS)
        self._buffered, self._buffered_rows, self._buffered_bytes = [], 0, 0

    def finish(self) -> ArchiveFile:
        """Complete and fsync the file and rename it to its final name; durable on return."""
        assert self._first is not None, "a file without rows is never created"
        self._write_group()
        self._writer.close()
        self._file.close()
        archive_folder.rename_durably(self._temporary, self._path)
        piece = self._piece
        return ArchiveFile(
            self._name, piece.partition, piece.incarnation, piece.start, piece.end, self.rows, self._file.size_bytes,
            self._file.crc, self._log_bytes, self._first[0], self._last[0], self._first[1], self._last[1],
        )  # fmt: skip

    def abandon(self) -> None:
        with suppress(OSError):  # for example if the disk is full: the file is deleted below in any case
            self._writer.close()
        self._file.close(fsync=False)
        self._temporary.unlink(missing_ok=True)


def estimate_row_sizes(batch: pa.RecordBatch) -> Any:
    sizes = np.full(batch.num_rows, ROW_BYTES, dtype=np.int64)
    for name in ("value", "attributes"):
        column = batch.column(name)
        offsets = np.frombuffer(column.buffers()[1], np.int32, batch.num_rows + 1, 4 * column.offset)
        sizes += np.diff(offsets)
    return sizes


def split_by_hour(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (hours since 1970, rows of this hour) in order. The append times in `batch` must not decrease."""
    hours = batch.column("timestamp").cast(pa.int64()).to_numpy() // HOUR_US
    starts = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), len(hours)]
    for start, end in pairwise(starts):
        yield int(hours[start]), batch.slice(start, end - start)


def write_piece(
    folder: Path, topic: str, piece: ArchivePiece, batches: Iterable[pa.RecordBatch], compression: str
) -> list[ArchiveFile]:
    """Write the files of a piece. `batches`: the rows of the piece in offset order, with the columns COLUMNS.

    After an error only complete files exist. The next attempt writes the same files again, with the same bytes.
    """
    done: list[ArchiveFile] = []
    parts = (part for batch in batches if batch.num_rows for part in split_by_hour(batch))
    for hour, parts_of_hour in groupby(parts, key=itemgetter(0)):
        writer = HourFileWriter(folder, topic, hour, piece, compression)
        try:
            for _, rows in parts_of_hour:
                writer.add_rows(rows)
            done.append(writer.finish())
        except BaseException:
            writer.abandon()
            raise
    return done
