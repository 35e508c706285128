"""Here Spark finds the data source "tfmq" by itself: it looks into every top-level module named pyspark_..."""

from tfmq.spark.source import TfmqSource as DefaultSource

__all__ = ["DefaultSource"]
