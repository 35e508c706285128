"""The user's database: its address, its capabilities, and the table whose rows decide transactions."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Column, DateTime, MetaData, String, Table, delete, insert, inspect, literal, select
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import IntegrityError

from tfmq.errors import BadRequest, NotAllowed
from tfmq.limits import XID_BYTES

PREFIX = "tfmq.sql"
DIGEST_CHARACTERS = 16
RANDOM_BYTES = 16
GROUP_NAME_CHARACTERS = 60
"""Maximum characters of the database's name in a group's name, for display; the digest after the name is unique."""

ADDRESS_OPTIONS = ("host", "port", "service", "dbname")
"""URL options that are part of the database's address."""

TWO_PHASE_DRIVERS = frozenset({"psycopg", "psycopg2"})
"""PostgreSQL drivers whose two-phase commit SQLAlchemy supports."""


def database_address(url: URL) -> str:
    """Return the address of the database, without user, password and other options; safe to log.

    Clients that connect to the same host, port and database name get the same address. The name of the default producer
    group contains a hash of the address. Every xid begins with a hash of the address and of the table's identity (see
    `IDENTITY_XID`), so that a client answers check-back only for transactions of tables to which it has access.
    """
    name = url.database or ""
    if is_in_memory(url):
        return f"sqlite:memory:{os.getpid()}"
    if url.get_backend_name() == "sqlite":
        return f"sqlite:{Path(name.removeprefix('file:')).resolve()}"
    options = [f"{key}={url.query[key]}" for key in ADDRESS_OPTIONS if key in url.query]
    return f"{url.get_backend_name()}:{url.host or ''}:{url.port or ''}:{name}:{':'.join(options)}"


def is_in_memory(url: URL) -> bool:
    in_memory = url.database in (None, "", ":memory:") or url.query.get("mode") == "memory"
    return url.get_backend_name() == "sqlite" and in_memory


def address_digest(url: URL) -> str:
    return _short_hash(database_address(url))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def default_group_name(url: URL) -> str:
    """Return the name of the producer group for producers that use this database and have no group of their own."""
    name = Path(url.database or "memory").stem if url.get_backend_name() == "sqlite" else url.database or "database"
    return f"sql-{re.sub('[^A-Za-z0-9_-]', '-', name)[:GROUP_NAME_CHARACTERS]}-{address_digest(url)}"


def xid_prefix(url: URL, identity: str) -> str:
    """Return the beginning of all xids of a table: a hash of the database's address and the table's identity."""
    return f"{PREFIX}.{_short_hash(f'{database_address(url)}:{identity}')}."


def new_xid(url: URL, identity: str) -> str:
    return xid_prefix(url, identity) + os.urandom(RANDOM_BYTES).hex()


def has_two_phase_driver(engine: Engine) -> bool:
    """Return whether SQLAlchemy supports two-phase commit with this driver. A database setting may disable it."""
    return engine.dialect.name == "postgresql" and engine.dialect.driver in TWO_PHASE_DRIVERS


class DatabaseCapabilities(NamedTuple):
    """Capabilities of a database and its table, read once per engine."""

    identity: str = ""  # The identity of the table: see `IDENTITY_XID`.
    two_phase: bool = False  # Whether the database can prepare transactions; if not, `why_not` is the reason.
    why_not: str = ""
    commits_early: bool = False  # Whether a commit returns before it is durable, unless the session changes that.


_capabilities: WeakKeyDictionary[Engine, dict[str, DatabaseCapabilities]] = WeakKeyDictionary()


def cached_capabilities(engine: Engine, table: Table) -> DatabaseCapabilities | None:
    return _capabilities.get(engine, {}).get(table.fullname)


def discard_capabilities(engine: Engine) -> None:
    """Discard the cached capabilities, because the database may have been restarted with other settings."""
    _capabilities.pop(engine, None)


def read_capabilities(connection: Connection, table: Table) -> DatabaseCapabilities:
    """Read the capabilities from the database and cache them. Raises NotAllowed if the table is missing.

    `create_table` stores a random identity in the table. If the table was made in another way, for example by
    migrations, this function stores one, in a separate transaction.
    """
    if not table_exists(connection, table):
        raise NotAllowed(
            f"There is no table {table.fullname} in the database: call tfmq.sql.create_table(engine) once, or let your"
            " migrations create it (docs/database-transactions.md; tfmq --docs prints the folder)."
        )
    identity = read_identity(connection, table)
    if identity is None:
        ensure_identity(connection.engine, table)
        identity = read_identity(connection, table)
    is_postgresql = connection.dialect.name == "postgresql"
    commits_early = is_postgresql and _read_setting(connection, "synchronous_commit") == "off"
    found = DatabaseCapabilities(identity or "", *_read_two_phase(connection), commits_early)
    _capabilities.setdefault(connection.engine, {})[table.fullname] = found
    return found


def _read_two_phase(connection: Connection) -> tuple[bool, str]:
    if connection.dialect.name != "postgresql":
        name = connection.dialect.name
        return False, f"Two-phase commit needs PostgreSQL, not {name}: without it only the row decides."
    if not has_two_phase_driver(connection.engine):
        return False, f"The driver {connection.dialect.driver} cannot prepare transactions: use psycopg."
    if _read_setting(connection, "max_prepared_transactions") == "0":
        return False, (
            "PostgreSQL prepares no transactions, because its max_prepared_transactions is 0: raise it (and restart"
            " it), or pass two_phase=False, so that only the row decides."
        )
    return True, ""


def _read_setting(connection: Connection, name: str) -> str:
    return str(connection.exec_driver_sql(f"SHOW {name}").scalar())


DEFAULT_TABLE_NAME = "tfmq_transaction"
COMMITTED, ABORTED = "committed", "aborted"
STATE_CHARACTERS = 16
IDENTITY_XID = "database"
"""The xid of the one row that names the table: its `state` is the table's identity, random hexadecimal digits.

A hash of the identity is part of every xid, and a transaction's row is written only to the table with that identity. So
a database with the same address on another machine, or a table in another schema, cannot decide the transaction.
"""
ROWS_PER_DELETE = 500
"""Rows per DELETE: few enough for short locks, and for each database's limit of parameters (999 in old SQLite)."""

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


def transaction_table(metadata: MetaData, *, name: str = DEFAULT_TABLE_NAME, schema: str | None = None) -> Table:
    """Define the table in `metadata`, for Alembic or for another name or schema.

    Pass a table with another name or schema to `tfmq.sql.transaction(..., table=)` and `tfmq.sql.check(..., table=)`.

    A row is the outcome of one transaction: `xid` (its name, the primary key), `state` ("committed" or "aborted") and
    `time` (UTC). The client that runs the transaction, its owner, writes "committed" together with the user's changes,
    so this row exists if and only if the changes are committed. A client that has to decide and finds no row writes
    "aborted" under the same key. Then the owner's commit fails, because a primary key exists only once.
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
    """Create the table if it does not exist. Raises BadRequest if `bind` is neither an Engine nor a Connection.

    With an asyncio engine: `await connection.run_sync(create_table)`.
    """
    if not isinstance(bind, Engine | Connection):
        raise BadRequest(
            f"create_table takes an Engine or a Connection of SQLAlchemy, not {bind!r}. With an asyncio engine:"
            " await connection.run_sync(tfmq.sql.create_table)."
        )
    table.create(bind, checkfirst=True)
    if isinstance(bind, Engine):
        ensure_identity(bind, table)
    elif read_identity(bind, table) is None:
        _insert_identity(bind, table)


def table_exists(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)


def read_identity(connection: Connection, table: Table) -> str | None:
    return read_state(connection, table, IDENTITY_XID)


def ensure_identity(engine: Engine, table: Table) -> None:
    """Store an identity in the table if it has none. Concurrent calls are safe."""
    with engine.connect() as connection:
        if read_identity(connection, table) is not None:
            return
    try:
        with engine.begin() as connection:
            _insert_identity(connection, table)
    except IntegrityError:
        return


def _insert_identity(connection: Connection, table: Table) -> None:
    identity = os.urandom(STATE_CHARACTERS // 2).hex()
    connection.execute(insert(table).values(xid=IDENTITY_XID, state=identity, time=utc_now()))


def insert_row(connection: Connection, table: Table, identity: str, xid: str, state: str, time: datetime) -> bool:
    """Insert a row and return True; False if the table has another identity. Raises IntegrityError for a used xid."""
    values = select(literal(xid), literal(state), literal(time, DateTime(timezone=True))).select_from(table)
    here = values.where(table.c.xid == IDENTITY_XID, table.c.state == identity)
    statement = insert(table).from_select(["xid", "state", "time"], here)
    done = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return done.rowcount == 1


def read_state(connection: Connection, table: Table, xid: str) -> str | None:
    """Return "committed" or "aborted"; None if the transaction has no row."""
    state = connection.scalar(select(table.c.state).where(table.c.xid == xid))
    return None if state is None else str(state)


def delete_rows_before(connection: Connection, table: Table, before: datetime, keep: Collection[str]) -> int:
    """Delete rows older than `before`, except the xids in `keep`, in short transactions; return their number.

    `connection` must not be in a transaction.
    """
    deleted, last = 0, ""
    old = select(table.c.xid).where(table.c.time < before, table.c.xid != IDENTITY_XID)
    page_query = old.order_by(table.c.xid).limit(ROWS_PER_DELETE)  # Sorted, so that each kept row is read only once.
    while True:
        with connection.begin():
            page = connection.scalars(page_query.where(table.c.xid > last)).all()
        if not page:
            return deleted
        last = page[-1]
        xids = [xid for xid in page if xid not in keep]
        with connection.begin():
            connection.execute(delete(table).where(table.c.xid.in_(xids)))
        deleted += len(xids)
