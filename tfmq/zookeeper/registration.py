"""A broker's registration in ZooKeeper: the `Registry` on a session of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

from tfmq.zookeeper.connection import new_client
from tfmq.zookeeper.paths import BROKER, Layout, zookeeper_address
from tfmq.zookeeper.session import Create, Delete, Node, Read, ReadAll, Request, Runner, Write

log = logging.getLogger("tfmq.server")

SESSION_SECONDS: Final = 30.0
"""A broker that is started again, or cut off for a moment, stays registered; one that is gone is gone after that."""
PATIENCE_SECONDS: Final = 3.0
"""So long it is not said that nobody answers."""
CLOSE_SECONDS: Final = 2.0
"""A stop does not wait for a ZooKeeper that does not answer: the session ends by itself."""


class Registration:
    """The registration of the broker at `broker_address`. No method waits but `close`."""

    def __init__(
        self,
        address: str,
        broker_address: str,
        *,
        session_seconds: float = SESSION_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no network. Raises BadRequest for what is no address, NotSupported without kazoo."""
        self.address = zookeeper_address(address)
        new_client(self.address, session_seconds)
        self._registry = Registry(Layout(self.address.root, BROKER), broker_address, session_seconds)
        self._runner = Runner(self.address, self._registry, self._changed, clock)
        self._clock = clock
        self._patient_until = 0.0
        self._told = False

    def wants(self, topics: Mapping[str, int]) -> None:
        """The topics that there are, and their partitions. The first time it connects. Called every now and then, it
        says when ZooKeeper is away, once each time."""
        runner = self._runner
        with runner.condition:
            if runner.is_closed:
                return
            self._registry.wants(topics)
            now = self._clock()
            if self._registry.is_connected or not runner.is_started:
                self._patient_until, self._told = now + PATIENCE_SECONDS, False
            elif now >= self._patient_until and not self._told:
                self._told = True
                log.warning(
                    "%s does not answer: this broker serves, and registers when it is back.", self.address
                )
            if not runner.is_started:
                runner.start()
            runner.wake()

    @property
    def registered(self) -> bool:
        """Whether everything is registered, as far as it is known."""
        with self._runner.condition:
            return self._registry.registered

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Take everything back; what cannot be taken back in time goes with the session."""
        self._runner.close(seconds)

    def _changed(self) -> None:
        if self._runner.failure is not None:
            log.error("This broker is not registered: %s", self._runner.failure)


# What a broker has in ZooKeeper, without ZooKeeper: its address and its topics, as long as it lives.
#
# One broker at a time has a number: while somebody else's address is under it, nothing is registered, and that is said.
# See `tfmq.zookeeper.group_coordinator` for how such a thing is run.

LOOK_SECONDS: Final = 5.0
"""How soon a number that another broker has is looked at again: an earlier life of this one ends with its session."""
CHECK_SECONDS: Final = 60.0
"""How often it is looked whether somebody has removed what is registered."""

Course = Generator[Request, Any, None]


class Registry:
    """The nodes of one broker at `address`. `registered`: all of them are there, as far as it knows."""

    def __init__(self, layout: Layout, address: str, session_seconds: float) -> None:
        self.address = address
        self.session_seconds = session_seconds
        self.changed = False
        self.registered = False
        self._layout = layout
        self._wanted: dict[str, bytes] = {}
        self._made: dict[str, bytes] = {}
        self._session = 0
        self._connected = False
        self._look_at = float("-inf")
        self._told = b""

    @property
    def session(self) -> int:
        """The session that it knows of; 0: none."""
        return self._session

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connected

    # What happens

    def connected(self, session: int) -> None:
        """There is a connection; what was made in another session is not there any more."""
        if session != self._session:
            self.lost()
        self._session, self._connected = session, True
        self.look()

    def cut(self) -> None:
        """The connection is gone; what is registered stays as long as the session."""
        self._connected = False

    def lost(self) -> None:
        """The session is over, and what was made in it is gone."""
        self.cut()
        self._session, self.registered = 0, False
        self._made.clear()

    def look(self) -> None:
        """Something may have to be done."""
        self._look_at = float("-inf")

    def heard(self, asked_at: float) -> None:
        """Nothing here depends on how long a session lasts."""

    def wants(self, topics: Mapping[str, int]) -> None:
        """The topics that there are, and how many partitions each has."""
        wanted = {self._layout.topic(topic): b"%d" % count for topic, count in topics.items()}
        if wanted != self._wanted:
            self._wanted = wanted
            self.look()

    # What it does

    def due(self) -> float:
        """When something is to be done next; infinity while it is cut off."""
        return self._look_at if self._connected else float("inf")

    def next_course(self, now: float) -> Course | None:
        """What is to be done now, if anything is."""
        return None if self.due() > now else self.round(now)

    def round(self, now: float) -> Course:
        """Look at everything: the address first, which says who has the number."""
        self._look_at = now + CHECK_SECONDS
        owner = yield from self._own()
        if owner is not None:
            self._tell(owner)
            self.registered = False
            self._look_at = min(self._look_at, now + LOOK_SECONDS)
            return
        yield from self._verify()
        for path in sorted(self._made.keys() - self._wanted.keys()):
            yield from self._remove(path)
        for path, count in sorted(self._wanted.items()):
            if self._made.get(path) != count:
                yield from self._put(path, count)
        registered = self._made == self._wanted
        if not registered:
            self._look_at = min(self._look_at, now + LOOK_SECONDS)
        elif not self.registered:
            log.info("registered in ZooKeeper as %s with %d topics", self._layout.master(), len(self._wanted))
        self.registered = registered

    def _own(self) -> Generator[Request, Any, bytes | None]:
        """None: the number is this broker's; else who has it."""
        node: Node | None = yield Create(self._layout.master(), self.address.encode())
        if node is None:
            node = yield Read(self._layout.master())
        if node is None:
            return b""
        return None if node.session == self._session else node.data

    def _verify(self) -> Course:
        """Forget what somebody has removed or changed."""
        paths = sorted(self._made)
        nodes = yield ReadAll(paths)
        for path, node in zip(paths, nodes, strict=True):
            if node is None or node.session != self._session or node.data != self._made[path]:
                del self._made[path]

    def _put(self, path: str, count: bytes) -> Course:
        node: Node | None = yield Create(path, count)
        if node is None:
            node = yield Read(path)
            if node is None:
                return
            if node.session != self._session:
                # An earlier life of this broker, whose session has not ended; its address went with a stop of its own.
                yield Delete(path, node.version, self._layout.master())
                self.look()
                return
            if node.data != count and not (yield Write(path, count)):
                return
        self._made[path] = count

    def _remove(self, path: str) -> Course:
        node: Node | None = yield Read(path)
        if node is None or (yield Delete(path, node.version, self._layout.master())):
            self._made.pop(path, None)

    def _tell(self, owner: bytes) -> None:
        """Once for each other one."""
        if owner not in (self._told, self.address.encode()):
            self._told = owner
            log.error(
                "%s is the broker at %s already: this one, at %s, is not registered; give it a root of its own with"
                " server.zookeeper",
                self._layout.master(),
                owner.decode("utf-8", "replace"),
                self.address,
            )
