"""Lists and counts from columns: in the order of turns, from any turn on, of chosen logs, like a list in memory."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.delay.bucket_rig import BILLS, DAY, HOUR, MINUTE, NOW, ORDERS, Bench
from tests.scale import scaled, seeded
from tfmq.delay.buckets.store import BucketRow
from tfmq.delay.queries import pending_histogram
from tfmq.delay.requests import LogFilter


@pytest.fixture(scope="module")
def bench() -> Bench:
    bench = Bench()
    generator = seeded("rows")
    for _ in range(4):
        for log_id in (ORDERS, BILLS, ORDERS):
            dues = [NOW + generator.randrange(1, generator.choice((50, MINUTE, HOUR, 5 * DAY))) for _ in range(20)]
            bench.arrive(*dues, log_id=log_id, absolute=log_id == BILLS)
        bench.spill()
    return bench


def listed(bench: Bench, first: tuple[int, int], end: int, logs: set[int] | None) -> list[tuple[int, int]]:
    turns = [(e.due, e.number) for e in bench.arrived.values() if logs is None or e.log_id in logs]
    return sorted(turn for turn in turns if turn >= first and turn[0] < end)


def test_a_row_says_all_of_its_message(bench: Bench) -> None:
    for row in bench.buckets.rows((0, 0), 1 << 63):
        each = bench.arrived[row.number]
        slot, position = row.locator >> 48, row.locator & (1 << 48) - 1
        assert row == BucketRow(each.due, each.number, each.log_id, row.locator)
        assert bench.buckets.read(slot, [position], [row.number]) == [each.record]


def test_lists_are_those_of_a_list_in_memory(bench: Bench) -> None:
    generator = seeded("lists")
    turns = listed(bench, (0, 0), 1 << 63, None)
    assert len(turns) == 240
    for _ in range(scaled(300)):
        first, last = generator.choice(turns), generator.choice(turns)
        logs = generator.choice([None, {ORDERS}, {BILLS}, {ORDERS, BILLS}, set(), {1}])
        found = [row[:2] for row in bench.buckets.rows(first, last[0], None if logs is None else logs.__contains__)]
        assert found == listed(bench, first, last[0], logs)


def test_a_list_reads_no_farther_than_it_is_asked(bench: Bench) -> None:
    reads = bench.disk.faults.counts["read"]
    next(bench.buckets.rows((0, 0), 1 << 63))
    few = bench.disk.faults.counts["read"] - reads
    list(bench.buckets.rows((0, 0), 1 << 63))
    assert bench.disk.faults.counts["read"] - reads > 3 * few


def histogram(bench: Bench, edges: list[int], keys: LogFilter | None = None) -> list[int]:
    """All of them are pending."""
    pending: Any = SimpleNamespace(may_have_cancelled=lambda low, high: False)
    return list(pending_histogram(bench.buckets, edges, keys, pending, 0).counts)


def test_counts_are_those_of_a_list_in_memory(bench: Bench) -> None:
    generator = seeded("counts")
    for _ in range(scaled(300)):
        edges = sorted({NOW + generator.randrange(-HOUR, 6 * DAY) for _ in range(generator.randrange(12))})
        logs = generator.choice([None, {ORDERS}, {BILLS}])
        expected = [len(listed(bench, (low, 0), high, logs)) for low, high in pairwise(edges)]
        keys = None if logs is None else logs.__contains__
        assert histogram(bench, edges, keys) == expected


def test_a_bucket_between_two_edges_is_not_read(bench: Bench) -> None:
    reads = bench.disk.faults.counts["read"]
    assert histogram(bench, [0, 1 << 63]) == [240]
    assert bench.disk.faults.counts["read"] == reads
