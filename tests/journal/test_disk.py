"""The calls on paths: the real disk and the simulated one answer alike."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import disk as disk_module
from journal.disk import BUFFERS_MAX, Bytes, Disk, FileReferences, RealDisk, RealFile, write_all
from journal.errors import Full, Locked
from journal.testing import SimulatedDisk, SimulatedFile
from tests import paths
from tests.scale import scaled


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


def test_all_of_a_file_system_is_fsynced_at_once(place: tuple[Disk, str]) -> None:
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=30)
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


def test_without_a_descriptor_an_open_says_so_and_a_folder_can_still_be_fsynced(tmp_path: Path) -> None:
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=30)
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


# One file on a real disk, and the loop that continues short writes.


@pytest.fixture
def file(tmp_path: Path) -> RealFile:
    return RealDisk().create(f"{tmp_path}/file")


def test_what_was_written_is_read(file: RealFile) -> None:
    assert file.pwritev([b"hello ", memoryview(b"wide "), bytearray(b"world")], 3) == 16
    assert file.size() == 19
    assert file.pread(100, 0) == b"\0\0\0hello wide world"
    assert file.pread(4, 9) == b"wide"
    assert file.pread(4, 19) == b""
    buffer = bytearray(30)
    assert file.pread_into(buffer, 14) == 5
    assert buffer[:5] == b"world"
    file.force()
    file.truncate(5)
    assert file.pread(100, 0) == b"\0\0\0he"


def test_a_cached_read_answers_or_says_that_it_would_wait(file: RealFile) -> None:
    file.pwritev([b"x" * 10_000], 0)
    assert file.pread_cached(10_000, 0) in (b"x" * 10_000, None)
    assert file.pread_cached(10, 9_995) in (b"x" * 5, None)


def test_a_cached_read_never_takes_a_part_for_the_whole(file: RealFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.pwritev([b"x" * 10_000], 0)
    monkeypatch.setattr(os, "preadv", lambda *_: 4096)
    assert file.pread_cached(10_000, 0) is None


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_cached_read_is_none_where_the_system_says_so(
    file: RealFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "preadv", _failing(number))
    assert file.pread_cached(1, 0) is None


def test_a_read_error_is_not_hidden(file: RealFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", _failing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.pread_cached(1, 0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_full(file: RealFile, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "pwritev", _failing(number))
    with pytest.raises(Full, match="file"):
        write_all(file, [b"x"], 0)


def test_no_space_at_an_fsync_is_a_lost_write_and_not_full(file: RealFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", _failing(errno.ENOSPC))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        file.force()


def test_a_closed_file_answers_an_error(file: RealFile) -> None:
    file.close()
    file.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        file.pread(1, 0)


def test_more_buffers_than_the_system_takes_at_once(file: RealFile) -> None:
    buffers = [bytes([n % 251]) * (n % 5) for n in range(3 * BUFFERS_MAX + 7)]
    assert write_all(file, buffers, 10) == sum(map(len, buffers))
    assert file.pread(1 << 20, 10) == b"".join(buffers)


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 40), st.integers(0, 100))
def test_short_writes_are_gone_on_with(buffers: list[bytes], step: int, position: int) -> None:
    disk = SimulatedDisk()
    file = disk.create("file")
    disk.faults.short_write(step, times=None)
    assert write_all(file, buffers, position) == len(b"".join(buffers))
    assert file.pread(10_000, position) == b"".join(buffers)


def test_a_short_write_may_end_in_a_full_disk() -> None:
    disk = SimulatedDisk(space_bytes=10)
    file = disk.create("file")
    with pytest.raises(Full):
        write_all(file, [b"x" * 6, b"y" * 6], 0)
    assert file.pread(100, 0) == b"x" * 6 + b"y" * 4


def test_a_system_that_writes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(file: SimulatedFile, buffers: Sequence[Bytes], position: int) -> int:
        return 0

    file = SimulatedDisk().create("file")
    monkeypatch.setattr(SimulatedFile, "pwritev", nothing)
    with pytest.raises(OSError, match="wrote nothing"):
        write_all(file, [b"x"], 0)


def _failing(number: int):  # type: ignore[no-untyped-def]
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


# A file that left the set is closed when no thread uses the set, not before, and once.


class Counted:
    """A file that counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_with_nothing_pinned_it_is_closed_at_once() -> None:
    pins, file = FileReferences(), Counted()
    pins.retire([file])
    assert file.closed == 1


def test_it_is_closed_once_when_the_last_file_reference_is_released() -> None:
    pins, file = FileReferences(), Counted()
    pins.acquire()
    with pins:
        pins.retire([file])
        with pins:
            pass
        assert file.closed == 0
    assert file.closed == 0, "pins are counted"
    pins.release()
    assert file.closed == 1
    with pins:
        pins.retire([])
    assert file.closed == 1


def test_a_file_reference_that_comes_after_keeps_it_open_too() -> None:
    """Which caller holds it is unknown, so the last one of all closes it."""
    pins, file = FileReferences(), Counted()
    pins.acquire()
    pins.retire([file])
    pins.acquire()
    pins.release()
    assert file.closed == 0
    pins.release()
    assert file.closed == 1


def test_a_block_that_ends_with_an_error_releases_its_file_reference() -> None:
    pins, file = FileReferences(), Counted()
    with pytest.raises(OSError, match="to see"), pins:
        pins.retire([file])
        raise OSError("to see")
    assert file.closed == 1


def test_a_close_may_use_the_file_references_itself() -> None:
    pins = FileReferences()

    class Nested(Counted):
        def close(self) -> None:
            super().close()
            with pins:
                assert self.closed == 1

    file = Nested()
    pins.retire([file])
    assert file.closed == 1


def test_a_file_reference_that_is_released_while_files_are_reported_leaves_none_open() -> None:
    """A generator that is collected there does that."""
    pins, files = FileReferences(), [Counted(), Counted()]

    def reported() -> Iterator[Counted]:
        yield files[0]
        pins.release()
        yield files[1]

    pins.acquire()
    pins.retire(reported())
    assert [file.closed for file in files] == [1, 1]


def test_a_reader_that_refers_to_files_before_it_takes_the_list_never_has_a_closed_file() -> None:
    pins, rounds = FileReferences(), scaled(5_000)
    current = [Counted()]
    old: list[Counted] = []
    seen: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            with pins:
                file = current[0]
                # Others run now, with the file in this one's hand.
                time.sleep(0)
                seen.append(file.closed)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(rounds):
        gone, current[0] = current[0], Counted()
        old.append(gone)
        pins.retire([gone])
        time.sleep(0)
    over.set()
    for reader in readers:
        reader.join(10)
        assert not reader.is_alive()
    assert seen and not any(seen)
    assert [file.closed for file in old] == [1] * rounds and current[0].closed == 0
