"""`spark.readStream`: micro-batches from where the checkpoint stands.

Spark keeps one of these in a process of the driver for as long as the query runs, and asks it what comes next; other
instances plan and read in tasks. Offsets are the checkpoint's; see `offsets`.
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
    """Its connection is made with the first question and stays; what travels to tasks has none."""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        self._settings = settings
        self._reading = reading(settings, schema)
        self._desk: Desk | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_desk": None}

    @shown_by_spark
    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        return to_json(self._at_desk().planner.initial())

    @shown_by_spark
    def getDefaultReadLimit(self) -> ReadLimit:
        """What the options say of the size of a micro-batch."""
        if self._settings.rows_max is not None:
            return ReadMaxRows(self._settings.rows_max)
        if self._settings.bytes_max is not None:
            return ReadMaxBytes(self._settings.bytes_max)
        return ReadAllAvailable()

    @shown_by_spark
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """How far the next micro-batch goes. All before `start` was processed."""
        desk, begin = self._at_desk(begun=True), _offsets(start)
        with desk.pace.asking():
            end = desk.planner.latest(begin, _limit(limit))
            # Behind the look whether it is of these topics.
            desk.processed(begin)
        if end != begin:
            desk.pace.busy()
        return to_json(end)

    @shown_by_spark
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """How far the topics reached when the last micro-batch was planned."""
        seen = self._at_desk().planner.seen()
        return None if seen is None else to_json(seen)

    @shown_by_spark
    def prepareForTriggerAvailableNow(self) -> None:
        """What is there now is all that this query reads."""
        self._at_desk().planner.freeze()

    @shown_by_spark
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """What each task of a micro-batch reads."""
        found = self._at_desk(begun=True).planner.stream(_offsets(start), _offsets(end))
        return [TaskRanges(each) for each in found]

    @shown_by_spark
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one task's ranges, as Arrow."""
        yield from self._reading.rows(partition.value)

    @shown_by_spark
    def commit(self, end: Mapping[str, Any]) -> None:
        """All before `end` was processed."""
        self._at_desk().processed(_offsets(end))

    def stop(self) -> None:
        """Let go of the connection. Spark does not always call it; the process ends then."""
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.close()

    def _at_desk(self, begun: bool = False) -> Desk:
        """`begun`: the query is, so its broker was there: one that is away is waited for."""
        if self._desk is None:
            self._desk = Desk(self._settings, begun)
        return self._desk


class Desk:
    """What the driver's instance has open for as long as the query runs."""

    def __init__(self, settings: SourceSettings, begun: bool) -> None:
        self._logs: Logs = open_logs(settings.address, patient=begun)
        self.planner = Planner(settings, self._logs)
        self.pace = Pace()
        self._group = GroupProgress(settings.address, settings.group) if settings.group else None

    def processed(self, end: Offsets) -> None:
        """Tell the group, where there is one. Raises NotAllowed the first time, if somebody else reads as that
        group.
        """
        if self._group is not None:
            self._group.save(end)

    def close(self) -> None:
        """Twice is harmless."""
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
    """Stands for a reader that could not be made, and says why as soon as it is asked.

    Spark 4.3 loses the error of a `streamReader()` that raises, behind one of its own.
    """

    def __init__(self, error: TfmqError) -> None:
        self._error = type(error), str(error)

    @shown_by_spark
    def _refuse(self, *arguments: Any) -> Any:
        kind, sentence = self._error
        raise kind(sentence)

    initialOffset = getDefaultReadLimit = reportLatestOffset = prepareForTriggerAvailableNow = _refuse

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Spark counts its parameters."""
        return self._refuse()  # type: ignore[no-any-return]

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Behind `latestOffset`, so never reached."""
        return self._refuse()  # type: ignore[no-any-return]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Without tasks nothing is read."""
        return self._refuse()  # type: ignore[no-any-return]


# A query's progress, written into a group of the broker, so that `tfmq group` shows its lag.
#
# Only shown: the checkpoint decides where a query goes on. So what keeps the progress from being written is said in the
# log, and the query goes on; but a query does not begin with a group whose members read for themselves.

log = logging.getLogger("tfmq.spark")

AGAIN_SECONDS: Final = 5.0
"""Between attempts after one that failed: an idle query asks for a save 100 times a second."""


class GroupProgress:
    """Of one group, over a connection of its own; the broker was there before."""

    def __init__(self, address: Address, group: str) -> None:
        self._group, self._timeout = group, address.timeout
        self._link, self._driver, _ = reach(address.servers, BlockingDriver)
        self._link.patience_seconds = max(self._link.patience_seconds, address.timeout)
        self._saved: Offsets | None = None
        self._not_before = 0.0

    def save(self, processed: Offsets) -> None:
        """All before these offsets was processed.

        The first time it raises NotAllowed where the group has a live member, and what keeps it from being written.
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
        """Let go of the connection."""
        self._driver.close()

    def _refuse_live(self) -> Operation[None]:
        reply = yield from self._ask(DescribeGroup(self._group))
        members = [each["member"] for each in reply.description.get("members", ()) if each.get("live")]
        if members:
            raise NotAllowed(
                f"groupId: the group {self._group} has a live member, {members[0]}, with progress of its own. Stop its"
                " members, or give the query a group that nobody else uses."
            )

    def _write(self, processed: Mapping[Key, Offset]) -> Operation[None]:
        rows = []
        for (topic, partition), (incarnation, offset, _) in processed.items():
            message = Locate(topic, incarnation, partition, BY_OFFSET, offset)
            try:
                found = yield from self._ask(message)
            except UnknownTopic:  # deleted by now: nobody asks how far it was read
                continue
            rows.append(GroupOffset(topic, incarnation, partition, offset, 0, found.epoch))
        if rows:
            yield from self._ask(ResetGroup(self._group, rows))

    def _ask(self, message: Any) -> Operation[Any]:
        return (yield from ask(self._link, message, self._link.now() + self._timeout))


# How often an idle query asks: Spark asks again 10 ms after an answer that had nothing new.
#
# That is cheap for a few partitions and not for a thousand. So a query that found nothing rests, before it asks again,
# for a multiple of what asking took. It asks after the rest, so what is there is never overlooked.

REST: Final = 3.0
"""Times what asking took: an idle query is at work for a quarter of its time at most."""
REST_SECONDS_MAX: Final = 0.2


class Pace:
    """Of one query; `now` and `sleep` in seconds."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._now, self._sleep = now, sleep
        self._rest = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a question; behind one that was answered `idle` it rests first."""
        if self._rest > 0:
            self._sleep(self._rest)
        begun = self._now()
        yield
        self._rest = min(REST_SECONDS_MAX, REST * (self._now() - begun))

    def busy(self) -> None:
        """The answer had something new: the next question does not wait."""
        self._rest = 0.0
