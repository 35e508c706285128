"""The requests of a coordinator, asked of a real ZooKeeper."""

from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from tfmq.errors import NotAllowed
from tfmq.zookeeper.session import (
    ConnectionLost,
    CreateNode,
    DeleteNode,
    GetChildren,
    GetNode,
    GetNodes,
    Node,
    SetNode,
    send_request,
)
from tools.rigs.zookeeper import ZooKeeperServer


class Asking:
    def __init__(self, client: Any) -> None:
        self.client = client
        self.told: list[str] = []

    def __call__(self, request: Any) -> Any:
        return send_request(self.client, request, lambda event: self.told.append(event.path))


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


def test_a_change_is_told_once(asking: Asking, nodes: Any, root: str) -> None:
    asking(CreateNode(f"{root}/a", b""))
    asking(GetNode(f"{root}/a"))
    asking(GetChildren(root))
    nodes.delete(f"{root}/a")
    asking(GetNode(f"{root}/a"))  # answered behind what was to be told
    assert sorted(asking.told) == [root, f"{root}/a"]


def test_trouble_is_a_cut_or_a_refusal(asking: Asking, nodes: Any, root: str) -> None:
    nodes.ensure_path(root)
    nodes.set_acls(root, [make_digest_acl("a", "b", all=True)])
    with pytest.raises(NotAllowed, match=root):
        asking(CreateNode(f"{root}/a", b""))
    asking.client.stop()
    with pytest.raises(ConnectionLost):
        asking(GetNode("/"))
