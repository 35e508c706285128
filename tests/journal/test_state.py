"""Snapshots: whole or not there, two of them kept, a damaged one passed over."""

from __future__ import annotations

import contextlib
import errno
import random

import pytest

from journal.errors import Corrupt, Full, NewerFormat
from journal.log.checkpoint import EmptyState, Snapshot, SnapshotFiles, decode_snapshot, encode_snapshot
from tests.journal.logs import FOLDER, LOG_ID, make_disk
from tests.scale import scaled, seeded

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


def test_a_full_disk_and_a_failed_force_are_told_and_leave_the_old_one() -> None:
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
