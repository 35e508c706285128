"""How a transaction is decided when its owner does not say: by the row, and by nothing else.

A row: what it says. No row: one that says "aborted" is written under the key that the owner needs, and committed;
only then the answer is "rollback", because from then on the owner's commit must fail. While the owner's transaction
is on its way, its own row of that key makes the writer wait, not for long: then there is no answer yet.

Where PostgreSQL holds the transaction prepared, that is finished first, and then the row is looked at. That a prepared
transaction is gone proves nothing: it was committed or rolled back by somebody.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final, Literal, NamedTuple

from sqlalchemy import Table, text
from sqlalchemy.engine import Connection, Engine, TwoPhaseTransaction
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from tfmq.admin import Admin
from tfmq.errors import BadRequest, NotSupported
from tfmq.sql import database as rows
from tfmq.sql.database import PREFIX, has_two_phase_driver, mark

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


# What PostgreSQL holds prepared: under which names, and how it is finished by somebody else than its owner.
#
# The name there is XID@NODE: the broker's name of the transaction, and the id of the broker where it was begun.

Decision = Literal["commit", "rollback"]

SOMEBODY_ELSE_DOES = ("42704", "55000")
"""What PostgreSQL says of a prepared transaction that is gone, or that another session is finishing."""

_OURS: Final = re.compile(rf"{re.escape(PREFIX)}\.[0-9A-Za-z._-]+@[0-9A-Za-z._-]*")
"""Names that were given here. Anybody who may use the database can prepare under any other one, a quote in it
included, and SQLAlchemy writes names into its statements as they are.
"""

_FIND = text(
    "SELECT gid FROM pg_prepared_xacts WHERE starts_with(gid, :start) AND database = current_database() ORDER BY gid"
)


class Prepared(NamedTuple):
    """One that the database holds prepared, under the name `gid`."""

    gid: str
    xid: str
    node: str


def name(xid: str, node: str) -> str:
    """What PostgreSQL calls the transaction; at most 199 characters, of which these are about 100."""
    return f"{xid}@{node}"


def rename(connection: Connection, gid: str) -> None:
    """Let the two-phase transaction that was just begun bear the name `gid` instead of SQLAlchemy's random one: whoever
    finds it prepared, after a crash, then knows whom to ask.
    """
    begun = connection.get_transaction()
    if not isinstance(begun, TwoPhaseTransaction):
        raise NotSupported("The session did not begin a two-phase transaction; pass two_phase=False.")
    connection.dialect.do_rollback_twophase(connection, begun.xid, is_prepared=False)
    connection.dialect.do_begin_twophase(connection, gid)
    begun.xid = gid


def prepared_in(connection: Connection, xid: str = PREFIX) -> list[Prepared]:
    """Those of `xid`, or all that tfmq.sql prepared, in this database."""
    if not has_two_phase_driver(connection.engine):
        return []
    start = PREFIX + "." if xid == PREFIX else xid + "@"
    with connection.begin():
        found = connection.scalars(_FIND, {"start": start}).all()
    return [Prepared(gid, *gid.rsplit("@", 1)) for gid in found if _OURS.fullmatch(gid)]


def finish(connection: Connection, gid: str, decision: Decision) -> None:
    """Commit or roll back what is prepared under that name; nothing, if somebody else does. Raises `SQLAlchemyError`.

    `connection` has no transaction.
    """
    try:
        if decision == "commit":
            connection.commit_prepared(gid, recover=True)
        else:
            connection.rollback_prepared(gid, recover=True)
    except Exception as error:
        if sqlstate(error) not in SOMEBODY_ELSE_DOES:  # the driver's own error, which is not wrapped here
            raise SQLAlchemyError(
                f"{gid}, which PostgreSQL holds prepared, cannot be finished: {error}"
            ) from error


def sqlstate(error: BaseException | None) -> str | None:
    """PostgreSQL's code of an error of the driver: psycopg calls it `sqlstate`, psycopg2 `pgcode`."""
    code: str | None = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code


# Housekeeping of the table: its rows are needed until the broker has ended the transaction, and then by nobody.

KEPT = timedelta(days=7)
"""As long as a broker remembers outcomes: more than any session lives that could still want to commit."""

UNFINISHED = ("open", "preparing", "prepared", "committing", "applying", "rolling_back")


def prune(
    engine: Engine,
    *admins: Admin,
    older_than: timedelta = KEPT,
    table: Table = rows.TABLE,
    clock: rows.Clock = rows.now,
) -> int:
    """Delete the rows that are older than `older_than` and decide nothing any more; how many those were.

    `admins`: one for each broker that shares transactions with this database. They are asked first what is not
    finished: those rows stay, however old. Run it once a day; it deletes in short transactions.

    Raises what SQLAlchemy raises, `BadRequest`, `ConnectionFailed`.
    """
    if older_than <= timedelta(0):
        raise BadRequest(f"Rows are pruned when they are older than some time, not {older_than}.")
    if not admins:
        raise BadRequest(
            "Give an Admin of each broker that shares transactions with the database: it is asked first."
        )
    before = clock() - older_than
    unfinished = {each.xid for admin in admins for each in admin.transactions(UNFINISHED)}
    return rows.delete_before(engine, table, before, unfinished)
