"""What users see where ZooKeeper is not as they think: one sentence that names it, no traceback, no endless wait."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from kazoo.security import make_digest_acl

import tfmq
from tests.offsets.contract import PLACE, A
from tests.zookeeper.conftest import until
from tfmq.errors import NotAllowed, NotSupported, StoreFailed
from tfmq.server.server import registration_updater
from tfmq.zookeeper import connection, group_coordinator, registration
from tfmq.zookeeper.group_coordinator import GroupMembership, boot_time
from tfmq.zookeeper.offsets import ZooKeeperOffsets
from tfmq.zookeeper.registration import Registration
from tools.rigs.live_server import LiveServer
from tools.rigs.proxy import proxied
from tools.rigs.zookeeper import ZooKeeperServer

NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def said_anew() -> None:
    """What kazoo said in the test before is said again."""
    for each in connection.logger.filters:
        assert isinstance(each, connection.ThrottledLogFilter)
        each.clear()


def consumer_of(server: LiveServer, **options: Any) -> tfmq.Consumer[Any]:
    return tfmq.Consumer(server.address, topics="troubles", group="billing", session=1.0, **options)


def test_one_of_an_ensemble_is_enough_and_the_root_need_not_be_there(
    zookeeper: ZooKeeperServer, nodes: Any, root: str
) -> None:
    address = f"zookeeper://{NOBODY},{zookeeper.address}{root}/far/down"
    storage = ZooKeeperOffsets(address)
    assert storage.read("billing", [A]) == {}
    storage.save("billing", 1, {A: PLACE})
    storage.close()
    member = GroupMembership(address, "billing", "a", session_seconds=10, on_change=lambda: None)
    member.set_topics({"orders": [0]})
    until(lambda: member.assignment().assigned)
    member.close()
    broker = Registration(address, "here:8367", session_seconds=10)
    broker.set_topics({"orders": 4})
    until(lambda: broker.registered)
    assert nodes.get(f"{root}/far/down/brokers/ids/0/master")[0] == b"here:8367"
    broker.close(30)


@pytest.fixture
def forbidden(nodes: Any, root: str, address: str) -> str:
    """The address of a root of another application."""
    nodes.ensure_path(root)
    nodes.set_acls(root, [make_digest_acl("somebody", "else", all=True)])
    return address


@pytest.mark.parametrize("option", ["offsets", "coordinator"])
def test_a_root_that_is_not_ours_ends_a_consumer_with_a_sentence(
    server: LiveServer, forbidden: str, option: str
) -> None:
    with tfmq.Producer(server.address) as producer:
        producer.send("troubles", "1").result()
    with (
        pytest.raises(NotAllowed, match=r"NoAuthError.*tfmq brings no credentials") as caught,
        consumer_of(server, **{option: forbidden}) as consumer,
    ):
        consumer.poll(60.0)
    assert "\n" not in str(caught.value)


def test_a_broker_that_may_not_register_says_so_and_serves(forbidden: str, caplog: pytest.LogCaptureFixture) -> None:
    broker = Registration(forbidden, "here:8367", session_seconds=10)
    broker.set_topics({"orders": 4})
    until(lambda: "This broker is not registered" in caplog.text)
    assert "tfmq brings no credentials" in caplog.text and "Traceback" not in caplog.text
    broker.close(30)


# No server there, or another one


@contextmanager
def another_client(reply: bytes) -> Iterator[str]:
    """The address of a server that answers `reply` to everything, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    one = listener.accept()[0]
                except OSError:
                    return
                with suppress(OSError), one:
                    one.recv(1000)
                    one.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(params=[None, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nobody", "other"])
def wrong(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where no ZooKeeper is."""
    if request.param is None:
        yield NOBODY
    else:
        with another_client(request.param) as address:
            yield address


def test_a_wrong_address_keeps_a_member_waiting_and_says_so(
    server: LiveServer, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_coordinator, "UNREACHABLE_SECONDS", 0.2)
    with consumer_of(server, coordinator=f"zookeeper://{wrong}/meta") as consumer:
        assert consumer.poll(0.1) == []
        until(lambda: consumer.stats()["note"] == f"zookeeper://{wrong}/meta does not answer.")
        until(lambda: "reads nothing" in caplog.text)
        began = time.monotonic()
    assert time.monotonic() - began < 30
    assert "Traceback" not in caplog.text and "retry policy" not in caplog.text


def only_greetings(data: bytes) -> bytes | None:
    """A judge of a proxy that lets sessions begin, and breaks the connection at the first question."""
    return data if len(data) > 40 and data[4:8] == bytes(4) else None


def test_a_zookeeper_that_drops_every_question_is_said(
    zookeeper: ZooKeeperServer, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that wants credentials in the first place does so."""
    monkeypatch.setattr(group_coordinator, "UNREACHABLE_SECONDS", 0.2)
    with proxied(zookeeper.address) as proxy:
        proxy.up = only_greetings
        member = GroupMembership(f"{proxy.address}{root}", "billing", "a", session_seconds=10, on_change=lambda: None)
        member.set_topics({"orders": [0]})
        until(lambda: member.idle_reason == f"zookeeper://{proxy.address}{root} does not answer.")
        proxy.up = None
        until(lambda: member.assignment().until > boot_time() and not member.idle_reason)
        member.close()


def test_a_wrong_address_of_the_offsets_is_waited_for_and_said(
    server: LiveServer, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "RESPONSE_SECONDS", 0.2)
    with tfmq.Producer(server.address) as producer:
        producer.send("troubles", "1").result()
    with consumer_of(server, offsets=f"zookeeper://{wrong}/meta") as consumer:
        until(lambda: consumer.poll(0.1) == [] and "waits for its offsets" in caplog.text)
    (said,) = {each for each in caplog.messages if "waits for its offsets" in each}
    assert f"zookeeper://{wrong}/meta does not answer: " in said and "Error(" not in said
    assert "Traceback" not in caplog.text


def test_what_is_no_zookeeper_is_called_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(connection, "RESPONSE_SECONDS", 0.2)
    with another_client(b"\0\0\0\2no") as address, caplog.at_level(logging.WARNING, "tfmq.zookeeper"):
        storage = ZooKeeperOffsets(f"zookeeper://{address}")
        with pytest.raises(StoreFailed):
            storage.read("billing", [A])
        storage.close()
    assert "no ZooKeeper, or one that wants TLS" in caplog.text


def test_a_broker_says_once_that_zookeeper_is_away(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    broker = Registration(NOBODY, "here:8367", clock=lambda: now[0])
    for _ in range(4):
        broker.set_topics({"orders": 4})
        now[0] += registration.UNREACHABLE_SECONDS / 2
    broker.close(30)
    (said,) = [each for each in caplog.messages if "registers when it is back" in each]
    assert said.startswith(f"zookeeper://{NOBODY}/meta does not answer")


# No kazoo


@pytest.fixture
def without_kazoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kazoo.client", None)


@pytest.mark.usefixtures("without_kazoo")
@pytest.mark.parametrize("option", ["offsets", "coordinator"])
def test_without_kazoo_a_consumer_is_not_made(server: LiveServer, option: str) -> None:
    with pytest.raises(NotSupported, match=r'pip install "tfmq\[zookeeper\]"'):
        consumer_of(server, **{option: "zookeeper://127.0.0.1/meta"})


@pytest.mark.usefixtures("without_kazoo")
def test_without_kazoo_a_server_does_not_start() -> None:
    with pytest.raises(NotSupported, match=r'pip install "tfmq\[zookeeper\]"'):
        registration_updater(f"{NOBODY}/meta", "127.0.0.1:8367", lambda *_: None, dict)
