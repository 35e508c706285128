"""The ZooKeeper that these tests run with: a server of their own, for each test a root of its own."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from tools.rigs.zookeeper import ZooKeeperServer, can_be_had

_roots = itertools.count(1)


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
