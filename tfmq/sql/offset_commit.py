"""Consumer offsets committed in the user's own database transaction."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Collection
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, scoped_session

from tfmq.client.consumer.external_offsets import ExternalOffsets, external_offsets
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.databases import url_without_passwords
from tfmq.errors import BadRequest, NotAllowed
from tfmq.offsets.sql import SqlOffsets, save_rows
from tfmq.offsets.storage import PartitionName, fenced
from tfmq.sql.database import database_address
from tfmq.sql.session import require_no_autocommit, session_bind

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session


@overload
def commit_offsets(
    session: Session | scoped_session[Any] | Connection, consumer: Any, message: ReceivedMessage[Any] | None = None
) -> None: ...
@overload
def commit_offsets(
    session: AsyncSession | async_scoped_session[Any] | AsyncConnection,
    consumer: Any,
    message: ReceivedMessage[Any] | None = None,
) -> Awaitable[None]: ...
def commit_offsets(session: Any, consumer: Any, message: ReceivedMessage[Any] | None = None) -> Awaitable[None] | None:
    """Commit the offsets of `consumer` in the transaction of `session`, together with the transaction's other changes.

        consumer = tfmq.Consumer(topics="orders", group="billing", commits="manual", offsets="sql:" + URL)
        for message in consumer:
            with Session(engine) as session, session.begin():
                session.add(Invoice(message.json()))
                tfmq.sql.commit_offsets(session, consumer, message)

    When the transaction commits, the messages of the partition of `message` are acked up to and including `message`.
    Without `message`, all messages that the consumer has returned are acked. So each result is committed exactly once.
    A consumer that is no longer the owner of the partition cannot commit its results: the offset's row is updated only
    if no owner with a higher generation has claimed the partition.

    Args: `session`: a Session or Connection of the database that the consumer got as offsets="sql:URL"; for an
    AsyncSession or AsyncConnection, await the result. `consumer`: of any API variant.
    Raises: Fenced if the partition is assigned to another member: let the error roll back the transaction, and continue
    with the next message. BadRequest if the consumer or the session is unsuitable, for example a consumer that stores
    its offsets elsewhere. NotAllowed if the session uses several databases or another one than the consumer, or commits
    each statement by itself. Errors of SQLAlchemy if the database fails.
    """
    session = _unscoped(session)
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    if asynchronous is not None and isinstance(session, asynchronous.AsyncSession | asynchronous.AsyncConnection):
        running: Awaitable[None] = session.run_sync(_commit_in_session, consumer, message)
        return running
    if not isinstance(session, Session | Connection):
        raise BadRequest(f"A session or a connection of SQLAlchemy is wanted, not {session!r}.")
    _commit_in_session(session, consumer, message)
    return None


def _unscoped(session: Any) -> Any:
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    is_scoped = isinstance(session, scoped_session) or (
        asynchronous is not None and isinstance(session, asynchronous.async_scoped_session)
    )
    return session() if is_scoped else session


def _commit_in_session(session: Session | Connection, consumer: Any, message: ReceivedMessage[Any] | None) -> None:
    offsets = external_offsets(consumer, message)
    if not isinstance(offsets.storage, SqlOffsets):
        raise BadRequest(
            'commit_offsets needs a consumer with offsets="sql:URL", the URL of this transaction\'s database: otherwise'
            " it reads its offsets elsewhere."
        )
    if isinstance(session, Session):
        session_bind(session)  # This raises NotAllowed if the session has several databases, or none.
    connection = session if isinstance(session, Connection) else session.connection()
    require_no_autocommit(connection)
    _require_same_database(connection, offsets.storage)
    lost = save_rows(connection, offsets.group, offsets.offsets)
    if lost or offsets.fenced is not None:
        _redeliver_others(offsets, offsets.storage, lost)
        raise offsets.fenced or fenced(offsets.storage.shown, offsets.group, lost)
    if isinstance(session, Session):
        _mark_saved_after_commit(session, offsets)
    else:
        offsets.mark_delegated()


def _redeliver_others(offsets: ExternalOffsets, storage: SqlOffsets, lost: Collection[PartitionName]) -> None:
    """Let the consumer deliver messages again from the stored offsets, except those of the `lost` partitions."""
    # The caller's transaction has locked the rows of the offsets and is going to be rolled back. So the offsets that
    # `storage` reads now, in another transaction, are the ones that will be stored after the rollback.
    others = [name for name in offsets.positions if name not in lost]
    kept = storage.read(offsets.group, others) if others else {}
    offsets.mark_fenced(lost, kept)


def _require_same_database(connection: Connection, storage: SqlOffsets) -> None:
    """Raise NotAllowed if session and consumer certainly use different databases."""
    # The host names are not compared, because a host can have several names.
    here, there = connection.engine.url, storage.url
    same = here.get_backend_name() == there.get_backend_name()
    if same and here.get_backend_name() == "sqlite":
        same = database_address(here) == database_address(there)
    elif same and here.database and there.database:
        same = here.database == there.database
    if not same:
        raise NotAllowed(
            f"The consumer's offsets are in {storage.shown}, this transaction is of"
            f" {url_without_passwords(here.render_as_string())}: both must be the same database."
        )


_uncommitted: WeakKeyDictionary[Session, list[ExternalOffsets]] = WeakKeyDictionary()
"""Session with event listeners -> offsets that commit with the session's current transaction."""


def _mark_saved_after_commit(session: Session, offsets: ExternalOffsets) -> None:
    """When the transaction commits, mark the offsets as saved in the consumer.

    The consumer then does not save these offsets again. To save them again would do no harm.
    """
    if session not in _uncommitted:
        _uncommitted[session] = []
        event.listen(session, "after_commit", _after_commit)
        event.listen(session, "after_soft_rollback", _after_rollback)
    _uncommitted[session].append(offsets)


def _after_commit(session: Session) -> None:
    if not session.in_nested_transaction():
        offsets, _uncommitted[session] = _uncommitted[session], []
        for each in offsets:
            each.mark_committed()


def _after_rollback(session: Session, _: Any) -> None:
    # After a rollback to a savepoint it is unknown which offsets are rolled back, but discarding all of them is safe.
    _uncommitted[session] = []
