"""Callers over one connection in one reactor, on real sockets."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from inspect import signature
from typing import Any

import pytest
from twisted.internet.asyncioreactor import AsyncioSelectorReactor
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, gatherResults
from twisted.internet.pollreactor import PollReactor
from twisted.internet.selectreactor import SelectReactor
from twisted.internet.threads import deferToThreadPool

from tests import reactor as rig
from tests.client.fake_broker import CUT, HOLD, FakeBroker, listening
from tests.reactor import pause
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request
from tfmq.client.drivers.twisted import DeferredDriver, deferred, start_deferred
from tfmq.client.operation import Event
from tfmq.errors import Abandoned, Closed, ConnectionFailed, NotAllowed
from tfmq.protocol.commands import Ping

SECONDS = 20.0


class Client:
    def __init__(self, servers: str, reactor: Any) -> None:
        self.link = ClientConnection(parse_servers(servers), time.monotonic)
        self.driver = DeferredDriver(self.link)
        self.driver.reactor = reactor

    @deferred
    async def ping(self, seconds: float = SECONDS) -> int:
        return int((await self.driver.run(request(self.link, Ping(), seconds=seconds))).time_ms)


Story = Callable[[Client, FakeBroker, Any], Coroutine[Any, Any, Any]]


def play(story: Story, servers: str | None = None) -> None:
    broker = FakeBroker()
    with listening(broker) as address:

        async def whole(reactor: Any) -> None:
            client = Client(servers or address, reactor)
            try:
                await story(client, broker, reactor)
            finally:
                await client.driver.close()
                left = set(reactor.getReaders()) | set(reactor.getWriters())
                assert left == set(reactor._internalReaders)

        rig.play(whole)


def test_callers_share_a_connection() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        assert all(await gatherResults([client.ping() for _ in range(100)]))
        assert len(broker.sessions) == 1

    play(story)


def test_a_cancelled_caller_leaves_the_client_usable() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        await client.ping()
        broker.plan(Ping, HOLD)
        asked = client.ping()
        await pause(reactor, 0.05)
        asked.cancel()
        with pytest.raises(CancelledError):
            await asked
        broker.release()
        assert await client.ping() > 0
        assert len(broker.sessions) == 1

    play(story)


def test_a_broken_connection_is_made_again() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        await client.ping()
        broker.plan(Ping, CUT)
        assert await client.ping() > 0
        assert client.link.connection_count == 2

    play(story)


def test_no_broker_is_an_error() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        with pytest.raises(ConnectionFailed, match="start tfmq-server"):
            await client.ping(0.3)

    play(story, "127.0.0.1:1")


def test_an_unknown_name_is_an_error() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        with pytest.raises(ConnectionFailed, match="cannot be looked up"):
            await client.ping(0.3)

    play(story, "nobody.invalid:1234")


def test_closing_fails_what_is_open() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        await client.ping()
        broker.plan(Ping, HOLD)
        asked = client.ping()
        await pause(reactor, 0.05)
        await client.driver.close()
        with pytest.raises((Closed, Abandoned)):
            await asked

    play(story)


def test_waiting_ends_in_time_or_when_one_is_done() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        first, second = Event(), Event()
        assert await client.driver.wait((first, second), 0.01) is False
        reactor.callLater(0.01, second.complete)
        assert await client.driver.wait((first, second), 9 * SECONDS) is True
        assert await client.driver.wait((first, second)) is True
        assert (first.callbacks, second.callbacks) == ([], []), "nothing is left behind"
        left = [each.getTime() - reactor.seconds() for each in reactor.getDelayedCalls()]
        assert max(left) < 2 * SECONDS, "nor a timer"

    play(story)


def test_who_waited_goes_on_outside_of_what_woke_it() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        flag, order = Event(), list[str]()

        async def wait() -> None:
            await client.driver.wait((flag,), SECONDS)
            order.append("woken")

        waiting = ensureDeferred(wait())
        flag.complete()
        order.append("settled")
        await waiting
        assert order == ["settled", "woken"]

    play(story)


def test_a_flag_is_raised_from_another_thread() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        flag, here = Event(), list[int]()
        flag.add_done_callback(lambda _: here.append(threading.get_ident()))
        thread = threading.Thread(target=lambda: client.driver.set_event(flag))
        thread.start()
        assert await client.driver.wait((flag,), SECONDS)
        thread.join()
        assert here == [threading.get_ident()], "what waits for it goes on in the reactor's own thread"

    play(story)


def test_work_is_done_in_another_thread_and_its_end_reported_in_the_reactor() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        reported: list[Any] = []
        for work in (threading.get_ident, lambda: 1 // 0):
            over: Deferred[None] = Deferred()

            def done(result: Any, error: BaseException | None, over: Deferred[None] = over) -> None:
                reported.append((result, error, threading.get_ident()))
                over.callback(None)

            client.driver.run_in_threads(work, done)
            await over
        assert reported[0][0] != threading.get_ident() == reported[0][2]
        assert isinstance(reported[1][1], ZeroDivisionError)

    play(story)


def test_another_thread_is_refused_with_a_sentence() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        def ask() -> None:
            failed: list[Any] = []
            client.ping().addErrback(lambda failure: failed.append(failure.value))
            raise failed[0]

        with pytest.raises(NotAllowed, match="callFromThread"):
            await deferToThreadPool(reactor, reactor.getThreadPool(), ask)

    play(story)


def test_timers_run_in_the_reactor() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        flag = Event()
        client.driver.call_later(0.01, flag.complete)
        client.driver.call_later(0.0, lambda: None).cancel()
        assert await client.driver.wait((flag,), SECONDS)

    play(story)


def test_what_is_begun_reports_its_end() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        ends: list[BaseException | None] = []

        async def wrong() -> None:
            raise KeyError("mine")

        start_deferred(pause(reactor, 0), ends.append)
        start_deferred(wrong(), ends.append)
        await pause(reactor, 0.01)
        assert [type(each) for each in ends] == [KeyError, type(None)]

    play(story)


@pytest.mark.parametrize("kind", ["select", "poll", "asyncio"])
def test_every_kind_of_reactor_does(kind: str) -> None:
    loop = asyncio.new_event_loop()
    kinds = {"select": SelectReactor, "poll": PollReactor, "asyncio": partial(AsyncioSelectorReactor, loop)}

    async def story(reactor: Any) -> None:
        client = Client(servers, reactor)
        assert all(await gatherResults([client.ping() for _ in range(20)]))
        broker.plan(Ping, CUT)
        assert await client.ping() > 0
        assert client.link.connection_count == 2
        await client.driver.close()

    broker = FakeBroker()
    with listening(broker) as servers:
        rig.play(story, kind=kinds[kind])
    loop.close()


def test_a_method_keeps_its_parameters_and_gives_a_deferred() -> None:
    reported = signature(Client.ping)
    assert list(reported.parameters) == ["self", "seconds"]
    assert reported.return_annotation == "Deferred[int]"


def test_a_forked_child_leaves_the_parents_connection_alone() -> None:
    async def story(client: Client, broker: FakeBroker, reactor: Any) -> None:
        await client.ping()
        child = os.fork()
        if not child:
            fresh = client.driver.channel.socket is None and client.link.state != "ready"
            os._exit(0 if fresh else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await client.ping() > 0
        assert (client.link.connection_count, len(broker.sessions)) == (1, 1)

    play(story)
