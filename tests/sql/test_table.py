"""The table whose rows decide: one row a name, looked up, pruned."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import MetaData, create_engine, inspect, select
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError

from tests.sql.helpers import identity, put
from tfmq.sql import database as rows
from tfmq.sql.database import ABORTED, COMMITTED, TABLE

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


def test_who_comes_second_to_identify_it_leaves_the_first_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_clock_tells_utc() -> None:
    assert rows.utc_now().tzinfo is UTC


def test_making_it_needs_no_rights_where_it_is_there(sqlite_engine: Engine) -> None:
    read_only = create_engine(f"sqlite:///file:{sqlite_engine.url.database}?mode=ro&uri=true")
    rows.create_table(read_only)
    read_only.dispose()
