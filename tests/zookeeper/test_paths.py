"""Addresses of ZooKeeper as users write them."""

from __future__ import annotations

import pytest

from tfmq.errors import BadRequest
from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.paths import NodePaths, zookeeper_address


@pytest.mark.parametrize(
    ("text", "hosts", "root"),
    [
        ("zookeeper://a", "a:2181", "/meta"),
        ("zookeeper://a:1,b:2/shop", "a:1,b:2", "/shop"),
        ("a:1/", "a:1", ""),
        ("a:1//deep//er/", "a:1", "/deep/er"),
        ("[::1]:2181/x", "[::1]:2181", "/x"),
        ("zk-1.shop.example", "zk-1.shop.example:2181", "/meta"),
    ],
)
def test_hosts_and_root(text: str, hosts: str, root: str) -> None:
    assert zookeeper_address(text) == (hosts, root)


def test_an_address_is_shown_as_it_may_be_written() -> None:
    for text in ("zookeeper://a:1,b:2/shop", "zookeeper://a:1/"):
        assert str(zookeeper_address(text)) == text


@pytest.mark.parametrize(
    "wrong", ["", "zookeeper://", "a:1,", "a:0", "a:65536", "a:x", "a b", "a/../b", "a/b c", "http://a"]
)
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequest, match="HOST:PORT"):
        zookeeper_address(wrong)


# The paths of MetaMorphosis.


def test_the_nodes_are_where_metamorphosis_has_them() -> None:
    layout, name = NodePaths("/meta", 7), PartitionName("orders", 3)
    assert layout.broker_address() == "/meta/brokers/ids/7/master"
    assert layout.topic("orders") == f"{layout.topics()}/orders/7-m" == "/meta/brokers/topics/orders/7-m"
    assert layout.member("billing", "m") == f"{layout.members('billing')}/m" == "/meta/consumers/billing/ids/m"
    assert layout.owner("billing", name) == "/meta/consumers/billing/owners/orders/7-3"
    assert layout.offset("billing", name) == "/meta/consumers/billing/offsets/orders/7-3"
    assert layout.offset_fields("billing", name) == "/meta/consumers/billing/offsets/orders/7-3/tfmq"


def test_the_root_may_be_the_top() -> None:
    assert NodePaths("").broker_address() == "/brokers/ids/0/master"
