"""The ZooKeeper that a server registers in."""

from tests.zookeeper.conftest import nodes as nodes
from tests.zookeeper.conftest import root as root
from tests.zookeeper.conftest import zookeeper as zookeeper
