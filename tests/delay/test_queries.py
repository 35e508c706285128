"""How much waits, and when the next is due."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from journal.record.format import split_id
from tests.delay.rig import BILLS, ORDERS, Handle, Rig
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.requests import Turn
from tfmq.message import encode_attribute


def test_what_waits_is_counted_wherever_it_lies() -> None:
    rig = Rig()
    figures = rig.queue._metrics
    assert (figures.pending, figures.next_due) == (0, None)
    sent = rig.send([b"%d" % n for n in range(10)], [10_000 * n * n + 50 for n in range(10)])
    rig.advance(1)
    assert (figures.pending, figures.next_due) == (9, sent[1].due)
    rig.advance(100)
    assert figures.pending == 6
    rig.until(sent[-1].due + 200)
    assert (figures.pending, figures.next_due) == (0, None)


def test_a_send_counts_at_once() -> None:
    rig = Rig()
    rig.send([b"a", b"b"], 100_000)
    assert rig.queue.pending == 2
    assert rig.queue.pending_bytes >= 0
    rig.advance(70)
    assert rig.queue.pending_bytes > 40


# What waits, page by page and counted, without what was cancelled, delivered or is gone.


def turns(handles: list[Handle]) -> list[tuple[int, int]]:
    return sorted(handle.turn for handle in handles)


def listed(rig: Rig, **more: object) -> list[tuple[int, int]]:
    found = rig.listed(**more)  # type: ignore[arg-type]
    assert not found.more
    return [(row.due, row.number) for row in found.rows]


def test_all_that_wait_in_the_order_of_their_turns() -> None:
    rig = Rig()
    sent = rig.send([b"%d" % n for n in range(20)], [(n * 7919) % 100_000 for n in range(20)])
    sent += rig.send([b"b%d" % n for n in range(20)], [(n * 104_729) % 10**9 for n in range(20)], key=BILLS)
    assert listed(rig) == turns(sent)
    rig.until(sent[5].due + 11)
    assert listed(rig) == turns([each for each in sent if each.due > rig.now_ms])


def test_only_what_was_asked_for() -> None:
    rig = Rig()
    orders = rig.send([b"a", b"b", b"c"], [10_000, 20_000, 30_000])
    bills = rig.send([b"d"], 20_000, key=BILLS)
    assert listed(rig, keys=lambda key: split_id(key)[0] == 17) == turns(bills)
    assert listed(rig, first=orders[1].due, end=orders[2].due) == turns([orders[1], *bills])
    assert listed(rig, keys=lambda key: False) == []


def test_page_by_page_everything_comes_once() -> None:
    rig = Rig()
    sent = rig.send([b"%d" % n for n in range(57)], [1000 + n % 5 for n in range(57)])
    found: list[tuple[int, int]] = []
    after: Turn | None = None
    while True:
        page = rig.listed(limit=10, after=after)
        found += [(row.due, row.number) for row in page.rows]
        after = page.after
        if not page.more:
            break
    assert found == turns(sent)


def test_what_is_cancelled_or_moved_is_not_where_it_was() -> None:
    rig = Rig()
    a, b, c = rig.send([b"a", b"b", b"c"], 50_000)
    assert listed(rig) == turns([a, b, c])
    rig.cancel(a)
    moved = rig.reschedule(b, 100_000).known.turn
    assert listed(rig) == [c.turn, moved]


def test_a_row_reports_size_and_attribute() -> None:
    rig = Rig()
    (a,) = rig.send([b"payload"], 50_000)
    (row,) = rig.listed().rows
    assert (row.key, row.size_bytes, row.attribute) == (ORDERS, 20 + len(b"payload"), None)
    assert rig.describe(a).pending == row


def test_by_the_key_of_a_message() -> None:
    rig = Rig()
    rig.send([b"a"], 50_000)
    rig.send([b"b"], 50_000, attribute=encode_attribute(key="customer-7"))
    assert [row.number for row in rig.listed(message_key=b"customer-7").rows] == [3]
    assert rig.listed(message_key=b"nobody").rows == []


def test_counts_between_edges_are_exact() -> None:
    dice = random.Random(5)
    rig = Rig()
    sent = []
    for _ in range(10):
        sent += rig.send([b"x"] * 50, [dice.randrange(3_000_000) for _ in range(50)], key=dice.choice([ORDERS, BILLS]))
    rig.advance(200)
    gone = dice.sample([each for each in sent if each.due > rig.now_ms], 100)
    for each in gone:
        rig.cancel(each)
    rig.advance(100)
    left = [each for each in sent if each.due > rig.now_ms and each not in gone]
    edges = [rig.now_ms + step for step in (-500_000, 0, 1000, 70_000, 500_000, 2_000_000)]
    for keys in (None, lambda key: key == BILLS):
        wanted = [each for each in left if keys is None or keys(each.key)]
        found = rig.histogram(edges, keys)
        counts = [len([1 for each in wanted if low <= each.due < high]) for low, high in pairwise(edges)]
        assert (found.counts, found.pending) == (counts, len(wanted))


def test_of_a_topic_that_is_gone_nothing_waits() -> None:
    rig = Rig()
    rig.send([b"a"], 50_000)
    rig.targets.delete(16)
    rig.queue.topic_deleted(16)
    assert listed(rig) == []
    assert rig.histogram([0, 1 << 62]).pending == 0


def test_a_count_reads_each_bucket_once_however_many_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    week = 7 * 86_400_000
    sent = rig.send([b"%d" % n for n in range(400)], [week + n * 65_536 for n in range(400)])
    for handle in sent[::2]:
        rig.cancel(handle, turn=False)
    rig.turn()
    assert len(rig.listed().rows) == 200
    loads: list[object] = []
    load = Bucket.read_columns
    monkeypatch.setattr(Bucket, "read_columns", lambda self, files: loads.append(self) or load(self, files))
    edges = [0, sent[200].due, 1 << 62]
    assert rig.histogram(edges) == ([100, 100], 200)
    assert rig.histogram(edges, keys=lambda key: key == ORDERS).pending == 200
    assert rig.histogram([], keys=lambda key: key == BILLS) == ([], 0)
    assert len(loads) <= 6 * len(rig.buckets.live_buckets) < 60
