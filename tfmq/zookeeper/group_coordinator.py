"""Membership in a consumer group that is coordinated by ZooKeeper instead of the broker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfmq.errors import TfmqError
from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.connection import new_client
from tfmq.zookeeper.paths import BROKER_NUMBER, NodePaths, zookeeper_address
from tfmq.zookeeper.session import (
    NEVER,
    ConnectionLost,
    DeleteNode,
    GetChildren,
    GetNode,
    GetNodes,
    Node,
    Request,
    RequestSteps,
    SessionStateMachine,
    SessionThread,
    SetNode,
)

CLOSE_SECONDS: Final = 10.0
UNREACHABLE_SECONDS: Final = 3.0
"""If the session was not proved valid for this time, `idle_reason` reports that ZooKeeper does not respond."""


def boot_time() -> float:
    """Return the time (s) of a clock that also runs while the machine sleeps, because the session timeout of ZooKeeper
    goes on during a sleep. Linux's `time.monotonic` stops during a sleep."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class GroupMembership:
    """One member of a group that ZooKeeper coordinates, with a session of its own.

    Methods may be called in any thread; only `close` blocks. `session_seconds`: the session timeout that is requested;
    ZooKeeper may permit a shorter one. `on_change` is called in threads of this class when the result of `assignment`
    has changed, and must not block.
    """

    def __init__(
        self,
        address: str,
        group: str,
        member: str,
        *,
        session_seconds: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """Create the member without connecting. Raises BadRequest if `address` is invalid, NotSupported if kazoo is not
        installed."""
        self.address = zookeeper_address(address)
        new_client(self.address, session_seconds)
        self._group, self._seconds, self._on_change, self._clock = group, session_seconds, on_change, clock
        self.restart_as(member)

    def restart_as(self, member: str) -> None:
        """Become a new member in a forked child process. The parent's session is not touched."""
        layout = NodePaths(self.address.root, BROKER_NUMBER)
        self._state_machine = MembershipStateMachine(layout, self._group, member, self._seconds)
        self._session_thread = SessionThread(self.address, self._state_machine, self._on_change, self._clock)
        self._unreachable_at = float("inf")

    # Calls by which the consumer changes the membership

    def set_topics(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """Set the subscribed topics with their partitions. The first call joins the group."""
        runner = self._session_thread
        with runner.condition:
            if runner.is_closed:
                return
            self._state_machine.set_topics(partitions)
            if not runner.is_started:
                self._unreachable_at = self._clock() + UNREACHABLE_SECONDS
                runner.start()
            runner.wake()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Release partitions. The caller has finished their messages and stored their offsets."""
        with self._session_thread.condition:
            self._state_machine.release(names)
            self._session_thread.wake()

    # State of the membership, which the consumer reads

    def assignment(self) -> RangeAssignment:
        """Return the member's assignment. Its `until` is a time of the `clock` that the constructor was given."""
        with self._session_thread.condition:
            return self._state_machine.assignment()

    def may_deliver(self) -> bool:
        """Return whether the member certainly owns its partitions now. Consumers call this before each delivery."""
        return self._clock() < self.assignment().until

    @property
    def generation(self) -> int:
        """The highest generation of the assigned partitions; 0 if there are none."""
        return max(self.assignment().assigned.values(), default=0)

    @property
    def failure(self) -> TfmqError | None:
        """The permanent error because of which no partition is assigned to the member; None without one."""
        return self._session_thread.failure

    @property
    def idle_reason(self) -> str:
        """Why the member lacks partitions that it should have, as a text for users; "" if no partition is missing."""
        with self._session_thread.condition:
            coordinator = self._state_machine
            if self.failure is not None:
                return str(self.failure)
            now = self._clock()
            if coordinator.assignment().until > now:
                self._unreachable_at = now + UNREACHABLE_SECONDS
            elif now >= self._unreachable_at:
                return f"{self.address} does not answer."
            if coordinator.is_idle:
                return f"{coordinator.members} members, and no partition is left for this one: tfmq topic grow"
            return coordinator.waiting_reason()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Leave the group. If that takes longer than `seconds`, the member stays until the session timeout."""
        self._session_thread.close(seconds)


# The membership state machine, without ZooKeeper, threads or clock.

log = logging.getLogger("tfmq.consumer")

DELIVERY_FRACTION: Final = 0.5
"""The member delivers messages for this part of the session timeout after it sent the last write with a response.
ZooKeeper ends a session after the whole timeout or later. The rest is a reserve for servers of the ensemble that lag.
"""
WRITES_PER_TIMEOUT: Final = 6
"""Number of writes per session timeout that prove the session: if two of them are lost, delivery continues."""
ROUND_SECONDS: Final = 5.0
"""Interval at which a member checks whether the partitions for which it waits are free. A watch may trigger it too."""
ROUNDS_BEFORE_LOG: Final = 7
"""After this number of checks, a wait for partitions is logged. A short wait is normal, because handlers take time."""


class RangeAssignment(NamedTuple):
    """The partitions of a member. Messages of the partitions `assigned` may be delivered until the time `until`.

    `assigned`: the generation of each partition; if the generation has changed, the partition was lost and acquired
    again. `revoked`: the member must finish the messages of these partitions, then release them.
    """

    assigned: Mapping[PartitionName, int]
    revoked: frozenset[PartitionName]
    until: float


class MembershipStateMachine(SessionStateMachine):
    """State machine of one member. It yields the requests to ZooKeeper, and has no I/O.

    There is no leader. Each member computes its range from the list of members, releases partitions outside of the
    range, and acquires those inside. The owner of a partition is the member that has created the partition's owner
    node. A node can be created only after that of the previous owner is deleted, so there are never two owners. The
    owner node is ephemeral: it ends with the session. The member stops delivering before its session can expire: when
    half of the session timeout has passed since the last write with a response, or when the connection is lost. The
    creation id of the owner node, which only increases, is the generation. With it offset storages reject commits of
    former owners.

    `check_all` and `prove_session` are generators of requests. Their caller sends the responses into them, or throws
    ConnectionLost. The state machine sets `changed` when `assignment` has changed; the caller resets `changed`.
    """

    def __init__(self, layout: NodePaths, group: str, member: str, session_seconds: float) -> None:
        super().__init__(layout, session_seconds)
        self.group, self.member = group, member
        self.waits_for: dict[PartitionName, str] = {}
        """Partitions that this member should own, each with its present owner."""
        self.members = 0  # in the group, as far as known
        self.is_idle = False
        """Whether this member's range is empty, because the group has more members than partitions."""
        self._subscribed: dict[str, Sequence[int]] = {}
        self._registered = b""
        self._owned: dict[PartitionName, int] = {}
        self._revoked: set[PartitionName] = set()
        self._released: set[PartitionName] = set()
        self._uncertain: set[PartitionName] = set()
        self._until = NEVER
        self._prove_at = NEVER
        self._rounds_waiting = 0

    # Events, which the session's thread and the consumer report

    def on_disconnected(self) -> None:
        """Handle a lost connection: deliver nothing until a write proves that the session is still valid."""
        super().on_disconnected()
        self._until = self._prove_at = NEVER
        self.changed = True

    def on_session_lost(self) -> None:
        """Handle the end of the session: ZooKeeper has deleted the member's nodes, so the member owns nothing."""
        super().on_session_lost()
        self._registered = b""
        for each in (self._owned, self._revoked, self._released, self.waits_for):
            each.clear()  # `_uncertain` stays: its requests may have been done by the new session

    def set_topics(self, partitions: Mapping[str, Sequence[int]]) -> None:
        if partitions != self._subscribed:
            self._subscribed = dict(partitions)
            self.request_round()

    def release(self, names: Iterable[PartitionName]) -> None:
        for name in names:
            if name in self._owned:
                self._released.add(name)
                self._revoked.discard(name)
                self.request_round()

    def on_write_response(self, asked_at: float) -> None:
        if self.is_connected:
            self._until = max(self._until, asked_at + self.session_seconds * DELIVERY_FRACTION)
            self._prove_at = max(self._prove_at, asked_at + self.session_seconds / WRITES_PER_TIMEOUT)

    def assignment(self) -> RangeAssignment:
        assigned = {name: number for name, number in self._owned.items() if name not in self._released}
        return RangeAssignment(assigned, frozenset(self._revoked), self._until)

    # Actions: the requests to ZooKeeper that are due

    def next_due(self) -> float:
        if not self.is_connected or not self._subscribed:
            return float("inf")
        return min(self._round_at, self._prove_at)

    def next_steps(self, now: float) -> RequestSteps | None:
        if self.next_due() > now:
            return None
        return self.prove_session() if self._registered and self._prove_at <= now else self.check_all(now)

    def prove_session(self) -> RequestSteps:
        """Write the member's node; the response proves the session. If there is no node, register again."""
        if not (yield SetNode(self._member_path(), self._topic_list())):
            self._registered = b""
            self.request_round()

    def check_all(self, now: float) -> RequestSteps:
        """Register the member, revoke its partitions outside of its range, delete the owner nodes of partitions that it
        has released, and acquire the partitions in its range."""
        self._round_at = now + self.session_seconds
        if not (yield from self._register()):
            self._round_at = min(self._round_at, now + ROUND_SECONDS)
            return
        yield from self._verify()
        target = range_of(self.member, (yield from self._find_members()), self._subscribed)
        self._revoke_outside(target)
        yield from self._delete_released(target)
        yield from self._acquire(target)
        self._log_waiting()
        if self.waits_for:
            self._round_at = min(self._round_at, now + ROUND_SECONDS)

    def _register(self) -> Generator[Request, Any, bool]:
        """Create or update the member's node. Return False if that failed, for example because the node belongs to
        another session."""
        topics = self._topic_list()
        if not self._registered:
            node = yield from self.create_or_get(self._member_path(), topics)
            if node is None or node.session != self.session:
                return False
            self._registered = node.data
        if self._registered != topics:
            if not (yield SetNode(self._member_path(), topics)):
                self._registered = b""
                return False
            self._registered = topics
        return True

    def _find_members(self) -> Generator[Request, Any, dict[str, frozenset[str]]]:
        """Return the members of the group, each with its topics."""
        names = yield GetChildren(self._layout.members(self.group))
        nodes = yield GetNodes([self._layout.member(self.group, name) for name in names])
        members = {
            name: frozenset(node.data.decode("utf-8", "replace").split(","))
            for name, node in zip(names, nodes, strict=True)
            if node is not None
        }
        members[self.member] = frozenset(self._subscribed)  # which its node may not have yet
        self.members = len(members)
        return members

    def _verify(self) -> RequestSteps:
        """Stop owning partitions whose owner node was deleted or replaced, because another member may own them now."""
        names = sorted(self._owned)
        nodes = yield GetNodes([self._layout.owner(self.group, name) for name in names])
        for name, node in zip(names, nodes, strict=True):
            if node is None or node.session != self.session or node.created != self._owned[name]:
                del self._owned[name]
                self._revoked.discard(name)
                self._released.discard(name)
                self.changed = True

    def _revoke_outside(self, target: frozenset[PartitionName]) -> None:
        """Revoke the partitions that are not in `target`, the member's range."""
        self.is_idle = not target and any(self._subscribed.values())
        revoked = self._owned.keys() - target - self._released
        if revoked != self._revoked:
            self._revoked, self.changed = set(revoked), True

    def _delete_released(self, target: frozenset[PartitionName]) -> RequestSteps:
        """Delete the owner nodes of released partitions, so that other members can acquire them.

        Also delete owner nodes outside of `target`, the member's range, if it is unknown whether this member created
        them. A deletion requires that the member's own node exists. This node ends with the session, and is created
        again only by `check_all` in the next session. So a request that takes effect late cannot delete the owner node
        of another member.
        """
        for name in sorted(self._released | (self._uncertain - target - self._owned.keys())):
            path = self._layout.owner(self.group, name)
            node: Node | None = yield GetNode(path)
            is_mine = node is not None and node.session == self.session
            if node is not None and is_mine and not (yield DeleteNode(path, node.version, self._member_path())):
                self._registered = b""
                raise ConnectionLost(f"{path} or the member's own node has changed")
            self._owned.pop(name, None)
            self._released.discard(name)
            self._uncertain.discard(name)

    def _acquire(self, target: frozenset[PartitionName]) -> RequestSteps:
        """Create the owner nodes of the partitions in `target`. Put the partitions that other members still own into
        `waits_for`."""
        self.waits_for.clear()
        for name in sorted(target - self._owned.keys()):
            path = self._layout.owner(self.group, name)
            self._uncertain.add(name)
            node = yield from self.create_or_get(path, self.member.encode())
            self._uncertain.discard(name)
            if node is None:
                self.waits_for[name] = ""
                self.request_round()
            elif node.session != self.session:
                self.waits_for[name] = node.data.decode("utf-8", "replace")
            else:
                self._owned[name] = node.created
                self.changed = True

    def _log_waiting(self) -> None:
        self._rounds_waiting = self._rounds_waiting + 1 if self.waits_for else 0
        if self._rounds_waiting == ROUNDS_BEFORE_LOG:
            log.warning("Group %s: %s", self.group, self.waiting_reason())

    def waiting_reason(self) -> str:
        """Return a sentence that names the partitions for which the member waits; "" if it waits for none."""
        if not self.waits_for:
            return ""
        names = ", ".join(f"{name} ({owner or 'free'})" for name, owner in sorted(self.waits_for.items()))
        return f"waiting until their owners finish what they have in work: {names}."

    def _member_path(self) -> str:
        return self._layout.member(self.group, self.member)

    def _topic_list(self) -> bytes:
        return ",".join(sorted(self._subscribed)).encode()


# Range assignment, as in MetaMorphosis: every member computes the same result.


def range_of(
    member: str, members: Mapping[str, Iterable[str]], partitions: Mapping[str, Sequence[int]]
) -> frozenset[PartitionName]:
    """Return the partitions of `member`. `members`: the topics of each member, including `member`.

    The sorted partitions of each topic are divided into contiguous ranges, one for each member that subscribes to the
    topic, in the order of the members' names. If that leaves a remainder, the first ranges have one partition more.
    """
    found: set[PartitionName] = set()
    for topic, numbers in partitions.items():
        sharing = sorted(each for each, topics in members.items() if topic in topics)
        if member in sharing:
            index, ordered = sharing.index(member), sorted(numbers)
            length, longer = divmod(len(ordered), len(sharing))
            start = index * length + min(index, longer)
            end = start + length + (index < longer)
            found.update(PartitionName(topic, number) for number in ordered[start:end])
    return frozenset(found)
