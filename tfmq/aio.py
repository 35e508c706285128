"""The asyncio API: the classes of `tfmq`, with coroutines in place of methods that wait.

Names, parameters and guarantees are those of `tfmq.Producer`, `tfmq.Consumer` and `tfmq.Admin`. A client
belongs to the event loop that first uses it; creating a client needs no loop.

    async with tfmq.aio.Producer() as producer:
        result = await producer.send("orders", b"...", key="42")
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, NoReturn

import tfmq.admin
import tfmq.producer
import tfmq.transactions
from tfmq.aio_consumer import Consumer as Consumer
from tfmq.client.admin.admin import AdminCore
from tfmq.client.api_variants import awaitable, copy_docs_from
from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.consumer.external_offsets import transaction_positions
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.producer import interpreter_exit
from tfmq.client.producer.core import BATCH_BYTES, BUFFER_BYTES, LINGER_MS, TIMEOUT_SECONDS, ProducerCore
from tfmq.client.producer.delivery import AsyncDeliveryOwner
from tfmq.client.producer.xa import XaBranches, check_xa_producer, notify_committed
from tfmq.client.send.batch import Deliveries, Delivery
from tfmq.client.send.delivery_time import Delay, DeliveryTime, Moment
from tfmq.client.send.partitioner import PartitionSelector
from tfmq.client.transaction.check_back import Check, InDoubt
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle
from tfmq.codecs import Codec
from tfmq.errors import Busy, TfmqError
from tfmq.hooks import Hook
from tfmq.message import SendResult
from tfmq.transactions import ProducerLike
from tfmq.transactions import XAResource as BlockingXAResource


@copy_docs_from(tfmq.producer.Producer)
class Producer:
    """`tfmq.Producer` for asyncio: awaiting `send` or `send_many` returns the results after the acknowledgement."""

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        group: str | None = None,
        acks: str | None = None,
        linger_ms: float = LINGER_MS,
        batch_bytes: int = BATCH_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
        selector: PartitionSelector | str | None = None,
        codec: Codec[Any] | Mapping[str, Codec[Any]] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        hooks: Sequence[Hook] = (),
        client_id: str | None = None,
    ) -> None:
        self._core = ProducerCore(AsyncDeliveryOwner, AsyncDriver, locals())
        self._driver: AsyncDriver = self._core.driver
        interpreter_exit.open_producers.add(self._core.owner)

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
    ) -> SendResult:
        """In asyncio: wait for the acknowledgement, and return the `SendResult`.

        Sends of many tasks share batches. If the task is cancelled while it waits for the acknowledgement,
        the message is sent all the same.
        """
        core = self._core
        message = core.make_message(topic, payload, key, tag, properties, delay, deliver_at, partition)
        delivery = await self._driver.run(core.send(topic, message, core.encode_payload(topic, message)))
        return await delivery

    def send_nowait(
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
        """Send one message without waiting, and return its delivery handle, which may be awaited.

        Raises `Busy` if the buffer is full. Invalid arguments raise the same errors as in `send`.
        """
        self._driver.check_caller()
        core = self._core
        message = core.make_message(topic, payload, key, tag, properties, delay, deliver_at, partition)
        data = core.encode_payload(topic, message)
        if not core.accumulator.has_room():
            raise Busy(f"The buffer of {core.options.buffer_bytes} bytes is full: await something first.")
        delivery = core.append(topic, message, data)
        self._driver.wake()
        return delivery

    async def send_many(
        self, topic: str, payloads: Iterable[Any], delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> list[SendResult]:
        """In asyncio: wait for all acknowledgements, and return the list of results."""
        deliveries = await self._driver.run(self._core.send_many(topic, payloads, DeliveryTime(delay, deliver_at)))
        return await deliveries

    async def send_arrow(self, table: Any, topic: str) -> list[SendResult]:
        """In asyncio: wait for all acknowledgements, and return the list of results."""
        return await (await self._driver.run(self._core.send_arrow(table, topic)))

    cancel = awaitable(ProducerCore.cancel)
    reschedule = awaitable(ProducerCore.reschedule)
    flush = awaitable(ProducerCore.flush)

    async def close(self, timeout: float | None = None) -> None:
        self._driver.check_caller()
        seconds = self._core.options.timeout if timeout is None else timeout
        interpreter_exit.open_producers.discard(self._core.owner)
        try:
            await self._driver.run(self._core.close(seconds))
        finally:
            await self._driver.close()

    def stats(self) -> dict[str, Any]:
        return self._core.stats()

    def transaction(self) -> Transaction:
        """Usage in asyncio: `async with producer.transaction() as tx: await tx.send(...)`."""
        self._driver.check_caller()
        return Transaction(self._core.transactions.begin())

    async def begin(self, xid: str | None = None, timeout: float | None = None) -> Transaction:
        self._driver.check_caller()
        core = self._core.transactions.begin(xid, timeout)
        await self._driver.run(core.begin())
        return Transaction(core)

    async def resume(self, xid: str) -> Transaction:
        return Transaction(await self._driver.run(self._core.transactions.resume(xid)))

    def transaction_check(self, function: Check) -> Check:
        """In asyncio `function` may be a coroutine function, which is awaited in the event loop."""
        self._driver.check_caller()
        self._core.transactions.add_check(checked_in(self._driver, function))
        self._driver.wake()
        return function

    def xa(self) -> XAResource:
        return XAResource(self)

    def __repr__(self) -> str:
        return describe_client(self, self._core.link.servers, group=self._core.group)

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except TfmqError as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")


def __getattr__(name: str) -> Any:
    """Return the module `tfmq.sql` for `tfmq.aio.sql`. It is imported on first use, because it imports SQLAlchemy."""
    if name != "sql":
        raise AttributeError(f"module 'tfmq.aio' has no attribute {name!r}")
    return import_module("tfmq.sql")


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


@copy_docs_from(tfmq.admin.Admin)
class Admin:
    """`tfmq.Admin` for asyncio."""

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        client_id: str | None = None,
        standby: bool = False,
    ) -> None:
        _, self._driver, _ = make_client_parts(servers, AsyncDriver, client_id=client_id, operator=True)
        self._driver.link.accepts_standby = standby
        self._core = AdminCore(self._driver.link, timeout)

    ping = awaitable(AdminCore.ping)
    status = awaitable(AdminCore.status)
    promote_replica = awaitable(AdminCore.promote_replica)
    topics = awaitable(AdminCore.topics)
    topic = awaitable(AdminCore.topic)
    create_topic = awaitable(AdminCore.create_topic)
    grow_topic = awaitable(AdminCore.grow_topic)
    set_topic = awaitable(AdminCore.set_topic)
    delete_topic = awaitable(AdminCore.delete_topic)
    resume = awaitable(AdminCore.resume)
    truncate_before = awaitable(AdminCore.truncate_before)
    purge = awaitable(AdminCore.purge)
    locate = awaitable(AdminCore.locate)
    trace = awaitable(AdminCore.trace)
    trace_delayed = awaitable(AdminCore.trace_delayed)
    find_key = awaitable(AdminCore.find_key)
    groups = awaitable(AdminCore.groups)
    group = awaitable(AdminCore.group)
    reset_group = awaitable(AdminCore.reset_group)
    delete_group = awaitable(AdminCore.delete_group)
    transactions = awaitable(AdminCore.transactions)
    transaction = awaitable(AdminCore.transaction)
    commit_transaction = awaitable(AdminCore.commit_transaction)
    rollback_transaction = awaitable(AdminCore.rollback_transaction)
    forget_transaction = awaitable(AdminCore.forget_transaction)
    commit_groups = awaitable(AdminCore.commit_groups)
    commit_group = awaitable(AdminCore.commit_group)
    abort_commit_group = awaitable(AdminCore.abort_commit_group)
    forget_commit_group = awaitable(AdminCore.forget_commit_group)
    delayed = awaitable(AdminCore.delayed)
    delayed_histogram = awaitable(AdminCore.delayed_histogram)
    describe_delayed = awaitable(AdminCore.describe_delayed)
    cancel = awaitable(AdminCore.cancel)
    reschedule = awaitable(AdminCore.reschedule)
    schedule = awaitable(AdminCore.schedule)
    schedules = awaitable(AdminCore.schedules)
    describe_schedule = awaitable(AdminCore.describe_schedule)
    pause_schedule = awaitable(AdminCore.pause_schedule)
    resume_schedule = awaitable(AdminCore.resume_schedule)
    remove_schedule = awaitable(AdminCore.remove_schedule)

    async def close(self) -> None:
        self._driver.check_caller()
        await self._driver.close()

    def __repr__(self) -> str:
        return describe_client(self, self._driver.link.servers)

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
