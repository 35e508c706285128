"""Entry point for Spark, which finds data sources in top-level modules named pyspark_*.

Spark imports all such modules. If one of these modules cannot be imported, Spark finds no data source at all. So if a
requirement of tfmq is missing, this module defines a data source that raises the ImportError only when it is used.
"""

from typing import Any

try:
    from pyspark.sql.datasource import DataSource
except ImportError:
    import tfmq.spark  # noqa: F401 - raises an ImportError that says how to install PySpark

    raise

try:
    from tfmq.spark.source import TfmqSource as DefaultSource
except ImportError as error:
    _SENTENCE = str(error)

    class DefaultSource(DataSource):  # type: ignore[no-redef]
        """Data source whose methods raise an ImportError that names the missing requirement."""

        @classmethod
        def name(cls) -> str:
            return "tfmq"

        def schema(self, *arguments: Any, **named: Any) -> Any:
            raise ImportError(_SENTENCE)

        reader = streamReader = writer = streamWriter = schema


__all__ = ["DefaultSource"]
