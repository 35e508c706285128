"""A server in ZooKeeper: its address and its topics, at what is so."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.server.fakes import FakeReactor
from tests.server.wire import Wire, running
from tests.zookeeper.test_coordination import until
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.server.server import RegistrationUpdater, client_address, registration_updater


class Registered:
    """What was registered last."""

    def __init__(self) -> None:
        self.topics: Mapping[str, int] = {}
        self.closed = False

    def set_topics(self, topics: Mapping[str, int]) -> None:
        self.topics = topics

    def close(self) -> None:
        self.closed = True


def test_topics_are_followed_until_the_stop() -> None:
    reactor, registered, topics = FakeReactor(), Registered(), {"orders": 1}
    following = RegistrationUpdater(reactor.callLater, lambda: topics, registered)
    following.start()
    assert registered.topics == {"orders": 1}
    topics["orders"] = 4
    reactor.advance(1)
    assert registered.topics == {"orders": 4}
    following.stop()
    following.wait_unregistered()
    assert registered.closed
    topics["orders"] = 5
    reactor.advance(10)
    assert registered.topics == {"orders": 4}


def test_a_server_that_listens_everywhere_is_reached_by_its_name() -> None:
    for address in ("0.0.0.0:8367", "[::]:8367", ":8367"):
        assert client_address(address) == f"{socket.gethostname()}:8367"
    for address in ("127.0.0.1:1", "[::1]:1", "broker.example:8367"):
        assert client_address(address) == address


def test_without_the_setting_nothing_is_registered_and_a_wrong_one_is_refused() -> None:
    reactor = FakeReactor()
    assert registration_updater("", "127.0.0.1:1", reactor.callLater, dict) is None
    with pytest.raises(BadRequest, match="no address of a ZooKeeper"):
        registration_updater("a:0/meta", "127.0.0.1:1", reactor.callLater, dict)


@pytest.mark.long
def test_a_server_is_registered_while_it_runs(tmp_path: Path, zookeeper: Any, root: str, nodes: Any) -> None:
    setting = f"server.zookeeper={zookeeper.address}{root}"
    with running(tmp_path / "data", "--set", setting) as (process, address):
        until(lambda: nodes.exists(f"{root}/brokers/ids/0/master"))
        assert nodes.get(f"{root}/brokers/ids/0/master")[0].decode() == f"{address[0]}:{address[1]}"
        wire = Wire(address)
        wire.ask(commands.CreateTopic("orders", 4, {}))
        until(lambda: nodes.exists(f"{root}/brokers/topics/orders/0-m"))
        assert nodes.get(f"{root}/brokers/topics/orders/0-m")[0] == b"4"
        wire.ask(commands.DeleteTopic("orders"))
        until(lambda: not nodes.exists(f"{root}/brokers/topics/orders/0-m"))
        code, _, log = process.stop()
        assert code == 0 and "registered in ZooKeeper" in log and "Traceback" not in log
    assert nodes.exists(f"{root}/brokers/ids/0/master") is None


def test_a_server_serves_although_zookeeper_is_away(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--set", "server.zookeeper=127.0.0.1:1/meta") as (process, address):
        assert Wire(address).topic("orders") > 0
        code, _, log = process.stop()
        assert code == 0 and "Traceback" not in log
