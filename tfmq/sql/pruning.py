"""Housekeeping of the table: its rows are needed until the broker has ended the transaction, and then by nobody."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Table
from sqlalchemy.engine import Engine

from tfmq.admin import Admin
from tfmq.errors import BadRequest
from tfmq.sql import table as rows

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
