"""The open files of buckets: a bounded number, none closed under somebody's hands."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from journal.fsync import NEVER_CLOSED
from journal.testing import SimulatedDisk, SimulatedFile
from tfmq.delay.buckets.bucket import OpenFileCache, never_close


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    for n in range(9):
        disk.write_file(f"f{n}", b"%d" % n)
    return disk


def read(files: OpenFileCache, n: int) -> bytes:
    with files.opened(f"f{n}") as file:
        return file.pread(9, 0)


def test_the_one_that_was_not_used_longest_is_closed(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk, limit=3)
    for n in (0, 1, 2, 0, 3):
        assert read(files, n) == b"%d" % n
    assert {file.path for file in disk.open_files} == {"f0", "f2", "f3"}
    opened = disk.faults.counts["open"]
    assert read(files, 0) == b"0" and disk.faults.counts["open"] == opened
    files.close()
    assert not disk.open_files


def test_files_in_use_stay_open_however_many(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk, limit=2)
    with ExitStack() as stack:
        hands = [stack.enter_context(files.opened(f"f{n}")) for n in range(9)]
        assert [file.pread(1, 0) for file in hands] == [b"%d" % n for n in range(9)]
    assert len(disk.open_files) == 2


def test_what_is_forgotten_in_use_is_closed_behind_the_last_user(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk)
    with files.opened("f1") as file, files.opened("f1") as same:
        assert file is same
        files.evict("f1")
        files.evict("f1")
        disk.unlink("f1")
        disk.write_file("f1", b"new")
        assert file.pread(9, 0) == b"1"
        assert read(files, 1) == b"new"
    assert len(disk.open_files) == 1


def test_who_must_not_wait_gets_only_what_is_open(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk)
    with files.opened_if_cached("f1") as file:
        assert file is None
    assert read(files, 1) == b"1"
    with files.opened_if_cached("f1") as file:
        assert file is not None and file.pread(9, 0) == b"1"
        files.close()
        assert file in disk.open_files
    assert not disk.open_files


def test_a_file_that_becomes_another_one_while_it_is_opened_is_opened_again(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk)

    honest = disk.open_read

    def slow(path: str) -> SimulatedFile:
        file = honest(path)
        disk.open_read = honest  # type: ignore[method-assign]
        files.evict("f1")
        disk.write_file("f1", b"new")
        return file

    disk.open_read = slow  # type: ignore[method-assign]
    assert read(files, 1) == b"new"
    files.close()
    assert not disk.open_files


def test_two_who_open_the_same_share_it(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk)
    honest = disk.open_read

    def beside(path: str) -> SimulatedFile:
        file = honest(path)
        disk.open_read = honest  # type: ignore[method-assign]
        assert read(files, 1) == b"1"
        return file

    disk.open_read = beside  # type: ignore[method-assign]
    with files.opened("f1") as file:
        assert file.pread(9, 0) == b"1" and len(disk.open_files) == 1


def test_one_that_must_not_be_closed_is_kept(disk: SimulatedDisk) -> None:
    file = disk.open_write("f1")
    never_close(file)
    assert NEVER_CLOSED.pop() is file
