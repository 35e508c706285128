"""A ZooKeeper and members of a group in virtual time: sessions that end, connections that break, processes that freeze.

Requests and answers take time; what is on its way when a connection breaks may have been done or not. A member looks
at its share before it hands out a message, works on it for a while, and saves the offset in a storage that fences.
Whatever happens: at no moment do two members hand out one partition, and no offset goes back.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.group_coordinator import MembershipStateMachine, RequestSteps
from tfmq.zookeeper.paths import NodePaths
from tfmq.zookeeper.session import (
    WRITES,
    ConnectionLost,
    CreateNode,
    DeleteNode,
    GetChildren,
    GetNode,
    GetNodes,
    Node,
    Request,
    SetNode,
)

SESSION_SECONDS = 10.0
PING_SECONDS = SESSION_SECONDS / 3
SILENCE_SECONDS = SESSION_SECONDS * 2 / 3
"""After that a client takes its connection for broken."""
TOPIC = "orders"
MEMBERS = 12


class Time:
    """A queue of what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), what))

    def run(self, until: float, look: Callable[[], None]) -> None:
        """Everything up to then; `look` after each event."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
            look()
        self.now = until


class Server:
    """The nodes, and the sessions that hold some of them."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.nodes: dict[str, Node] = {}
        self.heard: dict[int, float] = {}
        self.watches: dict[str, dict[Member, None]] = {}
        self.changes = 0
        self.sessions = itertools.count(1)

    def begin(self) -> int:
        session = next(self.sessions)
        self.touch(session, True)
        self.time.after(SESSION_SECONDS, lambda: self.expire(session))
        return session

    def touch(self, session: int, begin: bool = False) -> bool:
        """Whether the session lives; then it does for another while."""
        if not begin and session not in self.heard:
            return False
        self.heard[session] = self.time.now
        return True

    def expire(self, session: int) -> None:
        if session not in self.heard:
            return
        left = self.heard[session] + SESSION_SECONDS - self.time.now
        if left > 0:
            self.time.after(left, lambda: self.expire(session))
            return
        self.end(session)

    def end(self, session: int) -> None:
        self.heard.pop(session, None)
        for path in [path for path, node in self.nodes.items() if node.session == session]:
            self.remove(path)

    def remove(self, path: str) -> None:
        self.changes += 1
        del self.nodes[path]
        self.tell(path)

    def tell(self, path: str) -> None:
        for each in (path, path.rpartition("/")[0] + "/*"):
            for member in self.watches.pop(each, {}):
                member.reported()

    def answer(self, member: Member, session: int, request: Request) -> Any:
        if isinstance(request, GetChildren):
            self.watches.setdefault(request.path + "/*", {})[member] = None
            return sorted(path.rpartition("/")[2] for path in self.nodes if path.rpartition("/")[0] == request.path)
        if isinstance(request, GetNode):
            self.watches.setdefault(request.path, {})[member] = None
            return self.nodes.get(request.path)
        if isinstance(request, GetNodes):
            return [self.nodes.get(path) for path in request.paths]
        return self.change(session, request)

    def change(self, session: int, request: CreateNode | SetNode | DeleteNode) -> Any:
        self.changes += 1
        node = self.nodes.get(request.path)
        if isinstance(request, CreateNode):
            if node is not None:
                return None
            made = self.nodes[request.path] = Node(request.data, session, self.changes, 0)
            self.tell(request.path)
            return made
        if isinstance(request, SetNode):
            if node is not None:
                self.nodes[request.path] = node._replace(data=request.data, version=node.version + 1)
            return node is not None
        if request.beside not in self.nodes:
            return False
        if node is not None and node.version == request.version:
            self.remove(request.path)
        return node is None or node.version == request.version


class Storage:
    """Offsets that are fenced by generations, and never go back."""

    def __init__(self) -> None:
        self.kept: dict[PartitionName, tuple[int, int]] = {}

    def claim(self, name: PartitionName, generation: int) -> int | None:
        kept, offset = self.kept.get(name, (0, 0))
        if kept > generation:
            return None
        self.kept[name] = (generation, offset)
        return offset

    def save(self, name: PartitionName, generation: int, offset: int) -> bool:
        kept, before = self.kept[name]
        if kept > generation:
            return False
        assert offset >= before, f"the offset of {name} went back from {before} to {offset}"
        self.kept[name] = (generation, offset)
        return True


class Member:
    """A consumer: its coordinator, its connection, and the messages that it works on."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.coordinator = MembershipStateMachine(NodePaths("/meta"), "billing", name, SESSION_SECONDS)
        self.coordinator.set_topics(world.partitions)
        self.connection = 0
        """Counts connections; 0: none."""
        self.connections = itertools.count(1)
        self.session = 0
        self.frozen = self.dead = False
        self.course: RequestSteps | None = None
        self.asked_at = 0.0
        self.reached: dict[PartitionName, tuple[int, int]] = {}
        self.working: set[PartitionName] = set()
        self.lost_beats = 0
        self.connect()
        self.live()

    # What may happen to it

    def cut(self, silent: bool) -> None:
        """Its connection breaks; it learns of that at once, or, if nothing comes any more, by and by."""
        broken, self.connection = self.connection, 0
        if broken:
            self.later(SILENCE_SECONDS if silent else 0.0, self.notices_cut)

    def die(self) -> None:
        self.dead = True
        self.connection = 0

    def freeze(self, seconds: float) -> None:
        self.frozen = True
        self.world.time.after(seconds, self.thaw)

    def thaw(self) -> None:
        self.frozen = False

    def reported(self) -> None:
        connection = self.connection
        if connection:
            self.later(self.world.delay(), lambda: self.hears(connection))

    def hears(self, connection: int) -> None:
        """A watch of a connection that is gone says nothing; after the next one all is looked at."""
        if self.connection == connection:
            self.coordinator.request_round()

    # Its own life

    def looks_at_topics(self) -> None:
        self.coordinator.set_topics(self.world.partitions)

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """`what`, then, or as soon as the process runs again."""

        def happens() -> None:
            if self.dead:
                return
            if self.frozen:
                self.world.time.after(0.1 + self.world.random.random(), happens)
                return
            what()

        self.world.time.after(seconds, happens)

    def connect(self) -> None:
        if self.world.down > self.world.time.now or self.world.random.random() < 0.2:
            self.later(0.5 + self.world.random.random(), self.connect)
            return
        self.connection = next(self.connections)
        if not self.session or not self.world.server.touch(self.session):
            if self.session:
                self.coordinator.on_session_lost()
                self.course = None
            self.session = self.world.server.begin()
        self.coordinator.on_connected(self.session)
        self.ping(self.connection)

    def notices_cut(self) -> None:
        self.coordinator.on_disconnected()
        self.abandon()
        self.connect()

    def abandon(self) -> None:
        course, self.course = self.course, None
        if course is not None:
            self.throw(course)

    def throw(self, course: RequestSteps) -> None:
        try:
            course.throw(ConnectionLost())
        except ConnectionLost:
            return
        raise AssertionError("a course went on behind a cut")

    def ping(self, connection: int) -> None:
        """As the client of ZooKeeper does by itself, whatever the coordinator asks."""
        if self.connection != connection:
            return
        if self.world.server.touch(self.session):
            self.later(PING_SECONDS, lambda: self.ping(connection))
        else:
            self.cut(silent=False)

    def live(self) -> None:
        if self.course is None and self.connection:
            self.course = self.coordinator.next_steps(self.world.time.now)
            if self.course is not None:
                self.proceed(self.course, None)
        self.work()
        self.later(0.05 + self.world.random.random() * 0.3, self.live)

    def proceed(self, course: RequestSteps, answer: Any) -> None:
        try:
            request = course.send(answer)
        except StopIteration:
            self.course = None
        except ConnectionLost:
            self.course = None
            self.coordinator.request_round()
        else:
            self.ask(course, request)

    def ask(self, course: RequestSteps, request: Request) -> None:
        """Half of what is on its way when a connection breaks is done; the answer never comes."""
        connection, session, asked_at = self.connection, self.session, self.world.time.now

        def arrives() -> None:
            if self.connection != connection and self.world.random.random() < 0.5:
                return
            if not self.world.server.touch(session):  # the server closes connections of sessions that are over
                if self.connection == connection:
                    self.cut(silent=False)
                return
            answer = self.world.server.answer(self, session, request)
            self.later(self.world.delay(), lambda: returns(answer))

        def returns(answer: Any) -> None:
            if self.connection != connection or self.course is not course:
                return
            if isinstance(request, WRITES):
                self.coordinator.on_write_response(asked_at)
            self.proceed(course, answer)

        self.world.time.after(self.world.delay(), arrives)

    # Its messages

    def may_hand_out(self) -> dict[PartitionName, int]:
        """What it would hand out now, if it asked."""
        share = self.coordinator.assignment()
        if self.dead or self.world.time.now >= share.until:
            return {}
        return {name: number for name, number in share.assigned.items() if name not in share.revoked}

    def work(self) -> None:
        share = self.coordinator.assignment()
        for name in sorted(share.revoked - self.working):
            self.coordinator.release([name])
        for name, generation in self.may_hand_out().items():
            if name in self.working:
                continue
            if self.reached.get(name, (0, 0))[0] != generation:
                offset = self.world.storage.claim(name, generation)
                if offset is None:
                    continue
                self.reached[name] = (generation, offset)
            self.working.add(name)
            self.later(self.world.random.expovariate(1), partial(self.finish, name, generation))

    def finish(self, name: PartitionName, generation: int) -> None:
        self.working.discard(name)
        known, offset = self.reached[name]
        if known == generation and self.world.storage.save(name, generation, offset + 1):
            self.reached[name] = (generation, offset + 1)
            self.world.processed += 1


class World:
    """Some members and what befalls them."""

    def __init__(self, random: Random, partitions: int = 10) -> None:
        self.random = random
        self.time = Time()
        self.server = Server(self.time)
        self.storage = Storage()
        self.partitions: dict[str, Sequence[int]] = {TOPIC: range(partitions)}
        self.members: list[Member] = []
        self.numbers = itertools.count(1)
        self.processed = 0
        self.down = 0.0
        self.slow = random.choice([0.01, 0.1, 1.0])

    def delay(self) -> float:
        return self.random.random() * self.slow

    def join(self) -> None:
        self.members.append(Member(self, f"member-{next(self.numbers)}"))

    def alive(self) -> list[Member]:
        return [member for member in self.members if not member.dead]

    def befall(self) -> None:
        """One of the things that happen."""
        random = self.random
        what = random.choice(["join", "die", "cut", "silent", "freeze", "outage", "grow", "vandal"])
        members = self.alive()
        if (what == "join" and len(members) < MEMBERS) or not members:
            self.join()
        elif what == "die" and len(members) > 1:
            random.choice(members).die()
        elif what == "cut" or what == "silent":
            random.choice(members).cut(what == "silent")
        elif what == "freeze":
            random.choice(members).freeze(random.expovariate(1 / SESSION_SECONDS))
        elif what == "outage":  # the network of everybody, for up to thirty seconds
            self.down = self.time.now + random.uniform(1, 30)
            for member in members:
                member.cut(random.random() < 0.5)
        elif what == "grow":
            self.partitions = {TOPIC: range(len(self.partitions[TOPIC]) + 1)}
            for member in members:
                member.later(random.random() * 5, member.looks_at_topics)
        elif what == "vandal" and self.server.nodes:
            path = random.choice(sorted(self.server.nodes))
            if "/ids/" in path:  # an owner's node that is removed by hand may well be taken by two for a while
                self.server.remove(path)

    def look(self) -> None:
        """The invariant, at every moment."""
        owners: dict[PartitionName, str] = {}
        for member in self.members:
            for name in member.may_hand_out():
                assert name not in owners, f"{name} belongs to {owners[name]} and to {member.name} at {self.time.now}"
                owners[name] = member.name

    def run(self, seconds: float) -> None:
        self.time.run(self.time.now + seconds, self.look)
