"""The data source "tfmq": what Spark makes of `format("tfmq")`, for reading and writing, batches and streams."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from tfmq.errors import TfmqError
from tfmq.spark.batch_reader import BatchReader
from tfmq.spark.options import chosen
from tfmq.spark.schema import spark_schema
from tfmq.spark.sentences import told
from tfmq.spark.settings import source_settings
from tfmq.spark.stream_reader import RefusedReader, StreamReader


class TfmqSource(DataSource):
    """Options: tfmq.spark.options. Each method raises BadRequest for options that are wrong."""

    @classmethod
    def name(cls) -> str:
        return "tfmq"

    @told
    def schema(self) -> StructType:
        """All columns of a topic. A schema that a user gives instead is a projection of it.

        Asked when a frame is made, so wrong options are told there, and not only when it is first used.
        """
        chosen(dict(self.options), "source", "both")
        return spark_schema()

    @told
    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(source_settings(dict(self.options), streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Never raises: what is wrong with the options is told by the reader's first answer."""
        try:
            return StreamReader(source_settings(dict(self.options), streaming=True), schema)
        except TfmqError as error:
            return RefusedReader(error)

    @told
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tfmq.spark.batch_sink import batch_writer

        return batch_writer(dict(self.options), schema, overwrite)

    @told
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tfmq.spark.stream_sink import stream_writer

        return stream_writer(dict(self.options), schema, overwrite)
