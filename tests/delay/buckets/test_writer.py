"""Additions: gathered within bounds, one chunk for what fits, no step of Python for a message, taken back whole."""

from __future__ import annotations

import errno
import random
from array import array

import pytest

from journal.errors import Full
from journal.testing import SimulatedDisk
from tests.delay.bucket_rig import BILLS, NEAR, NOW, ORDERS, Bench, Waiting, batch_of, everything, flip, record_of
from tests.delay.steps import steps
from tests.scale import seeded
from tfmq.delay.buckets import writer as module
from tfmq.delay.buckets.bucket import Bucket, OpenFileCache
from tfmq.delay.buckets.format import (
    CRC_SIZE,
    ChunkColumns,
    IntegerColumn,
    MessageColumns,
    StoreIdentity,
    TimeSpan,
    single_target_column,
    span_of,
    with_checksums,
)
from tfmq.delay.buckets.writer import (
    BucketBuffer,
    BucketWriter,
    PendingFilter,
    chunk_messages,
    next_to_split,
    pending_messages,
    pending_rows,
)
from tfmq.delay.rows import Target

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


class BucketFolder:
    """Additions to an empty folder, and the buckets that come of them."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.disk.make_folder("d")
        self.buckets: dict[TimeSpan, Bucket] = {}

    def additions(self) -> BucketWriter:
        return BucketWriter(self.disk, "d", None, lambda due: span_of(due, 16), self.bucket_of, 100)

    def bucket_of(self, span: TimeSpan) -> tuple[Bucket, bool]:
        known = self.buckets.get(span)
        return (known, False) if known is not None else (Bucket("d", IDENTITY, span, len(self.buckets) + 1, 0, 0), True)

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
def bucket_folder() -> BucketFolder:
    return BucketFolder()


def test_what_comes_for_one_span_is_one_chunk(bucket_folder: BucketFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFERED_BYTES_MAX", 1000)
    additions = bucket_folder.additions()
    for n in range(5):
        additions.add(messages([NOW, NOW], first=2 * n))
    additions.add(messages([]))
    additions.finish()
    assert (additions.count, len(additions.growth)) == (10, 1)
    bucket_folder.adopt(additions)
    assert bucket_folder.chunks() == [list(range(10))]


def test_chunks_have_a_bound_and_the_fullest_are_written_before_memory_is(
    bucket_folder: BucketFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(module, "BUFFERED_BYTES_MAX", 3000)
    additions = bucket_folder.additions()
    for n in range(60):
        additions.add(messages([NOW + (n % 7) * 70_000] * 2, first=2 * n))
        assert additions._buffered_bytes <= 3000
    assert bucket_folder.disk.faults.counts["write"] > 3
    additions.add(messages([NOW], first=200, size=5000))
    additions.finish()
    bucket_folder.adopt(additions)
    assert sorted(n for chunk in bucket_folder.chunks() for n in chunk) == [*range(120), 200]
    assert all(len(chunk) * 75 < 1100 for chunk in bucket_folder.chunks())


def test_many_targets_make_several_chunks(bucket_folder: BucketFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_BYTES_MAX", 100)
    additions = bucket_folder.additions()
    for n in range(30):
        additions.add(messages([NOW], first=n)._replace(table=[Target(n, "a topic")]))
    additions.finish()
    bucket_folder.adopt(additions)
    assert len(bucket_folder.chunks()) > 3 and sum(map(len, bucket_folder.chunks())) == 30


def steps_of(bucket_folder: BucketFolder, batches: list[MessageColumns]) -> int:
    additions = bucket_folder.additions()

    def add() -> None:
        for batch in batches:
            additions.add(batch)
        additions.finish()

    return steps(add)


def test_a_batch_for_one_span_costs_no_step_of_python_for_a_message() -> None:
    few = steps_of(BucketFolder(), [messages([NOW] * 10, first=1000 * n) for n in range(5)])
    many = steps_of(BucketFolder(), [messages([NOW] * 1000, first=1000 * n) for n in range(5)])
    assert many == few


def test_mixed_batches_are_sorted_together(bucket_folder: BucketFolder) -> None:
    generator: random.Random = seeded("mixed")
    additions = bucket_folder.additions()
    for n in range(30):
        additions.add(messages([NOW + generator.randrange(300_000) for _ in range(9)], first=9 * n))
    additions.finish()
    bucket_folder.adopt(additions)
    assert len(bucket_folder.chunks()) == len(bucket_folder.buckets) <= 6
    assert sorted(n for chunk in bucket_folder.chunks() for n in chunk) == list(range(270))


@pytest.mark.parametrize("kind", ["write", "create"])
def test_what_is_taken_back_leaves_the_files_as_they_were(bucket_folder: BucketFolder, kind: str) -> None:
    first = bucket_folder.additions()
    first.add(messages([NOW]))
    first.finish()
    bucket_folder.adopt(first)
    before = {name: bucket_folder.disk.read_file(f"d/{name}") for name in bucket_folder.disk.list("d")}
    second = bucket_folder.additions()
    bucket_folder.disk.faults.fail(kind, nth=2, error=errno.ENOSPC)
    second.add(messages([NOW, NOW + 70_000, NOW + 200_000], first=1))
    with pytest.raises(Full):
        second.finish()
    second.undo()
    assert second.failure is None
    assert {name: bucket_folder.disk.read_file(f"d/{name}") for name in bucket_folder.disk.list("d")} == before
    assert not bucket_folder.disk.open_files


def test_a_tail_that_cannot_be_cut_for_want_of_a_descriptor_is_written_over(bucket_folder: BucketFolder) -> None:
    first = bucket_folder.additions()
    first.add(messages([NOW]))
    first.finish()
    bucket_folder.adopt(first)
    second = bucket_folder.additions()
    second.add(messages([NOW], first=1))
    second.finish()
    bucket_folder.disk.faults.fail("open", error=errno.EMFILE)
    second.undo()
    assert second.failure is None
    third = bucket_folder.additions()
    third.add(messages([NOW], first=2))
    third.finish()
    bucket_folder.adopt(third)
    assert bucket_folder.chunks() == [[0], [2]]


def test_a_cut_that_fails_is_a_failure(bucket_folder: BucketFolder) -> None:
    first = bucket_folder.additions()
    first.add(messages([NOW]))
    first.finish()
    bucket_folder.adopt(first)
    second = bucket_folder.additions()
    second.add(messages([NOW], first=1))
    second.finish()
    bucket_folder.disk.faults.fail("truncate")
    with pytest.raises(OSError, match="error"):
        second.undo()
    assert second.failure is not None


def test_a_batch_comes_to_the_disk_as_the_arrivals_gave_it() -> None:
    bench = Bench()
    sent = bench.put(*[NOW + 1] * 300)
    assert [kept.record for kept in bench.contents().values()] == [each.record for each in sent]


# Messages that are gathered: columns joined, targets in one table.

ORDER, BILL = Target(ORDERS, "orders"), Target(BILLS, "bills")


def messages_of_draft(first: int, targets: list[int], table: list[Target]) -> MessageColumns:
    records = [record_of(n) for n in range(first, first + len(targets))]
    sizes = array("I", map(len, records))
    dues = array("Q", range(NOW + first, NOW + first + len(targets)))
    numbers = array("Q", range(first, first + len(targets)))
    return MessageColumns(
        dues, numbers, array("I", targets), sizes, bytes(targets), table, with_checksums(records, sizes, first)
    )


def test_all_that_was_added_is_there_in_order_with_one_table() -> None:
    draft = BucketBuffer()
    parts = [
        messages_of_draft(0, [0, 0], [BILL]),
        messages_of_draft(2, [1, 0, 1], [BILL, ORDER]),
        messages_of_draft(5, [0], [ORDER]),
    ]
    for part in parts:
        draft.add(part)
    found = draft.to_columns()
    assert found.table == [BILL, ORDER] and list(found.targets) == [0, 0, 1, 0, 1, 1]
    assert list(found.numbers) == list(range(6)) and list(found.dues) == list(range(NOW, NOW + 6))
    assert found.flags == b"".join(part.flags for part in parts)
    assert b"".join(found.data) == b"".join(data for part in parts for data in part.data)


def test_it_knows_its_size() -> None:
    draft = BucketBuffer()
    draft.add(messages_of_draft(0, [0], [ORDER]))
    before = draft.size_bytes, draft.table_bytes
    draft.add(messages_of_draft(1, [0], [ORDER]))
    assert draft.size_bytes == 2 * before[0] and draft.table_bytes == before[1] == 9 + len("orders")


def test_an_empty_one_has_nothing() -> None:
    found = BucketBuffer().to_columns()
    assert found.length == 0 and b"".join(found.data) == b"" and list(single_target_column(0)) == []


# What of an arrived batch goes into buckets: all of it, some of it, none of it.

RUN = [Waiting(n, NOW + n, ORDERS, n == 6, record_of(n, 9 * n)) for n in range(5, 9)]


@pytest.mark.parametrize(
    ("pending", "kept"),
    [
        (lambda *_: True, [5, 6, 7, 8]),
        (lambda *_: False, []),
        (lambda log_id, dues, numbers: bytes(n % 2 for n in numbers), [5, 7]),
        (lambda log_id, dues, numbers: [due > NOW + 5 for due in dues], [6, 7, 8]),
        (lambda log_id, dues, numbers: bytes(len(dues)), []),
        (lambda log_id, dues, numbers: b"\1" * len(dues), [5, 6, 7, 8]),
        (lambda log_id, dues, numbers: log_id != ORDERS, []),
    ],
)
def test_what_is_pending_goes_with_everything_that_is_known_of_it(pending: PendingFilter, kept: list[int]) -> None:
    found = pending_messages(batch_of(RUN), pending)
    chosen = [each for each in RUN if each.number in kept]
    assert found.numbers == array("Q", kept) and found.dues == array("Q", [each.due for each in chosen])
    assert found.flags == bytes(each.absolute for each in chosen) and found.table == [Target(ORDERS, "orders")]
    data = b"".join(found.data)
    for each, size in zip(chosen, found.sizes, strict=True):
        assert data[CRC_SIZE : CRC_SIZE + size] == each.record
        data = data[CRC_SIZE + size :]
    assert data == b""


def test_of_a_chunk_with_several_targets_each_is_asked_for_its_own() -> None:
    columns = ChunkColumns(
        array("Q", [10, 20, 30, 40]),
        array("Q", [1, 2, 3, 4]),
        array("I", [0, 1, 0, 1]),
        array("I", [30] * 4),
        bytes(4),
        array("Q", [0, 34, 68, 102]),
        [Target(7, "orders"), Target(8, "bills")],
    )
    asked: list[tuple[int, list[int], list[int]]] = []

    def pending(log_id: int, dues: IntegerColumn, numbers: IntegerColumn) -> bool | bytes:
        asked.append((log_id, list(dues), list(numbers)))
        return True if log_id == 7 else bytes([0, 1])

    assert list(pending_rows(columns, pending)) == [1, 0, 1, 1]
    assert asked == [(7, [10, 30], [1, 3]), (8, [20, 40], [2, 4])]
    assert list(pending_rows(columns, pending, (8).__eq__)) == [0, 0, 0, 1]
    assert list(pending_rows(columns, lambda *_: False)) == [0] * 4
    alone = columns._replace(targets=array("I", [0] * 4), table=[Target(7, "orders")])
    assert list(pending_rows(alone, lambda *_: bytes([1, 0, 1, 0]))) == [1, 0, 1, 0]


# What a split takes out of a bucket: all that is whole, bytes and checksums as they are.


def test_every_chunk_comes_with_its_records() -> None:
    bench = Bench()
    sent = bench.put(NEAR + 3, NEAR + 1) + bench.put(NEAR + 2, log_id=BILLS, absolute=True)
    pieces = list(chunk_messages(bench.bucket(NEAR), bench.buckets.files, everything))
    assert [list(piece.numbers) for piece in pieces] == [[0, 1], [3]]
    joined = b"".join(bytes(data) for piece in pieces for data in piece.data)
    for each in sent:
        assert joined.count(each.record) == 1
    assert len(joined) == sum(len(each.record) + 4 for each in sent)
    assert pieces[1].flags == b"\1" and pieces[1].table[0].topic == "bills"


def test_a_damaged_chunk_is_left_out_and_a_damaged_record_is_not() -> None:
    bench = Bench()
    bench.put(NEAR + 1)
    size = bench.bucket(NEAR).size
    bench.put(NEAR + 2, NEAR + 900)
    name = bench.bucket(NEAR).path.rpartition("/")[2]
    bench.damage_file(name, flip(45))
    bench.damage_file(name, flip(-3))
    again = bench.on(bench.disk)
    parent = again.bucket(NEAR)
    again.buckets.split(parent, everything)
    contents = again.contents()
    assert sorted(contents) == [2, 3] and contents[3].record is None and contents[2].record is not None
    assert [(error.first, error.next) for error in parent.damage] == [(36, size)]
    again.buckets.release(parent)
    again.buckets.commit(0)
    assert f"{name}.damaged" in again.files()
    assert len(again.crash().contents()) == 2


def test_cancelled_messages_are_left_out() -> None:
    bench = Bench()
    sent = bench.put(NEAR + 3, NEAR + 1, NEAR + 2)
    bench.put(NEAR + 2, log_id=BILLS)

    def pending(log_id: int, dues: IntegerColumn, numbers: IntegerColumn) -> bool | bytes:
        return log_id != BILLS and bytes(number != 1 for number in numbers)

    bucket = bench.bucket(NEAR)
    pieces = list(chunk_messages(bucket, bench.buckets.files, pending))
    assert [list(piece.numbers) for piece in pieces] == [[0, 2]]
    assert b"".join(bytes(data) for data in pieces[0].data).count(sent[1].record) == 0
    children = bench.buckets.split(bucket, pending)
    assert children is not None and sum(child.count for child in children) == 2


def test_a_bucket_of_cancelled_messages_is_gone_when_it_is_split() -> None:
    bench = Bench()
    bench.put(NEAR + 3, NEAR + 1)
    assert bench.buckets.split(bench.bucket(NEAR), lambda *_: False) == []
    assert not bench.buckets.live_buckets and not bench.crash().contents()


def test_which_is_cut_first() -> None:
    bench = Bench()
    bench.put(NEAR, NEAR + 100_000, NEAR + 200_000)
    one, two, three = bench.buckets.live_buckets
    assert next_to_split([three, two], two, 0, ()) is two
    assert next_to_split([three, two], one, 0, ()) is three
    assert next_to_split([three, two], two, 0, {two.span}) is three
    assert next_to_split([one, two], None, one.span.end, ()) is two
    assert next_to_split([], one, 0, ()) is None
