"""A consumer that takes everything there is."""

from typing import Any

import pytest

import tfmq.aio
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker() -> Any:
    with SimulatedBroker() as made:
        yield made


def test_it_takes_what_is_there_and_lets_no_time_go_on(broker: SimulatedBroker) -> None:
    broker.producer().send_many("orders", [str(number) for number in range(2000)]).result()
    consumer = broker.consumer("orders", group="billing")
    before = broker.clock.now
    assert [message.text for message in broker.drain(consumer)] == [str(number) for number in range(2000)]
    assert broker.drain(consumer) == []
    assert broker.clock.now == before


def test_what_a_handler_sends_to_the_same_topic_is_taken_too(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    consumer = broker.consumer("orders")
    producer.send("orders", "5")

    def handler(message: Any) -> None:
        if message.text != "0":
            producer.send("orders", str(int(message.text) - 1))

    assert [message.text for message in broker.drain(consumer, handler)] == [*"543210"]


def test_a_topic_that_was_made_after_the_last_look_for_it_is_waited_for(broker: SimulatedBroker) -> None:
    consumer = broker.consumer("orders")
    assert broker.drain(consumer) == []
    before = broker.clock.now
    assert broker.drain(consumer) == []
    assert broker.clock.now == before, "there is nothing to wait for"
    broker.producer().send("orders", "x").result()
    assert [message.text for message in broker.drain(consumer)] == ["x"]


def test_what_a_handler_raises_is_raised_and_its_message_is_not_acked(broker: SimulatedBroker) -> None:
    broker.producer().send_many("orders", ["good", "bad", "never"]).result()

    def handler(message: Any) -> None:
        if message.text == "bad":
            raise KeyError("no such order")

    consumer = broker.consumer("orders", group="billing")
    with pytest.raises(KeyError, match="no such order"):
        broker.drain(consumer, handler)
    consumer.close()
    again = broker.consumer("orders", group="billing")
    assert [message.text for message in broker.drain(again)] == ["bad", "never"]


def test_what_is_drained_is_acked(broker: SimulatedBroker) -> None:
    broker.producer().send_many("orders", ["one", "two"]).result()
    consumer = broker.consumer("orders", group="billing")
    broker.drain(consumer)
    consumer.close()
    assert broker.drain(broker.consumer("orders", group="billing")) == []


def test_a_topic_that_is_not_there_has_nothing(broker: SimulatedBroker) -> None:
    assert broker.drain(broker.consumer("nothing")) == []


def test_time_goes_on_only_while_it_cannot_read_yet(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "x").result()
    consumer = broker.consumer("orders")
    broker.fail_next("metadata", tfmq.Busy, times=3)
    before = broker.clock.monotonic()
    assert [message.text for message in broker.drain(consumer)] == ["x"]
    assert 0.1 < broker.clock.monotonic() - before < 1


def test_a_consumer_that_never_can_is_reported_after_its_time(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "x").result()
    consumer = broker.consumer("orders")
    broker.fail_next("metadata", tfmq.Busy, times=1000)
    before = broker.clock.monotonic()
    with pytest.raises(tfmq.TimedOut, match="could not read everything within 5 s"):
        broker.drain(consumer)
    assert broker.clock.monotonic() - before == pytest.approx(5, abs=0.01)


def test_what_another_member_of_the_group_has_is_not_drained_from_it(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "x").result()
    first, second = (broker.consumer("orders", group="billing") for _ in range(2))
    assert len(broker.drain(first)) == 1
    broker.producer().send("orders", "y").result()
    assert broker.drain(second) == []
    assert [message.text for message in broker.drain(first)] == ["y"]


def test_an_asyncio_consumer_is_not_taken_for_a_blocking_one(broker: SimulatedBroker) -> None:
    consumer: Any = tfmq.aio.Consumer(broker.servers, topics="orders")
    with pytest.raises(TypeError, match=r"await consumer\.poll"):
        broker.drain(consumer)
