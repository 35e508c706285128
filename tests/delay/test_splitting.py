"""What a split takes out of a bucket: all that is whole, bytes and checksums as they are."""

from __future__ import annotations

from tests.delay.bucketing import BILLS, NEAR, Bench, flip
from tfmq.delay.splitting import pieces_of


def test_every_chunk_comes_with_its_records() -> None:
    bench = Bench()
    sent = bench.put(NEAR + 3, NEAR + 1) + bench.put(NEAR + 2, log_id=BILLS, absolute=True)
    pieces = list(pieces_of(bench.bucket(NEAR), bench.buckets.files))
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
    again.buckets.split(parent)
    contents = again.contents()
    assert sorted(contents) == [2, 3] and contents[3].record is None and contents[2].record is not None
    assert [(error.first, error.next) for error in parent.damage] == [(36, size)]
    again.buckets.release(parent)
    again.buckets.commit(0)
    assert f"{name}.damaged" in again.files()
    assert len(again.crash().contents()) == 2
