"""The Twisted face of a producer as an XA resource: names, parameters and promises as in `tfmq.xa`."""

from __future__ import annotations

from typing import Protocol

import tfmq.xa
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.faces import copy_docs_from
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import XaBranches, check_xa_producer
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
        self._branches = XaBranches(producer._core.transactions)

    @deferred
    async def start(self, xid: str, timeout: float | None = None, *, resume: bool = False) -> Transaction:
        return Transaction(await self._driver.run(self._branches.start(xid, timeout, resume)))

    def end(self, xid: str) -> None:
        self._branches.end(xid)

    @deferred
    async def prepare(self, xid: str) -> str:
        return await self._driver.run(self._branches.prepare(xid))

    @deferred
    async def commit(self, xid: str, one_phase: bool = False) -> str:
        branch = await self._driver.run(self._branches.commit(xid, one_phase))
        for each in branch.pop_committed_offsets():
            each.mark_committed()
        return branch.state

    @deferred
    async def rollback(self, xid: str) -> str:
        return await self._driver.run(self._branches.roll_back(xid))

    @deferred
    async def recover(self, group: str | None = None) -> list[str]:
        return await self._driver.run(self._branches.recover(group))

    @deferred
    async def forget(self, xid: str) -> bool:
        return await self._driver.run(self._branches.forget(xid))
