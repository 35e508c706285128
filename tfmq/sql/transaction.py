"""The context managers of shared transactions: `with` (blocking) and `async with` (asyncio)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Table
from sqlalchemy.orm import Session, scoped_session

import tfmq.producer
from tfmq.errors import BadRequest, NotAllowed
from tfmq.sql import database as rows
from tfmq.sql.commit_protocol import AsyncExecutor, BlockingExecutor, SharedTransaction, run_steps, run_steps_async
from tfmq.sql.recovery import register_check_back, require_matching_producer
from tfmq.sql.session import SessionParticipant, broker_node, session_bind

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    import tfmq.aio
    from tfmq.client.send.batch import Deliveries, Delivery


class _BaseTransaction:
    def __init__(
        self,
        session: Session,
        executor: Any,
        producer: Any,
        two_phase: bool | None,
        timeout: float | None,
        table: Table,
    ) -> None:
        participant = SessionParticipant(session, table, two_phase)
        self._producer = producer
        self._entered = False
        self._shared = SharedTransaction(
            participant, executor, lambda xid: producer.begin(xid, timeout), lambda: broker_node(producer)
        )

    @property
    def xid(self) -> str:
        """Name of the transaction at the broker, in the table and in pg_prepared_xacts; "" before it is begun."""
        return self._shared.xid

    @property
    def state(self) -> str:
        """State at the broker, as in `tfmq.Transaction`; "new" before the transaction is begun.

        After the block: "committed"; "applying" if a partition that cannot be written now gets its messages later;
        "prepared" or "unknown" if the broker could not be reached: the database has committed, and check-back follows.
        """
        transaction = self._shared.transaction
        return "new" if transaction is None else str(transaction.state)

    def commit_offsets(self, consumer: Any) -> None:
        """When this transaction commits, ack what `consumer` returned so far, as `tfmq.Transaction.commit_offsets`."""
        self._begun_for_send().commit_offsets(consumer)

    def _enter(self) -> None:
        if self._entered:
            raise NotAllowed("A transaction is entered once: call tfmq.sql.transaction again for the next one.")
        self._entered = True
        register_check_back(self._producer, self._shared.participant.engine, self._shared.participant.table)

    def _begun_for_send(self) -> Any:
        """Return the broker's transaction, and record that it is not empty. Raises NotAllowed before the block."""
        transaction = self._shared.transaction
        if transaction is None:
            raise NotAllowed("Send inside the block: with tfmq.sql.transaction(session, producer) as tx: tx.send(...)")
        self._shared.is_empty = False
        return transaction

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.xid} {self.state}>"


class Transaction(_BaseTransaction):
    """Changes of a database and messages, committed together or not at all: see `tfmq.sql.transaction`."""

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
        """Add one message, as `tfmq.Transaction.send`; the returned handle completes when the transaction ends."""
        sent: Delivery = self._begun_for_send().send(
            topic, payload, key, tag, properties, delay, partition, deliver_at=deliver_at
        )
        return sent

    def send_many(
        self, topic: str, payloads: Iterable[Any], delay: Any = None, *, deliver_at: Any = None
    ) -> Deliveries:
        """Add all of `payloads`, as `tfmq.Transaction.send_many`."""
        sent: Deliveries = self._begun_for_send().send_many(topic, payloads, delay, deliver_at=deliver_at)
        return sent

    def __enter__(self) -> Transaction:
        self._enter()
        run_steps(self._shared.begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After GeneratorExit this code must not wait, so it ends nothing. The code that owns the session rolls the
        # session back. The producer rolls back the broker's part when no reference to its transaction object is left.
        if not isinstance(error, GeneratorExit):
            run_steps(self._shared.end(error))

    async def __aenter__(self) -> None:
        raise NotAllowed("This session blocks: write `with`, or use an AsyncSession and a tfmq.aio.Producer.")

    async def __aexit__(self, *_: object) -> None:
        """Never called, because `__aenter__` raises."""


class AsyncTransaction(_BaseTransaction):
    """Changes of a database and messages, committed together or not at all: see `tfmq.sql.transaction`."""

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
        """Add one message, as `tfmq.aio.Transaction.send`; the returned handle completes when the transaction ends."""
        sent: Delivery = await self._begun_for_send().send(
            topic, payload, key, tag, properties, delay, partition, deliver_at=deliver_at
        )
        return sent

    async def send_many(
        self, topic: str, payloads: Iterable[Any], delay: Any = None, *, deliver_at: Any = None
    ) -> Deliveries:
        """Add all of `payloads`, as `tfmq.aio.Transaction.send_many`."""
        sent: Deliveries = await self._begun_for_send().send_many(topic, payloads, delay, deliver_at=deliver_at)
        return sent

    async def __aenter__(self) -> AsyncTransaction:
        self._enter()
        await run_steps_async(self._shared.begin())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, GeneratorExit):
            await run_steps_async(self._shared.end(error))

    def __enter__(self) -> None:
        raise NotAllowed("This session is awaited: write `async with`.")

    def __exit__(self, *_: object) -> None:
        """Never called, because `__enter__` raises."""


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
    """Return one transaction over the session's database and the broker: both commit or neither.

        tfmq.sql.check(producer, engine)                            # once, at each start of the program

        with tfmq.sql.transaction(session, producer) as tx:         # async with, for an AsyncSession
            session.add(order)
            session.flush()  # a generated key is set now
            tx.send("orders", order.as_json())

    The block ends the session's whole transaction, including earlier changes in it: do not call `session.begin()`,
    `commit()` or `rollback()`. An exception in the block rolls back both sides and is raised again.

    A row in the table `tfmq_transaction` decides (see `create_table`). If this process crashes, or the broker cannot be
    reached, the broker later asks a producer of the same group for the outcome (check-back). A producer can answer
    after it was passed to `check` with this database, or has begun a transaction with this database. Without `check`, a
    consumer whose offsets are in doubt after a crash may wait without end.

    Args: `two_phase`: whether to prepare the database too; None: if possible, which needs PostgreSQL with
    max_prepared_transactions above 0 and a session that has not begun. `timeout`: seconds after which the broker rolls
    back an unprepared transaction; None: the broker's setting (60). `table`: a table other than `tfmq_transaction`.
    Raises, both on entry and on exit: NotAllowed and NotSupported with a sentence that describes what to change,
    TransactionError and its subclasses, ConnectionFailed, and errors of SQLAlchemy. After an error nothing is
    committed, unless the error says that the outcome is not known yet, or that the database has committed its part.
    """
    if isinstance(session, scoped_session):
        session = session()
    kind = sys.modules.get("sqlalchemy.ext.asyncio")
    if kind is not None and isinstance(session, kind.async_scoped_session):
        session = session()
    is_async = kind is not None and isinstance(session, kind.AsyncSession)
    if not is_async and not isinstance(session, Session):
        raise BadRequest(f"A session of SQLAlchemy is wanted, a Session or an AsyncSession, not {session!r}.")
    require_matching_producer(producer, is_async, "session")
    if is_async:
        awaited = AsyncExecutor(session_bind(session.sync_session).engine, session)
        return AsyncTransaction(session.sync_session, awaited, producer, two_phase, timeout, table)
    executor = BlockingExecutor(session_bind(session).engine)
    return Transaction(session, executor, producer, two_phase, timeout, table)
