"""Files of an archive are proven before a row of them is used; what is wrong is told by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.pipelines.test_hour_files import NINE, PIECE, batch
from tfmq.errors import Damaged
from tfmq.spark.pipelines import parquet_files
from tfmq.spark.pipelines.manifest import ArchiveFile
from tfmq.spark.pipelines.parquet_files import read_batches, write_piece

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


def test_a_missing_file_is_told_by_name(tmp_path: Path, file: ArchiveFile) -> None:
    (tmp_path / file.path).unlink()
    with pytest.raises(Damaged, match="misses " + file.path):
        list(read_batches(tmp_path, file))


def test_a_cut_file_and_every_flipped_bit_are_told_by_name(tmp_path: Path, file: ArchiveFile) -> None:
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
