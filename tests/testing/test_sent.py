"""What a topic holds, read from its logs."""

import pytest

from tfmq.errors import StorageStopped
from tfmq.message import Message
from tfmq.testing.broker import SimulatedBroker, partition_messages, sent_messages


def test_it_gives_messages_with_everything_in_them() -> None:
    with SimulatedBroker() as broker:
        broker.producer().send("orders", "x", key="42", tag="new", properties={"n": "1"}).result()
        assert broker._server.engine is not None
        (message,) = sent_messages(broker._server.engine, "orders")
        assert (message.text, message.key, message.tag, message.properties) == ("x", "42", "new", {"n": "1"})
        assert message.born_at == message.appended_at == broker.clock.now
        assert (message.topic, message.partition, message.ordinal) == ("orders", 0, 0)


def test_many_partitions_are_given_in_the_order_of_appending_and_one_alone() -> None:
    with SimulatedBroker({"topics.partitions": 3}) as broker:
        producer = broker.producer()
        for number in range(9):
            producer.send("orders", str(number), partition=number % 3).result()
            broker.clock.advance(milliseconds=1)
        assert [message.text for message in broker.sent("orders")] == [*"012345678"]
        assert [message.text for message in broker.sent("orders", partition=1)] == ["1", "4", "7"]
        assert broker.sent("orders", partition=3) == []


def test_no_topic_has_no_messages() -> None:
    with SimulatedBroker() as broker:
        assert broker.sent("nothing") == []


def test_a_log_of_many_segments_is_read_to_its_end() -> None:
    with SimulatedBroker({"log.segment_bytes": 1 << 20}) as broker:
        payloads = [bytes([number]) * 100_000 for number in range(40)]
        broker.producer().send_many("orders", payloads).result()
        assert [message.payload for message in broker.sent("orders")] == payloads


def test_a_tombstone_is_a_message_without_payload() -> None:
    with SimulatedBroker() as broker:
        broker.producer().send("orders", Message(None, key="42")).result()
        assert [(message.key, message.payload) for message in broker.sent("orders")] == [("42", None)]


def test_a_partition_that_could_not_be_opened_is_said() -> None:
    with pytest.raises(StorageStopped, match="orders could not be opened: its disk"):
        list(partition_messages("orders", "its disk is gone"))


def test_of_a_stopped_partition_it_gives_what_is_surely_there() -> None:
    with SimulatedBroker() as broker:
        producer = broker.producer()
        producer.send("orders", "forced").result()
        broker.disk.faults.fail("force", path="orders-0")
        broker.disk.faults.fail("sync_file", path="orders-0")
        with pytest.raises(StorageStopped):
            producer.send("orders", "not forced").result()
        assert [message.text for message in broker.sent("orders")] == ["forced"]
