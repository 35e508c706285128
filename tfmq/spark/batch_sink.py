"""The sink of a batch write: all of it is in its topics, or nothing.

With txnAppId and txnVersion it is done once: the commit group is the application's, and the version is the sequence.
Without them every write is a commit group of its own, which the broker forgets when it is committed, and a day after it
was aborted: until then it keeps out tasks that come late. A job that is run again writes again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tfmq.client.connection.connection import PATIENCE_SECONDS
from tfmq.errors import BadRequest, GroupIncomplete, GroupStale, TfmqError
from tfmq.protocol.commands import CommitMember
from tfmq.spark.group_commit import GroupClient
from tfmq.spark.sentences import told
from tfmq.spark.sink_columns import check_columns
from tfmq.spark.sink_settings import SinkSettings, group_name, sink_settings
from tfmq.spark.task_writing import abort_run, verdict_of, write_rows

log = logging.getLogger("tfmq.spark")

TOO_LATE: Final = (
    " What a task has written waits for the option transactionTtl, which must be longer than the whole write takes:"
    " write it again with a longer one."
)
PASSED_OVER: Final = (
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

    @told
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task. Nothing is visible before `commit`."""
        try:
            return write_rows(self.settings, self.member, iterator)
        except GroupStale as error:
            raise self._stale(error) from None

    @told
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver. A version that is committed already stays as it is."""
        verdict = verdict_of(messages)
        if verdict is None or not (self.once or verdict.members):
            return
        with GroupClient(self.settings.servers, self.settings.timeout) as client:
            try:
                reply = client.commit(verdict, other_total=self.settings.other_total)
            except GroupIncomplete as error:
                raise GroupIncomplete(error.sentence + TOO_LATE) from None
            except GroupStale as error:
                raise self._stale(error) from None
            if not self.once:
                self._forget(client)
        if reply.repeated and verdict.rows and not verdict.members:
            log.warning(PASSED_OVER, self.member.sequence, self.settings.group, verdict.rows)
        if reply.dropped:
            log.warning("%d messages were dropped: their topics are gone.", reply.dropped)

    @told
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
