"""The name of a database: the same for all who use it, and without secrets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import MetaData, create_engine, inspect, select
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import IntegrityError

from tests.sql.conftest import made
from tests.sql.helpers import identity, put
from tfmq.errors import NotAllowed
from tfmq.limits import is_valid_name
from tfmq.sql import database
from tfmq.sql import database as rows
from tfmq.sql.database import ABORTED, COMMITTED, TABLE, create_table, transaction_table
from tfmq.sql.in_doubt import prepared_name
from tools.rigs.postgresql import PostgresServer

SERVER = "postgresql+psycopg://shop:secret@db.example:5432/shop"


def test_user_password_and_options_are_no_part_of_it() -> None:
    other = "postgresql+psycopg://admin:other@db.example:5432/shop?sslpassword=hidden&application_name=x"
    assert database.database_address(make_url(SERVER)) == database.database_address(make_url(other))
    for word in ("secret", "hidden", "admin"):
        assert word not in database.database_address(make_url(other))


@pytest.mark.parametrize(
    "other",
    [
        "postgresql+psycopg://shop@db.example:5432/stock",
        "postgresql+psycopg://shop@db2.example:5432/shop",
        "postgresql+psycopg://shop@db.example:5433/shop",
        "postgresql+psycopg://shop@/shop?host=/run/other",
        "mysql+pymysql://shop@db.example:5432/shop",
    ],
)
def test_another_database_has_another_name(other: str) -> None:
    assert database.address_digest(make_url(SERVER)) != database.address_digest(make_url(other))


def test_blocking_and_asyncio_drivers_lead_to_the_same_database() -> None:
    assert database.address_digest(make_url("sqlite:///shop.db")) == database.address_digest(
        make_url("sqlite+aiosqlite:///shop.db")
    )


def test_a_file_is_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert database.database_address(make_url("sqlite:///shop.db")) == database.database_address(
        make_url(f"sqlite:///{tmp_path}/shop.db")
    )


def test_memory_belongs_to_one_process() -> None:
    for url in ("sqlite://", "sqlite:///:memory:", "sqlite:///file:shop?mode=memory&uri=true"):
        assert database.is_in_memory(make_url(url))
        assert database.database_address(make_url(url)).startswith("sqlite:memory:")
    for url in (SERVER, "sqlite:///shop.db", "postgresql+psycopg://"):
        assert not database.is_in_memory(make_url(url))


@pytest.mark.parametrize(
    "url", [SERVER, "sqlite:////var/lib/my shop.db", "sqlite://", "postgresql+psycopg:///?host=/x"]
)
def test_its_group_has_a_name_that_the_broker_takes(url: str) -> None:
    name = database.default_group_name(make_url(url))
    assert is_valid_name(name)
    assert len(name) < 100


def test_a_transaction_bears_the_name_of_its_table() -> None:
    here, there = make_url(SERVER), make_url("sqlite:///shop.db")
    xid = database.new_xid(here, "identity")
    assert xid.startswith(database.xid_prefix(here, "identity"))
    assert xid != database.new_xid(here, "identity")
    for other in (database.xid_prefix(there, "identity"), database.xid_prefix(here, "another")):
        assert not xid.startswith(other)


def test_a_name_fits_where_postgresql_keeps_it() -> None:
    assert len(prepared_name(database.new_xid(make_url(SERVER), "identity"), "0" * 32)) < 200


@pytest.mark.parametrize(
    ("url", "can"), [("postgresql+psycopg://", True), ("sqlite://", False), ("sqlite+aiosqlite://", False)]
)
def test_who_prepares(url: str, can: bool) -> None:
    assert database.has_two_phase_driver(create_engine(url)) is can


# What is learned of a database: once, and only what is so.


def learned(engine: Engine) -> database.DatabaseCapabilities:
    with engine.connect() as connection:
        return database.read_capabilities(connection, TABLE)


def test_sqlite_prepares_nothing(sqlite_engine: Engine) -> None:
    found = learned(sqlite_engine)
    assert not found.two_phase
    assert "sqlite" in found.why_not


def test_postgresql_prepares_where_its_administrator_lets_it(
    postgres_engine: Engine, plain_postgres: PostgresServer
) -> None:
    assert learned(postgres_engine).two_phase
    plain = made(plain_postgres.url())
    assert not learned(plain).two_phase
    assert "max_prepared_transactions" in learned(plain).why_not
    plain.dispose()


def test_a_commit_that_answers_early_is_seen(postgres_engine: Engine) -> None:
    eager = create_engine(postgres_engine.url, connect_args={"options": "-c synchronous_commit=off"})
    assert learned(eager).commits_early
    eager.dispose()


def test_a_table_of_the_users_migrations_gets_its_identity(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(TABLE.delete())
    assert learned(engine).identity == identity(engine)


def test_what_is_known_is_not_asked_again(engine: Engine) -> None:
    assert database.cached_capabilities(engine, TABLE) is None
    found = learned(engine)
    assert database.cached_capabilities(engine, TABLE) == found
    database.discard_capabilities(engine)
    assert database.cached_capabilities(engine, TABLE) is None


def test_what_is_known_of_one_table_is_not_said_of_another(engine: Engine) -> None:
    other = transaction_table(MetaData(), name="other_transaction")
    found = learned(engine)
    assert database.cached_capabilities(engine, other) is None
    with engine.connect() as connection, pytest.raises(NotAllowed, match="other_transaction"):
        database.read_capabilities(connection, other)
    create_table(engine, other)
    try:
        with engine.connect() as connection:
            assert database.read_capabilities(connection, other).identity != found.identity
        assert database.cached_capabilities(engine, other) != database.cached_capabilities(engine, TABLE) == found
    finally:
        other.drop(engine)


def test_a_missing_table_is_asked_about_again(engine: Engine) -> None:
    TABLE.drop(engine)
    for _ in range(2):
        with pytest.raises(NotAllowed, match="create_table"):
            learned(engine)
    create_table(engine)
    learned(engine)


# The table whose rows decide: one row a name, looked up, pruned.

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def written(engine: Engine, xid: str, time: datetime = NOW) -> None:
    with engine.begin() as connection:
        put(connection, xid, COMMITTED, time)


def test_a_row_says_how_it_ended(engine: Engine) -> None:
    written(engine, "a")
    with engine.connect() as connection:
        assert rows.read_state(connection, TABLE, "a") == "committed"
        assert rows.read_state(connection, TABLE, "b") is None


def test_a_name_is_decided_once(engine: Engine) -> None:
    written(engine, "a")
    with pytest.raises(IntegrityError), engine.begin() as connection:
        put(connection, "a", ABORTED)


def test_it_is_made_where_it_is_missing(engine: Engine) -> None:
    TABLE.drop(engine)
    with engine.connect() as connection:
        assert not rows.table_exists(connection, TABLE)
    rows.create_table(engine)
    rows.create_table(engine)
    with engine.connect() as connection:
        assert rows.table_exists(connection, TABLE)


def test_it_joins_the_tables_that_migrations_look_at(engine: Engine) -> None:
    metadata = MetaData()
    mine = rows.transaction_table(metadata, name="shop_transaction")
    metadata.create_all(engine)
    rows.ensure_identity(engine, mine)
    columns = {each["name"] for each in inspect(engine).get_columns("shop_transaction")}
    assert columns == {"xid", "state", "time"}
    with engine.begin() as connection:
        put(connection, "a", COMMITTED, NOW, mine)
        assert rows.read_state(connection, mine, "a") == "committed"
    mine.drop(engine)


def test_it_has_an_identity_that_stays(engine: Engine) -> None:
    first = identity(engine)
    rows.create_table(engine)
    with engine.begin() as connection:
        rows.create_table(connection)
    rows.ensure_identity(engine, TABLE)
    assert identity(engine) == first
    TABLE.drop(engine)
    rows.create_table(engine)
    assert identity(engine) != first


def test_of_many_who_identify_it_one_does(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(TABLE.delete())
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(rows.ensure_identity, engine, TABLE) for _ in range(8)]:
            done.result(30)
    with engine.connect() as connection:
        assert len(connection.scalars(select(TABLE.c.state)).all()) == 1


def test_who_comes_second_to_identify_it_leaves_the_first_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = identity(engine)
    monkeypatch.setattr(rows, "read_identity", lambda connection, table: None)
    rows.ensure_identity(engine, TABLE)
    monkeypatch.undo()
    assert identity(engine) == first


def test_nothing_is_written_into_a_table_of_another_identity(engine: Engine) -> None:
    with engine.begin() as connection:
        assert not rows.insert_row(connection, TABLE, "another", "a", COMMITTED, NOW)
        assert rows.read_state(connection, TABLE, "a") is None


def test_the_longest_name_fits(engine: Engine) -> None:
    written(engine, "x" * 249)


def test_old_rows_go_and_those_in_doubt_stay(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_DELETE", 3)
    for number in range(10):
        written(engine, f"old-{number}", NOW - timedelta(days=8))
    written(engine, "young", NOW - timedelta(days=6))
    with engine.connect() as connection:
        gone = rows.delete_rows_before(connection, TABLE, NOW - timedelta(days=7), {"old-3", "old-9"})
        left = list(connection.scalars(select(TABLE.c.xid).order_by(TABLE.c.xid)))
    assert (gone, left) == (8, ["database", "old-3", "old-9", "young"])


def test_times_compare_in_every_time_zone(sqlite_engine: Engine) -> None:
    """SQLite keeps no zone: what is written and what is compared must both be UTC."""
    written(sqlite_engine, "now", rows.utc_now())
    with sqlite_engine.connect() as connection:
        for minutes, gone in ((-1, 0), (1, 1)):
            before = rows.utc_now() + timedelta(minutes=minutes)
            assert rows.delete_rows_before(connection, TABLE, before, ()) == gone


def test_the_clock_returns_utc() -> None:
    assert rows.utc_now().tzinfo is UTC


def test_making_it_needs_no_rights_where_it_is_there(sqlite_engine: Engine) -> None:
    read_only = create_engine(f"sqlite:///file:{sqlite_engine.url.database}?mode=ro&uri=true")
    rows.create_table(read_only)
    read_only.dispose()
