"""The sink of a batch write: all of it is in its topics, or nothing.

With txnAppId and txnVersion it is done once: the commit group is the application's, and the version is the sequence.
Without them every write is a commit group of its own, which the broker forgets when it is committed, and a day after it
was aborted: until then it keeps out tasks that come late. A job that is run again writes again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tfmq.client.connection.connection import PATIENCE_SECONDS
from tfmq.errors import BadRequest, GroupIncomplete, GroupStale, TfmqError
from tfmq.protocol.commands import CommitMember
from tfmq.spark.errors import shown_by_spark
from tfmq.spark.schema import check_columns
from tfmq.spark.settings import SinkSettings, group_name, sink_settings
from tfmq.spark.sink_task import GroupClient, abort_run, verdict_of, write_rows

log = logging.getLogger("tfmq.spark")

BATCH_TOO_LATE: Final = (
    " What a task has written waits for the option transactionTtl, which must be longer than the whole write takes:"
    " write it again with a longer one."
)
BATCH_SKIPPED: Final = (
    "Version %d of %s was committed before, so these %d rows were passed over. Other writes, also those to another"
    " topic, need a txnAppId of their own."
)


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """The sink, checked. Raises BadRequest for options, columns or a mode that it cannot take; ConnectionFailed soon
    where there is no broker, instead of when tasks have waited for one.
    """
    settings = sink_settings(options, streaming=False)
    if overwrite:
        raise BadRequest('A topic only grows: use mode("append"), not "overwrite".')
    check_columns(schema, settings.topic)
    with GroupClient(settings.servers, settings.timeout, patience_seconds=PATIENCE_SECONDS) as client:
        client.connect()
    return BatchSink(settings)


class BatchSink(DataSourceArrowWriter):
    """Made on the driver and taken to the tasks; it commits, too."""

    def __init__(self, settings: SinkSettings) -> None:
        self.settings = settings
        self.run = uuid.uuid4().hex
        self.once = bool(settings.group)
        self.member = CommitMember(
            settings.group or group_name("write", self.run), settings.sequence, self.run
        )

    @shown_by_spark
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task. Nothing is visible before `commit`."""
        try:
            return write_rows(self.settings, self.member, iterator)
        except GroupStale as error:
            raise self._stale(error) from None

    @shown_by_spark
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver. A version that is committed already stays as it is."""
        verdict = verdict_of(messages)
        if verdict is None or not (self.once or verdict.members):
            return
        with GroupClient(self.settings.servers, self.settings.timeout) as client:
            try:
                reply = client.commit(verdict, other_total=self.settings.other_total)
            except GroupIncomplete as error:
                raise GroupIncomplete(error.sentence + BATCH_TOO_LATE) from None
            except GroupStale as error:
                raise self._stale(error) from None
            if not self.once:
                self._forget(client)
        if reply.repeated and verdict.rows and not verdict.members:
            log.warning(BATCH_SKIPPED, self.member.sequence, self.settings.group, verdict.rows)
        if reply.dropped:
            log.warning("%d messages were dropped: their topics are gone.", reply.dropped)

    @shown_by_spark
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, also behind a commit that raised; one that was done all the same stays."""
        error = abort_run(self.settings, self.member)
        if error is not None and verdict_of(messages) is not None:
            log.warning("What the write has prepared ends by its time: %s", error)

    def _forget(self, client: GroupClient) -> None:
        """Nobody asks for this group again; it is committed, whatever becomes of this."""
        try:
            client.forget(self.member.group)
        except TfmqError as error:
            log.warning("The broker still remembers the commit group %s: %s", self.member.group, error)

    def _stale(self, error: GroupStale) -> GroupStale:
        return GroupStale(
            f"{error.sentence} Nothing was written: versions of one txnAppId only go up, and the same one has the same"
            " rows, or the option allowOtherTotal=true. To begin anew, as with a new checkpoint, take another txnAppId,"
            f" or have the broker forget this one: tfmq tx forget-group {self.member.group}."
        )


# The sink of a streaming query: each micro-batch is in its topics exactly once.
#
# The commit group is the query's, the sequence is the number of the micro-batch: a batch that is committed is known by
# that, whoever sends it again. Each attempt at a batch is a run of its own, so that an aborted one can be shut out.

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
ADVICE: Final = (
    " Nothing was written. Begin with a new checkpoint, or have the broker forget how far the query is:"
    " tfmq tx forget-group {group}."
)
ANY_TOTAL: Final = (
    " A query that gives other rows each time it runs a batch takes the option allowOtherTotal=true: then what was"
    " committed first stays."
)
STREAM_TOO_LATE: Final = (
    " What a task has written waits for the option transactionTtl, which must be longer than a batch takes; start the"
    " query again."
)
STREAM_SKIPPED: Final = (
    "Batch %d was committed before, so these %d rows were passed over: that is right behind a restart. A query that"
    " works with a copy of another one's checkpoint is taken for that one, also where it writes to another topic."
)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """The sink, checked. Raises BadRequest for options, columns or an output mode that it cannot take."""
    settings = sink_settings(options, streaming=True)
    if overwrite:
        raise BadRequest(
            'A topic only grows: use outputMode("append"), not "complete"; or foreachBatch with txnAppId and txnVersion'
            " for rows that change."
        )
    check_columns(schema, settings.topic)
    return StreamSink(settings)


class StreamSink(DataSourceStreamArrowWriter):
    """Made on the driver for each micro-batch and taken to its tasks; another one commits."""

    def __init__(self, settings: SinkSettings) -> None:
        self.settings = settings
        self.run = uuid.uuid4().hex
        """Names this attempt at a batch. Those that commit and abort take theirs from the tasks' messages."""

    @shown_by_spark
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task. Nothing is visible before `commit`."""
        query, batch = _place()
        member = CommitMember(group_name("stream", query, self.settings.topic), batch, self.run)
        with _told_what_to_do(member.group):
            return write_rows(self.settings, member, iterator)

    @shown_by_spark
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver, in a process of its own. A batch that is committed already stays as it is."""
        verdict = verdict_of(messages)
        if verdict is None:
            return
        with (
            GroupClient(self.settings.servers, self.settings.timeout) as client,
            _told_what_to_do(verdict.group),
        ):
            reply = client.commit(verdict, other_total=self.settings.other_total)
        if reply.repeated and verdict.rows and not verdict.members:
            log.warning(STREAM_SKIPPED, batchId, verdict.rows)
        if reply.dropped:
            log.warning(
                "%d messages of batch %d were dropped: their topics are gone.", reply.dropped, batchId
            )

    @shown_by_spark
    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver, also behind a commit that raised; one that was done all the same stays. Where no task tells
        which run it is, what it prepared goes with the commit of the next attempt, or by its time.
        """
        verdict = verdict_of(messages)
        if verdict is None:
            return
        member = CommitMember(verdict.group, verdict.sequence, verdict.run)
        if (error := abort_run(self.settings, member)) is not None:
            log.warning("What batch %d has prepared ends by its time: %s", batchId, error)


def _place() -> tuple[str, int]:
    """(query id, batch) of this task. Raises BadRequest outside of a streaming query."""
    context = TaskContext.get()
    query = context.getLocalProperty(QUERY_ID) if context is not None else None
    batch = context.getLocalProperty(BATCH_ID) if context is not None else None
    if not query or batch is None:
        raise BadRequest(
            "Spark does not say which micro-batch this is, so it cannot be written once: use a trigger of"
            " micro-batches, or foreachBatch with txnAppId and txnVersion."
        )
    return query, int(batch)


@contextmanager
def _told_what_to_do(group: str) -> Iterator[None]:
    """About a checkpoint that was set back, and a batch that took too long."""
    try:
        yield
    except GroupIncomplete as error:
        raise GroupIncomplete(error.sentence + STREAM_TOO_LATE) from None
    except GroupStale as error:
        advice = ADVICE + (ANY_TOTAL if "another total" in error.sentence else "")
        raise GroupStale(error.sentence + advice.format(group=group)) from None
