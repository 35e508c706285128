"""What Spark asks a stream's reader, in the order in which it asks, against a broker in this process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from tests.spark.reading import rows, values
from tfmq.errors import BadRequest, NotAllowed, OffsetOutOfRange, UnknownTopic
from tfmq.spark.settings import parse_source_settings
from tfmq.spark.stream_reader import IDLE_FACTOR, IDLE_SECONDS_MAX, IdleBackoff
from tfmq.testing.broker import SimulatedBroker

datasource = pytest.importorskip("pyspark.sql.streaming.datasource", reason="pyspark is not installed (make setup)")


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        made.admin().create_topic("orders", 1)
        send(made, 0, 50)
        yield made


def send(broker: SimulatedBroker, first: int, end: int) -> None:
    with broker.producer() as producer:
        for number in range(first, end):
            producer.send("orders", f"v{number}", partition=0)


def reader(broker: SimulatedBroker, **options: str) -> Any:
    from tfmq.spark.schema import spark_schema
    from tfmq.spark.stream_reader import StreamReader

    given = {"servers": broker.servers, "subscribe": "orders", "startingOffsets": "earliest", **options}
    return StreamReader(parse_source_settings(given, streaming=True), spark_schema())


def latest(made: Any, start: dict[str, Any]) -> dict[str, Any]:
    """As it is in a checkpoint."""
    found = made.latestOffset(start, made.getDefaultReadLimit())
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_micro_batches_follow_each_other_without_gap_or_overlap(broker: SimulatedBroker) -> None:
    made = reader(broker, maxOffsetsPerTrigger="20")
    start, read = made.initialOffset(), []
    while (end := latest(made, start)) != start:
        batch = rows(made, made.partitions(start, end))
        assert len(batch) <= 20
        read += batch
        start = end
    assert values(read) == sorted(f"v{number}" for number in range(50))
    made.stop()


def test_limits_are_reported_as_spark_has_them(broker: SimulatedBroker) -> None:
    assert reader(broker).getDefaultReadLimit() == datasource.ReadAllAvailable()
    assert reader(broker, maxOffsetsPerTrigger="7").getDefaultReadLimit() == datasource.ReadMaxRows(7)
    assert reader(broker, maxBytesPerTrigger="1k").getDefaultReadLimit() == datasource.ReadMaxBytes(1024)


def test_spark_may_ask_for_all_in_spite_of_a_limit(broker: SimulatedBroker) -> None:
    made = reader(broker, maxOffsetsPerTrigger="7")
    start = made.initialOffset()
    end = made.latestOffset(start, datasource.ReadAllAvailable())
    assert len(rows(made, made.partitions(start, end))) == 50


def test_a_limit_of_bytes(broker: SimulatedBroker) -> None:
    made = reader(broker, maxBytesPerTrigger="1")
    start = made.initialOffset()
    assert len(rows(made, made.partitions(start, latest(made, start)))) == 1


def test_a_reader_that_is_asked_travels_without_its_connection(broker: SimulatedBroker) -> None:
    made = reader(broker)
    start = made.initialOffset()
    copy = pickle.loads(pickle.dumps(made))
    assert latest(copy, start) == latest(made, start)
    copy.stop()
    made.stop()
    made.stop()


def test_available_now_ends(broker: SimulatedBroker) -> None:
    made = reader(broker)
    made.prepareForTriggerAvailableNow()
    start = made.initialOffset()
    send(broker, 50, 60)
    end = latest(made, start)
    assert len(rows(made, made.partitions(start, end))) == 50
    assert latest(made, end) == end


def test_what_the_topics_have_is_reported(broker: SimulatedBroker) -> None:
    made = reader(broker, maxOffsetsPerTrigger="7")
    assert made.reportLatestOffset() is None
    start = made.initialOffset()
    end = latest(made, start)
    assert made.reportLatestOffset()["orders"]["0"] > end["orders"]["0"]


def test_the_group_has_the_progress_as_soon_as_a_batch_is_done(broker: SimulatedBroker) -> None:
    made = reader(broker, maxOffsetsPerTrigger="20", groupId="spark")
    admin = broker.admin()
    start = made.initialOffset()
    first = latest(made, start)
    assert admin.group("spark").lag == 50
    second = latest(made, first)
    assert admin.group("spark").lag == 30
    made.commit(second)
    assert admin.group("spark").lag == 10


def test_a_group_with_a_live_member_is_refused(broker: SimulatedBroker) -> None:
    made = reader(broker, groupId="spark")
    with broker.consumer("orders", group="spark") as consumer:
        assert consumer.poll(5.0)
        with pytest.raises(NotAllowed):
            latest(made, made.initialOffset())


def test_a_checkpoint_of_something_else_is_refused(broker: SimulatedBroker) -> None:
    with pytest.raises(BadRequest, match="The checkpoint: 'orders' must have an object"):
        latest(reader(broker), {"orders": 5})


def test_what_is_gone_stops_the_query_or_not() -> None:
    with SimulatedBroker({"log.segment_bytes": 1 << 16}) as broker:
        broker.admin().create_topic("orders", 1)
        with broker.producer(linger_ms=0) as producer:
            for number in range(300):
                producer.send("orders", bytes([number % 256]) * 1000, partition=0)
                if number % 10 == 0:
                    producer.flush()
        made = reader(broker)
        start = made.initialOffset()
        end = broker.admin().topic("orders").partitions[0].end_offset
        first = broker.admin().truncate_before("orders", 0, end // 2)
        assert first > 0
        with pytest.raises(OffsetOutOfRange, match=f"from offset 0 to {first} are gone.*failOnDataLoss is true"):
            latest(made, start)
        lenient = reader(broker, failOnDataLoss="false")
        found = rows(lenient, lenient.partitions(start, latest(lenient, start)))
        assert min(row["offset"] for row in found) == first
        assert 0 < len(found) < 300


def test_a_reader_that_could_not_be_made_says_why_whatever_it_is_asked() -> None:
    from tfmq.spark.stream_reader import FailedReader as RefusedReader

    made = pickle.loads(pickle.dumps(RefusedReader(BadRequest("No such option."))))
    asked = (
        made.initialOffset, made.getDefaultReadLimit, made.reportLatestOffset, made.prepareForTriggerAvailableNow,
        lambda: made.latestOffset({}, datasource.ReadAllAvailable()), lambda: made.partitions({}, {}),
        lambda: made.read(None),
    )  # fmt: skip
    for ask in asked:
        with pytest.raises(BadRequest, match=r"^No such option\.$"):
            ask()


def test_a_source_with_wrong_options_gives_a_reader_that_says_so() -> None:
    from tfmq.spark.schema import spark_schema
    from tfmq.spark.source import TfmqSource

    made = TfmqSource({"servers": "127.0.0.1:1", "subscribe": "orders", "endingoffsets": "latest"})
    reader = made.streamReader(spark_schema())
    with pytest.raises(BadRequest, match=r"endingOffsets is an option of spark\.read only"):
        reader.getDefaultReadLimit()


def test_a_checkpoint_of_another_broker_takes_no_groups_offsets_away(broker: SimulatedBroker) -> None:
    made = reader(broker, groupId="billing")
    start = made.initialOffset()
    made.stop()
    strange = {"orders": {**start["orders"], "broker": "elsewhere"}}
    made = reader(broker, groupId="billing")
    with pytest.raises(UnknownTopic, match="of another broker"):
        latest(made, strange)
    made.stop()
    with broker.admin() as admin:
        assert admin.groups() == []


# When an idle query asks again.


class Time:
    """A clock that sleeping and asking move."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0.0

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds


def test_an_idle_query_rests_for_longer_than_it_asks() -> None:
    time = Time()
    pace = IdleBackoff(lambda: time.now, time.sleep)
    for _ in range(100):
        with pace.measured_request():
            time.now += 0.01
    assert time.slept / time.now > 0.7
    assert time.slept < 100 * 0.01 * IDLE_FACTOR


def test_a_busy_query_never_rests() -> None:
    time = Time()
    pace = IdleBackoff(lambda: time.now, time.sleep)
    for _ in range(10):
        with pace.measured_request():
            time.now += 0.01
        pace.reset()
    assert time.slept == 0.0


def test_no_connection_waits_for_long() -> None:
    time = Time()
    pace = IdleBackoff(lambda: time.now, time.sleep)
    for _ in range(2):
        with pace.measured_request():
            time.now += 60.0
    assert time.slept == IDLE_SECONDS_MAX
