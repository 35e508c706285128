"""The table in the user's database whose rows decide.

A row says how a transaction ended: `xid` (its name, the primary key), `state` ("committed" or "aborted") and `time`
(UTC). The owner writes "committed" in the very transaction that holds the user's changes, so the row is there exactly
when they are. Who finds no row and must know writes "aborted" under the same key: then the owner's commit fails. The
key is what makes the two exclude each other, in every database.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime

from sqlalchemy import Column, DateTime, MetaData, String, Table, delete, insert, inspect, select
from sqlalchemy.engine import Connection, Engine

from tfmq.limits import XID_BYTES

NAME = "tfmq_transaction"
COMMITTED, ABORTED = "committed", "aborted"
STATE_CHARACTERS = 16
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
    )


TABLE = transaction_table(MetaData())


def create_table(bind: Engine | Connection, table: Table = TABLE) -> None:
    """Create the table where it is not there yet. With an asyncio engine: `await connection.run_sync(create_table)`."""
    table.create(bind, checkfirst=True)


def exists(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)


def write(connection: Connection, table: Table, xid: str, state: str, time: datetime) -> None:
    """Write the row. Raises `sqlalchemy.exc.IntegrityError` when there is one."""
    connection.execute(insert(table).values(xid=xid, state=state, time=time))


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
        old = select(table.c.xid).where(table.c.xid > last, table.c.time < before)
        with engine.connect() as connection:
            page = connection.scalars(old.order_by(table.c.xid).limit(PRUNED_ROWS_AT_ONCE)).all()
        if not page:
            return
        last = page[-1]
        yield page
