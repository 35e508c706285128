"""Commit groups (transactions that are committed together, by sequence): one writer's transactions, and the commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request, request_until_not_busy
from tfmq.client.operation import Event, Operation, Task, Wait
from tfmq.client.transaction.pipeline import BeginFields, Pipeline, ProducerSequencePool
from tfmq.errors import TfmqError, TimedOut
from tfmq.protocol import commands

DROP_TIMEOUT_SECONDS: Final = 5.0
"""How long a failed writer tries to roll back its transactions. After this time, their own timeouts end them."""


class EncodedBlocks(Protocol):
    """Encoded records. `blocks`: (size, number of records, CRC-32) of each block."""

    @property
    def data(self) -> Buffer: ...
    @property
    def blocks(self) -> Sequence[tuple[int, int, int]]: ...


EncodeRecords = Callable[[int, int], EncodedBlocks]
"""A function (producer id, first sequence) that encodes records. The same arguments must give the same bytes."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class MemberBatch:
    """`count` records, of at most `size_bytes` in total, for a partition. They are encoded only when they are sent."""

    topic: str
    incarnation: int
    partition: int
    count: int
    size_bytes: int
    encode: EncodeRecords | None
    producer_id: int = 0
    sequence: int = 0
    encoded: EncodedBlocks | None = None
    due_field: ClassVar[None] = None

    def assign_sequence(self, producer_id: int, sequence: int) -> EncodedBlocks:
        assert self.encode is not None, "the broker has not got it yet"
        self.producer_id, self.sequence = producer_id, sequence
        self.encoded = self.encode(producer_id, sequence)
        return self.encoded

    def release_records(self) -> None:
        self.encoded = self.encode = None


StartTask = Callable[[Operation[Any], Callable[[Exception], None]], Task]
"""Starts an operation in the background, as `BackgroundTasks.start` does."""
CallLater = Callable[[float, Callable[[], None]], Any]
"""(seconds, function): calls the function after these seconds, under the driver's lock. The result has `cancel()`."""


class CommitGroupWriter:
    """Sends one writer's messages for a sequence of a commit group, in one or more transactions, the *members*.

    Before a member exceeds the broker's limits of size or age, the writer prepares it and begins the next member. A
    member that is not prepared ends with its connection, so a dead writer leaves no open member. `seconds`: timeout of
    a request. `ttl_ms`: how long a member may stay prepared (None: the broker's default). `already_committed`: whether
    the sequence was committed before, so that nothing is sent.

    The methods are operations; only one may run at a time. If a method has raised, this writer's messages cannot be
    committed any more, and only `drop` may be called.
    """

    def __init__(
        self,
        link: ClientConnection,
        sequences: ProducerSequencePool,
        member: commands.CommitMember,
        *,
        seconds: float,
        ttl_ms: int | None = None,
        start: StartTask,
        later: CallLater,
    ) -> None:
        self.prepared: list[commands.TransactionName] = []
        self.already_committed = False
        self.sent_bytes = self.sent_messages = 0
        """The total size and number of the messages in the prepared members."""
        self._link, self._sequences, self._member = link, sequences, member
        self._seconds, self._ttl_ms = seconds, ttl_ms
        self._start_task, self._call_later = start, later
        self._pipeline: Pipeline | None = None
        self._task: Task | None = None
        self._batches = 0
        self._bytes = 0
        self._age_timer: Any = None
        self._preparing_event: Event | None = None
        """While a member is prepared because of its age, the event that is set when the prepare ends; else None."""
        self._failure: TfmqError | None = None

    # Operations

    def send(self, batch: MemberBatch) -> Operation[bool]:
        """Queue `batch`, and wait while `pipeline.BUFFER_BYTES` or more bytes are not acknowledged.

        Return False if the sequence is already committed. Raises the broker's error or `ConnectionFailed`; then no
        message of this writer will be visible.
        """
        yield from self._wait_until_idle()
        if self.already_committed:
            return False
        limits, size_bytes = self._link.limits, self._bytes + batch.size_bytes
        is_full = size_bytes > limits["transaction_bytes"] or self._batches >= limits["transaction_pieces"]
        if self._pipeline is not None and is_full:
            yield from self._prepare_member()
        pipeline = self._pipeline or self._begin_member()
        pipeline.push([batch])  # type: ignore[list-item]  # A pipeline uses only attributes that a `MemberBatch` has.
        self._batches += 1
        self._bytes += batch.size_bytes
        while not (pipeline.begun and pipeline.has_room) and not self._is_already_committed(pipeline):
            yield Wait((pipeline.changed_event(),), self._seconds)
        return not self.already_committed

    def prepare(self) -> Operation[list[commands.TransactionName]]:
        """Prepare the last member. Return the names of all members. Raises the broker's error or `ConnectionFailed`."""
        yield from self._wait_until_idle()
        if self._pipeline is not None:
            yield from self._prepare_member()
        return self.prepared

    def drop(self, seconds: float = DROP_TIMEOUT_SECONDS) -> Operation[None]:
        """Roll back all members within `seconds`. A member whose rollback fails ends with its connection or timeout."""
        until = self._link.now() + seconds
        names, pipeline = list(self.prepared), self._pipeline
        if pipeline is not None and pipeline.begun:
            names.append(commands.TransactionName(pipeline.xid, pipeline.epoch))
        self._end_member()
        requests = [
            self._link.send_request(commands.RollbackTransaction(xid, epoch, False), seconds=seconds)
            for xid, epoch in names
        ]
        for pending in requests:
            while not pending.done and self._link.now() < until:
                yield Wait((pending,), until - self._link.now())
            self._link.abandon(pending)

    def _begin_member(self) -> Pipeline:
        link, seconds = self._link, self._seconds
        timeout_ms = link.limits["transaction_seconds"] * 1000
        beginning = BeginFields(timeout_ms=timeout_ms, member=self._member)
        pipeline = self._pipeline = Pipeline(link, self._sequences, beginning, seconds)
        self._batches = self._bytes = 0
        self._task = self._start_task(pipeline.run(), pipeline.set_failure)
        self._age_timer = self._call_later(timeout_ms / 2000, self._member_too_old)
        return pipeline

    def _is_already_committed(self, pipeline: Pipeline) -> bool:
        """Return whether the sequence is already committed. If sending has failed, raise its error."""
        if pipeline.failure is not None:
            raise pipeline.failure
        if pipeline.already_committed and not self.already_committed:
            self.already_committed = True
            self._end_member()
        return self.already_committed

    def _prepare_member(self) -> Operation[None]:
        pipeline = self._pipeline
        assert pipeline is not None, "one is open"
        self._age_timer.cancel()  # Otherwise the age timer would prepare the member a second time.
        while (pipeline.unacked_bytes or not pipeline.begun) and not self._is_already_committed(pipeline):
            yield Wait((pipeline.changed_event(),), self._seconds)
        if self.already_committed:
            return
        message = commands.PrepareTransaction(pipeline.xid, pipeline.epoch, self._ttl_ms, [])
        yield from _request_until_replied(self._link, message, self._seconds)
        self.prepared.append(commands.TransactionName(pipeline.xid, pipeline.epoch))
        self.sent_bytes += pipeline.sent_bytes
        self.sent_messages += pipeline.message_count
        self._end_member()

    def _end_member(self) -> None:
        if self._age_timer is not None:
            self._age_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._pipeline is not None:
            self._pipeline.stop()
            self._pipeline = None

    # Age of a member: the source of the records may pause for longer than a transaction may be open

    def _member_too_old(self) -> None:
        if self._pipeline is not None and self._preparing_event is None:
            self._preparing_event = Event()
            self._start_task(self._prepare_old_member(), self._set_failure)

    def _prepare_old_member(self) -> Operation[None]:
        try:
            yield from self._prepare_member()
        finally:
            if self._preparing_event is not None:
                cut, self._preparing_event = self._preparing_event, None
                cut.complete()

    def _set_failure(self, error: Exception) -> None:
        self._failure = error if isinstance(error, TfmqError) else TfmqError(f"The client failed: {error!r}")

    def _wait_until_idle(self) -> Operation[None]:
        while self._preparing_event is not None:
            yield Wait((self._preparing_event,), self._seconds)
        if self._failure is not None:
            raise self._failure


# Decisions on the whole sequence


def commit_sequence(
    link: ClientConnection, message: commands.CommitGroup, seconds: float
) -> Operation[commands.CommitGroupReply]:
    """Commit the sequence. The request is repeated until its reply arrives: a commit may take longer than `seconds`.

    `seconds`: timeout of one request, and how long the broker may be unreachable. If the sequence was committed before,
    the reply of that commit is returned. Raises `GroupStale` if a later sequence was committed, or this one with
    another number of rows, `GroupFenced` if the run was aborted, `GroupIncomplete` if a transaction is not prepared.
    """
    reply: commands.CommitGroupReply = yield from _request_until_replied(link, message, seconds)
    return reply


def abort_sequence(link: ClientConnection, group: str, sequence: int, run: str, seconds: float) -> Operation[str]:
    """Let the broker reject `run` from now on. Return "committed" if the sequence was committed, else "aborted"."""
    reply = yield from _request_until_replied(link, commands.AbortCommitGroup(group, sequence, run), seconds)
    return str(reply.state)


def forget_group(link: ClientConnection, group: str, seconds: float) -> Operation[bool]:
    """Let the broker forget the group's last committed sequence. Return False if the group had none."""
    reply = yield from _request_until_replied(link, commands.ForgetCommitGroup(group), seconds)
    return bool(reply.forgotten)


def _request_until_replied(link: ClientConnection, message: Any, seconds: float) -> Operation[Any]:
    """Send a request. Repeat it after each timeout, as long as the broker replies to a ping within `seconds`."""
    doubtful = False
    while True:
        pending = yield from request_until_not_busy(
            link, message, until=link.now() + seconds, in_background=True, maybe_sent=doubtful
        )
        if not isinstance(pending.error, TimedOut):
            return pending.result()
        doubtful = True
        yield from request(link, commands.Ping(), seconds=seconds)
