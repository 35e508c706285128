"""A connection that one task, or the driver's verdict about all tasks, has with the broker; it waits as they do.

A task sends its rows as a `Part`: members of a commit group, prepared when the rows are over. The driver commits the
parts of all tasks, or aborts their run. Each connects for itself, from whichever machine it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from tfmq.client.connection.factory import reach
from tfmq.client.connection.requests import Cluster, Topic, ask, find_topic
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation, Task, Tasks
from tfmq.client.send.partition_sender import Identities
from tfmq.client.transaction.commit_group import (
    GroupPart,
    MemberBatch,
    Times,
    aborting,
    committing,
    forgetting,
)
from tfmq.client.transaction.pipeline import TransactionStreams
from tfmq.protocol.commands import CommitGroup, CommitGroupReply, CommitMember, Ping, TransactionName

CLOSE_SECONDS = 2.0


class Verdict(NamedTuple):
    """What is to be committed: the members of all tasks, and how many `rows` they have."""

    group: str
    sequence: int
    run: str
    members: Sequence[TransactionName]
    rows: int


class GroupClient:
    """See the module. `seconds`: how long one answer may take, lost connections and all. `patience_seconds`: how long a
    first connection is tried; None: as long. Making it touches no network.

    All methods raise the `TfmqError` that the broker answered, `ConnectionFailed`, `TimedOut`.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        seconds: float,
        name: str = "tfmq-spark",
        *,
        patience_seconds: float | None = None,
    ) -> None:
        self.link, self._driver, _ = reach(servers, BlockingDriver)
        self.link.client = name
        self.link.patience_seconds = seconds if patience_seconds is None else patience_seconds
        self._seconds = seconds
        self._cluster = Cluster(self.link.now)
        self._tasks = Tasks(self.link.now)
        self._driver.tickers = [*self._driver.tickers, self._tasks]
        self._streams = TransactionStreams(self.link, Identities(self.link))

    def connect(self) -> None:
        """Wait until the broker has told its limits."""
        self._driver.run(ask(self.link, Ping(), self.link.now() + self._seconds))

    def topic(self, name: str) -> Topic:
        """The topic, made if the broker makes topics on first use. Raises `UnknownTopic`."""
        found = find_topic(self.link, self._cluster, name, create=True, patient=True, seconds=self._seconds)
        return self._driver.run(found)

    def part(self, member: CommitMember, ttl_ms: int | None = None) -> Part:
        """What a task adds to the sequence that `member` names."""
        core = GroupPart(
            self.link,
            self._streams,
            member,
            Times(self._seconds, ttl_ms),
            start=self._start,
            later=self._driver.call_later,
        )
        return Part(core, self._driver)

    def commit(self, verdict: Verdict, *, other_total: bool = False) -> CommitGroupReply:
        """Commit all of it; asked until the answer is known. Raises `GroupStale` (something later, or another total
        without `other_total`, is committed), `GroupFenced`, `GroupIncomplete`.
        """
        request = CommitGroup(
            verdict.group, verdict.sequence, verdict.run, list(verdict.members), verdict.rows, other_total
        )
        return self._driver.run(committing(self.link, request, self._seconds))

    def abort(self, group: str, sequence: int, run: str) -> str:
        """Drop what that run made, and let nothing more of it in: "aborted", or "committed" where that came before."""
        return self._driver.run(aborting(self.link, group, sequence, run, self._seconds))

    def forget(self, group: str) -> bool:
        """Forget the group; False: it was not known."""
        return self._driver.run(forgetting(self.link, group, self._seconds))

    def close(self) -> None:
        """Drop the connection, and with it what is not prepared."""
        self._driver.close(CLOSE_SECONDS)

    def __enter__(self) -> GroupClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        task = self._tasks.start(operation, failed)
        self._driver.attend()
        return task


class Part:
    """What one task sends. Left by an exception, it lets go of everything."""

    def __init__(self, core: GroupPart, driver: BlockingDriver) -> None:
        self._core = core
        self._driver = driver

    @property
    def superfluous(self) -> bool:
        """Whether the sequence is committed already."""
        return self._core.superfluous

    def send(self, batch: MemberBatch) -> bool:
        """Take `batch`, and wait while too much is under way. False: it is superfluous, as all that follow."""
        taken = self._driver.run(self._core.sending(batch))
        with self._driver.lock:
            self._driver.glance()
        return taken

    def prepare(self) -> list[TransactionName]:
        """All is sent: the members, prepared."""
        return self._driver.run(self._core.preparing())

    def __enter__(self) -> Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._driver.run(self._core.dropping())
