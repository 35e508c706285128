"""A folder that belongs to no topic the broker knows is left alone, also by a topic of its name that cannot be made."""

import pytest

from journal.filenames import parse_partition_folder
from tests.broker.helpers import DATA, Broker


def without_catalog(broker: Broker) -> Broker:
    """Another broker whose catalog knows nothing of the partitions' folders."""
    broker.stop()
    broker.disk.rename(DATA, "/other")
    Broker(broker.disk, broker.clock).stop()
    for name in broker.disk.list("/other"):
        if parse_partition_folder(name) is not None:
            broker.disk.rename(f"/other/{name}", f"{DATA}/{name}")
    return Broker(broker.disk, broker.clock)


def contents(broker: Broker, folder: str) -> dict[str, bytes]:
    disk, path = broker.disk, f"{DATA}/{folder}"
    return {name: disk.open_read(f"{path}/{name}").pread(1 << 20, 0) for name in disk.list(path)}


@pytest.mark.parametrize("mark", [True, False])
def test_a_topic_of_the_name_of_a_strangers_folder_is_refused_and_the_folder_stays(mark: bool) -> None:
    broker = Broker()
    broker.create("first")
    broker.create("orders")
    broker.produce(broker.lease(), 0, [b"precious"])
    broker = without_catalog(broker)
    if not mark:
        broker.disk.unlink(f"{DATA}/orders-0/log.mark")
    before = contents(broker, "orders-0")
    refused = broker.create("orders", partitions=3)
    assert (refused.code, refused.failure.outcome) == ("not_allowed", "not done")
    assert contents(broker, "orders-0") == before
    assert not broker.disk.exists(f"{DATA}/orders-1"), "what was made is gone"
    assert broker.restart().engine.broker.unknown_folders == ["first-0", "orders-0"]


def test_a_full_disk_while_partitions_are_made_removes_only_what_was_made() -> None:
    broker = Broker()
    broker.create("first")
    broker.create("orders", partitions=3)
    broker.produce(broker.lease(), 0, [b"precious"], partition=2)
    broker = without_catalog(broker)
    before = contents(broker, "orders-2")
    for folder in ("orders-0", "orders-1"):
        for name in broker.disk.list(f"{DATA}/{folder}"):
            broker.disk.unlink(f"{DATA}/{folder}/{name}")
        broker.disk.remove_folder(f"{DATA}/{folder}")
    broker.disk.space_bytes = broker.disk.used_bytes()
    assert broker.create("orders", partitions=3).code in ("disk_full", "not_allowed")
    broker.disk.space_bytes = None
    assert contents(broker, "orders-2") == before
