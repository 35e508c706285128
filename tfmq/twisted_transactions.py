"""The Twisted face of a transaction: names, parameters and promises as in `tfmq.transactions`, with Deferreds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import iscoroutinefunction, isgeneratorfunction, unwrap
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from twisted.internet.threads import blockingCallFromThread

import tfmq.transactions
from tfmq.client.consumer.external_offsets import transaction_positions
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.faces import copy_docs_from
from tfmq.client.send.batch import Deliveries, Delivery
from tfmq.client.send.delivery_time import Delay, DeliveryTime, Moment
from tfmq.client.transaction.check_back import Check, InDoubt
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle

if TYPE_CHECKING:
    from tfmq.twisted_consumer import Consumer


@copy_docs_from(tfmq.transactions.Transaction)
class Transaction(TransactionHandle):
    """`tfmq.transactions.Transaction` for Twisted: methods give Deferreds; `async with` in coroutines. A Deferred of
    such a coroutine that is cancelled inside rolls back.
    """

    def __init__(self, core: TransactionCore) -> None:
        self._core = core
        self._producer = core.producer
        self._driver: DeferredDriver = core.producer.driver

    @deferred
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
        """Here a Deferred gives the handle, which a coroutine may await behind the commit."""
        core = self._core
        message = self._producer.make_message(
            topic, payload, key, tag, properties, delay, deliver_at, partition
        )
        data = self._producer.encode_payload(topic, message)
        if not core.can_append(topic):
            return await self._driver.run(core.send(topic, message, data))
        delivery = core.append(topic, message, data)
        if self._producer.link.background_requests:
            self._driver.wake()
        return delivery

    @deferred
    async def send_many(
        self,
        topic: str,
        payloads: Iterable[Any],
        delay: Delay | None = None,
        *,
        deliver_at: Moment | None = None,
    ) -> Deliveries:
        return await self._driver.run(self._core.send_many(topic, payloads, DeliveryTime(delay, deliver_at)))

    def commit_offsets(self, consumer: Consumer[Any]) -> None:
        self._core.add_offsets(transaction_positions(consumer))

    @deferred
    async def prepare(self) -> str:
        return await self._driver.run(self._core.prepare())

    @deferred
    async def commit(self) -> str:
        try:
            return await self._driver.run(self._core.commit())
        finally:
            self._notify_consumers()

    @deferred
    async def rollback(self) -> str:
        try:
            return await self._driver.run(self._core.roll_back())
        finally:
            self._notify_consumers()

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "A transaction of tfmq.twisted is awaited: write `async with producer.transaction() as tx:`, not `with`; or"
            " begin(), then commit() and rollback() in callbacks."
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Never reached; Python looks for it before it enters."""

    async def __aenter__(self) -> Transaction:
        self._core.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):  # a coroutine is thrown away, perhaps without a reactor
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
            self._notify_consumers()


def checked_in(driver: DeferredDriver, function: Any) -> Check:
    """`function` as a thread can call it: one that is a coroutine function, or made by `inlineCallbacks`, runs in the
    reactor.
    """
    if not iscoroutinefunction(function) and not isgeneratorfunction(unwrap(function)):
        check: Check = function
        return check

    def ask(transaction: InDoubt) -> Any:
        return blockingCallFromThread(driver.reactor, function, transaction)

    return ask
