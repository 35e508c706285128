"""Tasks over one connection in one event loop."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.client.fake_broker import CUT, HOLD, FakeBroker, listening
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.operation import Event
from tfmq.errors import Abandoned, Closed, ConnectionFailed, NotAllowed
from tfmq.protocol.commands import Metadata, Ping

SECONDS = 20.0


class Client:
    def __init__(self, servers: str) -> None:
        self.link = ClientConnection(parse_servers(servers), time.monotonic)
        self.driver = AsyncDriver(self.link)

    async def ping(self) -> int:
        return int((await self.driver.run(request(self.link, Ping(), seconds=SECONDS))).time_ms)


def play(story: Callable[[Client, FakeBroker], Awaitable[Any]], servers: str | None = None) -> None:
    """Run a coroutine with a client of a fake broker, bounded. Nothing may go wrong in the loop beside it."""
    broker = FakeBroker()
    beside: list[dict[str, Any]] = []
    with listening(broker) as address:
        client = Client(servers or address)

        async def bounded() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: beside.append(context))
            try:
                await asyncio.wait_for(story(client, broker), SECONDS)
            finally:
                await client.driver.close()

        asyncio.run(bounded())
    assert beside == []


def test_tasks_share_a_connection() -> None:
    async def story(client: Client, broker: FakeBroker) -> None:
        assert all(await asyncio.gather(*[client.ping() for _ in range(100)]))
        assert len(broker.sessions) == 1

    play(story)


def test_a_cancelled_task_leaves_the_client_usable() -> None:
    async def story(client: Client, broker: FakeBroker) -> None:
        await client.ping()
        broker.plan(Ping, HOLD)
        task = asyncio.create_task(client.ping())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not client.link.has_pending_requests
        broker.release()
        assert await client.ping() > 0
        assert client.link.connection_count == 1

    play(story)


def test_a_broken_connection_is_made_anew() -> None:
    async def story(client: Client, broker: FakeBroker) -> None:
        broker.plan(Ping, CUT, None, CUT)
        assert [await client.ping() > 0 for _ in range(4)] == [True] * 4
        assert client.link.connection_count == 3

    play(story)


def test_timers_and_flags() -> None:
    async def story(client: Client, broker: FakeBroker) -> None:
        flag = Event()
        client.driver.call_later(0.02, lambda: client.driver.set_event(flag))
        assert await client.driver.wait((flag,))
        assert not await client.driver.wait((Event(),), 0.01)
        other = Event()
        threading.Timer(0.05, client.driver.set_event, (other,)).start()
        assert await client.driver.wait((other,), SECONDS)

    play(story)


@pytest.mark.usefixtures("impatient_clients")
def test_nothing_there_is_reported() -> None:
    async def story(client: Client, broker: FakeBroker) -> None:
        with pytest.raises(ConnectionFailed, match="Nothing listens"):
            await client.ping()

    play(story, "127.0.0.1:1")


def test_large_requests_and_replies() -> None:
    async def story(client: Client, broker: FakeBroker) -> None:
        names = [f"topic-{number:0240d}" for number in range(800)]
        asked = [client.driver.run(request(client.link, Metadata(names, True))) for _ in range(20)]
        assert [len(reply.topics) for reply in await asyncio.gather(*asked)] == [800] * 20

    play(story)


def test_close_fails_what_waits() -> None:
    async def story(client: Client, broker: FakeBroker) -> None:
        broker.plan(Ping, HOLD)
        task = asyncio.create_task(client.ping())
        await asyncio.sleep(0.05)
        await client.driver.close()
        with pytest.raises(Abandoned):
            await task
        with pytest.raises(Closed):
            await client.ping()

    play(story)


def test_a_client_belongs_to_one_loop_but_outlives_a_closed_one() -> None:
    with listening(FakeBroker()) as servers:
        client = Client(servers)
        assert asyncio.run(asyncio.wait_for(client.ping(), SECONDS))
        assert asyncio.run(asyncio.wait_for(client.ping(), SECONDS))

        async def elsewhere() -> None:
            await client.ping()
            raised: list[BaseException] = []

            def other() -> None:
                try:
                    asyncio.run(client.ping())
                except NotAllowed as error:
                    raised.append(error)

            await asyncio.to_thread(other)
            with pytest.raises(NotAllowed, match="another event loop"):
                await asyncio.to_thread(client.driver.check_caller)  # a thread without a loop
            assert len(raised) == 1
            assert await client.ping()
            await client.driver.close()

        # In debug mode the loop refuses calls of other threads, too: none may be left as scheduled.
        asyncio.run(asyncio.wait_for(elsewhere(), SECONDS), debug=True)
