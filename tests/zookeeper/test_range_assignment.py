"""Ranges of partitions: the seed's algorithm, of everybody alike."""

import pytest

from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.group_coordinator import range_of


@pytest.mark.parametrize(
    ("partitions", "members", "lengths"),
    [(10, 1, [10]), (10, 3, [4, 3, 3]), (10, 4, [3, 3, 2, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0])],
)
def test_item_30_partitions_are_cut_into_ranges(partitions: int, members: int, lengths: list[int]) -> None:
    names = {f"c{number}": ["orders"] for number in range(members)}
    shares = [sorted(range_of(name, names, {"orders": range(partitions)})) for name in sorted(names)]
    assert [len(share) for share in shares] == lengths
    assert [name.partition for share in shares for name in share] == list(range(partitions))


def test_each_topic_is_shared_by_those_that_read_it() -> None:
    members = {"a": ["orders"], "b": ["orders", "payments"], "c": ["refunds"]}
    partitions = {"orders": [1, 0], "payments": [0]}
    assert range_of("a", members, partitions) == {PartitionName("orders", 0)}
    assert range_of("b", members, partitions) == {PartitionName("orders", 1), PartitionName("payments", 0)}
    assert range_of("c", members, partitions) == frozenset()
