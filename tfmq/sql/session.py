"""What tfmq.sql asks of a producer, of either face, beside what it has for everybody."""

from __future__ import annotations

import sys
from collections.abc import Set as AbstractSet
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Table
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError, UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction, SessionTransactionOrigin

from tfmq.client.admin.admin import Administration
from tfmq.errors import NotAllowed, NotSupported, TransactionRolledBack
from tfmq.sql import database as rows
from tfmq.sql.database import Facts, forget, group_name, known, learn
from tfmq.sql.decision import rename, sqlstate

_named: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Producers that had no group, and the one of a database that they got here."""


def join_group(producer: Any, url: URL) -> None:
    """Let a producer without a group belong to the one of this database: it is asked about their transactions.

    Raises `NotAllowed` for a second database: the broker would ask producers that cannot look into the right one.
    """
    core, name = producer._core, group_name(url)
    if core.group is None:
        core.group = _named[producer] = name
    elif _named.get(producer, name) != name:
        raise NotAllowed(
            "A producer without a group of its own shares transactions with one database only: use one for each, or"
            " give it a group, Producer(group=...), whose members all use the same databases."
        )


def node_of(producer: Any) -> str:
    """The id of the broker that it speaks with, or spoke with last; "" before it did."""
    hello = producer._core.link.hello
    return "" if hello is None else str(hello.node)


def is_closed(producer: Any) -> bool:
    """Whether nothing can be asked of it any more."""
    return bool(producer._core.closed)


def describe(producer: Any, xid: str) -> Any:
    """The broker's `TransactionDescription` of `xid`, of state "unknown" where it knows none; or something to await.

    Not by `resume`: that would take the transaction up, and this one is somebody else's.
    """
    core = producer._core
    return producer._driver.run(Administration(core.link, core.options.timeout).transaction(xid, 0))


# The database's half: what is done in the user's own session, and which sessions it is refused in.
#
# Everything here is called in the session's thread, or, for an asyncio session, in its `run_sync`.

FEATURE_NOT_SUPPORTED = "0A000"
_OUTSIDE = "tfmq.sql.transaction ends the session's whole transaction"


class SessionPart:
    """The session of one transaction, from joining it to its end.

    `two_phase`: whether its database prepares: None: where that can be had · `xid`: the name of the row.
    """

    def __init__(self, session: Session, table: Table, two_phase: bool | None, clock: rows.Clock) -> None:
        self.session, self.table = session, table
        self.two_phase = False
        self.may_be_prepared = False
        """The database was told to prepare; whether it did is not known before its answer."""
        self.engine: Engine = bind_of(session).engine
        self._wanted, self._clock = two_phase, clock
        self._facts = Facts()
        self._was_two_phase = session.twophase
        self._begun: SessionTransaction | None = None
        self._is_own = False

    def look(self) -> str:
        """Whether the session can be joined, and what its database can do; the identity of the table.

        Raises `NotAllowed` and `NotSupported` where that cannot be, and what SQLAlchemy raises.
        """
        used = refuse_what_cannot_be_joined(self.session)
        self._facts = self._learned(used)
        self.two_phase = self._chooses_two_phase(used)
        return self._facts.identity

    def begin(self, gid: str) -> None:
        """Begin the session's transaction, or join the one that it began by itself; `gid`: its name where the database
        prepares it. Raises as `look`.
        """
        session = self.session
        session.twophase = self.two_phase
        try:
            if session.get_transaction() is None:
                session.begin()
                self._is_own = True
            connection = session.connection()
            refuse_autocommit(connection)
            if self.two_phase:
                rename(connection, gid)
        except BaseException:
            self.give_up()
            raise
        self._begun = session.get_transaction()

    def give_up(self) -> None:
        """The transaction does not come about: the session is as it was, with what it had begun itself."""
        self.session.twophase = self._was_two_phase
        if self._is_own:
            self.session.rollback()

    def _learned(self, used: AbstractSet[Connection]) -> Facts:
        """About the database; on a connection that is there, because another one may not be had beside it."""
        facts = known(self.engine, self.table)
        if facts is not None:
            return facts
        if used:
            return learn(next(iter(used)), self.table)
        bind = bind_of(self.session)
        if isinstance(bind, Connection):
            with bind.begin():
                return learn(bind, self.table)
        with bind.connect() as connection:
            return learn(connection, self.table)

    def _chooses_two_phase(self, used: AbstractSet[Connection]) -> bool:
        wanted = self._wanted or (self._wanted is None and self._was_two_phase)
        if wanted and not self._facts.two_phase:
            raise NotSupported(self._facts.why_not)
        if used:
            if wanted:
                raise NotAllowed(
                    "The session has begun its transaction already, so it cannot be prepared under the"
                    " name that the broker knows: commit or roll it back before, or pass two_phase=False."
                )
            return False
        return bool(wanted or (self._wanted is None and self._facts.two_phase))

    def prepare(self, xid: str) -> None:
        """Everything up to the commit: the user's changes, the row, and the database's own prepare in two phases.

        Raises what SQLAlchemy raises; then nothing of it is committed.
        """
        session = self.session
        if session.get_transaction() is not self._begun:
            raise NotAllowed(
                f"The session's transaction was ended inside the block: {_OUTSIDE}, so leave commit() and rollback()"
                " to it. What a commit() of yours has committed stays; no message is sent."
            )
        if session.in_nested_transaction():
            raise NotAllowed("A savepoint of the session is still open: end begin_nested() inside the block.")
        session.flush()
        self._refuse_second_database()
        connection = session.connection()
        if self._facts.commits_early and not self.two_phase:
            connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
        try:
            written = rows.write(
                connection, self.table, self._facts.identity, xid, rows.COMMITTED, self._clock()
            )
        except IntegrityError as error:
            raise TransactionRolledBack(
                f"The transaction {xid} was given up in the meantime: the broker asked about it, and it was not there."
            ) from error
        if not written:
            forget(self.engine)
            raise NotAllowed(
                f"The session finds another table {self.table.fullname} than its engine's other connections do (by its"
                " search_path, or a schema_translate_map): name the schema, tfmq.sql.transaction(..., table=)."
            )
        if self.two_phase:
            self._prepare_in_database()

    def _prepare_in_database(self) -> None:
        # What is deferred to the commit is to fail here, where it is an error like any other.
        self.session.connection().exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
        self.may_be_prepared = True
        outer = sys.exception()
        try:
            self.session.prepare()
        except SQLAlchemyError as error:
            forget(self.engine)
            first = first_of(error, outer)
            if isinstance(first, DBAPIError) and sqlstate(first.orig) == FEATURE_NOT_SUPPORTED:
                first.add_note(
                    "PostgreSQL prepares no transaction that used temporary tables, LISTEN or NOTIFY, or a cursor WITH"
                    " HOLD: tfmq.sql.transaction(..., two_phase=False) does without."
                )
            raise first from None

    def _refuse_second_database(self) -> None:
        pools = {id(each.engine.pool) for each in connections_of(self.session.get_transaction())}
        if len(pools) > 1:
            raise NotAllowed(
                "The session used more than one database in this transaction, and the row that decides is in one of"
                " them: use a session for each, or one database."
            )

    def commit(self) -> None:
        """The decision: with it the row is there for everybody."""
        self.session.commit()
        self.session.twophase = self._was_two_phase

    def rollback(self) -> None:
        """Roll it back, prepared or not."""
        try:
            self.session.rollback()
        finally:
            self.session.twophase = self._was_two_phase


def first_of(error: SQLAlchemyError, outer: BaseException | None) -> SQLAlchemyError:
    """The database's error behind `error`: of a prepare that fails SQLAlchemy rolls back what was never prepared, and
    what that says hides the reason. `outer` was being handled before and has nothing to do with it.
    """
    first, each = error, error.__context__
    while each is not None and each is not outer:
        if isinstance(each, DBAPIError):
            first = each
        each = each.__context__
    return first


def bind_of(session: Session) -> Engine | Connection:
    """The engine or connection that the session is bound to."""
    try:
        return session.get_bind()
    except UnboundExecutionError:
        raise NotAllowed(
            "The session is bound to no database as a whole, so there is no place for the row that decides: make it"
            " with Session(engine)."
        ) from None


def connections_of(begun: SessionTransaction | None) -> AbstractSet[Connection]:
    """The connections that a session's transaction uses up to now."""
    if begun is None:
        return frozenset()
    public = getattr(begun, "connections", None)  # since SQLAlchemy 2.1.7
    return frozenset(entry[0] for entry in begun._connections.values()) if public is None else public


def refuse_what_cannot_be_joined(session: Session) -> AbstractSet[Connection]:
    """The connections of a transaction that the session began by itself, to be joined. Raises `NotAllowed`."""
    if session.in_nested_transaction():
        raise NotAllowed(f"The session is inside a savepoint, and {_OUTSIDE}: end begin_nested() before.")
    begun = session.get_transaction()
    if begun is not None and begun.origin is not SessionTransactionOrigin.AUTOBEGIN:
        raise NotAllowed(
            f"The session's transaction was begun by session.begin(), and {_OUTSIDE}: leave session.begin() out."
        )
    bind, used = bind_of(session), connections_of(begun)
    if isinstance(bind, Connection) and (used or bind.in_transaction()):
        raise NotAllowed(
            "The session is bound to a connection that has a transaction of its own, so the session's commit may"
            " commit nothing: bind it to an engine, or end that transaction before."
        )
    return used


def refuse_autocommit(connection: Connection) -> None:
    """Without a transaction of the database a row decides nothing."""
    driver = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        commits_each = getattr(driver, "isolation_level", "") is None and not getattr(
            driver, "in_transaction", True
        )
    else:
        commits_each = getattr(driver, "autocommit", False) is True
    if commits_each:
        raise NotAllowed(
            "The database commits each statement by itself (isolation level AUTOCOMMIT): give the session an engine"
            " with transactions."
        )
