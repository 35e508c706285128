"""The address of an ensemble as users write it: `zookeeper://HOST:PORT,HOST:PORT/ROOT`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from tfmq.errors import BadRequest
from tfmq.offsets.storage import PartitionName, shown_url

SCHEME: Final = "zookeeper://"
ROOT: Final = "/meta"
"""Where the nodes are if the address names no root: where MetaMorphosis has them."""
PORT: Final = 2181
BROKER: Final = 0
"""The number of the broker in names of partitions, `BROKER-PARTITION`."""

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_NODE: Final = re.compile(r"[A-Za-z0-9._-]+")


class ZooKeeperAddress(NamedTuple):
    """`hosts`: "host:port,host:port" · `root`: the node below which everything is, "" for the top."""

    hosts: str
    root: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.hosts}{self.root or '/'}"


def zookeeper_address(text: str) -> ZooKeeperAddress:
    """The address in `text`, with or without `zookeeper://`. Raises BadRequest, which says what one looks like."""
    rest = text.removeprefix(SCHEME)
    hosts, slash, path = rest.partition("/")
    names = hosts.split(",")
    root = "/".join(("", *filter(None, path.split("/")))) if path or slash else ROOT
    if not all(map(_is_host, names)) or not all(_is_node(node) for node in root.split("/")[1:]):
        raise BadRequest(
            f"{shown_url(text)!r} is no address of a ZooKeeper; write {SCHEME}HOST:PORT,HOST:PORT{ROOT}"
        )
    return ZooKeeperAddress(",".join(map(_with_port, names)), root)


def _is_host(text: str) -> bool:
    found = _HOST.fullmatch(text)
    return found is not None and (found[2] is None or 0 < int(found[2][1:]) < 1 << 16)


def _with_port(host: str) -> str:
    found = _HOST.fullmatch(host)
    return host if found is not None and found[2] else f"{host}:{PORT}"


def _is_node(text: str) -> bool:
    return _NODE.fullmatch(text) is not None and text not in (".", "..")


# Which node is what: the layout of MetaMorphosis, so that tools which know it find brokers, topics, groups, offsets.
#
#     ROOT/brokers/ids/BROKER/master                                   its address                      while it lives
#     ROOT/brokers/topics/TOPIC/BROKER-m                               how many partitions it has       while it lives
#     ROOT/consumers/GROUP/ids/MEMBER                                  the topics, with commas between  while it lives
#     ROOT/consumers/GROUP/owners/TOPIC/BROKER-PARTITION               the member that has it           while it has it
#     ROOT/consumers/GROUP/offsets/TOPIC/BROKER-PARTITION              0-OFFSET                         for good
#     ROOT/consumers/GROUP/offsets/TOPIC/BROKER-PARTITION/tfmq         all of the stored offset         for good
#
# The first number of an offset is the id of the last message at MetaMorphosis; here an offset says all, so it is 0.


class Layout(NamedTuple):
    """The paths below one root, with the partitions of one broker."""

    root: str
    broker: int = 0

    def master(self) -> str:
        """The broker's address."""
        return f"{self.root}/brokers/ids/{self.broker}/master"

    def topics(self) -> str:
        """All topics of all brokers."""
        return f"{self.root}/brokers/topics"

    def topic(self, topic: str) -> str:
        """The number of partitions that the broker has of the topic."""
        return f"{self.root}/brokers/topics/{topic}/{self.broker}-m"

    def members(self, group: str) -> str:
        """The members of a group."""
        return f"{self.root}/consumers/{group}/ids"

    def member(self, group: str, member: str) -> str:
        """The topics of a member."""
        return f"{self.members(group)}/{member}"

    def owner(self, group: str, name: PartitionName) -> str:
        """The member that has the partition."""
        return f"{self.root}/consumers/{group}/owners/{name.topic}/{self.broker}-{name.partition}"

    def offset(self, group: str, name: PartitionName) -> str:
        """Where the group goes on in the partition, for everybody."""
        return f"{self.root}/consumers/{group}/offsets/{name.topic}/{self.broker}-{name.partition}"

    def row(self, group: str, name: PartitionName) -> str:
        """The same, with all that a stored offset has."""
        return f"{self.offset(group, name)}/tfmq"
