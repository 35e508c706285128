"""The orders of orders.py with Twisted."""

from typing import assert_type

from twisted.internet.defer import Deferred
from twisted.internet.task import react

import tfmq.twisted
from examples.typed.orders import Order


async def program(reactor: object) -> None:
    codec = tfmq.codecs.pydantic(Order)
    async with tfmq.twisted.Producer(codec=codec) as producer:
        sending = producer.send("twisted-orders", Order(number=1, item="kettle"))
        assert_type(sending, Deferred[tfmq.SendResult])
        assert_type(await sending, tfmq.SendResult)
    async with tfmq.twisted.Consumer(topics="twisted-orders", codec=codec) as consumer:
        assert_type(consumer, tfmq.twisted.Consumer[Order])
        messages = await consumer.poll(timeout=10)
        assert_type(messages, list[tfmq.ReceivedMessage[Order]])
        print([message.value.item for message in messages])


def main() -> None:
    react(program)


if __name__ == "__main__":
    main()
