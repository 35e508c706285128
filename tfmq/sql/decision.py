"""How a transaction is decided when its owner does not say: by the row, and by nothing else.

A row: what it says. No row: one that says "aborted" is written under the key that the owner needs, and committed;
only then the answer is "rollback", because from then on the owner's commit must fail. While the owner's transaction
is on its way, its own row of that key makes the writer wait, not for long: then there is no answer yet.

Where PostgreSQL holds the transaction prepared, that is finished first, and then the row is looked at. That a prepared
transaction is gone proves nothing: it was committed or rolled back by somebody.
"""

from __future__ import annotations

from sqlalchemy import Table, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError, OperationalError

from tfmq.sql import table as rows
from tfmq.sql.database import mark
from tfmq.sql.prepared import Decision, finish, prepared_in

LOCK_SECONDS = 2
"""How long the writer of "aborted" waits for an owner that is just committing. It is asked again."""

ATTEMPTS = 5
"""Each attempt that settles nothing met somebody else who just settled it, or is about to, so a few are enough."""

BUSY_SECONDS = LOCK_SECONDS / ATTEMPTS
"""How long each attempt waits for somebody else who is finishing what is prepared: for the disk, or for a replica."""

DECISIONS: dict[str, Decision] = {rows.COMMITTED: "commit", rows.ABORTED: "rollback"}


def decide(
    connection: Connection, table: Table, xid: str, prepared: Decision, clock: rows.Clock = rows.now
) -> Decision | None:
    """How the transaction `xid` ended, or ends by this; None: ask again later.

    `connection`: one of its own, without a transaction · `prepared`: what becomes of one that the database holds
    prepared. "commit" only where the broker holds it prepared, too. Raises what SQLAlchemy raises, for example
    `sqlalchemy.exc.OperationalError` when the database is down.
    """
    connection = _seeing_what_is_committed(connection)
    with connection.begin():
        identity = rows.identity_of(connection, table)
    if identity is None or not xid.startswith(mark(connection.engine.url, identity)):
        return None
    for attempt in range(ATTEMPTS):
        with connection.begin():
            state = rows.state_of(connection, table, xid)
        if state is not None:
            return DECISIONS[state]
        left = prepared_in(connection, xid)
        for each in left:
            finish(connection, each.gid, prepared)
        if left:
            if 0 < attempt < ATTEMPTS - 1:  # what was finished before is still there
                _pause(connection)
            continue
        try:
            with connection.begin():
                _wait_not_long(connection)
                written = rows.write(connection, table, identity, xid, rows.ABORTED, clock())
        except IntegrityError:
            continue
        except OperationalError:
            return None
        return "rollback" if written else None
    return None


def _seeing_what_is_committed(connection: Connection) -> Connection:
    """An owner's row that may still be rolled back decides nothing, whatever its engine likes to read."""
    dialect = connection.dialect.name
    if dialect == "postgresql" or connection.get_isolation_level() != "READ UNCOMMITTED":
        return connection  # PostgreSQL has that level in name only
    level = "SERIALIZABLE" if dialect == "sqlite" else "READ COMMITTED"
    return connection.execution_options(isolation_level=level)


def _pause(connection: Connection) -> None:
    """In the database, so that an event loop of ours goes on. Only PostgreSQL prepares."""
    with connection.begin():
        connection.execute(text("SELECT pg_sleep(:seconds)"), {"seconds": BUSY_SECONDS})


def _wait_not_long(connection: Connection) -> None:
    """SQLite waits as long as its driver was told, five seconds by default."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(LOCK_SECONDS * 1000)}")
