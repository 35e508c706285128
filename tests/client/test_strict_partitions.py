"""Configured partitions, and never another one."""

from typing import Any

import pytest

import tfmq
from tfmq.client.connection.requests import Topic
from tfmq.client.send.partitioner import choose_partition
from tfmq.message import Message, Partition
from tfmq.testing.broker import SimulatedBroker


def topic(count: int, down: int = -1) -> Topic:
    states = ["writable" if number != down else "stopped" for number in range(count)]
    return Topic("orders", 1, tuple(Partition("orders", n, state) for n, state in enumerate(states)), {})


def test_a_key_has_one_of_them_and_without_keys_they_take_turns() -> None:
    selector = tfmq.StrictPartitions({"orders": [4, 1]})
    of_keys = {choose_partition(selector, topic(6), Message(b"", key=f"{number}")) for number in range(50)}
    assert of_keys == {1, 4}
    chosen = [choose_partition(selector, topic(6), Message(b"", key="k")) for _ in range(5)]
    assert len(set(chosen)) == 1
    assert [choose_partition(selector, topic(6), Message(b"")) for _ in range(4)] == [4, 1, 4, 1]


def test_one_that_is_down_is_chosen_all_the_same() -> None:
    selector = tfmq.StrictPartitions({"orders": [1]})
    assert choose_partition(selector, topic(3, down=1), Message(b"")) == 1
    two = tfmq.StrictPartitions({"orders": [1, 2]})
    messages = [Message(b"", key=f"{number}") for number in range(20)]
    of_keys = [choose_partition(two, topic(3, down=1), each) for each in messages]
    assert of_keys == [choose_partition(two, topic(3), each) for each in messages] and 1 in of_keys


@pytest.mark.parametrize("message", [Message(b"", partition=2), Message(b"", partition=2, key="k")])
def test_a_message_for_another_one_is_refused(message: Message) -> None:
    with pytest.raises(tfmq.UnknownPartition, match="not configured"):
        choose_partition(tfmq.StrictPartitions({"orders": [0, 1]}), topic(3), message)


def test_a_topic_with_one_partition_is_asked_about_too() -> None:
    with pytest.raises(tfmq.UnknownPartition, match="0 to 0, not 1"):
        choose_partition(tfmq.StrictPartitions({"orders": [1]}), topic(1), Message(b""))


def test_a_topic_that_is_not_configured_is_refused() -> None:
    with pytest.raises(tfmq.BadRequest, match="orders is not among the topics"):
        choose_partition(tfmq.StrictPartitions({"others": [1]}), topic(1), Message(b""))


@pytest.mark.parametrize("numbers", [[], 1, "1", [-1], [True], ["0"], [0.5], None, {0}])
def test_numbers_are_numbers(numbers: Any) -> None:
    with pytest.raises(tfmq.BadRequest, match="list of numbers"):
        tfmq.StrictPartitions({"orders": numbers})


def test_a_partition_stands_there_once() -> None:
    with pytest.raises(tfmq.BadRequest, match="is listed twice"):
        tfmq.StrictPartitions({"orders": [0, 0]})


def test_without_a_store_a_send_to_one_that_takes_no_writes_fails() -> None:
    with SimulatedBroker() as broker:
        producer = broker.producer(selector=tfmq.StrictPartitions({"orders": [0]}))
        producer.send("orders", "0").result()
        broker.fail_next("send", tfmq.StorageStopped)
        with pytest.raises(tfmq.StorageStopped):
            producer.send("orders", "1").result()


@pytest.mark.parametrize("partitions", ["orders", {}, None, [("orders", [0])], {"a b": [0]}, {5: [0]}])
def test_topics_have_their_partitions(partitions: Any) -> None:
    with pytest.raises(tfmq.BadRequest):
        tfmq.StrictPartitions(partitions)
