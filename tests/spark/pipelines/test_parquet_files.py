"""Files of an archive are proven before a row of them is used; what is wrong is reported by name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.scale import seeded
from tfmq.errors import Damaged
from tfmq.spark.pipelines import parquet_files
from tfmq.spark.pipelines.archive_folder import HOUR_MS, ArchiveFile, ArchivePiece
from tfmq.spark.pipelines.parquet_files import COLUMNS, read_batches, write_piece

# Parquet by hour: one file an hour, in order, the same bytes for the same rows, nothing half written in sight.

PIECE = ArchivePiece(3, 5, 5 << 24 | 3, 1000, 90000)
NINE = 1_763_715_600_000  # 2025-11-21T09:00:00Z


def batch(offsets: Sequence[int], times: Sequence[int], values: Sequence[bytes | None]) -> pa.RecordBatch:
    count = len(offsets)
    return pa.RecordBatch.from_pydict(
        {
            "partition": [3] * count,
            "offset": offsets,
            "timestamp": [each * 1000 for each in times],
            "id": [offset * 7 for offset in offsets],
            "key": [b"k" if offset % 2 else None for offset in offsets],
            "tag": ["t" if offset % 3 else None for offset in offsets],
            "attributes": [b"a" if offset % 2 else None for offset in offsets],
            "value": values,
        },
        schema=COLUMNS,
    )


def sliced(whole: pa.RecordBatch, generator: Any) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of other sizes, some of them empty."""
    start = 0
    while start < whole.num_rows:
        count = generator.randrange(0, 9)
        yield whole.slice(start, count)
        start += count


def test_rows_go_into_the_file_of_their_hour_and_keep_their_order(tmp_path: Path) -> None:
    times = [NINE - 1, NINE, NINE + 5, NINE + HOUR_MS - 1, NINE + 3 * HOUR_MS]
    rows = batch([1000, 1100, 1200, 1300, 1400], times, [b"a", None, b"", b"d", b"e"])
    files = write_piece(tmp_path, "orders", PIECE, [rows.slice(0, 2), rows.slice(2, 3)], "zstd")
    assert [each.path.split("/")[2] for each in files] == ["hour=08", "hour=09", "hour=12"]
    assert [(each.rows, each.first_offset, each.last_offset) for each in files] == [
        (1, 1000, 1000),
        (3, 1100, 1300),
        (1, 1400, 1400),
    ]
    assert (files[1].first_ms, files[1].last_ms) == (NINE, NINE + HOUR_MS - 1)
    whole = pa.concat_tables([pq.ParquetFile(tmp_path / each.path).read() for each in files])
    assert whole.to_pylist() == rows.to_pylist()
    for each in files:
        data = (tmp_path / each.path).read_bytes()
        assert (each.size_bytes, each.crc) == (len(data), zlib.crc32(data))


@pytest.mark.long
@pytest.mark.parametrize("compression", parquet_files.COMPRESSIONS)
def test_the_same_rows_give_the_same_bytes_however_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setattr(parquet_files, "GROUP_ROWS", 11)
    monkeypatch.setattr(parquet_files, "GROUP_BYTES", 1500)
    generator = seeded("hour files")
    count = 200
    values = [generator.randbytes(generator.choice((0, 5, 60, 2000))) for _ in range(count)]
    times = sorted(NINE + generator.randrange(2 * HOUR_MS) for _ in range(count))
    rows = batch(range(count), times, values)
    first = write_piece(tmp_path / "a", "orders", PIECE, [rows], compression)
    for number in range(5):
        folder = tmp_path / str(number)
        again = write_piece(folder, "orders", PIECE, sliced(rows, generator), compression)
        assert again == first
        assert [(folder / each.path).read_bytes() for each in again] == [
            (tmp_path / "a" / each.path).read_bytes() for each in first
        ]
    groups = pq.ParquetFile(tmp_path / "a" / first[0].path).metadata
    sizes = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
    assert max(sizes) <= 11 and len(sizes) > 5


def test_what_fails_in_the_middle_leaves_whole_files_only(tmp_path: Path) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield batch([1, 2], [NINE, NINE + HOUR_MS], [b"", b""])
        assert [each.parent.name for each in tmp_path.rglob("[!.]*.parquet")] == ["hour=09"]
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        write_piece(tmp_path, "orders", PIECE, rows(), "zstd")
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert [each.parent.name for each in files] == ["hour=09"]
    assert pq.ParquetFile(files[0]).metadata.num_rows == 1


def test_no_rows_give_no_file(tmp_path: Path) -> None:
    assert write_piece(tmp_path, "orders", PIECE, [batch([], [], [])], "zstd") == []
    assert list(tmp_path.iterdir()) == []


ROWS = batch(range(1000, 1100), [NINE] * 100, [b"x" * 50] * 100)


@pytest.fixture
def file(tmp_path: Path) -> ArchiveFile:
    return write_piece(tmp_path, "orders", PIECE, [ROWS], "zstd")[0]


def test_rows_come_back_as_they_were_written(
    tmp_path: Path, file: ArchiveFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "BATCH_BYTES", 1000)
    batches = list(read_batches(tmp_path, file))
    assert len(batches) > 5
    assert [row for each in batches for row in each.to_pylist()] == ROWS.to_pylist()
    assert {each.schema for each in batches} == {ROWS.schema}


def test_a_missing_file_is_reported_by_name(tmp_path: Path, file: ArchiveFile) -> None:
    (tmp_path / file.path).unlink()
    with pytest.raises(Damaged, match="misses " + file.path):
        list(read_batches(tmp_path, file))


def test_a_cut_file_and_every_flipped_bit_are_reported_by_name(tmp_path: Path, file: ArchiveFile) -> None:
    path = tmp_path / file.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(Damaged, match=f"{file.path} in the archive .* is damaged: it has .* bytes"):
        list(read_batches(tmp_path, file))
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(Damaged, match=f"{file.path} in the archive .* its checksum is wrong"):
            list(read_batches(tmp_path, file))
    path.write_bytes(whole)
    assert sum(each.num_rows for each in read_batches(tmp_path, file)) == 100
