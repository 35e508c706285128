"""Both ways of doing a step give what it gives, on a connection that is given back."""

import asyncio
import inspect

import pytest
from sqlalchemy.engine import Connection, Engine

from tests.sql.test_course import async_engine_of
from tfmq.sql.commit_protocol import AsyncExecutor, BlockingExecutor, executor_for


def two(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT 2").scalar() or 0)


def test_a_blocking_engine_is_used_at_once(engine: Engine) -> None:
    hands = executor_for(engine)
    assert isinstance(hands, BlockingExecutor)
    assert hands.on_connection(two) == 2


def test_an_asyncio_engine_is_awaited(engine: Engine) -> None:
    async def use() -> int:
        awaited = async_engine_of(engine)
        hands = executor_for(awaited.sync_engine)
        assert isinstance(hands, AsyncExecutor)
        made = hands.on_connection(two)
        assert inspect.isawaitable(made)
        found = await made
        await awaited.dispose()
        return found

    assert asyncio.run(use()) == 2


def test_the_connection_goes_back(sqlite_engine: Engine) -> None:
    kept: list[Connection] = []
    BlockingExecutor(sqlite_engine).on_connection(kept.append)
    assert kept[0].closed

    def fails(connection: Connection) -> None:
        kept.append(connection)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BlockingExecutor(sqlite_engine).on_connection(fails)
    assert kept[1].closed
