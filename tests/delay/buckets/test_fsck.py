"""The offline check of the buckets: what is whole has no findings, each kind of damage is named where it is."""

from __future__ import annotations

import pytest

from journal.errors import Corrupt
from journal.fsck.findings import DAMAGE, NOTE, VerifyReport
from tests.delay.bucket_rig import DAY, FOLDER, HOUR, NOW, Bench, everything, flip
from tests.scale import scaled, seeded
from tfmq.delay.buckets.format import CHUNK_SIZE, HEAD_SIZE
from tfmq.delay.buckets.fsck import BucketScan, is_bucket_folder, repair_buckets, verify_buckets


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.put(NOW + 1, NOW + 2, NOW + DAY)
    bench.put(NOW + 3, NOW + 3 * HOUR)
    return bench


def verify(bench: Bench, *, records: bool = False) -> VerifyReport:
    return verify_buckets(bench.disk, FOLDER, records=records)


def found(bench: Bench, *, records: bool = False) -> list[tuple[str, str, str]]:
    return [
        (finding.file.rpartition("/")[2], finding.field, finding.weight)
        for finding in verify(bench, records=records).findings
    ]


def first_file(bench: Bench) -> str:
    return bench.buckets.live_buckets[0].path.rpartition("/")[2]


def test_what_is_whole_has_no_findings(bench: Bench) -> None:
    report = verify(bench, records=True)
    assert report.findings == []
    assert (report.segments, report.records, report.blocks) == (3, 5, 4)


def test_a_folder_of_buckets_is_known_by_what_is_in_it(bench: Bench) -> None:
    assert is_bucket_folder(bench.disk, FOLDER) and not is_bucket_folder(bench.disk, "data")
    assert is_bucket_folder(Bench().disk, FOLDER)
    assert not is_bucket_folder(bench.disk, "data/none")


def test_a_bad_head_columns_or_records_are_named(bench: Bench) -> None:
    name = first_file(bench)
    for position, field in ((8, "chunk"), (HEAD_SIZE + 3, "chunk"), (HEAD_SIZE + CHUNK_SIZE + 5, "columns")):
        bench.damage_file(name, flip(position))
        assert (name, field, DAMAGE) in found(bench)
        bench.damage_file(name, flip(position))
    bench.damage_file(name, flip(-3))
    assert found(bench) == found(bench, records=True) == [(name, "record", DAMAGE)]
    (finding,) = verify(bench).findings
    size = bench.disk.size(f"{FOLDER}/{name}")
    assert finding.next == size and size - 100 < finding.first and "message 4" in finding.what


def test_what_a_producer_summed_wrongly_is_found_where_records_are_asked_for() -> None:
    bench = Bench()
    (sent,) = bench.arrive(NOW + 1)
    wrong = bytearray(sent.record)
    wrong[5] ^= 1
    short = bytearray(sent.record)
    short[3] -= 1
    bench.arrived[0] = sent._replace(record=bytes(wrong))
    bench.spill()
    assert found(bench) == []
    (finding,) = verify(bench, records=True).findings
    assert "producer" in finding.what
    bench.arrive(NOW + DAY)
    bench.arrived[2] = bench.arrived[2]._replace(record=bytes(short))
    bench.spill()
    assert "in the columns" in verify(bench, records=True).findings[1].what


def test_one_that_is_missing_short_or_long_is_named(bench: Bench) -> None:
    name = first_file(bench)
    bench.damage_file(name, lambda data: data.extend(b"more"))
    assert found(bench) == [(name, "file", NOTE)]
    bench.damage_file(name, lambda data: data.__delitem__(slice(-30, None)))
    assert (name, "chunk", DAMAGE) in found(bench)
    bench.disk.unlink(f"{FOLDER}/{name}")
    (finding,) = verify(bench).findings
    assert (finding.field, finding.weight) == ("file", DAMAGE) and "3 messages" in finding.what


def test_what_the_next_start_clears_away_is_a_note(bench: Bench) -> None:
    bench.buckets.split(bench.buckets.live_buckets[1], everything)
    bench.disk.write_file(f"{FOLDER}/checkpoint.new", b"half")
    bench.disk.write_file(f"{FOLDER}/stranger", b"")
    weights = {name: weight for name, _, weight in found(bench)}
    assert len(weights) == 3 and set(weights.values()) == {NOTE}
    assert {"checkpoint.new", "stranger"} < set(weights)


def test_a_checkpoint_with_one_good_copy_is_a_note_and_without_one_damage(bench: Bench) -> None:
    bench.damage_file("checkpoint", flip(20))
    assert found(bench) == [("checkpoint", "checkpoint", NOTE)]
    bench.damage_file("checkpoint", flip(4096 + 20))
    assert ("checkpoint", "checkpoint", DAMAGE) in found(bench)
    bench.disk.unlink(f"{FOLDER}/checkpoint")
    assert ("checkpoint", "checkpoint", DAMAGE) in found(bench)


def test_any_flipped_bit_of_a_bucket_is_found(bench: Bench) -> None:
    generator = seeded("audit")
    names = bench.files()
    for _ in range(scaled(2000)):
        name = generator.choice(names)
        size = bench.disk.size(f"{FOLDER}/{name}")
        position = generator.randrange(size)
        bench.damage_file(name, flip(position))
        assert verify(bench).damaged, f"{name} at {position}"
        assert repair_buckets(bench.disk, FOLDER, dry_run=True), f"{name} at {position}"
        bench.damage_file(name, flip(position))
    assert verify(bench, records=True).findings == []


# What lies in the folder, seen offline: with a checkpoint, without one, without anything that says whose it is.


def filled() -> Bench:
    bench = Bench()
    bench.put(NOW + 1, NOW + DAY)
    return bench


def test_with_a_checkpoint_its_buckets_are_seen() -> None:
    bench = filled()
    survey = BucketScan(bench.disk, FOLDER)
    assert survey.fault is None and survey.identity == bench.buckets.identity
    assert [bucket.span for _, bucket in survey.buckets()] == bench.spans()
    assert all(len(list(survey.chunks(bucket))) == 1 for _, bucket in survey.buckets())
    survey.close()


def test_without_one_the_files_are_and_a_head_says_whose() -> None:
    bench = filled()
    bench.disk.unlink(f"{FOLDER}/checkpoint")
    survey = BucketScan(bench.disk, FOLDER)
    assert survey.fault is not None and "missing" in survey.fault.reason
    assert survey.identity == bench.buckets.identity
    assert [bucket.span for _, bucket in survey.buckets()] == bench.spans()
    for name in bench.files():
        bench.damage_file(name, flip(12))
    blind = BucketScan(bench.disk, FOLDER)
    assert blind.identity is None and blind.buckets() == []


def test_a_rotten_checkpoint_is_a_fault() -> None:
    bench = filled()
    bench.damage_file("checkpoint", lambda data: data.__setitem__(slice(4, None), bytes(len(data) - 4)))
    survey = BucketScan(bench.disk, FOLDER)
    assert isinstance(survey.fault, Corrupt) and survey.checkpoint is None
    assert is_bucket_folder(bench.disk, FOLDER)


def test_an_empty_folder_has_no_fault() -> None:
    bench = filled()
    bench.disk.make_folder("data/empty")
    survey = BucketScan(bench.disk, "data/empty")
    assert (survey.fault, survey.identity, survey.listed) == (None, None, [])
    assert not is_bucket_folder(bench.disk, "data/empty")


def test_a_checkpoint_of_another_owner_is_none() -> None:
    bench = filled()
    bench.disk.make_folder("data/transactions")
    bench.disk.write_file("data/transactions/checkpoint", b"TFMC")
    assert not is_bucket_folder(bench.disk, "data/transactions")
