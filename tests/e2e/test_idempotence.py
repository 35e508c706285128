"""Senders over a network that loses replies, on a real broker: nothing is doubled, nothing acknowledged is lost.

A proxy in between forwards requests and, at places that the seed chooses, throws answers away and cuts the connection.
Each test also kills the server in the middle where it says so.
"""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import tfmq
from journal.record.format import header_positions
from tests.e2e.sending import Server
from tests.scale import scaled, seeded
from tfmq.producer import Producer

SECONDS = 60.0


class Proxy:
    """Forwards to `port`; loses answers with the chance `loss` for each piece of them, and cuts the connection then."""

    def __init__(self, port: int, loss: float, random_: random.Random) -> None:
        self.port, self.loss, self.random = port, loss, random_
        self.cuts = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                if self.listener.fileno() < 0:
                    return
                continue
            self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if answers and self.random.random() < self.loss:
                    self.cuts += 1
                    break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with_shutdown(end)

    def close(self) -> None:
        self.listener.close()
        for each in self._open:
            with_shutdown(each)


def with_shutdown(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path).start()
    yield running
    running.stop()


@contextmanager
def proxied(server: Server, loss: float, *names: object) -> Iterator[Proxy]:
    proxy = Proxy(server.port, loss, seeded("idempotence", *names))
    try:
        yield proxy
    finally:
        proxy.close()


def stored(server: Server, topic: str) -> list[bytes]:
    """Every payload of the topic's first partition, read straight from its file once the server is stopped."""
    server.stop()
    (folder,) = [each for each in (server.folder / "data").iterdir() if each.name == f"{topic}-0"]
    found = []
    for path in sorted(folder.glob("*.zxQueue")):
        data = path.read_bytes()
        for position in header_positions(data):
            length, flag = (
                int.from_bytes(data[position : position + 4]),
                int.from_bytes(data[position + 16 : position + 20]),
            )
            if not flag & 0x60:
                body = data[position + 20 : position + 20 + length]
                attribute = 4 + int.from_bytes(body[:4]) if flag & 1 else 0
                found.append(body[attribute:])
    return found


def test_lost_answers_double_nothing(server: Server) -> None:
    count = scaled(3000)
    with proxied(server, 0.05, "single") as proxy:
        with Producer(proxy.address, batch_bytes=2000, timeout=SECONDS) as producer:
            sent = 0
            # On a busy machine answers come in few pieces: go on until one was lost.
            while sent < count or (proxy.cuts == 0 and sent < 100 * count):
                producer.send("orders", b"%08d" % sent)
                sent += 1
                if sent % 20 == 0:
                    producer.flush(SECONDS)
        assert proxy.cuts > 0
    assert stored(server, "orders") == [b"%08d" % number for number in range(sent)]


def test_many_threads_after_lost_answers_keep_each_its_order(server: Server) -> None:
    count = scaled(300)
    with proxied(server, 0.03, "threads") as proxy, Producer(proxy.address, timeout=SECONDS) as producer:

        def work(number: int) -> None:
            for each in range(count):
                producer.send("orders", b"%02d-%06d" % (number, each)).result(SECONDS)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert proxy.cuts > 0
    found = stored(server, "orders")
    assert len(found) == len(set(found)) == 8 * count
    for number in range(8):
        mine = [payload for payload in found if payload.startswith(b"%02d" % number)]
        assert mine == sorted(mine)


@pytest.mark.long
def test_a_broker_killed_in_the_middle_loses_nothing_acknowledged_and_doubles_nothing(server: Server) -> None:
    acknowledged: list[bytes] = []
    producer = Producer(server.address, timeout=SECONDS)
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            payload = b"%08d" % number
            producer.send("orders", payload).result(SECONDS)
            acknowledged.append(payload)
            number += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for _ in range(scaled(3)):
        time.sleep(0.4)
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(SECONDS)
        server.start()
    time.sleep(0.4)
    stop.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
    producer.close()
    assert producer.stats()["lost_messages"] == 0
    found = stored(server, "orders")
    assert found == sorted(set(found))
    assert set(acknowledged) <= set(found)


def test_forked_children_send_their_own_and_only_their_own(server: Server) -> None:
    producer = tfmq.Producer(server.address, linger_ms=60_000)
    producer.send("orders", b"parent-0").result(SECONDS)
    producer.send("orders", b"parent-1")
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                producer.send("orders", b"child-%d" % number)
                producer.close(SECONDS)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    producer.close()
    assert sorted(stored(server, "orders")) == [b"child-0", b"child-1", b"child-2", b"parent-0", b"parent-1"]
