"""Consumers whose group ZooKeeper coordinates: with a live broker, a live ZooKeeper, and one that stands still."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.exceptions import NoNodeError

import tfmq
from tests.zookeeper.test_coordination import until
from tools.rigs.live_server import LiveServer
from tools.rigs.zookeeper import ZooKeeperServer

PARTITIONS = 4
MESSAGES = 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "data", f"topics.partitions={PARTITIONS}")
    server.start()
    yield server
    server.stop()


class Reader:
    """A consumer in a thread of its own."""

    def __init__(self, servers: str, address: str, session: float = 3.0) -> None:
        self.consumer: tfmq.Consumer[Any] = tfmq.Consumer(
            servers,
            topics="orders",
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
        self.thread.join(30)
        assert not self.thread.is_alive() and self.error is None, self.error


def send(servers: str, numbers: range) -> None:
    with tfmq.Producer(servers) as producer:
        for number in numbers:
            producer.send("orders", str(number), partition=number % PARTITIONS)


def partitions_of(reader: Reader, since: int) -> set[int]:
    return {partition for partition, _ in reader.read[since:]}


def test_consumers_share_what_zookeeper_says_and_nothing_is_skipped(
    server: LiveServer, zookeeper: ZooKeeperServer, address: str, nodes: Any, root: str
) -> None:
    send(server.address, range(MESSAGES))
    first = Reader(server.address, address)
    until(lambda: len(first.read) == MESSAGES)
    second = Reader(server.address, address)
    until(lambda: len(nodes.get_children(f"{root}/consumers/billing/ids")) == 2)
    until(lambda: owners(nodes, root) == {0: 2, 1: 2})
    at = len(first.read)
    send(server.address, range(MESSAGES, 2 * MESSAGES))
    until(lambda: len({*first.read, *second.read}) == 2 * MESSAGES)
    assert len(partitions_of(first, at)) == 2 and len(partitions_of(second, 0)) == 2
    second.stop()
    until(lambda: len(nodes.get_children(f"{root}/consumers/billing/ids")) == 1)
    send(server.address, range(2 * MESSAGES, 3 * MESSAGES))
    until(lambda: len({*first.read, *second.read}) == 3 * MESSAGES)
    first.stop()
    counts = Counter([*first.read, *second.read])
    assert set(counts.values()) == {1}, "every member left in peace, so nothing came twice"


def owners(nodes: Any, root: str) -> dict[int, int]:
    """How many partitions each of the owners has, the owners numbered."""
    path = f"{root}/consumers/billing/owners/orders"
    try:
        found = Counter(nodes.get(f"{path}/{name}")[0] for name in nodes.get_children(path))
    except NoNodeError:  # just now
        return {}
    return dict(enumerate(sorted(found.values())))


def test_a_group_goes_on_when_zookeeper_was_away(
    server: LiveServer, zookeeper: ZooKeeperServer, address: str
) -> None:
    readers = [Reader(server.address, address, session=1.0) for _ in range(2)]
    send(server.address, range(MESSAGES))
    until(lambda: len({each for reader in readers for each in reader.read}) == MESSAGES)
    zookeeper.freeze()
    time.sleep(2.0)  # longer than a session
    read = sum(len(reader.read) for reader in readers)
    send(server.address, range(MESSAGES, 2 * MESSAGES))
    time.sleep(0.3)
    assert sum(len(reader.read) for reader in readers) == read, "handed out although the session may be over"
    zookeeper.thaw()
    until(lambda: len({each for reader in readers for each in reader.read}) == 2 * MESSAGES)
    for reader in readers:
        reader.stop()
