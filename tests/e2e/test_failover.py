"""Real clients of all API variants with the addresses of several servers, and a primary that is killed.

The list begins with an address that accepts connections and never answers (a process that is stopped), then one that
does not even accept (a machine without power), then a standby that names the primary. The next primary is started on
the folder of the first one, at another address: what synchronous replication leaves is the same.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tfmq
import tfmq.aio
import tfmq.twisted
from tests.client.fake_broker import FakeBroker, listening
from tests.client.replicas import ReplicaSession
from tests.e2e.reading import payloads
from tests.reactor import play
from tfmq.client.connection import connection
from tools.rigs.live_server import LiveServer

COUNT = 40


@contextmanager
def silent_servers() -> Iterator[list[str]]:
    """Two addresses: at one the system accepts connections and nothing answers; the other accepts none."""
    with socket.create_server(("127.0.0.1", 0)) as stopped, socket.create_server(("127.0.0.1", 0), backlog=0) as dead:
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:  # as many as the queue of the second takes
            each.setblocking(False)
            each.connect_ex(dead.getsockname())
        yield [f"127.0.0.1:{each.getsockname()[1]}" for each in (stopped, dead)]
        for each in waiting:
            each.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new connection begins at the head of the list."""
    monkeypatch.setattr(connection, "OTHER_SERVER_SECONDS", 0.3)


class Servers:
    """The primary at `primary.address`, and `fail_over` in the middle of the work."""

    def __init__(self, data: Path, others: list[str]) -> None:
        self.primary = LiveServer(data)
        self.primary.start()
        self.following = f"127.0.0.1:{free_port()}"
        self.addresses = [*others, self.primary.address, self.following]

    def fail_over(self) -> None:
        self.primary.kill()
        self.primary.address = self.following
        self.primary.start()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    named = ""
    with (
        silent_servers() as silent,
        listening(FakeBroker(), lambda broker: ReplicaSession(broker, False, named)) as standby,
    ):
        made = Servers(tmp_path / "data", [*silent, standby])
        named = made.primary.address
        try:
            yield made
        finally:
            if made.primary in LiveServer.alive:
                assert made.primary.stop() == 0


def numbered(first: int) -> list[bytes]:
    return [b"%03d" % number for number in range(first, first + COUNT)]


def blocking_course(servers: Servers) -> list[bytes]:
    with (
        tfmq.Producer(servers.addresses, linger_ms=0) as producer,
        tfmq.Consumer(servers.addresses, topics="orders", group="billing") as consumer,
        tfmq.Admin(servers.addresses) as admin,
    ):
        prepared = producer.begin("prepared")
        prepared.send("orders", b"prepared")
        prepared.prepare()
        sent = [producer.send("orders", each) for each in numbered(0)]
        sent[-1].result()
        read = [bytes(each.payload) for each in consumer.poll(timeout=20)]
        killed = threading.Thread(target=servers.fail_over)
        killed.start()
        sent += [producer.send("orders", each) for each in numbered(COUNT)]
        results = [each.result() for each in sent]
        killed.join()
        assert {each.durability for each in results} == {"synced"}
        assert admin.ping() > 0
        prepared.commit()
        while len(read) < 2 * COUNT + 1:
            read += [bytes(each.payload) for each in consumer.poll(timeout=20)]
    return read


async def awaited_course(servers: Servers, producer: Any, consumer: Any, admin: Any) -> list[bytes]:
    async with producer, consumer, admin:
        for each in numbered(0):
            await producer.send("orders", each)
        read = [bytes(each.payload) for each in await consumer.poll(timeout=20)]
        killed = threading.Thread(target=servers.fail_over)
        killed.start()
        for each in numbered(COUNT):
            await producer.send("orders", each)
        killed.join()
        assert await admin.ping() > 0
        while len(read) < 2 * COUNT:
            read += [bytes(each.payload) for each in await consumer.poll(timeout=20)]
    return read


def asyncio_course(servers: Servers) -> list[bytes]:
    async def course() -> list[bytes]:
        return await awaited_course(
            servers,
            tfmq.aio.Producer(servers.addresses),
            tfmq.aio.Consumer(servers.addresses, topics="orders", group="billing"),
            tfmq.aio.Admin(servers.addresses),
        )

    return asyncio.run(course())


def twisted_course(servers: Servers) -> list[bytes]:
    async def course(reactor: Any) -> list[bytes]:
        return await awaited_course(
            servers,
            tfmq.twisted.Producer(servers.addresses, reactor=reactor),
            tfmq.twisted.Consumer(servers.addresses, topics="orders", group="billing", reactor=reactor),
            tfmq.twisted.Admin(servers.addresses, reactor=reactor),
        )

    found: list[bytes] = play(course, seconds=60)
    return found


@pytest.mark.parametrize("course", [blocking_course, asyncio_course, twisted_course])
def test_clients_go_on_with_another_primary(servers: Servers, course: Any) -> None:
    read = course(servers)
    stored = payloads(servers.following, "orders")
    plain = [each for each in stored if each != b"prepared"]
    assert plain == numbered(0) + numbered(COUNT), "each once, and in order"
    assert [each for each in read if each != b"prepared"] == plain
    assert stored.count(b"prepared") == read.count(b"prepared") == (course is blocking_course)
