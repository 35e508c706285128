"""What a coordinator asks of ZooKeeper: a handful of requests, which anything can answer that keeps such nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tfmq.errors import NotAllowed, NotSupported, StoreFailed, TfmqError
from tfmq.zookeeper.connection import in_words, new_client, results, stop
from tfmq.zookeeper.paths import ZooKeeperAddress

if TYPE_CHECKING:
    from kazoo.client import KazooClient


class Node(NamedTuple):
    """A node as it was found or made: `session` 0: it stays when nobody lives · `created`: a number that grows with
    every change of anything, so of two makers of a node the later one has the higher.
    """

    data: bytes
    session: int
    created: int
    version: int


class Children(NamedTuple):
    """The names below `path`, [] where there is no such node; a change of them is told once."""

    path: str


class Read(NamedTuple):
    """The `Node` at `path`, None where there is none; its end, or its making, is told once."""

    path: str


class ReadAll(NamedTuple):
    """The `Node`s, or None, at each of `paths`; nothing is told later."""

    paths: Sequence[str]


class Create(NamedTuple):
    """Make a node that lives as long as the session, with all above it: the `Node`; None: there is one."""

    path: str
    data: bytes


class Write(NamedTuple):
    """Give a node new data: True; False: there is none."""

    path: str
    data: bytes


class Delete(NamedTuple):
    """Remove the node if it has this version, and there is one at `beside`: True, also if it is not there; False: it
    was left alone.
    """

    path: str
    version: int
    beside: str


Request = Children | Read | ReadAll | Create | Write | Delete
CHANGES = (Create, Write, Delete)
"""Those that the leader of the ensemble answers: only they prove that the session lives."""


class Cut(Exception):
    """The connection broke, or the session ended, before the answer: it may have been done."""


# The requests of a coordinator, as calls of kazoo.


def ask(client: KazooClient, request: Request, watch: Callable[[Any], None]) -> Any:
    """The answer to `request`, see `tfmq.zookeeper.session`. Raises Cut, NotAllowed."""
    from kazoo import exceptions

    try:
        return _ask(client, request, watch)
    except (exceptions.NoAuthError, exceptions.AuthFailedError) as error:
        raise NotAllowed(
            f"ZooKeeper does not allow the use of {_path(request)} ({in_words(error)}); tfmq brings no credentials."
        ) from error
    except (exceptions.KazooException, exceptions.ZookeeperError) as error:
        raise Cut(repr(error)) from error


def _path(request: Request) -> str:
    return ", ".join(request.paths) if isinstance(request, ReadAll) else request.path


def _ask(client: KazooClient, request: Request, watch: Callable[[Any], None]) -> Any:
    if isinstance(request, Children):
        return _one(client.get_children_async(request.path, watch), [])
    if isinstance(request, Read):
        return _node(_one(client.get_async(request.path, watch)))
    if isinstance(request, ReadAll):
        return [_node(_known(each)) for each in results([client.get_async(path) for path in request.paths])]
    if isinstance(request, Write):
        return _one(client.set_async(request.path, request.data)) is not None
    if isinstance(request, Create):
        return _create(client, request)
    return _delete(client, request)


def _create(client: KazooClient, request: Create) -> Node | None:
    from kazoo.exceptions import NodeExistsError

    asked = client.create_async(request.path, request.data, ephemeral=True, makepath=True, include_data=True)
    made = results([asked])[0]
    if isinstance(made, NodeExistsError):
        return None
    return _node((request.data, _known(made)[1]))


def _delete(client: KazooClient, request: Delete) -> bool:
    """In one transaction with a look at the node that must be there."""
    from kazoo.exceptions import NoNodeError

    transaction = client.transaction()
    transaction.check(request.beside, -1)
    transaction.delete(request.path, request.version)
    beside, deleted = _known(results([transaction.commit_async()])[0])
    if isinstance(deleted, NoNodeError):
        return True
    return not isinstance(beside, BaseException) and not isinstance(deleted, BaseException)


def _one(asked: Any, missing: Any = None) -> Any:
    """The answer; `missing` where there is no node."""
    answer = _known(results([asked])[0])
    return missing if answer is None else answer


def _known(answer: Any) -> Any:
    """The answer; None where there is no node. Raises what else went wrong."""
    from kazoo.exceptions import NoNodeError

    if isinstance(answer, NoNodeError):
        return None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _node(answer: Any) -> Node | None:
    if answer is None:
        return None
    data, state = answer
    return Node(data or b"", state.ephemeralOwner, state.czxid, state.version)


# A session of ZooKeeper for something that asks in courses: kazoo outside, generators of requests inside.
#
# The requests go out one after the other, and only while the session is the one in which they were thought out. What
# ends the connection or the session is told in the thread that learns of it, before anything else is done.

AGAIN_SECONDS: Final = 0.2
"""A course that was cut short is begun again after so long, where no new connection does that."""
READ_TIMEOUT_SHARE: Final = 2 / 3
"""Of a session's time, as kazoo works out when a connection is silent for too long."""
NEVER_ASKED: Final = float("-inf")

Course = Generator[Request, Any, None]


class Subject(Protocol):
    """What asks. Its methods are called by one thread at a time, and must not wait.

    `session_seconds` is what ZooKeeper gives a session; `changed` is set where others should look at it.
    """

    session_seconds: float
    changed: bool

    @property
    def session(self) -> int: ...
    def connected(self, session: int) -> None: ...
    def cut(self) -> None: ...
    def lost(self) -> None: ...
    def look(self) -> None: ...
    def heard(self, asked_at: float) -> None: ...
    def due(self) -> float: ...
    def next_course(self, now: float) -> Course | None: ...


class Runner:
    """Runs `subject` in a thread of its own from `start` to `close`. Whoever else touches it holds `condition`, and
    `wake`s the thread where something is to be done.

    `told` is called when the subject has changed, in threads of the runner, and must not wait.
    """

    def __init__(
        self,
        address: ZooKeeperAddress,
        subject: Subject,
        told: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.condition = threading.Condition()
        self.failure: TfmqError | None = None
        """Why nothing will come of it any more; None: it may."""
        self.is_started = self.is_closed = False
        self._address, self._subject, self._told, self._clock = address, subject, told, clock
        self._seconds = subject.session_seconds
        self._client: KazooClient | None = None
        self._thread = threading.Thread(target=self._run, name="tfmq-zookeeper", daemon=True)

    def start(self) -> None:
        """Connect, for as long as that takes; returns at once. Raises NotSupported without a kazoo that fits."""
        client = new_client(self._address, self._seconds)
        self._learn_seconds(client)
        client.add_listener(self._session_changed)
        self._client, self.is_started = client, True
        client.start_async()
        self._thread.start()

    def wake(self) -> None:
        """There is something to do; the condition is held."""
        self.condition.notify_all()

    def close(self, seconds: float) -> None:
        """End the session, and wait so long at most; if that is not enough it ends when its time is over."""
        with self.condition:
            self.is_closed = True
            self.wake()
        client, self._client = self._client, None
        if client is None:
            return
        ending = threading.Thread(target=stop, args=(client,), name="tfmq-zookeeper-end", daemon=True)
        ending.start()
        ending.join(seconds)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    @property
    def client(self) -> KazooClient | None:
        """The client of the session, for tests; None before the start and behind the end."""
        return self._client

    # The session

    def _learn_seconds(self, client: KazooClient) -> None:
        """ZooKeeper may give a session less time than it was asked for, and kazoo keeps that to itself."""
        handler = client._connection
        connect = getattr(handler, "_connect", None)
        if connect is None:
            raise NotSupported(
                "This kazoo does not tell how long a session lasts: install kazoo 2.10 or 2.11."
            )

        def connect_and_learn(*arguments: Any) -> Any:
            timeouts = connect(*arguments)
            given = timeouts[0] / READ_TIMEOUT_SHARE / 1000
            with self.condition:
                self._subject.session_seconds = min(self._seconds, given)
            return timeouts

        handler._connect = connect_and_learn

    def _session_changed(self, state: str) -> None:
        """In the thread that holds the connection, before it does anything else."""
        with self.condition:
            client = self._client
            if client is None or self.is_closed:
                return
            if state == "CONNECTED":
                self._subject.connected(client.client_id[0])
            elif state == "SUSPENDED":
                self._subject.cut()
            else:
                self._subject.lost()
            self.wake()
        self._tell()

    def _watched(self, _: Any) -> None:
        """Something changed that was looked at."""
        with self.condition:
            self._subject.look()
            self.wake()

    def _tell(self) -> None:
        with self.condition:
            changed, self._subject.changed = self._subject.changed, False
        if changed:
            self._told()

    # The thread

    def _run(self) -> None:
        while True:
            with self.condition:
                if self.is_closed or self.failure is not None:
                    return
                now = self._clock()
                course = self._subject.next_course(now)
                client, session = self._client, self._subject.session
                if course is None or client is None:
                    due = self._subject.due() - now
                    self.condition.wait(None if due == float("inf") else max(due, 0.0))
                    continue
            try:
                whole = self._walk(client, course, session)
            except (
                Exception
            ) as error:  # else the session would live on, and nobody would know that nothing is done
                whole, self._subject.changed = False, True
                self.failure = StoreFailed(f"Asking {self._address} failed: {error!r}", retriable=False)
                self.failure.__cause__ = error
            self._tell()
            if not whole:
                self._pause()

    def _pause(self) -> None:
        """Behind a course that was cut short."""
        with self.condition:
            if not self.is_closed:
                self.condition.wait(AGAIN_SECONDS)
                self._subject.look()

    def _walk(self, client: KazooClient, course: Course, session: int) -> bool:
        """The requests of `course`, one by one; False: it was cut short."""
        answer, request, asked_at = None, None, NEVER_ASKED
        try:
            while True:
                with self.condition:
                    if self.is_closed or self._subject.session != session:
                        course.throw(Cut())
                    if isinstance(request, CHANGES):
                        self._subject.heard(asked_at)
                    request = course.send(answer)
                asked_at = self._clock()
                answer = self._asked(client, course, request)
        except StopIteration:
            return True
        except Cut:
            return False

    def _asked(self, client: KazooClient, course: Course, request: Request) -> Any:
        """The answer. A failure is thrown into the course, and comes out of it."""
        try:
            return ask(client, request, self._watched)
        except Cut as cut:
            failed = cut
        except NotAllowed as refused:
            failed = Cut()
            self.failure, self._subject.changed = refused, True
        with self.condition:
            course.throw(failed)
        raise failed
