"""A broker's registration in a real ZooKeeper."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.zookeeper.conftest import until
from tfmq.errors import BadRequest
from tfmq.zookeeper.paths import NodePaths
from tfmq.zookeeper.registration import CHECK_SECONDS, RETRY_SECONDS, Registration, RegistrationStateMachine
from tfmq.zookeeper.session import ConnectionLost, CreateNode, DeleteNode, GetNode, GetNodes, Node, SetNode


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


# What a broker registers, one request after the other, without a ZooKeeper.

MASTER = "/meta/brokers/ids/0/master"
ORDERS, PAYMENTS = "/meta/brokers/topics/orders/0-m", "/meta/brokers/topics/payments/0-m"


class One:
    """A registry in session 7."""

    def __init__(self) -> None:
        self.registry = RegistrationStateMachine(NodePaths("/meta"), "here:8367", 30.0)
        self.nodes: dict[str, Node] = {}
        self.registry.set_topics({"orders": 4})
        self.registry.on_connected(7)

    def run(self, now: float, breaks_at: type | None = None) -> None:
        """All that is due at `now`; where `breaks_at` says, it is done, and the answer never comes."""
        for _ in range(3):
            course = self.registry.next_steps(now)
            if course is None:
                return
            answer = None
            try:
                while True:
                    request = course.send(answer)
                    answer = self.answer(request)
                    if breaks_at is not None and isinstance(request, breaks_at):
                        course.throw(ConnectionLost())
            except (StopIteration, ConnectionLost):
                continue

    def answer(self, request: Any) -> Any:
        if isinstance(request, GetNodes):
            return [self.nodes.get(path) for path in request.paths]
        node = self.nodes.get(request.path)
        if isinstance(request, CreateNode) and node is None:
            node = self.nodes[request.path] = Node(request.data, self.registry.session, 1, 0)
            return node
        if isinstance(request, DeleteNode):
            self.nodes.pop(request.path, None)
            return True
        if isinstance(request, SetNode) and node is not None:
            self.nodes[request.path] = node._replace(data=request.data)
            return True
        return node if isinstance(request, GetNode) else None

    def shown(self) -> dict[str, bytes]:
        return {path: node.data for path, node in self.nodes.items()}


def test_address_and_topics_are_registered_and_kept_at_what_is_so() -> None:
    one = One()
    one.run(1000.0)
    assert one.shown() == {MASTER: b"here:8367", ORDERS: b"4"} and one.registry.registered
    one.registry.set_topics({"orders": 5, "payments": 1})
    one.run(1001.0)
    assert one.shown() == {MASTER: b"here:8367", ORDERS: b"5", PAYMENTS: b"1"}
    one.registry.set_topics({"payments": 1})
    one.run(1002.0)
    assert one.shown() == {MASTER: b"here:8367", PAYMENTS: b"1"}
    assert one.registry.next_due() == 1002.0 + CHECK_SECONDS


def test_a_removed_registration_is_made_again_by_and_by() -> None:
    one = One()
    one.run(1000.0)
    one.nodes.clear()
    one.run(1000.0 + CHECK_SECONDS)
    assert one.shown() == {MASTER: b"here:8367", ORDERS: b"4"}


def test_another_session_registers_everything_again() -> None:
    one = One()
    one.run(1000.0)
    one.registry.on_session_lost()
    one.nodes.clear()
    assert not one.registry.registered and one.registry.next_due() == float("inf")
    one.registry.on_connected(8)
    one.run(1001.0)
    assert one.shown() == {MASTER: b"here:8367", ORDERS: b"4"} and one.nodes[ORDERS].session == 8


def test_a_broker_that_has_the_number_is_named_and_nothing_else_is_registered(caplog: pytest.LogCaptureFixture) -> None:
    one = One()
    one.nodes[MASTER] = Node(b"there:8367", 3, 1, 0)
    with caplog.at_level(logging.ERROR, "tfmq.server"):
        for look in range(3):
            one.run(1000.0 + RETRY_SECONDS * look)
    assert one.shown() == {MASTER: b"there:8367"} and not one.registry.registered
    (reported,) = caplog.messages
    assert "there:8367" in reported and "server.zookeeper" in reported
    del one.nodes[MASTER]
    one.run(1100.0)
    assert one.registry.registered


def test_an_earlier_life_of_its_own_is_waited_for_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    one = One()
    one.nodes[MASTER] = Node(b"here:8367", 3, 1, 0)
    one.nodes[ORDERS] = Node(b"9", 3, 1, 0)
    one.run(1000.0)
    assert not caplog.messages and not one.registry.registered
    del one.nodes[MASTER]
    one.run(1000.0 + RETRY_SECONDS)
    one.run(1001.0 + RETRY_SECONDS)
    assert one.shown() == {MASTER: b"here:8367", ORDERS: b"4"} and one.nodes[ORDERS].session == 7


@pytest.mark.parametrize("breaks_at", [CreateNode, GetNodes, SetNode, DeleteNode])
def test_what_got_no_reply_is_looked_at_again(breaks_at: type) -> None:
    one = One()
    one.run(1000.0)
    one.registry.set_topics({"orders": 5, "payments": 1})
    one.run(1001.0, breaks_at)
    one.registry.set_topics({"orders": 6})
    one.run(1002.0, breaks_at)
    one.registry.request_round()
    one.run(1003.0)
    assert one.shown() == {MASTER: b"here:8367", ORDERS: b"6"} and one.registry.registered
