"""Reader for `spark.readStream`: plans micro-batches from the offsets of the checkpoint.

Spark keeps one instance in a driver process as long as the query runs, and requests each micro-batch from it;
pickled copies read in tasks. The offsets are those of `tfmq.spark.offsets`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from tfmq.client.connection.factory import reach
from tfmq.client.connection.requests import ask
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation
from tfmq.errors import NotAllowed, TfmqError, UnknownTopic
from tfmq.protocol.commands import BY_OFFSET, DescribeGroup, GroupOffset, Locate, ResetGroup
from tfmq.spark.batch_reader import TaskRanges, reading
from tfmq.spark.errors import shown_by_spark
from tfmq.spark.log_reader import Address, Logs, open_logs
from tfmq.spark.offsets import Key, Offset, Offsets, from_json, to_json
from tfmq.spark.planner import Limit, Planner
from tfmq.spark.settings import SourceSettings

if TYPE_CHECKING:
    import pyarrow as pa


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a streaming query.

    Connects at the first request; pickled copies have no connection.
    """

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        self._settings = settings
        self._reading = reading(settings, schema)
        self._session: Desk | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    @shown_by_spark
    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a checkpoint begins."""
        return to_json(self._at_desk().planner.initial())

    @shown_by_spark
    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch that the options set."""
        if self._settings.rows_max is not None:
            return ReadMaxRows(self._settings.rows_max)
        if self._settings.bytes_max is not None:
            return ReadMaxBytes(self._settings.bytes_max)
        return ReadAllAvailable()

    @shown_by_spark
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch. All messages before `start` are already processed."""
        session, begin = self._at_desk(begun=True), _offsets(start)
        with session.pace.asking():
            end = session.planner.latest(begin, _limit(limit))
            # After `plan_end`, which checks that `begin` belongs to these topics.
            session.processed(begin)
        if end != begin:
            session.pace.busy()
        return to_json(end)

    @shown_by_spark
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of the topics when the last micro-batch was planned."""
        seen = self._at_desk().planner.seen()
        return None if seen is None else to_json(seen)

    @shown_by_spark
    def prepareForTriggerAvailableNow(self) -> None:
        """End the query at what is in the topics now."""
        self._at_desk().planner.freeze()

    @shown_by_spark
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Return the ranges of each task of a micro-batch."""
        found = self._at_desk(begun=True).planner.stream(_offsets(start), _offsets(end))
        return [TaskRanges(each) for each in found]

    @shown_by_spark
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one task's ranges as Arrow."""
        yield from self._reading.rows(partition.value)

    @shown_by_spark
    def commit(self, end: Mapping[str, Any]) -> None:
        """Report the progress: all messages before `end` are processed."""
        self._at_desk().processed(_offsets(end))

    def stop(self) -> None:
        """Close the connection. Spark does not always call this; the process ends then."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _at_desk(self, begun: bool = False) -> Desk:
        """Return the session, opened at the first call.

        `query_begun`: the query has begun, so its broker was reachable before; one that is down is waited for.
        """
        if self._session is None:
            self._session = Desk(self._settings, begun)
        return self._session


class Desk:
    """What the driver's reader keeps open as long as the query runs."""

    def __init__(self, settings: SourceSettings, begun: bool) -> None:
        self._logs: Logs = open_logs(settings.address, patient=begun)
        self.planner = Planner(settings, self._logs)
        self.pace = Pace()
        self._group = GroupProgress(settings.address, settings.group) if settings.group else None

    def processed(self, end: Offsets) -> None:
        """Save the progress in the group, if there is one.

        Raises NotAllowed at the first call if the group has a live member; also the other errors of the first save.
        """
        if self._group is not None:
            self._group.save(end)

    def close(self) -> None:
        """Close the connections. Calling it twice is harmless."""
        if self._group is not None:
            self._group.close()
        self._logs.close()


def _offsets(value: Mapping[str, Any]) -> Offsets:
    return from_json(value, "The checkpoint", low=0)


def _limit(limit: ReadLimit) -> Limit:
    if isinstance(limit, ReadMaxRows):
        return Limit(rows=limit.max_rows)
    if isinstance(limit, ReadMaxBytes):
        return Limit(bytes=limit.max_bytes)
    return Limit()


class RefusedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for invalid options: raises the error at the first call.

    Spark 4.3 replaces the error of a `streamReader()` that raises by one of its own.
    """

    def __init__(self, error: TfmqError) -> None:
        self._error = type(error), str(error)

    @shown_by_spark
    def _refuse(self, *arguments: Any) -> Any:
        kind, sentence = self._error
        raise kind(sentence)

    initialOffset = getDefaultReadLimit = reportLatestOffset = prepareForTriggerAvailableNow = _refuse

    # These three have their own signatures because Spark checks the number of parameters.
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Raise the error."""
        return self._refuse()  # type: ignore[no-any-return]

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Raise the error. Not reached, because `latestOffset` raised before."""
        return self._refuse()  # type: ignore[no-any-return]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raise the error. Not reached, because there are no tasks."""
        return self._refuse()  # type: ignore[no-any-return]


log = logging.getLogger("tfmq.spark")

AGAIN_SECONDS: Final = 5.0
"""Pause between attempts after a failed one: an idle query requests a save 100 times a second."""


class GroupProgress:
    """Writes a query's progress to a group of the broker, so that `tfmq group` shows its lag.

    The group is for display only, and the checkpoint decides where a query continues. So later errors are logged
    and the query continues; but a query does not start with a group that has live members of its own. Has its own
    connection; waits for the broker, which was reachable before.
    """

    def __init__(self, address: Address, group: str) -> None:
        self._group, self._timeout = group, address.timeout
        self._link, self._driver, _ = reach(address.servers, BlockingDriver)
        self._link.patience_seconds = max(self._link.patience_seconds, address.timeout)
        self._saved: Offsets | None = None
        self._not_before = 0.0

    def save(self, processed: Offsets) -> None:
        """Save that all messages before these offsets are processed.

        The first call raises NotAllowed if the group has a live member, and any error of writing; later calls log
        errors.
        """
        if processed == self._saved or self._link.now() < self._not_before:
            return
        if self._saved is None:
            self._driver.run(self._refuse_live())
            self._driver.run(self._write(processed))
            self._saved = processed
            return
        try:
            self._driver.run(self._write(processed))
        except TfmqError as error:
            self._not_before = self._link.now() + AGAIN_SECONDS
            log.warning("The query's progress could not be written for the group %s: %s", self._group, error)
        else:
            self._saved = processed

    def close(self) -> None:
        """Close the connection."""
        self._driver.close()

    def _refuse_live(self) -> Operation[None]:
        """Check that the group has no live member. Raises NotAllowed."""
        reply = yield from self._ask(DescribeGroup(self._group))
        members = [each["member"] for each in reply.description.get("members", ()) if each.get("live")]
        if members:
            raise NotAllowed(
                f"groupId: the group {self._group} has a live member, {members[0]}, with progress of its own. Stop its"
                " members, or give the query a group of its own."
            )

    def _write(self, processed: Mapping[Key, Offset]) -> Operation[None]:
        """Set the group's offsets."""
        rows = []
        for (topic, partition), (incarnation, offset, _) in processed.items():
            message = Locate(topic, incarnation, partition, BY_OFFSET, offset)
            try:
                found = yield from self._ask(message)
            except UnknownTopic:  # deleted meanwhile: it needs no progress
                continue
            rows.append(GroupOffset(topic, incarnation, partition, offset, 0, found.epoch))
        if rows:
            yield from self._ask(ResetGroup(self._group, rows))

    def _ask(self, message: Any) -> Operation[Any]:
        return (yield from ask(self._link, message, self._link.now() + self._timeout))


REST: Final = 3.0
"""Idle pause, as a multiple of the last request's time: an idle query works 1/4 of the time."""
REST_SECONDS_MAX: Final = 0.2


class Pace:
    """Pause between the requests of an idle query. `now` and `sleep` are in seconds.

    Spark requests again 10 ms after a reply without new messages, which is cheap for a few partitions and expensive
    for a thousand. The pause is before the request, so the reply is always current.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._now, self._sleep = now, sleep
        self._rest = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Wrap one request: pauses before it if the last one found nothing, and measures it."""
        if self._rest > 0:
            self._sleep(self._rest)
        begun = self._now()
        yield
        self._rest = min(REST_SECONDS_MAX, REST * (self._now() - begun))

    def busy(self) -> None:
        """Skip the next pause, because the reply had new messages."""
        self._rest = 0.0
