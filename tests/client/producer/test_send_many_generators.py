"""`send_many` ran the caller's generator under the client's lock: a slow one held up every other thread and the
network thread, and one that sent something itself was refused, or never continued.
"""

import threading
import time
from collections.abc import Iterator

from tests.client.fake_broker import FakeBroker, listening
from tfmq.message import SendResult
from tfmq.producer import Producer


def test_a_slow_generator_delays_no_other() -> None:
    broker = FakeBroker()
    with listening(broker) as servers, Producer(servers) as producer:
        producer.send("orders", b"0").result(5)
        begun, go_on = threading.Event(), threading.Event()

        def slow() -> Iterator[bytes]:
            begun.set()
            assert go_on.wait(20)
            yield b"slow"

        thread = threading.Thread(target=lambda: producer.send_many("orders", slow()), daemon=True)
        thread.start()
        assert begun.wait(5)
        others = threading.Thread(target=lambda: producer.send("orders", b"quick").result(5), daemon=True)
        others.start()
        others.join(5)
        stood_still = others.is_alive()
        go_on.set()
        thread.join(5)
        assert not stood_still and not thread.is_alive()
        producer.flush(5)
    assert broker.payloads("orders") == [b"0", b"quick", b"slow"]


def test_a_generator_may_send_itself() -> None:
    broker = FakeBroker()
    with listening(broker) as servers, Producer(servers) as producer:
        inner: list[SendResult] = []

        def nested() -> Iterator[bytes]:
            inner.append(producer.send("inner", b"inner").result(5))
            yield b"outer"

        assert producer.send_many("orders", nested()).result(5)[0].count == 1
        assert len(inner) == 1
    assert (broker.payloads("inner"), broker.payloads("orders")) == ([b"inner"], [b"outer"])


def test_what_a_generator_raises_reaches_the_caller() -> None:
    broker = FakeBroker()
    with listening(broker) as servers, Producer(servers) as producer:

        def broken() -> Iterator[bytes]:
            yield from [b"x"] * 600
            raise ValueError("mine")

        try:
            producer.send_many("orders", broken())
        except ValueError as error:
            assert str(error) == "mine"
        started = time.monotonic()
        producer.send("orders", b"behind").result(5)
        assert time.monotonic() - started < 5
