"""Offsets in an SQLite file; those in PostgreSQL are in tests/sql/test_offsets.py."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.offsets.contention import OpenShaky
from tests.offsets.contract import PLACE, A, Contract, Open
from tests.offsets.failing_sql import ShakySql
from tests.sql.conftest import postgres as postgres
from tfmq.client.consumer.options import open_storage
from tfmq.errors import BadRequest, Busy, NotSupported, StoreFailed
from tfmq.offsets import sql
from tfmq.offsets.sql import SqlOffsets
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.postgresql import PostgresServer


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'offsets.db'}"


@pytest.fixture
def open_one(url: str) -> Iterator[Open]:
    made: list[SqlOffsets] = []

    def opened() -> SqlOffsets:
        made.append(SqlOffsets(url))
        return made[-1]

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def open_shaky(url: str) -> OpenShaky:
    return lambda random: ShakySql(url, random)


class TestSQLite(Contract):
    """As every storage."""


def test_who_uses_the_table_can_read_it(open_one: Open, tmp_path: Path) -> None:
    open_one().save("billing", 4, {A: PLACE})
    with sqlite3.connect(tmp_path / "offsets.db") as connection:
        rows = connection.execute("SELECT * FROM tfmq_offsets").fetchall()
    assert rows == [("billing", "orders", 0, 1 << 40, 3, 1 << 33, 2, 4)]
    connection.close()


def test_nothing_is_touched_before_it_is_needed(tmp_path: Path) -> None:
    SqlOffsets(f"sqlite:///{tmp_path / 'offsets.db'}").close()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_has_connections_of_its_own(open_one: Open) -> None:
    storage = open_one()
    storage.save("billing", 1, {A: PLACE})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            storage.save("billing", 2, {A: PLACE})
            storage.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.read("billing", [A]) == {A: PLACE._replace(generation=2)}


def test_a_lock_that_is_not_given_back_is_passing_trouble(
    open_one: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "LOCK_SECONDS", 0.05)
    storage = open_one()
    storage.save("billing", 1, {A: PLACE})
    other = sqlite3.connect(tmp_path / "offsets.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy, match=r"offsets\.db: another transaction") as caught:
        storage.save("billing", 1, {A: PLACE})
    assert caught.value.retriable
    other.execute("ROLLBACK")
    other.close()
    storage.save("billing", 1, {A: PLACE})


def test_a_server_that_does_not_listen_is_passing_trouble() -> None:
    storage = SqlOffsets("postgresql+psycopg://127.0.0.1:1/db?connect_timeout=2")
    with pytest.raises(StoreFailed, match="does not respond") as caught:
        storage.read("billing", [A])
    assert caught.value.retriable


@pytest.mark.parametrize("place", ["gone/offsets.db", "a-file/offsets.db", "."])
def test_a_place_where_no_database_can_be_is_a_final_failure(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").touch()
    storage = SqlOffsets(f"sqlite:///{tmp_path / place}")
    with pytest.raises(StoreFailed, match=r"cannot be in .*must exist") as caught:
        storage.read("billing", [A])
    assert not caught.value.retriable
    storage.close()


def test_a_consumer_ends_with_the_sentence_about_its_database(tmp_path: Path) -> None:
    handled: list[str] = []
    with SimulatedBroker() as broker:
        broker.producer().send("orders", "1").result()
        consumer = broker.consumer("orders", group="g", offsets=f"sql:sqlite:///{tmp_path}/gone/o.db")
        with pytest.raises(StoreFailed, match="cannot be in"):
            consumer.run(lambda message: handled.append(message.text), signals=False)
    assert handled == []


@pytest.mark.parametrize("wrong", ["", "somewhere", "sqlite://", "sqlite:///:memory:"])
def test_what_is_no_address_of_a_lasting_database_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequest):
        SqlOffsets(wrong)


@pytest.mark.parametrize(
    "url", ["sqlite+aiosqlite:////tmp/a.db", "postgresql+asyncpg://h/db", "postgresql+psycopg_async://h/db"]
)
def test_a_driver_that_has_to_be_awaited_is_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(BadRequest, match=r"one for asyncio.*sqlite:///PATH or postgresql\+psycopg://"):
        SqlOffsets(url)


def test_a_driver_that_is_missing_is_named() -> None:
    with pytest.raises(NotSupported, match=r"tfmq\[postgresql\]"):
        SqlOffsets("postgresql+nothing://host/db").read("billing", [A])


def test_a_password_is_never_shown() -> None:
    storage = SqlOffsets("postgresql+psycopg://user:secret@127.0.0.1:1/db?connect_timeout=2")
    with pytest.raises(StoreFailed) as caught:
        storage.read("billing", [A])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "offsets",
    [
        "postgresql://user:secret@host/db",
        "sql:postgresql://user:secret@host:port/db",
        "sql:postgresql://user:a@b:secret@host/db",
        "sql:postgresql//user:secret@host/db",
        "zookeeper://user:secret@host:2181/x",
    ],
)
def test_an_address_that_is_refused_is_reported_without_its_password(offsets: str) -> None:
    with pytest.raises(BadRequest) as refused:
        open_storage(offsets)
    assert "secret" not in str(refused.value)


def test_a_password_among_the_options_is_not_shown_either() -> None:
    storage = SqlOffsets("postgresql+psycopg://127.0.0.1:1/db?password=secret&connect_timeout=2")
    with pytest.raises(StoreFailed, match="connect_timeout=2") as caught:
        storage.read("billing", [A])
    assert "secret" not in str(caught.value)


def test_postgresql_has_what_was_saved_on_its_disk_whatever_its_default(postgres: PostgresServer) -> None:
    plain = postgres.url()
    off = f"{plain}{'&' if '?' in plain else '?'}options=-csynchronous_commit%3Doff"
    storage = SqlOffsets(off)
    try:
        assert storage._run_transaction(lambda connection: connection.scalar(text("SHOW synchronous_commit"))) == "on"
    finally:
        storage.close()
