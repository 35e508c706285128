"""What is known of topics."""

from tfmq.client.connection.requests import REFRESH_SECONDS, Cluster
from tfmq.protocol.commands import PartitionRow, TopicRow


class Watch:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def row(name: str, incarnation: int = 5, partitions: int = 2) -> TopicRow:
    backwards = [PartitionRow(number, "open") for number in reversed(range(partitions))]
    return TopicRow(name, incarnation, backwards, {"a": 1})


def test_what_was_learned_is_known_until_it_is_forgotten() -> None:
    cluster = Cluster(Watch())
    assert cluster.topic("a") is None
    (topic,) = cluster.learn([row("a")])
    assert cluster.topic("a") == topic
    assert (topic.incarnation, [each.number for each in topic.partitions]) == (5, [0, 1])
    cluster.forget("a")
    cluster.forget("a")
    assert cluster.topic("a") is None
    cluster.learn([row("a"), row("b")])
    cluster.clear()
    assert cluster.topic("b") is None


def test_after_a_while_it_is_worth_another_look() -> None:
    watch = Watch()
    cluster = Cluster(watch)
    assert cluster.stale("a")
    cluster.learn([row("a")])
    assert not cluster.stale("a")
    watch.time = REFRESH_SECONDS
    assert cluster.stale("a") and cluster.topic("a") is not None
