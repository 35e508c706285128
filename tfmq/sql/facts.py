"""What a database can do, asked once for each engine."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Table
from sqlalchemy.engine import Connection, Engine

from tfmq.errors import NotAllowed
from tfmq.sql import table as rows
from tfmq.sql.database import has_two_phase_driver


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
    if not rows.exists(connection, table):
        raise NotAllowed(
            f"There is no table {table.fullname} in the database: call tfmq.sql.create_table(engine) once, or let your"
            " migrations create it (docs/database-transactions.md; tfmq --docs prints the folder)."
        )
    identity = rows.identity_of(connection, table)
    if identity is None:
        rows.ensure_identity(connection.engine, table)
        identity = rows.identity_of(connection, table)
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
