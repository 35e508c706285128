"""The sink of a streaming query through real Spark: each micro-batch once, whatever is run again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tools.rigs.live_server import LiveServer


class Query:
    """A query from a folder of JSON files to a topic: one file is one micro-batch."""

    def __init__(self, spark: Any, server: LiveServer, folder: Path, topic: str) -> None:
        self.spark, self.server, self.topic = spark, server, topic
        self.input, self.checkpoint = folder / "input", folder / "checkpoint"
        self.input.mkdir()
        self.files = 0
        self.schema = "value string"
        self.options: dict[str, str] = {"topic": topic}

    def put(self, *rows: dict[str, Any] | str) -> None:
        """One more file."""
        written = [json.dumps(row if isinstance(row, dict) else {"value": row}) for row in rows]
        whole = self.input.parent / "whole"
        whole.write_text("\n".join(written))
        os.utime(whole, (1_700_000_000 + self.files,) * 2)  # files are read in the order of their times
        whole.rename(self.input / f"{self.files:05}.json")
        self.files += 1

    def frame(self) -> Any:
        return (
            self.spark.readStream.schema(self.schema)
            .option("maxFilesPerTrigger", 1)
            .option("latestFirst", "false")
            .json(str(self.input))
        )

    def start(self, frame: Any = None, mode: str = "append") -> Any:
        writer = (self.frame() if frame is None else frame).writeStream.format("tfmq").outputMode(mode)
        writer = writer.option("servers", self.server.address).options(**self.options)
        return writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()

    def run(self, frame: Any = None, mode: str = "append") -> Any:
        """To the end of what is there."""
        query = self.start(frame, mode)
        query.awaitTermination()
        return query

    def fails(self, frame: Any = None, mode: str = "append") -> str:
        """What the user reads."""
        from pyspark.errors import PySparkException

        with pytest.raises(PySparkException) as caught:
            self.run(frame, mode)
        return str(caught.value)

    @property
    def group(self) -> str:
        return "spark-stream-" + json.loads((self.checkpoint / "metadata").read_text())["id"]


@pytest.fixture
def query(spark: Any, spark_server: LiveServer, tmp_path: Path, topic: str) -> Query:
    from tfmq.spark import register

    register(spark)
    return Query(spark, spark_server, tmp_path, topic)


@pytest.fixture
def admin(spark_server: LiveServer) -> Iterator[tfmq.Admin]:
    with tfmq.Admin(spark_server.address) as made:
        yield made


def messages(server: LiveServer, topic: str) -> list[Any]:
    """All that is there, a partition after the other."""
    found: list[Any] = []
    with tfmq.Consumer(server.address, topics=topic) as consumer:
        while batch := consumer.poll(0.0 if consumer.lag() == 0 else 60.0, 50_000):
            found += batch
    return sorted(found, key=lambda each: (each.partition, each.offset))


def payloads(server: LiveServer, topic: str) -> list[str]:
    return sorted((each.payload or b"").decode() for each in messages(server, topic))


def test_each_micro_batch_is_in_the_topic_once(query: Query) -> None:
    query.put("a", "b")
    query.put("c")
    query.run()
    query.put("d")
    query.run()
    assert payloads(query.server, query.topic) == ["a", "b", "c", "d"]
