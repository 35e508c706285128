"""What lies in the folder, seen offline: with a checkpoint, without one, without anything that says whose it is."""

from __future__ import annotations

from journal.errors import Corrupt
from tests.delay.bucketing import DAY, FOLDER, NOW, Bench, flip
from tfmq.delay.buckets.fsck import BucketScan, is_bucket_folder


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


def test_a_checkpoint_of_somebody_else_is_none() -> None:
    bench = filled()
    bench.disk.make_folder("data/transactions")
    bench.disk.write_file("data/transactions/checkpoint", b"TFMC")
    assert not is_bucket_folder(bench.disk, "data/transactions")
