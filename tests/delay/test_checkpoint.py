"""The checkpoint: it is the old one or the new one, and one whole copy is enough."""

from __future__ import annotations

import errno

import pytest

from journal.errors import Corrupt, Full, TooLarge
from journal.testing import Moment, SimulatedDisk, crash_states
from tests.delay.bucketing import NOW, flip
from tests.scale import seeded
from tfmq.delay.buckets.format import StoreIdentity, TimeSpan, span_of
from tfmq.delay.buckets.recovery import (
    BucketCheckpoint,
    BucketCheckpointFile,
    ListedBucket,
    decode_checkpoint,
    encode_checkpoint,
)

FIRST = BucketCheckpoint(StoreIdentity(1, 2), 300, 4, NOW, [], b"")
SECOND = BucketCheckpoint(
    StoreIdentity(1, 2),
    500,
    9,
    NOW + 1,
    [ListedBucket(span_of(NOW + n * 70_000, 16), n, n) for n in range(300)],
    b"note",
)


@pytest.fixture
def file() -> BucketCheckpointFile:
    disk = SimulatedDisk()
    disk.make_folder("d")
    disk.force_folder("")
    return BucketCheckpointFile(disk, "d")


def test_there_is_none_before_the_first(file: BucketCheckpointFile) -> None:
    assert file.read() is None and file.damaged_copies() == []


def test_what_was_written_is_read(file: BucketCheckpointFile) -> None:
    for checkpoint in (FIRST, SECOND, FIRST):
        file.write(checkpoint)
        assert file.read() == checkpoint
    assert file.disk.list("d") == ["checkpoint"]


def test_a_power_cut_leaves_the_old_or_the_new_one(file: BucketCheckpointFile) -> None:
    disk = file.disk
    assert isinstance(disk, SimulatedDisk)
    file.write(FIRST)
    moments: list[Moment] = []
    disk.after = lambda kind, path: moments.append(Moment(disk))
    file.write(SECOND)
    found = [
        BucketCheckpointFile(state, "d").read()
        for moment in moments
        for state in crash_states(moment, 20, seeded("checkpoint"))
    ]
    assert FIRST in found and SECOND in found and all(each in (FIRST, SECOND) for each in found)
    assert BucketCheckpointFile(disk.crash(keep="nothing"), "d").read() == SECOND


@pytest.mark.parametrize("kind", ["create", "write", "rename"])
def test_a_full_disk_leaves_the_old_one_and_nothing_else(file: BucketCheckpointFile, kind: str) -> None:
    disk = file.disk
    assert isinstance(disk, SimulatedDisk)
    file.write(FIRST)
    disk.faults.fail(kind, error=errno.ENOSPC)
    with pytest.raises(Full):
        file.write(SECOND)
    assert file.read() == FIRST and disk.list("d") == ["checkpoint"]
    file.write(SECOND)
    assert file.read() == SECOND


def test_one_copy_may_rot_but_not_both(file: BucketCheckpointFile) -> None:
    disk = file.disk
    assert isinstance(disk, SimulatedDisk)
    file.write(SECOND)
    whole = disk.read_file("d/checkpoint")
    half = len(whole) // 2
    assert half % 4096 == 0 and whole[:half] == whole[half:]
    generator = seeded("rot")
    for _ in range(200):
        data = bytearray(whole)
        one, other = generator.randrange(half), half + generator.randrange(half)
        flip(one)(data)
        disk.write_file("d/checkpoint", bytes(data))
        assert file.read() == SECOND
        size = len(encode_checkpoint(SECOND))
        assert len(file.damaged_copies()) == (one < size)
        flip(other)(data)
        disk.write_file("d/checkpoint", bytes(data))
        if one < size and other - half < size:
            with pytest.raises(Corrupt, match="both of its copies"):
                file.read()


def test_what_is_no_checkpoint_is_damage(file: BucketCheckpointFile) -> None:
    disk = file.disk
    assert isinstance(disk, SimulatedDisk)
    for data in (b"", b"x", bytes(8192), b"TFDK" * 3000):
        disk.write_file("d/checkpoint", data)
        with pytest.raises(Corrupt):
            file.read()


def test_a_span_that_cannot_be_is_damage_and_a_note_has_a_bound() -> None:
    wrong = SECOND._replace(buckets=[ListedBucket(TimeSpan(5, 16), 1, 1)])
    with pytest.raises(Corrupt, match="invalid time span"):
        decode_checkpoint(encode_checkpoint(wrong), 0, "c")
    with pytest.raises(TooLarge):
        encode_checkpoint(SECOND._replace(queue_state=bytes(8193)))


def test_settling_forces_what_an_earlier_process_wrote(file: BucketCheckpointFile) -> None:
    disk = file.disk
    assert isinstance(disk, SimulatedDisk)
    file.write(FIRST)
    before = disk.faults.counts["force"], disk.faults.counts["force_folder"]
    file.fsync()
    assert (disk.faults.counts["force"], disk.faults.counts["force_folder"]) == (before[0] + 1, before[1] + 1)
