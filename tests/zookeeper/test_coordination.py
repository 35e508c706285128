"""Groups coordinated by a real ZooKeeper: members in this process, and processes that are cut, frozen and killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from tests.e2e.proxy import Proxy, proxied
from tests.scale import SCALE, seeded
from tests.zookeeper.worker import GROUP, TOPIC
from tfmq.errors import BadRequest, NotAllowed
from tfmq.offsets.stored import PartitionName
from tfmq.zookeeper.coordination import Coordination
from tools.rigs.zookeeper import ZooKeeperServer

PATIENCE_SECONDS = 60.0
SESSION_SECONDS = 5.0
"""Long enough for a machine that has other things to do."""
SHORT_SECONDS = 1.0


def until(what: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """What `what` gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.01)
    return found


class Joined:
    """Members of one group; all leave at the end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.members: dict[str, Coordination] = {}
        self.changes: dict[str, int] = {}

    def join(
        self, name: str, partitions: int = 4, address: str = "", seconds: float = SESSION_SECONDS
    ) -> Coordination:
        def changed() -> None:
            self.changes[name] = self.changes.get(name, 0) + 1

        member = self.members[name] = Coordination(
            address or self.address, GROUP, name, session_seconds=seconds, changed=changed
        )
        member.wants({TOPIC: range(partitions)})
        return member

    def releasing(self) -> None:
        """Everybody gives up at once what is revoked."""
        for member in self.members.values():
            member.release(member.share().revoked)

    def shares(self) -> dict[str, list[int]]:
        self.releasing()
        return {
            name: sorted(each.partition for each in member.share().granted)
            for name, member in self.members.items()
        }


@pytest.fixture
def group(address: str) -> Iterator[Joined]:
    group = Joined(address)
    yield group
    for member in group.members.values():
        member.close()


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
        member.wants({TOPIC: range(5)})
    until(lambda: group.shares() == {"b": [0, 1, 2, 3, 4]})


def test_a_partition_stays_with_its_owner_until_that_gives_it_up(group: Joined) -> None:
    first = group.join("b", 2)
    until(lambda: len(first.share().granted) == 2)
    second = group.join("a", 2)
    moving = until(lambda: first.share().revoked)
    assert moving == {PartitionName(TOPIC, 0)}
    assert until(lambda: second.why_idle).startswith("waiting until their owners finish")
    before = first.share().granted
    assert len(before) == 2 and not second.share().granted
    first.release(moving)
    after = until(lambda: second.share().granted)
    assert after[PartitionName(TOPIC, 0)] > max(before.values())
    assert second.generation == after[PartitionName(TOPIC, 0)]


def test_an_idle_member_says_why(group: Joined) -> None:
    group.join("a", 1)
    until(lambda: group.shares() == {"a": [0]})
    second = group.join("b", 1)
    until(lambda: "2 members" in second.why_idle)
    assert "tfmq topic grow" in second.why_idle and not group.members["a"].why_idle


def expire(member: Coordination) -> None:
    """End the session of `member` at the server, as if its time were over."""
    client = member._runner.client
    assert client is not None
    other = KazooClient(member.address.hosts, client_id=client.client_id)
    other.start()
    other.stop()
    other.close()


def test_a_session_that_ends_takes_all_with_it_and_the_next_registers_again(
    group: Joined, nodes: Any, root: str
) -> None:
    member = group.join("a")
    before = until(lambda: dict(member.share().granted) if len(member.share().granted) == 4 else None)
    expire(member)
    until(lambda: not member.share().granted)
    assert member.share().until < time.monotonic()
    after = until(lambda: dict(member.share().granted) if len(member.share().granted) == 4 else None)
    assert min(after.values()) > max(before.values())
    assert nodes.exists(f"{root}/consumers/{GROUP}/ids/a")


def test_a_cut_connection_stops_handing_out_and_a_short_one_loses_nothing(
    group: Joined, zookeeper: ZooKeeperServer, root: str
) -> None:
    with proxied(zookeeper.address) as proxy:
        member = group.join("a", address=f"zookeeper://{proxy.address}{root}")
        before = until(lambda: dict(member.share().granted) if len(member.share().granted) == 4 else None)
        until(lambda: member.share().until > time.monotonic())
        changes = group.changes["a"]
        proxy.cut()
        until(lambda: group.changes["a"] > changes)  # it is told at once
        until(lambda: member.share().until > time.monotonic())
        assert member.share().granted == before
        member.close()


def test_handing_out_ends_although_nobody_says_that_the_connection_is_gone(
    group: Joined, zookeeper: ZooKeeperServer, root: str
) -> None:
    with proxied(zookeeper.address) as proxy:
        member = group.join("a", address=f"zookeeper://{proxy.address}{root}", seconds=SHORT_SECONDS)
        until(lambda: len(member.share().granted) == 4 and member.share().until > time.monotonic())
        proxy.up = lambda data: b""
        proxy.cut_when_short = False
        swallowed_at = time.monotonic()
        ends = [member.share().until]
        while ends[-1] > time.monotonic():
            time.sleep(0.01)
            ends.append(member.share().until)
        assert max(ends) < swallowed_at + SHORT_SECONDS
        group.join("b")
        until(lambda: group.members["b"].share().granted)
        assert time.monotonic() >= member.share().until
        member.close()


def test_a_node_that_may_not_be_made_is_a_final_failure(group: Joined, nodes: Any, root: str) -> None:
    nodes.ensure_path(f"{root}/consumers")
    nodes.set_acls(f"{root}/consumers", [make_digest_acl("a", "b", all=True)])
    member = group.join("a")
    assert isinstance(until(lambda: member.failure), NotAllowed)
    assert "does not allow" in member.why_idle


def test_one_that_cannot_be_reached_says_so() -> None:
    now = [1000.0]
    member = Coordination(
        "127.0.0.1:1", GROUP, "a", session_seconds=1, changed=lambda: None, clock=lambda: now[0]
    )
    member.wants({TOPIC: [0]})
    assert member.why_idle == "" and member.generation == 0
    now[0] += 5
    assert "does not answer" in member.why_idle
    member.close()
    member.close()
    member.wants({TOPIC: [0]})
    with pytest.raises(BadRequest):
        Coordination("", GROUP, "a", session_seconds=1, changed=lambda: None)


def test_a_forked_child_joins_by_itself_and_leaves_the_parent_alone(
    group: Joined, nodes: Any, root: str
) -> None:
    member = group.join("a")
    until(lambda: len(member.share().granted) == 4)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            member.renew("b")
            assert not member.share().granted
            member.wants({TOPIC: range(4)})
            until(lambda: len(member.share().granted) == 2)
            member.close()
            code = 0
        finally:
            os._exit(code)
    until(lambda: group.shares() == {"a": [0, 1]})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(lambda: group.shares() == {"a": [0, 1, 2, 3]})


# Processes

PARTITIONS = 10
CUT_SECONDS = 30.0 if SCALE >= 1 else 1.2
WORKER_SESSION_SECONDS = 6.0 if SCALE >= 1 else 0.5


class Event(NamedTuple):
    """What a worker has written down."""

    time: float
    partition: int
    generation: int
    offset: int
    what: str
    who: str


class Crew:
    """Processes that work in one group, each behind a proxy of its own."""

    def __init__(self, zookeeper: ZooKeeperServer, root: str, folder: Path) -> None:
        self.zookeeper, self.root, self.folder = zookeeper, root, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.proxies: dict[str, Proxy] = {}

    def join(self, name: str) -> None:
        proxy = self.proxies[name] = Proxy(self.zookeeper.address)
        self.processes[name] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.zookeeper.worker",
                f"zookeeper://{proxy.address}{self.root}",
                name,
                str(WORKER_SESSION_SECONDS),
                str(PARTITIONS),
                str(self.log(name)),
            ],
            stdin=subprocess.DEVNULL,
            stderr=(self.folder / f"{name}.errors").open("wb"),
        )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def events(self) -> list[Event]:
        """What all have written, in the order of time."""
        found = []
        for name in self.processes:
            if self.log(name).exists():
                for line in self.log(name).read_text().splitlines():
                    words = line.split()
                    if len(words) == 5:  # a process that was killed may leave half a line
                        partition, generation, offset = map(int, words[1:4])
                        found.append(Event(float(words[0]), partition, generation, offset, words[4], name))
        return sorted(found)

    def working(self, names: set[str], since: float) -> bool:
        """Whether every partition was handed out after `since`, and each of `names` has handed out something."""
        events = [event for event in self.events() if event.time > since and event.what == "out"]
        partitions, workers = {each.partition for each in events}, {each.who for each in events}
        return partitions == set(range(PARTITIONS)) and workers >= names

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for proxy in self.proxies.values():
            proxy.close()


@contextmanager
def crew_of(zookeeper: ZooKeeperServer, root: str, folder: Path) -> Iterator[Crew]:
    crew = Crew(zookeeper, root, folder)
    try:
        yield crew
    finally:
        crew.end()


@contextmanager
def cut_off(proxies: Mapping[str, Proxy], silent: bool) -> Iterator[None]:
    """Nothing passes: connections stay open and silent, or break at once, each new one too."""
    for proxy in proxies.values():
        proxy.cut_when_short = False
        proxy.up = proxy.down = (lambda data: b"") if silent else (lambda data: None)
        if not silent:
            proxy.cut()
    yield
    for proxy in proxies.values():
        proxy.up = proxy.down = None
        proxy.cut()


def examine(crew: Crew) -> None:
    """0 dual owners, 0 offsets going back, nothing skipped."""
    for partition in range(PARTITIONS):
        mine = [event for event in crew.events() if event.partition == partition]
        handed_out = [event for event in mine if event.what == "out"]
        for earlier, later in pairwise(handed_out):
            assert earlier.generation <= later.generation, f"two owners: {earlier} {later}"
        saved = sorted(
            (event.generation, event.time, event.offset) for event in mine if event.what == "saved"
        )
        for before, after in pairwise(saved):
            assert before[2] <= after[2], f"{partition} went back: {before} {after}"
        owners: dict[int, list[int]] = {}
        for event in handed_out:
            owners.setdefault(event.generation, []).append(event.offset)
        reached = 0
        for offsets in (owners[generation] for generation in sorted(owners)):
            assert offsets == list(range(offsets[0], offsets[-1] + 1))
            assert offsets[0] <= reached, f"{partition}: something before {offsets[0]} was never handed out"
            reached = max(reached, offsets[-1] + 1)


@pytest.mark.timeout(600)
def test_cuts_freezes_and_kills_leave_one_owner_and_no_offset_goes_back(
    zookeeper: ZooKeeperServer, root: str, tmp_path: Path
) -> None:
    random = seeded("crew")
    with crew_of(zookeeper, root, tmp_path) as crew:
        for name in ("a", "b", "c"):
            crew.join(name)
        until(lambda: crew.working({"a", "b", "c"}, 0.0))
        for silent in (False, True):  # the network of one of them, then of all
            with cut_off({"b": crew.proxies["b"]} if silent else crew.proxies, silent):
                time.sleep(CUT_SECONDS)
            at = time.monotonic()
            until(partial(crew.working, {"a", "b", "c"}, at))
        zookeeper.freeze()
        time.sleep(CUT_SECONDS * random.uniform(0.5, 1))
        zookeeper.thaw()
        at = time.monotonic()
        until(lambda: crew.working({"a", "b", "c"}, at))
        crew.signal("c", signal.SIGSTOP)
        at = time.monotonic()
        until(lambda: crew.working({"a", "b"}, at + WORKER_SESSION_SECONDS))
        crew.signal("c", signal.SIGCONT)  # it comes back as if nothing had been
        at = time.monotonic()
        until(lambda: crew.working({"a", "b", "c"}, at))
        crew.signal("a", signal.SIGKILL)
        at = time.monotonic()
        until(lambda: crew.working({"b", "c"}, at))
        examine(crew)
