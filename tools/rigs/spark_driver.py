"""The program that `LiveDriver` runs: a SparkSession, and streaming queries topic -> topic as lines of JSON ask for.

    {"do": "start", "query": {...}}   begin a query: {"started": true}
    {"do": "state"}                   whether it goes on: {"active": true}
    {"do": "drain"}                   have it do all that is there, and stop it: {"batch": 2, "batches": 3, "rows": 9}
    {"do": "run", "query": {...}}     one that ends by itself when it has done what was there when it began: likewise
    {"do": "call", "function": "module:name", "arguments": {...}}    what that function of (spark, **arguments) gives

What fails is answered with {"failed": text}; the query is stopped then.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import udf
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import BinaryType

from tfmq.errors import TfmqError
from tools.rigs.spark_liar import LIARS

PATIENCE_SECONDS = 170


def session(settings: Mapping[str, str]) -> SparkSession:
    """The one session of this process."""
    builder: Any = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    found: SparkSession = builder.getOrCreate()
    return found


def failing(folder: str) -> Callable[[bytes], bytes]:
    """A function of values that fails, in the task where it is, once for each file in `folder` named `once-...`,
    which it removes, and for ever while there is one named `always`."""

    def passed(value: bytes) -> bytes:
        for name in os.listdir(folder):
            if name == "always":
                raise RuntimeError("planted: this task fails always")
            try:
                os.remove(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            raise RuntimeError(f"planted: this task fails, {name}")
        return value

    return passed


def rows_of(spark: SparkSession, query: Mapping[str, Any]) -> DataFrame:
    """What the query writes: keys and values as they came, through as many tasks as it says."""
    reader = spark.readStream.format("tfmq").option("servers", query["servers"])
    rows = reader.options(**query.get("source", {})).load()
    rows = rows.select("key", "value")
    if folder := query.get("failing"):
        through = udf(failing(folder), BinaryType(), useArrow=False).asNondeterministic()
        rows = rows.select("key", through("value").alias("value"))
    if tasks := query.get("tasks"):
        rows = rows.repartition(tasks)
    return rows


def started(spark: SparkSession, query: Mapping[str, Any], **trigger: Any) -> StreamingQuery:
    """The query, running."""
    sink = query.get("sink_format", "tfmq")
    if sink in LIARS:
        spark.dataSource.register(LIARS[sink])
    writer = rows_of(spark, query).writeStream.format(sink)
    writer = writer.option("servers", query["servers"]).option("checkpointLocation", query["checkpoint"])
    return writer.options(**query["sink"]).trigger(**trigger).start()


def counted(query: StreamingQuery) -> dict[str, Any]:
    """What an ended query has done. Raises what it failed with."""
    if (failure := query.exception()) is not None:
        raise failure
    progress = query.recentProgress
    return {
        "batch": progress[-1].batchId if progress else -1,
        "batches": len(progress),
        "rows": sum(each.numInputRows for each in progress),
    }


class Work:
    """What the lines ask for, one after the other."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.query: StreamingQuery | None = None

    def start(self, query: Mapping[str, Any]) -> dict[str, Any]:
        trigger = {"processingTime": query.get("every", "0 seconds")}
        self.query = started(self.spark, query, **trigger)
        return {"started": True}

    def state(self) -> dict[str, Any]:
        assert self.query is not None
        return {"active": True} if self.query.isActive else counted(self.query)

    def drain(self) -> dict[str, Any]:
        assert self.query is not None
        self.query.processAllAvailable()
        self.query.stop()
        return counted(self.query)

    def run(self, query: Mapping[str, Any]) -> dict[str, Any]:
        self.query = started(self.spark, query, availableNow=True)
        self.query.awaitTermination(PATIENCE_SECONDS)
        if self.query.isActive:
            self.query.stop()
            raise TimeoutError("the query did not end")
        return counted(self.query)

    def call(self, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        module, _, name = function.partition(":")
        return {"given": getattr(import_module(module), name)(self.spark, **arguments)}


def asked() -> Iterator[dict[str, Any]]:
    """The lines of standard input, until it ends."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Until standard input ends."""
    spark = session(json.loads(sys.argv[1]))
    work = Work(spark)
    say({"ready": spark.version})
    for line in asked():
        begun = time.monotonic()
        try:
            said = getattr(work, line.pop("do"))(**line)
        except (PySparkException, TfmqError, TimeoutError) as error:
            if work.query is not None:
                work.query.stop()
            said = {"failed": f"{type(error).__name__}: {error}"}
        say({**said, "seconds": round(time.monotonic() - begun, 3)})
    spark.stop()


def say(what: Mapping[str, Any]) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
