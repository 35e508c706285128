"""The Spark data source "tfmq": reads and writes topics, in batch and streaming queries.

    spark.read.format("tfmq").option("servers", "127.0.0.1:8367").option("subscribe", "orders").load()

Spark finds the data source through the module `pyspark_tfmq`; where it does not, call `tfmq.spark.register(spark)`.
The reference is docs/spark.md. Importing this package does not import PySpark.
"""

import sys
from typing import TYPE_CHECKING

from tfmq.spark.requirements import missing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if _sentence := missing():
    if sys.argv[:1] == ["-m"]:  # `python -m` imports this package first: no caller can catch an exception
        sys.exit(f"tfmq: {_sentence}")
    raise ImportError(_sentence)


def register(spark: "SparkSession") -> None:
    """Register the data source "tfmq" with `spark`. Calling it twice is harmless."""
    from tfmq.spark.source import TfmqSource

    spark.dataSource.register(TfmqSource)


__all__ = ["register"]
