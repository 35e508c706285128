"""Additions: gathered within bounds, one chunk for what fits, no step of Python for a message, taken back whole."""

from __future__ import annotations

import errno
import random
import sys
from array import array
from types import FrameType
from typing import Any

import pytest

from journal.errors import Full
from journal.testing import SimulatedDisk
from tests.delay.bucketing import NOW, ORDERS, Bench, record_of
from tests.scale import seeded
from tfmq.delay.buckets import writer as module
from tfmq.delay.buckets.bucket import Bucket, OpenFileCache
from tfmq.delay.buckets.format import (
    MessageColumns,
    StoreIdentity,
    Target,
    TimeSpan,
    single_target_column,
    span_of,
    with_checksums,
)
from tfmq.delay.buckets.writer import BucketWriter

IDENTITY = StoreIdentity(1, 2)


def messages(dues: list[int], first: int = 0, size: int = 0) -> MessageColumns:
    records = [record_of(n, size) for n in range(first, first + len(dues))]
    sizes = array("I", map(len, records))
    numbers = array("Q", range(first, first + len(dues)))
    table = [Target(ORDERS, "orders")]
    data = with_checksums([b"".join(records)], sizes, first)
    return MessageColumns(
        array("Q", dues), numbers, single_target_column(len(dues)), sizes, bytes(len(dues)), table, data
    )


class Shelf:
    """Additions to an empty folder, and the buckets that come of them."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.disk.make_folder("d")
        self.buckets: dict[TimeSpan, Bucket] = {}

    def additions(self) -> BucketWriter:
        return BucketWriter(self.disk, "d", None, lambda due: span_of(due, 16), self.bucket_of, 100)

    def bucket_of(self, span: TimeSpan) -> tuple[Bucket, bool]:
        known = self.buckets.get(span)
        return (
            (known, False)
            if known is not None
            else (Bucket("d", IDENTITY, span, len(self.buckets) + 1, 0, 0), True)
        )

    def adopt(self, additions: BucketWriter) -> None:
        for span, growth in additions.growth.items():
            growth.bucket.size, growth.bucket.count = growth.size, growth.count
            self.buckets[span] = growth.bucket

    def chunks(self) -> list[list[int]]:
        """The numbers in each chunk, bucket by bucket."""
        files = OpenFileCache(self.disk)
        found = [list(c.numbers) for _, b in sorted(self.buckets.items()) for c in b.read_columns(files)]
        assert not any(bucket.damage for bucket in self.buckets.values())
        return found


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_what_comes_for_one_span_is_one_chunk(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFERED_BYTES_MAX", 1000)
    additions = shelf.additions()
    for n in range(5):
        additions.add(messages([NOW, NOW], first=2 * n))
    additions.add(messages([]))
    additions.finish()
    assert (additions.count, len(additions.growth)) == (10, 1)
    shelf.adopt(additions)
    assert shelf.chunks() == [list(range(10))]


def test_chunks_have_a_bound_and_the_fullest_are_written_before_memory_is(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(module, "BUFFERED_BYTES_MAX", 3000)
    additions = shelf.additions()
    for n in range(60):
        additions.add(messages([NOW + (n % 7) * 70_000] * 2, first=2 * n))
        assert additions._buffered_bytes <= 3000
    assert shelf.disk.faults.counts["write"] > 3
    additions.add(messages([NOW], first=200, size=5000))
    additions.finish()
    shelf.adopt(additions)
    assert sorted(n for chunk in shelf.chunks() for n in chunk) == [*range(120), 200]
    assert all(len(chunk) * 75 < 1100 for chunk in shelf.chunks())


def test_many_targets_make_several_chunks(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_BYTES_MAX", 100)
    additions = shelf.additions()
    for n in range(30):
        additions.add(messages([NOW], first=n)._replace(table=[Target(n, "a topic")]))
    additions.finish()
    shelf.adopt(additions)
    assert len(shelf.chunks()) > 3 and sum(map(len, shelf.chunks())) == 30


def steps(shelf: Shelf, batches: list[MessageColumns]) -> int:
    """Lines of Python that run for these."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    additions = shelf.additions()
    sys.settrace(trace)
    try:
        for batch in batches:
            additions.add(batch)
        additions.finish()
    finally:
        sys.settrace(None)
    return count


def test_a_batch_for_one_span_costs_no_step_of_python_for_a_message() -> None:
    few = steps(Shelf(), [messages([NOW] * 10, first=1000 * n) for n in range(5)])
    many = steps(Shelf(), [messages([NOW] * 1000, first=1000 * n) for n in range(5)])
    assert many == few


def test_mixed_batches_are_sorted_together(shelf: Shelf) -> None:
    generator: random.Random = seeded("mixed")
    additions = shelf.additions()
    for n in range(30):
        additions.add(messages([NOW + generator.randrange(300_000) for _ in range(9)], first=9 * n))
    additions.finish()
    shelf.adopt(additions)
    assert len(shelf.chunks()) == len(shelf.buckets) <= 6
    assert sorted(n for chunk in shelf.chunks() for n in chunk) == list(range(270))


@pytest.mark.parametrize("kind", ["write", "create"])
def test_what_is_taken_back_leaves_the_files_as_they_were(shelf: Shelf, kind: str) -> None:
    first = shelf.additions()
    first.add(messages([NOW]))
    first.finish()
    shelf.adopt(first)
    before = {name: shelf.disk.read_file(f"d/{name}") for name in shelf.disk.list("d")}
    second = shelf.additions()
    shelf.disk.faults.fail(kind, nth=2, error=errno.ENOSPC)
    second.add(messages([NOW, NOW + 70_000, NOW + 200_000], first=1))
    with pytest.raises(Full):
        second.finish()
    second.undo()
    assert second.failure is None
    assert {name: shelf.disk.read_file(f"d/{name}") for name in shelf.disk.list("d")} == before
    assert not shelf.disk.open_files


def test_a_tail_that_cannot_be_cut_for_want_of_a_descriptor_is_written_over(shelf: Shelf) -> None:
    first = shelf.additions()
    first.add(messages([NOW]))
    first.finish()
    shelf.adopt(first)
    second = shelf.additions()
    second.add(messages([NOW], first=1))
    second.finish()
    shelf.disk.faults.fail("open", error=errno.EMFILE)
    second.undo()
    assert second.failure is None
    third = shelf.additions()
    third.add(messages([NOW], first=2))
    third.finish()
    shelf.adopt(third)
    assert shelf.chunks() == [[0], [2]]


def test_a_cut_that_fails_is_a_failure(shelf: Shelf) -> None:
    first = shelf.additions()
    first.add(messages([NOW]))
    first.finish()
    shelf.adopt(first)
    second = shelf.additions()
    second.add(messages([NOW], first=1))
    second.finish()
    shelf.disk.faults.fail("truncate")
    with pytest.raises(OSError, match="error"):
        second.undo()
    assert second.failure is not None


def test_a_batch_comes_to_the_disk_as_the_arrivals_gave_it() -> None:
    bench = Bench()
    sent = bench.put(*[NOW + 1] * 300)
    assert [kept.record for kept in bench.contents().values()] == [each.record for each in sent]
