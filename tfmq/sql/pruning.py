"""Deletion of old rows from the table of transactions: rows that no longer decide a transaction."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Table
from sqlalchemy.engine import Engine

from tfmq.admin import Admin
from tfmq.errors import BadRequest
from tfmq.sql import database as rows
from tfmq.transaction import states

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tfmq.aio import Admin as AsyncAdmin

DEFAULT_RETENTION = timedelta(days=7)
"""Default age from which rows are deleted. The broker remembers outcomes for the same time."""

UNFINISHED_STATES = tuple(
    state.value for state in states.State if state not in states.ENDED_STATES | states.HEURISTIC_STATES
)


@overload
def prune(
    engine: Engine, *admins: Admin, older_than: timedelta = ..., table: Table = ..., clock: rows.Clock = ...
) -> int: ...


@overload
def prune(
    engine: AsyncEngine, *admins: AsyncAdmin, older_than: timedelta = ..., table: Table = ..., clock: rows.Clock = ...
) -> Coroutine[Any, Any, int]: ...


def prune(
    engine: Any,
    *admins: Any,
    older_than: timedelta = DEFAULT_RETENTION,
    table: Table = rows.TABLE,
    clock: rows.Clock = rows.utc_now,
) -> int | Coroutine[Any, Any, int]:
    """Delete rows older than `older_than` that no longer decide a transaction; return the number of deleted rows.

    Rows are needed until the broker has ended the transaction. Call this function once a day; it deletes in short
    transactions. With an `AsyncEngine` and a `tfmq.aio.Admin` for each broker, await the call.

    Args: `admins`: one for each broker that shares transactions with this database. Each broker is asked first for its
    unfinished transactions, whose rows are kept at any age.
    Raises: BadRequest for invalid arguments, ConnectionFailed if a broker cannot be reached, errors of SQLAlchemy.
    """
    if older_than <= timedelta(0):
        raise BadRequest(f"older_than must be positive, not {older_than}.")
    if not admins:
        raise BadRequest(
            "Pass an Admin of each broker that shares transactions with the database: it is queried first."
        )
    kind = sys.modules.get("sqlalchemy.ext.asyncio")
    is_async = kind is not None and isinstance(engine, kind.AsyncEngine)
    if not is_async and not isinstance(engine, Engine):
        raise BadRequest(f"prune takes an engine of SQLAlchemy first, not {engine!r}.")
    aio = sys.modules.get("tfmq.aio")
    kinds, name = ((aio.Admin,) if aio else (), "tfmq.aio.Admin") if is_async else ((Admin,), "tfmq.Admin")
    for admin in admins:
        if not isinstance(admin, kinds):
            raise BadRequest(f"With this engine prune takes a {name} for each broker, not {admin!r}.")
    before = clock() - older_than
    if is_async:
        return _prune_async(engine, admins, table, before)
    unfinished = {each.xid for admin in admins for each in admin.transactions(UNFINISHED_STATES)}
    with engine.connect() as connection:
        return rows.delete_rows_before(connection, table, before, unfinished)


async def _prune_async(engine: AsyncEngine, admins: Sequence[AsyncAdmin], table: Table, before: datetime) -> int:
    unfinished = {each.xid for admin in admins for each in await admin.transactions(UNFINISHED_STATES)}
    async with engine.connect() as connection:
        return await connection.run_sync(rows.delete_rows_before, table, before, unfinished)
