"""Offsets as checkpoints have them, and as users write them."""

import json
from typing import Any

import pytest

from tfmq.errors import BadRequest
from tfmq.spark.offsets import PartitionOffset, from_json, parse_assigned, partition_names, to_json

OFFSETS = {
    ("orders", 1): PartitionOffset(7, 123),
    ("orders", 0): PartitionOffset(7, 4096),
    ("audit", 10): PartitionOffset(3, 0),
}


def test_a_checkpoint_keeps_all_and_equal_ones_have_equal_texts() -> None:
    text = json.dumps(to_json(OFFSETS))
    assert text == '{"audit": {"10": 0, "incarnation": 3}, "orders": {"0": 4096, "1": 123, "incarnation": 7}}'
    assert from_json(json.loads(text), "it", low=0) == OFFSETS
    assert json.dumps(to_json(dict(reversed(OFFSETS.items())))) == text


def test_the_broker_stands_beside_the_incarnation() -> None:
    offsets = {("orders", 0): PartitionOffset(7, 4096, "9f0c")}
    assert json.dumps(to_json(offsets)) == '{"orders": {"0": 4096, "incarnation": 7, "broker": "9f0c"}}'
    assert from_json(to_json(offsets), "it") == offsets


@pytest.mark.parametrize(
    ("incarnation", "broker", "another"),
    [(7, "here", False), (8, "here", True), (7, "there", True), (7, "", False), (8, "", True)],
)
def test_offsets_of_another_topic(incarnation: int, broker: str, another: bool) -> None:
    assert PartitionOffset(7, 5, "here").is_of_another(incarnation, broker) == another
    assert not PartitionOffset(0, 5).is_of_another(incarnation, broker)


def test_partitions_are_in_the_order_of_numbers() -> None:
    found = to_json({("orders", number): PartitionOffset(1, number) for number in (10, 9, 2)})
    assert list(found["orders"]) == ["2", "9", "10", "incarnation"]


def test_a_user_need_not_know_incarnations() -> None:
    assert from_json({"orders": {"0": -2, "1": -1}}, "it") == {
        ("orders", 0): PartitionOffset(0, -2),
        ("orders", 1): PartitionOffset(0, -1),
    }


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"orders": 5}, "must have an object of partitions"),
        ({"orders": {}}, "must have an object of partitions"),
        ({"orders": {"first": 5}}, "'first' is no partition of orders"),
        ({"orders": {"-1": 5}}, "'-1' is no partition of orders"),
        ({"orders": {"0": "5"}}, "the place in orders-0 must be a whole number from -2 on, not '5'"),
        ({"orders": {"0": -3}}, "the place in orders-0 must be a whole number from -2 on, not -3"),
        ({"orders": {"0": True}}, "must be a whole number"),
        ({"orders": {"0": 1 << 63}}, "must be a whole number"),
        ({"orders": {"0": 1, "incarnation": "x"}}, "the incarnation of orders must be a whole number"),
        ({"orders": {"0": 1, "broker": 5}}, "the broker of orders must be a text, not 5"),
    ],
)
def test_what_is_wrong_is_named(value: Any, sentence: str) -> None:
    with pytest.raises(BadRequest, match=f"startingOffsets: .*{sentence}"):
        from_json(value, "startingOffsets")


def test_a_checkpoint_has_no_words_for_beginning_and_end() -> None:
    with pytest.raises(BadRequest, match="must be a whole number from 0 on, not -1"):
        from_json({"orders": {"0": -1}}, "The checkpoint", low=0)


def test_partitions_that_are_assigned() -> None:
    assert parse_assigned({"orders": [1, 0, 1]}) == (("orders", 0), ("orders", 1))
    several: list[dict[str, Any]] = [
        {"orders": []},
        {"orders": 1},
        {"orders": ["0"]},
        {"orders": [-1]},
        {"a b": [0]},
    ]
    for wrong in several:
        with pytest.raises(BadRequest, match="assign: "):
            parse_assigned(wrong)


def test_names_of_partitions_for_people() -> None:
    assert partition_names([("b", 1), ("a", 0)]) == "a-0, b-1"
    assert partition_names([("a", number) for number in range(5)]) == "a-0, a-1, a-2 and 2 more"
