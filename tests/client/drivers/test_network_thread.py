"""The network thread: started when it is needed, asleep when not, ended with its driver."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.client.fake_broker import HOLD, FakeBroker, listening
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.protocol.commands import Ping

SECONDS = 10.0


def network_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tfmq-network"]


def eventually(true: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def driver(broker: FakeBroker) -> Iterator[BlockingDriver]:
    before = len(network_threads())
    with listening(broker) as servers:
        made = BlockingDriver(ClientConnection(parse_servers(servers), time.monotonic))
        yield made
        made.close()
    eventually(lambda: len(network_threads()) <= before)


def test_it_is_not_started_for_who_waits(driver: BlockingDriver) -> None:
    before = len(network_threads())
    driver.run(request(driver.link, Ping()))
    assert len(network_threads()) == before


def test_it_makes_room_for_a_thread_that_waits_for_itself(driver: BlockingDriver, broker: FakeBroker) -> None:
    broker.plan(Ping, HOLD)
    with driver.lock:
        held = driver.link.send_request(Ping(), in_background=True)
        driver.flush()
    driver.wake()
    eventually(lambda: driver.network_thread.is_polling)
    for _ in range(20):
        assert driver.run(request(driver.link, Ping())).time_ms
    assert not held.done
    broker.release()
    eventually(lambda: held.done)


def test_it_sleeps_when_nothing_is_due(driver: BlockingDriver) -> None:
    driver.call_later(0.01, lambda: None)
    eventually(lambda: driver.network_thread.sleeping)
    rung = threading.Event()
    driver.call_later(0.01, rung.set)
    assert rung.wait(SECONDS)


def test_it_ends_with_a_driver_without_references(broker: FakeBroker) -> None:
    before = len(network_threads())
    with listening(broker) as servers:
        driver = BlockingDriver(ClientConnection(parse_servers(servers), time.monotonic))
        driver.call_later(0.0, lambda: None)
        eventually(lambda: len(network_threads()) == before + 1)
        del driver
        gc.collect()
        eventually(lambda: len(network_threads()) <= before)
