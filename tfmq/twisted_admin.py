"""The Twisted variant of `tfmq.Admin`: the same methods, which return Deferreds."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import tfmq.admin
from tfmq.client.admin.admin import AdminCore
from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.faces import awaitable, copy_docs_from


@copy_docs_from(tfmq.admin.Admin)
class Admin:
    """`tfmq.Admin` for Twisted: methods return Deferreds. `reactor` None: the installed one."""

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        client_id: str | None = None,
        reactor: Any = None,
    ) -> None:
        _, self._driver, _ = make_client_parts(servers, DeferredDriver, client_id=client_id, operator=True)
        self._driver.reactor = reactor
        self._core = AdminCore(self._driver.link, timeout)

    ping = deferred(awaitable(AdminCore.ping))
    status = deferred(awaitable(AdminCore.status))
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

    @deferred
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
