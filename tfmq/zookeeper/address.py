"""The address of an ensemble as users write it: `zookeeper://HOST:PORT,HOST:PORT/ROOT`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from tfmq.errors import BadRequest
from tfmq.offsets.storage import shown_url

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
