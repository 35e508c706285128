"""ZooKeeper addresses (`zookeeper://HOST:PORT,HOST:PORT/ROOT`) and the paths of the nodes."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from tfmq.databases import url_without_passwords
from tfmq.errors import BadRequest
from tfmq.offsets.storage import PartitionName

SCHEME: Final = "zookeeper://"
ROOT: Final = "/meta"
"""The node above all others, if the address names none. It is that of MetaMorphosis (an older message broker)."""
PORT: Final = 2181
BROKER_NUMBER: Final = 0  # in partition names, `BROKER-PARTITION`

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_NODE: Final = re.compile(r"[A-Za-z0-9._-]+")


class ZooKeeperAddress(NamedTuple):
    """Parsed address. `hosts`: "host:port,host:port". `root`: path of the node above all others; "" for the top."""

    hosts: str
    root: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.hosts}{self.root or '/'}"


def zookeeper_address(text: str) -> ZooKeeperAddress:
    """Parse an address, with or without `zookeeper://`. Raises BadRequest with a text that shows the format."""
    names, slash, path = text.removeprefix(SCHEME).partition("/")
    matches = (_HOST.fullmatch(name) for name in names.split(","))
    hosts = [found.groups() if found else ("", "") for found in matches]
    nodes = [node for node in path.split("/") if node]
    are_hosts = all(host and 0 < int(port or PORT) < 1 << 16 for host, port in hosts)
    if not are_hosts or not all(_NODE.fullmatch(node) and node not in (".", "..") for node in nodes):
        raise BadRequest(
            f"{url_without_passwords(text)!r} is no address of a ZooKeeper; write {SCHEME}HOST:PORT,HOST:PORT{ROOT}"
        )
    root = "".join(f"/{node}" for node in nodes) if slash else ROOT
    return ZooKeeperAddress(",".join(f"{host}:{port or PORT}" for host, port in hosts), root)


class NodePaths(NamedTuple):
    """Node paths below one root, for one broker, in the layout of MetaMorphosis (an older message broker).

        ROOT/brokers/ids/BROKER/master                             address of the broker               ephemeral
        ROOT/brokers/topics/TOPIC/BROKER-m                         number of partitions of the topic   ephemeral
        ROOT/consumers/GROUP/ids/MEMBER                            topics, separated by commas         ephemeral
        ROOT/consumers/GROUP/owners/TOPIC/BROKER-PARTITION         member that owns the partition      ephemeral
        ROOT/consumers/GROUP/offsets/TOPIC/BROKER-PARTITION        0-OFFSET                            persistent
        ROOT/consumers/GROUP/offsets/TOPIC/BROKER-PARTITION/tfmq   all fields of the stored offset     persistent

    MetaMorphosis writes a message id before the offset; tfmq needs none and writes 0.
    """

    root: str
    broker: int = 0

    def broker_address(self) -> str:
        return f"{self.root}/brokers/ids/{self.broker}/master"

    def topics(self) -> str:
        return f"{self.root}/brokers/topics"

    def topic(self, topic: str) -> str:
        return f"{self.root}/brokers/topics/{topic}/{self.broker}-m"

    def members(self, group: str) -> str:
        return f"{self.root}/consumers/{group}/ids"

    def member(self, group: str, member: str) -> str:
        return f"{self.members(group)}/{member}"

    def owner(self, group: str, name: PartitionName) -> str:
        return f"{self.root}/consumers/{group}/owners/{name.topic}/{self.broker}-{name.partition}"

    def offset(self, group: str, name: PartitionName) -> str:
        return f"{self.root}/consumers/{group}/offsets/{name.topic}/{self.broker}-{name.partition}"

    def offset_fields(self, group: str, name: PartitionName) -> str:
        return f"{self.offset(group, name)}/tfmq"
