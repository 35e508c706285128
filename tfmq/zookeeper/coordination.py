"""A member of a group that ZooKeeper coordinates: the `Coordinator` on a session of kazoo, in a thread of its own.

Its requests go out one after the other, and only while the session is the one in which they were thought out. What ends
the connection or the session is told the coordinator in the thread that learns of it, before anything else is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tfmq.errors import NotAllowed, NotSupported, TfmqError
from tfmq.offsets.stored import PartitionName
from tfmq.zookeeper.address import BROKER, zookeeper_address
from tfmq.zookeeper.connection import new_client, stop
from tfmq.zookeeper.coordinator import Coordinator, Course, Share
from tfmq.zookeeper.layout import Layout
from tfmq.zookeeper.nodes import CHANGES, Cut
from tfmq.zookeeper.requests import ask

if TYPE_CHECKING:
    from kazoo.client import KazooClient

AGAIN_SECONDS: Final = 0.2
"""A course that was cut short is begun again after so long, where no new connection does that."""
READ_TIMEOUT_SHARE: Final = 2 / 3
"""Of a session's time, as kazoo works out when a connection is silent for too long."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no network. Raises BadRequest for what is no address, NotSupported without kazoo."""
        self.address = zookeeper_address(address)
        self.failure: TfmqError | None = None
        """Why it will never have anything; None: it may."""
        self._seconds = session_seconds
        self._changed, self._clock = changed, clock
        self._names = (group, member)
        new_client(self.address, session_seconds)
        self._begin()

    def _begin(self) -> None:
        layout = Layout(self.address.root, BROKER)
        self._coordinator = Coordinator(layout, *self._names, self._seconds)
        self._condition = threading.Condition()
        self._client: KazooClient | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    # What it is told

    def wants(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """The topics that this member reads, and the partitions that they have now. The first time it joins."""
        with self._condition:
            if self._closed:
                return
            self._coordinator.wants(partitions)
            if self._thread is None:
                self._client = self._new_client()
                self._thread = threading.Thread(target=self._run, name="tfmq-zookeeper", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Nothing of these is in work, and all is saved: somebody else may have them."""
        with self._condition:
            self._coordinator.release(names)
            self._condition.notify_all()

    # What it says

    def share(self) -> Share:
        """What this member has; see `Share`. Ask at each message: the time `until` is of the clock, and soon over."""
        with self._condition:
            return self._coordinator.share()

    @property
    def generation(self) -> int:
        """The highest generation of what it has; 0: it has nothing."""
        return max(self.share().granted.values(), default=0)

    @property
    def why_idle(self) -> str:
        """Why there is nothing, or not all, to be had; "": it has what is its own."""
        with self._condition:
            coordinator = self._coordinator
            if self.failure is not None:
                return str(self.failure)
            if not coordinator.session:
                return f"{self.address} does not answer."
            if coordinator.is_idle:
                return (
                    f"{coordinator.members} members, and no partition is left for this one: tfmq topic grow"
                )
            return coordinator.why_waiting()

    # The end

    def close(self, seconds: float = 10.0) -> None:
        """Leave: what this member had is free when this returns, or else when its session is over."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        client, self._client = self._client, None
        if client is not None:
            ending = threading.Thread(target=stop, args=(client,), name="tfmq-zookeeper-end", daemon=True)
            ending.start()
            ending.join(seconds)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def renew(self, member: str) -> None:
        """In a forked child: it is a member of its own, which joins when it says what it wants. The parent's session,
        and its connection, are left alone.
        """
        self._names = (self._names[0], member)
        self._begin()

    # The session

    def _new_client(self) -> KazooClient:
        client = new_client(self.address, self._seconds)
        self._learn_seconds(client)
        client.add_listener(self._session_changed)
        client.start_async()
        return client

    def _learn_seconds(self, client: KazooClient) -> None:
        """ZooKeeper may give a session less time than it was asked for, and kazoo keeps that to itself."""
        handler = client._connection
        connect = getattr(handler, "_connect", None)
        if connect is None:
            raise NotSupported(
                "This release of kazoo does not tell how long a session lasts: install kazoo 2.10 or 2.11."
            )

        def connect_and_learn(*arguments: Any) -> Any:
            timeouts = connect(*arguments)
            given = timeouts[0] / READ_TIMEOUT_SHARE / 1000
            with self._condition:
                self._coordinator.session_seconds = min(self._seconds, given)
            return timeouts

        handler._connect = connect_and_learn

    def _session_changed(self, state: str) -> None:
        """In the thread that holds the connection, before it does anything else."""
        with self._condition:
            client = self._client
            if client is None or self._closed:
                return
            if state == "CONNECTED":
                self._coordinator.connected(client.client_id[0])
            elif state == "SUSPENDED":
                self._coordinator.cut()
            else:
                self._coordinator.lost()
            self._condition.notify_all()
        self._tell()

    def _watched(self, _: Any) -> None:
        """Something changed that was looked at."""
        with self._condition:
            self._coordinator.look()
            self._condition.notify_all()

    def _tell(self) -> None:
        with self._condition:
            changed, self._coordinator.changed = self._coordinator.changed, False
        if changed:
            self._changed()

    # Its thread

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._closed or self.failure is not None:
                    return
                now = self._clock()
                course = self._coordinator.next_course(now)
                client, session = self._client, self._coordinator.session
                if course is None or client is None:
                    due = self._coordinator.due() - now
                    self._condition.wait(None if due == float("inf") else max(due, 0.0))
                    continue
            whole = self._walk(client, course, session)
            self._tell()
            if not whole:
                with self._condition:
                    self._condition.wait(AGAIN_SECONDS)
                    self._coordinator.look()

    def _walk(self, client: KazooClient, course: Course, session: int) -> bool:
        """The requests of `course`, one by one; False: it was cut short."""
        answer: Any = None
        asked_at = NEVER_ASKED
        request: Any = None
        try:
            while True:
                with self._condition:
                    if self._closed or self._coordinator.session != session:
                        course.throw(Cut())
                    if isinstance(request, CHANGES):
                        self._coordinator.heard(asked_at)
                    request = course.send(answer)
                asked_at = self._clock()
                answer = self._asked(client, course, request)
        except StopIteration:
            return True
        except Cut:
            return False

    def _asked(self, client: KazooClient, course: Course, request: Any) -> Any:
        try:
            return ask(client, request, self._watched)
        except Cut as cut:
            with self._condition:
                course.throw(cut)
        except NotAllowed as refused:
            self.failure = refused
            self._coordinator.changed = True
            with self._condition:
                course.throw(Cut())
        raise AssertionError("a course goes on behind a cut")


NEVER_ASKED: Final = float("-inf")
