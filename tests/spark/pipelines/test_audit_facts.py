"""Facts: what a walk tells is what is told again, whole, wherever it is split."""

from hypothesis import given
from hypothesis import strategies as st

from tfmq.spark.pipelines.audit_check import (
    APPEND,
    RUN,
    RUN_COUNT_MAX,
    FactCollector,
    concatenate_facts,
    make_facts,
    split_facts,
)

ROWS = st.lists(
    st.tuples(
        st.integers(0, (1 << 64) - 1), st.integers(0, 4), st.integers(1, 9), *[st.integers(0, 1 << 63)] * 3
    )
)


@given(rows=ROWS, parts=st.integers(1, 5))
def test_a_split_loses_nothing_and_keeps_a_producers_ids_together(
    rows: list[tuple[int, ...]], parts: int
) -> None:
    facts = make_facts(3, 4, [list(row) for row in rows])
    pieces = split_facts(facts, parts)
    again = concatenate_facts([piece for _, piece in pieces])
    assert sorted(zip(*(map(int, column) for column in again), strict=True)) == sorted(
        (3, row[1], row[0], row[2], 4, *row[3:]) for row in rows
    )
    homes: dict[int, set[int]] = {}
    for number, piece in pieces:
        for key in piece.key:
            homes.setdefault(int(key) >> 24, set()).add(number)
    assert all(len(numbers) == 1 for numbers in homes.values())


def test_runs_of_one_producer_become_one_although_others_are_between() -> None:
    collector = FactCollector(0, 7)
    for n in range(3):
        collector.add_run(50 << 24 | n * 10, 10, 1000 * n, 1000 * n + 500)
        collector.add_run(51 << 24 | n * 10, 9, 1000 * n + 500, 1000 * n + 1000)
    facts = collector.to_facts()
    rows = list(zip(facts.kind, facts.key, facts.count, facts.offset, facts.next, strict=True))
    assert rows[0] == (RUN, 50 << 24, 30, 0, 2500)
    assert rows[1:] == [(RUN, 51 << 24 | n * 10, 9, 1000 * n + 500, 1000 * n + 1000) for n in range(3)]
    assert set(facts.log) == {7}


def test_a_long_run_is_told_in_parts() -> None:
    collector = FactCollector(0, 0)
    for n in range(3):
        collector.add_run(50 << 24 | n * 40_000, 40_000, n, n + 1)
    assert list(collector.to_facts().count) == [40_000] * 3 and RUN_COUNT_MAX == 65_536


def test_blocks_of_one_append_are_one_fact() -> None:
    collector = FactCollector(0, 0)
    collector.add_append(9, 1000, 10, 0, 100)
    collector.add_append(9, 1000, 5, 100, 200)
    collector.add_append(9, 1010, 5, 200, 300)
    facts = collector.to_facts()
    rows = list(zip(facts.kind, facts.key, facts.count, facts.offset, facts.next, facts.extra, strict=True))
    assert rows == [(APPEND, 1000, 15, 0, 200, 9), (APPEND, 1010, 5, 200, 300, 9)]
