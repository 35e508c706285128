"""Which database it is: the name by which those who use the same one find each other.

The name is made of the address without user, password and options, so that it may be shown and logged. It is in the
name of the group of producers that have none of their own, and, with the identity of the table (see `table`), in every
xid: only who can look into the table that decides a transaction answers for it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Column, DateTime, MetaData, String, Table, delete, insert, inspect, literal, select
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import IntegrityError

from tfmq.errors import NotAllowed
from tfmq.limits import XID_BYTES

PREFIX = "tfmq.sql"
DIGEST_CHARACTERS = 16
RANDOM_BYTES = 16
GROUP_NAME_CHARACTERS = 60
"""Of the database's name in that of a group: to be recognised; the digest tells them apart."""

ADDRESS_OPTIONS = ("host", "port", "service", "dbname")
"""What an address may say behind its question mark about where the database is; all else stays out."""

TWO_PHASE_DRIVERS = frozenset({"psycopg", "psycopg2"})
"""Drivers of PostgreSQL whose two-phase commit SQLAlchemy steers."""


def address(url: URL) -> str:
    """Where it is, without who asks: equal for the same database."""
    name = url.database or ""
    if is_in_memory(url):
        return f"sqlite:memory:{os.getpid()}"
    if url.get_backend_name() == "sqlite":
        return f"sqlite:{Path(name.removeprefix('file:')).resolve()}"
    options = [f"{key}={url.query[key]}" for key in ADDRESS_OPTIONS if key in url.query]
    return f"{url.get_backend_name()}:{url.host or ''}:{url.port or ''}:{name}:{':'.join(options)}"


def is_in_memory(url: URL) -> bool:
    """Whether it is an SQLite that lives in this process only."""
    in_memory = url.database in (None, "", ":memory:") or url.query.get("mode") == "memory"
    return url.get_backend_name() == "sqlite" and in_memory


def digest(url: URL) -> str:
    """Some characters that stand for the address."""
    return _hashed(address(url))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def group_name(url: URL) -> str:
    """The group of producers that use this database and have no group of their own."""
    name = (
        Path(url.database or "memory").stem
        if url.get_backend_name() == "sqlite"
        else url.database or "database"
    )
    return f"sql-{re.sub('[^A-Za-z0-9_-]', '-', name)[:GROUP_NAME_CHARACTERS]}-{digest(url)}"


def mark(url: URL, identity: str) -> str:
    """What the xids of a table begin with: its database's address and its own identity are in it."""
    return f"{PREFIX}.{_hashed(f'{address(url)}:{identity}')}."


def new_xid(url: URL, identity: str) -> str:
    """A name for a transaction that was never used before; PostgreSQL shows it in pg_prepared_xacts, too."""
    return mark(url, identity) + os.urandom(RANDOM_BYTES).hex()


def has_two_phase_driver(engine: Engine) -> bool:
    """Whether SQLAlchemy can prepare a transaction of this database, if the database lets it."""
    return engine.dialect.name == "postgresql" and engine.dialect.driver in TWO_PHASE_DRIVERS


# What a database can do, asked once for each engine.


class Facts(NamedTuple):
    """`identity`: that of the table · `two_phase`: it prepares transactions; `why_not`: the sentence for whom that is a
    surprise · `commits_early`: its commit answers before it is on the disk, unless it is told otherwise.
    """

    identity: str = ""
    two_phase: bool = False
    why_not: str = ""
    commits_early: bool = False


_known: WeakKeyDictionary[Engine, dict[str, Facts]] = WeakKeyDictionary()


def known(engine: Engine, table: Table) -> Facts | None:
    """What was learned before."""
    return _known.get(engine, {}).get(table.fullname)


def forget(engine: Engine) -> None:
    """Ask again next time: the database may have been started with other settings."""
    _known.pop(engine, None)


def learn(connection: Connection, table: Table) -> Facts:
    """Ask the database. Raises `NotAllowed` where the table is missing, which is asked again next time.

    A table that was not made by `create_table` gets its identity here, in a transaction of its own.
    """
    if not exists(connection, table):
        raise NotAllowed(
            f"There is no table {table.fullname} in the database: call tfmq.sql.create_table(engine) once, or let your"
            " migrations create it (docs/database-transactions.md; tfmq --docs prints the folder)."
        )
    identity = identity_of(connection, table)
    if identity is None:
        ensure_identity(connection.engine, table)
        identity = identity_of(connection, table)
    facts = Facts(identity or "", *_prepares(connection), _commits_early(connection))
    _known.setdefault(connection.engine, {})[table.fullname] = facts
    return facts


def _prepares(connection: Connection) -> tuple[bool, str]:
    if connection.dialect.name != "postgresql":
        return (
            False,
            f"Two phases are had with PostgreSQL, not with {connection.dialect.name}: the row decides alone.",
        )
    if not has_two_phase_driver(connection.engine):
        return False, f"The driver {connection.dialect.driver} prepares no transactions: use psycopg."
    if _setting(connection, "max_prepared_transactions") == "0":
        return False, (
            "PostgreSQL prepares no transactions, because its max_prepared_transactions is 0: raise it (and restart"
            " it), or pass two_phase=False, where the row decides alone."
        )
    return True, ""


def _commits_early(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql" and _setting(connection, "synchronous_commit") == "off"


def _setting(connection: Connection, name: str) -> str:
    return str(connection.exec_driver_sql(f"SHOW {name}").scalar())


# The table in the user's database whose rows decide.
#
# A row says how a transaction ended: `xid` (its name, the primary key), `state` ("committed" or "aborted") and `time`
# (UTC). The owner writes "committed" in the very transaction that holds the user's changes, so the row is there exactly
# when they are. Who finds no row and must know writes "aborted" under the same key: then the owner's commit fails. The
# key is what makes the two exclude each other, in every database.
#
# One more row, "database", gives the table an identity. It is part of every xid, and no row is written where it is
# another one: a database of the same address on another machine, or another schema, decides nothing that is not its
# own.

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
