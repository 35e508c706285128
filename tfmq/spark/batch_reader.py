"""Reader for `spark.read`: plans a batch once on the driver, and reads ranges in tasks."""

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
from tfmq.errors import BadRequest, Damaged, DecodeFailed, LogTruncated, NotARecord, OffsetOutOfRange, UnknownTopic
from tfmq.spark.errors import LossPolicy, hide_traceback
from tfmq.spark.log_reader import LogReader, SourceAddress, open_log_reader
from tfmq.spark.planner import Planner
from tfmq.spark.ranges import BlockRun, OffsetRange, PartitionLog
from tfmq.spark.schema import arrow_schema, check_schema
from tfmq.spark.settings import SourceSettings


class TaskRanges(InputPartition):
    """The ranges that one task reads; Spark pickles it and passes it to `read` in the task."""

    def __init__(self, ranges: tuple[OffsetRange, ...]) -> None:
        super().__init__(ranges)


def make_range_reader(settings: SourceSettings, schema: StructType) -> RangeReader:
    """Create the range reader of a query. Raises BadRequest for an invalid schema."""
    return RangeReader(
        settings.address, arrow_schema(check_schema(schema)), settings.verify, settings.fail_on_data_loss
    )


class BatchReader(DataSourceReader):
    """Reader of a batch query: plans on the driver; Spark pickles a copy of it into each task."""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        self._settings = settings
        self._range_reader = make_range_reader(settings, schema)

    @hide_traceback
    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges of each task.

        Raises BadRequest, UnknownTopic, ConnectionFailed, and what `LossPolicy` raises.
        """
        with open_log_reader(self._settings.address) as logs:
            # For an empty list Spark would create a partition by itself, which `read` cannot handle.
            return [TaskRanges(each) for each in Planner(self._settings, logs).plan_batch()] or [TaskRanges(())]

    @hide_traceback
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one task's ranges as Arrow."""
        yield from self._range_reader.read(partition.value)


class RangeReader(NamedTuple):
    """Reads ranges in a task: fetches their blocks and decodes these to columns. Can be pickled.

    `schema` is the Arrow schema that Spark requires; its names are columns of a topic.
    """

    address: SourceAddress
    schema: pa.Schema
    verify: str
    fail_on_data_loss: bool

    def read(self, ranges: tuple[OffsetRange, ...]) -> Iterator[pa.RecordBatch]:
        """Yield the messages of `ranges`, one range after the other.

        Raises what `LossPolicy` and the log reader raise.
        """
        losses = LossPolicy(self.fail_on_data_loss)
        with open_log_reader(self.address) as logs:
            for each in ranges:
                yield from self._read_range(logs, each, losses)

    def _read_range(self, logs: LogReader, wanted: OffsetRange, losses: LossPolicy) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one range, continuing after losses where the policy permits it."""
        log, begin, end = wanted
        schema = project(self.schema.names)
        decoders = [
            Decoder(log.topic, log.partition, log.log_id, schema, self.verify, lenient=lenient)
            for lenient in (False, True)
        ]
        decode = partial(_decode_leniently, decoders, losses)
        while begin < end:
            try:
                for chunk in logs.read_blocks(OffsetRange(log, begin, end)):
                    for batch in _decode_until_damage(decode, chunk, begin, end):
                        if batch.num_rows:
                            self._check_not_null(log, batch)
                            yield pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)
                    begin = max(begin, chunk.offset + memoryview(chunk.data).nbytes)
                return
            except (OffsetOutOfRange, Damaged) as error:
                resume_at = error.first if isinstance(error, OffsetOutOfRange) else error.next
                losses.handle_loss(type(error)(str(error), **error.details))
                begin = resume_at if begin < resume_at else end
            except NotARecord as error:
                losses.handle_loss(
                    NotARecord(
                        f"{error} The log is not the one that this query read: perhaps its broker was restored from a"
                        " backup, and the messages between are lost.",
                        **error.details,
                    )
                )
                begin = max(logs.next_message_offset(log, begin), begin + 1)
            except (UnknownTopic, LogTruncated) as error:
                losses.handle_loss(type(error)(str(error), **error.details))
                return

    def _check_not_null(self, log: PartitionLog, batch: pa.RecordBatch) -> None:
        """Check that no column that the schema declares NOT NULL has a null. Raises BadRequest.

        Spark itself would raise an internal error or return a wrong result.
        """
        for field, column in zip(self.schema, batch.columns, strict=True):
            if column.null_count and not field.nullable:
                raise BadRequest(
                    f"The schema says that the column {field.name} is never null, and in {log.name} it is: leave out"
                    " NOT NULL."
                )


def _decode_until_damage(
    decode: Callable[[Buffer, int, int, int], pa.RecordBatch], chunk: BlockRun, begin: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `chunk` in [begin, end).

    If it is damaged: the rows before the damage, then raise Damaged.
    """
    try:
        yield decode(chunk.data, chunk.offset, begin, end)
    except Damaged as error:
        size = error.first - chunk.offset
        if size > 0 and error.first > begin:
            yield decode(memoryview(chunk.data)[:size], chunk.offset, begin, end)
        raise


def _decode_leniently(
    decoders: Sequence[Decoder], losses: LossPolicy, data: Buffer, offset: int, begin: int, end: int
) -> pa.RecordBatch:
    """Return the rows in [begin, end), also those with an attribute that cannot be decoded.

    Any producer can send such an attribute. Its message has neither key nor tag then, which `losses` treats
    as a loss.
    """
    strict, lenient = decoders
    try:
        return strict.decode(data, offset, begin, end)
    except DecodeFailed as error:
        rows = lenient.decode(data, offset, begin, end)  # raises where the rest cannot be read either
        losses.handle_loss(DecodeFailed(str(error), **error.details), "with neither key nor tag")
        return rows
