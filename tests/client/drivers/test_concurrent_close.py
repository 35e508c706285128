"""A second `close`, in another thread, cut the connection of the first one's flush; and a thread that waited for
something that closing left open went round in circles without end.
"""

import threading
import time

import pytest

from tests.client.fake_broker import HOLD, FakeBroker, listening
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import wait_for_all
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Event
from tfmq.errors import Closed
from tfmq.producer import Producer
from tfmq.protocol.commands import Produce

SECONDS = 5.0


def test_a_second_close_waits_for_the_first() -> None:
    broker = FakeBroker()
    with listening(broker) as servers:
        producer = Producer(servers, timeout=SECONDS)
        producer.send("orders", b"0").result(SECONDS)
        broker.plan(Produce, HOLD)
        delivery = producer.send("orders", b"1")
        raised: list[BaseException] = []

        def close() -> None:
            try:
                producer.close()
            except BaseException as error:
                raised.append(error)

        threads = [threading.Thread(target=close, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        broker.release()
        for thread in threads:
            thread.join(SECONDS)
        assert raised == []
        assert delivery.result(0).durability == "synced"


def test_a_caller_that_waits_while_it_is_closed_is_notified() -> None:
    link = ClientConnection(parse_servers("127.0.0.1:1"), time.monotonic)
    driver = BlockingDriver(link)
    threading.Timer(0.2, driver.close).start()
    with pytest.raises(Closed):
        driver.run(wait_for_all([Event()], None, link))


def test_a_closed_producer_takes_nothing_more_from_a_thread_that_was_about_to_send() -> None:
    with listening(FakeBroker()) as servers:
        producer = Producer(servers)
        core = producer._core
        message = core.make_message("orders", b"x", key="k")
        producer.close()
        with pytest.raises(Closed):
            core.append("orders", message, b"x")
