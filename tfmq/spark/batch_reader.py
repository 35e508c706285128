"""`spark.read`: all that lies between two places, planned once, read by tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tfmq.spark.logs import Range, open_logs
from tfmq.spark.planning import Planner
from tfmq.spark.schema import arrow_schema, checked
from tfmq.spark.sentences import told
from tfmq.spark.settings import SourceSettings
from tfmq.spark.tasks import Reading

if TYPE_CHECKING:
    import pyarrow as pa


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

    @told
    def partitions(self) -> Sequence[InputPartition]:
        """What each task reads. Raises BadRequest, UnknownTopic, ConnectionFailed, and losses."""
        with open_logs(self._settings.address) as logs:
            # Without any, Spark would make one that holds nothing it could read.
            return [TaskRanges(each) for each in Planner(self._settings, logs).batch()] or [TaskRanges(())]

    @told
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one task's ranges, as Arrow."""
        yield from self._reading.rows(partition.value)
