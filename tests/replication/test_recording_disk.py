"""What a recording disk records, when it cuts, and what it does not record. Real brokers: test_theorem.py."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from journal.disk import Bytes, Disk, File, Lock, RealDisk
from journal.errors import Full
from journal.linux_aio import AioFsyncQueue
from journal.testing import SimulatedDisk, SimulatedFile
from tests import paths
from tests.journal import test_disk
from tests.replication.followed_disk import DATA, Follower, first_difference
from tests.scale import scaled, seeded
from tfmq.replication import recording_disk
from tfmq.replication.operations import HEADER, RESERVE_PATH, Kind, Operation, decode_operations
from tfmq.replication.recording_disk import RecordingDisk, RecordingFile, unwrap

SUITE = (
    test_disk.test_a_file_is_made_once,
    test_disk.test_a_file_opened_for_reading_cannot_be_written,
    test_disk.test_what_is_not_there_is_said_to_be_missing,
    test_disk.test_folders,
    test_disk.test_a_rename_replaces,
    test_disk.test_an_open_file_outlives_its_name,
    test_disk.test_a_lock_is_held_once,
    test_disk.test_all_of_a_file_system_is_fsynced_at_once,
    test_disk.test_free_space_is_said,
)
"""What is tested of all disks, here with the fixture `place` of this module."""
globals().update({test.__name__: test for test in SUITE})


@pytest.fixture(params=["real", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, str]:
    if request.param == "real":
        return RecordingDisk(RealDisk(), str(tmp_path)), str(tmp_path)
    disk = RecordingDisk(SimulatedDisk(), "data")
    disk.make_folder("data")
    return disk, "data"


def recording(**options: Any) -> RecordingDisk:
    inner = SimulatedDisk()
    inner.make_folder(DATA)
    inner.make_folder("/elsewhere")
    return RecordingDisk(inner, DATA, **options)


def recorded(disk: RecordingDisk) -> list[Operation]:
    """The operations since the last call."""
    disk.cut()
    return [operation for body in disk.take() for operation in decode_operations(memoryview(b"".join(body.parts)))]


def described(disk: RecordingDisk) -> list[tuple[Any, ...]]:
    """As `recorded`, without the fields that are empty."""
    return [tuple(each for each in (Kind(one.kind).name, *one[1:]) if each) for one in recorded(disk)]


# What is recorded


def test_each_change_is_recorded_and_nothing_else() -> None:
    disk = recording()
    disk.make_folder(f"{DATA}/f")
    file = disk.create(f"{DATA}/f/a")
    file.pwritev([b"one", bytearray(b"two"), memoryview(b"three")], 7)
    file.truncate(5)
    assert file.pread(100, 0) == bytes(5) and file.size() == disk.size(f"{DATA}/f/a") == 5
    disk.open_write(f"{DATA}/f/a").pwritev([b"x"], 1)
    assert disk.list(DATA) == ["f"] and disk.exists(f"{DATA}/f/a")
    disk.open_read(f"{DATA}/f/a").close()
    file.force()
    file.close()
    disk.rename(f"{DATA}/f/a", f"{DATA}/b")
    disk.remove_folder(f"{DATA}/f")
    disk.unlink(f"{DATA}/b")
    assert described(disk) == [
        ("MAKE_FOLDER", "f"),
        ("CREATE", "f/a"),
        ("WRITE", "f/a", 7, b"onetwothree"),
        ("TRUNCATE", "f/a", 5),
        ("WRITE", "f/a", 1, b"x"),
        ("RENAME", "f/a", "b"),
        ("REMOVE_FOLDER", "f"),
        ("UNLINK", "b"),
    ]
    assert disk.number == 8


@pytest.mark.parametrize("path", ["/elsewhere", "/data-other", f"{DATA}/replica"])
def test_what_is_not_replicated_is_only_executed(path: str) -> None:
    disk = recording()
    if not disk.exists(path):
        disk.make_folder(path)
    disk.create(f"{path}/a").pwritev([b"x"], 0)
    disk.open_write(f"{path}/a").truncate(0)
    disk.rename(f"{path}/a", f"{path}/b")
    disk.force_folder(path)
    disk.make_folder(f"{path}/c")
    disk.remove_folder(f"{path}/c")
    disk.unlink(f"{path}/b")
    assert disk.list(path) == [] and recorded(disk) == [] and disk.number == 0
    assert disk.take_forced() is None


@pytest.mark.parametrize("name", ["lock", "address", "address.17", "starting", "server.log", "replica/state"])
def test_files_of_one_process_or_machine_are_not_recorded(name: str) -> None:
    disk = recording()
    disk.make_folder(f"{DATA}/replica")
    disk.create(f"{DATA}/{name}").pwritev([b"x"], 0)
    assert recorded(disk) == []


def test_the_reserve_is_not_recorded() -> None:
    disk = recording()
    disk.make_folder(f"{DATA}/meta")
    disk.create(f"{DATA}/{RESERVE_PATH}").pwritev([b"x"], 0)
    assert described(disk) == [("MAKE_FOLDER", "meta")]


def test_the_root_and_paths_may_be_written_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for number, (root, folder) in enumerate((("data", "./data/"), ("data/", str(tmp_path / "x/../data")))):
        (tmp_path / "x").mkdir(exist_ok=True)
        disk = RecordingDisk(RealDisk(), root)
        disk.create(f"{folder}/{number}").close()
        assert described(disk) == [("CREATE", f"{number}")]


def test_a_rename_out_of_the_replicated_paths_is_an_unlink() -> None:
    disk = recording()
    for path in ("f", "f/g"):
        disk.make_folder(f"{DATA}/{path}")
    for path in ("a", "f/b", "f/g/c"):
        disk.create(f"{DATA}/{path}")
    recorded(disk)
    disk.rename(f"{DATA}/a", "/elsewhere/a")
    assert described(disk) == [("UNLINK", "a")]
    disk.rename(f"{DATA}/f", "/elsewhere/f")
    assert described(disk) == [("UNLINK", "f/b"), ("UNLINK", "f/g/c"), ("REMOVE_FOLDER", "f/g"), ("REMOVE_FOLDER", "f")]
    assert disk.list("/elsewhere/f") == ["b", "g"]


@pytest.mark.parametrize("source", ["/elsewhere/a", f"{DATA}/address"])
def test_a_rename_into_the_replicated_paths_is_refused_and_not_done(source: str) -> None:
    disk = recording()
    disk.create(source).close()
    with pytest.raises(OSError, match="not replicated") as caught:
        disk.rename(source, f"{DATA}/a")
    assert caught.value.errno == errno.EXDEV, "who moves files copies them then"
    assert disk.exists(source) and not disk.exists(f"{DATA}/a") and recorded(disk) == []


# Under which name


def test_an_open_file_is_recorded_under_the_name_that_it_has() -> None:
    disk = recording()
    disk.make_folder(f"{DATA}/f")
    file = disk.create(f"{DATA}/f/a")
    other = disk.open_write(f"{DATA}/f/a")
    recorded(disk)
    disk.rename(f"{DATA}/f/a", f"{DATA}/f/b")
    file.pwritev([b"1"], 0)
    disk.rename(f"{DATA}/f", f"{DATA}/g")
    other.pwritev([b"2"], 0)
    file.truncate(0)
    assert described(disk) == [
        ("RENAME", "f/a", "f/b"),
        ("WRITE", "f/b", b"1"),
        ("RENAME", "f", "g"),
        ("WRITE", "g/b", b"2"),
        ("TRUNCATE", "g/b"),
    ]


def test_what_is_written_to_an_unlinked_file_is_dropped() -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")
    disk.unlink(f"{DATA}/a")
    again = disk.create(f"{DATA}/a")
    recorded(disk)
    file.pwritev([b"old"], 0)
    file.truncate(1)
    again.pwritev([b"new"], 0)
    assert described(disk) == [("WRITE", "a", b"new")]
    assert file.pread(9, 0) == b"o"


def test_what_is_written_to_a_replaced_file_is_dropped() -> None:
    disk = recording()
    old, new = disk.create(f"{DATA}/a"), disk.create(f"{DATA}/a.new")
    disk.rename(f"{DATA}/a.new", f"{DATA}/a")
    recorded(disk)
    old.pwritev([b"old"], 0)
    new.pwritev([b"new"], 0)
    assert described(disk) == [("WRITE", "a", b"new")]


def test_a_rename_to_itself_changes_nothing() -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")
    recorded(disk)
    disk.rename(f"{DATA}/a", f"{DATA}/a")
    file.pwritev([b"1"], 0)
    assert described(disk) == [("WRITE", "a", b"1")]


def test_the_files_that_were_there_before_are_known() -> None:
    inner = SimulatedDisk()
    inner.make_folder(DATA)
    inner.make_folder(f"{DATA}/f")
    inner.write_file(f"{DATA}/f/a", b"before")
    disk = RecordingDisk(inner, DATA)
    file = disk.open_write(f"{DATA}/f/a")
    disk.rename(f"{DATA}/f", f"{DATA}/g")
    file.pwritev([b"x"], 0)
    assert described(disk) == [("RENAME", "f", "g"), ("WRITE", "g/a", b"x")]
    assert disk.begin_snapshot().files[0].size == 6


def test_a_file_that_another_program_has_put_there_can_be_removed_but_not_written() -> None:
    disk = recording()
    assert isinstance(disk.inner, SimulatedDisk)
    disk.inner.write_file(f"{DATA}/alien", b"x")
    calls: list[Callable[[], object]] = [
        lambda: disk.open_write(f"{DATA}/alien"),
        lambda: disk.rename(f"{DATA}/alien", f"{DATA}/b"),
    ]
    for call in calls:
        with pytest.raises(OSError, match="another program"):
            call()
    assert disk.open_read(f"{DATA}/alien").pread(9, 0) == b"x"
    disk.unlink(f"{DATA}/alien")
    assert disk.list(DATA) == [] and recorded(disk) == []


# Short writes and errors


def test_of_a_short_write_is_recorded_what_was_written() -> None:
    disk = recording()
    assert isinstance(disk.inner, SimulatedDisk)
    file = disk.create(f"{DATA}/a")
    recorded(disk)
    disk.inner.faults.short_write(4)
    assert file.pwritev([b"abc", b"def"], 0) == 4
    assert described(disk) == [("WRITE", "a", b"abcd")]
    disk.inner.faults.short_write(0)
    assert file.pwritev([b"abc"], 4) == 0
    assert described(disk) == []


CALLS: dict[str, Callable[[RecordingDisk, File], object]] = {
    "write": lambda disk, file: file.pwritev([b"x"], 0),
    "truncate": lambda disk, file: file.truncate(0),
    "create": lambda disk, file: disk.create(f"{DATA}/new"),
    "unlink": lambda disk, file: disk.unlink(f"{DATA}/a"),
    "rename": lambda disk, file: disk.rename(f"{DATA}/a", f"{DATA}/b"),
    "folder": lambda disk, file: disk.make_folder(f"{DATA}/new"),
}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_failed_is_not_recorded(kind: str, error: int) -> None:
    disk = recording()
    assert isinstance(disk.inner, SimulatedDisk)
    file = disk.create(f"{DATA}/a")
    file.pwritev([b"abc"], 0)
    disk.make_folder(f"{DATA}/f")
    recorded(disk)
    disk.inner.faults.fail(kind, error=error)
    with pytest.raises((OSError, Full)):
        CALLS[kind](disk, file)
    assert described(disk) == []
    CALLS[kind](disk, file)
    assert len(recorded(disk)) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda disk: disk.create(f"{DATA}/a"),
        lambda disk: disk.make_folder(f"{DATA}/f"),
        lambda disk: disk.unlink(f"{DATA}/none"),
        lambda disk: disk.rename(f"{DATA}/none", f"{DATA}/a"),
        lambda disk: disk.rename(f"{DATA}/none", "/elsewhere/a"),
        lambda disk: disk.rename(f"{DATA}/a", f"{DATA}/none/a"),
        lambda disk: disk.rename(f"{DATA}/a", f"{DATA}/f"),
        lambda disk: disk.remove_folder(f"{DATA}/f"),
        lambda disk: disk.remove_folder(f"{DATA}/none"),
        lambda disk: disk.open_write(f"{DATA}/none"),
        lambda disk: disk.open_read(f"{DATA}/a").pwritev([b"x"], 0),
    ],
)
def test_a_call_that_is_refused_is_not_recorded(call: Callable[[RecordingDisk], object]) -> None:
    disk = recording()
    disk.make_folder(f"{DATA}/f")
    disk.create(f"{DATA}/f/b")
    file = disk.create(f"{DATA}/a")
    recorded(disk)
    with pytest.raises(OSError):
        call(disk)
    file.pwritev([b"x"], 0)
    assert described(disk) == [("WRITE", "a", b"x")]


class Deceiver(SimulatedDisk):
    """A disk that does what is asked, and then says that it failed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_deceiving = False
        self.answers = True

    def changed(self, kind: str, path: str) -> None:
        if self.is_deceiving:
            raise OSError(errno.EIO, "it failed", path)

    def exists(self, path: str) -> bool:
        if self.is_deceiving and not self.answers:
            raise OSError(errno.EIO, "nobody knows", path)
        return super().exists(path)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("truncate", ("TRUNCATE", "a")),
        ("create", ("CREATE", "new")),
        ("unlink", ("UNLINK", "a")),
        ("rename", ("RENAME", "a", "b")),
        ("folder", ("MAKE_FOLDER", "new")),
    ],
)
def test_what_was_done_by_a_call_that_raised_is_recorded(kind: str, expected: tuple[Any, ...]) -> None:
    inner = Deceiver()
    disk = RecordingDisk(inner, DATA)
    disk.make_folder(DATA)
    file = disk.create(f"{DATA}/a")
    file.pwritev([b"abc"], 0)
    inner.is_deceiving = True
    with pytest.raises(OSError, match="it failed"):
        CALLS[kind](disk, file)
    inner.is_deceiving = False
    assert described(disk)[-1] == expected


def test_a_change_of_which_nobody_knows_whether_it_was_done_ends_all_acknowledgements() -> None:
    inner = Deceiver()
    disk = RecordingDisk(inner, DATA)
    disk.make_folder(DATA)
    file = disk.create(f"{DATA}/a")
    inner.is_deceiving, inner.answers = True, False
    with pytest.raises(OSError, match="nobody knows"):
        disk.unlink(f"{DATA}/a")
    inner.is_deceiving = False
    calls: list[Callable[[], object]] = [
        file.force, disk.cut, disk.take, disk.begin_snapshot, lambda: disk.force_folder(DATA)
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(OSError, match="could not be recorded"):
            call()


@pytest.mark.parametrize("when", ["written", "recorded"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_write_that_was_interrupted_before_it_was_recorded_ends_all_acknowledgements(
    monkeypatch: pytest.MonkeyPatch, when: str, error: type[BaseException]
) -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")

    def interrupt(*_: object) -> int:
        raise error

    with monkeypatch.context() as broken, pytest.raises(error):
        if when == "written":
            broken.setattr(SimulatedFile, "pwritev", interrupt)
        else:
            broken.setattr(disk, "_add", interrupt)
        file.pwritev([b"x"], 0)
    with pytest.raises(OSError, match="could not be recorded"):
        file.force()


# Bodies


def test_buffers_that_the_caller_uses_again_were_copied() -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")
    for size in (10, recording_disk.SEPARATE_BYTES + 1):
        recorded(disk)
        buffer = bytearray(b"x" * size)
        file.pwritev([memoryview(buffer)[: size - 5], b"y"], 0)
        file.pwritev([buffer], 0)
        buffer[:] = bytes(size)
        assert [one.data for one in recorded(disk)] == [b"x" * (size - 5) + b"y", b"x" * size]


def test_large_bytes_are_not_copied() -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")
    data = bytes(recording_disk.SEPARATE_BYTES)
    file.pwritev([data], 0)
    disk.cut()
    assert any(part is data for part in disk.take()[0].parts)


def test_the_path_is_there_once_for_operations_on_the_same_file() -> None:
    disk = recording()
    one, two = disk.create(f"{DATA}/one"), disk.create(f"{DATA}/two")
    recorded(disk)
    for file in (one, one, two, two, one):
        file.pwritev([b"x"], 0)
    disk.cut()
    (body,) = disk.take()
    assert body.size_bytes == sum(map(len, body.parts)) == 5 * (HEADER.size + 1) + 3 * 3
    assert body.operation_count == 5 and body.last_operation == 7
    one.pwritev([b"x"], 0)
    assert described(disk) == [("WRITE", "one", b"x")], "each body has its first path"


def test_a_full_body_is_cut_and_wakes() -> None:
    woken: list[int] = []
    disk: RecordingDisk = recording(wake=lambda: woken.append(len(disk.take())), cut_bytes=100)
    file = disk.create(f"{DATA}/a")
    file.pwritev([bytes(40)], 0)
    assert woken == [] and disk.open_bytes == disk.backlog_bytes == 2 * HEADER.size + 1 + 40
    file.pwritev([bytes(40)], 0)
    assert woken == [1] and disk.open_bytes == disk.backlog_bytes == 0
    assert disk.cut() == 3 and woken == [1], "nothing was there to cut"


def test_a_write_that_is_larger_than_an_entry_may_be_is_recorded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_disk, "CUT_BYTES", 10)
    disk = recording(cut_bytes=20)
    disk.create(f"{DATA}/a").pwritev([bytes(range(25))], 3)
    disk.cut()
    bodies = disk.take()
    assert [body.last_operation for body in bodies] == [2, 3, 4]
    found = [one for body in bodies for one in decode_operations(memoryview(b"".join(body.parts)))][1:]
    assert [(one.position, one.data) for one in found] == [
        (3, bytes(range(10))), (13, bytes(range(10, 20))), (23, bytes(range(20, 25))),
    ]  # fmt: skip


def test_what_is_not_taken_is_counted() -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")
    for _ in range(3):
        file.pwritev([bytes(1000)], 0)
        disk.cut()
    assert disk.backlog_bytes > 3000 and disk.open_bytes == 0
    assert sum(body.size_bytes for body in disk.take()) > 3000 and disk.backlog_bytes == 0


def test_after_a_drop_nothing_is_kept_until_it_resumes() -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")
    file.force()
    file.pwritev([b"1"], 0)
    disk.drop()
    file.pwritev([b"2"], 1)
    disk.create(f"{DATA}/b")
    assert disk.backlog_bytes == disk.open_bytes == 0 and recorded(disk) == []
    view = disk.begin_snapshot(resume=True)
    file.pwritev([b"3"], 2)
    assert [file.path for file in view.files] == ["a", "b"] and view.read(view.files[0], 0, 9) == b"12"
    assert described(disk) == [("WRITE", "a", 2, b"3")]
    assert disk.number == view.number + 1 == 5, "each operation has its number, kept or not"


def test_memory_that_was_taken_is_used_again() -> None:
    """A write of 1 MiB would touch 256 new pages; the system clears each of them, in more time than the write takes."""
    script = (
        "import resource\n"
        "from tfmq.replication.recording_disk import RecordingDisk\n"
        "from journal.testing import SimulatedDisk\n"
        "disk = RecordingDisk(SimulatedDisk(), '/data'); disk.make_folder('/data')\n"
        "file = disk.create('/data/a'); buffer = bytearray(1 << 20)\n"
        "file.inner = type('Nowhere', (), {'pwritev': lambda self, buffers, position: 1 << 20})()\n"
        "def some():\n"
        "    for n in range(20): file.pwritev([buffer], 0)\n"
        "    disk.cut(); disk.take()\n"
        "some(); before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(5): some()\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 100)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=paths.ROOT, timeout=30)
    assert done.returncode == 0, done.stderr
    if sys.platform == "linux" and "glibc" in os.confstr("CS_GNU_LIBC_VERSION"):  # type: ignore[operator]
        assert float(done.stdout) < 64, "pages for each MiB"


# Forces


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (SimulatedFile, "force", lambda disk, file: file.force()),
        (SimulatedDisk, "force_folder", lambda disk, file: disk.force_folder(DATA)),
        (SimulatedDisk, "sync_file_system", lambda disk, file: disk.sync_file_system(disk.open_anchor(DATA))),
    ],
    ids=["file", "folder", "file system"],
)
def test_a_force_cuts_when_it_begins_and_holds_no_lock(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: Callable[[RecordingDisk, File], None]
) -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")
    file.pwritev([b"before"], 0)
    seen: list[list[int]] = []

    def force(*_: object) -> None:
        # Another thread can write meanwhile: it would wait for ever for a lock that the force holds.
        writer = threading.Thread(target=lambda: file.pwritev([b"during"], 6))
        writer.start()
        writer.join(5)
        assert not writer.is_alive()
        seen.append([body.last_operation for body in disk.take()])

    monkeypatch.setattr(owner, name, force)
    assert disk.take_forced() is None
    call(disk, file)
    assert seen == [[2]], "what was recorded before, and no more"
    assert disk.take_forced() == 2 and disk.take_forced() is None
    assert disk.cut() == 3


def test_a_force_is_noted_for_its_own_thread() -> None:
    disk = recording()
    file = disk.create(f"{DATA}/a")
    found: list[int | None] = []
    forced, seen = threading.Event(), threading.Event()

    def job() -> None:
        file.force()
        forced.set()
        seen.wait(5)
        found.append(disk.take_forced())

    worker = threading.Thread(target=job)
    worker.start()
    assert forced.wait(5) and disk.take_forced() is None
    seen.set()
    worker.join(5)
    assert found == [1] and disk.take_forced() is None
    file.pwritev([b"x"], 0)
    file.force()
    file.pwritev([b"x"], 0)
    with suppress(OSError):
        assert isinstance(disk.inner, SimulatedDisk)
        disk.inner.faults.fail("force")
        file.force()
    assert disk.take_forced() == 3, "the last force, also if it fails"


def test_a_file_that_was_opened_for_reading_cuts_when_it_is_forced() -> None:
    disk = recording()
    disk.create(f"{DATA}/a").pwritev([b"x"], 0)
    disk.open_read(f"{DATA}/a").force()
    assert disk.take_forced() == 2 and len(disk.take()) == 1


def test_the_kernel_fsyncs_the_file_below(tmp_path: Path) -> None:
    queue = AioFsyncQueue.open()
    if queue is None:
        pytest.skip("cannot be had here: fsyncs by Linux AIO")
    disk = RecordingDisk(RealDisk(), str(tmp_path))
    file = disk.create(f"{tmp_path}/a")
    assert isinstance(file, RecordingFile)
    started = queue.start(unwrap(file), lambda error: None)
    assert started is not None and started.wait() is None
    assert queue.start(file, lambda error: None) is None
    queue.close()


@pytest.mark.parametrize("fault", ["", "open", "unlink"])
def test_the_space_of_a_large_file_is_freed_while_others_can_write(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A system frees it when the last handle of an unlinked file is closed, and may take long."""
    monkeypatch.setattr(recording_disk, "LARGE_FILE_BYTES", 5)
    disk = recording()
    assert isinstance(disk.inner, SimulatedDisk)
    large, small, other = (disk.create(f"{DATA}/{name}") for name in ("large", "small", "other"))
    large.pwritev([bytes(5)], 0)
    small.pwritev([bytes(4)], 0)
    large.close()
    small.close()
    freed: list[str] = []
    close = SimulatedFile.close

    def close_slowly(file: SimulatedFile) -> None:
        writer = threading.Thread(target=lambda: other.pwritev([b"x"], 0))
        writer.start()
        writer.join(5)
        assert not writer.is_alive()
        freed.append(file.path)
        close(file)

    monkeypatch.setattr(SimulatedFile, "close", close_slowly)
    if fault:
        disk.inner.faults.fail(fault)
    with pytest.raises(OSError) if fault == "unlink" else nullcontext():
        disk.unlink(f"{DATA}/large")
    disk.unlink(f"{DATA}/small")
    assert freed == ([] if fault == "open" else [f"{DATA}/large"])
    assert disk.exists(f"{DATA}/large") == (fault == "unlink") and len(disk.inner.open_files) == 1


# Locks


class Held:
    def release(self) -> None: ...


def test_a_lock_that_is_held_already_is_returned_once() -> None:
    held: Lock = Held()
    disk = recording(held=held)
    assert disk.lock(f"{DATA}/other/../lock") is held
    assert disk.lock(f"{DATA}/lock") is not held


def test_a_lock_file_is_no_replicated_file() -> None:
    with pytest.raises(ValueError, match="local"):
        recording().lock(f"{DATA}/meta.lock")


# Threads


def test_a_write_and_its_record_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread writes the same bytes after the first write was executed, as soon as it can."""
    disk = recording()
    file = disk.create(f"{DATA}/a")
    other = threading.Thread(target=lambda: file.pwritev([b"second"], 0))
    write = SimulatedFile.pwritev

    def pwritev(inner: SimulatedFile, buffers: Sequence[Bytes], position: int) -> int:
        written = write(inner, buffers, position)
        if threading.current_thread() is not other:
            other.start()
            other.join(0.1)
        return written

    monkeypatch.setattr(SimulatedFile, "pwritev", pwritev)
    file.pwritev([b"first"], 0)
    other.join(5)
    assert [one.data for one in recorded(disk)[1:]] == [b"first", b"second"] and file.pread(9, 0) == b"second"


def test_threads_keep_the_order_of_cause_and_effect() -> None:
    """A thread writes after it has read what another has written; the record has them in this order."""
    disk = recording(cut_bytes=2000)
    rounds, writers = scaled(2000) + 50, 4
    turn = threading.Condition()
    number = [0]
    over = threading.Event()

    def take_turns(me: int) -> None:
        file = disk.create(f"{DATA}/{me}")
        while True:
            with turn:
                turn.wait_for(lambda: number[0] % writers == me or number[0] >= rounds)
                if number[0] >= rounds:
                    return
                mine = number[0]
            file.pwritev([b"%d." % mine], 0)
            with turn:
                number[0] += 1
                turn.notify_all()

    def disturb() -> None:
        file, count = disk.create(f"{DATA}/noise"), 0
        while not over.is_set():
            file.pwritev([b"noise"], count % 1000)
            disk.rename(f"{DATA}/noise", f"{DATA}/noise.{count}")
            disk.rename(f"{DATA}/noise.{count}", f"{DATA}/noise")
            count += 1

    taken: list[Any] = []
    lock = threading.Lock()

    def collect() -> None:
        with lock:
            taken.extend(disk.take())

    disk.wake = collect
    threads = [threading.Thread(target=take_turns, args=(n,)) for n in range(writers)]
    noise = threading.Thread(target=disturb)
    for thread in (*threads, noise):
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    noise.join(60)
    disk.cut()
    collect()
    found, follower = [], Follower()
    for body in taken:
        follower.follow(body)
        for one in decode_operations(memoryview(b"".join(body.parts))):
            if one.kind == Kind.WRITE and "noise" not in one.path:
                found.append(int(one.data[:-1]))
    assert found == list(range(rounds))
    assert [body.last_operation for body in taken] == sorted(body.last_operation for body in taken)
    assert isinstance(disk.inner, SimulatedDisk) and first_difference(disk.inner, follower.disk) is None


# Real disks


def test_a_real_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    root = str(tmp_path / "data")
    disk = RecordingDisk(RealDisk(), root)
    chance = seeded("real folder")
    files: dict[str, File] = {}
    for n in range(200):
        action = chance.choice(["create", "write", "write", "truncate", "rename", "unlink"])
        name = chance.choice(sorted(files)) if files else ""
        if action == "create" or not files:
            files[f"{n}"] = disk.create(f"{root}/{n}")
        elif action == "write":
            files[name].pwritev([os.urandom(chance.randrange(3000)), b"x"], chance.randrange(5000))
        elif action == "truncate":
            files[name].truncate(chance.randrange(5000))
        elif action == "rename":
            disk.rename(f"{root}/{name}", f"{root}/{n}")
            files[f"{n}"] = files.pop(name)
        else:
            disk.unlink(f"{root}/{name}")
            files.pop(name).pwritev([b"dropped"], 0)
    follower = Follower()
    disk.cut()
    for body in disk.take():
        follower.follow(body)
    for path in (tmp_path / "data").iterdir():
        assert follower.disk.read_file(f"{DATA}/{path.name}") == path.read_bytes()
    assert sorted(os.listdir(root)) == follower.disk.list(DATA)
