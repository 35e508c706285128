"""Partitions without the catalog that they belong to: its ids would be given out again, so nothing starts on them."""

import pytest

from journal.errors import Corrupt
from tests.broker.helpers import DATA, Broker


def test_partitions_without_their_catalog_forbid_a_start() -> None:
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0, [b"precious"])
    broker.stop()
    for name in broker.disk.list(f"{DATA}/meta"):
        broker.disk.unlink(f"{DATA}/meta/{name}")
    with pytest.raises(Corrupt, match="orders-0"):
        Broker(broker.disk, broker.clock)
    assert broker.disk.list(f"{DATA}/meta") == []


def test_a_catalog_older_than_its_partitions_gives_out_no_id_again() -> None:
    broker = Broker()
    broker.create()
    broker = broker.restart()
    broker.stop()
    backup = {name: broker.disk.open_read(path).pread(1 << 20, 0) for name, path in meta_files(broker)}
    broker = Broker(broker.disk, broker.clock)
    old = broker.lease()
    assert broker.produce(old, 0, [b"first"]).code == "ok"
    broker.stop()
    for _, path in meta_files(broker):
        broker.disk.unlink(path)
    for name, data in backup.items():
        broker.disk.create(f"{DATA}/meta/{name}").pwritev([data], 0)
    broker = Broker(broker.disk, broker.clock)
    new = broker.lease()
    answer = broker.produce(new, 0, [b"second"])
    assert new > old
    assert (answer.code, answer.repeated) == ("ok", False)
    assert broker.payloads() == [b"first", b"second"]


def meta_files(broker: Broker) -> list[tuple[str, str]]:
    return [(name, f"{DATA}/meta/{name}") for name in broker.disk.list(f"{DATA}/meta")]
