"""Reader for `spark.readStream`: plans micro-batches from the offsets of the checkpoint.

As long as the query runs, Spark keeps one `StreamReader` in a driver process, which plans each micro-batch. Tasks read
with pickled copies of this `StreamReader`. Offsets are JSON objects as in `tfmq.spark.offsets`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tfmq.client.connection.factory import make_client_parts
from tfmq.client.connection.requests import request_with_retries
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation
from tfmq.errors import NotAllowed, TfmqError, UnknownTopic
from tfmq.protocol.commands import BY_OFFSET, DescribeGroup, GroupOffset, Locate, ResetGroup
from tfmq.spark.batch_reader import make_range_reader
from tfmq.spark.errors import hide_traceback
from tfmq.spark.log_reader import LogReader, SourceAddress, open_log_reader
from tfmq.spark.offsets import Key, Offsets, PartitionOffset, from_json, to_json
from tfmq.spark.planner import BatchLimit, Planner
from tfmq.spark.settings import SourceSettings

if TYPE_CHECKING:
    import pyarrow as pa


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a streaming query. Connects to the broker at the first call; pickled copies are not connected."""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        self._settings = settings
        self._range_reader = make_range_reader(settings, schema)
        self._session: DriverSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    @hide_traceback
    def initialOffset(self) -> dict[str, Any]:
        """Return the offsets at which a query without a checkpoint begins."""
        return to_json(self._open_session().planner.initial_offsets())

    @hide_traceback
    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch as set by the options maxOffsetsPerTrigger and maxBytesPerTrigger."""
        if self._settings.rows_max is not None:
            return ReadMaxRows(self._settings.rows_max)
        if self._settings.bytes_max is not None:
            return ReadMaxBytes(self._settings.bytes_max)
        return ReadAllAvailable()

    @hide_traceback
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the micro-batch that begins at `start`. All messages before `start` have been processed."""
        session, begin = self._open_session(query_begun=True), _parse_checkpoint(start)
        with session.idle_backoff.measured_request():
            end = session.planner.plan_end(begin, _to_batch_limit(limit))
            # The progress is saved after `plan_end`, which checks that `begin` belongs to these topics.
            session.report_progress(begin)
        if end != begin:
            session.idle_backoff.reset()
        return to_json(end)

    @hide_traceback
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the partitions' ends at the last `latestOffset` call, for Spark's metrics; None if there was none."""
        seen = self._open_session().planner.latest_seen
        return None if seen is None else to_json(seen)

    @hide_traceback
    def prepareForTriggerAvailableNow(self) -> None:
        """Set the current ends of the topics as the end of the query."""
        self._open_session().planner.freeze_end()

    @hide_traceback
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        found = self._open_session(query_begun=True).planner.plan_micro_batch(
            _parse_checkpoint(start), _parse_checkpoint(end)
        )
        return [InputPartition(each) for each in found]

    @hide_traceback
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from self._range_reader.read(partition.value)

    @hide_traceback
    def commit(self, end: Mapping[str, Any]) -> None:
        """Write the query's progress to its group: all messages before `end` are processed."""
        self._open_session().report_progress(_parse_checkpoint(end))

    def stop(self) -> None:
        """Close the connection. If Spark does not call this method, the connection ends with the driver process."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _open_session(self, query_begun: bool = False) -> DriverSession:
        """Return the open session, or open one. `query_begun`: wait if the broker is down, because it was up before."""
        if self._session is None:
            self._session = DriverSession(self._settings, query_begun)
        return self._session


class DriverSession:
    """The log reader, planner and group progress of one query, open in the driver as long as the query runs."""

    def __init__(self, settings: SourceSettings, query_begun: bool) -> None:
        self._logs: LogReader = open_log_reader(settings.address, wait_for_broker=query_begun)
        self.planner = Planner(settings, self._logs)
        self.idle_backoff = IdleBackoff()
        self._group = GroupProgress(settings.address, settings.group) if settings.group else None

    def report_progress(self, end: Offsets) -> None:
        if self._group is not None:
            self._group.save(end)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._logs.close()


_parse_checkpoint = partial(from_json, what="The checkpoint", low=0)


def _to_batch_limit(limit: ReadLimit) -> BatchLimit:
    if isinstance(limit, ReadMaxRows):
        return BatchLimit(rows=limit.max_rows)
    if isinstance(limit, ReadMaxBytes):
        return BatchLimit(bytes=limit.max_bytes)
    return BatchLimit()


class FailedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader that raises `error`, about invalid options, at every call: Spark 4.3 hides errors of `streamReader()`."""

    def __init__(self, error: TfmqError) -> None:
        self._error = type(error), str(error)

    @hide_traceback
    def _raise_error(self, *arguments: Any) -> Any:
        kind, sentence = self._error
        raise kind(sentence)

    initialOffset = getDefaultReadLimit = reportLatestOffset = prepareForTriggerAvailableNow = _raise_error

    # Spark checks the number of parameters of these methods, so they cannot be `_raise_error` itself.
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return self._raise_error()  # type: ignore[no-any-return]

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        return self._raise_error()  # type: ignore[no-any-return]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._raise_error()  # type: ignore[no-any-return]


log = logging.getLogger("tfmq.spark")

RETRY_SECONDS: Final = 5.0
"""Pause after a failed attempt to save the progress; without it, an idle query would try 100 times a second."""


class GroupProgress:
    """Writes a query's progress to a group of the broker, so that `tfmq group` shows the query's lag.

    The group is for display only: the checkpoint decides where a query continues. So an error is raised only until the
    first successful save; later errors are logged, and the query continues. The first save fails if the group has live
    members, because the members write their own progress to the group. Each `GroupProgress` has its own connection,
    and waits for a broker that is down.
    """

    def __init__(self, address: SourceAddress, group: str) -> None:
        self._group, self._timeout = group, address.timeout
        self._link, self._driver, _ = make_client_parts(address.servers, BlockingDriver)
        self._link.first_connect_timeout = max(self._link.first_connect_timeout, address.timeout)
        self._saved: Offsets | None = None
        self._retry_at = 0.0

    def save(self, processed: Offsets) -> None:
        """Save that the messages before the offsets `processed` are processed. Raises only before the first success."""
        if processed == self._saved or self._link.now() < self._retry_at:
            return
        try:
            if self._saved is None:
                self._driver.run(self._check_no_live_member())
            self._driver.run(self._write_offsets(processed))
        except TfmqError as error:
            if self._saved is None:
                raise
            self._retry_at = self._link.now() + RETRY_SECONDS
            log.warning("The query's progress could not be written for the group %s: %s", self._group, error)
        else:
            self._saved = processed

    def close(self) -> None:
        self._driver.close()

    def _check_no_live_member(self) -> Operation[None]:
        reply = yield from self._request(DescribeGroup(self._group))
        members = [each["member"] for each in reply.description.get("members", ()) if each.get("live")]
        if members:
            raise NotAllowed(
                f"groupId: the group {self._group} has a live member, {members[0]}, with progress of its own. Stop its"
                " members, or give the query a group of its own."
            )

    def _write_offsets(self, processed: Mapping[Key, PartitionOffset]) -> Operation[None]:
        rows = []
        for (topic, partition), (incarnation, offset, _) in processed.items():
            message = Locate(topic, incarnation, partition, BY_OFFSET, offset)
            try:
                found = yield from self._request(message)
            except UnknownTopic:  # the topic was deleted meanwhile, and needs no progress
                continue
            rows.append(GroupOffset(topic, incarnation, partition, offset, 0, found.epoch))
        if rows:
            yield from self._request(ResetGroup(self._group, rows))

    def _request(self, message: Any) -> Operation[Any]:
        return (yield from request_with_retries(self._link, message, self._link.now() + self._timeout))


IDLE_FACTOR: Final = 3.0
"""Pause of an idle query, as a multiple of the last request's duration. So requests take a quarter of the time."""
IDLE_SECONDS_MAX: Final = 0.2


class IdleBackoff:
    """Pauses between the requests of a query that finds no new messages.

    Spark calls `latestOffset` again 10 ms after a result without new messages, which is expensive for a thousand
    partitions. The pause is before the request to the broker, not after the reply, so the result is always current.
    `now` returns seconds; `sleep` takes seconds.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._now, self._sleep = now, sleep
        self._pause = 0.0

    @contextmanager
    def measured_request(self) -> Iterator[None]:
        """Pause if the last request found no new messages; then measure how long the `with` block takes."""
        if self._pause > 0:
            self._sleep(self._pause)
        begun = self._now()
        yield
        self._pause = min(IDLE_SECONDS_MAX, IDLE_FACTOR * (self._now() - begun))

    def reset(self) -> None:
        """Skip the next pause, because the reply had new messages."""
        self._pause = 0.0
