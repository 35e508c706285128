"""Reads the files of an archive, each proven by its size and checksum before a row of it is used."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from tfmq.errors import Damaged
from tfmq.spark.pipelines.hour_files import COLUMNS
from tfmq.spark.pipelines.manifest import ArchiveFile

READ_BYTES: Final = 1 << 20
BATCH_ROWS: Final = 1 << 16
BATCH_BYTES: Final = 8 << 20
"""A batch of large rows has fewer of them."""

MISSING: Final = (
    "The archive {folder} misses {path}: it was deleted or not copied. Bring it back from a copy."
)
DAMAGED: Final = "{path} in the archive {folder} is damaged: {why}. Bring it back from a copy."


def prove(folder: Path, file: ArchiveFile) -> None:
    """Raises Damaged, naming the file, where it is not there or not as it was written."""
    crc = size = 0
    try:
        with (folder / file.path).open("rb") as opened:
            while data := opened.read(READ_BYTES):
                crc, size = zlib.crc32(data, crc), size + len(data)
    except FileNotFoundError:
        raise Damaged(MISSING.format(folder=folder, path=file.path)) from None
    if size != file.size_bytes:
        why = f"it has {size:,} bytes, and was written with {file.size_bytes:,}"
        raise Damaged(DAMAGED.format(folder=folder, path=file.path, why=why))
    if crc != file.crc:
        why = "its bytes do not fit the checksum that they were written with"
        raise Damaged(DAMAGED.format(folder=folder, path=file.path, why=why))


def batches_of(folder: Path, file: ArchiveFile) -> Iterator[pa.RecordBatch]:
    """All its rows, in order, with COLUMNS, after it is proven."""
    prove(folder, file)
    rows = BATCH_ROWS
    if file.rows:
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES * file.rows // max(1, file.log_bytes)))
    with pq.ParquetFile(folder / file.path) as opened:
        for batch in opened.iter_batches(batch_size=rows, columns=COLUMNS.names):
            yield batch.cast(COLUMNS)
