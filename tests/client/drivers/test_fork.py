"""A fork: the child begins anew, the parent notices nothing, no lock is inherited held."""

import os
import threading
import time
from collections.abc import Callable

from tests.client.fake_broker import HOLD, FakeBroker, listening
from tests.scale import scaled
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.producer import Producer
from tfmq.protocol.commands import Ping

SECONDS = 20


def in_child(work: Callable[[], object]) -> int:
    """The exit code of a forked child that does `work`: 0 for done, 1 for an exception, 99 when it hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 99


def test_a_child_gets_a_connection_of_its_own() -> None:
    broker = FakeBroker()
    with listening(broker) as servers:
        driver = BlockingDriver(ClientConnection(parse_servers(servers), time.monotonic))
        driver.run(request(driver.link, Ping()))
        assert in_child(lambda: driver.run(request(driver.link, Ping()))) == 0
        driver.run(request(driver.link, Ping()))
        assert len(broker.sessions) == 2
        assert driver.link.connection_count == 1
        driver.close()


def test_a_fork_beside_busy_threads_inherits_no_held_lock() -> None:
    with listening(FakeBroker()) as servers:
        driver = BlockingDriver(ClientConnection(parse_servers(servers), time.monotonic))
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                driver.run(request(driver.link, Ping()))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        codes = [in_child(lambda: driver.run(request(driver.link, Ping()))) for _ in range(scaled(10))]
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
        assert set(codes) == {0}
        driver.close()


def test_what_the_parent_had_not_sent_is_sent_by_the_parent_only() -> None:
    broker = FakeBroker()
    with listening(broker) as servers:
        producer = Producer(servers, linger_ms=60_000)
        producer.send("orders", b"first").result(SECONDS)
        waiting = producer.send("orders", b"parent's")

        def child() -> None:
            assert waiting.done() and waiting.error() is not None
            producer.send("orders", b"child's").result(SECONDS)
            producer.close()

        assert in_child(child) == 0
        assert not waiting.done()
        producer.close()
    assert broker.payloads("orders") == [b"first", b"child's", b"parent's"]
    ids = [batch.request.producer_id for batch in broker.logs["orders", 0]]
    assert len(set(ids)) == 2 and ids[0] == ids[2]


def test_a_held_answer_of_the_parent_is_the_parents() -> None:
    broker = FakeBroker()
    with listening(broker) as servers:
        driver = BlockingDriver(ClientConnection(parse_servers(servers), time.monotonic))
        driver.run(request(driver.link, Ping()))
        broker.plan(Ping, HOLD)
        with driver.lock:
            call = driver.link.send_request(Ping(), in_background=True)
            driver.flush()
        until = time.monotonic() + SECONDS
        while not broker.held and time.monotonic() < until:
            time.sleep(0.01)
        assert in_child(lambda: driver.run(request(driver.link, Ping()))) == 0
        broker.release()
        driver.wait((call,), SECONDS)
        assert call.done and call.error is None
        driver.close()
