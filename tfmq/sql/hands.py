"""The two ways of doing the steps: at once, and by awaiting them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, Engine

Result = TypeVar("Result")


class BlockingHands:
    """With an engine whose driver blocks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def on_connection(self, work: Callable[[Connection], Result]) -> Result:
        """Do `work` with a connection of its own."""
        with self._engine.connect() as connection:
            return work(connection)


class AsyncHands:
    """With an engine whose driver is awaited."""

    def __init__(self, engine: Engine) -> None:
        from sqlalchemy.ext.asyncio import AsyncEngine  # who has such an engine has what this needs

        self._engine = AsyncEngine(engine)

    async def on_connection(self, work: Callable[[Connection], Result]) -> Result:
        """Do `work` with a connection of its own."""
        async with self._engine.connect() as connection:
            return await connection.run_sync(work)


def hands_for(engine: Engine) -> Any:
    """Those that fit the engine's driver."""
    return AsyncHands(engine) if engine.dialect.is_async else BlockingHands(engine)
