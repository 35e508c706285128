"""Offsets in a real ZooKeeper."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest

from tests.offsets.contention import OpenShaky
from tests.offsets.contract import PLACE, A, B, Contract, Open
from tests.zookeeper.conftest import until
from tfmq.errors import Damaged, Fenced, StoreFailed
from tfmq.offsets.storage import NO_OFFSET, StoredOffset
from tfmq.testing.broker import SimulatedBroker
from tfmq.zookeeper import connection
from tfmq.zookeeper.offsets import ZooKeeperOffsets, offset_data, row_data, stored_offset
from tools.rigs.proxy import proxied
from tools.rigs.zookeeper import ZooKeeperServer


@pytest.fixture
def open_one(address: str) -> Iterator[Open]:
    made: list[ZooKeeperOffsets] = []

    def opened() -> ZooKeeperOffsets:
        made.append(ZooKeeperOffsets(address))
        return made[-1]

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def open_shaky(zookeeper: ZooKeeperServer, root: str) -> Iterator[OpenShaky]:
    """Through a proxy that cuts the connection at one piece in thirty, of either direction."""
    with ExitStack() as proxies:

        def opened(random: Random) -> ZooKeeperOffsets:
            proxy = proxies.enter_context(proxied(zookeeper.address))
            proxy.up = proxy.down = lambda data: None if random.random() < 0.03 else data
            return ZooKeeperOffsets(f"zookeeper://{proxy.address}{root}")

        yield opened


class TestZooKeeper(Contract):
    """As every storage."""


def test_the_nodes_are_those_of_metamorphosis(open_one: Open, nodes: Any, root: str) -> None:
    open_one().save("billing", 4, {A: PLACE})
    path = f"{root}/consumers/billing/offsets/orders/0-0"
    assert nodes.get(path)[0] == b"0-%d" % PLACE.offset
    assert nodes.get_children(path) == ["tfmq"]
    assert nodes.get(path)[1].ephemeralOwner == 0


@pytest.mark.parametrize(("data", "offset"), [(b"0-500", 500), (b"8812-500", 500), (b"500", 500), (b"0-0", 0)])
def test_a_group_continues_at_an_offset_that_was_set_by_hand(
    open_one: Open, nodes: Any, root: str, data: bytes, offset: int
) -> None:
    storage = open_one()
    storage.save("billing", 4, {A: PLACE})
    nodes.set(f"{root}/consumers/billing/offsets/orders/0-0", data)
    expected = StoredOffset(offset, 0, PLACE.incarnation, -1, 4)
    assert storage.read("billing", [A]) == {A: expected}
    assert storage.claim("billing", 5, [A]) == {A: expected._replace(generation=5)}
    assert open_one().read("billing", [A]) == {A: expected._replace(generation=5)}


@pytest.mark.parametrize(
    ("node", "data"),
    [("", b"here"), ("", b"0-" + b"9" * 5000), ("/tfmq", b"{"), ("/tfmq", b"[]"), ("/tfmq", b'{"offset": 1}')],
)
def test_a_node_that_holds_something_else_is_named_and_left_alone(
    open_one: Open, nodes: Any, root: str, node: str, data: bytes
) -> None:
    storage = open_one()
    storage.save("billing", 4, {A: PLACE})
    path = f"{root}/consumers/billing/offsets/orders/0-0{node}"
    nodes.set(path, data)
    for use in (
        lambda: storage.read("billing", [A]),
        lambda: storage.claim("billing", 5, [A]),
        lambda: storage.save("billing", 4, {A: PLACE}),
    ):
        with pytest.raises(Damaged, match=path):
            use()
    assert nodes.get(path)[0] == data


def test_writers_of_one_generation_do_not_lose_each_others_rows(open_one: Open) -> None:
    """Invariant: each partition has the last offset that was saved of it, and never a mixture."""

    def save(storage: Any, name: Any) -> None:
        for offset in range(1, 21):
            storage.save("billing", 1, {name: StoredOffset(offset, incarnation=offset)})

    threads = [threading.Thread(target=save, args=(open_one(), name)) for name in (A, B)]
    reader = open_one()
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        for row in reader.read("billing", [A, B]).values():
            assert row.offset == row.incarnation
    assert [row.offset for row in reader.read("billing", [A, B]).values()] == [20, 20]


MULTI = 14
"""The number of transactions among ZooKeeper's requests; a request is a length, a number of its own, this, the rest."""


def held_back(held: list[bytes]) -> Any:
    """A judge of a proxy that lets everything through but transactions."""

    def judge(data: bytes) -> bytes:
        passed = b""
        while data:
            size = 4 + int.from_bytes(data[:4], "big")
            frame, data = data[:size], data[size:]
            if int.from_bytes(frame[8:12], "big") == MULTI:
                held.append(frame)
            else:
                passed += frame
        return passed

    return judge


def save_late(storage: ZooKeeperOffsets, refused: list[Fenced]) -> None:
    try:
        storage.save("billing", 3, {A: PLACE._replace(offset=9)})
    except Fenced as fenced:
        refused.append(fenced)


def test_a_save_that_was_held_up_changes_nothing_of_a_new_owner(
    zookeeper: ZooKeeperServer, open_one: Open, root: str
) -> None:
    """What waits on a connection that is stuck may arrive when the partition has another owner."""
    with proxied(zookeeper.address) as proxy:
        old = ZooKeeperOffsets(f"zookeeper://{proxy.address}{root}")
        old.save("billing", 3, {A: PLACE})
        held: list[bytes] = []
        proxy.up, proxy.cut_when_short = held_back(held), False
        refused: list[Fenced] = []
        saving = threading.Thread(target=save_late, args=(old, refused))
        saving.start()
        (late,) = until(lambda: held)
        new = open_one()
        new.claim("billing", 4, [A])
        (pipe,) = [pipe for pipe in proxy.pipes if pipe.thread.is_alive()]
        proxy.up = None
        pipe.far.sendall(late)
        saving.join(60)
        assert len(refused) == 1
        assert new.read("billing", [A]) == {A: PLACE._replace(generation=4)}
        old.close()


def test_a_consumer_goes_on_where_its_group_was(address: str, nodes: Any, root: str) -> None:
    with SimulatedBroker() as broker:
        for number in range(4):
            broker.producer().send("orders", str(number), partition=0).result()
        options = {"group": "billing", "offsets": address}
        with broker.consumer("orders", **options) as consumer:
            assert [next(consumer).text, next(consumer).text] == ["0", "1"]
        assert nodes.get(f"{root}/consumers/billing/offsets/orders/0-0")[0].startswith(b"0-")
        with broker.consumer("orders", **options) as consumer:
            assert [message.text for message in consumer.poll(30)] == ["2", "3"]


def test_a_zookeeper_that_is_gone_is_passing_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RESPONSE_SECONDS", 0.3)
    storage = ZooKeeperOffsets("zookeeper://127.0.0.1:1/meta")
    with pytest.raises(StoreFailed, match=r"127\.0\.0\.1:1") as caught:
        storage.read("billing", [A])
    assert caught.value.retriable
    storage.close()


# The nodes of an offset, to and from bytes.

STORED = StoredOffset(5, 1, 2, 3, 1 << 62)


def test_a_row_comes_back_as_it_was() -> None:
    assert stored_offset("/o", offset_data(STORED), row_data(STORED)) == STORED
    claimed = StoredOffset(NO_OFFSET, generation=4)
    assert offset_data(claimed) == b""
    assert stored_offset("/o", offset_data(claimed), row_data(claimed)) == claimed


def test_nothing_is_nothing() -> None:
    assert stored_offset("/o", None, None) is None


def test_an_offset_alone_is_of_no_incarnation_that_is_known() -> None:
    assert stored_offset("/o", b"17-5", None) == StoredOffset(5, 0, 0, -1, 0)


def test_the_offset_that_is_shown_wins() -> None:
    assert stored_offset("/o", b"0-9", row_data(STORED)) == StoredOffset(9, 0, 2, -1, 1 << 62)
