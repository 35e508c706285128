"""Groups coordinated by a real ZooKeeper: members in this process. Killed processes: test_group_processes.py."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from tests.zookeeper.conftest import until
from tests.zookeeper.worker import GROUP, TOPIC
from tfmq.errors import BadRequest, NotAllowed
from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.group_coordinator import GroupMembership, boot_time
from tools.rigs.proxy import proxied
from tools.rigs.zookeeper import ZooKeeperServer

SESSION_SECONDS = 30.0
"""Long enough for a machine that has other things to do."""
SHORT_SECONDS = 0.6


class Joined:
    """Members of one group; all leave at the end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.members: dict[str, GroupMembership] = {}
        self.changes: dict[str, int] = {}

    def join(
        self, name: str, partitions: int = 4, address: str = "", seconds: float = SESSION_SECONDS
    ) -> GroupMembership:
        def changed() -> None:
            self.changes[name] = self.changes.get(name, 0) + 1

        member = self.members[name] = GroupMembership(
            address or self.address, GROUP, name, session_seconds=seconds, on_change=changed
        )
        member.set_topics({TOPIC: range(partitions)})
        return member

    def releasing(self) -> None:
        """Everybody gives up at once what is revoked."""
        for member in self.members.values():
            member.release(member.assignment().revoked)

    def shares(self) -> dict[str, list[int]]:
        self.releasing()
        return {
            name: sorted(each.partition for each in member.assignment().assigned)
            for name, member in self.members.items()
        }


@pytest.fixture
def group(address: str) -> Iterator[Joined]:
    group = Joined(address)
    yield group
    for member in group.members.values():
        member.close(30)


def test_members_share_the_partitions_as_they_come_and_go(group: Joined, nodes: Any, root: str) -> None:
    group.join("a")
    until(lambda: group.shares() == {"a": [0, 1, 2, 3]})
    group.join("b")
    until(lambda: group.shares() == {"a": [0, 1], "b": [2, 3]})
    assert nodes.get(f"{root}/consumers/{GROUP}/ids/b")[0] == b"orders"
    assert nodes.get(f"{root}/consumers/{GROUP}/owners/orders/0-3")[0] == b"b"
    group.members.pop("a").close()
    until(lambda: group.shares() == {"b": [0, 1, 2, 3]})
    assert group.changes["b"] >= 2
    for member in group.members.values():
        member.set_topics({TOPIC: range(5)})
    until(lambda: group.shares() == {"b": [0, 1, 2, 3, 4]})


def test_item_30_ten_partitions_over_three_and_then_four_members(group: Joined) -> None:
    for name in ("a", "b", "c"):
        group.join(name, 10)
    until(lambda: group.shares() == {"a": [0, 1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]})
    before = group.members["a"].assignment().assigned
    group.join("d", 10)
    until(lambda: group.shares() == {"a": [0, 1, 2], "b": [3, 4, 5], "c": [6, 7], "d": [8, 9]})
    kept = group.members["a"].assignment().assigned
    assert kept.items() <= before.items(), "who keeps a partition is not disturbed in it"


def test_a_partition_stays_with_its_owner_until_that_gives_it_up(group: Joined) -> None:
    first = group.join("b", 2)
    until(lambda: len(first.assignment().assigned) == 2)
    second = group.join("a", 2)
    moving = until(lambda: first.assignment().revoked)
    assert moving == {PartitionName(TOPIC, 0)}
    assert until(lambda: second.idle_reason).startswith("waiting until their owners finish")
    before = first.assignment().assigned
    assert len(before) == 2 and not second.assignment().assigned
    first.release(moving)
    after = until(lambda: second.assignment().assigned)
    assert after[PartitionName(TOPIC, 0)] > max(before.values())
    assert second.generation == after[PartitionName(TOPIC, 0)]


def test_an_idle_member_says_why(group: Joined) -> None:
    group.join("a", 1)
    until(lambda: group.shares() == {"a": [0]})
    second = group.join("b", 1)
    until(lambda: "2 members" in second.idle_reason)
    assert "tfmq topic grow" in second.idle_reason and not group.members["a"].idle_reason


def expire(member: GroupMembership) -> None:
    """End the session of `member` at the server, as if its time were over."""
    client = member._session_thread.client
    assert client is not None
    other = KazooClient(member.address.hosts, client_id=client.client_id)
    other.start()
    other.stop()
    other.close()


def test_a_session_that_ends_takes_all_with_it_and_the_next_registers_again(
    group: Joined, nodes: Any, root: str
) -> None:
    member = group.join("a")
    before = until(lambda: dict(member.assignment().assigned) if len(member.assignment().assigned) == 4 else None)
    expire(member)
    until(lambda: not member.assignment().assigned)
    assert member.assignment().until < boot_time()
    after = until(lambda: dict(member.assignment().assigned) if len(member.assignment().assigned) == 4 else None)
    assert min(after.values()) > max(before.values())
    assert nodes.exists(f"{root}/consumers/{GROUP}/ids/a")


def test_a_cut_connection_stops_handing_out_and_a_short_one_loses_nothing(
    group: Joined, zookeeper: ZooKeeperServer, root: str
) -> None:
    with proxied(zookeeper.address) as proxy:
        member = group.join("a", address=f"zookeeper://{proxy.address}{root}")
        before = until(lambda: dict(member.assignment().assigned) if len(member.assignment().assigned) == 4 else None)
        until(lambda: member.assignment().until > boot_time())
        changes = group.changes["a"]
        proxy.cut()
        until(lambda: group.changes["a"] > changes)  # it is notified at once
        until(lambda: member.assignment().until > boot_time())
        assert member.assignment().assigned == before
        member.close()


def test_handing_out_ends_although_the_lost_connection_was_not_reported(
    group: Joined, zookeeper: ZooKeeperServer, root: str
) -> None:
    with proxied(zookeeper.address) as proxy:
        member = group.join("a", address=f"zookeeper://{proxy.address}{root}", seconds=SHORT_SECONDS)
        until(lambda: len(member.assignment().assigned) == 4 and member.assignment().until > boot_time())
        proxy.up = lambda data: b""
        proxy.cut_when_short = False
        swallowed_at = boot_time()
        ends = [member.assignment().until]
        while ends[-1] > boot_time():
            time.sleep(0.01)
            ends.append(member.assignment().until)
        assert max(ends) < swallowed_at + SHORT_SECONDS
        group.join("b")
        until(lambda: group.members["b"].assignment().assigned)
        assert boot_time() >= member.assignment().until
        member.close()


def test_a_node_that_may_not_be_made_is_a_final_failure(group: Joined, nodes: Any, root: str) -> None:
    nodes.ensure_path(f"{root}/consumers")
    nodes.set_acls(f"{root}/consumers", [make_digest_acl("a", "b", all=True)])
    member = group.join("a")
    assert isinstance(until(lambda: member.failure), NotAllowed)
    assert "does not allow" in member.idle_reason


def test_one_that_cannot_be_reached_says_so() -> None:
    now = [1000.0]
    member = GroupMembership("127.0.0.1:1", GROUP, "a", session_seconds=1, on_change=lambda: None, clock=lambda: now[0])
    member.set_topics({TOPIC: [0]})
    assert member.idle_reason == "" and member.generation == 0
    now[0] += 5
    assert "does not answer" in member.idle_reason
    member.close()
    member.close()
    member.set_topics({TOPIC: [0]})
    with pytest.raises(BadRequest):
        GroupMembership("", GROUP, "a", session_seconds=1, on_change=lambda: None)


def test_a_forked_child_joins_by_itself_and_leaves_the_parent_alone(group: Joined, nodes: Any, root: str) -> None:
    member = group.join("a")
    until(lambda: len(member.assignment().assigned) == 4)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            member.restart_as("b")
            assert not member.assignment().assigned
            member.set_topics({TOPIC: range(4)})
            until(lambda: len(member.assignment().assigned) == 2)
            member.close()
            code = 0
        finally:
            os._exit(code)
    until(lambda: group.shares() == {"a": [0, 1]})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(lambda: group.shares() == {"a": [0, 1, 2, 3]})


def test_a_machine_that_slept_is_sure_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    member = GroupMembership(
        "127.0.0.1:1", GROUP, "a", session_seconds=10, on_change=lambda: None, clock=lambda: now[0]
    )
    assert not member.may_deliver()
    member._state_machine.on_connected(7)
    member._state_machine.on_write_response(100.0)
    assert member.may_deliver()
    now[0] = 105.0
    assert not member.may_deliver()
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 3600.0}.__getitem__)
    assert boot_time() == 3600.0, "what has passed asleep, too"
