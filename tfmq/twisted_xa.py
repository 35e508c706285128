"""The Twisted face of a producer as an XA resource: names, parameters and promises as in `tfmq.xa`."""

from __future__ import annotations

from typing import Protocol

import tfmq.xa
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.faces import awaitable, copy_docs_from
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import XaBranches, check_xa_producer, notify_committed
from tfmq.twisted_transactions import Transaction


class Resource(Protocol):
    """A `tfmq.twisted.Producer`."""

    _core: ProducerCore
    _driver: DeferredDriver


@copy_docs_from(tfmq.xa.XAResource)
class XAResource:
    """`tfmq.XAResource` for Twisted: methods give Deferreds."""

    def __init__(self, producer: Resource) -> None:
        check_xa_producer(producer, DeferredDriver, "tfmq.twisted")
        self._driver = producer._driver
        self._core = XaBranches(producer._core.transactions)

    start = deferred(awaitable(XaBranches.start, Transaction))
    prepare = deferred(awaitable(XaBranches.prepare))
    commit = deferred(awaitable(XaBranches.commit, notify_committed))
    rollback = deferred(awaitable(XaBranches.rollback))
    recover = deferred(awaitable(XaBranches.recover))
    forget = deferred(awaitable(XaBranches.forget))

    def end(self, xid: str) -> None:
        self._core.end(xid)
