"""Closing always ends: in every API variant, whatever became of the broker, with a full buffer, and with a caller
who waits for room in it; and making a client needs neither a broker nor an event loop."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tfmq
from tests import reactor as rig
from tests.e2e import neighbours
from tfmq import aio, twisted
from tools.rigs.live_server import LiveServer

SECONDS = 60.0
CLOSE_SECONDS = 0.3
BOUND_SECONDS = 12.0
"""Three clients, each with its time, on a busy machine."""
SENDERS = 12
PAYLOAD = b"x" * 8192
BUFFER_BYTES = 1 << 15
"""Room for a few of them."""

FACES = {"blocking": tfmq, "asyncio": aio, "twisted": twisted}


class Clients:
    """One of each kind, of one face."""

    def __init__(self, face: str, servers: str, topic: str, **where: Any) -> None:
        made: Any = FACES[face]
        self.face, self.topic = face, topic
        self.producer = made.Producer(servers, timeout=SECONDS, buffer_bytes=BUFFER_BYTES, **where)
        self.consumer = made.Consumer(servers, topics=topic, group=topic, timeout=CLOSE_SECONDS, **where)
        self.admin = made.Admin(servers, timeout=SECONDS, **where)
        self.waiting: list[Any] = []

    async def reported(self, value: Any) -> Any:
        """What a call comes to."""
        if self.face != "blocking":
            return await value
        return value.result(SECONDS) if isinstance(value, tfmq.Delivery) else value

    async def use(self) -> None:
        await self.reported(self.producer.send(self.topic, "x"))
        assert await self.reported(self.consumer.poll(SECONDS))
        await self.reported(self.admin.status())

    def fill(self) -> None:
        """More than the buffer takes, each message by a caller that waits for it."""
        for _ in range(SENDERS):
            if self.face == "blocking":
                thread = threading.Thread(target=self.send, daemon=True)
                thread.start()
                self.waiting.append(thread)
            else:
                sent: Any = self.producer.send(self.topic, PAYLOAD)
                self.waiting.append(asyncio.ensure_future(sent) if self.face == "asyncio" else sent)

    def send(self) -> None:
        with contextlib.suppress(tfmq.TfmqError):
            self.producer.send(self.topic, PAYLOAD).result(SECONDS)

    async def close(self) -> None:
        for call in (lambda: self.producer.close(CLOSE_SECONDS), self.consumer.close, self.admin.close):
            with contextlib.suppress(tfmq.TfmqError):
                await self.reported(call())
        for each in self.waiting:
            if isinstance(each, threading.Thread):
                each.join(SECONDS)
                assert not each.is_alive()
            else:
                with pytest.raises(tfmq.TfmqError):
                    await each


def in_its_world(face: str, story: Callable[..., Any]) -> None:
    """Run `story(**where)` where clients of that face live."""
    if face == "twisted":
        rig.play(lambda reactor: story(reactor=reactor))
    else:
        asyncio.run(story())


@contextlib.contextmanager
def killed(broker: LiveServer) -> Iterator[None]:
    broker.kill()
    try:
        yield
    finally:
        broker.start()


@contextlib.contextmanager
def frozen(broker: LiveServer) -> Iterator[None]:
    assert broker.process is not None
    broker.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        broker.process.send_signal(signal.SIGCONT)


@pytest.mark.long
@pytest.mark.parametrize("gone", [killed, frozen], ids=["killed", "frozen"])
@pytest.mark.parametrize("face", FACES)
def test_close_is_bounded_after_a_broker_that_is_gone(
    broker: LiveServer, topic: str, face: str, gone: Callable[[LiveServer], Any]
) -> None:
    async def story(**where: Any) -> None:
        clients = Clients(face, broker.address, topic, **where)
        await clients.use()
        with gone(broker):
            clients.fill()
            begun = time.monotonic()
            await clients.close()
            assert time.monotonic() - begun < BOUND_SECONDS

    in_its_world(face, story)


@pytest.mark.parametrize("there", ["nothing", "something silent"])
@pytest.mark.parametrize("face", FACES)
def test_close_is_bounded_where_no_broker_ever_was(topic: str, face: str, there: str) -> None:
    async def story(**where: Any) -> None:
        with neighbours.neighbour(neighbours.silent) as address:
            servers = address if there != "nothing" else "127.0.0.1:1"
            clients = Clients(face, servers, topic, **where)
            clients.fill()
            begun = time.monotonic()
            await clients.close()
            assert time.monotonic() - begun < BOUND_SECONDS

    in_its_world(face, story)


@pytest.mark.parametrize("face", FACES)
def test_making_and_closing_a_client_needs_no_loop_no_reactor_and_no_broker(face: str) -> None:
    """In the main thread, and in one that never had a loop."""
    failures: list[BaseException] = []

    def make() -> None:
        try:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            clients = Clients(face, "127.0.0.1:1", "orders")
            if face == "blocking":
                clients.producer.close()
                clients.consumer.close()
                clients.admin.close()
        except BaseException as error:
            failures.append(error)

    make()
    thread = threading.Thread(target=make)
    thread.start()
    thread.join(SECONDS)
    assert failures == []
