"""Orders as values of a type of one's own, over JSON, msgpack and a codec that is three lines long."""

from typing import Any, NamedTuple, assert_type

from pydantic import BaseModel

import tfmq


class Order(BaseModel):
    number: int
    item: str


class Payment(NamedTuple):
    order: int
    cents: int


class PaymentCodec:
    """Any object with these two methods is a codec."""

    def encode(self, value: Payment) -> bytes:
        return f"{value.order} {value.cents}".encode()

    def decode(self, data: bytes) -> Payment:
        order, cents = map(int, bytes(data).split())
        return Payment(order, cents)


def book(message: tfmq.ReceivedMessage[Order]) -> str:
    """A handler that takes orders."""
    assert_type(message.value, Order)
    assert_type(message.properties, dict[str, str])
    return f"{message.value.item} for {message.key!r}"


def orders() -> list[str]:
    """A consumer with a codec gives messages with values of its type."""
    with tfmq.Producer(codec=tfmq.codecs.pydantic(Order)) as producer:
        delivery = producer.send("typed-orders", Order(number=1, item="kettle"), key="1")
        assert_type(delivery, tfmq.Delivery)
        assert_type(delivery.result(), tfmq.SendResult)
    with tfmq.Consumer(topics="typed-orders", codec=tfmq.codecs.pydantic(Order)) as consumer:
        assert_type(consumer, tfmq.Consumer[Order])
        messages = consumer.poll(timeout=10)
        assert_type(messages, list[tfmq.ReceivedMessage[Order]])
        return [book(message) for message in messages]


def payments() -> list[Payment]:
    """A codec of one's own says its type as well."""
    with tfmq.Producer(codec=PaymentCodec()) as producer:
        producer.send("typed-payments", Payment(1, 2000)).result()
    consumer = tfmq.Consumer(topics="typed-payments", codec=PaymentCodec())
    assert_type(consumer, tfmq.Consumer[Payment])
    with consumer:
        for message in consumer:
            assert_type(message.value, Payment)
            return [message.value]
    return []


def both() -> list[Order | Payment]:
    """One client for two topics: a codec for each."""
    codecs: dict[str, tfmq.codecs.Codec[Any]] = {
        "typed-orders": tfmq.codecs.pydantic(Order),
        "typed-payments": PaymentCodec(),
    }
    with tfmq.Producer(codec=codecs) as producer:
        producer.send("typed-orders", Order(number=2, item="cup")).result()
        producer.send("typed-payments", Payment(2, 500)).result()
    consumer: tfmq.Consumer[Order | Payment] = tfmq.Consumer(topics=list(codecs), codec=codecs)
    with consumer:
        messages: list[tfmq.ReceivedMessage[Order | Payment]] = []
        while not messages or consumer.lag():  # a poll may give those of one topic only, in any order of the topics
            found = consumer.poll(timeout=10)
            assert_type(found, list[tfmq.ReceivedMessage[Order | Payment]])
            messages += found
        return [message.value for message in sorted(messages, key=lambda message: message.topic)]


def anything() -> list[Any]:
    """JSON is anything; without a codec there is text, and bytes, which are None for a tombstone."""
    with tfmq.Consumer(topics="typed-orders", codec=tfmq.codecs.json) as consumer:
        found = [message.value for message in consumer.poll(timeout=10)]
        assert_type(found, list[Any])
    with tfmq.Consumer(topics="typed-orders") as plain:
        for message in plain.poll(timeout=10):
            assert_type(message.payload, bytes | None)
            assert_type(message.text, str)
    return found


def main() -> None:
    print(orders(), payments(), both(), anything())


if __name__ == "__main__":
    main()
