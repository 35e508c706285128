"""A database as a store: durable commits, several brokers in one table, databases that refuse or fail."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from tfmq.replication.errors import ReplicationError, StoreRefused, StoreUnavailable
from tfmq.replication.store import Store
from tfmq.replication.stores import sql_store
from tfmq.replication.stores.open_store import open_store
from tfmq.replication.stores.sql_store import SqlStore
from tools.rigs.postgresql import PostgresServer

CALLS: list[Callable[[Store], object]] = [
    lambda store: store.put_new("entries/1", b"hunter2"),
    lambda store: store.get("entries/1"),
    lambda store: list(store.list("entries/")),
    lambda store: store.delete("entries/1"),
]


def said_by(url: str, kind: type[ReplicationError]) -> str:
    """Return what each call says, which is the same for all."""
    store = open_store(url)
    texts = set()
    for call in CALLS:
        with pytest.raises(kind) as caught:
            call(store)
        texts.add(str(caught.value))
        assert "\n" not in str(caught.value) and "hunter2" not in str(caught.value)
    store.close()
    (only,) = texts
    assert store.name in only and only.endswith(".")
    return only


def server_setting(store: SqlStore, name: str) -> object:
    with store._engine.connect() as connection:
        return connection.scalar(text(name))


def test_commits_are_durable_where_the_default_is_not(postgres: PostgresServer, tmp_path: Path) -> None:
    engine = create_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("ALTER ROLE tfmq SET synchronous_commit = off"))
        store = SqlStore(postgres.url())
        try:
            assert server_setting(store, "SHOW synchronous_commit") == "on"
            assert server_setting(store, "SHOW statement_timeout") == "30s"
            connection.execute(text("ALTER ROLE tfmq SET synchronous_commit = remote_apply"))
            store.close()
            assert server_setting(store, "SHOW synchronous_commit") == "remote_apply", "what is stronger stays"
        finally:
            store.close()
            connection.execute(text("ALTER ROLE tfmq RESET synchronous_commit"))
    engine.dispose()
    store = SqlStore(f"sqlite:///{tmp_path / 'objects.db'}")
    assert server_setting(store, "PRAGMA synchronous") == 3 and server_setting(store, "PRAGMA journal_mode") == "wal"
    store.close()


def test_brokers_with_different_prefixes_share_a_table(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'objects.db'}"
    stores = [open_store(each) for each in (url, f"{url}?prefix=orders", f"{url}?prefix=orders/eu")]
    assert [store.name for store in stores] == [url, f"{url}?prefix=orders", f"{url}?prefix=orders/eu"]
    for number, store in enumerate(stores):
        assert store.put_new("replica", b"%d" % number) and store.put_new("terms/1", b"")
    assert [store.get("replica") for store in stores] == [b"0", b"1", b"2"]
    assert [each.key for each in stores[2].list("")] == ["replica", "terms/1"]
    assert [each.key for each in stores[2].list("", "replica")] == ["terms/1"]
    with sqlite3.connect(tmp_path / "objects.db") as connection:
        assert connection.execute("SELECT key, size_bytes FROM tfmq_objects ORDER BY key").fetchone() == (
            "orders/eu/replica",
            1,
        )
    connection.close()
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("sqlite://", "in memory, which no other server sees"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///file:/tmp/m?mode=memory&cache=shared&uri=true", "in memory"),
        ("sqlite:///file:/tmp/x.db", "does not name the whole path"),
        ("sqlite:///x.db", "does not name the whole path, .*: write sqlite:////PATH, with four slashes"),
        ("sqlite://x.db", "does not name the whole path"),
        ("sqlite:////tmp/x.db?prefx=a", "knows no parameter 'prefx', only prefix, "),
        ("nosuch://me:hunter2@host/db", r"nosuch://me:\*\*\*@host/db is no store: SQLAlchemy knows no database"),
        ("http://host/db", "Write s3://BUCKET/PREFIX, .* sqlite:////PATH"),
        ("postgresql+asyncpg://me:hunter2@host/db", "is for asyncio|is not installed"),
        ("sqlite+aiosqlite:////tmp/x.db", "is for asyncio"),
        ("postgresql+pg8000://me:hunter2@host/db", r"is not installed .*pip install \"tfmq\[postgresql\]\""),
        ("postgresql+psycopg://me:hunter2@host:port/db", "is no URL that SQLAlchemy can read"),
        ("sqlite:////tmp/x.db?prefix=a_b", "The prefix of sqlite:////tmp/x.db is not one of at most 54 ASCII letters"),
        (f"sqlite:////tmp/x.db?prefix={'a' * 55}", "is not one of at most 54 ASCII letters"),
        ("sqlite:////tmp/x.db?prefix=a&prefix=b", "is not one of at most 54 ASCII letters"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str, sentence: str) -> None:
    with pytest.raises(StoreRefused, match=sentence) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_no_server(tmp_path: Path) -> None:
    said = said_by(f"postgresql+psycopg://me:hunter2@/db?host={tmp_path}", StoreUnavailable)
    assert "does not answer: " in said and "No such file or directory" in said
    said = said_by("postgresql+psycopg://me:hunter2@127.0.0.1:1/db", StoreUnavailable)
    assert "postgresql+psycopg://me:***@127.0.0.1:1/db does not answer: " in said and "refused" in said


def test_no_database_and_no_user(postgres: PostgresServer) -> None:
    assert 'database "nowhere" does not exist. It must exist and' in said_by(postgres.url("nowhere"), StoreRefused)
    assert 'role "nobody" does not exist' in said_by(postgres.url().replace("tfmq@", "nobody@"), StoreRefused)


def test_no_rights(postgres: PostgresServer) -> None:
    engine = create_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    SqlStore(postgres.url()).get("replica")  # makes the table
    with engine.connect() as connection:
        connection.execute(text("CREATE ROLE reader LOGIN"))
        try:
            said = said_by(postgres.url().replace("tfmq@", "reader@"), StoreRefused)
            assert "permission denied for table tfmq_objects. It must exist and permit" in said
        finally:
            connection.execute(text("DROP ROLE reader"))
    engine.dispose()


def test_a_server_that_stands_still_is_left_in_time(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore(f"{postgres.url()}&prefix=frozen")
    assert store.put_new("entries/1", b"1")
    server = server_setting(store, "SELECT pg_backend_pid()")
    assert isinstance(server, int)
    monkeypatch.setattr(sql_store, "CALL_SECONDS", 0.5)
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable, match=r"does not answer: nothing came within 0\.5 s\.$"):
            store.put_new("entries/2", b"2")
    finally:
        os.kill(server, signal.SIGCONT)
    monkeypatch.setattr(sql_store, "CALL_SECONDS", 5.0)
    # The server may come to it still: the caller finds out by a get.
    assert store.put_new("entries/2", b"2") or store.get("entries/2") == b"2"
    server = server_setting(store, "SELECT pg_backend_pid()")
    monkeypatch.setattr(sql_store, "CALL_SECONDS", 1.0)
    store.get("entries/1")
    time.sleep(1.2)
    assert server_setting(store, "SELECT pg_backend_pid()") == server, "a connection without a call is left alone"
    store.close()


def test_a_full_postgresql_is_waited_for(postgres: PostgresServer) -> None:
    engine = create_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    store = open_store(f"{postgres.url()}&prefix=full")
    assert store.put_new("entries/1", b"hunter2")
    with engine.connect() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION is_full() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE 'no space' USING ERRCODE = 'disk_full'; END $$"
            )
        )
        connection.execute(
            text("CREATE TRIGGER is_full BEFORE INSERT ON tfmq_objects FOR EACH ROW EXECUTE FUNCTION is_full()")
        )
        try:
            with pytest.raises(StoreUnavailable, match=r"is full: no space\b") as caught:
                store.put_new("entries/2", b"hunter2")
            assert "hunter2" not in str(caught.value)
        finally:
            connection.execute(text("DROP FUNCTION is_full CASCADE"))
    assert store.get("entries/2") is None and store.put_new("entries/2", b"")
    store.close()
    engine.dispose()


def test_a_database_that_is_restarted_is_used_again(postgres: PostgresServer) -> None:
    store = open_store(f"{postgres.url()}&prefix=restarted")
    assert store.put_new("replica", b"1")
    postgres.stop()
    with pytest.raises(StoreUnavailable):
        store.get("replica")
    postgres.start()
    found = None
    for _ in range(3):  # each connection of the pool finds out
        try:
            found = store.get("replica")
            break
        except StoreUnavailable:
            continue
    assert found == b"1"
    store.close()


def test_an_sqlite_that_cannot_be_had(tmp_path: Path) -> None:
    said = said_by(f"sqlite:///{tmp_path / 'gone' / 'objects.db'}", StoreRefused)
    assert "unable to open database file. Its folder must exist" in said
    (tmp_path / "text.db").write_bytes(b"no database, but long enough" * 100)
    assert "file is not a database" in said_by(f"sqlite:///{tmp_path / 'text.db'}", StoreRefused)


def test_a_full_sqlite_is_waited_for(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path / 'objects.db'}")
    assert store.put_new("entries/1", b"1")
    pages = server_setting(store, "PRAGMA page_count")
    server_setting(store, f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreUnavailable, match=r"is full: database or disk is full\.$"):
        store.put_new("entries/2", bytes(1 << 20))
    server_setting(store, "PRAGMA max_page_count = 10000")
    assert store.get("entries/2") is None and store.put_new("entries/2", bytes(1 << 20))
    store.close()
