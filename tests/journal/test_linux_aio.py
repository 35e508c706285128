"""Forces that the kernel carries out by itself, on real files."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from journal.disk import RealDisk, RealFile
from journal.linux_aio import CONCURRENT_MAX, AioFsync, AioFsyncQueue
from journal.testing import SimulatedDisk

PATIENCE_MS = 20_000


@pytest.fixture
def queue() -> Iterator[AioFsyncQueue]:
    found = AioFsyncQueue.open()
    if found is None:
        pytest.skip("this system has no AIO")
    yield found
    found.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RealFile]:
    made = RealDisk().create(str(tmp_path / "file"))
    made.pwritev([b"bytes"], 0)
    yield made
    made.close()


def ended(queue: AioFsyncQueue) -> list[AioFsync]:
    """Waits for the eventfd, as a reactor does."""
    poll = select.poll()
    poll.register(queue.fileno(), select.POLLIN)
    assert poll.poll(PATIENCE_MS), "no force ended"
    os.eventfd_read(queue.fileno())
    return list(queue.drain_ended())


def ignore_result(error: OSError | None) -> None:
    """The owner decides which thread runs the callback."""


def test_an_fsync_ends_and_the_eventfd_reports_it(queue: AioFsyncQueue, file: RealFile) -> None:
    running_fsync = queue.start(file, ignore_result)
    assert running_fsync is not None
    assert ended(queue) == [running_fsync]
    assert running_fsync.done and running_fsync.error is None and running_fsync.callback is ignore_result
    assert list(queue.drain_ended()) == []


def test_fsyncs_are_reported_once_each(queue: AioFsyncQueue, file: RealFile) -> None:
    running_fsyncs = {queue.start(file, ignore_result) for _ in range(5)}
    found: list[AioFsync] = []
    while len(found) < 5:
        found += ended(queue)
    assert set(found) == running_fsyncs and len(found) == 5


def test_another_thread_may_wait_and_the_owner_is_notified_all_the_same(queue: AioFsyncQueue, file: RealFile) -> None:
    running_fsync = queue.start(file, ignore_result)
    assert running_fsync is not None
    thread = threading.Thread(target=running_fsync.wait)
    thread.start()
    thread.join(PATIENCE_MS / 1000)
    assert not thread.is_alive() and running_fsync.done
    assert ended(queue) == [running_fsync]


def test_what_it_cannot_fsync_is_refused_and_not_begun(queue: AioFsyncQueue, file: RealFile) -> None:
    disk = SimulatedDisk()
    disk.make_folder("/data")
    assert queue.start(disk.create("/data/file"), ignore_result) is None
    reader, writer = os.pipe()
    assert queue.start(RealFile(writer, "a pipe"), ignore_result) is None
    os.close(reader)
    os.close(writer)
    file.close()
    assert queue.start(file, ignore_result) is None
    assert list(queue.drain_ended()) == []


def test_it_takes_so_many_and_no_more(queue: AioFsyncQueue, file: RealFile) -> None:
    running_fsyncs = [queue.start(file, ignore_result) for _ in range(CONCURRENT_MAX + 1)]
    assert None not in running_fsyncs[:-1] and running_fsyncs[-1] is None
    for running_fsync in running_fsyncs[:-1]:
        assert running_fsync is not None and running_fsync.wait() is None
    assert len(list(queue.drain_ended())) == CONCURRENT_MAX
