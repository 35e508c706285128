"""The calls on paths: the real disk and the simulated one answer alike."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from journal import disk as disk_module
from journal.disk import Disk, RealDisk, write_all
from journal.errors import Full, Locked
from journal.testing import SimulatedDisk
from tests import paths


@pytest.fixture(params=["real", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, str]:
    if request.param == "real":
        return RealDisk(), str(tmp_path)
    simulated = SimulatedDisk()
    simulated.make_folder("data")
    return simulated, "data"


def test_a_file_is_made_once(place: tuple[Disk, str]) -> None:
    disk, folder = place
    write_all(disk.create(f"{folder}/a"), [b"abc"], 0)
    with pytest.raises(FileExistsError):
        disk.create(f"{folder}/a")
    assert disk.exists(f"{folder}/a")
    assert disk.size(f"{folder}/a") == 3
    assert disk.open_read(f"{folder}/a").pread(9, 0) == b"abc"
    disk.open_write(f"{folder}/a").pwritev([b"x"], 3)
    assert disk.size(f"{folder}/a") == 4


def test_a_file_opened_for_reading_cannot_be_written(place: tuple[Disk, str]) -> None:
    disk, folder = place
    disk.create(f"{folder}/a").close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        disk.open_read(f"{folder}/a").pwritev([b"x"], 0)


@pytest.mark.parametrize("call", ["open_read", "open_write", "unlink", "size", "list", "force_folder"])
def test_what_is_not_there_is_said_to_be_missing(place: tuple[Disk, str], call: str) -> None:
    disk, folder = place
    with pytest.raises(FileNotFoundError):
        getattr(disk, call)(f"{folder}/none")
    assert not disk.exists(f"{folder}/none")


def test_folders(place: tuple[Disk, str]) -> None:
    disk, folder = place
    disk.make_folder(f"{folder}/b")
    disk.create(f"{folder}/a").close()
    assert disk.list(folder) == ["a", "b"]
    assert disk.is_folder(f"{folder}/b")
    assert not disk.is_folder(f"{folder}/a")
    with pytest.raises(FileExistsError):
        disk.make_folder(f"{folder}/b")
    disk.create(f"{folder}/b/c").close()
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        disk.remove_folder(f"{folder}/b")
    disk.unlink(f"{folder}/b/c")
    disk.remove_folder(f"{folder}/b")
    disk.force_folder(folder)
    assert disk.list(folder) == ["a"]


def test_a_rename_replaces(place: tuple[Disk, str]) -> None:
    disk, folder = place
    write_all(disk.create(f"{folder}/a"), [b"new"], 0)
    write_all(disk.create(f"{folder}/b"), [b"older"], 0)
    disk.rename(f"{folder}/a", f"{folder}/b")
    assert disk.list(folder) == ["b"]
    assert disk.open_read(f"{folder}/b").pread(9, 0) == b"new"


def test_an_open_file_outlives_its_name(place: tuple[Disk, str]) -> None:
    disk, folder = place
    file = disk.create(f"{folder}/a")
    disk.unlink(f"{folder}/a")
    write_all(file, [b"still"], 0)
    assert file.pread(9, 0) == b"still"


def test_a_lock_is_held_once(place: tuple[Disk, str]) -> None:
    disk, folder = place
    held = disk.lock(f"{folder}/lock")
    with pytest.raises(Locked, match="only one broker"):
        disk.lock(f"{folder}/lock")
    held.release()
    held.release()
    disk.lock(f"{folder}/lock").release()


def test_all_of_a_file_system_is_forced_at_once(place: tuple[Disk, str]) -> None:
    disk, folder = place
    anchor = disk.open_anchor(folder)
    write_all(disk.create(f"{folder}/a"), [b"abc"], 0)
    disk.sync_file_system(anchor)
    if isinstance(disk, SimulatedDisk):
        assert disk.crash(keep="nothing").read_file(f"{folder}/a") == b"abc"


def test_free_space_is_said(place: tuple[Disk, str]) -> None:
    disk, folder = place
    assert disk.free_space(folder) > 0


def test_another_process_is_named_as_the_holder_of_a_lock(tmp_path: Path) -> None:
    path = f"{tmp_path}/lock"
    held = RealDisk().lock(path)
    script = (
        "import sys; from journal.disk import RealDisk\n"
        f"try: RealDisk().lock({path!r})\n"
        "except Exception as error: print(type(error).__name__, error.holder)"
    )
    root = paths.ROOT
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=30
    )
    assert done.stdout.split() == ["Locked", str(os.getpid())], done.stderr
    held.release()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("open", lambda disk, path: disk.create(path)),
        ("mkdir", lambda disk, path: disk.make_folder(path)),
        ("rename", lambda disk, path: disk.rename(path, path)),
        ("open", lambda disk, path: disk.lock(path)),
    ],
)
def test_no_room_for_a_name_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[Disk, str], Any]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(Full):
        call(RealDisk(), f"{tmp_path}/x")


def test_without_a_descriptor_an_open_says_so_and_a_folder_can_still_be_forced(tmp_path: Path) -> None:
    script = (
        "import resource; from journal.disk import RealDisk; from journal.errors import Full\n"
        "disk = RealDisk(); resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); kept = []\n"
        "try:\n"
        f"  while True: kept.append(disk.create('{tmp_path}/%d' % len(kept)))\n"
        "except Full as error: print(error)\n"
        f"for _ in range(3): disk.force_folder('{tmp_path}')\n"
        "kept.pop().close()\n"
        f"disk.open_read('{tmp_path}/0'); print('goes on')"
    )
    root = paths.ROOT
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=30
    )
    first, second = done.stdout.splitlines()
    assert "Too many open files" in first, done.stderr
    assert second == "goes on"


def test_a_system_without_syncfs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk()
    anchor = disk.open_anchor(str(tmp_path))
    monkeypatch.setattr(disk_module, "_syncfs", None)
    with pytest.raises(OSError, match="whole file system"):
        disk.sync_file_system(anchor)


def test_an_error_of_syncfs_is_raised(tmp_path: Path) -> None:
    disk = RealDisk()
    anchor = disk.open_anchor(str(tmp_path))
    anchor.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        disk.sync_file_system(anchor)


def test_an_anchor_of_another_disk_is_refused(tmp_path: Path) -> None:
    simulated = SimulatedDisk()
    with pytest.raises(TypeError):
        RealDisk().sync_file_system(simulated.open_anchor(""))
    with pytest.raises(TypeError):
        simulated.sync_file_system(RealDisk().open_anchor(str(tmp_path)))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_path_that_cannot_be_looked_at_is_not_taken_for_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    def refused(path: str) -> os.stat_result:
        raise OSError(code, os.strerror(code), path)

    (tmp_path / "file").touch()
    disk = RealDisk()
    assert not disk.exists(str(tmp_path / "file/x")) and not disk.is_folder(str(tmp_path / "none/x"))
    (tmp_path / "loop").symlink_to("loop")
    assert disk.exists(str(tmp_path / "loop")) and not disk.is_folder(str(tmp_path / "loop"))
    for call in (disk.exists, disk.is_folder):
        with monkeypatch.context() as broken, pytest.raises(OSError, match="file") as caught:
            broken.setattr(os, "lstat", refused)
            broken.setattr(os, "stat", refused)
            try:
                call(str(tmp_path / "file"))
            finally:
                broken.undo()  # before pytest looks at files to show a failure
        assert caught.value.errno == code
