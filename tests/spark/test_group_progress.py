"""A query's progress in a group of the broker."""

import logging
from collections.abc import Iterator

import pytest

from tfmq.errors import ConnectionFailed, NotAllowed
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.offsets import Offsets, PartitionOffset
from tfmq.spark.stream_reader import RETRY_SECONDS, GroupProgress
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        made.admin().create_topic("orders", 1)
        with made.producer() as producer:
            for _ in range(10):
                producer.send("orders", b"x" * 10, partition=0)
        yield made


@pytest.fixture
def progress(broker: SimulatedBroker) -> Iterator[GroupProgress]:
    made = GroupProgress(SourceAddress(servers=broker.servers), "spark")
    yield made
    made.close()


def at(broker: SimulatedBroker, ordinal: int) -> Offsets:
    import tfmq

    with broker.admin() as admin:
        offset = admin.locate("orders", 0, tfmq.Ordinal(ordinal)).offset
        return {("orders", 0): PartitionOffset(admin.topic("orders").incarnation, offset)}


def lag(broker: SimulatedBroker) -> int:
    with broker.admin() as admin:
        return admin.group("spark").lag


def test_the_lag_is_what_the_query_has_not_processed(broker: SimulatedBroker, progress: GroupProgress) -> None:
    progress.save(at(broker, 0))
    assert lag(broker) == 10
    progress.save(at(broker, 7))
    assert lag(broker) == 3
    with broker.admin() as admin:
        assert [each.group for each in admin.groups()] == ["spark"]


def test_what_is_saved_already_needs_no_request(broker: SimulatedBroker, progress: GroupProgress) -> None:
    place = at(broker, 4)
    progress.save(place)
    with broker.admin() as admin:
        generation = admin.group("spark").generation
        progress.save(dict(place))
        assert admin.group("spark").generation == generation


def test_a_query_does_not_begin_beside_a_live_member(broker: SimulatedBroker, progress: GroupProgress) -> None:
    with broker.consumer("orders", group="spark", start="earliest") as consumer:
        assert consumer.poll(5.0)
        with pytest.raises(NotAllowed, match=r"the group spark has a live member, .* Stop its members"):
            progress.save(at(broker, 0))


def test_a_member_that_joins_later_stops_no_query(
    broker: SimulatedBroker, progress: GroupProgress, caplog: pytest.LogCaptureFixture
) -> None:
    progress.save(at(broker, 0))
    with caplog.at_level(logging.WARNING, "tfmq.spark"), broker.consumer("orders", group="spark") as consumer:
        assert consumer.poll(5.0)
        progress.save(at(broker, 3))
        progress.save(at(broker, 4))
    reported = [each.message for each in caplog.records if each.name == "tfmq.spark"]
    assert len(reported) == 1, "it is not tried again at once"
    assert "has a live member" in reported[0]
    broker.clock.advance(RETRY_SECONDS)
    progress.save(at(broker, 5))
    assert lag(broker) == 5


def test_a_topic_that_is_gone_keeps_no_other_from_being_saved(broker: SimulatedBroker, progress: GroupProgress) -> None:
    progress.save({**at(broker, 6), ("payments", 0): PartitionOffset(99, 0)})
    assert lag(broker) == 4


@pytest.mark.long
def test_without_a_broker_a_query_does_not_begin(broker: SimulatedBroker) -> None:
    place = at(broker, 0)
    progress = GroupProgress(SourceAddress(servers="127.0.0.1:1", timeout=5.0), "spark")
    with pytest.raises(ConnectionFailed):
        progress.save(place)
    progress.close()
