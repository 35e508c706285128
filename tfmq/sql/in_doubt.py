"""Decides transactions in doubt by their rows in the database, and finishes transactions prepared in the database."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from sqlalchemy import Table, text
from sqlalchemy.engine import Connection, TwoPhaseTransaction
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from tfmq.errors import NotSupported
from tfmq.sql import database as rows
from tfmq.sql.database import PREFIX, has_two_phase_driver, xid_prefix

LOCK_SECONDS = 2
"""How long an insert of "aborted" waits for an owner that is committing. After that, a later check-back decides."""

ATTEMPTS = 5
"""Maximum attempts of `decide`. An attempt fails only if another client decides the transaction at the same time."""

BUSY_SECONDS = LOCK_SECONDS / ATTEMPTS
"""Pause before the next attempt while another client finishes the prepared transaction."""

DECISION_BY_ROW: dict[str, Decision] = {rows.COMMITTED: "commit", rows.ABORTED: "rollback"}


def decide(connection: Connection, table: Table, xid: str, prepared: Decision) -> Decision | None:
    """Decide how the transaction `xid` ends, by its row. None: not possible yet, or `xid` belongs to another table.

    The owner is the client that runs the transaction. It inserts a row in the same database transaction as its changes.
    If the row exists, its state is the decision. Otherwise a row "aborted" with the key `xid` is inserted and
    committed, and the decision is "rollback": the owner can no longer insert its row, so its commit fails. While the
    owner is committing, its uncommitted row blocks the insert; after LOCK_SECONDS the result is None.

    A transaction that is prepared in PostgreSQL is first committed or rolled back, according to `prepared`; then its
    row is read. "commit" is allowed only if the broker has prepared its part, too. If PostgreSQL has no such prepared
    transaction, this proves nothing, because another client may have committed it or rolled it back.

    `connection`: a separate connection, which is not in a transaction. Raises errors of SQLAlchemy.
    """
    connection = _read_committed(connection)
    with connection.begin():
        identity = rows.read_identity(connection, table)
    if identity is None or not xid.startswith(xid_prefix(connection.engine.url, identity)):
        return None
    for attempt in range(ATTEMPTS):
        with connection.begin():
            state = rows.read_state(connection, table, xid)
        if state is not None:
            return DECISION_BY_ROW[state]
        found = find_prepared(connection, xid)
        for each in found:
            finish_prepared(connection, each.gid, prepared)
        if found:
            if 0 < attempt < ATTEMPTS - 1:  # The transaction is still listed, although the last attempt finished it.
                with connection.begin():  # The database does the pause, so that no event loop is blocked.
                    connection.execute(text("SELECT pg_sleep(:seconds)"), {"seconds": BUSY_SECONDS})
            continue
        try:
            with connection.begin():
                if connection.dialect.name == "postgresql":  # In SQLite the driver's timeout applies, 5 s by default.
                    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(LOCK_SECONDS * 1000)}")
                written = rows.insert_row(connection, table, identity, xid, rows.ABORTED, rows.utc_now())
        except IntegrityError:
            continue
        except OperationalError:
            return None
        return "rollback" if written else None
    return None


def _read_committed(connection: Connection) -> Connection:
    """Return the connection with an isolation level at which it does not read uncommitted rows."""
    dialect = connection.dialect.name
    if dialect == "postgresql" or connection.get_isolation_level() != "READ UNCOMMITTED":
        return connection  # PostgreSQL treats READ UNCOMMITTED as READ COMMITTED.
    level = "SERIALIZABLE" if dialect == "sqlite" else "READ COMMITTED"
    return connection.execution_options(isolation_level=level)


Decision = Literal["commit", "rollback"]

FINISHED_ELSEWHERE = ("42704", "55000")
"""SQLSTATEs of the error if the prepared transaction no longer exists, or if another session is finishing it."""

_OUR_NAMES: Final = re.compile(rf"{re.escape(PREFIX)}\.[0-9A-Za-z._-]+@[0-9A-Za-z._-]*")
"""Pattern of the names under which tfmq.sql prepares transactions. Transactions with other names are ignored.

Every user of the database can prepare transactions under any name, even with quotes, and SQLAlchemy inserts the name
into its statements without escaping it.
"""

_FIND = text(
    "SELECT gid FROM pg_prepared_xacts WHERE starts_with(gid, :start) AND database = current_database() ORDER BY gid"
)


class PreparedTransaction(NamedTuple):
    gid: str
    xid: str
    node: str


def prepared_name(xid: str, node: str) -> str:
    """Return the PostgreSQL name XID@NODE, about 100 of 199 allowed characters; NODE is the broker's id."""
    return f"{xid}@{node}"


def set_prepared_name(connection: Connection, gid: str) -> None:
    """Rename the two-phase transaction just begun on `connection` from its random name to `gid`.

    After a crash, the name shows to which transaction of which broker the prepared transaction belongs.
    """
    begun = connection.get_transaction()
    if not isinstance(begun, TwoPhaseTransaction):
        raise NotSupported("The session did not begin a two-phase transaction; pass two_phase=False.")
    connection.dialect.do_rollback_twophase(connection, begun.xid, is_prepared=False)
    connection.dialect.do_begin_twophase(connection, gid)
    begun.xid = gid


def find_prepared(connection: Connection, xid: str = PREFIX) -> list[PreparedTransaction]:
    """Return the transactions of tfmq.sql that this database has prepared; with `xid`, only those of this xid."""
    if not has_two_phase_driver(connection.engine):
        return []
    start = PREFIX + "." if xid == PREFIX else xid + "@"
    with connection.begin():
        found = connection.scalars(_FIND, {"start": start}).all()
    return [PreparedTransaction(gid, *gid.rsplit("@", 1)) for gid in found if _OUR_NAMES.fullmatch(gid)]


def finish_prepared(connection: Connection, gid: str, decision: Decision) -> None:
    """Commit or roll back the prepared transaction `gid`, unless it is gone or another session is finishing it.

    `connection` must not be in a transaction. Raises SQLAlchemyError for any other error of the database.
    """
    try:
        if decision == "commit":
            connection.commit_prepared(gid, recover=True)
        else:
            connection.rollback_prepared(gid, recover=True)
    except Exception as error:
        if sqlstate(error) not in FINISHED_ELSEWHERE:  # SQLAlchemy does not wrap the driver's error here
            raise SQLAlchemyError(f"{gid}, which PostgreSQL holds prepared, cannot be finished: {error}") from error


def sqlstate(error: BaseException | None) -> str | None:
    """Return PostgreSQL's error code: `sqlstate` in psycopg, `pgcode` in psycopg2."""
    code: str | None = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code
