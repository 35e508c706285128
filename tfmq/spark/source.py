"""The data source "tfmq", which Spark creates for `format("tfmq")`; and its requirements."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

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
from tfmq.spark.errors import shown_by_spark
from tfmq.spark.options import chosen
from tfmq.spark.schema import spark_schema
from tfmq.spark.settings import source_settings
from tfmq.spark.stream_reader import RefusedReader, StreamReader


class TfmqSource(DataSource):
    """Spark data source. Each method raises BadRequest for invalid options."""

    @classmethod
    def name(cls) -> str:
        return "tfmq"

    @shown_by_spark
    def schema(self) -> StructType:
        """Return all columns of a topic. A schema from the user is a projection of it.

        Spark calls this when a frame is created, so invalid options are reported then.
        """
        chosen(dict(self.options), "source", "both")
        return spark_schema()

    @shown_by_spark
    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(source_settings(dict(self.options), streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a reader. Never raises: for invalid options, the reader raises the error itself."""
        try:
            return StreamReader(source_settings(dict(self.options), streaming=True), schema)
        except TfmqError as error:
            return RefusedReader(error)

    @shown_by_spark
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tfmq.spark.sinks import batch_writer

        return batch_writer(dict(self.options), schema, overwrite)

    @shown_by_spark
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tfmq.spark.sinks import stream_writer

        return stream_writer(dict(self.options), schema, overwrite)


PYSPARK_MIN = (4, 2)
"""The first version that passes a source the limits of a micro-batch and the end of a query."""
VERSION = re.compile(r"__version__[^\n=]*=\s*[\"'](\d+)\.(\d+)[^\"']*")
INSTALL = "pip install 'pyspark>=4.2' pyarrow numpy matplotlib"
UPGRADE = "pip install -U 'pyspark>=4.2'"


def missing(find: Callable[[str], ModuleSpec | None] = find_spec) -> str | None:
    """Return a sentence that names the missing requirement; None if all are installed.

    Does not import any of the packages.
    """
    for name in ("pyspark", "pyarrow"):
        if find(name) is None:
            return f"tfmq.spark needs {name}, which is not installed: {INSTALL}"
    spec = find("pyspark")
    assert spec is not None
    found = version(Path(spec.origin or "").parent)
    if found is not None and found < PYSPARK_MIN:
        is_there = ".".join(map(str, found))
        return f"tfmq.spark needs pyspark 4.2 or newer, and {is_there} is installed: {UPGRADE}"
    return None


def version(folder: Path) -> tuple[int, int] | None:
    """Return the version of the pyspark in `folder`, like (4, 2); None if it cannot be read."""
    try:
        found = VERSION.search((folder / "version.py").read_text())
    except OSError:
        return None
    return (int(found[1]), int(found[2])) if found else None
