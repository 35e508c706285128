"""Consumers whose group ZooKeeper coordinates: with a live broker, a live ZooKeeper, and one that stands still."""

import threading
import time
from collections import Counter
from typing import Any

from kazoo.exceptions import NoNodeError

import tfmq
from tests.zookeeper.conftest import PARTITIONS, until
from tools.rigs.live_server import LiveServer
from tools.rigs.zookeeper import ZooKeeperServer

MESSAGES = 120
SHORT_SECONDS = 1.0


class Reader:
    """A consumer in a thread of its own."""

    def __init__(self, servers: str, address: str, topic: str, session: float = 60.0) -> None:
        self.consumer: tfmq.Consumer[Any] = tfmq.Consumer(
            servers,
            topics=topic,
            group="billing",
            coordinator=address,
            session=session,
            save_every=0.2,
            refresh_every=0.2,
        )
        self.read: list[tuple[int, int]] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.consumer:
                for message in self.consumer:
                    self.read.append((message.partition, int(message.text)))
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.consumer.stop()
        self.thread.join(60)
        assert not self.thread.is_alive() and self.error is None, self.error


def send(servers: str, topic: str, numbers: range) -> None:
    with tfmq.Producer(servers) as producer:
        for number in numbers:
            producer.send(topic, str(number), partition=number % PARTITIONS)


def partitions_of(reader: Reader, since: int) -> set[int]:
    return {partition for partition, _ in reader.read[since:]}


def test_consumers_share_what_zookeeper_says_and_nothing_is_skipped(
    server: LiveServer, zookeeper: ZooKeeperServer, address: str, nodes: Any, root: str
) -> None:
    topic = "shared"
    send(server.address, topic, range(MESSAGES))
    first = Reader(server.address, address, topic)
    until(lambda: len(first.read) == MESSAGES)
    second = Reader(server.address, address, topic)
    until(lambda: len(nodes.get_children(f"{root}/consumers/billing/ids")) == 2)
    until(lambda: owners(nodes, root) == {0: 2, 1: 2})
    at = len(first.read)
    send(server.address, topic, range(MESSAGES, 2 * MESSAGES))
    until(lambda: len({*first.read, *second.read}) == 2 * MESSAGES)
    assert len(partitions_of(first, at)) == 2 and len(partitions_of(second, 0)) == 2
    second.stop()
    until(lambda: len(nodes.get_children(f"{root}/consumers/billing/ids")) == 1)
    send(server.address, topic, range(2 * MESSAGES, 3 * MESSAGES))
    until(lambda: len({*first.read, *second.read}) == 3 * MESSAGES)
    first.stop()
    counts = Counter([*first.read, *second.read])
    assert set(counts.values()) == {1}, "every member left in peace, so nothing came twice"


def owners(nodes: Any, root: str) -> dict[int, int]:
    """How many partitions each of the owners has, the owners numbered."""
    path = f"{root}/consumers/billing/owners/shared"
    try:
        found = Counter(nodes.get(f"{path}/{name}")[0] for name in nodes.get_children(path))
    except NoNodeError:  # just now
        return {}
    return dict(enumerate(sorted(found.values())))


def test_a_group_goes_on_when_zookeeper_was_away(server: LiveServer, zookeeper: ZooKeeperServer, address: str) -> None:
    topic = "away"
    readers = [Reader(server.address, address, topic, SHORT_SECONDS) for _ in range(2)]
    send(server.address, topic, range(MESSAGES))
    until(lambda: len({each for reader in readers for each in reader.read}) == MESSAGES)
    with zookeeper.frozen():
        time.sleep(SHORT_SECONDS)  # trust in a session is over by then, and it may be over itself
        read = sum(len(reader.read) for reader in readers)
        send(server.address, topic, range(MESSAGES, 2 * MESSAGES))
        time.sleep(0.2)
        assert sum(len(reader.read) for reader in readers) == read, "handed out although the session may be over"
    until(lambda: len({each for reader in readers for each in reader.read}) == 2 * MESSAGES)
    for reader in readers:
        reader.stop()
