"""Views of a folder in use: what they show, what they keep, and what has changed since the snapshot before."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest

from journal.disk import File
from journal.testing import SimulatedDisk
from tests.replication.followed_disk import DATA, copy_of
from tests.scale import scaled, seeded
from tfmq.replication import file_table
from tfmq.replication.entries import Position
from tfmq.replication.errors import SnapshotLost
from tfmq.replication.file_table import FolderView, ViewedFile
from tfmq.replication.recording_disk import RecordingDisk


def recording(base: Position | None = None, **files: bytes) -> tuple[RecordingDisk, dict[str, File]]:
    """A disk with these files in the folder `f`, and the files, opened."""
    inner = SimulatedDisk()
    inner.make_folder(DATA)
    inner.make_folder(f"{DATA}/f")
    for name, data in files.items():
        inner.write_file(f"{DATA}/f/{name}", data)
    disk = RecordingDisk(inner, DATA, base=base)
    return disk, {name: disk.open_write(f"{DATA}/f/{name}") for name in files}


def shown(view: FolderView) -> dict[str, bytes]:
    return {file.path: view.read(file, 0, 1 << 30) for file in view.files}


def _each(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


CHANGES: dict[str, Callable[[RecordingDisk, File], object]] = {
    "append": lambda disk, file: file.pwritev([b"more"], file.size()),
    "overwrite": lambda disk, file: file.pwritev([b"XX"], 3),
    "cut off": lambda disk, file: file.truncate(4),
    "write again behind the cut": lambda disk, file: _each(
        lambda: file.truncate(4), lambda: file.pwritev([b"YYYYYYYY"], 2)
    ),
    "extend": lambda disk, file: file.truncate(100),
    "unlink": lambda disk, file: disk.unlink(f"{DATA}/f/a"),
    "write after unlink": lambda disk, file: _each(
        lambda: disk.unlink(f"{DATA}/f/a"), lambda: file.pwritev([b"XX"], 1)
    ),
    "replace": lambda disk, file: _each(
        lambda: disk.create(f"{DATA}/n"), lambda: disk.rename(f"{DATA}/n", f"{DATA}/f/a")
    ),
    "rename": lambda disk, file: _each(
        lambda: disk.rename(f"{DATA}/f/a", f"{DATA}/f/c"), lambda: file.pwritev([b"XX"], 0)
    ),
    "rename folder": lambda disk, file: _each(
        lambda: disk.rename(f"{DATA}/f", f"{DATA}/g"), lambda: file.pwritev([b"XX"], 0)
    ),
    "rename out": lambda disk, file: _each(
        lambda: disk.rename(f"{DATA}/f/a", f"{DATA}/replica"), lambda: file.pwritev([b"XX"], 0)
    ),
}


@pytest.mark.parametrize("size", [10, file_table.SAVED_FILE_BYTES_MAX + 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_view_shows_the_folder_as_it_was(change: str, size: int) -> None:
    content = bytes(range(10)).ljust(size, b"x")
    for is_read_before in (False, True):
        disk, files = recording(a=content, b=b"other")
        view = disk.begin_snapshot()
        if is_read_before:
            assert view.read(view.files[0], 1, 3) == content[1:4]
        CHANGES[change](disk, files["a"])
        assert view.folders == ["f"]
        assert shown(view) == {"f/a": content, "f/b": b"other"}
        assert view.read(view.files[0], 2, 5) == content[2:7], "also a part"
        view.close()


def test_a_read_while_the_file_is_changed_shows_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, files = recording(a=b"before")
    view = disk.begin_snapshot()
    plain = file_table.FileTable.open_read

    def open_read(table: Any, path: str) -> Any:
        opened = plain(table, path)
        read = opened.pread_uncached

        def pread_uncached(size: int, position: int) -> bytes | bytearray:
            files["a"].pwritev([b"after!"], 0)  # with the lock free, as always during a read
            return read(size, position)

        monkeypatch.setattr(opened, "pread_uncached", pread_uncached)
        return opened

    with monkeypatch.context() as changed:
        changed.setattr(file_table.FileTable, "open_read", open_read)
        view.read(view.files[0], 0, 0)
    assert view.read(view.files[0], 0, 6) == b"before"
    assert files["a"].pread(9, 0) == b"after!"


def test_the_view_is_of_the_last_operation_and_cuts_there() -> None:
    disk, files = recording(a=b"")
    files["a"].pwritev([b"1"], 0)
    view = disk.begin_snapshot()
    files["a"].pwritev([b"2"], 1)
    assert view.number == 1 and [body.last_operation for body in disk.take()] == [1]
    with pytest.raises(ValueError, match="under way"):
        disk.begin_snapshot()
    view.close()
    with pytest.raises(ValueError, match="ended"):
        view.read(view.files[0], 0, 1)
    assert disk.begin_snapshot().number == 2


def test_what_is_released_is_not_saved() -> None:
    disk, files = recording(a=bytes(100_000), b=bytes(10))
    view = disk.begin_snapshot()
    a, b = view.files
    files["a"].pwritev([b"x"], 50)
    assert a.saved == [(50, b"\0")]
    view.release(a)
    files["a"].pwritev([b"x"], 40)
    disk.unlink(f"{DATA}/f/a")
    assert isinstance(disk.inner, SimulatedDisk)
    assert a.handle is None and len(disk.inner.open_files) == 2
    with pytest.raises(ValueError, match="released"):
        view.read(a, 0, 1)
    assert view.read(b, 0, 10) == bytes(10)


def test_the_same_bytes_are_saved_once() -> None:
    disk, files = recording(a=bytes(100))
    view = disk.begin_snapshot()
    for n in range(1000):
        files["a"].pwritev([b"%010d" % n], 20)
    assert view.files[0].saved == [(20, bytes(10))]


# What may not be kept any more


def lost(view: FolderView) -> None:
    for file in view.files:
        with pytest.raises(SnapshotLost):
            view.read(file, 0, 1)
    with pytest.raises(SnapshotLost):
        view.commit(Position(1, 1))
    view.close()


def test_a_view_that_would_save_too_much_is_lost_and_the_next_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_table, "SAVED_BYTES_MAX", 100)
    disk, files = recording(a=bytes(1000))
    view = disk.begin_snapshot()
    files["a"].pwritev([bytes(60)], 0)
    files["a"].pwritev([bytes(60)], 60)
    again = disk.begin_snapshot()
    lost(view)
    assert shown(again) == {"f/a": bytes(1000)}


def test_a_view_that_would_keep_too_many_files_open_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_table, "HANDLES_MAX", 1)
    monkeypatch.setattr(file_table, "SAVED_FILE_BYTES_MAX", 5)
    disk, _ = recording(a=bytes(10), b=bytes(10), c=bytes(5))
    view = disk.begin_snapshot()
    disk.unlink(f"{DATA}/f/a")
    disk.unlink(f"{DATA}/f/c")
    assert shown(view).keys() == {"f/a", "f/b", "f/c"}
    view.release(view.files[1])
    disk.unlink(f"{DATA}/f/b")
    view.close()

    disk, _ = recording(a=bytes(10), b=bytes(10))
    view = disk.begin_snapshot()
    disk.unlink(f"{DATA}/f/a")
    disk.unlink(f"{DATA}/f/b")
    lost(view)
    assert isinstance(disk.inner, SimulatedDisk)
    assert len(disk.inner.open_files) == 2, "those of the test"


@pytest.mark.parametrize("kind", ["open", "read"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_what_cannot_be_saved_costs_the_view_and_not_the_change(kind: str, error: int) -> None:
    for change in ("overwrite", "unlink"):
        disk, files = recording(a=bytes(file_table.SAVED_FILE_BYTES_MAX + 1))
        view = disk.begin_snapshot()
        assert isinstance(disk.inner, SimulatedDisk)
        if kind == "read" and change == "unlink":
            continue
        disk.inner.faults.fail(kind, error=error)
        CHANGES[change](disk, files["a"])
        lost(view)


def test_a_file_that_is_shorter_than_it_was_written_is_an_error() -> None:
    disk, _ = recording(a=b"whole")
    view = disk.begin_snapshot()
    assert isinstance(disk.inner, SimulatedDisk)
    disk.inner.write_file(f"{DATA}/f/a", b"cut")
    with pytest.raises(OSError, match="fewer bytes"):
        view.read(view.files[0], 0, 5)


# What has changed


def state(file: ViewedFile) -> tuple[str, str | None, int]:
    return file.path, file.base_path, file.changed


def test_the_first_changed_byte_since_the_last_snapshot_is_known() -> None:
    disk, files = recording(a=bytes(100), b=bytes(50), c=bytes(30))
    view = disk.begin_snapshot()
    assert view.base is None
    assert [state(file) for file in view.files] == [(f"f/{name}", None, 0) for name in "abc"]
    files["b"].pwritev([b"more"], 50)
    files["a"].pwritev([b"x"], 70)
    view.commit(Position(3, 4))
    files["c"].pwritev([b"x"], 20)
    files["c"].truncate(10)
    files["c"].pwritev([bytes(90)], 10)
    disk.rename(f"{DATA}/f/b", f"{DATA}/f/d")
    disk.create(f"{DATA}/f/new").pwritev([b"new"], 0)
    view = disk.begin_snapshot()
    assert view.base == Position(3, 4)
    assert [state(file) for file in view.files] == [
        ("f/a", "f/a", 70), ("f/c", "f/c", 10), ("f/d", "f/b", 50), ("f/new", None, 0)
    ]  # fmt: skip
    view.close()
    assert state(disk.begin_snapshot().files[0]) == ("f/a", "f/a", 70), "no snapshot was stored"


def test_a_folder_that_is_a_copy_of_a_snapshot_is_unchanged() -> None:
    disk, files = recording(Position(7, 9), a=bytes(100), b=bytes(50))
    files["b"].pwritev([b"x"], 50)
    files["a"].pwritev([b"x"], 30)
    view = disk.begin_snapshot()
    assert view.base == Position(7, 9)
    assert [state(file) for file in view.files] == [("f/a", "f/a", 30), ("f/b", "f/b", 50)]


def test_a_change_after_the_release_counts_for_the_next_snapshot() -> None:
    disk, files = recording(a=bytes(100))
    view = disk.begin_snapshot()
    view.release(view.files[0])
    files["a"].pwritev([b"x"], 60)
    files["a"].pwritev([b"x"], 80)
    view.commit(Position(1, 1))
    files["a"].pwritev([b"x"], 70)
    assert disk.begin_snapshot().files[0].changed == 60


# All of it at random


class Course:
    """Random changes of a few files. `base`: what the last snapshot had."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.disk, self.open = recording()
        self.count = 0
        self.base: dict[str, bytes] = {}

    def change(self) -> None:
        folders = ["f", *(["g"] if self.disk.exists(f"{DATA}/g") else [])]
        kind = self.chance.choice(["create", "write", "write", "write", "truncate", "rename", "unlink", "folder"])
        name = self.chance.choice(sorted(self.open)) if self.open else ""
        path = self.file_path(name)
        self.count += 1
        if kind == "create" or not self.open:
            self.open[f"{self.count}"] = self.disk.create(f"{DATA}/{self.chance.choice(folders)}/{self.count}")
        elif kind == "write":
            self.open[name].pwritev([self.chance.randbytes(self.chance.randrange(60))], self.chance.randrange(100))
        elif kind == "truncate":
            self.open[name].truncate(self.chance.randrange(100))
        elif path and kind == "unlink":
            self.disk.unlink(path)
        elif path and kind == "rename":
            other = self.file_path(self.chance.choice(sorted(self.open)))
            self.disk.rename(path, other or path)
        elif kind == "folder":
            if len(folders) == 1:
                self.disk.make_folder(f"{DATA}/g")
            else:
                self.disk.rename(f"{DATA}/g", f"{DATA}/{self.count}")
                self.disk.rename(f"{DATA}/{self.count}", f"{DATA}/g")

    def file_path(self, name: str) -> str:
        found = [f"{DATA}/{folder}/{name}" for folder in ("f", "g") if self.disk.exists(f"{DATA}/{folder}/{name}")]
        return found[0] if found else ""

    def contents(self) -> dict[str, bytes]:
        assert isinstance(self.disk.inner, SimulatedDisk)
        copy = copy_of(self.disk.inner)
        return {path.removeprefix("data/"): bytes(content.data) for path, content in copy.all_files()}

    def snapshot(self) -> None:
        """A view, read piece by piece while the folder changes; perhaps it becomes the snapshot."""
        expected = self.contents()
        view = self.disk.begin_snapshot()
        assert [file.path for file in view.files] == sorted(expected)
        for file in self.chance.sample(view.files, len(view.files)):
            assert file.size == len(expected[file.path])
            old = self.base[file.base_path] if file.base_path is not None else b""
            assert len(old) >= file.changed
            assert old[: file.changed] == expected[file.path][: file.changed], "bytes before `changed` are unchanged"
            for position in range(0, file.size + 1, 30):
                for _ in range(self.chance.randrange(3)):
                    self.change()
                assert view.read(file, position, 30) == expected[file.path][position : position + 30]
            if self.chance.random() < 0.5:
                view.release(file)
        if self.chance.random() < 0.6:
            view.commit(Position(1, self.count))
            self.base = expected
        else:
            view.close()


def test_whatever_changes_views_show_what_was_and_tell_what_has_changed() -> None:
    for number in range(scaled(300) + 5):
        course = Course(seeded("views", number))
        for _ in range(8):
            for _ in range(course.chance.randrange(15)):
                course.change()
            course.snapshot()
        assert isinstance(course.disk.inner, SimulatedDisk)
        assert len(course.disk.inner.open_files) == len(course.open), "no handle is left open"
