"""Commit groups: a writer's part of a sequence; commit, abort and forget of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.connection import Link
from tfmq.client.connection.requests import answered, request
from tfmq.client.operation import Flag, Operation, Task, Wait
from tfmq.client.transaction.pipeline import Beginning, Pipeline, TransactionStreams
from tfmq.errors import TfmqError, TimedOut
from tfmq.protocol.commands import (
    AbortCommitGroup,
    CommitGroup,
    CommitGroupReply,
    CommitMember,
    ForgetCommitGroup,
    Ping,
    PrepareTransaction,
    RollbackTransaction,
    TransactionName,
)

LET_GO_SECONDS: Final = 5.0
"""How long a failed writer waits for the rollback of its members.

Afterwards the timeout of each member ends it.
"""


class Encoded(Protocol):
    """Encoded records. `blocks`: [size, count, CRC-32] each."""

    @property
    def data(self) -> Buffer: ...
    @property
    def blocks(self) -> Sequence[tuple[int, int, int]]: ...


Encode = Callable[[int, int], Encoded]
"""(producer id, sequence of the first record) -> the records. Must be deterministic."""


class MemberBatch:
    """`count` records for a partition of the topic's `incarnation`.

    The records are encoded when they are sent, and released when the broker has them. `size_bytes` is an upper bound of
    their size.
    """

    __slots__ = (
        "__weakref__",
        "_encode",
        "count",
        "encoded",
        "incarnation",
        "partition",
        "producer_id",
        "sequence",
        "size_bytes",
        "topic",
    )

    due: None = None

    def __init__(
        self, topic: str, incarnation: int, partition: int, count: int, size_bytes: int, encode: Encode
    ) -> None:
        self.topic, self.incarnation, self.partition = topic, incarnation, partition
        self.count, self.size_bytes = count, size_bytes
        self.producer_id, self.sequence = 0, 0
        self.encoded: Encoded | None = None
        self._encode: Encode | None = encode

    def number(self, producer_id: int, sequence: int) -> Encoded:
        """Assign the producer sequence and encode the records."""
        assert self._encode is not None, "the broker has not got it yet"
        self.producer_id, self.sequence = producer_id, sequence
        self.encoded = self._encode(producer_id, sequence)
        return self.encoded

    def journalled(self) -> None:
        """Release the records after the broker's journal has them."""
        self.encoded = self._encode = None


class Times(NamedTuple):
    """Timeout of a request, and of a prepared member (None: the broker's default)."""

    seconds: float
    ttl_ms: int | None = None


Start = Callable[[Operation[Any], Callable[[Exception], None]], Task]
"""Runs an operation in the background: `BackgroundTasks.start`."""
Later = Callable[[float, Callable[[], None]], Any]
"""Calls a function after a number of seconds, under the driver's lock.

The result has `cancel()`.
"""


class GroupPart:
    """Sends one writer's part of a sequence of a commit group, in member transactions.

    A member is prepared, and the next one begun, before it exceeds the broker's transaction limits in size or age.
    Members are local transactions: a member that is not prepared ends with its connection, so a writer that dies leaves
    none open. Nothing is visible before COMMIT_GROUP names the members.

    The methods are operations, one at a time. `prepared` lists the prepared members. `already_committed`: the sequence
    is committed, so nothing is sent. After an operation has raised, this part cannot be in the sequence; then only
    `drop` may be called.
    """

    def __init__(
        self,
        link: Link,
        streams: TransactionStreams,
        member: CommitMember,
        times: Times,
        *,
        start: Start,
        later: Later,
    ) -> None:
        self.names: list[TransactionName] = []
        self.superfluous = False
        self.sent_bytes = self.sent_messages = 0
        """Size and messages of the prepared members."""
        self._link, self._streams, self._member, self._times = link, streams, member, times
        self._start, self._later = start, later
        self._pipeline: Pipeline | None = None
        self._task: Task | None = None
        self._batches = 0
        self._bytes = 0
        self._alarm: Any = None
        self._cut: Flag | None = None  # An unset event while a member that became too old is being prepared.
        self._failure: TfmqError | None = None

    # Operations

    def sending(self, batch: MemberBatch) -> Operation[bool]:
        """Queue `batch`; wait while too much is unacked.

        Return False if the sequence is already committed.

        Raises the broker's error, `ConnectionFailed`; then nothing of this part will be visible.
        """
        yield from self._come_to_rest()
        if self.superfluous:
            return False
        if self._outgrown_by(batch):
            yield from self._preparing()
        pipeline = self._pipeline or self._begin()
        pipeline.push([batch])  # type: ignore[list-item]  # A pipeline uses only attributes that a `MemberBatch` has.
        self._batches += 1
        self._bytes += batch.size_bytes
        while not (pipeline.begun and pipeline.has_room) and not self._over(pipeline):
            yield Wait((pipeline.moved(),), self._times.seconds)
        return not self.superfluous

    def preparing(self) -> Operation[list[TransactionName]]:
        """Prepare the last member and return the names of all. Raises as `send`."""
        yield from self._come_to_rest()
        if self._pipeline is not None:
            yield from self._preparing()
        return self.names

    def dropping(self, seconds: float = LET_GO_SECONDS) -> Operation[None]:
        """Roll back all members within `seconds`.

        Members that could not be rolled back end with their connection or by their timeout.
        """
        until = self._link.now() + seconds
        names, pipeline = list(self.names), self._pipeline
        if pipeline is not None and pipeline.begun:
            names.append(TransactionName(pipeline.xid, pipeline.epoch))
        self._end_member()
        calls = [
            self._link.call(RollbackTransaction(xid, epoch, False), seconds=seconds) for xid, epoch in names
        ]
        for call in calls:
            while not call.done and self._link.now() < until:
                yield Wait((call,), until - self._link.now())
            self._link.abandon(call)

    # Internal

    def _begin(self) -> Pipeline:
        link, seconds = self._link, self._times.seconds
        timeout_ms = link.limits["transaction_seconds"] * 1000
        beginning = Beginning(timeout_ms=timeout_ms, member=self._member)
        pipeline = self._pipeline = Pipeline(link, self._streams, beginning, seconds)
        self._batches = self._bytes = 0
        self._task = self._start(pipeline.run(), pipeline.broke)
        self._alarm = self._later(timeout_ms / 2000, self._grown_old)
        return pipeline

    def _outgrown_by(self, batch: MemberBatch) -> bool:
        """Return whether the open member would exceed the broker's limits with `batch`."""
        limits = self._link.limits
        return self._pipeline is not None and (
            self._bytes + batch.size_bytes > limits["transaction_bytes"]
            or self._batches >= limits["transaction_pieces"]
        )

    def _over(self, pipeline: Pipeline) -> bool:
        """Return whether the sequence is already committed. Raises the error of the member."""
        if pipeline.failure is not None:
            raise pipeline.failure
        if pipeline.superfluous and not self.superfluous:
            self.superfluous = True
            self._end_member()
        return self.superfluous

    def _preparing(self) -> Operation[None]:
        """Prepare the open member."""
        pipeline = self._pipeline
        assert pipeline is not None, "one is open"
        self._alarm.cancel()  # Otherwise the age timer would prepare it a second time.
        while (pipeline.bytes or not pipeline.begun) and not self._over(pipeline):
            yield Wait((pipeline.moved(),), self._times.seconds)
        if self.superfluous:
            return
        message = PrepareTransaction(pipeline.xid, pipeline.epoch, self._times.ttl_ms, [])
        yield from _until_known(self._link, message, self._times.seconds)
        self.names.append(TransactionName(pipeline.xid, pipeline.epoch))
        self.sent_bytes += pipeline.sent_bytes
        self.sent_messages += pipeline.message_count
        self._end_member()

    def _end_member(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._pipeline is not None:
            self._pipeline.end()
            self._pipeline = None

    # Age: the source of the records may take longer than a transaction may be open

    def _grown_old(self) -> None:
        if self._pipeline is not None and self._cut is None:
            self._cut = Flag()
            self._start(self._cutting(), self._broke)

    def _cutting(self) -> Operation[None]:
        try:
            yield from self._preparing()
        finally:
            if self._cut is not None:
                cut, self._cut = self._cut, None
                cut.settle()

    def _broke(self, error: Exception) -> None:
        self._failure = error if isinstance(error, TfmqError) else TfmqError(f"The client failed: {error!r}")

    def _come_to_rest(self) -> Operation[None]:
        """Wait until no member is being prepared in the background. Raises its error."""
        while self._cut is not None:
            yield Wait((self._cut,), self._times.seconds)
        if self._failure is not None:
            raise self._failure


# Decisions on the whole sequence


def committing(link: Link, message: CommitGroup, seconds: float) -> Operation[CommitGroupReply]:
    """Commit the sequence; repeated until the reply arrives, because a large commit takes long.

    `seconds`: how long the broker may be unreachable or silent. The same sequence again gets the first reply. Raises
    `GroupStale`, `GroupFenced`, `GroupIncomplete`, and other errors of the broker.
    """
    reply: CommitGroupReply = yield from _until_known(link, message, seconds)
    return reply


def aborting(link: Link, group: str, sequence: int, run: str, seconds: float) -> Operation[str]:
    """Abort what `run` prepared for the sequence, and reject its further members.

    Return "aborted", or "committed" if the sequence was committed before.
    """
    reply = yield from _until_known(link, AbortCommitGroup(group, sequence, run), seconds)
    return str(reply.state)


def forgetting(link: Link, group: str, seconds: float) -> Operation[bool]:
    """Delete the progress of the group. Return False if there was none."""
    reply = yield from _until_known(link, ForgetCommitGroup(group), seconds)
    return bool(reply.forgotten)


def _until_known(link: Link, message: Any, seconds: float) -> Operation[Any]:
    """Return the reply to a request that the broker recognises when repeated.

    A request that times out is repeated as long as the broker answers a ping within `seconds`.
    """
    doubtful = False
    while True:
        call = yield from answered(
            link, message, until=link.now() + seconds, unattended=True, doubtful=doubtful
        )
        if not isinstance(call.error, TimedOut):
            return call.result()
        doubtful = True
        yield from request(link, Ping(), seconds=seconds)
