"""What is known of topics."""

from tfmq.client.connection.requests import REFRESH_SECONDS, MetadataCache
from tfmq.protocol.commands import PartitionRow, TopicRow


class Watch:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def row(name: str, incarnation: int = 5, partitions: int = 2) -> TopicRow:
    backwards = [PartitionRow(number, "open") for number in reversed(range(partitions))]
    return TopicRow(name, incarnation, backwards, {"a": 1})


def test_what_was_learned_is_known_until_it_is_forgotten() -> None:
    cluster = MetadataCache(Watch())
    assert cluster.topic("a") is None
    (topic,) = cluster.update([row("a")])
    assert cluster.topic("a") == topic
    assert (topic.incarnation, [each.number for each in topic.partitions]) == (5, [0, 1])
    cluster.invalidate("a")
    cluster.invalidate("a")
    assert cluster.topic("a") is None
    cluster.update([row("a"), row("b")])
    cluster.clear()
    assert cluster.topic("b") is None


def test_after_a_while_it_is_worth_another_look() -> None:
    watch = Watch()
    cluster = MetadataCache(watch)
    assert cluster.is_stale("a")
    cluster.update([row("a")])
    assert not cluster.is_stale("a")
    watch.time = REFRESH_SECONDS
    assert cluster.is_stale("a") and cluster.topic("a") is not None
