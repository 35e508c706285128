"""Offsets as checkpoints have them, and as users write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.spark.fake_logs import FakeLogs
from tfmq.errors import BadRequest, OffsetOutOfRange, UnknownTopic
from tfmq.spark.loss_policy import LossPolicy
from tfmq.spark.offsets import (
    BoundsByPartition,
    OffsetSpec,
    PartitionBounds,
    PartitionOffset,
    from_json,
    parse_assigned,
    parse_ending,
    parse_starting,
    partition_names,
    to_json,
)
from tfmq.spark.options import parse_options

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
    several: list[dict[str, Any]] = [{"orders": []}, {"orders": 1}, {"orders": ["0"]}, {"orders": [-1]}, {"a b": [0]}]
    for wrong in several:
        with pytest.raises(BadRequest, match="assign: "):
            parse_assigned(wrong)


def test_names_of_partitions_for_people() -> None:
    assert partition_names([("b", 1), ("a", 0)]) == "a-0, b-1"
    assert partition_names([("a", number) for number in range(5)]) == "a-0, a-1, a-2 and 2 more"


# Where queries begin and end, in the words of users.


@pytest.fixture
def logs() -> FakeLogs:
    """orders-0: offsets 50 to 200, times 1000 and from 100 on 2000; orders-1: empty."""
    found = FakeLogs()
    found.create("orders", 2)
    found.add("orders", 0, 10, ms=1000)
    found.add("orders", 0, 10, ms=2000)
    found.retain("orders", 0, 50)
    return found


def survey(logs: FakeLogs) -> BoundsByPartition:
    return {
        (each.topic, each.partition): PartitionBounds(each, logs.bounds(each)) for each in logs.partitions("orders")
    }


def begin(logs: FakeLogs, streaming: bool = True, fail: bool = True, **options: str) -> dict[int, int]:
    places = parse_starting(parse_options(options, "source", "both"), streaming)
    found = places.resolve(logs, survey(logs), LossPolicy(fail))
    return {key[1]: each.offset for key, each in found.items()}


def end(logs: FakeLogs, **options: str) -> dict[int, int]:
    places = parse_ending(parse_options(options, "source", "both"))
    found = places.resolve(logs, survey(logs), LossPolicy(True))
    return {key[1]: each.offset for key, each in found.items()}


def test_words(logs: FakeLogs) -> None:
    assert begin(logs, startingOffsets="earliest") == {0: 50, 1: 0}
    assert begin(logs, startingOffsets="latest") == begin(logs) == {0: 200, 1: 0}
    assert begin(logs, streaming=False) == {0: 50, 1: 0}
    assert end(logs) == end(logs, endingOffsets="latest") == {0: 200, 1: 0}


def test_offsets(logs: FakeLogs) -> None:
    assert begin(logs, startingOffsets='{"orders": {"0": 60, "1": -2}}') == {0: 60, 1: 0}
    assert begin(logs, startingOffsets='{"orders": {"0": -1, "1": 0, "incarnation": 1}}') == {0: 200, 1: 0}
    assert end(logs, endingOffsets='{"orders": {"0": 70, "1": -1}}') == {0: 70, 1: 0}


def test_times(logs: FakeLogs) -> None:
    assert begin(logs, startingTimestamp="1500", startingOffsetsByTimestampStrategy="latest") == {0: 100, 1: 0}
    each = '{"orders": {"0": 2001, "1": 0}}'
    found = begin(logs, startingOffsetsByTimestamp=each, startingOffsetsByTimestampStrategy="latest")
    assert found == {0: 200, 1: 0}
    assert end(logs, endingTimestamp="2000") == {0: 100, 1: 0}
    assert end(logs, endingOffsetsByTimestamp='{"orders": {"0": 9999, "1": 9999}}') == {0: 200, 1: 0}


def test_a_time_after_all_messages_is_refused_unless_configured_otherwise(logs: FakeLogs) -> None:
    with pytest.raises(BadRequest, match="startingTimestamp: nothing was appended to orders-0 at 2001 or later"):
        begin(logs, startingTimestamp="2001")


@pytest.mark.parametrize(
    ("offsets", "sentence"),
    [
        ('{"orders": {"0": 60}}', "does not have orders-1: name every partition"),
        ('{"orders": {"0": 60, "1": 0, "2": 0}}', "names orders-2, which this query does not read"),
        ('{"ordes": {"0": 0}}', r"names ordes-0, which this query does not read\. Did you mean 'orders'\?"),
        ('{"orders": {"0": 201, "1": 0}}', "orders-0 ends at 200, before 201"),
        ('{"orders": {"0": 65, "1": 0}}', "no message of orders-0 begins at 65; the next one does at 70"),
    ],
)
def test_offsets_that_make_no_sense_are_refused(logs: FakeLogs, offsets: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=f"startingOffsets:? .*{sentence}|startingOffsets: {sentence}"):
        begin(logs, startingOffsets=offsets)


def test_times_are_asked_for_as_times(logs: FakeLogs) -> None:
    with pytest.raises(BadRequest, match=r"every partition that is read with a time in ms since 1970\."):
        begin(logs, startingOffsetsByTimestamp='{"orders": {"0": 0}}')
    with pytest.raises(BadRequest, match="the time in orders-0 must be a whole number from 0 on, not -2"):
        begin(logs, startingOffsetsByTimestamp='{"orders": {"0": -2, "1": -2}}')


def test_offsets_of_another_topic_of_the_name_are_refused(logs: FakeLogs) -> None:
    with pytest.raises(UnknownTopic, match="offsets of another topic orders"):
        begin(logs, startingOffsets='{"orders": {"0": 60, "1": 0, "incarnation": 99}}')


def test_an_offset_whose_messages_are_gone_is_a_loss(logs: FakeLogs) -> None:
    offsets = '{"orders": {"0": 20, "1": 0}}'
    with pytest.raises(OffsetOutOfRange, match="messages of orders-0 from offset 20 to 50 are gone"):
        begin(logs, startingOffsets=offsets)
    assert begin(logs, fail=False, startingOffsets=offsets) == {0: 50, 1: 0}


def test_a_batch_neither_begins_at_the_end_nor_ends_at_the_beginning() -> None:
    for options in ({"startingOffsets": "latest"}, {"startingOffsets": '{"orders": {"0": -1}}'}):
        with pytest.raises(BadRequest, match="nothing to read after"):
            parse_starting(parse_options(options, "source", "both"), streaming=False)
    for options in ({"endingOffsets": "earliest"}, {"endingOffsets": '{"orders": {"0": -2}}'}):
        with pytest.raises(BadRequest, match="nothing to read before"):
            parse_ending(parse_options(options, "source", "both"))


def test_two_ways_to_begin_exclude_each_other() -> None:
    with pytest.raises(BadRequest, match="startingOffsets and startingTimestamp exclude each other"):
        parse_starting(
            parse_options({"startingOffsets": "latest", "startingTimestamp": "5"}, "source", "both"), streaming=True
        )


def test_a_stream_begins_at_the_end_unless_configured() -> None:
    assert parse_starting({}, streaming=True) == OffsetSpec("startingOffsets", -1)
