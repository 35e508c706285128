"""An event loop that ended while a name was being looked up left a client that never connected again."""

import asyncio

from tests.client.fake_broker import FakeBroker, listening
from tfmq.aio import Producer


def test_a_client_lives_on_in_the_next_loop() -> None:
    broker = FakeBroker()
    with listening(broker) as servers:
        producer = Producer(servers, timeout=5)

        async def begin() -> None:
            producer.send_nowait("orders", b"0")
            await asyncio.sleep(0)

        async def end() -> None:
            await producer.send("orders", b"1")
            await producer.close()

        asyncio.run(begin())
        asyncio.run(end())
    assert broker.payloads("orders") == [b"0", b"1"]


def test_a_look_up_that_was_cancelled_is_made_again() -> None:
    broker = FakeBroker()
    with listening(broker) as servers:

        async def story() -> None:
            async with Producer(servers, timeout=5) as producer:
                delivery = producer.send_nowait("orders", b"0")
                await asyncio.sleep(0)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await delivery

        asyncio.run(story())
    assert broker.payloads("orders") == [b"0"]
