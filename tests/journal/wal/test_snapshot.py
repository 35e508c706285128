"""Snapshots of the transaction journal: whole or refused, durable or not there."""

from __future__ import annotations

import errno
from zlib import crc32

import pytest

from journal.errors import Corrupt, Full, NewerFormat
from journal.filenames import snapshot_name
from journal.testing import SimulatedDisk, crash_states
from journal.wal import checkpoint
from journal.wal.checkpoint import HEAD_SIZE, JournalSnapshot, JournalSnapshotFiles, ListedFile, SnapshotHead
from tests.journal.journals import FOLDER, make_disk
from tests.scale import seeded

JOURNAL_ID = 5
FILES = (ListedFile(2, 1000, 1100), ListedFile(7, 1600, 1650))


def snapshot(number: int = 3, state: bytes = b"what was learned") -> JournalSnapshot:
    return JournalSnapshot(SnapshotHead(JOURNAL_ID, number, 1650, FILES), state)


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = make_disk()
    disk.make_folder(FOLDER)
    disk.force_folder("data")
    return disk


def of(disk: SimulatedDisk, journal_id: int = JOURNAL_ID) -> JournalSnapshotFiles:
    return JournalSnapshotFiles(disk, FOLDER, journal_id)


def path(number: int = 3) -> str:
    return f"{FOLDER}/{snapshot_name(number)}"


@pytest.mark.parametrize("state", [b"", b"what was learned", b"x" * 10_000])
def test_what_is_written_is_read(disk: SimulatedDisk, state: bytes) -> None:
    of(disk).write(snapshot(state=state))
    assert of(disk).read(3) == snapshot(state=state)
    assert of(disk).read_head(3) == snapshot().head


def test_a_large_state_is_written_and_checked_in_pieces(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_SIZE", 7)
    state = bytes(range(100))
    of(disk).write(snapshot(state=state))
    assert of(disk).read(3).state == state
    assert disk.faults.counts["write"] == 1 + 15


def test_hazard_08_every_flipped_bit_of_a_snapshot_is_found(disk: SimulatedDisk) -> None:
    of(disk).write(snapshot())
    data = disk.read_file(path())
    for bit in range(len(data) * 8):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        disk.write_file(path(), bytes(bad))
        with pytest.raises(Corrupt):
            of(disk).read(3)
        if bit // 8 < HEAD_SIZE:
            with pytest.raises(Corrupt):
                of(disk).read_head(3)


def test_a_snapshot_cut_at_any_byte_or_longer_is_damage(disk: SimulatedDisk) -> None:
    of(disk).write(snapshot())
    data = disk.read_file(path())
    for bad in (*(data[:size] for size in range(len(data))), data + b"?"):
        disk.write_file(path(), bad)
        with pytest.raises(Corrupt):
            of(disk).read(3)


def test_hazard_05_a_count_of_files_is_not_believed(disk: SimulatedDisk) -> None:
    of(disk).write(snapshot())
    disk.damage(path(), 32, b"\xff\xff\xff\xff")
    reads = disk.faults.counts["read"]
    with pytest.raises(Corrupt, match="not a snapshot"):
        of(disk).read(3)
    assert disk.faults.counts["read"] == reads + 1, "the table of files was not even read"


def test_a_snapshot_that_is_not_there_is_damage(disk: SimulatedDisk) -> None:
    with pytest.raises(Corrupt, match="is missing"):
        of(disk).read(3)


def test_a_snapshot_of_another_journal_or_number_is_damage(disk: SimulatedDisk) -> None:
    of(disk).write(snapshot())
    with pytest.raises(Corrupt, match="of journal 0x5, not of 0x6"):
        of(disk, 6).read(3)
    disk.write_file(path(4), disk.read_file(path()))
    with pytest.raises(Corrupt, match="it has the number 3"):
        of(disk).read(4)


def test_a_newer_snapshot_is_refused_by_name(disk: SimulatedDisk) -> None:
    of(disk).write(snapshot())
    data = bytearray(disk.read_file(path()))
    data[4:6] = (2).to_bytes(2, "big")
    table = bytes(data[HEAD_SIZE : HEAD_SIZE + 48])
    data[HEAD_SIZE - 4 : HEAD_SIZE] = crc32(table, crc32(bytes(data[: HEAD_SIZE - 4]))).to_bytes(4, "big")
    disk.write_file(path(), bytes(data))
    with pytest.raises(NewerFormat):
        of(disk).read(3)


def test_a_written_snapshot_survives_a_power_cut(disk: SimulatedDisk) -> None:
    of(disk).write(snapshot())
    assert of(disk.crash(keep="nothing")).read(3) == snapshot()


def test_a_power_cut_while_it_is_written_leaves_it_whole_or_not_there(disk: SimulatedDisk) -> None:
    states: list[SimulatedDisk] = []
    generator = seeded("snapshot")
    disk.after = lambda kind, path: states.extend(crash_states(disk, 20, generator))
    of(disk).write(snapshot(state=b"x" * 2000))
    seen = set()
    for state in states:
        there = state.exists(path())
        seen.add(there)
        if there:
            assert of(state).read(3) == snapshot(state=b"x" * 2000)
    assert seen == {True, False}


def test_a_failed_write_leaves_what_was_there(disk: SimulatedDisk) -> None:
    of(disk).write(snapshot(2))
    for kind, error in (("write", errno.ENOSPC), ("create", errno.ENOSPC), ("force", errno.EIO)):
        disk.faults.fail(kind, error=error)
        with pytest.raises((Full, OSError)):
            of(disk).write(snapshot(3))
        assert of(disk).read(2) == snapshot(2)
        assert not disk.exists(path(3))
    of(disk).write(snapshot(3))
    assert of(disk).read(3) == snapshot(3)


def test_what_is_not_kept_is_removed_and_unfinished_ones_too(disk: SimulatedDisk) -> None:
    for number in (1, 2, 3):
        of(disk).write(snapshot(number))
    disk.write_file(path(4) + ".new", b"half")
    disk.write_file(f"{FOLDER}/letter.txt", b"somebody's")
    of(disk).prune([2, 3])
    assert disk.list(FOLDER) == [snapshot_name(2), snapshot_name(3), "letter.txt"]
