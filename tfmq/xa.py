"""The blocking XA resource of a producer. The asyncio one is in `tfmq.aio`."""

from __future__ import annotations

from typing import Protocol

from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.faces import blocking, name_methods
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import XaBranches, check_xa_producer, notify_committed
from tfmq.transactions import Transaction


class ProducerLike(Protocol):
    """A `tfmq.Producer`."""

    _core: ProducerCore
    _driver: BlockingDriver


@name_methods
class XAResource:
    """A producer as a resource of a transaction manager, which calls the XA methods.

        resource = tfmq.XAResource(producer)
        tx = resource.start("branch-1"); tx.send("orders", order); resource.end("branch-1")
        resource.prepare("branch-1"); resource.commit("branch-1")

    A branch is identified by its xid, 1 to 249 bytes of text, in every process: any process that finds a
    prepared branch with `recover` may commit it or roll it back. Every method raises `UnknownTransaction` for
    an xid that neither this resource nor the broker knows, and `TransactionState` for a call in the wrong
    order.
    """

    def __init__(self, producer: ProducerLike) -> None:
        check_xa_producer(producer, BlockingDriver, "tfmq")
        self._driver = producer._driver
        self._core = XaBranches(producer._core.transactions)

    start = blocking(XaBranches.start, Transaction)
    prepare = blocking(XaBranches.prepare)
    commit = blocking(XaBranches.commit, notify_committed)
    rollback = blocking(XaBranches.rollback)
    recover = blocking(XaBranches.recover)
    forget = blocking(XaBranches.forget)

    def end(self, xid: str) -> None:
        """End the association with the branch: no more messages are sent in it."""
        with self._driver.lock:
            self._core.end(xid)
