"""The data source "tfmq", which Spark creates for `format("tfmq")`."""

from __future__ import annotations

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from tfmq.errors import TfmqError
from tfmq.spark.batch_reader import BatchReader
from tfmq.spark.errors import hide_traceback
from tfmq.spark.options import parse_options
from tfmq.spark.schema import spark_schema
from tfmq.spark.settings import parse_source_settings
from tfmq.spark.stream_reader import FailedReader, StreamReader


class TfmqSource(DataSource):
    """Spark data source. Each method except `streamReader` raises BadRequest for invalid options."""

    @classmethod
    def name(cls) -> str:
        return "tfmq"

    @hide_traceback
    def schema(self) -> StructType:
        """Return the schema with all columns of a topic. A user's schema may select some of these columns.

        Spark calls this method when a data frame is created, so invalid options are reported at that time.
        """
        parse_options(dict(self.options), "source", "both")
        return spark_schema()

    @hide_traceback
    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        return BatchReader(parse_source_settings(dict(self.options), streaming=False), schema)

    def streamReader(self, schema: StructType) -> datasource.DataSourceStreamReader:
        """Return a reader. Never raises: if options are invalid, the returned reader raises the error when called."""
        try:
            return StreamReader(parse_source_settings(dict(self.options), streaming=True), schema)
        except TfmqError as error:
            return FailedReader(error)

    @hide_traceback
    def writer(self, schema: StructType, overwrite: bool) -> datasource.DataSourceWriter:
        from tfmq.spark.sinks import batch_writer

        return batch_writer(dict(self.options), schema, overwrite)

    @hide_traceback
    def streamWriter(self, schema: StructType, overwrite: bool) -> datasource.DataSourceStreamWriter:
        from tfmq.spark.sinks import stream_writer

        return stream_writer(dict(self.options), schema, overwrite)
