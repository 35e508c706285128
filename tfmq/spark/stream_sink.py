"""The sink of a streaming query: each micro-batch is in its topics exactly once.

The commit group is the query's, the sequence is the number of the micro-batch: a batch that is committed is known by
that, whoever sends it again. Each attempt at a batch is a run of its own, so that an aborted one can be shut out.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tfmq.errors import BadRequest, GroupIncomplete, GroupStale
from tfmq.protocol.commands import CommitMember
from tfmq.spark.group_commit import GroupClient
from tfmq.spark.sentences import told
from tfmq.spark.sink_columns import check_columns
from tfmq.spark.sink_settings import SinkSettings, group_name, sink_settings
from tfmq.spark.task_writing import abort_run, verdict_of, write_rows

log = logging.getLogger("tfmq.spark")

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
ADVICE: Final = (
    " Nothing was written. Begin with a new checkpoint, or have the broker forget how far the query is:"
    " tfmq tx forget-group {group}."
)
ANY_TOTAL: Final = (
    " A query that gives other rows each time it runs a batch takes the option allowOtherTotal=true: then what was"
    " committed first stays."
)
TOO_LATE: Final = (
    " What a task has written waits for the option transactionTtl, which must be longer than a batch takes; start the"
    " query again."
)
PASSED_OVER: Final = (
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

    @told
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task. Nothing is visible before `commit`."""
        query, batch = _place()
        member = CommitMember(group_name("stream", query, self.settings.topic), batch, self.run)
        with _told_what_to_do(member.group):
            return write_rows(self.settings, member, iterator)

    @told
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
            log.warning(PASSED_OVER, batchId, verdict.rows)
        if reply.dropped:
            log.warning(
                "%d messages of batch %d were dropped: their topics are gone.", reply.dropped, batchId
            )

    @told
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
        raise GroupIncomplete(error.sentence + TOO_LATE) from None
    except GroupStale as error:
        advice = ADVICE + (ANY_TOTAL if "another total" in error.sentence else "")
        raise GroupStale(error.sentence + advice.format(group=group)) from None
