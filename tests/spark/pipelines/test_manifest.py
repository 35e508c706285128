"""What an archive says of itself: read back as written, damage and gaps reported by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import paths
from tfmq.errors import BadRequest, Damaged, NotSupported
from tfmq.spark.pipelines import archive_folder
from tfmq.spark.pipelines.archive_folder import (
    ArchiveFile,
    ArchiveFolder,
    ArchivePiece,
    Gap,
    Manifest,
    Plan,
    decode_object,
    encode_object,
)

ROOT = paths.ROOT
PLAN = Plan(1, "orders", 2, "node", (ArchivePiece(0, 5, 83886080, 0, 4096),), (Gap(1, 5, 0, 100),))
FILE = ArchiveFile("topic=orders/x.parquet", 0, 5, 0, 4096, 3, 900, 77, 300, 0, 200, 1, 2)
DONE = Manifest(PLAN, (FILE,), {(5, 0): 4096, (5, 1): 100})


@pytest.fixture
def archive(tmp_path: Path) -> ArchiveFolder:
    return ArchiveFolder.open_or_create(tmp_path / "archive")


def test_a_step_is_read_back_as_it_was_begun_and_done(archive: ArchiveFolder) -> None:
    assert archive.started_plan("orders", 1) is None
    archive.write_plan(PLAN)
    assert archive.started_plan("orders", 1) == PLAN
    assert archive.steps("orders") == [] and archive.topics() == []
    archive.write_manifest(DONE)
    assert archive.started_plan("orders", 1) is None
    assert archive.manifest("orders", 1) == DONE
    assert archive.steps("orders") == [1] and archive.topics() == ["orders"]
    assert DONE.rows == 3 and DONE.size_bytes == 900


def test_an_archive_keeps_its_id(archive: ArchiveFolder) -> None:
    assert ArchiveFolder.open(archive.folder).id == archive.id == ArchiveFolder.open_or_create(archive.folder).id
    assert len(archive.id) == 32


def test_a_folder_with_other_content_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(BadRequest, match=r"not empty \('thesis.txt' is in it\): name a new folder"):
        ArchiveFolder.open_or_create(tmp_path)
    with pytest.raises(BadRequest, match="is no archive of tfmq"):
        ArchiveFolder.open(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_reported_with_its_name(archive: ArchiveFolder) -> None:
    archive.write_manifest(DONE)
    path = archive.folder / archive_folder.manifest_path("orders", 1)
    whole = path.read_bytes()
    seen = 0
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            assert archive.manifest("orders", 1) == DONE  # a bit of white space
        except Damaged as error:
            assert str(path) in str(error)
            seen += 1
    assert seen > len(whole) / 7 / 2
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Damaged, match=r"00000001\.json is damaged: it is not a JSON object"):
        archive.manifest("orders", 1)


def test_a_missing_step_is_reported_with_its_name(archive: ArchiveFolder) -> None:
    for step in (1, 2, 3):
        archive.write_manifest(DONE._replace(plan=PLAN._replace(step=step)))
    (archive.folder / archive_folder.manifest_path("orders", 2)).unlink()
    with pytest.raises(Damaged, match=r"misses _tfmq/orders/00000002\.json, though step 3 exists"):
        archive.steps("orders")


def test_a_newer_format_is_refused_and_no_field_of_it_is_guessed() -> None:
    data = encode_object({"version": archive_folder.VERSION + 1, "other": 1})
    with pytest.raises(NotSupported, match="x has format version 2, and this release of tfmq reads 1"):
        decode_object("x", data)


def test_the_golden_file_is_what_is_written_and_read() -> None:
    data = (ROOT / "tests" / "golden" / "archive.json").read_bytes()
    assert encode_object(archive_folder.manifest_to_json(DONE)) == data
    assert archive_folder.parse_manifest(decode_object("archive.json", data)) == DONE


def test_the_page_has_every_key_of_a_manifest() -> None:
    page = (ROOT / "docs" / "formats" / "archive.md").read_text()
    keys = {*archive_folder.manifest_to_json(DONE), *FILE._fields, *PLAN.pieces[0]._fields, *PLAN.gaps[0]._fields}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []
