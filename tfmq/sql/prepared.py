"""What PostgreSQL holds prepared: under which names, and how it is finished by somebody else than its owner.

The name there is XID@NODE: the broker's name of the transaction, and the id of the broker where it was begun.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from sqlalchemy import text
from sqlalchemy.engine import Connection, TwoPhaseTransaction
from sqlalchemy.exc import SQLAlchemyError

from tfmq.errors import NotSupported
from tfmq.sql.database import PREFIX, has_two_phase_driver

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
