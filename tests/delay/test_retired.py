"""Buckets that count no more: their files go when nothing lists them and nobody reads them, not before."""

from __future__ import annotations

import errno

import pytest

from journal.errors import Corrupt, Full
from journal.testing import SimulatedDisk
from tfmq.delay.buckets.bucket import Bucket, OpenFileCache
from tfmq.delay.buckets.format import StoreIdentity, TimeSpan
from tfmq.delay.buckets.store import ObsoleteBuckets


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def retired(disk: SimulatedDisk) -> ObsoleteBuckets:
    return ObsoleteBuckets(disk, OpenFileCache(disk))


def bucket(disk: SimulatedDisk, number: int = 1) -> Bucket:
    made = Bucket("", StoreIdentity(1, 2), TimeSpan(number << 16, 16), number, 5, 1)
    disk.write_file(made.path, b"12345")
    return made


def test_one_that_is_listed_stays_and_may_count_again(disk: SimulatedDisk, retired: ObsoleteBuckets) -> None:
    one, other = bucket(disk), bucket(disk, 2)
    for each in (one, other):
        retired.add(each, is_listed=True, is_held=False)
    assert retired.removable() == [] and retired.unlisted_spans() == frozenset()
    assert retired.listed_bucket(one.span) is one and retired.listed_bucket(TimeSpan(0, 16)) is None
    retired.remove_live(one)
    retired.mark_unlisted([one.span, other.span])
    assert retired.removable() == [other] and retired.buckets() == [other]
    assert retired.listed_bucket(other.span) is None and retired.unlisted_spans() == {other.span}


def test_one_that_was_split_stays_until_it_is_released(disk: SimulatedDisk, retired: ObsoleteBuckets) -> None:
    one, stranger = bucket(disk), bucket(disk)
    retired.add(one, is_listed=False, is_held=True)
    retired.release(stranger)
    retired.remove_live(stranger)
    assert retired.removable() == [] and retired.spans() == [one.span]
    retired.release(one)
    assert retired.removable() == [one]
    retired.delete_file(one)
    retired.discard(one)
    assert retired.spans() == [] and not disk.exists(one.path)


def test_a_damaged_one_is_kept_under_another_name(disk: SimulatedDisk, retired: ObsoleteBuckets) -> None:
    one = bucket(disk)
    one.damage.append(Corrupt(one.path, 0, 1, "rotten"))
    for _ in range(2):
        retired.add(one, is_listed=False, is_held=False)
        disk.faults.fail("rename", error=errno.ENOSPC)
        if not disk.exists(f"{one.path}.damaged"):
            with pytest.raises(Full):
                retired.delete_file(one)
            assert retired.removable() == [one]
        retired.delete_file(one)
        retired.discard(one)
        assert not disk.exists(one.path) and disk.read_file(f"{one.path}.damaged") == b"12345"
        disk.write_file(one.path, b"again")
