"""Real errors of a real kernel: an ext4 image on a tmpfs that is too small gives EIO when it is written back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from journal.disk import RealDisk
from journal.errors import Stopped
from journal.fsync import Forcer
from journal.linux_aio import AioFsyncQueue
from journal.log.log import Log
from journal.testing import SimulatedClock
from tools.rigs.loop_image import LoopImage, Unavailable, require_loop_devices
from tools.rigs.writers import batch_at, open_log

TMPFS_BYTES = 16 << 20
BATCH_RECORDS = 200
SEGMENT_BYTES = 130_000
"""Each batch fills a segment: the one that meets the broken disk begins a file, so that its first page fails.
"""


@pytest.fixture
def image() -> Iterator[LoopImage]:
    try:
        require_loop_devices()
        image = LoopImage(tmpfs_bytes=TMPFS_BYTES, has_journal=False)
    except Unavailable as reason:
        pytest.skip(f"real disk errors: {reason}")
    with image:
        yield image


def force_until_it_fails(image: LoopImage, log: Log) -> int:
    """Appends and forces, while the disk is well and when it is not; answers up to where the log was forced."""
    for _ in range(3):
        log.append([batch_at(log.end_ordinal, BATCH_RECORDS)])
        log.force()
    forced = log.forced_offset
    fill(image, log)
    with pytest.raises(Stopped, match="an fsync failed"):
        log.force()
    assert log.forced_offset == forced
    return forced


def fill(image: LoopImage, log: Log) -> None:
    """Begins a segment, breaks the disk, and appends what can no longer be forced."""
    batch = batch_at(log.end_ordinal, BATCH_RECORDS)
    roll = log.before_append(len(batch.data))
    assert roll is not None
    roll()
    image.break_disk()
    log.append([batch])


def read_up_to(log: Log, offset: int) -> int:
    """How far the log can be read from its start, at most up to `offset`."""
    place = log.first_offset
    while place < offset and (chunk := log.read(place, 1 << 20)).data:
        place = chunk.next
    return place


def test_a_log_whose_disk_gives_a_real_error_stops_and_stays_stopped(image: LoopImage) -> None:
    log = open_log(image.mount_point, 0, 0, segment_bytes=SEGMENT_BYTES)
    forced = force_until_it_fails(image, log)
    for call in (log.force, lambda: log.append([batch_at(log.end_ordinal, 1)])):
        with pytest.raises(Stopped):
            call()
    assert read_up_to(log, forced) == forced
    again = open_log(image.mount_point, 0, 0)
    assert again.stopped is not None
    with pytest.raises(Stopped):
        again.append([batch_at(again.end_ordinal, 1)])
    for each in (log, again):
        each.abandon("the test is over")


def test_a_failed_fsync_that_the_kernel_carried_out_by_itself_stops_the_log_alike(image: LoopImage) -> None:
    queue = AioFsyncQueue.open()
    if queue is None:
        pytest.skip("this system has no AIO")
    log = open_log(image.mount_point, 0, 0, segment_bytes=SEGMENT_BYTES)
    forcer = Forcer(
        RealDisk(), lambda fn, done: done(fn(), None), anchor_path=image.mount_point, clock=SimulatedClock(),
        begin=queue.start,
    )  # fmt: skip
    answers: list[Exception | None] = []

    def force() -> None:
        forcer.want(log, log.end_offset, answers.append)
        while not forcer.idle:
            for running_fsync in queue.drain_ended():
                running_fsync.callback(running_fsync.error)

    log.append([batch_at(0, BATCH_RECORDS)])
    force()
    forced = log.forced_offset
    assert answers == [None] and forced == log.end_offset
    fill(image, log)
    force()
    assert [type(answer) for answer in answers[1:]] == [Stopped]
    assert log.stopped is not None and log.forced_offset == forced
    log.abandon("the test is over")
    forcer.close()
    queue.close()


def test_when_the_disk_is_repaired_an_operator_resumes_and_nothing_acknowledged_is_lost(image: LoopImage) -> None:
    log = open_log(image.mount_point, 0, 0, segment_bytes=SEGMENT_BYTES)
    forced = force_until_it_fails(image, log)
    log.abandon("the process ends")
    image.mend_disk()
    image.mount_again()
    again = open_log(image.mount_point, 0, 0, segment_bytes=SEGMENT_BYTES)
    assert again.stopped is not None
    again.resume()
    assert again.end_offset >= forced
    assert read_up_to(again, again.end_offset) == again.end_offset
    again.append([batch_at(again.end_ordinal, 1)])
    again.force()
    again.close()


def test_a_real_failed_syncfs_stops_only_the_log_whose_bytes_are_gone(image: LoopImage) -> None:
    good, bad = (open_log(image.mount_point, 0, 0), open_log(image.mount_point, 0, 1, segment_bytes=SEGMENT_BYTES))
    forcer = Forcer(
        RealDisk(), lambda fn, done: done(fn(), None), anchor_path=image.mount_point, method="syncfs",
        clock=SimulatedClock(),
    )  # fmt: skip
    good.append([batch_at(0, 1)])
    bad.append([batch_at(0, BATCH_RECORDS)])
    # What the good log wrote is on the disk before the disk breaks; its force is still to come.
    os.sync()
    fill(image, bad)
    answers: dict[str, Exception | None] = {}
    for name, log in (("good", good), ("bad", bad)):
        forcer.want(log, log.end_offset, lambda error, n=name: answers.update({n: error}), start=False)  # type: ignore[misc]
    forcer.start()
    forcer.close()
    assert answers["good"] is None
    assert isinstance(answers["bad"], Stopped)
    assert (good.stopped, bad.stopped is None) == (None, False)
    for log in (good, bad):
        log.abandon("the test is over")
