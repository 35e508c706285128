"""A signal handler runs inside of whatever the main thread waits in. One that flushed or closed waited for the thread
that reads, which was its own: it stood still until its time was over, or without end.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.client.fake_broker import HOLD, FakeBroker, listening
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.producer import Producer
from tfmq.protocol.commands import Ping, Produce

SECONDS = 5.0


@contextmanager
def on_signal(handler: Callable[..., Any], after: float) -> Iterator[None]:
    """`handler` runs in the main thread, `after` seconds from now."""
    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_may_flush_while_the_main_thread_waits() -> None:
    broker = FakeBroker()
    with listening(broker) as servers, Producer(servers) as producer:
        producer.send("orders", b"0").result(SECONDS)
        broker.plan(Produce, HOLD)
        took: list[float] = []

        def handler(*_: object) -> None:
            threading.Timer(0.2, broker.release).start()
            started = time.monotonic()
            producer.send("orders", b"2")
            producer.flush(SECONDS)
            took.append(time.monotonic() - started)

        with on_signal(handler, 0.2):
            producer.send("orders", b"1").result(2 * SECONDS)
        assert took[0] < SECONDS / 2
    assert broker.payloads("orders") == [b"0", b"1", b"2"]


def test_what_the_handler_read_for_the_main_thread_wakes_it() -> None:
    broker = FakeBroker()
    with listening(broker) as servers:
        driver = BlockingDriver(ClientConnection(parse_servers(servers), time.monotonic))

        def ping() -> Any:
            return driver.run(request(driver.link, Ping(), seconds=4 * SECONDS))

        ping()
        broker.plan(Ping, HOLD, HOLD)

        def handler(*_: object) -> None:
            threading.Timer(0.2, broker.release).start()
            ping()  # both answers come in here, the outer one first

        started = time.monotonic()
        with on_signal(handler, 0.2):
            ping()
        assert time.monotonic() - started < SECONDS
        driver.close()


class Interrupt(BaseException):
    """What Ctrl-C raises, in its place."""


def test_a_signal_between_reading_and_taking_loses_no_byte() -> None:
    """The bytes in hand are gone with the exception, so the connection is no use any more: a new one, all again."""
    broker = FakeBroker()
    with listening(broker) as servers:
        driver = BlockingDriver(ClientConnection(parse_servers(servers), time.monotonic))

        def ping() -> Any:
            return driver.run(request(driver.link, Ping(), seconds=SECONDS))

        ping()
        receive = driver.channel.receive

        def interrupted() -> None:
            assert receive()
            driver.channel.receive = receive  # type: ignore[method-assign]
            raise Interrupt

        driver.channel.receive = interrupted  # type: ignore[assignment,method-assign]
        try:
            ping()
        except Interrupt:
            assert ping().time_ms
        assert driver.link.connection_count == 2
        driver.close()
