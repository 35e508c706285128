"""Sinks that lie, so that one sees that the rig would see it: they lose a row, or write one twice."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tfmq.spark.settings import parse_sink_settings
from tfmq.spark.sinks import StreamSink
from tfmq.spark.source import TfmqSource

BATCH = 1
"""The micro-batch in which they lie, once."""


def is_the_moment(rows: pa.RecordBatch) -> bool:
    """Whether these are rows of that micro-batch's first task."""
    context: Any = TaskContext.get()
    batch = context.getLocalProperty("streaming.sql.batchId")
    return len(rows) > 0 and batch == str(BATCH) and context.partitionId() == 0


class LosingSink(StreamSink):
    """Leaves out the first row of that task's batches."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(rows.slice(1) if is_the_moment(rows) else rows for rows in iterator)


class DoublingSink(StreamSink):
    """Writes that task's batches twice."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(each for rows in iterator for each in ((rows, rows) if is_the_moment(rows) else (rows,)))


class Losing(TfmqSource):
    """The source "losing"."""

    @classmethod
    def name(cls) -> str:
        return "losing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return LosingSink(parse_sink_settings(dict(self.options), streaming=True))


class Doubling(TfmqSource):
    """The source "doubling"."""

    @classmethod
    def name(cls) -> str:
        return "doubling"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return DoublingSink(parse_sink_settings(dict(self.options), streaming=True))


LIARS = {each.name(): each for each in (Losing, Doubling)}
