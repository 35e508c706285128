"""How far behind: a number that is the sum of its partitions."""

from tests.client.scripted import Broker, Script
from tfmq.client.lag import Lag
from tfmq.client.positions import PartitionName


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
