"""A member of a group that ZooKeeper coordinates: the `Coordinator` on a session of its own."""

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
"""So long behind its start, or the last answer that counted, a member does not complain that nobody answers."""


def uptime() -> float:
    """A clock that goes on while the machine sleeps, as sessions do; `time.monotonic` of Linux stands still then."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Coordination:
    """One member. No method waits, but `close` for a moment; all may be called from any thread.

    `session_seconds`: what ZooKeeper is asked for; it may give less · `changed` is called, in threads of this class,
    when `share` has something new, and must not wait.
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
        """Touches no network. Raises BadRequest for what is no address, NotSupported without kazoo."""
        self.address = zookeeper_address(address)
        new_client(self.address, session_seconds)
        self._group, self._seconds, self._changed, self._clock = group, session_seconds, changed, clock
        self._begin(member)

    def _begin(self, member: str) -> None:
        layout = Layout(self.address.root, BROKER)
        self._coordinator = Coordinator(layout, self._group, member, self._seconds)
        self._runner = Runner(self.address, self._coordinator, self._changed, self._clock)
        self._patient_until = float("inf")

    # What it is told

    def wants(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """The topics that this member reads, and the partitions that they have now. The first time it joins."""
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
        """Nothing of these is in work, and all is saved: somebody else may have them."""
        with self._runner.condition:
            self._coordinator.release(names)
            self._runner.wake()

    # What it says

    def share(self) -> Share:
        """What this member has; see `Share`. The time `until` is of its clock, and soon over."""
        with self._runner.condition:
            return self._coordinator.share()

    def is_sure(self) -> bool:
        """Whether what it has is its own at this moment: ask at each message."""
        return self._clock() < self.share().until

    @property
    def generation(self) -> int:
        """The highest generation of what it has; 0: it has nothing."""
        return max(self.share().granted.values(), default=0)

    @property
    def failure(self) -> TfmqError | None:
        """Why it will never have anything; None: it may."""
        return self._runner.failure

    @property
    def why_idle(self) -> str:
        """Why there is nothing, or not all, to be had; "": it has what is its own."""
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

    # The end

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Leave: what this member had is free when this returns, or else when its session is over."""
        self._runner.close(seconds)

    def renew(self, member: str) -> None:
        """In a forked child: it is a member of its own, which joins when it says what it wants. The parent's session,
        and its connection, are left alone.
        """
        self._begin(member)


# A member of a group that ZooKeeper coordinates, without ZooKeeper: what it asks, and what it may hand out.
#
# Nobody decides for the others. Each member works out its range from who is there, gives up what is not in it, and
# takes what is, each partition only when the node of its owner is gone and its own is made: so there are never two.
# The node ends with the session, and the member knows before ZooKeeper does that the session may end: it hands out
# nothing behind half of the session's time from the last change that ZooKeeper has answered, nor while the connection
# is cut. The number of the owner's node, which only grows, is the generation: storages fence with it whatever comes
# later all the same.
#
# No threads, no network, no clock: `round` and `beat` are generators of requests, and whoever runs them sends back the
# answers, or throws `Cut`.

log = logging.getLogger("tfmq.consumer")

SURE_PART: Final = 0.5
"""Of a session's time: so long after a question that was answered the member goes on handing out. ZooKeeper ends the
session after all of its time at the earliest; the rest is for members of the ensemble that hear of each other late."""
BEATS: Final = 6
"""Questions in a session's time, so that two that are lost do not matter."""
LOOK_SECONDS: Final = 5.0
"""How soon partitions that others still have are looked at again; their end is told as well."""
LOOKS: Final = 7
"""After so many it is said who has them, and it goes on: a message may take its handler as long as it likes."""
NEVER: Final = float("-inf")

Course = Generator[Request, Any, None]
"""Requests go out, answers come in; a `Cut` that is thrown in comes out again."""


class Share(NamedTuple):
    """What a member has: hand out of `granted` until the time `until`, and finish, save and release what is `revoked`.

    The numbers are generations. A partition whose generation has changed was lost, and taken again.
    """

    granted: Mapping[PartitionName, int]
    revoked: frozenset[PartitionName]
    until: float


class Coordinator:
    """One member. `changed` is True when `share` has something new; whoever takes note of it sets it False."""

    def __init__(self, layout: Layout, group: str, member: str, session_seconds: float) -> None:
        self.group, self.member = group, member
        self.session_seconds = session_seconds
        self.changed = False
        self.waits_for: dict[PartitionName, str] = {}
        """What should be this member's, and who has it."""
        self.members = 0
        """How many members the group has, as far as it is known."""
        self.is_idle = False
        """There are more members than partitions, and this one's range is empty."""
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

    # What happens

    def connected(self, session: int) -> None:
        """There is a connection; of another session than before, it has nothing of what it had."""
        if session != self._session:
            self.lost()
        self._session, self._connected = session, True
        self.look()

    def cut(self) -> None:
        """The connection is gone. The session may go on; until that is known, nothing is handed out."""
        self._connected = False
        self._until = self._beat_at = NEVER
        self.changed = True

    def lost(self) -> None:
        """The session is over, and everything that belongs to it."""
        self.cut()
        self._session, self._registered = 0, b""
        for each in (self._held, self._revoked, self._released, self.waits_for):
            each.clear()  # not what is uncertain: it may have been done in the session that comes

    def look(self) -> None:
        """Something changed: members, owners, what is wanted, what was released."""
        self._look_at = NEVER

    def wants(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """The topics that this member reads, and the partitions that they have."""
        if partitions != self._wanted:
            self._wanted = dict(partitions)
            self.look()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Nothing of these is in work, and all is saved: somebody else may have them."""
        for name in names:
            if name in self._held:
                self._released.add(name)
                self._revoked.discard(name)
                self.look()

    def heard(self, asked_at: float) -> None:
        """A change that was asked for at `asked_at`, in the session that there is, has been answered."""
        if self._connected:
            self._until = max(self._until, asked_at + self.session_seconds * SURE_PART)
            self._beat_at = max(self._beat_at, asked_at + self.session_seconds / BEATS)

    # What it has

    def share(self) -> Share:
        """What it has now."""
        granted = {name: number for name, number in self._held.items() if name not in self._released}
        return Share(granted, frozenset(self._revoked), self._until)

    @property
    def session(self) -> int:
        """The session that it knows of; 0: none."""
        return self._session

    # What it does

    def due(self) -> float:
        """When something is to be done next; infinity while it is cut off."""
        if not self._connected or not self._wanted:
            return float("inf")
        return min(self._look_at, self._beat_at)

    def next_course(self, now: float) -> Course | None:
        """What is to be done now, if anything is."""
        if self.due() > now:
            return None
        return self.beat() if self._registered and self._beat_at <= now else self.round(now)

    def beat(self) -> Course:
        """Ask something that proves that the session lives."""
        if not (yield Write(self._me(), self._topics())):
            self._registered = b""
            self.look()

    def round(self, now: float) -> Course:
        """Look at everything: register, give up, take."""
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
        """Be among the members; False while an earlier session of the same name has not ended."""
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
        """The members and their topics; itself as it is, whatever it finds of itself."""
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
        """An owner's node that somebody has removed is one that somebody else may have made."""
        names = sorted(self._held)
        nodes = yield ReadAll([self._layout.owner(self.group, name) for name in names])
        for name, node in zip(names, nodes, strict=True):
            if node is None or node.session != self._session or node.created != self._held[name]:
                del self._held[name]
                self._revoked.discard(name)
                self._released.discard(name)
                self.changed = True

    def _aim(self, target: frozenset[PartitionName]) -> None:
        """Take back what is not this member's any more; the client finishes it, however long that takes."""
        self.is_idle = not target and any(self._wanted.values())
        revoked = self._held.keys() - target - self._released
        if revoked != self._revoked:
            self._revoked, self.changed = set(revoked), True

    def _give_up(self, target: frozenset[PartitionName]) -> Course:
        """Remove the nodes of what was released, and of what was taken in a moment that nobody answered for.

        Only while its own node among the members is there: that ends with the session, and nothing but a round of the
        next session makes it again. So what was asked in one session, and is done late, removes nobody else's node.
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
        """Make the nodes of what is this member's; where there is one, its end is waited for."""
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
        """Say once for whom it waits when it waits long."""
        self._looks = self._looks + 1 if self.waits_for else 0
        if self._looks == LOOKS:
            log.warning("Group %s: %s", self.group, self.why_waiting())

    def why_waiting(self) -> str:
        """A sentence about what it waits for; "": nothing."""
        if not self.waits_for:
            return ""
        names = ", ".join(f"{name} ({owner or 'free'})" for name, owner in sorted(self.waits_for.items()))
        return f"waiting until their owners finish what they have in work: {names}."

    def _me(self) -> str:
        return self._layout.member(self.group, self.member)

    def _topics(self) -> bytes:
        return ",".join(sorted(self._wanted)).encode()


# Who gets which partitions: the ranges of MetaMorphosis, as a pure function that every member works out alike.


def range_of(
    member: str, members: Mapping[str, Iterable[str]], partitions: Mapping[str, Sequence[int]]
) -> frozenset[PartitionName]:
    """The partitions of `member`, where `members` names the topics of each, itself included.

    For each topic the partitions in order are cut into as many pieces as it has members, the first ones longer by one
    where that does not come out even; the members in order take one each.
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
