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
"""Producer that was made without a group -> the group that it has joined, the default group of a database."""


def join_group(producer: Any, url: URL) -> None:
    """Let a producer without a group join the default group of this database.

    If the producer is lost, the broker asks the group how the producer's prepared transactions are to end (check-back).
    Raises NotAllowed for a second database, because not all members of the group can read that database's table.
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
    """Return the id of the broker that the producer was connected to last; "" before its first connection."""
    hello = producer._core.link.hello
    return "" if hello is None else str(hello.node)


def is_closed(producer: Any) -> bool:
    return bool(producer._core.closed)


def describe_transaction(producer: Any, xid: str) -> Any:
    """Return the broker's description of `xid` (perhaps with state "unknown"), or an awaitable for the description."""
    # `producer.resume` also returns the state, but it would take over a transaction that belongs to another client.
    core = producer._core
    return producer._driver.run(AdminCore(core.link, core.options.timeout).transaction(xid, 0))


FEATURE_NOT_SUPPORTED = "0A000"
_SESSION_RULE = "tfmq.sql.transaction ends the session's whole transaction"


class SessionParticipant:
    """The database session of one shared transaction, from the check of the session to the commit or rollback.

    All methods run in the session's thread, or for an asyncio session in its `run_sync`. Argument `two_phase`: whether
    to prepare the database's transaction (None: if possible). Attribute `two_phase`: whether it will be prepared.
    """

    def __init__(self, session: Session, table: Table, two_phase: bool | None) -> None:
        self.session, self.table = session, table
        self.two_phase = False
        self.may_be_prepared = False
        """True once a prepare was sent to the database, also if the prepare failed or its reply was lost."""
        self.engine: Engine = session_bind(session).engine
        self._two_phase_wanted = two_phase
        self._capabilities = DatabaseCapabilities()
        self._was_two_phase = session.twophase
        self._begun: SessionTransaction | None = None
        self._began_here = False

    def check_session(self) -> str:
        """Check that the session can be shared, read the database's capabilities, and return the table's identity.

        Raises NotAllowed if the session's transaction cannot be shared or the table is missing, NotSupported if the
        database cannot prepare although the caller requires it, and errors of SQLAlchemy if the database fails.
        """
        used = require_joinable(self.session)
        self._capabilities = self._read_capabilities(used)
        self.two_phase = self._use_two_phase(used)
        return self._capabilities.identity

    def begin(self, gid: str) -> None:
        """Begin the session's transaction, or join the one that the session began implicitly.

        In a two-phase commit, the database will prepare the transaction under the name `gid`. Raises NotAllowed if the
        database commits each statement by itself, NotSupported without a two-phase transaction, errors of SQLAlchemy.
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
        """Restore the session after `begin` has failed. Roll back the session's transaction if `begin` began it."""
        self.session.twophase = self._was_two_phase
        if self._began_here:
            self.session.rollback()

    def _read_capabilities(self, used: AbstractSet[Connection]) -> DatabaseCapabilities:
        known = cached_capabilities(self.engine, self.table)
        if known is not None:
            return known
        # The session's own connection is used, because a small pool may have no second connection.
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

        In a two-phase commit, also prepare the database's transaction. After an error nothing is committed. Raises
        TransactionRolledBack if check-back has rolled back the transaction; NotAllowed if the user's block ended the
        session's transaction, left a savepoint open or used a second database; and errors of SQLAlchemy.
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
        # PostgreSQL checks the deferred constraints now, while an error still rolls back the transaction.
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
        """Commit the database's transaction. Thereby the row becomes visible, and decides the shared transaction."""
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
    hides the cause. `outer`: an exception that was being handled before the prepare, and so is not the cause.
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
    """Return the connections of the session's transaction. Raises NotAllowed if that transaction cannot be shared."""
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
    """Raise NotAllowed if each statement is committed by itself, as changes and row must be committed together."""
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
