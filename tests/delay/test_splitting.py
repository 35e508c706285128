"""What a split takes out of a bucket: all that is whole, bytes and checksums as they are."""

from __future__ import annotations

from tests.delay.bucketing import BILLS, NEAR, Bench, everything, flip
from tfmq.delay.buckets.format import IntegerColumn
from tfmq.delay.buckets.writer import chunk_messages, next_to_split


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


def test_what_nobody_waits_for_is_left_out() -> None:
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


def test_a_bucket_for_which_nobody_waits_is_gone_when_it_is_cut() -> None:
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
