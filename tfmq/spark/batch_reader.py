"""`spark.read`: all that lies between two places, planned once, read by tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tfmq.arrow.decoder import Decoder
from tfmq.arrow.schema import project
from tfmq.bounded_msgpack import Buffer
from tfmq.errors import (
    BadRequest,
    Damaged,
    DecodeFailed,
    LogTruncated,
    NotARecord,
    OffsetOutOfRange,
    UnknownTopic,
)
from tfmq.spark.errors import Losses, shown_by_spark
from tfmq.spark.log_reader import Address, Logs, open_logs
from tfmq.spark.planner import Planner
from tfmq.spark.ranges import Chunk, PartitionLog, Range
from tfmq.spark.schema import arrow_schema, checked
from tfmq.spark.settings import SourceSettings


class TaskRanges(InputPartition):
    """What one task reads."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        super().__init__(ranges)


def reading(settings: SourceSettings, schema: StructType) -> Reading:
    """Raises BadRequest for a schema that is none of a topic."""
    return Reading(
        settings.address, arrow_schema(checked(schema)), settings.verify, settings.fail_on_data_loss
    )


class BatchReader(DataSourceReader):
    """Planned on the driver; a copy of it reads in each task."""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        self._settings = settings
        self._reading = reading(settings, schema)

    @shown_by_spark
    def partitions(self) -> Sequence[InputPartition]:
        """What each task reads. Raises BadRequest, UnknownTopic, ConnectionFailed, and losses."""
        with open_logs(self._settings.address) as logs:
            # Without any, Spark would make one that holds nothing it could read.
            return [TaskRanges(each) for each in Planner(self._settings, logs).batch()] or [TaskRanges(())]

    @shown_by_spark
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one task's ranges, as Arrow."""
        yield from self._reading.rows(partition.value)


# What one task reads: ranges of partitions, fetched from where they lie, decoded to columns. Runs in executors.


class Reading(NamedTuple):
    """How tasks read: it travels to them. `schema`: the Arrow schema that Spark demands, its names columns of a
    topic."""

    address: Address
    schema: pa.Schema
    verify: str
    fail_on_data_loss: bool

    def rows(self, ranges: tuple[Range, ...]) -> Iterator[pa.RecordBatch]:
        """The messages of `ranges`, one range behind the other. Raises what `Losses` and the logs do."""
        losses = Losses(self.fail_on_data_loss)
        with open_logs(self.address) as logs:
            for each in ranges:
                yield from self._range(logs, each, losses)

    def _range(self, logs: Logs, wanted: Range, losses: Losses) -> Iterator[pa.RecordBatch]:
        log, begin, end = wanted
        decoders = [
            Decoder(
                log.topic, log.partition, log.log_id, project(self.schema.names), self.verify, lenient=lenient
            )
            for lenient in (False, True)
        ]
        while begin < end:
            try:
                for chunk in logs.chunks(Range(log, begin, end)):
                    for batch in _sound(partial(_decoded, decoders, losses), chunk, begin, end):
                        if batch.num_rows:
                            self._require_what_is_never_null(log, batch)
                            yield pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)
                    begin = max(begin, _next(chunk))
                return
            except (OffsetOutOfRange, Damaged) as error:
                behind = error.first if isinstance(error, OffsetOutOfRange) else error.next
                losses.lost(type(error)(str(error), **error.details))
                begin = behind if begin < behind else end
            except NotARecord as error:
                losses.lost(
                    NotARecord(
                        f"{error} The log is not the one that this query read: its broker was restored from a backup,"
                        " perhaps, and what was between is gone.",
                        **error.details,
                    )
                )
                begin = max(logs.at_or_after(log, begin), begin + 1)
            except (UnknownTopic, LogTruncated) as error:
                losses.lost(type(error)(str(error), **error.details))
                return

    def _require_what_is_never_null(self, log: PartitionLog, batch: pa.RecordBatch) -> None:
        """Spark ends in an error of its own, or in a wrong result, where a column has what its schema rules out."""
        for field, column in zip(self.schema, batch.columns, strict=True):
            if column.null_count and not field.nullable:
                raise BadRequest(
                    f"The schema says that the column {field.name} is never null, and in {log.name} it is: leave out"
                    " NOT NULL."
                )


Decode = Callable[[Buffer, int, int, int], pa.RecordBatch]
"""(whole control blocks, the offset of the first one, where rows begin, and end)."""


def _sound(decode: Decode, chunk: Chunk, begin: int, end: int) -> Iterator[pa.RecordBatch]:
    """The rows of a chunk; of one that is damaged those before the damage, and then the error."""
    try:
        yield decode(chunk.data, chunk.offset, begin, end)
    except Damaged as error:
        size = error.first - chunk.offset
        if size > 0 and error.first > begin:
            yield decode(memoryview(chunk.data)[:size], chunk.offset, begin, end)
        raise


def _decoded(
    decoders: Sequence[Decoder], losses: Losses, data: Buffer, offset: int, begin: int, end: int
) -> pa.RecordBatch:
    """The rows. A message whose attribute nobody can read (any producer can send one) is a loss of its key and tag."""
    strict, lenient = decoders
    try:
        return strict.decode(data, offset, begin, end)
    except DecodeFailed as error:
        rows = lenient.decode(data, offset, begin, end)  # raises where the rest cannot be read either
        losses.lost(DecodeFailed(str(error), **error.details), "with neither key nor tag")
        return rows


def _next(chunk: Chunk) -> int:
    """The offset behind the chunk."""
    return chunk.offset + memoryview(chunk.data).nbytes
