"""The asyncio face of a producer as an XA resource: names, parameters and promises as in `tfmq.xa`, awaited."""

from __future__ import annotations

from typing import Protocol

import tfmq.xa
from tfmq.aio_transactions import Transaction
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.faces import awaitable, copy_docs_from
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import XaBranches, check_xa_producer, notify_committed


class Resource(Protocol):
    """A `tfmq.aio.Producer`."""

    _core: ProducerCore
    _driver: AsyncDriver


@copy_docs_from(tfmq.xa.XAResource)
class XAResource:
    """`tfmq.XAResource` for asyncio."""

    def __init__(self, producer: Resource) -> None:
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
        self._core.end(xid)
