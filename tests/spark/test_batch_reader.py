"""A batch's tasks and rows, against a broker in this process."""

from collections.abc import Iterator

import pytest

from tests.spark.reading import rows, values
from tfmq.errors import BadRequest, UnknownTopic
from tfmq.spark.settings import parse_source_settings
from tfmq.testing.broker import SimulatedBroker

types = pytest.importorskip("pyspark.sql.types", reason="pyspark is not installed (make setup)")


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        made.admin().create_topic("orders", 2)
        with made.producer() as producer:
            for number in range(100):
                producer.send("orders", f"v{number}", partition=number % 2)
        yield made


def reader(broker: SimulatedBroker, schema: str = "", **options: str):  # type: ignore[no-untyped-def]
    from tfmq.spark.batch_reader import BatchReader
    from tfmq.spark.schema import spark_schema

    found = parse_source_settings({"servers": broker.servers, "subscribe": "orders", **options}, streaming=False)
    wanted = types.StructType()
    for word in schema.split(","):
        if word:
            wanted = wanted.add(*word.split())
    return BatchReader(found, wanted if schema else spark_schema())


def test_all_rows_are_read_once(broker: SimulatedBroker) -> None:
    made = reader(broker, minPartitions="5")
    tasks = made.partitions()
    assert len(tasks) >= 5
    found = rows(made, tasks)
    assert values(found) == sorted(f"v{number}" for number in range(100))
    assert all(int(row["value"][1:]) % 2 == row["partition"] for row in found)


def test_only_the_columns_of_the_schema_are_there_in_its_order(broker: SimulatedBroker) -> None:
    made = reader(broker, "offset long,value binary")
    found = rows(made, made.partitions())
    assert list(found[0]) == ["offset", "value"]
    assert len(found) == 100


def test_a_range_has_no_row_outside_of_it(broker: SimulatedBroker) -> None:
    made = reader(broker)
    every = sorted(row["offset"] for row in rows(made, made.partitions()) if row["partition"] == 0)
    start = f'{{"orders": {{"0": {every[10]}, "1": -2}}}}'
    end = f'{{"orders": {{"0": {every[20]}, "1": 0}}}}'
    part = reader(broker, startingOffsets=start, endingOffsets=end)
    assert sorted(row["offset"] for row in rows(part, part.partitions())) == every[10:20]


def test_a_batch_of_nothing_has_a_task_without_rows(broker: SimulatedBroker) -> None:
    broker.admin().create_topic("empty", 1)
    made = reader(broker, subscribe="empty")
    tasks = made.partitions()
    assert len(tasks) == 1
    assert rows(made, tasks) == []


def test_what_is_wrong_is_reported_before_tasks_run(broker: SimulatedBroker) -> None:
    with pytest.raises(UnknownTopic):
        reader(broker, subscribe="ordes").partitions()
    with pytest.raises(BadRequest, match="no column 'x'"):
        reader(broker, "x binary")
