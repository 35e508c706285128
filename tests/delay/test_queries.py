"""How much waits, and when the next is due."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from journal.record.format import split_id
from tests.delay.desk import BILLS, ORDERS, Desk, Handle
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.requests import Turn
from tfmq.message import encode_attribute


def test_what_waits_is_counted_wherever_it_lies() -> None:
    desk = Desk()
    figures = desk.queue._metrics
    assert (figures.pending, figures.next_due) == (0, None)
    sent = desk.send([b"%d" % n for n in range(10)], [10_000 * n * n + 50 for n in range(10)])
    desk.advance(1)
    assert (figures.pending, figures.next_due) == (9, sent[1].due)
    desk.advance(100)
    assert figures.pending == 6
    desk.until(sent[-1].due + 200)
    assert (figures.pending, figures.next_due) == (0, None)


def test_a_send_counts_at_once() -> None:
    desk = Desk()
    desk.send([b"a", b"b"], 100_000)
    assert desk.queue.pending == 2
    assert desk.queue.pending_bytes >= 0
    desk.advance(70)
    assert desk.queue.pending_bytes > 40


# What waits, page by page and counted, without what was cancelled, delivered or is gone.


def turns(handles: list[Handle]) -> list[tuple[int, int]]:
    return sorted(handle.turn for handle in handles)


def listed(desk: Desk, **more: object) -> list[tuple[int, int]]:
    found = desk.listed(**more)  # type: ignore[arg-type]
    assert not found.more
    return [(row.due, row.number) for row in found.rows]


def test_all_that_wait_in_the_order_of_their_turns() -> None:
    desk = Desk()
    sent = desk.send([b"%d" % n for n in range(20)], [(n * 7919) % 100_000 for n in range(20)])
    sent += desk.send([b"b%d" % n for n in range(20)], [(n * 104_729) % 10**9 for n in range(20)], key=BILLS)
    assert listed(desk) == turns(sent)
    desk.until(sent[5].due + 11)
    assert listed(desk) == turns([each for each in sent if each.due > desk.now_ms])


def test_only_what_was_asked_for() -> None:
    desk = Desk()
    orders = desk.send([b"a", b"b", b"c"], [10_000, 20_000, 30_000])
    bills = desk.send([b"d"], 20_000, key=BILLS)
    assert listed(desk, keys=lambda key: split_id(key)[0] == 17) == turns(bills)
    assert listed(desk, first=orders[1].due, end=orders[2].due) == turns([orders[1], *bills])
    assert listed(desk, keys=lambda key: False) == []


def test_page_by_page_everything_comes_once() -> None:
    desk = Desk()
    sent = desk.send([b"%d" % n for n in range(57)], [1000 + n % 5 for n in range(57)])
    found: list[tuple[int, int]] = []
    after: Turn | None = None
    while True:
        page = desk.listed(limit=10, after=after)
        found += [(row.due, row.number) for row in page.rows]
        after = page.after
        if not page.more:
            break
    assert found == turns(sent)


def test_what_is_cancelled_or_moved_is_not_where_it_was() -> None:
    desk = Desk()
    a, b, c = desk.send([b"a", b"b", b"c"], 50_000)
    assert listed(desk) == turns([a, b, c])
    desk.cancel(a)
    moved = desk.reschedule(b, 100_000).known.turn
    assert listed(desk) == [c.turn, moved]


def test_a_row_reports_size_and_attribute() -> None:
    desk = Desk()
    (a,) = desk.send([b"payload"], 50_000)
    (row,) = desk.listed().rows
    assert (row.key, row.size_bytes, row.attribute) == (ORDERS, 20 + len(b"payload"), None)
    assert desk.describe(a).pending == row


def test_by_the_key_of_a_message() -> None:
    desk = Desk()
    desk.send([b"a"], 50_000)
    desk.send([b"b"], 50_000, attribute=encode_attribute(key="customer-7"))
    assert [row.number for row in desk.listed(message_key=b"customer-7").rows] == [3]
    assert desk.listed(message_key=b"nobody").rows == []


def test_counts_between_edges_are_exact() -> None:
    dice = random.Random(5)
    desk = Desk()
    sent = []
    for _ in range(10):
        sent += desk.send(
            [b"x"] * 50, [dice.randrange(3_000_000) for _ in range(50)], key=dice.choice([ORDERS, BILLS])
        )
    desk.advance(200)
    gone = dice.sample([each for each in sent if each.due > desk.now_ms], 100)
    for each in gone:
        desk.cancel(each)
    desk.advance(100)
    left = [each for each in sent if each.due > desk.now_ms and each not in gone]
    edges = [desk.now_ms + step for step in (-500_000, 0, 1000, 70_000, 500_000, 2_000_000)]
    for keys in (None, lambda key: key == BILLS):
        wanted = [each for each in left if keys is None or keys(each.key)]
        found = desk.histogram(edges, keys)
        counts = [len([1 for each in wanted if low <= each.due < high]) for low, high in pairwise(edges)]
        assert (found.counts, found.pending) == (counts, len(wanted))


def test_of_a_topic_that_is_gone_nothing_waits() -> None:
    desk = Desk()
    desk.send([b"a"], 50_000)
    desk.targets.delete(16)
    desk.queue.topic_deleted(16)
    assert listed(desk) == []
    assert desk.histogram([0, 1 << 62]).pending == 0


def test_a_count_reads_each_bucket_once_however_many_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    week = 7 * 86_400_000
    sent = desk.send([b"%d" % n for n in range(400)], [week + n * 65_536 for n in range(400)])
    for handle in sent[::2]:
        desk.cancel(handle, turn=False)
    desk.turn()
    assert len(desk.listed().rows) == 200
    loads: list[object] = []
    load = Bucket.read_columns
    monkeypatch.setattr(Bucket, "read_columns", lambda self, files: loads.append(self) or load(self, files))
    edges = [0, sent[200].due, 1 << 62]
    assert desk.histogram(edges) == ([100, 100], 200)
    assert desk.histogram(edges, keys=lambda key: key == ORDERS).pending == 200
    assert desk.histogram([], keys=lambda key: key == BILLS) == ([], 0)
    assert len(loads) <= 6 * len(desk.buckets.live_buckets) < 60
