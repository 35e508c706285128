"""Addresses of ZooKeeper as users write them."""

import pytest

from tfmq.errors import BadRequest
from tfmq.zookeeper.paths import zookeeper_address


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
