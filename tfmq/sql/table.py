"""The table in the user's database whose rows decide.

A row says how a transaction ended: `xid` (its name, the primary key), `state` ("committed" or "aborted") and `time`
(UTC). The owner writes "committed" in the very transaction that holds the user's changes, so the row is there exactly
when they are. Who finds no row and must know writes "aborted" under the same key: then the owner's commit fails. The
key is what makes the two exclude each other, in every database.

One more row, "database", gives the table an identity. It is part of every xid, and no row is written where it is
another one: a database of the same address on another machine, or another schema, decides nothing that is not its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime

from sqlalchemy import Column, DateTime, MetaData, String, Table, delete, insert, inspect, literal, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import IntegrityError

from tfmq.limits import XID_BYTES

NAME = "tfmq_transaction"
COMMITTED, ABORTED = "committed", "aborted"
STATE_CHARACTERS = 16
IDENTITY = "database"
"""The xid of the row whose state is the table's identity, `STATE_CHARACTERS` random hexadecimal digits."""
PRUNED_ROWS_AT_ONCE = 500
"""So many rows are deleted in one transaction: nobody waits long for the locks, and every database takes so many
parameters (SQLite of old: 999).
"""

Clock = Callable[[], datetime]


def now() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


def transaction_table(metadata: MetaData, *, name: str = NAME, schema: str | None = None) -> Table:
    """The table, added to `metadata`: for Alembic, or for a name or schema of your own, which then goes to
    `tfmq.sql.transaction(..., table=)` and `tfmq.sql.check(..., table=)`.
    """
    return Table(
        name,
        metadata,
        Column("xid", String(int(XID_BYTES)), primary_key=True),
        Column("state", String(STATE_CHARACTERS), nullable=False),
        Column("time", DateTime(timezone=True), nullable=False),
        schema=schema,
        keep_existing=True,
    )


TABLE = transaction_table(MetaData())


def create_table(bind: Engine | Connection, table: Table = TABLE) -> None:
    """Create the table where it is not there yet. With an asyncio engine: `await connection.run_sync(create_table)`."""
    table.create(bind, checkfirst=True)
    if isinstance(bind, Engine):
        ensure_identity(bind, table)
    elif identity_of(bind, table) is None:
        _identify(bind, table)


def exists(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)


def identity_of(connection: Connection, table: Table) -> str | None:
    """The table's identity; None where it has none yet, because something else than `create_table` made it."""
    return state_of(connection, table, IDENTITY)


def ensure_identity(engine: Engine, table: Table) -> None:
    """Give the table an identity unless it has one; of several who do so at once, one does."""
    with engine.connect() as connection:
        if identity_of(connection, table) is not None:
            return
    try:
        with engine.begin() as connection:
            _identify(connection, table)
    except IntegrityError:
        return


def _identify(connection: Connection, table: Table) -> None:
    identity = os.urandom(STATE_CHARACTERS // 2).hex()
    connection.execute(insert(table).values(xid=IDENTITY, state=identity, time=now()))


def write(connection: Connection, table: Table, identity: str, xid: str, state: str, time: datetime) -> bool:
    """Write the row; False: the table that is found here has another identity, and nothing was written.

    Raises `sqlalchemy.exc.IntegrityError` when there is one of that xid.
    """
    values = select(literal(xid), literal(state), literal(time, DateTime(timezone=True))).select_from(table)
    here = values.where(table.c.xid == IDENTITY, table.c.state == identity)
    statement = insert(table).from_select(["xid", "state", "time"], here)
    done = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return done.rowcount == 1


def state_of(connection: Connection, table: Table, xid: str) -> str | None:
    """ "committed", "aborted", or None without a row."""
    state = connection.scalar(select(table.c.state).where(table.c.xid == xid))
    return None if state is None else str(state)


def delete_before(engine: Engine, table: Table, before: datetime, keep: Collection[str]) -> int:
    """Delete the rows that are older than `before`, except those of `keep`; how many went. In short transactions."""
    gone = 0
    for page in _pages(engine, table, before):
        xids = [xid for xid in page if xid not in keep]
        with engine.begin() as connection:
            connection.execute(delete(table).where(table.c.xid.in_(xids)))
        gone += len(xids)
    return gone


def _pages(engine: Engine, table: Table, before: datetime) -> Iterator[Sequence[str]]:
    """By key, each page from behind the one before: what is kept is passed over once."""
    last = ""
    while True:
        old = select(table.c.xid).where(table.c.xid > last, table.c.time < before, table.c.xid != IDENTITY)
        with engine.connect() as connection:
            page = connection.scalars(old.order_by(table.c.xid).limit(PRUNED_ROWS_AT_ONCE)).all()
        if not page:
            return
        last = page[-1]
        yield page
