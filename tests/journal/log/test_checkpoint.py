"""log.mark: what survives, and which readers a cut concerns."""

from __future__ import annotations

import contextlib
import errno
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.dual_slot_file import SLOT_SIZE
from journal.errors import Corrupt, Full, NewerFormat
from journal.log.checkpoint import (
    REASON_SIZE_MAX,
    STARTS_MAX,
    EmptyState,
    LogCheckpoint,
    LogCheckpointFile,
    Snapshot,
    SnapshotFiles,
    WrongLog,
    add_epoch_start,
    decode_checkpoint,
    decode_snapshot,
    encode_checkpoint,
    encode_snapshot,
    next_epoch,
    truncated_since,
)
from tests.journal.logs import FOLDER, LOG_ID, make_disk
from tests.scale import scaled, seeded

MARKS = LogCheckpoint(100, 5, 4000, 77, 1_700_000_000_000, 3, ((2, 50), (3, 900)), False, "why: ümläut")


def test_marks_come_back_as_they_were() -> None:
    for marks in (MARKS, MARKS._replace(stopped=None, clean=True), MARKS._replace(starts=(), stopped="")):
        assert decode_checkpoint(encode_checkpoint(LOG_ID, marks), "p", LOG_ID) == marks


def test_the_largest_marks_fit_a_slot() -> None:
    starts = tuple((n, n) for n in range(STARTS_MAX))
    marks = MARKS._replace(starts=starts, stopped="x" * REASON_SIZE_MAX * 3)
    assert len(encode_checkpoint(LOG_ID, marks)) < SLOT_SIZE - 64


def test_marks_of_another_log_a_newer_format_or_another_size_are_refused() -> None:
    data = encode_checkpoint(LOG_ID, MARKS)
    with pytest.raises(WrongLog):
        decode_checkpoint(data, "p", LOG_ID + 1)
    with pytest.raises(NewerFormat):
        decode_checkpoint(b"\x00\x09" + data[2:], "p", LOG_ID)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            decode_checkpoint(data[:size], "p", LOG_ID)


def test_settled_marks_survive_the_loss_of_either_slot() -> None:
    for slot in (0, 1):
        disk = make_disk()
        LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(MARKS)
        disk = disk.crash(keep="nothing")
        disk.damage(f"{FOLDER}/log.mark", slot * SLOT_SIZE, b"\xff" * 100)
        assert LogCheckpointFile(disk, FOLDER, LOG_ID).read() == MARKS


def test_a_non_durable_note_may_be_lost_and_takes_nothing_with_it() -> None:
    disk = make_disk()
    file = LogCheckpointFile(disk, FOLDER, LOG_ID)
    file.write_durably(MARKS)
    file.write_unsynced(MARKS._replace(durable=5000))
    assert file.read() == MARKS._replace(durable=5000)
    assert LogCheckpointFile(disk.crash(keep="nothing"), FOLDER, LOG_ID).read() == MARKS


def test_a_failed_fsync_of_the_marks_is_reported() -> None:
    disk = make_disk()
    disk.faults.fail("force", error=errno.EIO)
    with pytest.raises(OSError):
        LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(MARKS)


@given(st.lists(st.integers(0, 50), max_size=40))
def test_a_reader_is_sent_back_to_the_lowest_cut_since_its_epoch(cuts: list[int]) -> None:
    starts: tuple[tuple[int, int], ...] = ()
    for epoch, offset in enumerate(cuts, 1):
        starts = add_epoch_start(starts, epoch, offset)
    for epoch in range(len(cuts) + 1):
        assert truncated_since(starts, epoch) == (min(cuts[epoch:]) if cuts[epoch:] else None)


def test_starts_without_a_cut_are_forgotten_before_any_cut() -> None:
    starts = add_epoch_start((), 7, 5)
    epoch = next_epoch(7, 1_800_000_000_000, truncated=True)
    starts = add_epoch_start(starts, epoch, 8)
    cuts = list(starts)
    for number in range(1, 3 * STARTS_MAX):
        epoch = next_epoch(epoch, 1_800_000_000_000, truncated=False)
        starts = add_epoch_start(starts, epoch, 10 * number)
    assert len(starts) == STARTS_MAX and list(starts[:2]) == cuts and starts[-1] == (epoch, 10 * number)


def test_an_epoch_has_the_number_of_the_clock_and_rises_whatever_that_says() -> None:
    assert next_epoch(3, 1_800_000_000_000, truncated=True) == 1_800_000_001
    assert next_epoch(3, 1_800_000_000_000, truncated=False) == 1_800_000_000
    assert next_epoch(1_900_000_000, 1_800_000_000_000, truncated=False) == 1_900_000_002
    assert next_epoch(3, 1 << 62, truncated=False) < 1 << 32


def test_beyond_so_many_cuts_a_reader_goes_back_too_far_rather_than_not_far_enough() -> None:
    starts: tuple[tuple[int, int], ...] = ()
    for epoch in range(1, 3 * STARTS_MAX):
        starts = add_epoch_start(starts, epoch, epoch * 10)
    assert len(starts) == STARTS_MAX
    for epoch in range(3 * STARTS_MAX - 1):
        cut = truncated_since(starts, epoch)
        assert cut is not None and cut <= (epoch + 1) * 10


# Snapshots: whole or not there, two of them kept, a damaged one passed over.

ONE = Snapshot(1000, 10, 1_700_000_000_000, {(1, 2): (3, 4), (2, 0): (5, 6)}, b"state")


def test_a_snapshot_comes_back_as_it_was() -> None:
    for snapshot in (ONE, ONE._replace(sources={}, state=b"")):
        assert decode_snapshot(encode_snapshot(LOG_ID, snapshot), "p", LOG_ID) == snapshot


def test_any_flipped_bit_and_any_cut_is_found() -> None:
    data = encode_snapshot(LOG_ID, ONE)
    for bit in range(len(data) * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Corrupt, NewerFormat)):
            decode_snapshot(bytes(broken), "p", LOG_ID)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            decode_snapshot(data[:size], "p", LOG_ID)
    with pytest.raises(Corrupt):
        decode_snapshot(data, "p", LOG_ID + 1)


def test_the_two_newest_are_kept() -> None:
    disk = make_disk()
    snapshots = SnapshotFiles(disk, FOLDER, LOG_ID)
    for offset in (10, 20, 30, 30, 40):
        snapshots.write(ONE._replace(offset=offset))
    assert snapshots.offsets == (30, 40)
    assert [int(name[:32]) for name in disk.list(FOLDER)] == [30, 40]


def test_two_workers_that_write_at_once_take_nothing_from_each_other() -> None:
    disk = make_disk()
    snapshots = SnapshotFiles(disk, FOLDER, LOG_ID)
    roll = threading.Thread(target=snapshots.write, args=[ONE._replace(offset=20)])

    def begin_a_roll(kind: str, path: str) -> None:
        if kind == "force" and "10.state" in path:
            disk.after = None
            roll.start()
            roll.join(0.2)  # it waits for the first one; without that it would end now

    disk.after = begin_a_roll
    snapshots.write(ONE._replace(offset=10))
    roll.join()
    assert snapshots.offsets == (10, 20)
    assert [int(name.split(".")[0]) for name in disk.list(FOLDER)] == [10, 20]


def test_one_that_comes_late_does_not_replace_a_newer_one() -> None:
    disk = make_disk()
    snapshots = SnapshotFiles(disk, FOLDER, LOG_ID)
    for offset in (10, 30, 20):
        snapshots.write(ONE._replace(offset=offset))
    assert snapshots.offsets == (10, 30)
    assert [int(name.split(".")[0]) for name in disk.list(FOLDER)] == [10, 30]


def test_a_damaged_one_is_passed_over_and_named() -> None:
    disk = make_disk()
    snapshots = SnapshotFiles(disk, FOLDER, LOG_ID)
    for offset in (10, 20):
        snapshots.write(ONE._replace(offset=offset))
    disk.damage(f"{FOLDER}/{disk.list(FOLDER)[-1]}", 50, b"\xff\xff")
    found, damaged = SnapshotFiles(disk, FOLDER, LOG_ID).load_newest(100)
    assert found is not None and found.offset == 10 and len(damaged) == 1


def test_one_beyond_the_end_does_not_count() -> None:
    disk = make_disk()
    snapshots = SnapshotFiles(disk, FOLDER, LOG_ID)
    for offset in (10, 20):
        snapshots.write(ONE._replace(offset=offset))
    found, _ = snapshots.load_newest(15)
    assert found is not None and found.offset == 10


class Fuse:
    """Ends the process at the `left`-th call that changes something."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, kind: str, path: str) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_a_power_cut_at_any_call_leaves_the_one_before_or_the_new_one_whole() -> None:
    for round in range(scaled(500)):
        generator = seeded("snapshot", round)
        disk = make_disk()
        snapshots = SnapshotFiles(disk, FOLDER, LOG_ID)
        snapshots.write(ONE._replace(offset=10))
        disk.after = Fuse(generator.randint(1, 8))
        with contextlib.suppress(KeyboardInterrupt):
            snapshots.write(ONE._replace(offset=20))
        found, damaged = SnapshotFiles(disk.crash(random.Random(round)), FOLDER, LOG_ID).load_newest(100)
        assert found is not None and found.offset in (10, 20) and damaged == []


def test_a_full_disk_and_a_failed_fsync_are_reported_and_leave_the_old_one() -> None:
    for kind, error in (("write", errno.ENOSPC), ("force", errno.EIO), ("rename", errno.EIO)):
        disk = make_disk()
        snapshots = SnapshotFiles(disk, FOLDER, LOG_ID)
        snapshots.write(ONE._replace(offset=10))
        disk.faults.fail(kind, error=error)
        with pytest.raises((OSError, Full)):
            snapshots.write(ONE._replace(offset=20))
        assert snapshots.offsets == (10,)
        snapshots.write(ONE._replace(offset=20))
        assert snapshots.offsets == (10, 20)


def test_a_log_without_a_state_has_an_empty_one() -> None:
    state = EmptyState()
    state.load(b"")
    assert state.dump() == b""
