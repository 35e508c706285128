"""How far behind: a number that is the sum of its partitions."""

from typing import Any

import pytest

from tests.client.scripted import Broker, Script
from tfmq.client.consumer.core import Lag
from tfmq.errors import StorageStopped, TfmqError, UnknownTopic
from tfmq.offsets.storage import PartitionName
from tfmq.protocol import commands as wire
from tfmq.testing.broker import SimulatedBroker


def test_a_lag_is_its_total_and_knows_its_parts() -> None:
    lag = Lag({PartitionName("a", 0): 2, PartitionName("a", 1): 3})
    assert lag == 5
    assert lag.partitions[PartitionName("a", 1)] == 3
    assert Lag({}) == 0


def test_partitions_are_measured_from_what_was_handed_out() -> None:
    broker = Broker()
    broker.create("orders", 2)
    for log in broker.topics["orders"][1]:
        for _ in range(3):
            log.append(b"x")
    script = Script(broker)
    first = script.messages(count=3)
    lag = script.run(script.core.lag())
    assert lag == 3
    assert lag.partitions[PartitionName("orders", first[0].partition)] == 0


@pytest.mark.parametrize(
    ("error", "partitions"), [(UnknownTopic(), {}), (StorageStopped("planted"), {0: -1})]
)
def test_what_cannot_be_told_is_no_reason_to_tell_nothing(
    error: TfmqError, partitions: dict[int, int]
) -> None:
    broker = Broker()
    broker.create("orders", 2)
    for log in broker.topics["orders"][1]:
        log.append(b"x")
    script = Script(broker, fetch_bytes=1, prefetch_bytes=1)
    script.run(script.core._wait_for_partitions(script.link.now() + 10))
    ask = broker.on_locate

    def locate(request: wire.Locate) -> Any:
        if request.partition == 0:
            raise error
        return ask(request)

    broker.on_locate = locate  # type: ignore[method-assign]
    lag = script.run(script.core.lag())
    assert lag == 1
    assert {name.partition: each for name, each in lag.partitions.items()} == {**partitions, 1: 1}


def test_a_place_in_a_damaged_range_has_no_lag_that_could_be_told() -> None:
    broker = Broker()
    broker.create("orders").append(b"x")
    script = Script(broker, start=0)
    script.run(script.core._wait_for_partitions(script.link.now() + 10))
    ask = broker.on_locate
    broker.on_locate = lambda request: (  # type: ignore[method-assign]
        ask(request)._replace(ordinal=-1) if request.by == wire.BY_OFFSET else ask(request)
    )
    lag = script.run(script.core.lag())
    assert (lag, lag.partitions) == (0, {PartitionName("orders", 0): -1})


def shown(broker: SimulatedBroker) -> list[tuple[int, int, int]]:
    """What `tfmq group show` says: partition, offset, lag; and the total is their sum."""
    found = broker.admin().group("billing")
    rows = [(each["partition"], each["offset"], each["lag"]) for each in found.offsets]
    assert found.lag == sum(max(0, lag) for _, _, lag in rows)
    return rows


def filled(broker: SimulatedBroker, count: int = 4) -> None:
    producer = broker.producer()
    for number in range(count):
        producer.send("orders", str(number), tag="red" if number % 2 else "blue", partition=0).result()


@pytest.mark.parametrize(
    "filters",
    [{"tags": "green"}, {"where": lambda message: False}, {"tags": "red", "where": lambda _: False}],
)
def test_who_filters_everything_out_is_behind_by_nothing(filters: dict[str, Any]) -> None:
    with SimulatedBroker() as broker:
        filled(broker)
        consumer = broker.consumer("orders", group="billing", save_every=1, **filters)
        assert consumer.poll(timeout=2) == []
        consumer.poll(timeout=2)
        assert consumer.lag() == 0
        ((_, offset, lag),) = shown(broker)
        assert (offset > 0, lag) == (True, 0)
        filled(broker, 2)
        assert shown(broker)[0][2] == 2 == broker.admin().group("billing").lag


def test_a_fresh_partition_that_somebody_has_is_behind_by_all_of_it() -> None:
    """It is shown from the moment in which it has an owner: a handler may take long for its first message."""
    with SimulatedBroker() as broker:
        broker.admin().create_topic("orders", partitions=2)
        filled(broker)
        consumer = broker.consumer("orders", group="billing", commits="manual")
        assert len(consumer.poll(timeout=1)) == 4
        assert shown(broker) == [(0, -1, 4), (1, -1, 0)]
        consumer.commit()
        assert [row[::2] for row in shown(broker)] == [(0, 0), (1, 0)]
        assert shown(broker)[0][1] > 0


def test_what_retention_took_away_is_nothing_to_be_behind_of() -> None:
    with SimulatedBroker({"log.segment_bytes": 65536, "retention.bytes": 65536}) as broker:
        consumer = broker.consumer("orders", group="billing", commits="manual", on_out_of_range="earliest")
        producer = broker.producer()
        producer.send("orders", "0").result()
        assert [message.text for message in broker.drain(consumer)] == ["0"]
        consumer.commit()
        for _ in range(40):
            producer.send("orders", b"x" * 10_000).result()
        broker.clock.advance(hours=1)
        there = broker.admin().topic("orders").partitions[0]
        left = there.end_ordinal - there.first_ordinal
        assert 0 < left < 40, "some are gone"
        assert [row[2] for row in shown(broker)] == [left]
