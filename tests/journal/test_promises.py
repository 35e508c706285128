"""Promises that no other test holds alone: found by planting bugs (tools/mutants) that nothing saw."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import sys
from pathlib import Path

import pytest

from journal import linux_aio
from journal.disk import RealDisk
from journal.fsync import NEVER_CLOSED
from journal.linux_aio import AioFsyncQueue
from journal.log.checkpoint import LogCheckpointFile
from tests.journal.logs import FOLDER, LOG_ID, Bench


@pytest.mark.skipif(sys.platform == "darwin", reason="forces by F_FULLFSYNC there")
def test_an_fsync_asks_the_system_to_fsync_this_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: forced.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "fsync", lambda fd: forced.append(os.readlink(f"/proc/self/fd/{fd}")))
    disk = RealDisk()
    file = disk.create(f"{tmp_path}/file")
    file.pwritev([b"x"], 0)
    file.force()
    disk.force_folder(str(tmp_path))
    assert forced == [f"{tmp_path}/file", str(tmp_path)]


def test_a_stopped_log_that_is_closed_keeps_its_non_durable_file_open() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    log.stop("to see")
    file = log._segment_set.active.file
    log.close()
    assert bench.disk.closed_unforced == []
    assert file in NEVER_CLOSED


def test_the_raised_epoch_is_on_the_disk_before_anything_is_served() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    log.force()
    bench.send(3)
    before = log.epoch
    log = bench.kill()
    assert log.epoch > before
    marks = LogCheckpointFile(bench.disk.crash(keep="nothing"), FOLDER, LOG_ID).read()
    assert marks is not None and marks.epoch == log.epoch
    assert marks.starts[-1] == (log.epoch, log.end_offset)


def test_an_end_that_another_thread_took_note_of_wakes_the_owner_once_more(tmp_path: Path) -> None:
    """Else an owner that was woken a moment too early would never call `completions`, and force nothing any more."""
    queue = AioFsyncQueue.open()
    if queue is None:
        pytest.skip("no AIO on this system")
    file = RealDisk().create(f"{tmp_path}/file")
    file.pwritev([b"x"], 0)
    completions: list[OSError | None] = []
    running_fsync = queue.start(file, completions.append)
    assert running_fsync is not None
    assert select.select([queue.fileno()], [], [], 10)[0]
    os.eventfd_read(queue.fileno())
    assert running_fsync.wait() is None
    assert select.select([queue.fileno()], [], [], 0)[0]
    for each in queue.drain_ended():
        each.callback(each.error)
    assert completions == [None]
    queue.close()
    file.close()


def test_an_fsync_that_fails_in_the_kernel_reports_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = AioFsyncQueue.open()
    if queue is None:
        pytest.skip("no AIO on this system")
    file = RealDisk().create(f"{tmp_path}/file")
    completions: list[OSError | None] = []
    calls = queue._calls

    def kernel(number: int, *arguments: int) -> int:
        if number == calls.getevents:
            event = linux_aio._EVENT.pack(1, 0, -errno.EIO, 0)
            ctypes.memmove(arguments[3], event, len(event))
        return 1

    with monkeypatch.context() as patched:
        patched.setattr(linux_aio, "_call_holding_lock", kernel)
        running_fsync = queue.start(file, completions.append)
        assert [*queue.drain_ended()] == [running_fsync]
    assert running_fsync is not None and running_fsync.error is not None
    assert (running_fsync.error.errno, running_fsync.error.filename) == (errno.EIO, f"{tmp_path}/file")
    queue.close()
    file.close()
