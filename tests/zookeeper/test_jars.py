"""Where Debian's packages are not installed, the ZooKeeper that comes inside pyspark is the one of these tests."""

from pathlib import Path

import pytest
from kazoo.client import KazooClient

from tools.rigs import java, zookeeper
from tools.rigs.zookeeper import ZooKeeperServer


@pytest.mark.long
def test_the_jars_of_pyspark_make_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if java.home() is None:
        pytest.skip("no Java is installed (make system)")
    monkeypatch.setattr(zookeeper, "DEBIAN_JARS", tmp_path)
    found = zookeeper.jars()
    assert found and all("pyspark" in jar.parts for jar in found)
    server = ZooKeeperServer()
    try:
        server.start()
        client = KazooClient(server.address)
        client.start()
        try:
            client.create("/kept", b"value")
            server.kill()
            server.start()
            assert client.retry(client.get, "/kept")[0] == b"value"
        finally:
            client.stop()
            client.close()
    finally:
        server.remove()
