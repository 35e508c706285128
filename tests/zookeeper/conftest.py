"""The ZooKeeper that these tests run with: a server of their own, for each test a root of its own."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from tools.rigs.live_server import LiveServer
from tools.rigs.zookeeper import ZooKeeperServer, can_be_had

PARTITIONS = 4
PATIENCE_SECONDS = 60.0

_roots = itertools.count(1)


def until(what: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """What `what` gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.01)
    return found


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[ZooKeeperServer]:
    """A running ZooKeeper."""
    if not can_be_had():
        pytest.skip("no ZooKeeper, or no Java, is installed (make system)")
    server = ZooKeeperServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def root() -> str:
    """A node below which nothing was before."""
    return f"/test-{next(_roots)}"


@pytest.fixture
def address(zookeeper: ZooKeeperServer, root: str) -> str:
    """The address of that node, as users write it."""
    return f"zookeeper://{zookeeper.address}{root}"


@pytest.fixture
def nodes(zookeeper: ZooKeeperServer) -> Iterator[Any]:
    """A client of the tests' own, to look at nodes and to set them."""
    client = KazooClient(zookeeper.address)
    client.start()
    yield client
    client.stop()
    client.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A broker; each test has topics of its own there."""
    server = LiveServer(tmp_path_factory.mktemp("broker") / "data", f"topics.partitions={PARTITIONS}")
    server.start()
    yield server
    server.stop()
