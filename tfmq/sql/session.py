"""The database session's part of a shared transaction, and access to a producer's internals."""

from __future__ import annotations

import sys
from collections.abc import Set as AbstractSet
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Table
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError, UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction, SessionTransactionOrigin

from tfmq.client.admin.admin import AdminCore
from tfmq.errors import NotAllowed, NotSupported, TransactionRolledBack
from tfmq.sql import database as rows
from tfmq.sql.database import (
    DatabaseCapabilities,
    cached_capabilities,
    default_group_name,
    discard_capabilities,
    read_capabilities,
)
from tfmq.sql.in_doubt import set_prepared_name, sqlstate

_default_groups: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Producers that had no group of their own, and the default group that they joined."""


def join_group(producer: Any, url: URL) -> None:
    """Let a producer without a group join the default group of this database.

    If the producer is lost, the broker asks its group how prepared transactions ended (check-back). For a second
    database NotAllowed is raised: the broker would ask producers that cannot read the deciding table.
    """
    core, name = producer._core, default_group_name(url)
    if core.group is None:
        core.group = _default_groups[producer] = name
    elif _default_groups.get(producer, name) != name:
        raise NotAllowed(
            "A producer without a group of its own shares transactions with one database only: use one for each, or"
            " give it a group, Producer(group=...), whose members all use the same databases."
        )


def broker_node(producer: Any) -> str:
    """Return the id of the broker to which the producer is, or was last, connected; "" before its first connection."""
    hello = producer._core.link.hello
    return "" if hello is None else str(hello.node)


def is_closed(producer: Any) -> bool:
    return bool(producer._core.closed)


def describe_transaction(producer: Any, xid: str) -> Any:
    """Return the broker's description of `xid`, whose state may be "unknown", or an awaitable for it."""
    # `resume` would also describe it, but would take over a transaction that belongs to another client.
    core = producer._core
    return producer._driver.run(AdminCore(core.link, core.options.timeout).transaction(xid, 0))


FEATURE_NOT_SUPPORTED = "0A000"
_SESSION_RULE = "tfmq.sql.transaction ends the session's whole transaction"


class SessionParticipant:
    """The database session of one shared transaction, from joining to its end.

    All methods run in the session's thread, or for an asyncio session in its `run_sync`. The argument `two_phase` says
    whether to prepare the database's transaction (None: if possible); the attribute, whether it will be prepared.
    """

    def __init__(self, session: Session, table: Table, two_phase: bool | None) -> None:
        self.session, self.table = session, table
        self.two_phase = False
        self.may_be_prepared = False
        """True once a prepare was sent to the database. If its reply is lost, it is unknown whether it succeeded."""
        self.engine: Engine = session_bind(session).engine
        self._two_phase_wanted = two_phase
        self._capabilities = DatabaseCapabilities()
        self._was_two_phase = session.twophase
        self._begun: SessionTransaction | None = None
        self._began_here = False

    def check_session(self) -> str:
        """Check that the session can be shared, read the database's capabilities, and return the table's identity.

        Raises NotAllowed, NotSupported, errors of SQLAlchemy.
        """
        used = require_joinable(self.session)
        self._capabilities = self._read_capabilities(used)
        self.two_phase = self._use_two_phase(used)
        return self._capabilities.identity

    def begin(self, gid: str) -> None:
        """Begin the session's transaction, or join the one that the session began implicitly.

        With two phases, the database will prepare the transaction under the name `gid`. Raises NotAllowed,
        NotSupported, errors of SQLAlchemy.
        """
        session = self.session
        session.twophase = self.two_phase
        try:
            if session.get_transaction() is None:
                session.begin()
                self._began_here = True
            connection = session.connection()
            require_no_autocommit(connection)
            if self.two_phase:
                set_prepared_name(connection, gid)
        except BaseException:
            self.restore_session()
            raise
        self._begun = session.get_transaction()

    def restore_session(self) -> None:
        """Restore the session after `begin` has failed, and roll back the transaction if `begin` began it."""
        self.session.twophase = self._was_two_phase
        if self._began_here:
            self.session.rollback()

    def _read_capabilities(self, used: AbstractSet[Connection]) -> DatabaseCapabilities:
        known = cached_capabilities(self.engine, self.table)
        if known is not None:
            return known
        # The session's own connection is used, because with a small pool no second one may be available.
        if used:
            return read_capabilities(next(iter(used)), self.table)
        bind = session_bind(self.session)
        if isinstance(bind, Connection):
            with bind.begin():
                return read_capabilities(bind, self.table)
        with bind.connect() as connection:
            return read_capabilities(connection, self.table)

    def _use_two_phase(self, used: AbstractSet[Connection]) -> bool:
        wanted = self._two_phase_wanted or (self._two_phase_wanted is None and self._was_two_phase)
        if wanted and not self._capabilities.two_phase:
            raise NotSupported(self._capabilities.why_not)
        if used:
            if wanted:
                raise NotAllowed(
                    "The session has begun its transaction already, so it cannot be prepared under the"
                    " name that the broker knows: commit or roll it back before, or pass two_phase=False."
                )
            return False
        return bool(wanted or (self._two_phase_wanted is None and self._capabilities.two_phase))

    def prepare(self, xid: str) -> None:
        """Flush the user's changes and insert the row whose commit decides the shared transaction.

        With two phases, then prepare the database's transaction. If this raises (NotAllowed, TransactionRolledBack,
        errors of SQLAlchemy), it has committed nothing.
        """
        session = self.session
        if session.get_transaction() is not self._begun:
            raise NotAllowed(
                f"The session's transaction was ended inside the block: {_SESSION_RULE}, so leave commit() and"
                " rollback() to it. What a commit() of yours has committed stays; no message is sent."
            )
        if session.in_nested_transaction():
            raise NotAllowed("A savepoint of the session is still open: end begin_nested() inside the block.")
        session.flush()
        self._require_one_database()
        connection = session.connection()
        if self._capabilities.commits_early and not self.two_phase:
            connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
        try:
            written = rows.insert_row(
                connection, self.table, self._capabilities.identity, xid, rows.COMMITTED, rows.utc_now()
            )
        except IntegrityError as error:
            raise TransactionRolledBack(
                f"The transaction {xid} was rolled back in the meantime: check-back found no row."
            ) from error
        if not written:
            discard_capabilities(self.engine)
            raise NotAllowed(
                f"The session finds another table {self.table.fullname} than its engine's other connections do (by its"
                " search_path, or a schema_translate_map): name the schema, tfmq.sql.transaction(..., table=)."
            )
        if self.two_phase:
            self._prepare_in_database()

    def _prepare_in_database(self) -> None:
        # Deferred constraints are checked here, while the transaction can still be rolled back.
        self.session.connection().exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
        self.may_be_prepared = True
        outer = sys.exception()
        try:
            self.session.prepare()
        except SQLAlchemyError as error:
            discard_capabilities(self.engine)
            first = original_error(error, outer)
            if isinstance(first, DBAPIError) and sqlstate(first.orig) == FEATURE_NOT_SUPPORTED:
                first.add_note(
                    "PostgreSQL prepares no transaction that used temporary tables, LISTEN or NOTIFY, or a cursor WITH"
                    " HOLD: use tfmq.sql.transaction(..., two_phase=False)."
                )
            raise first from None

    def _require_one_database(self) -> None:
        pools = {id(each.engine.pool) for each in session_connections(self.session.get_transaction())}
        if len(pools) > 1:
            raise NotAllowed(
                "The session used more than one database in this transaction, and the row that decides is in one of"
                " them: use a session for each, or one database."
            )

    def commit(self) -> None:
        """Commit the database's transaction. The row becomes visible, which decides the whole transaction."""
        self.session.commit()
        self.session.twophase = self._was_two_phase

    def rollback(self) -> None:
        try:
            self.session.rollback()
        finally:
            self.session.twophase = self._was_two_phase


def original_error(error: SQLAlchemyError, outer: BaseException | None) -> SQLAlchemyError:
    """Return the database's error that caused `error`.

    After a failed prepare SQLAlchemy rolls back a transaction that was never prepared, and the error of that rollback
    hides the cause. `outer`: the exception that was being handled before; it is not a cause.
    """
    first, each = error, error.__context__
    while each is not None and each is not outer:
        if isinstance(each, DBAPIError):
            first = each
        each = each.__context__
    return first


def session_bind(session: Session) -> Engine | Connection:
    """Return the engine or connection that the session is bound to. Raises NotAllowed if it has several, or none."""
    try:
        return session.get_bind()
    except UnboundExecutionError:
        raise NotAllowed(
            "The session is bound to no database as a whole, so there is no place for the row that decides: make it"
            " with Session(engine)."
        ) from None


def session_connections(begun: SessionTransaction | None) -> AbstractSet[Connection]:
    if begun is None:
        return frozenset()
    public = getattr(begun, "connections", None)  # since SQLAlchemy 2.1.7
    return frozenset(entry[0] for entry in begun._connections.values()) if public is None else public


def require_joinable(session: Session) -> AbstractSet[Connection]:
    """Return the connections that the session's transaction uses. Raises NotAllowed if it cannot become shared."""
    if session.in_nested_transaction():
        raise NotAllowed(f"The session is inside a savepoint, and {_SESSION_RULE}: end begin_nested() before.")
    begun = session.get_transaction()
    if begun is not None and begun.origin is not SessionTransactionOrigin.AUTOBEGIN:
        raise NotAllowed(
            f"The session's transaction was begun by session.begin(), and {_SESSION_RULE}: leave session.begin() out."
        )
    bind, used = session_bind(session), session_connections(begun)
    if isinstance(bind, Connection) and (used or bind.in_transaction()):
        raise NotAllowed(
            "The session is bound to a connection that has a transaction of its own, so the session's commit may"
            " commit nothing: bind it to an engine, or end that transaction before."
        )
    return used


def require_no_autocommit(connection: Connection) -> None:
    """Raise NotAllowed if each statement is committed by itself: changes and row would not be committed together."""
    driver = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        commits_each = getattr(driver, "isolation_level", "") is None and not getattr(driver, "in_transaction", True)
    else:
        commits_each = getattr(driver, "autocommit", False) is True
    if commits_each:
        raise NotAllowed(
            "The database commits each statement by itself (isolation level AUTOCOMMIT): give the session an engine"
            " with transactions."
        )
