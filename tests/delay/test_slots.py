"""Slots of buckets: each given once, and again only after all others."""

from __future__ import annotations

import pytest

from journal.errors import Full
from tfmq.delay.buckets import store as module
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import StoreIdentity, TimeSpan
from tfmq.delay.buckets.store import BucketIds


def bucket(slot: int) -> Bucket:
    return Bucket("f", StoreIdentity(1, 2), TimeSpan(slot << 16, 16), slot, 0, 0)


def test_a_slot_that_was_given_up_is_not_given_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS_MAX", 5)
    slots = BucketIds([bucket(1), bucket(2)])
    assert slots[2].bucket_id == 2 and len(slots) == 2
    slots.register(third := bucket(slots.allocate()))
    assert third.bucket_id == 3
    slots.release([third])
    with pytest.raises(KeyError):
        slots[3]
    given = []
    for _ in range(3):
        given.append(slots.allocate())
        slots.register(bucket(given[-1]))
    assert given == [4, 5, 3]


def test_there_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS_MAX", 2)
    slots = BucketIds([bucket(1), bucket(2)])
    with pytest.raises(Full, match="limit of 2"):
        slots.allocate()
    slots.release([bucket(1), bucket(7)])
    assert slots.allocate() == 1
