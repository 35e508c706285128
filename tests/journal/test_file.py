"""One file on a real disk, and the loop behind short writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.disk import BUFFERS_MAX, Bytes, RealDisk, RealFile, write_all
from journal.errors import Full
from journal.testing import SimulatedDisk, SimulatedFile


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


def test_a_cached_read_never_takes_a_part_for_the_whole(
    file: RealFile, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_no_space_at_a_force_is_a_lost_write_and_not_full(
    file: RealFile, monkeypatch: pytest.MonkeyPatch
) -> None:
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
