"""Files that are whole or not there, and the lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfmq.errors import BadRequest, Busy
from tfmq.spark.pipelines import archive_folder
from tfmq.spark.pipelines.archive_folder import (
    HOUR_MS,
    ArchivePiece,
    create_folder,
    create_output_folder,
    delete_temporary_files,
    file_path,
    hold_lock,
    temporary_path,
    write_atomically,
)


def test_what_is_put_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_what_is_not_whole_bears_a_hidden_name_of_its_own(tmp_path: Path) -> None:
    names = {temporary_path(tmp_path / "x.parquet").name for _ in range(10)}
    assert len(names) == 10
    assert all(name.startswith(".") and not name.endswith(".parquet") for name in names)


def test_a_sweep_takes_what_is_half_written_and_nothing_else(tmp_path: Path) -> None:
    kept, half = tmp_path / "deep" / "x.parquet", temporary_path(tmp_path / "deep" / "x.parquet")
    create_folder(kept.parent)
    kept.write_bytes(b"")
    half.write_bytes(b"")
    delete_temporary_files(tmp_path)
    assert kept.exists() and not half.exists()
    delete_temporary_files(tmp_path / "not there")


def test_a_lock_keeps_others_out_until_it_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "house" / "lock"
    with hold_lock(path, "taken."), pytest.raises(Busy, match=r"taken\."), hold_lock(path, "taken."):
        pass
    with hold_lock(path, "taken."):
        pass


def test_what_cannot_be_fsynced_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one")

    def failing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(path, b"two")
    assert path.read_bytes() == b"one"


def test_a_file_is_fsynced_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    fsync, replace = os.fsync, Path.replace

    def forced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"force {os.readlink(f'/proc/self/fd/{descriptor}')}")

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"rename {self} {target}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(Path, "replace", renamed)
    path = tmp_path / "new" / "file"
    write_atomically(path, b"x")
    beside = done[1].removeprefix("force ")
    assert done == [f"force {tmp_path}", f"force {beside}", f"rename {beside} {path}", f"force {path.parent}"]
    assert beside != str(path)


def test_a_folder_that_takes_nothing_is_reported_by_its_name(tmp_path: Path) -> None:
    create_output_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match=r"the folder .*/file/c: /.*/file: File exists\. Name one with --to"):
        create_output_folder(tmp_path / "file" / "c")


# Names of an archive's files.

PIECE = ArchivePiece(3, 5, 83886083, 4096, 8192)
NINE = 1_763_715_600_000  # 2025-11-21T09:00:00Z


def test_a_file_is_named_by_topic_hour_and_range() -> None:
    assert file_path("orders", NINE // HOUR_MS, PIECE) == (
        "topic=orders/date=2025-11-21/hour=09/00003-0000000005-00000000000000004096-00000000000000008192.parquet"
    )


def test_readers_of_parquet_pass_over_the_archives_own_files() -> None:
    own = (
        archive_folder.plan_path("t", 1),
        archive_folder.manifest_path("t", 1),
        archive_folder.lock_path("t"),
        archive_folder.ARCHIVE_FILE,
    )
    assert all(path.startswith("_") for path in own)
    assert archive_folder.manifest_path("t", 7) == "_tfmq/t/00000007.json"
