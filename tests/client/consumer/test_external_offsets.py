"""Where a consumer stands, for programs that save its offsets in their own transaction."""

from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
from tfmq.client.consumer.external_offsets import external_offsets
from tfmq.errors import BadRequest, Closed
from tfmq.offsets.storage import PartitionName
from tfmq.testing.broker import SimulatedBroker

NAME = PartitionName("orders", 0)


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as broker:
        for number in range(3):
            broker.producer().send("orders", str(number), partition=0).result()
        yield broker


def consumer_of(broker: SimulatedBroker, **options: Any) -> tfmq.Consumer[Any]:
    return broker.consumer("orders", **{"group": "billing", "commits": "manual", **options})


def test_it_is_after_what_was_handed_out_or_after_a_message(broker: SimulatedBroker) -> None:
    with consumer_of(broker) as consumer:
        first, second = consumer.poll(max_messages=2)
        everything, one = external_offsets(consumer, None), external_offsets(consumer, first)
        assert everything.offsets[NAME].offset == second.next_offset
        assert one.offsets[NAME].offset == first.next_offset
        assert (one.group, one.storage) == ("billing", None)
        assert 0 < one.offsets[NAME].generation <= consumer.stats()["generation"]
        assert one.offsets[NAME].incarnation > 0


def test_what_was_saved_is_not_saved_again(broker: SimulatedBroker) -> None:
    with consumer_of(broker) as consumer:
        consumer.poll()
        external_offsets(consumer, None).mark_committed()
        assert external_offsets(consumer, None).offsets == {}
        assert consumer.stats()["partitions"]["orders-0"]["saved_offset"] > 0


def test_a_consumer_that_saves_by_itself_or_is_closed_or_none_is_refused(broker: SimulatedBroker) -> None:
    with consumer_of(broker, commits="auto") as consumer:
        consumer.poll()
        with pytest.raises(BadRequest, match="manual"):
            external_offsets(consumer, None)
    with pytest.raises(Closed):
        external_offsets(consumer, None)
    with pytest.raises(TypeError, match="not str"):
        external_offsets("consumer", None)
