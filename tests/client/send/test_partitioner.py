"""Selectors: where messages go, the same in every process and release."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import tfmq
from tfmq.client.connection.requests import Topic
from tfmq.client.send.partitioner import KeyHash, PartitionSelector, Random, RoundRobin, choose_partition, load_selector
from tfmq.errors import BadRequest, StorageStopped, UnknownPartition
from tfmq.message import Message, Partition
from tfmq.testing.broker import SimulatedBroker

FIVE = tuple(Partition("orders", number) for number in range(5))
# Golden: a key must never move, or its order is lost on the day of an upgrade.
GOLDEN = {b"": 0, b"a": 2, b"42": 3, b"order-1": 4, "Zürich": 3, b"\x00\xff": 4, "customer/7": 3}


def test_key_hash_is_what_it_always_was() -> None:
    found = {key: KeyHash().get_partition("orders", FIVE, Message(b"", key=key)).number for key in GOLDEN}
    assert found == GOLDEN


def test_key_hash_is_the_same_in_another_process() -> None:
    program = (
        "from tfmq.client.send.partitioner import *; from tfmq.message import *\n"
        "five = [Partition('orders', n) for n in range(5)]\n"
        "print([KeyHash().get_partition('o', five, Message(b'', key=f'k{n}')).number for n in range(50)])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    here = [KeyHash().get_partition("o", FIVE, Message(b"", key=f"k{n}")).number for n in range(50)]
    assert printed.stdout.strip() == str(here)


def test_text_and_its_bytes_are_the_same_key() -> None:
    for key in ("a", "Zürich"):
        texts = KeyHash().get_partition("o", FIVE, Message(b"", key=key))
        assert texts == KeyHash().get_partition("o", FIVE, Message(b"", key=key.encode()))


def test_keys_spread() -> None:
    counts = [0] * 5
    for number in range(1000):
        counts[KeyHash().get_partition("o", FIVE, Message(b"", key=f"key-{number}")).number] += 1
    assert min(counts) > 120


def test_round_robin_passes_over_what_takes_no_writes() -> None:
    some = (FIVE[0], FIVE[1]._replace(state="stopped"), FIVE[2])
    selector = RoundRobin()
    assert [selector.get_partition("o", some, Message(b"")).number for _ in range(4)] == [0, 2, 0, 2]
    with pytest.raises(StorageStopped, match="No partition of o takes writes"):
        selector.get_partition("o", some[1:2], Message(b""))


def test_round_robin_counts_each_topic_for_itself_and_minds_growth() -> None:
    selector = RoundRobin()
    assert selector.get_partition("a", FIVE[:1], Message(b"")).number == 0
    assert selector.get_partition("a", FIVE, Message(b"")).number == 0
    assert selector.get_partition("b", FIVE, Message(b"")).number == 0
    assert selector.get_partition("a", FIVE, Message(b"")).number == 1


def test_random_chooses_among_those_that_take_writes() -> None:
    some = (FIVE[0]._replace(state="stopped"), FIVE[1])
    assert Random().get_partition("o", some, Message(b"")).number == 1
    with pytest.raises(StorageStopped):
        Random().get_partition("o", some[:1], Message(b""))


def test_selectors_are_found_by_name_and_taken_as_they_are() -> None:
    assert isinstance(load_selector(None), KeyHash)
    assert isinstance(load_selector("round_robin"), RoundRobin)
    mine = Random()
    assert load_selector(mine) is mine
    with pytest.raises(BadRequest, match="key_hash, random, round_robin"):
        load_selector("nobody")
    with pytest.raises(BadRequest, match="get_partition"):
        load_selector(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        PartitionSelector()  # type: ignore[abstract]


def test_a_partition_that_is_named_is_taken_and_one_that_is_not_there_refused() -> None:
    topic = Topic("orders", 7, tuple(Partition("orders", number) for number in range(3)), {})
    assert choose_partition(KeyHash(), topic, Message(b"x", partition=2)) == 2
    for wrong in (-1, 3):
        with pytest.raises(UnknownPartition, match="partitions 0 to 2"):
            choose_partition(KeyHash(), topic, Message(b"x", partition=wrong))


def test_a_selector_is_asked_only_where_there_is_a_choice() -> None:
    class Never(PartitionSelector):
        def get_partition(self, topic, partitions, message):  # type: ignore[no-untyped-def]
            raise AssertionError("nothing to choose")

    topic = Topic("orders", 7, (Partition("orders", 0),), {})
    assert choose_partition(Never(), topic, Message(b"x", "k")) == 0
    two = topic._replace(partitions=(Partition("orders", 0), Partition("orders", 1)))
    chosen = [choose_partition(RoundRobin(), two, Message(b"x")) for _ in range(2)]
    assert chosen == [0, 0], "each selector counts for itself"


# Configured partitions, and never another one.


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
