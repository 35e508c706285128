"""The Twisted API: the classes of `tfmq`, with Deferreds from the methods that wait.

Names, parameters and guarantees are those of `tfmq.Producer`, `tfmq.Consumer` and `tfmq.Admin`.

    producer = tfmq.twisted.Producer()
    producer.send("orders", b"...", key="42").addCallback(lambda result: print(result.offset))

A client belongs to one reactor: the argument `reactor`, or the one that is installed when the client is first used;
creating a client needs no reactor. A Deferred may be cancelled: the caller stops waiting, and the client continues.
Errors about invalid arguments are reported by the Deferred too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import iscoroutinefunction, isgeneratorfunction, unwrap
from typing import Any, NoReturn

from twisted.internet.threads import blockingCallFromThread

import tfmq.admin
import tfmq.aio
import tfmq.producer
import tfmq.transactions
from tfmq.client.admin.admin import AdminCore
from tfmq.client.api_variants import awaitable, copy_docs_from, shared
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.consumer.external_offsets import transaction_positions
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.producer import interpreter_exit
from tfmq.client.producer.core import BATCH_BYTES, BUFFER_BYTES, LINGER_MS, TIMEOUT_SECONDS, ProducerCore
from tfmq.client.producer.delivery import AsyncDeliveryOwner
from tfmq.client.producer.xa import XaBranches, check_xa_producer, notify_committed
from tfmq.client.send.batch import Delivery
from tfmq.client.send.delivery_time import Delay, Moment
from tfmq.client.send.partitioner import PartitionSelector
from tfmq.client.transaction.check_back import Check, InDoubt
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle
from tfmq.codecs import Codec
from tfmq.errors import Busy
from tfmq.hooks import Hook
from tfmq.transactions import ProducerLike
from tfmq.transactions import XAResource as BlockingXAResource
from tfmq.twisted_consumer import Consumer as Consumer


@copy_docs_from(tfmq.producer.Producer)
class Producer:
    """`tfmq.Producer` for Twisted: methods that wait return Deferreds.

    The Deferreds of `send` and `send_many` wait for the acknowledgement. `reactor` None: the installed reactor.
    """

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
        reactor: Any = None,
    ) -> None:
        self._core = ProducerCore(AsyncDeliveryOwner, DeferredDriver, locals())
        self._driver: DeferredDriver = self._core.driver
        self._driver.reactor = reactor
        interpreter_exit.open_producers.add(self._core.owner)

    send = deferred(
        tfmq.aio.Producer.send,
        """In Twisted: the result of the Deferred is the acknowledged `SendResult`.

        Sends of many callers share batches. If the Deferred is cancelled while it waits for the acknowledgement,
        the message is sent all the same.
        """,
    )

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
        """Send one message without waiting, and return its delivery handle, which a coroutine may await.

        Raises `Busy` if the buffer is full. Invalid arguments raise the same errors as in `send`.
        """
        self._driver.check_caller()
        core = self._core
        message = core.make_message(topic, payload, key, tag, properties, delay, deliver_at, partition)
        data = core.encode_payload(topic, message)
        if not core.accumulator.has_room():
            raise Busy(f"The buffer of {core.options.buffer_bytes} bytes is full: wait for something first.")
        delivery = core.append(topic, message, data)
        self._driver.wake()
        return delivery

    send_many = deferred(
        tfmq.aio.Producer.send_many,
        """In Twisted: the Deferred waits for all acknowledgements; its result is the list of results.""",
    )
    send_arrow = deferred(
        tfmq.aio.Producer.send_arrow,
        """In Twisted: the Deferred waits for all acknowledgements; its result is the list of results.""",
    )
    cancel = deferred(awaitable(ProducerCore.cancel))
    reschedule = deferred(awaitable(ProducerCore.reschedule))
    flush = deferred(awaitable(ProducerCore.flush))

    close = deferred(tfmq.aio.Producer.close)
    stats = shared(tfmq.aio.Producer.stats)

    def transaction(self) -> Transaction:
        """Usage in coroutines: `async with producer.transaction() as tx: await tx.send(...)`."""
        self._driver.check_caller()
        return Transaction(self._core.transactions.begin())

    @deferred
    async def begin(self, xid: str | None = None, timeout: float | None = None) -> Transaction:
        self._driver.check_caller()
        core = self._core.transactions.begin(xid, timeout)
        await self._driver.run(core.begin())
        return Transaction(core)

    @deferred
    async def resume(self, xid: str) -> Transaction:
        return Transaction(await self._driver.run(self._core.transactions.resume(xid)))

    def transaction_check(self, function: Check) -> Check:
        """In Twisted `function` may be a coroutine or `inlineCallbacks` function, which runs in the reactor."""
        self._driver.check_caller()
        self._core.transactions.add_check(checked_in(self._driver, function))
        self._driver.wake()
        return function

    def xa(self) -> XAResource:
        return XAResource(self)

    __repr__ = shared(tfmq.aio.Producer.__repr__)
    __aexit__ = shared(tfmq.aio.Producer.__aexit__)

    async def __aenter__(self) -> Producer:
        return self


@copy_docs_from(tfmq.transactions.Transaction)
class Transaction(TransactionHandle):
    """`tfmq.transactions.Transaction` for Twisted: methods return Deferreds.

    Coroutines may use `async with`. If the Deferred of such a coroutine is cancelled inside the block, the
    transaction is rolled back.
    """

    def __init__(self, core: TransactionCore) -> None:
        self._core = core
        self._producer = core.producer
        self._driver: DeferredDriver = core.producer.driver

    send = deferred(
        tfmq.aio.Transaction.send,
        """In Twisted: the Deferred's result is the handle, which a coroutine may await after the commit.""",
    )
    send_many = deferred(tfmq.aio.Transaction.send_many)
    prepare = deferred(tfmq.aio.Transaction.prepare)
    commit = deferred(tfmq.aio.Transaction.commit)
    rollback = deferred(tfmq.aio.Transaction.rollback)

    def commit_offsets(self, consumer: Consumer[Any]) -> None:
        self._driver.check_caller()
        self._core.add_offsets(transaction_positions(consumer))

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "A transaction of tfmq.twisted is awaited: write `async with producer.transaction() as tx:`, not `with`; or"
            " begin(), then commit() and rollback() in callbacks."
        )

    __exit__ = shared(tfmq.aio.Transaction.__exit__)
    __aexit__ = shared(tfmq.aio.Transaction.__aexit__)

    async def __aenter__(self) -> Transaction:
        self._driver.check_caller()
        self._core.enter()
        return self


def checked_in(driver: DeferredDriver, function: Any) -> Check:
    """Return `function` as a check-back function that any thread may call.

    A coroutine function, or one made by `inlineCallbacks`, runs in the reactor.
    """
    if not iscoroutinefunction(function) and not isgeneratorfunction(unwrap(function)):
        check: Check = function
        return check

    def ask(transaction: InDoubt) -> Any:
        return blockingCallFromThread(driver.reactor, function, transaction)

    return ask


@copy_docs_from(BlockingXAResource)
class XAResource:
    """`tfmq.XAResource` for Twisted: methods return Deferreds."""

    def __init__(self, producer: ProducerLike[DeferredDriver]) -> None:
        check_xa_producer(producer, DeferredDriver, "tfmq.twisted")
        self._driver = producer._driver
        self._core = XaBranches(producer._core.transactions)

    start = deferred(awaitable(XaBranches.start, Transaction))
    prepare = deferred(awaitable(XaBranches.prepare))
    commit = deferred(awaitable(XaBranches.commit, notify_committed))
    rollback = deferred(awaitable(XaBranches.rollback))
    recover = deferred(awaitable(XaBranches.recover))
    forget = deferred(awaitable(XaBranches.forget))
    end = shared(tfmq.aio.XAResource.end)


@copy_docs_from(tfmq.admin.Admin)
class Admin:
    """`tfmq.Admin` for Twisted: methods return Deferreds. `reactor` None: the installed reactor."""

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        client_id: str | None = None,
        standby: bool = False,
        reactor: Any = None,
    ) -> None:
        _, self._driver, _ = make_client_parts(servers, DeferredDriver, client_id=client_id, operator=True)
        self._driver.link.accepts_standby = standby
        self._driver.reactor = reactor
        self._core = AdminCore(self._driver.link, timeout)

    ping = deferred(awaitable(AdminCore.ping))
    status = deferred(awaitable(AdminCore.status))
    promote_replica = deferred(awaitable(AdminCore.promote_replica))
    topics = deferred(awaitable(AdminCore.topics))
    topic = deferred(awaitable(AdminCore.topic))
    create_topic = deferred(awaitable(AdminCore.create_topic))
    grow_topic = deferred(awaitable(AdminCore.grow_topic))
    set_topic = deferred(awaitable(AdminCore.set_topic))
    delete_topic = deferred(awaitable(AdminCore.delete_topic))
    resume = deferred(awaitable(AdminCore.resume))
    truncate_before = deferred(awaitable(AdminCore.truncate_before))
    purge = deferred(awaitable(AdminCore.purge))
    locate = deferred(awaitable(AdminCore.locate))
    trace = deferred(awaitable(AdminCore.trace))
    trace_delayed = deferred(awaitable(AdminCore.trace_delayed))
    find_key = deferred(awaitable(AdminCore.find_key))
    groups = deferred(awaitable(AdminCore.groups))
    group = deferred(awaitable(AdminCore.group))
    reset_group = deferred(awaitable(AdminCore.reset_group))
    delete_group = deferred(awaitable(AdminCore.delete_group))
    transactions = deferred(awaitable(AdminCore.transactions))
    transaction = deferred(awaitable(AdminCore.transaction))
    commit_transaction = deferred(awaitable(AdminCore.commit_transaction))
    rollback_transaction = deferred(awaitable(AdminCore.rollback_transaction))
    forget_transaction = deferred(awaitable(AdminCore.forget_transaction))
    commit_groups = deferred(awaitable(AdminCore.commit_groups))
    commit_group = deferred(awaitable(AdminCore.commit_group))
    abort_commit_group = deferred(awaitable(AdminCore.abort_commit_group))
    forget_commit_group = deferred(awaitable(AdminCore.forget_commit_group))
    delayed = deferred(awaitable(AdminCore.delayed))
    delayed_histogram = deferred(awaitable(AdminCore.delayed_histogram))
    describe_delayed = deferred(awaitable(AdminCore.describe_delayed))
    cancel = deferred(awaitable(AdminCore.cancel))
    reschedule = deferred(awaitable(AdminCore.reschedule))
    schedule = deferred(awaitable(AdminCore.schedule))
    schedules = deferred(awaitable(AdminCore.schedules))
    describe_schedule = deferred(awaitable(AdminCore.describe_schedule))
    pause_schedule = deferred(awaitable(AdminCore.pause_schedule))
    resume_schedule = deferred(awaitable(AdminCore.resume_schedule))
    remove_schedule = deferred(awaitable(AdminCore.remove_schedule))

    close = deferred(tfmq.aio.Admin.close)
    __repr__ = shared(tfmq.aio.Admin.__repr__)
    __aexit__ = shared(tfmq.aio.Admin.__aexit__)

    async def __aenter__(self) -> Admin:
        return self
