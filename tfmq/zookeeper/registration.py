"""Registration of a broker in ZooKeeper: its address and topics, as long as it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

from tfmq.zookeeper.connection import new_client
from tfmq.zookeeper.paths import BROKER_NUMBER, NodePaths, zookeeper_address
from tfmq.zookeeper.session import (
    DeleteNode,
    GetNode,
    GetNodes,
    Node,
    Request,
    RequestSteps,
    SessionStateMachine,
    SessionThread,
    SetNode,
)

log = logging.getLogger("tfmq.server")

SESSION_SECONDS: Final = 30.0
"""Session timeout. A broker that restarts, or is disconnected, for less than this stays registered."""
UNREACHABLE_SECONDS: Final = 3.0  # before it is logged that ZooKeeper does not respond
CLOSE_SECONDS: Final = 2.0
"""How long a stop waits for ZooKeeper. Without a response by then, the session expires by itself."""


class Registration:
    """The registration of the broker at `broker_address`, in a session of its own. Only `close` waits for ZooKeeper."""

    def __init__(
        self,
        address: str,
        broker_address: str,
        *,
        session_seconds: float = SESSION_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the registration without connecting. Raises BadRequest if `address` is invalid, NotSupported if kazoo
        is not installed."""
        self.address = zookeeper_address(address)
        new_client(self.address, session_seconds)
        self._state_machine = RegistrationStateMachine(
            NodePaths(self.address.root, BROKER_NUMBER), broker_address, session_seconds
        )
        self._session_thread = SessionThread(self.address, self._state_machine, self._changed, clock)
        self._clock = clock
        self._unreachable_at = 0.0
        self._logged_unreachable = False

    def set_topics(self, topics: Mapping[str, int]) -> None:
        """Set the current topics with their numbers of partitions. The first call connects. If ZooKeeper has been
        unreachable for UNREACHABLE_SECONDS, the next call logs it, and later calls do not."""
        runner = self._session_thread
        with runner.condition:
            if runner.is_closed:
                return
            self._state_machine.set_topics(topics)
            now = self._clock()
            if self._state_machine.is_connected or not runner.is_started:
                self._unreachable_at, self._logged_unreachable = now + UNREACHABLE_SECONDS, False
            elif now >= self._unreachable_at and not self._logged_unreachable:
                self._logged_unreachable = True
                log.warning("%s does not answer: this broker serves, and registers when it is back.", self.address)
            if not runner.is_started:
                runner.start()
            runner.wake()

    @property
    def registered(self) -> bool:
        """Whether the address and all topics are registered, according to the last check."""
        with self._session_thread.condition:
            return self._state_machine.registered

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Remove the registration. If that takes longer than `seconds`, the nodes remain until the session expires."""
        self._session_thread.close(seconds)

    def _changed(self) -> None:
        if self._session_thread.failure is not None:
            log.error("This broker is not registered: %s", self._session_thread.failure)


# The state machine, which yields requests to ZooKeeper and gets the responses

RETRY_SECONDS: Final = 5.0
"""Interval of checks while nodes cannot be registered, because another broker or an earlier process has these nodes."""
CHECK_SECONDS: Final = 60.0  # between checks whether the registered nodes still exist


class RegistrationStateMachine(SessionStateMachine):
    """State machine for the nodes of one broker at `address`.

    `registered`: whether all nodes exist, according to the last check. The paths of the nodes contain a broker number.
    While another broker uses this number, the broker registers nothing.
    """

    def __init__(self, layout: NodePaths, address: str, session_seconds: float) -> None:
        super().__init__(layout, session_seconds)
        self.address = address
        self.registered = False
        self._wanted_nodes: dict[str, bytes] = {}
        self._registered_nodes: dict[str, bytes] = {}
        self._logged_owner = b""

    def on_session_lost(self) -> None:
        super().on_session_lost()
        self.registered = False
        self._registered_nodes.clear()

    def set_topics(self, topics: Mapping[str, int]) -> None:
        wanted = {self._layout.topic(topic): b"%d" % count for topic, count in topics.items()}
        if wanted != self._wanted_nodes:
            self._wanted_nodes = wanted
            self.request_round()

    def check_all(self, now: float) -> RequestSteps:
        """Check and correct all nodes. The address comes first: it shows whether another broker uses the number."""
        self._round_at = now + CHECK_SECONDS
        owner = yield from self._claim_number()
        if owner is not None:
            if owner not in (self._logged_owner, self.address.encode()):  # once for each other broker
                self._logged_owner = owner
                log.error(
                    "%s is the broker at %s already: this one, at %s, is not registered; give it a root of its own"
                    " with server.zookeeper",
                    self._layout.broker_address(),
                    owner.decode("utf-8", "replace"),
                    self.address,
                )
            self.registered = False
            self._round_at = min(self._round_at, now + RETRY_SECONDS)
            return
        yield from self._verify()
        for path in sorted(self._registered_nodes.keys() - self._wanted_nodes.keys()):
            node: Node | None = yield GetNode(path)
            if node is None or (yield DeleteNode(path, node.version, self._layout.broker_address())):
                self._registered_nodes.pop(path, None)
        for path, count in sorted(self._wanted_nodes.items()):
            if self._registered_nodes.get(path) != count:
                yield from self._put_node(path, count)
        registered = self._registered_nodes == self._wanted_nodes
        if not registered:
            self._round_at = min(self._round_at, now + RETRY_SECONDS)
        elif not self.registered:
            log.info(
                "registered in ZooKeeper as %s with %d topics", self._layout.broker_address(), len(self._wanted_nodes)
            )
        self.registered = registered

    def _claim_number(self) -> Generator[Request, Any, bytes | None]:
        """Register the address under the broker's number, and return None. If another address is registered there,
        return that address, or b"" if its node has just been removed."""
        node = yield from self.create_or_get(self._layout.broker_address(), self.address.encode())
        if node is None:
            return b""
        return None if node.session == self.session else node.data

    def _verify(self) -> RequestSteps:
        """Remove from `_registered_nodes` the nodes that were deleted or changed in ZooKeeper, so that `check_all`
        registers them again."""
        paths = sorted(self._registered_nodes)
        nodes = yield GetNodes(paths)
        for path, node in zip(paths, nodes, strict=True):
            if node is None or node.session != self.session or node.data != self._registered_nodes[path]:
                del self._registered_nodes[path]

    def _put_node(self, path: str, count: bytes) -> RequestSteps:
        node = yield from self.create_or_get(path, count)
        if node is None:
            return
        if node.session != self.session:
            # An earlier process of this broker created the node, in a session that has not expired yet. That process
            # has stopped: if its address were still registered, this process could not have registered its own.
            yield DeleteNode(path, node.version, self._layout.broker_address())
            self.request_round()
            return
        if node.data != count and not (yield SetNode(path, count)):
            return
        self._registered_nodes[path] = count
