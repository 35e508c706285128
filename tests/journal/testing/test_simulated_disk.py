"""The simulated disk forgets what was not forced, fails when told to, and keeps count."""

from __future__ import annotations

import errno
import os

import pytest

from journal.disk import write_all
from journal.errors import Full
from journal.testing import SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder("d")
    disk.force_folder("")
    return disk


def test_what_was_not_forced_is_gone(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    disk.force_folder("d")
    write_all(file, [b"forced"], 0)
    file.force()
    write_all(file, [b"not"], 6)
    assert disk.crash(keep="nothing").read_file("d/a") == b"forced"
    assert disk.crash(keep="everything").read_file("d/a") == b"forcednot"
    assert disk.read_file("d/a") == b"forcednot"
    assert disk.durable_file("d/a") == b"forced"


def test_a_forced_file_without_a_forced_name_is_gone(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    write_all(file, [b"x"], 0)
    file.force()
    assert disk.crash(keep="nothing").list("d") == []


def test_a_file_in_a_folder_without_a_forced_name_is_gone(disk: SimulatedDisk) -> None:
    disk.make_folder("d/e")
    disk.create("d/e/a").force()
    disk.force_folder("d/e")
    assert disk.crash(keep="nothing").list("d") == []


def test_a_failed_force_lies_from_then_on(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    disk.force_folder("d")
    write_all(file, [b"x" * 600], 0)
    disk.faults.fail("force")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.force()
    file.force()
    assert file.pread(600, 0) == b"x" * 600
    assert disk.crash(keep="everything").read_file("d/a") == b""


def test_whoever_had_the_file_open_is_told_of_a_lost_write_too(disk: SimulatedDisk) -> None:
    one = disk.create("d/a")
    other = disk.open_write("d/a")
    write_all(one, [b"x"], 0)
    disk.faults.fail("force")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        one.force()
    later = disk.open_write("d/a")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        other.force()
    other.force()
    later.force()


def test_a_failed_sync_names_no_file_but_each_files_own_force_does(disk: SimulatedDisk) -> None:
    anchor = disk.open_anchor("d")
    good, bad = disk.create("d/good"), disk.create("d/bad")
    for file in (good, bad):
        write_all(file, [b"x"], 0)
    disk.faults.fail("sync_file", path="bad")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.sync_file_system(anchor)
    disk.sync_file_system(anchor)
    good.force()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        bad.force()
    left = disk.crash(keep="nothing")
    assert (left.read_file("d/good"), left.read_file("d/bad")) == (b"x", b"")


def test_a_lost_write_that_nobody_was_told_of_is_told_to_who_opens_the_file_next(disk: SimulatedDisk) -> None:
    anchor = disk.open_anchor("d")
    write_all(disk.create("d/a"), [b"x"], 0)
    disk.faults.fail("sync_file", path="a")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.sync_file_system(anchor)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.open_write("d/a").force()
    disk.open_write("d/a").force()


def test_space_runs_out_and_comes_back(disk: SimulatedDisk) -> None:
    disk.space_bytes = 10
    file = disk.create("d/a")
    assert file.pwritev([b"x" * 20], 0) == 10
    with pytest.raises(Full):
        file.pwritev([b"x"], 10)
    assert file.pwritev([b"y"], 3) == 1
    assert disk.free_space("d") == 0
    file.truncate(4)
    assert disk.free_space("d") == 6
    assert disk.used_bytes() == 4


def test_descriptors_run_out_and_come_back(disk: SimulatedDisk) -> None:
    disk.descriptors_max = 1
    file = disk.create("d/a")
    with pytest.raises(Full, match=os.strerror(errno.EMFILE)):
        disk.open_read("d/a")
    with pytest.raises(Full, match=os.strerror(errno.EMFILE)):
        disk.create("d/b")
    assert not disk.exists("d/b")
    file.close()
    disk.open_read("d/a").close()


def test_closing_a_file_with_unforced_bytes_is_noticed(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    write_all(file, [b"x"], 0)
    second = disk.open_read("d/a")
    second.close()
    assert disk.closed_unforced == []
    file.close()
    assert disk.closed_unforced == ["d/a"]


def test_every_change_is_told(disk: SimulatedDisk) -> None:
    told: list[tuple[str, str]] = []
    disk.after = lambda kind, path: told.append((kind, path))
    file = disk.create("d/a")
    file.pwritev([b"x"], 0)
    file.force()
    disk.force_folder("d")
    disk.rename("d/a", "d/b")
    disk.unlink("d/b")
    kinds = [kind for kind, _ in told]
    assert kinds == ["create", "write", "force", "force_folder", "rename", "unlink"]


def test_a_disk_that_caches_nothing(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    assert file.pread_cached(1, 0) == b""
    disk.is_cached = False
    assert file.pread_cached(1, 0) is None


def test_a_test_may_put_files_and_rot_in_place(disk: SimulatedDisk) -> None:
    disk.write_file("d/a", b"hello")
    disk.damage("d/a", 1, b"?")
    assert disk.crash(keep="nothing").read_file("d/a") == b"h?llo"
