"""The orders of orders.py with asyncio."""

import asyncio
from typing import assert_type

import tfmq.aio
from examples.typed.orders import Order


async def program() -> list[str]:
    codec = tfmq.codecs.pydantic(Order)
    async with tfmq.aio.Producer(codec=codec) as producer:
        assert_type(await producer.send("async-orders", Order(number=1, item="kettle")), tfmq.SendResult)
        delivery = producer.send_nowait("async-orders", Order(number=2, item="teapot"))
        assert_type(await delivery, tfmq.SendResult)
        async with producer.transaction() as tx:
            assert_type(tx, tfmq.aio.Transaction)
            await tx.send("async-orders", Order(number=3, item="toaster"))
    found: list[str] = []
    async with tfmq.aio.Consumer(topics="async-orders", codec=codec) as consumer:
        assert_type(consumer, tfmq.aio.Consumer[Order])
        async for message in consumer:
            assert_type(message, tfmq.ReceivedMessage[Order])
            found.append(message.value.item)
            if len(found) == 3:
                break
    return found


def main() -> None:
    print(asyncio.run(program()))


if __name__ == "__main__":
    main()
