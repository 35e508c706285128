"""Registration of a broker in ZooKeeper: its address and topics, as long as it runs."""

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
"""Session timeout: a restarted or briefly disconnected broker stays registered; any other is removed after this."""
PATIENCE_SECONDS: Final = 3.0
"""Time before it is logged that ZooKeeper is not reachable."""
CLOSE_SECONDS: Final = 2.0
"""Limit of the wait at a stop. If ZooKeeper does not respond, the session expires by itself."""


class Registration:
    """The registration of the broker at `broker_address`, with its own session.

    Only `close` blocks.
    """

    def __init__(
        self,
        address: str,
        broker_address: str,
        *,
        session_seconds: float = SESSION_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Do not connect yet. Raises BadRequest for an invalid address, NotSupported without kazoo."""
        self.address = zookeeper_address(address)
        new_client(self.address, session_seconds)
        self._registry = Registry(Layout(self.address.root, BROKER), broker_address, session_seconds)
        self._runner = Runner(self.address, self._registry, self._changed, clock)
        self._clock = clock
        self._patient_until = 0.0
        self._told = False

    def wants(self, topics: Mapping[str, int]) -> None:
        """Set the current topics with their numbers of partitions. The first call connects.

        Called periodically, it logs once when ZooKeeper becomes unreachable.
        """
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
        """Whether everything is registered, as far as known."""
        with self._runner.condition:
            return self._registry.registered

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Remove the registration. What cannot be removed in time expires with the session."""
        self._runner.close(seconds)

    def _changed(self) -> None:
        if self._runner.failure is not None:
            log.error("This broker is not registered: %s", self._runner.failure)


# The registration state machine, without ZooKeeper; see `tfmq.zookeeper.group_coordinator` for how it is run.

LOOK_SECONDS: Final = 5.0
"""Interval of checks while another broker uses the number: an earlier process of this one expires with its session."""
CHECK_SECONDS: Final = 60.0
"""Interval of checks whether the registered nodes still exist."""

Course = Generator[Request, Any, None]


class Registry:
    """State machine for the nodes of one broker at `address`.

    `registered`: all of them exist, as far as known.

    Only one broker at a time may use a broker number. While another address is registered under it, nothing is
    registered, and that is logged.
    """

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
        """The known session; 0: none."""
        return self._session

    @property
    def is_connected(self) -> bool:
        """Whether a connection exists now."""
        return self._connected

    # Events

    def connected(self, session: int) -> None:
        """Handle a new connection. Nodes of another session do not exist any more."""
        if session != self._session:
            self.lost()
        self._session, self._connected = session, True
        self.look()

    def cut(self) -> None:
        """Handle a lost connection; the nodes stay as long as the session."""
        self._connected = False

    def lost(self) -> None:
        """Handle the end of the session: its nodes are gone."""
        self.cut()
        self._session, self.registered = 0, False
        self._made.clear()

    def look(self) -> None:
        """Request a round."""
        self._look_at = float("-inf")

    def heard(self, asked_at: float) -> None:
        """Do nothing: the session timeout does not matter here."""

    def wants(self, topics: Mapping[str, int]) -> None:
        """Set the current topics with their numbers of partitions."""
        wanted = {self._layout.topic(topic): b"%d" % count for topic, count in topics.items()}
        if wanted != self._wanted:
            self._wanted = wanted
            self.look()

    # Actions

    def due(self) -> float:
        """Return when the next action is due; infinity while disconnected."""
        return self._look_at if self._connected else float("inf")

    def next_course(self, now: float) -> Course | None:
        """Return the steps that are due now; None if nothing is."""
        return None if self.due() > now else self.round(now)

    def round(self, now: float) -> Course:
        """Check all nodes; the address first, because it shows which broker uses the number."""
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
        """Return the address of another broker with this number, None if there is none."""
        node: Node | None = yield Create(self._layout.master(), self.address.encode())
        if node is None:
            node = yield Read(self._layout.master())
        if node is None:
            return b""
        return None if node.session == self._session else node.data

    def _verify(self) -> Course:
        """Drop nodes that were deleted or changed by others."""
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
                # From an earlier process of this broker whose session has not expired; it removed its address when it
                # stopped.
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
        """Log another broker with this number, once for each."""
        if owner not in (self._told, self.address.encode()):
            self._told = owner
            log.error(
                "%s is the broker at %s already: this one, at %s, is not registered; give it a root of its own with"
                " server.zookeeper",
                self._layout.master(),
                owner.decode("utf-8", "replace"),
                self.address,
            )
