"""The asyncio variants of `tfmq.transactions.Transaction` and `tfmq.XAResource`, with coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import tfmq.transactions
from tfmq.client.api_variants import awaitable, copy_docs_from
from tfmq.client.consumer.external_offsets import transaction_positions
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.producer.xa import XaBranches, check_xa_producer, notify_committed
from tfmq.client.send.batch import Deliveries, Delivery
from tfmq.client.send.delivery_time import Delay, DeliveryTime, Moment
from tfmq.client.transaction.check_back import Check, InDoubt
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle
from tfmq.transactions import ProducerLike
from tfmq.transactions import XAResource as BlockingXAResource

if TYPE_CHECKING:
    from tfmq.aio_consumer import Consumer


@copy_docs_from(tfmq.transactions.Transaction)
class Transaction(TransactionHandle):
    """`tfmq.transactions.Transaction` for asyncio, with `async with`.

    `send`, `send_many`, `prepare`, `commit` and `rollback` are awaited. `commit_offsets` is not: it only
    records the offsets, and `prepare` or `commit` sends them. If the task is cancelled inside `async with`,
    the transaction is rolled back.
    """

    def __init__(self, core: TransactionCore) -> None:
        self._core = core
        self._producer = core.producer
        self._driver: AsyncDriver = core.producer.driver

    async def send(
        self,
        topic: str,
        payload: Any,
        key: bytes | bytearray | memoryview | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: Delay | None = None,
        partition: int | None = None,
        *,
        deliver_at: Moment | None = None,
    ) -> Delivery:
        """In asyncio: the awaited result is the delivery handle, which may itself be awaited after the commit."""
        self._driver.check_caller()
        core = self._core
        message = self._producer.make_message(topic, payload, key, tag, properties, delay, deliver_at, partition)
        data = self._producer.encode_payload(topic, message)
        if not core.can_append(topic):
            return await self._driver.run(core.send(topic, message, data))
        delivery = core.append(topic, message, data)
        if self._producer.link.background_requests:
            self._driver.wake()
        return delivery

    async def send_many(
        self, topic: str, payloads: Iterable[Any], delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Deliveries:
        return await self._driver.run(self._core.send_many(topic, payloads, DeliveryTime(delay, deliver_at)))

    def commit_offsets(self, consumer: Consumer[Any]) -> None:
        self._driver.check_caller()
        self._core.add_offsets(transaction_positions(consumer))

    async def prepare(self) -> str:
        return await self._driver.run(self._core.prepare())

    async def commit(self) -> str:
        self._driver.check_caller()
        try:
            return await self._driver.run(self._core.commit())
        finally:
            self._core.notify_consumers()

    async def rollback(self) -> str:
        self._driver.check_caller()
        try:
            return await self._driver.run(self._core.roll_back())
        finally:
            self._core.notify_consumers()

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "A transaction of tfmq.aio is awaited: write `async with producer.transaction() as tx:`, not `with`."
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Never called: `__enter__` raises. Python requires both methods of a context manager."""

    async def __aenter__(self) -> Transaction:
        self._driver.check_caller()
        self._core.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):  # the block is in a discarded generator; perhaps no event loop runs
            self._core.drop(None)
            self._driver.wake()
            return
        try:
            await self._driver.run(self._core.exit(error))
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")
        finally:
            self._core.notify_consumers()


def checked_in(driver: AsyncDriver, function: Any) -> Check:
    """Return `function` as a check-back that any thread may call; a coroutine function runs in the driver's loop."""
    if not iscoroutinefunction(function):
        check: Check = function
        return check

    def ask(transaction: InDoubt) -> Any:
        loop = driver.loop
        assert loop is not None, "the question came through it"
        return asyncio.run_coroutine_threadsafe(function(transaction), loop).result()

    return ask


@copy_docs_from(BlockingXAResource)
class XAResource:
    """`tfmq.XAResource` for asyncio."""

    def __init__(self, producer: ProducerLike[AsyncDriver]) -> None:
        check_xa_producer(producer, AsyncDriver, "tfmq.aio")
        self._driver = producer._driver
        self._core = XaBranches(producer._core.transactions)

    start = awaitable(XaBranches.start, Transaction)
    prepare = awaitable(XaBranches.prepare)
    commit = awaitable(XaBranches.commit, notify_committed)
    rollback = awaitable(XaBranches.rollback)
    recover = awaitable(XaBranches.recover)
    forget = awaitable(XaBranches.forget)

    def end(self, xid: str) -> None:
        self._driver.check_caller()
        self._core.end(xid)
