"""Looking topics up: each way to be wrong has its own error, and descriptions show what is there."""

import pytest

from tests.broker.helpers import Broker
from tfmq.errors import UnknownPartition, UnknownTopic
from tfmq.protocol.commands import DescribeTopic


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create(partitions=2)
    return made


def test_a_partition_is_found_by_topic_incarnation_and_number(broker: Broker) -> None:
    topics = broker.engine.broker.topics
    incarnation = broker.incarnation()
    assert topics.partition("orders", incarnation, 1).number == 1
    assert topics.find_partition(incarnation, 1) is topics.partition("orders", incarnation, 1)
    assert topics.find_partition(incarnation, 2) is None
    assert topics.find_partition(incarnation + 1, 0) is None
    for name, which in (("missing", incarnation), ("orders", incarnation + 1), ("orders", 0)):
        with pytest.raises(UnknownTopic):
            topics.partition(name, which, 0)
    with pytest.raises(UnknownPartition, match="2 partitions"):
        topics.partition("orders", incarnation, 2)


def test_a_description_reports_offsets_sizes_and_times(broker: Broker) -> None:
    broker.produce(broker.lease(), 0, [b"a", b"b"])
    described = broker.ask(DescribeTopic("orders")).description
    assert described["name"] == "orders" and described["incarnation"] == broker.incarnation()
    first, second = described["partitions"]
    assert (first["first_offset"], first["end_offset"], first["forced_offset"]) == (0, 142, 142)
    assert (first["first_ordinal"], first["end_ordinal"], first["segments"]) == (0, 2, 1)
    assert first["oldest_ms"] == first["newest_ms"] == broker.clock.wall_ms()
    assert (second["end_offset"], second["state"], second["damage"]) == (0, "open", [])
    assert broker.ask(DescribeTopic("missing")).code == "unknown_topic"


def test_damage_is_described_by_its_range(broker: Broker) -> None:
    producer = broker.lease()
    for sequence in range(3):
        broker.produce(producer, sequence, [b"x" * 50])
    broker.disk.damage("/data/orders-0/" + "0" * 32 + ".zxQueue", 30, b"\xff\xff")
    again = broker.crashed(broker.disk.crash(keep="everything"))
    first = again.ask(DescribeTopic("orders")).description["partitions"][0]
    assert first["state"] == "damaged"
    assert first["damage"][0][:2] == [0, 170]
