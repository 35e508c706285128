"""A sealed segment is verified in steps while its log is in use: every flipped byte is found, and nothing is held."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from journal.clock import SimulatedClock
from journal.disk import RealDisk
from journal.errors import Full
from journal.fsck import sealed_verify
from journal.fsck.sealed_verify import (
    FILLING,
    FINDINGS_MAX,
    UNREADABLE_PIECES_MAX,
    FindingKind,
    SealedSegmentVerification,
    SegmentFinding,
    VerificationStopped,
)
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.log.segment import SCAN_SIZE
from journal.testing import SimulatedDisk
from journal.testing.memory_disk import SimulatedFile

FOLDER = "/orders-0"
LOG_ID = 7 << 24
WHOLE = 1 << 40


def opened(disk: SimulatedDisk, segment_bytes: int, payloads: list[bytes]) -> Log:
    """A log with a block for each of `payloads`."""
    disk.make_folder(FOLDER)
    log = Log.open(disk, FOLDER, log_id=LOG_ID, clock=SimulatedClock(), options=LogOptions(segment_bytes=segment_bytes))
    for payload in payloads:
        log.append_payloads([payload])
    return log


def started(
    disk: SimulatedDisk, log: Log, number: int = 0, is_stopped: Callable[[], bool] = lambda: False
) -> SealedSegmentVerification:
    return SealedSegmentVerification(disk, log.sealed_segments[number], is_stopped)


def verified(disk: SimulatedDisk, log: Log, number: int = 0) -> list[SegmentFinding]:
    verification = started(disk, log, number)
    verification.step(WHOLE)
    assert verification.is_done
    return verification.findings


def test_every_flipped_byte_is_found_and_nothing_in_a_sound_log() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 500, [b"x" * 40] * 8)
    assert len(log.sealed_segments) == 2
    assert [verified(disk, log, number) for number in range(2)] == [[], []]
    segment = log.sealed_segments[1]
    index = segment.path.removesuffix(".zxQueue") + ".index"
    for path in (segment.path, index):
        sound = disk.read_file(path)
        for position, byte in enumerate(sound):
            disk.damage(path, position, bytes((byte ^ 1 << position % 8,)))
            (found,) = verified(disk, log, 1)
            disk.damage(path, position, sound[position : position + 1])
            assert path == f"{FOLDER}/{found.file}"
            offset = position if path == index else segment.base + position
            assert found.first <= offset < found.next
            assert found.kind == (FindingKind.INDEX if path == index else FindingKind.DAMAGED)
        assert verified(disk, log, 1) == []


def test_the_range_and_the_reason_are_those_that_a_reader_gets() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 500, [b"x" * 40] * 6)
    blocks = log.sealed_segments[0].size // 3
    disk.damage(log.sealed_segments[0].path, blocks + 30, b"\0")
    (found,) = verified(disk, log)
    assert (found.first, found.next) == (blocks, 2 * blocks)
    assert found.reason == f"the block of 60 bytes at offset {blocks} fails its checksum"


def test_a_file_that_lost_its_end_is_damaged_up_to_the_end_that_the_log_knows() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 500, [b"x" * 40] * 6)
    segment = log.sealed_segments[0]
    file = disk.open_write(segment.path)
    file.truncate(segment.size - 10)
    file.force()
    found = [each for each in verified(disk, log) if each.kind != FindingKind.INDEX]
    assert [(each.next, each.kind) for each in found] == [(segment.end, FindingKind.DAMAGED)]


def test_a_step_reads_what_it_was_told_and_leaves_no_file_open() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 4 << 20, [os.urandom(60_000)] * 120)
    open_files = set(disk.open_files)
    reads: list[int] = []
    verification = started(disk, log)
    while not verification.is_done:
        reads.append(verification.step(SCAN_SIZE))
        assert disk.open_files == open_files
    size = log.sealed_segments[0].size
    assert 4 <= len(reads) <= 6 and all(read <= SCAN_SIZE for read in reads)
    assert size <= sum(reads) < 1.2 * size and not verification.findings


def test_a_segment_that_is_removed_meanwhile_ends_the_verification() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 4 << 20, [os.urandom(60_000)] * 120)
    verification = started(disk, log)
    verification.step(SCAN_SIZE)
    log.truncate_before(log.end_offset)
    verification.step(SCAN_SIZE)
    verification.step(SCAN_SIZE)
    assert verification.is_done
    assert [found.kind for found in verification.findings] == [FindingKind.UNREADABLE]


def test_an_error_of_the_disk_is_found_with_the_blocks_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    log = opened(disk, 300_000, [bytes([number]) * 30_000 for number in range(12)])
    segment = log.sealed_segments[0]
    block = segment.size // 9
    assert block == 30_120
    bad_sector = range(70_000, 70_512)

    def pread(file: SimulatedFile, size: int, position: int) -> bytes:
        if file.path == segment.path and position < bad_sector.stop and bad_sector.start < position + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO), file.path)
        return file.pread(size, position)

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedFile, "pread_uncached", pread)
        found = verified(disk, log)
    assert [(each.first, each.next) for each in found] == [(2 * block, 4 * block)], "two blocks end in the bad piece"
    assert {(each.kind, each.reason) for each in found} == {(FindingKind.UNREADABLE, os.strerror(errno.EIO))}
    assert verified(disk, log) == [] and log.stopped is None and not log.damage


def test_bytes_that_stand_for_unreadable_ones_prove_nothing() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 300_000, [(FILLING * 5000)[:70_000]] * 6)
    disk.faults.fail("read", nth=1, times=2, path=log.sealed_segments[0].path)
    assert [each.kind for each in verified(disk, log)] == [FindingKind.UNREADABLE]


def test_the_rest_of_a_segment_that_cannot_be_read_at_all_is_left_out() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 2 << 20, [os.urandom(60_000)] * 50)
    segment = log.sealed_segments[0]
    disk.faults.fail("read", times=None, path=segment.path)
    before = disk.faults.counts["read"]
    (found,) = verified(disk, log)
    assert (found.first, found.next, found.kind) == (0, segment.end, FindingKind.UNREADABLE)
    assert disk.faults.counts["read"] - before <= UNREADABLE_PIECES_MAX + 5


def test_a_segment_with_very_many_findings_is_left_out_after_some() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 100_000, [b"x" * 40] * 1000)
    segment = log.sealed_segments[0]
    sound = disk.read_file(segment.path)
    size = segment.size // (segment.size // 160)
    for position in range(30, len(sound), 2 * size):
        disk.damage(segment.path, position, b"\0")
    found = verified(disk, log)
    assert [each.kind for each in found] == [FindingKind.DAMAGED] * FINDINGS_MAX + [FindingKind.UNVERIFIED]
    assert found[-1].first == found[-2].next and found[-1].next == segment.end


def test_a_stop_ends_a_step_before_its_next_read() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 4 << 20, [os.urandom(60_000)] * 120)
    stopped: list[bool] = []
    verification = started(disk, log, is_stopped=lambda: bool(stopped))
    disk.faults.before = lambda kind, path: stopped.append(True) if kind == "read" else None
    before = disk.faults.counts["read"]
    with pytest.raises(VerificationStopped):
        verification.step(WHOLE)
    assert disk.faults.counts["read"] == before + 1


def test_without_a_free_descriptor_nothing_is_reported() -> None:
    disk = SimulatedDisk()
    log = opened(disk, 500, [b"x" * 40] * 6)
    verification = started(disk, log)
    disk.descriptors_max = len(disk.open_files)
    with pytest.raises(Full):
        verification.step(WHOLE)
    assert not verification.findings


def test_the_checks_are_those_of_the_offline_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are whole and contradict each other are found too."""
    disk = SimulatedDisk()
    log = opened(disk, 500, [b"x" * 40] * 6)
    monkeypatch.setattr("journal.fsck.log_verify.SOURCE_SUCCESSION", -1)
    found = verified(disk, log)
    assert {each.kind for each in found} == {FindingKind.INCONSISTENT} and len(found) == 3
    assert sealed_verify.verify_sealed_segment.__module__ == "journal.fsck.log_verify"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="cannot be had here: the system has no posix_fadvise")
def test_an_uncached_read_leaves_the_cache_as_it_was(tmp_path: object) -> None:
    disk = RealDisk()
    path = f"{tmp_path}/file"
    size = 1 << 20
    with open(path, "wb") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened_file = disk.open_read(path)
    if opened_file.pread_cached(4096, 0) is not None:
        pytest.skip("cannot be had here: the file system keeps every file in memory")
    half = size // 2
    for position in range(1000, half, 50_000):
        opened_file.pread_uncached(50_000, position)
    opened_file.pread_uncached(size, 0)
    assert all(opened_file.pread_cached(1, position) is None for position in range(0, size, 4096))
    opened_file.pread(half, 0)
    assert opened_file.pread_uncached(half, 0) == opened_file.pread_cached(half, 0)
    opened_file.close()
