"""`spark.readStream`: micro-batches from where the checkpoint stands.

Spark keeps one of these in a process of the driver for as long as the query runs, and asks it what comes next; other
instances plan and read in tasks. Offsets are the checkpoint's; see `offsets`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tfmq.errors import TfmqError
from tfmq.spark.batch_reader import TaskRanges, reading
from tfmq.spark.group_progress import GroupProgress
from tfmq.spark.logs import Logs, open_logs
from tfmq.spark.offsets import Offsets, from_json, to_json
from tfmq.spark.pace import Pace
from tfmq.spark.planning import Limit, Planner
from tfmq.spark.sentences import told
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

    @told
    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        return to_json(self._at_desk().planner.initial())

    @told
    def getDefaultReadLimit(self) -> ReadLimit:
        """What the options say of the size of a micro-batch."""
        if self._settings.rows_max is not None:
            return ReadMaxRows(self._settings.rows_max)
        if self._settings.bytes_max is not None:
            return ReadMaxBytes(self._settings.bytes_max)
        return ReadAllAvailable()

    @told
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

    @told
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """How far the topics reached when the last micro-batch was planned."""
        seen = self._at_desk().planner.seen()
        return None if seen is None else to_json(seen)

    @told
    def prepareForTriggerAvailableNow(self) -> None:
        """What is there now is all that this query reads."""
        self._at_desk().planner.freeze()

    @told
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """What each task of a micro-batch reads."""
        found = self._at_desk(begun=True).planner.stream(_offsets(start), _offsets(end))
        return [TaskRanges(each) for each in found]

    @told
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one task's ranges, as Arrow."""
        yield from self._reading.rows(partition.value)

    @told
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

    @told
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
