"""The start of the buckets: it looks at names and sizes, refuses what it cannot answer for, clears the rest away."""

from __future__ import annotations

import errno

import pytest

from journal.errors import Corrupt, Full, TooLarge
from journal.testing import Moment, SimulatedDisk, crash_states
from tests.delay.bucket_rig import DAY, FOLDER, NOW, Bench, everything, flip
from tests.scale import seeded
from tfmq.delay.buckets.format import StoreIdentity, TimeSpan, bucket_name, span_of
from tfmq.delay.buckets.recovery import (
    BucketCheckpoint,
    BucketCheckpointFile,
    Decision,
    FileState,
    ListedBucket,
    decide_files,
    decode_checkpoint,
    encode_checkpoint,
    is_bucket_file_name,
)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.put(NOW + 1, NOW + DAY)
    return bench


def first_name(bench: Bench) -> str:
    return bench.buckets.live_buckets[0].path.rpartition("/")[2]


def picture(bench: Bench) -> dict[str, bytes]:
    return {name: bench.disk.read_file(f"{FOLDER}/{name}") for name in bench.disk.list(FOLDER)}


def test_a_start_reads_the_checkpoint_and_no_bucket(bench: Bench) -> None:
    reads = bench.disk.faults.counts["read"]
    bench.on(bench.disk)
    assert bench.disk.faults.counts["read"] == reads + 1


def test_more_bytes_than_listed_are_cut(bench: Bench) -> None:
    whole = picture(bench)
    bench.damage_file(first_name(bench), lambda data: data.extend(b"more"))
    again = bench.on(bench.disk)
    assert again.buckets.recovery_labels == {"whole", "unlisted chunks"}
    assert picture(again) == whole and picture(again.crash()) == whole


def test_what_is_not_listed_is_removed_and_what_is_not_ours_is_left(bench: Bench) -> None:
    whole = picture(bench)
    for name in (bucket_name(TimeSpan(0, 16)), "checkpoint.new", f"{first_name(bench)}.repaired"):
        bench.disk.write_file(f"{FOLDER}/{name}", b"left over")
    bench.disk.write_file(f"{FOLDER}/stranger", b"?")
    bench.disk.make_folder(f"{FOLDER}/arrivals")
    bench.on(bench.disk)
    bench.disk.remove_folder(f"{FOLDER}/arrivals")
    assert picture(bench) == whole | {"stranger": b"?"}


def test_a_missing_file_is_refused_by_name_and_nothing_is_changed(bench: Bench) -> None:
    bench.disk.unlink(f"{FOLDER}/{first_name(bench)}")
    bench.disk.write_file(f"{FOLDER}/{bucket_name(TimeSpan(0, 16))}", b"left over")
    before = picture(bench)
    with pytest.raises(Corrupt, match=f"{first_name(bench)}.*missing.*1 messages.*tfmq log repair"):
        bench.on(bench.disk)
    assert picture(bench) == before


def test_a_missing_or_rotten_checkpoint_is_refused_and_nothing_is_changed(bench: Bench) -> None:
    bench.damage_file("checkpoint", lambda data: data.__setitem__(slice(None), bytes(len(data))))
    before = picture(bench)
    with pytest.raises(Corrupt, match="both of its copies"):
        bench.on(bench.disk)
    bench.disk.unlink(f"{FOLDER}/checkpoint")
    before.pop("checkpoint")
    with pytest.raises(Corrupt, match=r"checkpoint of 2 buckets.*missing"):
        bench.on(bench.disk)
    assert picture(bench) == before


def test_nothing_is_removed_before_the_checkpoint_is_sure(bench: Bench) -> None:
    """An earlier process may have died between its rename and the force of the folder."""
    order: list[str] = []
    bench.buckets.split(bench.buckets.live_buckets[1], everything)
    state = bench.disk.crash(keep="everything")
    state.after = lambda kind, path: order.append(kind)
    bench.on(state)
    assert order.index("force_folder") < order.index("unlink")


# The table of what a start does: each row by its label.

ONE = ListedBucket(TimeSpan(1 << 16, 16), 100, 3)
NAME = bucket_name(ONE.span)
OTHER = bucket_name(TimeSpan(5 << 16, 16))


@pytest.mark.parametrize(
    ("listed", "sizes", "label", "decision"),
    [
        ([ONE], {NAME: 100}, "whole", Decision.USE),
        ([ONE], {NAME: 101}, "unlisted chunks", Decision.CUT),
        ([ONE], {NAME: 99}, "too short", Decision.USE),
        ([ONE], {}, "missing", Decision.REFUSE),
        ([], {OTHER: 5}, "unlisted", Decision.REMOVE),
        ([], {"checkpoint.new": 5}, "unfinished", Decision.REMOVE),
        ([], {f"{NAME}.repaired": 5}, "unfinished", Decision.REMOVE),
        ([], {f"{NAME}.damaged.repaired": 5}, "unfinished", Decision.REMOVE),
        ([], {f"{NAME}.damaged": 5}, "foreign", Decision.LEAVE),
        ([], {"notes.txt": 5}, "foreign", Decision.LEAVE),
        ([], {"notes.repaired": 5}, "foreign", Decision.LEAVE),
    ],
)
def test_each_thing_that_is_found_has_its_row(
    listed: list[ListedBucket], sizes: dict[str, int], label: str, decision: Decision
) -> None:
    (found,) = decide_files(listed, sizes)
    assert (found.state.label, found.state.decision) == (label, decision)
    assert found.listed == (listed[0] if listed else None)


def test_labels_differ() -> None:
    assert len({state.label for state in FileState}) == len(FileState) == 7


def test_the_checkpoint_itself_is_no_finding() -> None:
    assert decide_files([], {"checkpoint": 8192}) == []


def test_names_of_the_house_are_known() -> None:
    for name in ("checkpoint", "checkpoint.new", "checkpoint.damaged", NAME, f"{NAME}.repaired", f"{NAME}.damaged"):
        assert is_bucket_file_name(name)
    assert not is_bucket_file_name("other") and not is_bucket_file_name("x.bucket")


# The checkpoint: it is the old one or the new one, and one whole copy is enough.

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


def test_settling_fsyncs_what_an_earlier_process_wrote(file: BucketCheckpointFile) -> None:
    disk = file.disk
    assert isinstance(disk, SimulatedDisk)
    file.write(FIRST)
    before = disk.faults.counts["force"], disk.faults.counts["force_folder"]
    file.fsync()
    assert (disk.faults.counts["force"], disk.faults.counts["force_folder"]) == (before[0] + 1, before[1] + 1)
