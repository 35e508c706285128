"""What one task does with its rows: a part of a commit group, prepared; and the message that tells the driver of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from tfmq.client.connection.connection import PATIENCE_SECONDS
from tfmq.client.transaction.commit_group import MemberBatch
from tfmq.errors import TfmqError
from tfmq.protocol.commands import CommitMember, TransactionName
from tfmq.spark.group_commit import GroupClient, Part, Verdict
from tfmq.spark.outgoing import Outgoing
from tfmq.spark.sink_settings import SinkSettings


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """A task is done: its transactions are prepared, and have `rows`. `member` is what they are members of."""

    member: CommitMember
    transactions: tuple[tuple[str, int], ...]
    rows: int


def write_rows(settings: SinkSettings, member: CommitMember, rows: Iterator[pa.RecordBatch]) -> Written:
    """Send all rows as part of `member`'s sequence and prepare them. Where that is committed already, they are only
    counted.

    Raises the TfmqError that says why they cannot be sent; then nothing of them is left, or will be seen.
    """
    count = 0
    with (
        GroupClient(settings.servers, settings.timeout, _task_name(member)) as client,
        client.part(member, settings.ttl_ms) as part,
    ):
        sender = _Sender(settings, client, part)
        for batch in rows:
            count += len(batch)
            if not part.superfluous:
                sender.take(batch)
            elif settings.other_total:
                break
        sender.rest()
        names = part.prepare()
    return Written(member, tuple((xid, epoch) for xid, epoch in names), count)


class _Sender:
    """Rows of a task, sent as batches of its part. It asks the broker for nothing before the first row."""

    def __init__(self, settings: SinkSettings, client: GroupClient, part: Part) -> None:
        self._settings, self._client, self._part = settings, client, part
        self._outgoing: Outgoing | None = None

    def take(self, rows: pa.RecordBatch) -> None:
        if self._outgoing is None and len(rows):
            context = TaskContext.get()
            first = context.partitionId() if context is not None else 0
            self._client.connect()
            most = self._client.link.limits["message_bytes"]
            self._outgoing = Outgoing(
                self._client.topic, self._settings.topic, first, most, self._settings.lenient
            )
        if self._outgoing is not None:
            self._send(self._outgoing.take(rows))

    def rest(self) -> None:
        if self._outgoing is not None and not self._part.superfluous:
            self._send(self._outgoing.rest())

    def _send(self, batches: Iterator[MemberBatch]) -> None:
        for batch in batches:
            if not self._part.send(batch):
                return


def _task_name(member: CommitMember) -> str:
    """What `tfmq tx list` shows as the owner of its transactions; the query stands beside it."""
    context = TaskContext.get()
    name = f"tfmq-spark batch {member.sequence}"
    return (
        name if context is None else f"{name} task {context.partitionId()} attempt {context.taskAttemptId()}"
    )


def verdict_of(messages: Sequence[WriterCommitMessage | None]) -> Verdict | None:
    """What all tasks together have written; None where no task tells of anything."""
    told = [each for each in messages if isinstance(each, Written)]
    if not told:
        return None
    group, sequence, run = told[0].member
    members = [TransactionName(*name) for each in told for name in each.transactions]
    return Verdict(group, sequence, run, members, sum(each.rows for each in told))


def abort_run(settings: SinkSettings, member: CommitMember) -> TfmqError | None:
    """Drop what tasks of that run have prepared, also those of which nobody told, and let nothing more of it in; a
    broker that cannot be reached is not waited for long. The group must not be forgotten then, which would let in a
    task that Spark has not stopped yet. Gives why it could not be done: Spark tells of what came first.
    """
    try:
        with GroupClient(settings.servers, settings.timeout, patience_seconds=PATIENCE_SECONDS) as client:
            client.abort(*member)
    except TfmqError as error:
        return error
    return None
