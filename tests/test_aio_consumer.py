"""The asyncio face: work for storages in threads, and an end that is always reached."""

import asyncio
import threading
from typing import Any

import pytest

from tfmq.aio_consumer import Consumer
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.errors import Closed, ConnectionFailed


async def worked(work: Any) -> tuple[Any, BaseException | None, bool]:
    """What came of `work`, and whether it ran in another thread."""
    loop = asyncio.get_running_loop()
    driver = AsyncDriver(ClientConnection(parse_servers("127.0.0.1:1"), loop.time))
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    threads = []

    def noted() -> Any:
        threads.append(threading.current_thread())
        return work()

    driver.run_in_threads(noted, lambda result, error: ended.set_result((result, error)))
    result, error = await asyncio.wait_for(ended, 10)
    await driver.close()
    return result, error, threads[0] is not threading.current_thread()


def test_work_is_done_in_another_thread_and_its_end_reported_in_the_loop() -> None:
    assert asyncio.run(worked(lambda: 42)) == (42, None, True)


def test_what_the_work_raises_is_handed_on() -> None:
    def fail() -> None:
        raise OSError("planted")

    result, error, _ = asyncio.run(worked(fail))
    assert result is None
    assert str(error) == "planted"


def test_a_broker_that_is_not_there_is_reported_and_closing_works_all_the_same() -> None:
    async def program() -> None:
        async with Consumer("127.0.0.1:1", topics="orders", group="g") as consumer:
            with pytest.raises(ConnectionFailed):
                await consumer.poll(30.0)
        await consumer.close()
        with pytest.raises(Closed):
            await consumer.poll()

    asyncio.run(asyncio.wait_for(program(), 30))
