"""The requests of a coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from tests.zookeeper.conftest import until
from tfmq.errors import NotAllowed, NotSupported, StoreFailed
from tfmq.zookeeper import connection, session
from tfmq.zookeeper.paths import zookeeper_address
from tfmq.zookeeper.session import (
    WRITES,
    ConnectionLost,
    CreateNode,
    DeleteNode,
    GetChildren,
    GetNode,
    GetNodes,
    Node,
    RequestSteps,
    SessionThread,
    SetNode,
    send_request,
)
from tools.rigs.proxy import proxied
from tools.rigs.zookeeper import ZooKeeperServer


def test_only_changes_prove_that_a_session_lives() -> None:
    changes = [CreateNode("/a", b""), SetNode("/a", b""), DeleteNode("/a", 0, "/b")]
    reads = [GetChildren("/a"), GetNode("/a"), GetNodes(["/a"])]
    assert all(isinstance(each, WRITES) for each in changes)
    assert not any(isinstance(each, WRITES) for each in reads)


class Asking:
    """The requests of a coordinator, asked of a real ZooKeeper."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.reported: list[str] = []

    def __call__(self, request: Any) -> Any:
        return send_request(self.client, request, lambda event: self.reported.append(event.path))


@pytest.fixture
def asking(zookeeper: ZooKeeperServer) -> Iterator[Asking]:
    client = KazooClient(zookeeper.address)
    client.start()
    yield Asking(client)
    client.stop()
    client.close()


def test_a_node_is_made_with_all_above_it_and_is_the_sessions(asking: Asking, nodes: Any, root: str) -> None:
    made = asking(CreateNode(f"{root}/a/b", b"x"))
    assert made == Node(b"x", asking.client.client_id[0], nodes.get(f"{root}/a/b")[1].czxid, 0)
    assert asking(CreateNode(f"{root}/a/b", b"y")) is None
    assert asking(CreateNode(f"{root}/a/c", b"")).created > made.created
    assert asking(GetNode(f"{root}/a/b")) == made
    assert nodes.get(f"{root}/a")[1].ephemeralOwner == 0


def test_what_is_not_there_is_none_or_nothing(asking: Asking, root: str) -> None:
    assert asking(GetNode(f"{root}/a")) is None
    assert asking(GetNodes([f"{root}/a"])) == [None]
    assert asking(GetChildren(f"{root}/a")) == []
    assert asking(SetNode(f"{root}/a", b"")) is False


def test_names_data_and_versions(asking: Asking, root: str) -> None:
    for name in "ab":
        asking(CreateNode(f"{root}/{name}", b"1"))
    assert sorted(asking(GetChildren(root))) == ["a", "b"]
    assert asking(SetNode(f"{root}/a", b"2")) is True
    assert [(each.data, each.version) for each in asking(GetNodes([f"{root}/a", f"{root}/b"]))] == [
        (b"2", 1),
        (b"1", 0),
    ]


def test_a_node_is_removed_at_its_version_beside_another_one(asking: Asking, nodes: Any, root: str) -> None:
    path, beside = f"{root}/a", f"{root}/me"
    asking(CreateNode(path, b""))
    assert asking(DeleteNode(path, 0, beside)) is False
    asking(CreateNode(beside, b""))
    assert asking(DeleteNode(path, 1, beside)) is False
    assert nodes.exists(path)
    assert asking(DeleteNode(path, 0, beside)) is True
    assert asking(DeleteNode(path, 0, beside)) is True
    assert nodes.exists(beside) and not nodes.exists(path)


def test_a_change_is_reported_once(asking: Asking, nodes: Any, root: str) -> None:
    asking(CreateNode(f"{root}/a", b""))
    asking(GetNode(f"{root}/a"))
    asking(GetChildren(root))
    nodes.delete(f"{root}/a")
    asking(GetNode(f"{root}/a"))
    until(lambda: len(asking.reported) >= 2)  # watches are called in another thread than replies
    assert sorted(asking.reported) == [root, f"{root}/a"]


def test_trouble_is_a_cut_or_a_refusal(asking: Asking, nodes: Any, root: str) -> None:
    nodes.ensure_path(root)
    nodes.set_acls(root, [make_digest_acl("a", "b", all=True)])
    with pytest.raises(NotAllowed, match=root):
        asking(CreateNode(f"{root}/a", b""))
    asking.client.stop()
    with pytest.raises(ConnectionLost):
        asking(GetNode("/"))


# Running something that asks in courses: what reaches it, and when, whatever happens to the session.


class Asker:
    """Asks one thing again and again, and records all replies."""

    def __init__(self, path: str, session_seconds: float = 30.0) -> None:
        self.path = path
        self.session_seconds = session_seconds
        self.changed = False
        self.session = 0
        self.reported: list[str] = []
        self.answers: list[Any] = []
        self.is_due = False

    def on_connected(self, session: int) -> None:
        self.reported.append("connected")
        self.session = session
        self.is_due = True

    def on_disconnected(self) -> None:
        self.reported.append("cut")
        self.changed = True

    def on_session_lost(self) -> None:
        self.reported.append("lost")
        self.session = 0

    def request_round(self) -> None:
        self.reported.append("look")
        self.is_due = True

    def on_write_response(self, asked_at: float) -> None:
        self.reported.append("heard")

    def next_due(self) -> float:
        return 0.0 if self.is_due else float("inf")

    def next_steps(self, now: float) -> RequestSteps | None:
        if not self.is_due:
            return None
        self.is_due = False
        return self.course()

    def course(self) -> Generator[Any, Any, None]:
        try:
            self.answers.append((yield CreateNode(self.path, b"")))
            self.answers.append((yield GetNode(self.path)))
        except ConnectionLost:
            self.answers.append("cut")
            raise
        self.changed = True


@pytest.fixture
def reported() -> threading.Event:
    return threading.Event()


def test_questions_are_answered_in_turn_and_changes_are_reported(
    zookeeper: ZooKeeperServer, nodes: Any, root: str, reported: threading.Event
) -> None:
    asker = Asker(f"{root}/a")
    running = SessionThread(zookeeper_address(zookeeper.address), asker, reported.set)
    running.start()
    assert reported.wait(60)
    assert [node.session for node in asker.answers] == [asker.session, asker.session]
    assert asker.reported == ["connected", "heard"]
    nodes.delete(f"{root}/a")
    until(lambda: len(asker.answers) >= 4)
    assert "look" in asker.reported
    running.close(30)
    running.close(30)
    assert nodes.exists(f"{root}/a") is None


def test_only_what_was_cut_short_is_asked_again_without_a_change(
    zookeeper: ZooKeeperServer, root: str, reported: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RETRY_SECONDS", 0.0)
    asker = Asker(f"{root}/a")
    running = SessionThread(zookeeper_address(zookeeper.address), asker, reported.set)
    running.start()
    assert reported.wait(60)
    reported.clear()
    assert not reported.wait(0.2)
    running.close(30)
    assert (len(asker.answers), asker.reported) == (2, ["connected", "heard"])


def test_a_session_gets_as_much_time_as_zookeeper_gives(
    zookeeper: ZooKeeperServer, root: str, reported: threading.Event
) -> None:
    asker = Asker(f"{root}/a", session_seconds=3600.0)
    running = SessionThread(zookeeper_address(zookeeper.address), asker, reported.set)
    running.start()
    until(lambda: asker.session)
    assert asker.session_seconds == pytest.approx(60.0)  # maxSessionTimeout of the rig
    running.close(30)


def test_a_broken_connection_is_reported_before_anything_else(
    zookeeper: ZooKeeperServer, root: str, reported: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RESPONSE_SECONDS", 5.0)
    with proxied(zookeeper.address) as proxy:
        asker = Asker(f"{root}/a", 20.0)
        running = SessionThread(zookeeper_address(proxy.address), asker, reported.set)
        running.start()
        assert reported.wait(60)
        session = asker.session
        proxy.down = lambda data: None  # the question arrives, the answer does not
        with running.condition:
            asker.answers.clear()
            asker.request_round()
            running.wake()
        until(lambda: "cut" in asker.reported)
        until(lambda: asker.answers)
        assert asker.answers[0] == "cut"
        proxy.down = None
        until(lambda: asker.reported.count("connected") == 2)
        assert asker.session == session
        until(lambda: len(asker.answers) >= 3)
        running.close(30)


def test_an_unexpected_error_is_reported_and_does_not_end_the_thread(
    zookeeper: ZooKeeperServer, root: str, reported: threading.Event
) -> None:
    class Faulty(Asker):
        def course(self) -> Generator[Any, Any, None]:
            yield GetNode(self.path)
            raise RuntimeError("planted")

    running = SessionThread(zookeeper_address(zookeeper.address), Faulty(f"{root}/a"), reported.set)
    running.start()
    assert reported.wait(60)
    assert isinstance(running.failure, StoreFailed) and not running.failure.retriable
    assert "planted" in str(running.failure)
    running.close(30)


def test_after_a_close_nothing_is_asked(zookeeper: ZooKeeperServer, root: str, reported: threading.Event) -> None:
    asker = Asker(f"{root}/a")
    running = SessionThread(zookeeper_address(zookeeper.address), asker, reported.set)
    running.start()
    assert reported.wait(60)
    running.close(30)
    count = len(asker.answers)
    with running.condition:
        asker.request_round()
        running.wake()
    time.sleep(0.05)
    assert len(asker.answers) == count and running.client is None


def test_a_kazoo_that_hides_the_time_of_a_session_is_refused(
    reported: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        _connection = object()

    monkeypatch.setattr(session, "new_client", lambda *_: Client())
    with pytest.raises(NotSupported, match="kazoo"):
        SessionThread(zookeeper_address("a"), Asker("/a"), reported.set).start()
