"""The two faces of a transaction of database and broker: `with`, and `async with`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Table
from sqlalchemy.orm import Session, scoped_session

import tfmq.producer
from tfmq.errors import BadRequest, NotAllowed
from tfmq.sql import database as rows
from tfmq.sql.commit_protocol import AsyncHands, BlockingHands, Sharing, walk, walk_async
from tfmq.sql.recovery import attend, check_producer
from tfmq.sql.session import SessionPart, bind_of, node_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    import tfmq.aio
    from tfmq.client.send.batch import Deliveries, Delivery


class _Transaction:
    """What both faces have."""

    def __init__(
        self,
        session: Session,
        hands: Any,
        producer: Any,
        two_phase: bool | None,
        timeout: float | None,
        table: Table,
    ) -> None:
        part = SessionPart(session, table, two_phase, rows.now)
        self._producer = producer
        self._entered = False

        def begin(xid: str) -> Any:
            return producer.begin(xid, timeout)

        self._sharing = Sharing(part, hands, begin, lambda: node_of(producer))

    @property
    def xid(self) -> str:
        """Its name: at the broker (`tfmq tx show`), in the table, and in PostgreSQL's pg_prepared_xacts. Before it is
        begun: "".
        """
        return self._sharing.xid

    @property
    def state(self) -> str:
        """As that of any transaction, see `tfmq.Transaction`; "new" before it is begun. Behind the block it is
        "committed", "applying" (a partition that takes no writes now has its part later), or "prepared" and "unknown"
        where the broker could not be told: then the database has committed, and the broker asks.
        """
        transaction = self._sharing.transaction
        return "new" if transaction is None else str(transaction.state)

    def _enter(self) -> None:
        if self._entered:
            raise NotAllowed(
                "A transaction is entered once: call tfmq.sql.transaction again for the next one."
            )
        self._entered = True
        attend(self._producer, self._sharing.part.engine, self._sharing.part.table)

    def _sends(self) -> Any:
        """The broker's transaction, from now on with something in it."""
        transaction = self._sharing.transaction
        if transaction is None:
            raise NotAllowed(
                "Send inside the block: with tfmq.sql.transaction(session, producer) as tx: tx.send(...)"
            )
        self._sharing.is_empty = False
        return transaction

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.xid} {self.state}>"


class Transaction(_Transaction):
    """Changes of a database and messages, together or not at all: see `tfmq.sql.transaction`."""

    def send(
        self,
        topic: str,
        payload: Any,
        key: bytes | bytearray | memoryview | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: Any = None,
        partition: int | None = None,
        *,
        deliver_at: Any = None,
    ) -> Delivery:
        """Add one message, as `tfmq.Transaction.send` does: its handle is done when the transaction is."""
        sent: Delivery = self._sends().send(
            topic, payload, key, tag, properties, delay, partition, deliver_at=deliver_at
        )
        return sent

    def send_many(
        self, topic: str, payloads: Iterable[Any], delay: Any = None, *, deliver_at: Any = None
    ) -> Deliveries:
        """Add all of `payloads`, as `tfmq.Transaction.send_many` does."""
        sent: Deliveries = self._sends().send_many(topic, payloads, delay, deliver_at=deliver_at)
        return sent

    def commit_offsets(self, consumer: Any) -> None:
        """What `consumer` handed out by now is processed if this commits: see `tfmq.Transaction.commit_offsets`."""
        self._sends().commit_offsets(consumer)

    def __enter__(self) -> Transaction:
        self._enter()
        walk(self._sharing.begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A generator that is thrown away must not wait: then the session's owner rolls back, and the broker's part is
        # given up like every transaction that nobody holds any more.
        if not isinstance(error, GeneratorExit):
            walk(self._sharing.end(error))

    async def __aenter__(self) -> None:
        raise NotAllowed("This session blocks: write `with`, or use an AsyncSession and a tfmq.aio.Producer.")

    async def __aexit__(self, *_: object) -> None:
        """Never reached."""


class AsyncTransaction(_Transaction):
    """Changes of a database and messages, together or not at all: see `tfmq.sql.transaction`."""

    async def send(
        self,
        topic: str,
        payload: Any,
        key: bytes | bytearray | memoryview | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: Any = None,
        partition: int | None = None,
        *,
        deliver_at: Any = None,
    ) -> Delivery:
        """Add one message, as `tfmq.aio.Transaction.send` does: its handle is done when the transaction is."""
        sent: Delivery = await self._sends().send(
            topic, payload, key, tag, properties, delay, partition, deliver_at=deliver_at
        )
        return sent

    async def send_many(
        self, topic: str, payloads: Iterable[Any], delay: Any = None, *, deliver_at: Any = None
    ) -> Deliveries:
        """Add all of `payloads`, as `tfmq.aio.Transaction.send_many` does."""
        sent: Deliveries = await self._sends().send_many(topic, payloads, delay, deliver_at=deliver_at)
        return sent

    def commit_offsets(self, consumer: Any) -> None:
        """What `consumer` handed out by now is processed if this commits: see `tfmq.Transaction.commit_offsets`."""
        self._sends().commit_offsets(consumer)

    async def __aenter__(self) -> AsyncTransaction:
        self._enter()
        await walk_async(self._sharing.begin())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, GeneratorExit):
            await walk_async(self._sharing.end(error))

    def __enter__(self) -> None:
        raise NotAllowed("This session is awaited: write `async with`.")

    def __exit__(self, *_: object) -> None:
        """Never reached."""


class _BlockingSession(BlockingHands):
    """The steps with a session that blocks."""

    def in_session(self, work: Callable[[], Any]) -> Any:
        return work()


class _AsyncSession(AsyncHands):
    """The steps with a session that is awaited."""

    def __init__(self, session: Any) -> None:
        super().__init__(bind_of(session.sync_session).engine)
        self._session = session

    def in_session(self, work: Callable[[], Any]) -> Any:
        return self._session.run_sync(lambda _: work())


@overload
def transaction(
    session: Session | scoped_session[Any],
    producer: tfmq.producer.Producer,
    *,
    two_phase: bool | None = None,
    timeout: float | None = None,
    table: Table = rows.TABLE,
) -> Transaction: ...
@overload
def transaction(
    session: AsyncSession | async_scoped_session[Any],
    producer: tfmq.aio.Producer,
    *,
    two_phase: bool | None = None,
    timeout: float | None = None,
    table: Table = rows.TABLE,
) -> AsyncTransaction: ...
def transaction(
    session: Any,
    producer: Any,
    *,
    two_phase: bool | None = None,
    timeout: float | None = None,
    table: Table = rows.TABLE,
) -> Transaction | AsyncTransaction:
    """One transaction of the session's database and of the broker: both commit, or neither, whatever crashes.

        with tfmq.sql.transaction(session, producer) as tx:         # async with, for an AsyncSession
            session.add(order)
            tx.send("orders", order.as_json())

    It ends the session's whole transaction, so leave `session.begin()`, `commit()` and `rollback()` to it; what the
    session did before in the same transaction belongs to it. An exception rolls both back and goes on to the caller.

    A row in the table `tfmq_transaction` decides, see `create_table`. If this process dies in between, or the broker
    cannot be reached, the broker asks any producer of the same group that uses this database (see `check`).

    `two_phase`: whether the database prepares, too; None: where it can, which is PostgreSQL with
    max_prepared_transactions above 0 and a session that has not begun · `timeout`: seconds after which the broker gives
    up what was not prepared; None: its setting (60) · `table`: another one than `tfmq_transaction`.

    Raises, when it is entered: `NotAllowed` and `NotSupported` with a sentence that says what to change,
    `TransactionError`s, `ConnectionFailed`, and what SQLAlchemy raises. When it is left: the same; then nothing is
    committed, except where `TransactionError` says that it is not known yet.
    """
    if isinstance(session, scoped_session):
        session = session()
    kind = sys.modules.get("sqlalchemy.ext.asyncio")
    if kind is not None and isinstance(session, kind.async_scoped_session):
        session = session()
    is_async = kind is not None and isinstance(session, kind.AsyncSession)
    if not is_async and not isinstance(session, Session):
        raise BadRequest(f"A session of SQLAlchemy is wanted, a Session or an AsyncSession, not {session!r}.")
    check_producer(producer, is_async, "session")
    if is_async:
        hands = _AsyncSession(session)
        return AsyncTransaction(session.sync_session, hands, producer, two_phase, timeout, table)
    return Transaction(
        session, _BlockingSession(bind_of(session).engine), producer, two_phase, timeout, table
    )
