"""A thread with a ZooKeeper session, the requests that it sends, and the base class of the state machines it runs.

When a member of a group must stop delivering, because its session may have ended, is decided in `group_coordinator.py`
(`DELIVERY_FRACTION`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tfmq.errors import NotAllowed, NotSupported, StoreFailed, TfmqError
from tfmq.zookeeper.connection import error_text, new_client, result_or_none, stop, wait_results
from tfmq.zookeeper.paths import NodePaths, ZooKeeperAddress

if TYPE_CHECKING:
    from kazoo.client import KazooClient


class Node(NamedTuple):
    """A node that was read or created. `session`: the session of an ephemeral node; 0 for a persistent node. `created`:
    the transaction id of the node's creation. If the node is created again, it gets a higher id."""

    data: bytes
    session: int
    created: int
    version: int


class GetChildren(NamedTuple):
    """Get the names of the children of `path`, and set a one-time watch. Result: the names; [] if there is no node."""

    path: str


class GetNode(NamedTuple):
    """Get the node at `path`, and set a one-time watch for its creation or deletion. Result: the `Node`, or None."""

    path: str


class GetNodes(NamedTuple):
    """Get the nodes at `paths`, without a watch. Result: a `Node` for each path, or None where no node exists."""

    paths: Sequence[str]


class CreateNode(NamedTuple):
    """Create an ephemeral node, and its parents if missing. Result: the `Node`; None if the node exists already."""

    path: str
    data: bytes


class SetNode(NamedTuple):
    """Set the data of the node at `path`. Result: True; False if the node does not exist."""

    path: str
    data: bytes


class DeleteNode(NamedTuple):
    """Delete the node at `path` if it has this `version` and another node exists at `beside`. Result: True if the node
    at `path` does not exist afterwards, else False."""

    path: str
    version: int
    beside: str


Request = GetChildren | GetNode | GetNodes | CreateNode | SetNode | DeleteNode
WRITES = (CreateNode, SetNode, DeleteNode)
"""Requests to which the leader of the ensemble responds. Only its responses prove that the session is valid."""


class ConnectionLost(Exception):
    """The connection or the session was lost before the response. The request may have been executed."""


def send_request(client: KazooClient, request: Request, watch: Callable[[Any], None]) -> Any:
    """Send a request with kazoo and return its result. If the request sets a watch, `watch` is called once when the
    watched node changes. Raises NotAllowed if permission is missing, ConnectionLost after any other error."""
    from kazoo import exceptions

    try:
        return _send(client, request, watch)
    except (exceptions.NoAuthError, exceptions.AuthFailedError) as error:
        paths = ", ".join(request.paths) if isinstance(request, GetNodes) else request.path
        raise NotAllowed(
            f"ZooKeeper does not allow the use of {paths} ({error_text(error)}); tfmq brings no credentials."
        ) from error
    except (exceptions.KazooException, exceptions.ZookeeperError) as error:
        raise ConnectionLost(repr(error)) from error


def _send(client: KazooClient, request: Request, watch: Callable[[Any], None]) -> Any:
    if isinstance(request, GetChildren):
        return _single_result(client.get_children_async(request.path, watch), [])
    if isinstance(request, GetNode):
        return _node(_single_result(client.get_async(request.path, watch)))
    if isinstance(request, GetNodes):
        return [
            _node(result_or_none(each)) for each in wait_results([client.get_async(path) for path in request.paths])
        ]
    if isinstance(request, SetNode):
        return _single_result(client.set_async(request.path, request.data)) is not None
    if isinstance(request, CreateNode):
        return _create(client, request)
    return _delete(client, request)


def _create(client: KazooClient, request: CreateNode) -> Node | None:
    from kazoo.exceptions import NodeExistsError

    pending = client.create_async(request.path, request.data, ephemeral=True, makepath=True, include_data=True)
    made = wait_results([pending])[0]
    if isinstance(made, NodeExistsError):
        return None
    return _node((request.data, result_or_none(made)[1]))


def _delete(client: KazooClient, request: DeleteNode) -> bool:
    """Delete a node in one transaction, which fails if no node exists at `beside`."""
    from kazoo.exceptions import NoNodeError

    transaction = client.transaction()
    transaction.check(request.beside, -1)
    transaction.delete(request.path, request.version)
    beside, deleted = result_or_none(wait_results([transaction.commit_async()])[0])
    if isinstance(deleted, NoNodeError):
        return True
    return not isinstance(beside, BaseException) and not isinstance(deleted, BaseException)


def _single_result(pending: Any, missing: Any = None) -> Any:
    """Wait for the response and return it; `missing` if the node does not exist. `pending`: kazoo's request."""
    response = result_or_none(wait_results([pending])[0])
    return missing if response is None else response


def _node(response: Any) -> Node | None:
    if response is None:
        return None
    data, state = response
    return Node(data or b"", state.ephemeralOwner, state.czxid, state.version)


RETRY_SECONDS: Final = 0.2
"""Pause after requests were interrupted, before `check_all` runs again."""
READ_TIMEOUT_SHARE: Final = 2 / 3
"""kazoo treats a connection as lost if it is silent for this part of the session timeout."""
NEVER: Final = float("-inf")

RequestSteps = Generator[Request, Any, None]
"""A generator that yields requests and receives their responses. It must not catch a `ConnectionLost` that its caller
throws into it."""


class SessionStateMachine(ABC):
    """Base class of the state machines that a SessionThread runs: of a membership, and of a registration.

    Only one thread at a time calls the methods, and they must not block. `session_seconds`: the session timeout that
    ZooKeeper permits. `changed`: the state machine sets this to have the SessionThread call `on_change`.
    """

    def __init__(self, layout: NodePaths, session_seconds: float) -> None:
        self.session_seconds = session_seconds
        self.changed = False
        self.session = 0  # its id in ZooKeeper; 0 if there is none
        self.is_connected = False
        self._layout = layout
        self._round_at = NEVER

    # Events, which the session's thread reports

    def on_connected(self, session: int) -> None:
        """Handle a new connection. If the session is new, the nodes of the former session no longer exist."""
        if session != self.session:
            self.on_session_lost()
        self.session, self.is_connected = session, True
        self.request_round()

    def on_disconnected(self) -> None:
        """Handle a lost connection. The nodes exist until the session ends."""
        self.is_connected = False

    def on_session_lost(self) -> None:
        self.on_disconnected()
        self.session = 0

    def on_write_response(self, asked_at: float) -> None:  # noqa: B027 - only a membership needs it
        """Handle the response to a write that was sent at `asked_at`. A response proves that the session is valid."""

    def request_round(self) -> None:
        """Make `check_all` due at once."""
        self._round_at = NEVER

    # Actions: the requests to ZooKeeper that are due

    def next_due(self) -> float:
        """Return when the next action is due; infinity while disconnected."""
        return self._round_at if self.is_connected else float("inf")

    def next_steps(self, now: float) -> RequestSteps | None:
        """Return the requests that are due at `now`; None if nothing is due."""
        return None if self.next_due() > now else self.check_all(now)

    def create_or_get(self, path: str, data: bytes) -> Generator[Request, Any, Node | None]:
        """Create a node and return it. If it exists already, return the existing one; None if that was just deleted."""
        node: Node | None = yield CreateNode(path, data)
        if node is None:
            node = yield GetNode(path)
        return node

    @abstractmethod
    def check_all(self, now: float) -> RequestSteps:
        """Check and correct all nodes."""


class SessionThread:
    """Runs a state machine in a thread from `start` to `close`, over one kazoo client.

    The state machine returns generators of requests. The thread sends the requests one after the other, and only in the
    session for which they were computed. When the connection or session is lost, kazoo's thread reports that to the
    state machine before anything else happens. To change the state machine, other threads hold `condition`, and then
    call `wake`. `on_change` is called in threads of this class when the state machine has set `changed`, and must not
    block.
    """

    def __init__(
        self,
        address: ZooKeeperAddress,
        state_machine: SessionStateMachine,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.condition = threading.Condition()
        self.failure: TfmqError | None = None  # a permanent one, which ended the thread
        self.is_started = self.is_closed = False
        self._address, self._state_machine, self._on_change, self._clock = address, state_machine, on_change, clock
        self._seconds = state_machine.session_seconds
        self.client: KazooClient | None = None  # from the start to the end
        self._thread = threading.Thread(target=self._run, name="tfmq-zookeeper", daemon=True)

    def start(self) -> None:
        """Start to connect, with endless retries, and return at once. Raises NotSupported if the release of kazoo is
        unknown."""
        client = new_client(self._address, self._seconds)
        self._record_session_timeout(client)
        client.add_listener(self._session_changed)
        self.client, self.is_started = client, True
        client.start_async()
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread. The caller must hold `condition`."""
        self.condition.notify_all()

    def close(self, seconds: float) -> None:
        """End the session. If that takes longer than `seconds`, ZooKeeper ends the session after its timeout."""
        with self.condition:
            self.is_closed = True
            self.wake()
        client, self.client = self.client, None
        if client is None:
            return
        ending = threading.Thread(target=stop, args=(client,), name="tfmq-zookeeper-end", daemon=True)
        ending.start()
        ending.join(seconds)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _record_session_timeout(self, client: KazooClient) -> None:
        """Make `client` record the session timeout that ZooKeeper permits; it may be less than requested. kazoo does
        not make this value public, so its internal connect function is replaced by one that records the value."""
        handler = client._connection
        connect = getattr(handler, "_connect", None)
        if connect is None:
            raise NotSupported("This kazoo does not tell how long a session lasts: install kazoo 2.10 or 2.11.")

        def connect_and_record(*arguments: Any) -> Any:
            timeouts = connect(*arguments)
            permitted = timeouts[0] / READ_TIMEOUT_SHARE / 1000
            with self.condition:
                self._state_machine.session_seconds = min(self._seconds, permitted)
            return timeouts

        handler._connect = connect_and_record

    def _session_changed(self, state: str) -> None:
        """Report a changed state of the connection to the state machine. Called in kazoo's thread."""
        with self.condition:
            client = self.client
            if client is None or self.is_closed:
                return
            if state == "CONNECTED":
                self._state_machine.on_connected(client.client_id[0])
            elif state == "SUSPENDED":
                self._state_machine.on_disconnected()
            else:
                self._state_machine.on_session_lost()
            self.wake()
        self._notify()

    def _node_changed(self, _: Any) -> None:
        with self.condition:
            self._state_machine.request_round()
            self.wake()

    def _notify(self) -> None:
        with self.condition:
            changed, self._state_machine.changed = self._state_machine.changed, False
        if changed:
            self._on_change()

    def _run(self) -> None:
        while True:
            with self.condition:
                if self.is_closed or self.failure is not None:
                    return
                now = self._clock()
                steps = self._state_machine.next_steps(now)
                client, session = self.client, self._state_machine.session
                if steps is None or client is None:
                    due = self._state_machine.next_due() - now
                    self.condition.wait(None if due == float("inf") else max(due, 0.0))
                    continue
            try:
                completed = self._run_steps(client, steps, session)
            except Exception as error:  # otherwise the session would stay alive while its work has stopped unnoticed
                completed, self._state_machine.changed = False, True
                self.failure = StoreFailed(f"Asking {self._address} failed: {error!r}", retriable=False)
                self.failure.__cause__ = error
            self._notify()
            with self.condition:
                if not completed and not self.is_closed:
                    self.condition.wait(RETRY_SECONDS)
                    self._state_machine.request_round()

    def _run_steps(self, client: KazooClient, steps: RequestSteps, session: int) -> bool:
        """Send the requests of `steps` one by one. Return False if a lost connection or `close` interrupts this."""
        response, request, asked_at = None, None, NEVER
        try:
            while True:
                with self.condition:
                    if self.is_closed or self._state_machine.session != session:
                        steps.throw(ConnectionLost())
                    if isinstance(request, WRITES):
                        self._state_machine.on_write_response(asked_at)
                    request = steps.send(response)
                asked_at = self._clock()
                response = self._send_step(client, steps, request)
        except StopIteration:
            return True
        except ConnectionLost:
            return False

    def _send_step(self, client: KazooClient, steps: RequestSteps, request: Request) -> Any:
        """Send a request and return its result. After an error, throw ConnectionLost into `steps`, then raise it."""
        try:
            return send_request(client, request, self._node_changed)
        except ConnectionLost as cut:
            failed = cut
        except NotAllowed as refused:
            failed = ConnectionLost()
            self.failure, self._state_machine.changed = refused, True
        with self.condition:
            steps.throw(failed)
        raise failed
