"""What a user names, and what that means with the topics that are there."""

import re
from typing import Any

import pytest

from tfmq.client.consumer.options import Subscription
from tfmq.errors import BadRequest
from tfmq.offsets.storage import PartitionName
from tfmq.protocol.commands import PartitionRow, TopicRow


def row(name: str, partitions: int, incarnation: int = 7) -> TopicRow:
    return TopicRow(name, incarnation, [PartitionRow(n, "open") for n in range(partitions)], {})


ROWS = [row("a", 2), row("b", 3, 8)]


def wanted(topics: Any = None, partitions: Any = None) -> list[str]:
    return [str(name) for name in Subscription.from_arguments(topics, partitions).subscribed_partitions(ROWS)]


def test_topics_patterns_and_partitions() -> None:
    assert wanted("a") == ["a-0", "a-1"]
    assert wanted(["b", "a"]) == ["a-0", "a-1", "b-0", "b-1", "b-2"]
    assert wanted(re.compile("[b-z]")) == ["b-0", "b-1", "b-2"]
    assert wanted(["a", "b"], [1]) == ["a-1", "b-1"]
    assert wanted(None, [("a", 0), ("b", 2)]) == ["a-0", "b-2"]


def test_each_partition_comes_with_the_incarnation_of_its_topic() -> None:
    assert Subscription.from_arguments("b", None).subscribed_partitions(ROWS)[PartitionName("b", 0)] == 8


def test_a_pattern_must_match_the_whole_name() -> None:
    assert Subscription.from_arguments(re.compile("a"), None).subscribed_partitions([row("ab", 1)]) == {}


def test_what_is_asked_and_what_is_missing() -> None:
    subscription = Subscription.from_arguments(["x", "a"], None)
    assert subscription.topics_to_request() == ["a", "x"]
    assert subscription.missing_names(subscription.subscribed_partitions(ROWS)) == ["x"]
    single = Subscription.from_arguments(None, [("a", 1), ("a", 9)])
    assert single.missing_names(single.subscribed_partitions(ROWS)) == ["a-9"]
    assert Subscription.from_arguments(re.compile("x"), None).topics_to_request() is None


@pytest.mark.parametrize(
    ("topics", "partitions"),
    [
        (None, None),
        ([], None),
        ("", None),
        ("a/b", None),
        ("..", None),
        (["a", 5], None),
        ("a", []),
        ("a", [-1]),
        ("a", [("a", 1)]),
        (None, []),
        (None, [1]),
        (None, [("a", "1")]),
        (None, [("a", True)]),
        (5, None),
        ([[]], None),
        (re.compile(b"a"), None),
        ("a", 5),
        ("a", "0"),
        (None, 5),
        (None, "ab"),
        (None, [None]),
    ],
)
def test_what_names_nothing_is_refused(topics: Any, partitions: Any) -> None:
    with pytest.raises(BadRequest):
        Subscription.from_arguments(topics, partitions)
