"""Which store an address opens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dead_letters.helpers import Process, Time, failure, finished, message
from tests.dead_letters.test_store import keeping
from tfmq import dead_letters
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.dead_letters import model, open_dead_letters
from tfmq.dead_letters.admin import default_stores
from tfmq.dead_letters.model import DEAD, DROPPED, FAILING, HANDLED, WAITING
from tfmq.dead_letters.open import open_letter_store
from tfmq.dead_letters.sql_store import BlockingSqlStore, SqlLetterStore
from tfmq.dead_letters.store import DEFAULT_STORE, StoreAddress, broker_id_text, default_path, existing_or_default_path
from tfmq.dead_letters.topic_store import TopicLetterStore
from tfmq.errors import BadRequest, StoreFailed
from tfmq.protocol.commands import HelloReply
from tfmq.testing.broker import SimulatedBroker


def test_nothing_is_made_before_something_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "state" / "dead.db"
    store = open_dead_letters(path, group="billing", calls_max=6, wall_clock=Time())
    assert store.address == str(path) and not path.parent.exists()
    assert finished(store.store_letter(message(1), [failure()])) == DEAD
    assert path.exists()
    store.close()


def test_a_consumer_without_a_store_has_the_groups_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for each broker; so two brokers on one machine do not share one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for node in ("0b1c", "2d3e"):
        link = nowhere()
        store = open_dead_letters(DEFAULT_STORE, group="billing", calls_max=6, wall_clock=Time(), link=link)
        assert store.address == str(tmp_path / "tfmq" / "NODE" / "billing.db")
        assert finished(store.lease_next()) is None, "nobody knows which broker's are its own"
        with pytest.raises(StoreFailed, match="not reached yet"):
            finished(store.store_letter(message(1), [failure()]))
        link.hello = hello(node)
        assert finished(store.store_letter(message(1), [failure()])) == DEAD
        assert store.address == str(tmp_path / "tfmq" / node / "billing.db")
        store.close()
    assert default_stores("billing") == [str(tmp_path / "tfmq" / each / "billing.db") for each in ("0b1c", "2d3e")]


def test_before_the_broker_is_reached_nothing_is_done_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loop over waiting letters does at each start; what ended long ago is forgotten when it is reached."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    there = BlockingSqlStore(StoreAddress("path", default_path("billing", broker="0b1c")))
    there.apply([keeping(1), (keeping(1)[0], model.DropEvent(20))])
    assert there.count_by_state() == {("billing", DROPPED): 1}
    link = nowhere()
    store = open_dead_letters(DEFAULT_STORE, group="billing", calls_max=6, wall_clock=Time(), link=link)
    assert finished(store.lease_next()) is None and (finished(store.seconds_until_due()) or 0) > 0
    finished(store.delete_expired())
    link.hello = hello("0b1c")
    assert finished(store.lease_next()) is None
    assert there.count_by_state() == {}


def test_a_store_that_an_earlier_release_made_is_used_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    earlier = BlockingSqlStore(StoreAddress("path", default_path("billing")))
    assert earlier.count_by_state() == {}
    link = nowhere()
    link.hello = hello("0b1c")
    store = open_dead_letters(DEFAULT_STORE, group="billing", calls_max=6, wall_clock=Time(), link=link)
    assert finished(store.store_letter(message(1), [failure()])) == DEAD
    assert store.address == earlier.name and earlier.count_by_state() == {("billing", DEAD): 1}
    assert existing_or_default_path("shipping", "0b1c") == str(tmp_path / "tfmq" / "0b1c" / "shipping.db")


def test_a_broker_cannot_name_a_file_elsewhere() -> None:
    node = "../../etc"
    assert broker_id_text(node) != node and broker_id_text(node).isalnum()
    assert broker_id_text("0b1c") == "0b1c" and broker_id_text("") == ""


def test_each_address_has_its_kind_of_store(tmp_path: Path) -> None:
    assert isinstance(open_letter_store(tmp_path / "dead.db"), SqlLetterStore)
    assert isinstance(open_letter_store(f"sqlite:///{tmp_path}/dead.db"), SqlLetterStore)
    with SimulatedBroker() as broker:
        process = Process(broker, "unused")
        letter_store = open_letter_store("topic:dead", link=process.link)
        assert isinstance(letter_store, TopicLetterStore) and letter_store.name == "topic:dead"


def test_a_topic_needs_a_broker_and_nonsense_is_reported() -> None:
    with pytest.raises(BadRequest, match="servers"):
        open_letter_store("topic:dead")
    with pytest.raises(BadRequest, match="no store"):
        open_dead_letters("", group="billing", calls_max=6, wall_clock=Time())


def test_what_programs_use_is_there_and_loads_no_database_before() -> None:
    program = "import sys, tfmq; tfmq.dead_letters.open_dead_letters; print('sqlalchemy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
    assert all(getattr(dead_letters, name) is not None for name in dead_letters.__all__)
    assert not hasattr(dead_letters, "Bury")


def hello(node: str) -> HelloReply:
    return HelloReply(1, "tfmq", node, {}, 2, [])


def nowhere() -> ClientConnection:
    """A link to a broker that is down."""
    return ClientConnection(parse_servers("127.0.0.1:1"), time.monotonic)


def test_with_the_broker_down_both_drivers_keep_in_a_thread(tmp_path: Path) -> None:
    driver = BlockingDriver(nowhere())
    store = open_dead_letters(
        tmp_path / "dead.db", group="billing", calls_max=6, run=driver.run_in_thread, wall_clock=time.time
    )
    assert driver.run(store.store_letter(message(1), [failure()])) == DEAD
    driver.close()

    async def keep() -> str:
        driver = AsyncDriver(nowhere())
        store = open_dead_letters(
            tmp_path / "dead.db", group="billing", calls_max=6, run=driver.run_in_threads, wall_clock=time.time
        )
        found = await asyncio.gather(
            *(driver.run(store.record_failure(message(number), failure())) for number in range(2, 8)),
            driver.run(store.store_letter(message(8), [failure()], retry_after=0)),
        )
        due = None
        while due is None:
            due = await driver.run(store.lease_next())
        assert await driver.run(store.mark_handled(due)) is True
        await driver.close()
        return " ".join(found)

    assert asyncio.run(keep()) == " ".join([FAILING] * 6 + [WAITING])
    assert BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db"))).count_by_state() == {
        ("billing", DEAD): 1,
        ("billing", FAILING): 6,
        ("billing", HANDLED): 1,
    }
