"""Housekeeping: old rows go, unless the broker has not ended their transaction."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import create_async_engine

import tfmq
import tfmq.aio
from tests.sql.helpers import put
from tfmq.errors import BadRequest
from tfmq.sql import database as rows
from tfmq.sql.database import COMMITTED, TABLE


@pytest.mark.long
def test_rows_that_the_broker_may_still_ask_for_stay(engine: Engine, tmp_path: Path) -> None:
    old = rows.utc_now() - timedelta(days=30)
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        in_doubt = producer.begin("prepared")
        in_doubt.send("orders", "1")
        in_doubt.prepare()
        is_open = producer.begin("open", timeout=100)
        is_open.send("orders", "2")
        with engine.begin() as connection:
            for xid in ("prepared", "open", "over"):
                put(connection, xid, COMMITTED, old)
            put(connection, "young", COMMITTED, rows.utc_now() - timedelta(days=6))
        with tfmq.Admin(servers) as admin:
            assert tfmq.sql.prune(engine, admin) == 1
            in_doubt.commit()
            is_open.rollback()
            assert tfmq.sql.prune(engine, admin) == 2
            assert tfmq.sql.prune(engine, admin) == 0
    with engine.connect() as connection:
        assert rows.read_state(connection, TABLE, "young") == COMMITTED


def test_without_the_broker_nothing_goes(sqlite_engine: Engine) -> None:
    with sqlite_engine.begin() as connection:
        put(connection, "x", COMMITTED, rows.utc_now() - timedelta(days=30))
    with tfmq.Admin("127.0.0.1:1", timeout=0.2) as admin, pytest.raises(tfmq.TfmqError):
        tfmq.sql.prune(sqlite_engine, admin)
    with pytest.raises(BadRequest):
        tfmq.sql.prune(sqlite_engine)
    with sqlite_engine.connect() as connection:
        assert rows.read_state(connection, TABLE, "x") == COMMITTED


def test_an_asyncio_program_prunes_with_its_own_engine_and_admin(
    sqlite_engine: Engine, tmp_path: Path
) -> None:
    with sqlite_engine.begin() as connection:
        put(connection, "open", COMMITTED, rows.utc_now() - timedelta(days=30))
        put(connection, "over", COMMITTED, rows.utc_now() - timedelta(days=30))

    async def program(servers: str) -> None:
        engine = create_async_engine(sqlite_engine.url.set(drivername="sqlite+aiosqlite"))
        async with tfmq.aio.Producer(servers) as producer, tfmq.aio.Admin(servers) as admin:
            is_open = await producer.begin("open", timeout=100)
            await is_open.send("orders", "1")
            assert await tfmq.aio.sql.prune(engine, admin) == 1
            await is_open.rollback()
            assert await tfmq.aio.sql.prune(engine, admin) == 1
        await engine.dispose()

    with tfmq.local_server(tmp_path / "data") as servers:
        asyncio.run(program(servers))


def test_wrong_objects_are_refused_in_a_sentence(sqlite_engine: Engine) -> None:
    asynchronous = create_async_engine("sqlite+aiosqlite://")
    admin, asyncio_admin = tfmq.Admin("127.0.0.1:1"), tfmq.aio.Admin("127.0.0.1:1")
    for engine, given, sentence in (
        (admin, admin, "takes an engine of SQLAlchemy first"),
        (sqlite_engine, asyncio_admin, "takes a tfmq.Admin for each broker"),
        (sqlite_engine, sqlite_engine, "takes a tfmq.Admin for each broker"),
        (asynchronous, admin, "takes a tfmq.aio.Admin for each broker"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            tfmq.sql.prune(engine, given)  # type: ignore[call-overload]
    for wrong in ("x", asynchronous, admin):
        with pytest.raises(BadRequest, match=r"await connection\.run_sync\(tfmq\.sql\.create_table\)"):
            tfmq.sql.create_table(wrong)  # type: ignore[arg-type]


def test_some_time_is_kept(sqlite_engine: Engine) -> None:
    with pytest.raises(BadRequest, match="older"):
        tfmq.sql.prune(sqlite_engine, older_than=timedelta(0))
