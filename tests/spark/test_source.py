"""The source through a real Spark from a real broker: what is read, how queries end, what users read when wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.scale import scaled
from tools.rigs.live_server import LiveServer

COLUMNS = ["key", "value", "topic", "partition", "offset", "timestamp", "tag", "attributes", "id"]


@pytest.fixture
def read(spark: Any, spark_server: LiveServer) -> Callable[..., Any]:
    """`read(topic, option=...)`: a batch."""

    def read(topic: str, **options: str) -> Any:
        return (
            spark.read.format("tfmq").options(servers=spark_server.address, subscribe=topic, **options).load()
        )

    return read


@pytest.fixture
def send(spark_server: LiveServer) -> Iterator[Callable[..., None]]:
    """`send(topic, *values, partition=...)`: durable when it returns."""
    with tfmq.Producer(spark_server.address) as producer:

        def send(topic: str, *values: str, partition: int | None = None) -> None:
            sent = [producer.send(topic, each, key=f"key of {each}", partition=partition) for each in values]
            for each in sent:
                each.result(60)

        yield send


def values(frame: Any) -> list[str]:
    return sorted(row.value.decode() for row in frame.select("value").collect())


def words(count: int, first: int = 0) -> list[str]:
    return sorted(f"v{number}" for number in range(first, first + count))


def test_a_batch_has_every_message_with_all_its_columns(
    read: Callable[..., Any], send: Callable[..., None], topic: str
) -> None:
    expected = words(scaled(10_000))
    send(topic, *expected)
    frame = read(topic)
    assert frame.columns == COLUMNS
    rows = frame.collect()
    assert sorted(row.value.decode() for row in rows) == expected
    assert all(row.key.decode() == f"key of {row.value.decode()}" for row in rows)
    assert {row.topic for row in rows} == {topic}
    assert {row.partition for row in rows} == {0, 1}
    assert len({(row.partition, row.offset) for row in rows}) == len({row.id for row in rows}) == len(rows)


def test_a_stream_has_every_message_once_over_restarts(
    spark: Any, spark_server: LiveServer, send: Callable[..., None], topic: str, tmp_path: Path
) -> None:
    send(topic, *words(50))

    def run() -> None:
        frame = spark.readStream.format("tfmq").options(servers=spark_server.address, subscribe=topic)
        query = (
            frame.option("startingOffsets", "earliest")
            .load()
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(100)

    run()
    send(topic, *words(50, 50))
    run()
    run()
    assert values(spark.read.parquet(str(tmp_path / "out"))) == words(100)


def test_segment_files_are_read_as_the_broker_sends_them(
    spark: Any, spark_server: LiveServer, read: Callable[..., Any], send: Callable[..., None], topic: str
) -> None:
    send(topic, *words(200))
    wire = sorted(map(tuple, read(topic).collect()))
    straight = spark.read.format("tfmq").options(path=str(spark_server.data), subscribe=topic)
    assert len(wire) == 200
    assert sorted(map(tuple, straight.load().collect())) == wire
