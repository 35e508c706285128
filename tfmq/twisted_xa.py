"""The Twisted face of a producer as an XA resource: names, parameters and promises as in `tfmq.xa`."""

from __future__ import annotations

from typing import Protocol

import tfmq.xa
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.faces import documented_as
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import Branches, checked_resource
from tfmq.twisted_transactions import Transaction


class Resource(Protocol):
    """A `tfmq.twisted.Producer`."""

    _core: ProducerCore
    _driver: DeferredDriver


@documented_as(tfmq.xa.XAResource)
class XAResource:
    """`tfmq.XAResource` for Twisted: methods give Deferreds."""

    def __init__(self, producer: Resource) -> None:
        checked_resource(producer, DeferredDriver, "tfmq.twisted")
        self._driver = producer._driver
        self._branches = Branches(producer._core.transactions)

    @deferred
    async def start(self, xid: str, timeout: float | None = None, *, resume: bool = False) -> Transaction:
        return Transaction(await self._driver.run(self._branches.starting(xid, timeout, resume)))

    def end(self, xid: str) -> None:
        self._branches.end(xid)

    @deferred
    async def prepare(self, xid: str) -> str:
        return await self._driver.run(self._branches.preparing(xid))

    @deferred
    async def commit(self, xid: str, one_phase: bool = False) -> str:
        branch = await self._driver.run(self._branches.committing(xid, one_phase))
        for each in branch.take_committed():
            each.committed()
        return branch.state

    @deferred
    async def rollback(self, xid: str) -> str:
        return await self._driver.run(self._branches.rolling_back(xid))

    @deferred
    async def recover(self, group: str | None = None) -> list[str]:
        return await self._driver.run(self._branches.recovering(group))

    @deferred
    async def forget(self, xid: str) -> bool:
        return await self._driver.run(self._branches.forgetting(xid))
