"""Limits shared among partitions, ranges shared among tasks.

What must hold of shares, whatever waits: the sum is the limit or all that waits, nobody gets more than waits, and while
the limit is as large as the number of those who wait, none of them gets nothing.
"""

from hypothesis import example, given
from hypothesis import strategies as st

from tfmq.spark.planner import SMALL_RANGE_BYTES, group_ranges, share_limit
from tfmq.spark.ranges import OffsetRange, PartitionLog


@given(
    st.dictionaries(st.integers(0, 99), st.integers(0, 1 << 40), max_size=30),
    st.integers(1, 1 << 41),
    st.integers(0, 1000),
)
@example(dict.fromkeys(range(5), 10), 2, 3)
@example({0: 1, 1: 1 << 40}, 2, 0)
@example({0: 1, 1: 1 << 40, 2: 0}, 100, 0)
def test_shares(waiting: dict[int, int], limit: int, turn: int) -> None:
    found = share_limit(waiting, limit, turn)
    assert sum(found.values()) == min(limit, sum(waiting.values()))
    assert all(0 < amount <= waiting[name] for name, amount in found.items())
    if limit >= len([amount for amount in waiting.values() if amount]):
        assert found.keys() == {name for name, amount in waiting.items() if amount}


def test_a_share_is_in_proportion() -> None:
    found = share_limit({"a": 100_000, "b": 900_000}, 1000)
    assert found["a"] + found["b"] == 1000
    assert abs(found["a"] - 100) <= 1


def test_who_gets_nothing_gets_something_in_another_turn() -> None:
    waiting = dict.fromkeys("abcde", 10)
    got = {name for turn in range(5) for name in share_limit(waiting, 2, turn)}
    assert got == set("abcde")


def ranges(*sizes: int) -> list[OffsetRange]:
    return [OffsetRange(PartitionLog("t", number, 1, 1), 0, size) for number, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 2 * SMALL_RANGE_BYTES), max_size=20))
def test_tasks_have_all_ranges_in_order(sizes: list[int]) -> None:
    tasks = group_ranges(ranges(*sizes))
    assert [each for task in tasks for each in task] == ranges(*sizes)
    assert all(len(task) == 1 or sum(each.end for each in task) <= SMALL_RANGE_BYTES for task in tasks)


def test_small_ranges_are_one_task() -> None:
    assert len(group_ranges(ranges(*[1000] * 64))) == 1
