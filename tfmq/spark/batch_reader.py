"""Reader for `spark.read`: plans a batch once on the driver, and reads ranges in tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from tfmq.arrow.decoder import Decoder
from tfmq.arrow.schema import project
from tfmq.bounded_msgpack import Buffer
from tfmq.errors import BadRequest, Damaged, DecodeFailed, LogTruncated, NotARecord, OffsetOutOfRange, UnknownTopic
from tfmq.spark.errors import hide_traceback
from tfmq.spark.log_reader import LogReader, SourceAddress, open_log_reader
from tfmq.spark.loss_policy import LossPolicy
from tfmq.spark.planner import Planner
from tfmq.spark.ranges import BlockRun, OffsetRange, PartitionLog
from tfmq.spark.schema import check_schema
from tfmq.spark.settings import SourceSettings


def make_range_reader(settings: SourceSettings, schema: StructType) -> RangeReader:
    """Create the range reader of a query. Raises BadRequest for an invalid schema."""
    columns = to_arrow_schema(check_schema(schema), timezone="UTC")
    return RangeReader(settings.address, columns, settings.verify, settings.fail_on_data_loss)


class BatchReader(DataSourceReader):
    """Reader of a batch query: plans on the driver; Spark pickles a copy of it into each task."""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        self._settings = settings
        self._range_reader = make_range_reader(settings, schema)

    @hide_traceback
    def partitions(self) -> Sequence[InputPartition]:
        """Return for each task the ranges that the task reads. If the query cannot begin, a TfmqError says why."""
        with open_log_reader(self._settings.address) as logs:
            # For an empty list Spark would create a partition by itself, which `read` cannot handle.
            return [InputPartition(each) for each in Planner(self._settings, logs).plan_batch() or [()]]

    @hide_traceback
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one task's ranges as Arrow batches. Spark calls this method in the task."""
        yield from self._range_reader.read(partition.value)


class RangeReader(NamedTuple):
    """Reads ranges in a task, and decodes their blocks to columns of `schema`. Can be pickled."""

    address: SourceAddress
    schema: pa.Schema
    verify: str
    fail_on_data_loss: bool

    def read(self, ranges: tuple[OffsetRange, ...]) -> Iterator[pa.RecordBatch]:
        """Yield the messages of `ranges` in order. If `fail_on_data_loss` is true, lost messages raise a TfmqError."""
        losses = LossPolicy(self.fail_on_data_loss)
        with open_log_reader(self.address) as logs:
            for each in ranges:
                yield from self._read_range(logs, each, losses)

    def _read_range(self, logs: LogReader, wanted: OffsetRange, losses: LossPolicy) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one range. After lost messages, raise an error or continue, as `losses` decides."""
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
                losses.handle_loss(error)
                begin = resume_at if begin < resume_at else end
            except NotARecord as error:
                error.sentence += (
                    " The log is not the one that this query read: perhaps its broker was restored from a backup, and"
                    " the messages between are lost."
                )
                losses.handle_loss(error)
                begin = max(logs.next_message_offset(log, begin), begin + 1)
            except (UnknownTopic, LogTruncated) as error:
                losses.handle_loss(error)
                return

    def _check_not_null(self, log: PartitionLog, batch: pa.RecordBatch) -> None:
        """Raise BadRequest for a null in a NOT NULL column, because Spark would accept it and return a wrong result."""
        for field, column in zip(self.schema, batch.columns, strict=True):
            if column.null_count and not field.nullable:
                raise BadRequest(
                    f"The schema says that the column {field.name} is never null, and in {log.name} it is: leave out"
                    " NOT NULL."
                )


def _decode_until_damage(
    decode: Callable[[Buffer, int, int, int], pa.RecordBatch], chunk: BlockRun, begin: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `chunk` with offsets in [begin, end). At damage, yield the rows before it, then raise."""
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
    """Return the rows with offsets in [begin, end), also rows whose attribute (metadata) cannot be decoded.

    Any producer can send an invalid attribute. A row with an invalid attribute has neither key nor tag, and `losses`
    decides whether the query stops or continues with such rows.
    """
    strict, lenient = decoders
    try:
        return strict.decode(data, offset, begin, end)
    except DecodeFailed as error:
        rows = lenient.decode(data, offset, begin, end)  # raises for any fault except invalid attributes
        losses.handle_loss(error, "with neither key nor tag")
        return rows
