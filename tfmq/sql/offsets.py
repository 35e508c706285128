"""Consumer offsets committed in the user's own database transaction."""

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
    """Commit the offsets of `consumer` in the transaction of `session`, with its other changes.

        consumer = tfmq.Consumer(topics="orders", group="billing", commits="manual", offsets="sql:" + URL)
        for message in consumer:
            with Session(engine) as session, session.begin():
                session.add(Invoice(message.json()))
                tfmq.sql.commit_offsets(session, consumer, message)

    If the transaction commits, all messages that the consumer has returned are acked, or those of the
    message's partition up to and including `message`. Results and offsets are thus committed exactly once.

    A partition's row is only updated if no higher generation has claimed it; check and update are one
    statement. A member that lost the partition therefore cannot commit its results.

    Args: `session`: a Session or Connection, or, to be awaited, an AsyncSession or AsyncConnection, of the
    database given to the consumer with offsets="sql:URL". `consumer`: of any API variant.
    Raises: Fenced if the partition is assigned to another member: let it roll back the transaction and
    continue with the next message. BadRequest and NotAllowed with a sentence that describes what to change.
    Errors of SQLAlchemy.
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
    """Return the actual session of a scoped session."""
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
    """Redeliver the messages of the other partitions of this call."""
    # This transaction has locked their rows and is going to be rolled back, so the storage already reads
    # what will be stored afterwards.
    others = [name for name in stood.places if name not in lost]
    kept = storage.read(stood.group, others) if others else {}
    stood.refused(lost, kept)


def _connection_of(session: Session) -> Connection:
    bind_of(session)  # raises if the session has several databases, or none
    return session.connection()


def _refuse_another_database(connection: Connection, storage: SqlOffsets) -> None:
    """Check that session and consumer use the same database.

    Raises: NotAllowed.
    """
    # A host can have many names, so only certain differences are rejected.
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
"""Offsets that the current transactions may commit.

Every session in here has the event listeners.
"""


def _tell_when_committed(session: Session, stood: Standing) -> None:
    """Mark the offsets as saved in the consumer once the transaction commits.

    The next call then only has new offsets. This is an optimisation; correctness does not depend on it.
    """
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
    """Discard the pending offsets after a rollback, even of a savepoint."""
    # Which offsets belong to the savepoint is unknown. Discarding all is safe: they are only an
    # optimisation.
    _uncommitted[session] = []
