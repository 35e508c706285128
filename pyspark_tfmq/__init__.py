"""Here Spark finds the data source "tfmq" by itself: it looks into every top-level module named pyspark_...

One that cannot be imported would keep Spark from all others. So where something is missing, what it finds is a source
that says what.
"""

from typing import Any

from pyspark.sql.datasource import DataSource

try:
    from tfmq.spark.source import TfmqSource as DefaultSource
except ImportError as error:
    _SENTENCE = str(error)

    class DefaultSource(DataSource):  # type: ignore[no-redef]
        """Says what is missing, whatever it is asked."""

        @classmethod
        def name(cls) -> str:
            return "tfmq"

        def schema(self, *arguments: Any, **named: Any) -> Any:
            """Raises ImportError."""
            raise ImportError(_SENTENCE)

        reader = streamReader = writer = streamWriter = schema


__all__ = ["DefaultSource"]
