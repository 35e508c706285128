"""Verbs of the tests about rows: write one, name one."""

from datetime import datetime

from sqlalchemy import Table
from sqlalchemy.engine import Connection, Engine

from tfmq.sql import database as rows
from tfmq.sql.database import COMMITTED, PREFIX, TABLE, new_xid, xid_prefix


def put(
    connection: Connection, xid: str, state: str = COMMITTED, time: datetime | None = None, table: Table = TABLE
) -> None:
    """The row of `xid`, in the connection's transaction."""
    identity = rows.read_identity(connection, table)
    assert identity is not None
    assert rows.insert_row(connection, table, identity, xid, state, time or rows.utc_now())


def identity(engine: Engine, table: Table = TABLE) -> str:
    with engine.connect() as connection:
        found = rows.read_identity(connection, table)
    assert found is not None
    return found


def some_xid(engine: Engine, table: Table = TABLE) -> str:
    """A new name for a transaction of this database."""
    return new_xid(engine.url, identity(engine, table))


def named(engine: Engine, short: str) -> str:
    """`short`, as a transaction of this database is named."""
    return short if short.startswith(PREFIX) else xid_prefix(engine.url, identity(engine)) + short
