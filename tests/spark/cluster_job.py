"""A program for spark-submit: topic -> topic, batch and streaming, and where it ran. One line of JSON at the end.

It knows nothing of the checkout: of tfmq it has what it was submitted with. SERVERS SOURCE TARGET CHECKPOINT
"""

import json
import os
import sys
from typing import Any

from pyspark.sql import SparkSession

import tfmq.spark


def where(_: Any) -> Any:
    """Of which process a task was, and which tfmq, Python and folder it had."""
    import pyarrow

    import tfmq

    yield os.getpid(), tfmq.__file__, sys.executable, os.getcwd(), pyarrow.__file__, os.getppid()


def main(servers: str, source: str, target: str, checkpoint: str) -> None:
    """Copy all of `source` to `target` once, and count it."""
    spark = SparkSession.builder.getOrCreate()
    tfmq.spark.register(spark)  # what comes with the job is not found by itself
    reader = spark.readStream.format("tfmq").option("servers", servers)
    rows = reader.option("subscribe", source).option("startingOffsets", "earliest").load()
    rows = rows.select("key", "value").repartition(4)
    writer = rows.writeStream.format("tfmq").option("servers", servers).option("topic", target)
    for _ in range(2):
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
    batch = spark.read.format("tfmq").option("servers", servers).option("subscribe", target).load()
    count = batch.groupBy("partition").count().collect()
    places = spark.sparkContext.parallelize(range(16), 16).mapPartitions(where).collect()
    print(json.dumps({"rows": sum(each["count"] for each in count), "where": places}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
