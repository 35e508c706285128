"""Spark reads topics and writes to them: the data source "tfmq", for batches and for streams.

    spark.read.format("tfmq").option("servers", "127.0.0.1:8367").option("subscribe", "orders").load()

Spark finds it by itself, through the module `pyspark_tfmq`; where it does not, `tfmq.spark.register(spark)` tells it.
docs/spark.md is the reference. Nothing of PySpark is imported before it is used.
"""

import sys
from typing import TYPE_CHECKING

from tfmq.spark.source import missing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if _sentence := missing():
    if sys.argv[:1] == [
        "-m"
    ]:  # Python looks for a program in this package: nobody is there who could catch it
        sys.exit(f"tfmq: {_sentence}")
    raise ImportError(_sentence)


def register(spark: "SparkSession") -> None:
    """Tell `spark` of the data source "tfmq". Harmless where it knows it."""
    from tfmq.spark.source import TfmqSource

    spark.dataSource.register(TfmqSource)


__all__ = ["register"]
