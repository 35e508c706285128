"""The asyncio face of a producer as an XA resource: names, parameters and promises as in `tfmq.xa`, awaited."""

from __future__ import annotations

from typing import Protocol

import tfmq.xa
from tfmq.aio_transactions import Transaction
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.faces import copy_docs_from
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import XaBranches, check_xa_producer


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
        self._branches = XaBranches(producer._core.transactions)

    async def start(self, xid: str, timeout: float | None = None, *, resume: bool = False) -> Transaction:
        return Transaction(await self._driver.run(self._branches.start(xid, timeout, resume)))

    def end(self, xid: str) -> None:
        self._branches.end(xid)

    async def prepare(self, xid: str) -> str:
        return await self._driver.run(self._branches.prepare(xid))

    async def commit(self, xid: str, one_phase: bool = False) -> str:
        branch = await self._driver.run(self._branches.commit(xid, one_phase))
        for each in branch.pop_committed_offsets():
            each.mark_committed()
        return branch.state

    async def rollback(self, xid: str) -> str:
        return await self._driver.run(self._branches.roll_back(xid))

    async def recover(self, group: str | None = None) -> list[str]:
        return await self._driver.run(self._branches.recover(group))

    async def forget(self, xid: str) -> bool:
        return await self._driver.run(self._branches.forget(xid))
