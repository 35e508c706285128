"""The asyncio variant of `tfmq.Admin`: the same methods, as coroutines."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import tfmq.admin
from tfmq.client.admin.admin import AdminCore
from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.faces import awaitable, copy_docs_from


@copy_docs_from(tfmq.admin.Admin)
class Admin:
    """`tfmq.Admin` for asyncio."""

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        client_id: str | None = None,
    ) -> None:
        _, self._driver, _ = make_client_parts(servers, AsyncDriver, client_id=client_id, operator=True)
        self._core = AdminCore(self._driver.link, timeout)

    ping = awaitable(AdminCore.ping)
    status = awaitable(AdminCore.status)
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
