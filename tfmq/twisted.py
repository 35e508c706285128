"""The Twisted API: the classes of `tfmq`, with Deferreds from the methods that wait.

Names, parameters and guarantees are those of `tfmq.Producer`, `tfmq.Consumer` and `tfmq.Admin`.

    producer = tfmq.twisted.Producer()
    producer.send("orders", b"...", key="42").addCallback(lambda result: print(result.offset))

A client belongs to one reactor: the argument `reactor`, or the installed one when the client is first used;
creating a client needs none. A Deferred may be cancelled: the caller stops waiting, and the client continues.
Invalid arguments fail the Deferred too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tfmq.aio
import tfmq.producer
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.faces import awaitable, copy_docs_from, shared
from tfmq.client.producer import delivery
from tfmq.client.producer.core import (
    BATCH_BYTES,
    BUFFER_BYTES,
    LINGER_MS,
    TIMEOUT_SECONDS,
    ProducerCore,
    ProducerSettings,
)
from tfmq.client.producer.delivery import AsyncDeliveryOwner
from tfmq.client.send.batch import Delivery
from tfmq.client.send.delivery_time import Delay, Moment
from tfmq.client.send.partitioner import PartitionSelector
from tfmq.client.transaction.check_back import Check
from tfmq.codecs import Codec
from tfmq.errors import Busy
from tfmq.hooks import Hook
from tfmq.twisted_admin import Admin as Admin
from tfmq.twisted_consumer import Consumer as Consumer
from tfmq.twisted_transactions import Transaction as Transaction
from tfmq.twisted_transactions import XAResource as XAResource
from tfmq.twisted_transactions import checked_in


@copy_docs_from(tfmq.producer.Producer)
class Producer:
    """`tfmq.Producer` for Twisted: methods that wait return Deferreds.

    The results of `send` and `send_many` are acknowledged. `reactor` None: the installed one.
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
        settings = ProducerSettings.from_mapping(locals())
        self._core = ProducerCore(AsyncDeliveryOwner, DeferredDriver, settings)
        self._driver: DeferredDriver = self._core.driver
        self._driver.reactor = reactor
        delivery.register_open(self._core.owner)

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

        Raises `Busy` if the buffer is full, and the errors of `send` for its arguments.
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
    cancel = deferred(awaitable(ProducerCore.cancel))
    reschedule = deferred(awaitable(ProducerCore.reschedule))
    flush = deferred(awaitable(ProducerCore.flush))

    close = deferred(tfmq.aio.Producer.close)
    stats = shared(tfmq.aio.Producer.stats)

    def transaction(self) -> Transaction:
        """In coroutines: `async with producer.transaction() as tx: await tx.send(...)`."""
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
