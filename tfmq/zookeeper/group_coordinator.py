"""Membership in a consumer group that is coordinated by ZooKeeper instead of the broker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfmq.errors import TfmqError
from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.connection import new_client
from tfmq.zookeeper.paths import BROKER, Layout, zookeeper_address
from tfmq.zookeeper.session import Children, Create, Cut, Delete, Node, Read, ReadAll, Request, Runner, Write

CLOSE_SECONDS: Final = 10.0
PATIENCE_SECONDS: Final = 3.0
"""Time after the start, or after the last session response, before a member reports that ZooKeeper is unreachable."""


def uptime() -> float:
    """Return a clock that runs while the machine sleeps, as sessions do.

    Linux's `time.monotonic` does not.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Coordination:
    """One member of a group, with its own session.

    Methods may be called in any thread; only `close` blocks.

    `session_seconds` is the requested session timeout; ZooKeeper may grant less. `on_change` is called in threads of
    this class when `assignment` has changed, and must not block.
    """

    def __init__(
        self,
        address: str,
        group: str,
        member: str,
        *,
        session_seconds: float,
        changed: Callable[[], None],
        clock: Callable[[], float] = uptime,
    ) -> None:
        """Do not connect yet. Raises BadRequest for an invalid address, NotSupported without kazoo."""
        self.address = zookeeper_address(address)
        new_client(self.address, session_seconds)
        self._group, self._seconds, self._changed, self._clock = group, session_seconds, changed, clock
        self._begin(member)

    def _begin(self, member: str) -> None:
        layout = Layout(self.address.root, BROKER)
        self._coordinator = Coordinator(layout, self._group, member, self._seconds)
        self._runner = Runner(self.address, self._coordinator, self._changed, self._clock)
        self._patient_until = float("inf")

    # Input of the consumer

    def wants(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """Set the subscribed topics with their partitions. The first call joins the group."""
        runner = self._runner
        with runner.condition:
            if runner.is_closed:
                return
            self._coordinator.wants(partitions)
            if not runner.is_started:
                self._patient_until = self._clock() + PATIENCE_SECONDS
                runner.start()
            runner.wake()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Release partitions: no message of them is in progress, and all offsets are stored."""
        with self._runner.condition:
            self._coordinator.release(names)
            self._runner.wake()

    # State for the consumer

    def share(self) -> Share:
        """Return the member's assignment. Its time `until` is of the member's clock, and near."""
        with self._runner.condition:
            return self._coordinator.share()

    def is_sure(self) -> bool:
        """Return whether the member certainly owns its partitions now.

        To be called for each message.
        """
        return self._clock() < self.share().until

    @property
    def generation(self) -> int:
        """The highest generation of its partitions; 0 if it has none."""
        return max(self.share().granted.values(), default=0)

    @property
    def failure(self) -> TfmqError | None:
        """The permanent error that prevents any assignment; None if there is none."""
        return self._runner.failure

    @property
    def why_idle(self) -> str:
        """Why partitions are missing, for display; "" if the member has what it should have."""
        with self._runner.condition:
            coordinator = self._coordinator
            if self.failure is not None:
                return str(self.failure)
            now = self._clock()
            if coordinator.share().until > now:
                self._patient_until = now + PATIENCE_SECONDS
            elif now >= self._patient_until:
                return f"{self.address} does not answer."
            if coordinator.is_idle:
                return (
                    f"{coordinator.members} members, and no partition is left for this one: tfmq topic grow"
                )
            return coordinator.why_waiting()

    # Close

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Leave the group.

        Its partitions are free on return, or after the session timeout if that takes too long.
        """
        self._runner.close(seconds)

    def renew(self, member: str) -> None:
        """Become a new member, in a forked child.

        It joins at the next `set_topics`; the parent's session stays as it is.
        """
        self._begin(member)


# The membership state machine, without ZooKeeper, threads or clock.

log = logging.getLogger("tfmq.consumer")

SURE_PART: Final = 0.5
"""Part of the session timeout after the last answered write during which the member delivers messages. ZooKeeper ends a
session after the whole timeout at the earliest; the rest covers servers of the ensemble that lag."""
BEATS: Final = 6
"""Writes per session timeout, so that two lost ones do not matter."""
LOOK_SECONDS: Final = 5.0
"""Interval of checks for partitions that other members still own; watches report their release as well."""
LOOKS: Final = 7
"""Number of checks after which the wait is logged. It is no error: a message handler may run arbitrarily long."""
NEVER: Final = float("-inf")

Course = Generator[Request, Any, None]
"""Yields requests and receives their responses; a `ConnectionLost` that is thrown in must propagate."""


class Share(NamedTuple):
    """The partitions of a member: deliver from `assigned` until the time `until`.

    Finish and release the `revoked`.

    The numbers are generations. A partition whose generation has changed was lost and acquired again.
    """

    granted: Mapping[PartitionName, int]
    revoked: frozenset[PartitionName]
    until: float


class Coordinator:
    """State machine of one member, which yields the requests to ZooKeeper.

    There is no leader. Each member computes its range from the list of members, releases partitions outside of it,
    and acquires those inside: a partition only after its previous owner's node is deleted and its own is created, so
    that there are never two owners. The owner node is ephemeral and ends with the session. The member stops
    delivering before its session can expire: when half of the session timeout has passed since the last answered
    write, or when the connection is lost. The creation id of the owner node, which only increases, is the generation,
    with which storages fence whatever arrives late.

    `check_all` and `prove_session` are generators of requests. Their caller sends the responses into them, or throws
    ConnectionLost. `changed` is set when `assignment` has changed; its reader resets it.
    """

    def __init__(self, layout: Layout, group: str, member: str, session_seconds: float) -> None:
        self.group, self.member = group, member
        self.session_seconds = session_seconds
        self.changed = False
        self.waits_for: dict[PartitionName, str] = {}
        """Partitions that this member should own, with their current owners."""
        self.members = 0
        """Number of members in the group, as far as known."""
        self.is_idle = False
        """Whether there are more members than partitions, and this one's range is empty."""
        self._layout = layout
        self._wanted: dict[str, Sequence[int]] = {}
        self._session = 0
        self._connected = False
        self._registered = b""
        self._held: dict[PartitionName, int] = {}
        self._revoked: set[PartitionName] = set()
        self._released: set[PartitionName] = set()
        self._uncertain: set[PartitionName] = set()
        self._until = NEVER
        self._look_at = NEVER
        self._beat_at = NEVER
        self._looks = 0

    # Events

    def connected(self, session: int) -> None:
        """Handle a new connection. In a new session, everything the member owned is lost."""
        if session != self._session:
            self.lost()
        self._session, self._connected = session, True
        self.look()

    def cut(self) -> None:
        """Handle a lost connection.

        The session may still be valid, but nothing is delivered until that is known.
        """
        self._connected = False
        self._until = self._beat_at = NEVER
        self.changed = True

    def lost(self) -> None:
        """Handle the end of the session, with everything that belongs to it."""
        self.cut()
        self._session, self._registered = 0, b""
        for each in (self._held, self._revoked, self._released, self.waits_for):
            each.clear()  # `_uncertain` stays: its requests may have been done by the new session

    def look(self) -> None:
        """Request a round: members, owners, subscription or released partitions changed."""
        self._look_at = NEVER

    def wants(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """Set the subscribed topics with their partitions."""
        if partitions != self._wanted:
            self._wanted = dict(partitions)
            self.look()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Release partitions: no message of them is in progress, and all offsets are stored."""
        for name in names:
            if name in self._held:
                self._released.add(name)
                self._revoked.discard(name)
                self.look()

    def heard(self, asked_at: float) -> None:
        """Handle the response to a write sent at `asked_at`, which proves the session."""
        if self._connected:
            self._until = max(self._until, asked_at + self.session_seconds * SURE_PART)
            self._beat_at = max(self._beat_at, asked_at + self.session_seconds / BEATS)

    # State

    def share(self) -> Share:
        """Return the current assignment."""
        granted = {name: number for name, number in self._held.items() if name not in self._released}
        return Share(granted, frozenset(self._revoked), self._until)

    @property
    def session(self) -> int:
        """The known session; 0: none."""
        return self._session

    # Actions

    def due(self) -> float:
        """Return when the next action is due; infinity while disconnected."""
        if not self._connected or not self._wanted:
            return float("inf")
        return min(self._look_at, self._beat_at)

    def next_course(self, now: float) -> Course | None:
        """Return the steps that are due now; None if nothing is."""
        if self.due() > now:
            return None
        return self.beat() if self._registered and self._beat_at <= now else self.round(now)

    def beat(self) -> Course:
        """Write the member's node, which proves that the session is valid."""
        if not (yield Write(self._me(), self._topics())):
            self._registered = b""
            self.look()

    def round(self, now: float) -> Course:
        """Check everything: register, release partitions, acquire partitions."""
        self._look_at = now + self.session_seconds
        if not (yield from self._register()):
            self._look_at = min(self._look_at, now + LOOK_SECONDS)
            return
        yield from self._verify()
        target = range_of(self.member, (yield from self._find_members()), self._wanted)
        self._aim(target)
        yield from self._give_up(target)
        yield from self._take(target)
        self._tell_waiting()
        if self.waits_for:
            self._look_at = min(self._look_at, now + LOOK_SECONDS)

    def _register(self) -> Generator[Request, Any, bool]:
        """Create or update the member's node.

        Return False while an earlier session with the same name exists.
        """
        topics = self._topics()
        if not self._registered:
            node = yield Create(self._me(), topics)
            if node is None:
                node = yield Read(self._me())
            if node is None or node.session != self._session:
                return False
            self._registered = node.data
        if self._registered != topics:
            if not (yield Write(self._me(), topics)):
                self._registered = b""
                return False
            self._registered = topics
        return True

    def _find_members(self) -> Generator[Request, Any, dict[str, frozenset[str]]]:
        """Return the members and their topics.

        For itself the current subscription instead of the node's.
        """
        names = yield Children(self._layout.members(self.group))
        nodes = yield ReadAll([self._layout.member(self.group, name) for name in names])
        members = {
            name: frozenset(node.data.decode("utf-8", "replace").split(","))
            for name, node in zip(names, nodes, strict=True)
            if node is not None
        }
        members[self.member] = frozenset(self._wanted)
        self.members = len(members)
        return members

    def _verify(self) -> Course:
        """Drop partitions whose owner node was deleted or replaced: another member may own them."""
        names = sorted(self._held)
        nodes = yield ReadAll([self._layout.owner(self.group, name) for name in names])
        for name, node in zip(names, nodes, strict=True):
            if node is None or node.session != self._session or node.created != self._held[name]:
                del self._held[name]
                self._revoked.discard(name)
                self._released.discard(name)
                self.changed = True

    def _aim(self, target: frozenset[PartitionName]) -> None:
        """Revoke partitions outside of the range.

        The consumer finishes them, however long that takes.
        """
        self.is_idle = not target and any(self._wanted.values())
        revoked = self._held.keys() - target - self._released
        if revoked != self._revoked:
            self._revoked, self.changed = set(revoked), True

    def _give_up(self, target: frozenset[PartitionName]) -> Course:
        """Delete the owner nodes of released partitions.

        Those of partitions whose acquisition had an unknown outcome are deleted too.

        The deletion requires the member's own node, which ends with the session and is created again only by a round
        of the next session. So a request that takes effect late cannot delete the node of another member.
        """
        for name in sorted(self._released | (self._uncertain - target - self._held.keys())):
            path = self._layout.owner(self.group, name)
            node: Node | None = yield Read(path)
            is_mine = node is not None and node.session == self._session
            if node is not None and is_mine and not (yield Delete(path, node.version, self._me())):
                self._registered = b""
                raise Cut(f"{path} or the member's own node has changed")
            self._held.pop(name, None)
            self._released.discard(name)
            self._uncertain.discard(name)

    def _take(self, target: frozenset[PartitionName]) -> Course:
        """Create the owner nodes of the member's partitions; wait where another one exists."""
        self.waits_for.clear()
        for name in sorted(target - self._held.keys()):
            path = self._layout.owner(self.group, name)
            self._uncertain.add(name)
            node: Node | None = yield Create(path, self.member.encode())
            if node is None:
                node = yield Read(path)
            self._uncertain.discard(name)
            if node is None:
                self.waits_for[name] = ""
                self.look()
            elif node.session != self._session:
                self.waits_for[name] = node.data.decode("utf-8", "replace")
            else:
                self._held[name] = node.created
                self.changed = True

    def _tell_waiting(self) -> None:
        """Log a long wait for partitions once."""
        self._looks = self._looks + 1 if self.waits_for else 0
        if self._looks == LOOKS:
            log.warning("Group %s: %s", self.group, self.why_waiting())

    def why_waiting(self) -> str:
        """Return a sentence on what the member waits for; "" if for nothing."""
        if not self.waits_for:
            return ""
        names = ", ".join(f"{name} ({owner or 'free'})" for name, owner in sorted(self.waits_for.items()))
        return f"waiting until their owners finish what they have in work: {names}."

    def _me(self) -> str:
        return self._layout.member(self.group, self.member)

    def _topics(self) -> bytes:
        return ",".join(sorted(self._wanted)).encode()


# Range assignment of MetaMorphosis: every member computes the same result.


def range_of(
    member: str, members: Mapping[str, Iterable[str]], partitions: Mapping[str, Sequence[int]]
) -> frozenset[PartitionName]:
    """Return the partitions of `member`.

    `members` has the topics of each member, itself included.

    The sorted partitions of each topic are cut into one run per subscribed member, the first ones longer by one if the
    numbers do not divide. The sorted members get one run each.
    """
    found: set[PartitionName] = set()
    for topic, numbers in partitions.items():
        sharing = sorted(each for each, topics in members.items() if topic in topics)
        if member in sharing:
            place, ordered = sharing.index(member), sorted(numbers)
            length, longer = divmod(len(ordered), len(sharing))
            start = place * length + min(place, longer)
            end = start + length + (place < longer)
            found.update(PartitionName(topic, number) for number in ordered[start:end])
    return frozenset(found)
