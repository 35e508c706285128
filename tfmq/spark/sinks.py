"""Sinks of batch writes and streaming queries: all rows of a write become visible at the same time.

Each write or micro-batch is one sequence of a commit group in the broker (a series of numbered commits). Tasks send and
prepare transactions of this sequence. When all tasks have prepared their transactions, the driver commits the sequence.
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

from tfmq.client.connection.connection import FIRST_CONNECT_TIMEOUT
from tfmq.errors import BadRequest, GroupIncomplete, GroupStale, TfmqError
from tfmq.protocol.commands import CommitMember
from tfmq.spark.errors import hide_traceback
from tfmq.spark.schema import check_sink_columns
from tfmq.spark.settings import SinkSettings, commit_group_name, parse_sink_settings
from tfmq.spark.sink_task import CommitGroupClient, abort_run, collect_commit, write_rows

log = logging.getLogger("tfmq.spark")

BATCH_EXPIRED: Final = (
    " What a task has written waits for the option transactionTtl, which must be longer than the whole write takes:"
    " write it again with a longer one."
)
BATCH_SKIPPED: Final = (
    "Version %d of %s was committed before, so these %d rows were passed over. Other writes, also those to another"
    " topic, need a txnAppId of their own."
)


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """Check options, columns and that the broker is reachable; create the sink. Raises BadRequest, ConnectionFailed."""
    settings = parse_sink_settings(options, streaming=False)
    if overwrite:
        raise BadRequest('A topic only grows: use mode("append"), not "overwrite".')
    check_sink_columns(schema, settings.topic)
    with CommitGroupClient(settings.servers, settings.timeout, patience_seconds=FIRST_CONNECT_TIMEOUT) as client:
        client.connect()
    return BatchSink(settings)


class BatchSink(DataSourceArrowWriter):
    """Sink of a batch write. Spark creates it on the driver and pickles it into the tasks; the driver commits.

    With the options txnAppId and txnVersion the write is idempotent: all writes of the application share a commit
    group, and the version is the sequence. Without these options every write has its own commit group, and a job that
    runs again writes its rows again. `commit` deletes the group of such a write. After an abort, the broker keeps the
    group for a day, to reject tasks that are still sending.
    """

    def __init__(self, settings: SinkSettings) -> None:
        self.settings = settings
        self.run_id = uuid.uuid4().hex
        self.idempotent = bool(settings.group)
        self.member = CommitMember(
            settings.group or commit_group_name("write", self.run_id), settings.sequence, self.run_id
        )

    @hide_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task and prepare them. `commit` makes the rows visible. Runs in the task."""
        try:
            return write_rows(self.settings, self.member, iterator)
        except GroupStale as error:
            raise self._explain_stale(error) from None

    @hide_traceback
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit the rows of all tasks. If the version is already committed, nothing changes. Runs on the driver."""
        request = collect_commit(messages, other_total=self.settings.allow_other_total)
        if request is None or not (self.idempotent or request.transactions):
            return
        with CommitGroupClient(self.settings.servers, self.settings.timeout) as client:
            try:
                reply = client.commit(request)
            except GroupIncomplete as error:
                raise GroupIncomplete(error.sentence + BATCH_EXPIRED) from None
            except GroupStale as error:
                raise self._explain_stale(error) from None
            if not self.idempotent:
                self._delete_group(client)
        if reply.repeated and request.rows and not request.transactions:
            log.warning(BATCH_SKIPPED, self.member.sequence, self.settings.group, request.rows)
        if reply.dropped:
            log.warning("%d messages were dropped: their topics are gone.", reply.dropped)

    @hide_traceback
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Discard the rows of all tasks, unless they are committed. Runs on the driver, also after `commit` raised."""
        error = abort_run(self.settings, self.member)
        if error is not None and collect_commit(messages) is not None:
            log.warning("The write could not be aborted; what it has prepared expires: %s", error)

    def _delete_group(self, client: CommitGroupClient) -> None:
        """Delete the commit group of this write; an error is logged, because the rows are committed."""
        try:
            client.delete_group(self.member.group)
        except TfmqError as error:
            log.warning("The broker still remembers the commit group %s: %s", self.member.group, error)

    def _explain_stale(self, error: GroupStale) -> GroupStale:
        return GroupStale(
            f"{error.sentence} Nothing was written: versions of one txnAppId only go up, and the same one has the same"
            " rows, or the option allowOtherTotal=true. To begin anew, as with a new checkpoint, take another txnAppId,"
            f" or have the broker forget this one: tfmq tx forget-group {self.member.group}."
        )


QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
STALE_ADVICE: Final = (
    " Nothing was written. Begin with a new checkpoint, or have the broker forget how far the query is:"
    " tfmq tx forget-group {group}."
)
OTHER_TOTAL_ADVICE: Final = (
    " A query that gives other rows each time it runs a batch takes the option allowOtherTotal=true: then what was"
    " committed first stays."
)
STREAM_EXPIRED: Final = (
    " What a task has written waits for the option transactionTtl, which must be longer than a batch takes; start the"
    " query again."
)
STREAM_SKIPPED: Final = (
    "Batch %d was committed before, so these %d rows were passed over: this is expected after a restart. A query that"
    " uses a copy of another one's checkpoint has the same id as that one, also if it writes to another topic."
)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """Create the sink of a streaming query. Raises BadRequest for invalid options, columns or output mode."""
    settings = parse_sink_settings(options, streaming=True)
    if overwrite:
        raise BadRequest(
            'A topic only grows: use outputMode("append"), not "complete"; or foreachBatch with txnAppId and txnVersion'
            " for rows that change."
        )
    check_sink_columns(schema, settings.topic)
    return StreamSink(settings)


class StreamSink(DataSourceStreamArrowWriter):
    """Sink of one micro-batch: each micro-batch is written exactly once.

    Each query has a commit group, and the sequence is the number of the micro-batch. So the broker recognizes a
    micro-batch that is already committed when a later attempt sends it again. Each attempt is a run with its own id, so
    that the broker can reject the tasks of an aborted attempt. For each micro-batch, Spark creates one sink, which it
    pickles into the tasks, and another sink, which commits.
    """

    def __init__(self, settings: SinkSettings) -> None:
        self.settings = settings
        self.run_id = uuid.uuid4().hex
        """Id of this attempt. `commit` and `abort` run in another sink and use the id in the tasks' messages."""

    @hide_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task and prepare them. `commit` makes the rows visible. Runs in the task."""
        query, batch = _current_micro_batch()
        member = CommitMember(commit_group_name("stream", query, self.settings.topic), batch, self.run_id)
        with _add_advice(member.group):
            return write_rows(self.settings, member, iterator)

    @hide_traceback
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Commit the rows of all tasks. Runs in a separate process on the driver. Skips a committed micro-batch."""
        request = collect_commit(messages, other_total=self.settings.allow_other_total)
        if request is None:
            return
        with CommitGroupClient(self.settings.servers, self.settings.timeout) as client, _add_advice(request.group):
            reply = client.commit(request)
        if reply.repeated and request.rows and not request.transactions:
            log.warning(STREAM_SKIPPED, batchId, request.rows)
        if reply.dropped:
            log.warning("%d messages of batch %d were dropped: their topics are gone.", reply.dropped, batchId)

    @hide_traceback
    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Discard the rows of this attempt, unless the broker has committed them. Runs on the driver.

        Spark also calls this method after `commit` has raised. If no task sent a message, the id of the run is unknown
        here. Then the commit of the next attempt discards the prepared transactions, or they expire.
        """
        request = collect_commit(messages)
        if request is None:
            return
        member = CommitMember(request.group, request.sequence, request.run)
        if (error := abort_run(self.settings, member)) is not None:
            log.warning("Batch %d could not be aborted; what it has prepared expires: %s", batchId, error)


def _current_micro_batch() -> tuple[str, int]:
    """Return (query id, number of the micro-batch) of this task. Raises BadRequest outside of a streaming query."""
    context = TaskContext.get()
    query = context.getLocalProperty(QUERY_ID) if context is not None else None
    batch = context.getLocalProperty(BATCH_ID) if context is not None else None
    if not query or batch is None:
        raise BadRequest(
            "Spark does not pass the number of this micro-batch, so it cannot be written once: use a trigger of"
            " micro-batches, or foreachBatch with txnAppId and txnVersion."
        )
    return query, int(batch)


@contextmanager
def _add_advice(group: str) -> Iterator[None]:
    """Add advice if the block raises GroupIncomplete (a batch took too long) or GroupStale (an old checkpoint)."""
    try:
        yield
    except GroupIncomplete as error:
        raise GroupIncomplete(error.sentence + STREAM_EXPIRED) from None
    except GroupStale as error:
        advice = STALE_ADVICE + (OTHER_TOTAL_ADVICE if "another total" in error.sentence else "")
        raise GroupStale(error.sentence + advice.format(group=group)) from None
