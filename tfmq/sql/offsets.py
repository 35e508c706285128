"""Offsets of a consumer in the user's own transaction, with the results: both commit, or neither.

The row of a partition is changed only where no higher generation has claimed it, by the very statement that looks. So a
member that lost the partition cannot commit its results either: `Fenced` is raised inside its transaction.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Collection
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, scoped_session

from tfmq.client.consumer.external_offsets import Standing, standing
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.errors import BadRequest, NotAllowed
from tfmq.offsets.sql import SqlOffsets, save_rows
from tfmq.offsets.storage import PartitionName, fenced, shown_url
from tfmq.sql.database import address
from tfmq.sql.session import bind_of, refuse_autocommit

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session


@overload
def commit_offsets(
    session: Session | scoped_session[Any] | Connection,
    consumer: Any,
    message: ReceivedMessage[Any] | None = None,
) -> None: ...
@overload
def commit_offsets(
    session: AsyncSession | async_scoped_session[Any] | AsyncConnection,
    consumer: Any,
    message: ReceivedMessage[Any] | None = None,
) -> Awaitable[None]: ...
def commit_offsets(
    session: Any, consumer: Any, message: ReceivedMessage[Any] | None = None
) -> Awaitable[None] | None:
    """What `consumer` handed out, or its partition up to `message` and including it, is processed if the transaction of
    `session` commits: exactly once, together with what else is in it.

        consumer = tfmq.Consumer(topics="orders", group="billing", commits="manual", offsets="sql:" + URL)
        for message in consumer:
            with Session(engine) as session, session.begin():
                session.add(Invoice(message.json()))
                tfmq.sql.commit_offsets(session, consumer, message)

    `session`: a Session or Connection, or, to be awaited, an AsyncSession or AsyncConnection, of the database that the
    consumer was given with offsets="sql:URL". The consumer may be of any face.

    Raises `Fenced` if another member has got the partition meanwhile; let it roll the transaction back, and go on with
    the next message. `BadRequest` and `NotAllowed` with a sentence that says what to change; what SQLAlchemy raises.
    """
    session = _scoped(session)
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    if asynchronous is not None and isinstance(
        session, asynchronous.AsyncSession | asynchronous.AsyncConnection
    ):
        running: Awaitable[None] = session.run_sync(_commit, consumer, message)
        return running
    if not isinstance(session, Session | Connection):
        raise BadRequest(f"A session or a connection of SQLAlchemy is wanted, not {session!r}.")
    _commit(session, consumer, message)
    return None


def _scoped(session: Any) -> Any:
    """The session behind one that is kept by thread or by task."""
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    is_scoped = isinstance(session, scoped_session) or (
        asynchronous is not None and isinstance(session, asynchronous.async_scoped_session)
    )
    return session() if is_scoped else session


def _commit(session: Session | Connection, consumer: Any, message: ReceivedMessage[Any] | None) -> None:
    stood = standing(consumer, message)
    if not isinstance(stood.storage, SqlOffsets):
        raise BadRequest(
            'commit_offsets needs a consumer with offsets="sql:URL", the URL of this transaction\'s database: otherwise'
            " it reads its offsets elsewhere."
        )
    connection = session if isinstance(session, Connection) else _connection_of(session)
    refuse_autocommit(connection)
    _refuse_another_database(connection, stood.storage)
    lost = save_rows(connection, stood.group, stood.offsets)
    if lost or stood.fenced is not None:
        _go_back(stood, stood.storage, lost)
        raise stood.fenced or fenced(stood.storage.shown, stood.group, lost)
    if isinstance(session, Session):
        _tell_when_committed(session, stood)
    else:
        stood.entrusted()


def _go_back(stood: Standing, storage: SqlOffsets, lost: Collection[PartitionName]) -> None:
    """The others of this call are handed out again. Their rows are locked by this transaction, which is to be rolled
    back, so what the storage finds there beside it is what will be there then.
    """
    others = [name for name in stood.places if name not in lost]
    kept = storage.read(stood.group, others) if others else {}
    stood.refused(lost, kept)


def _connection_of(session: Session) -> Connection:
    bind_of(session)  # raises where it has several databases, or none
    return session.connection()


def _refuse_another_database(connection: Connection, storage: SqlOffsets) -> None:
    """Hosts have many names, so only what is surely another database is refused."""
    here, there = connection.engine.url, storage.url
    same = here.get_backend_name() == there.get_backend_name()
    if same and here.get_backend_name() == "sqlite":
        same = address(here) == address(there)
    elif same and here.database and there.database:
        same = here.database == there.database
    if not same:
        raise NotAllowed(
            f"The consumer's offsets are in {storage.shown}, this transaction is of"
            f" {shown_url(here.render_as_string())}: both must be the same database."
        )


_uncommitted: WeakKeyDictionary[Session, list[Standing]] = WeakKeyDictionary()
"""What the transactions of sessions may commit; a session in here has our listeners."""


def _tell_when_committed(session: Session, stood: Standing) -> None:
    """The consumer learns of it, so that the next call has only what is new. Nothing depends on that."""
    if session not in _uncommitted:
        _uncommitted[session] = []
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_soft_rollback", _rolled_back)
    _uncommitted[session].append(stood)


def _committed(session: Session) -> None:
    if not session.in_nested_transaction():
        stood, _uncommitted[session] = _uncommitted[session], []
        for each in stood:
            each.saved()


def _rolled_back(session: Session, _: Any) -> None:
    """Also of a savepoint: which of them were in it is not known, and need not be."""
    _uncommitted[session] = []
