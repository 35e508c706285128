"""`stats()`, with a group and without one."""

from pathlib import Path

from tests.client.handling_rig import Bench
from tfmq.testing.broker import SimulatedBroker


def test_it_says_where_each_partition_and_the_group_stand(tmp_path: Path) -> None:
    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        bench.send("a", "b")
        alone, member = bench.open(group=None, dead_letters=None), bench.open()
        for consumer in (alone, member):
            with consumer:
                assert len(consumer.poll()) == 2
                stats = consumer.stats()
                assert (stats["messages"], stats["connections"]) == (2, 1)
                row = stats["partitions"]["orders-0"]
                assert row["offset"] > row["processed_offset"] == 0
        assert alone.stats()["generation"] == 0 < member.stats()["generation"]
