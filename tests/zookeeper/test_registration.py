"""A broker's registration in a real ZooKeeper."""

import logging
from typing import Any

import pytest

from tests.zookeeper.conftest import until
from tfmq.errors import BadRequest
from tfmq.zookeeper.registration import Registration


def register(address: str, broker: str = "here:8367", seconds: float = 30.0) -> Registration:
    return Registration(address, broker, session_seconds=seconds)


def test_a_broker_is_registered_from_its_start_to_its_end(address: str, nodes: Any, root: str) -> None:
    registration = register(address)
    registration.set_topics({"orders": 4})
    until(lambda: registration.registered)
    assert nodes.get(f"{root}/brokers/ids/0/master")[0] == b"here:8367"
    assert nodes.get(f"{root}/brokers/topics/orders/0-m")[0] == b"4"
    registration.set_topics({"orders": 5, "payments": 1})
    until(lambda: nodes.exists(f"{root}/brokers/topics/payments/0-m"))
    until(lambda: nodes.get(f"{root}/brokers/topics/orders/0-m")[0] == b"5")
    registration.close(30)
    registration.close(30)
    assert nodes.exists(f"{root}/brokers/ids/0/master") is None
    assert nodes.get_children(f"{root}/brokers/topics/orders") == []
    registration.set_topics({})


def test_the_next_broker_waits_for_the_number(
    address: str, nodes: Any, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = register(address), register(address, "there:8367")
    first.set_topics({"orders": 4})
    until(lambda: first.registered)
    with caplog.at_level(logging.ERROR, "tfmq.server"):
        second.set_topics({"orders": 2})
        until(lambda: "is the broker at here:8367 already" in caplog.text)
    assert not second.registered
    first.close(30)
    until(lambda: second.registered)
    assert nodes.get(f"{root}/brokers/ids/0/master")[0] == b"there:8367"
    second.close(30)


def test_a_zookeeper_that_does_not_answer_holds_nothing_up() -> None:
    registration = register("127.0.0.1:1")
    registration.set_topics({"orders": 4})
    assert not registration.registered
    registration.close(0.1)
    with pytest.raises(BadRequest):
        register("nothing at all")
