"""The asyncio face of what an operator does: `tfmq.aio.Admin`, the names and promises of `tfmq.Admin`, awaited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from types import TracebackType
from typing import Any

import tfmq.admin
from tfmq.client.admin.admin import AdminCore, PartitionPosition
from tfmq.client.admin.delayed import (
    DelayedCounts,
    DelayedDescription,
    DelayedQuery,
    Rescheduled,
    ScheduleDescription,
    ScheduleRequest,
)
from tfmq.client.admin.models import (
    CommitGroupDescription,
    CommitGroupEnd,
    GroupDescription,
    GroupSummary,
    LocatedPosition,
    PurgeResult,
    TopicDescription,
    TransactionDescription,
    TransactionEnd,
)
from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.connection.requests import Topic
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.faces import copy_docs_from
from tfmq.client.send.delivery_time import Delay, Moment


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
        self._operations = AdminCore(self._driver.link, timeout)

    async def ping(self) -> int:
        return await self._driver.run(self._operations.ping())

    async def status(self) -> dict[str, Any]:
        return await self._driver.run(self._operations.status())

    async def topics(self) -> list[Topic]:
        return await self._driver.run(self._operations.topics())

    async def topic(self, name: str) -> TopicDescription:
        return await self._driver.run(self._operations.topic(name))

    async def create_topic(
        self, name: str, partitions: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> TopicDescription:
        return await self._driver.run(self._operations.create_topic(name, partitions, settings))

    async def grow_topic(self, name: str, partitions: int) -> int:
        return await self._driver.run(self._operations.grow_topic(name, partitions))

    async def set_topic(self, name: str, settings: Mapping[str, Any]) -> TopicDescription:
        return await self._driver.run(self._operations.set_topic(name, settings))

    async def delete_topic(self, name: str) -> bool:
        return await self._driver.run(self._operations.delete_topic(name))

    async def resume(self, topic: str, partition: int) -> str:
        return await self._driver.run(self._operations.resume(topic, partition))

    async def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        return await self._driver.run(self._operations.truncate_before(topic, partition, offset))

    async def purge(
        self, topic: str, partition: int | None = None, before: PartitionPosition = "latest"
    ) -> PurgeResult:
        return await self._driver.run(self._operations.purge(topic, partition, before))

    async def locate(self, topic: str, partition: int, place: PartitionPosition) -> LocatedPosition:
        return await self._driver.run(self._operations.locate(topic, partition, place))

    async def groups(self) -> list[GroupSummary]:
        return await self._driver.run(self._operations.groups())

    async def group(self, name: str) -> GroupDescription:
        return await self._driver.run(self._operations.group(name))

    async def reset_group(
        self,
        name: str,
        topic: str,
        place: PartitionPosition,
        partition: int | None = None,
        *,
        create: bool = False,
    ) -> dict[int, int]:
        return await self._driver.run(self._operations.reset_group(name, topic, place, partition, create))

    async def delete_group(self, name: str) -> bool:
        return await self._driver.run(self._operations.delete_group(name))

    async def transactions(
        self,
        states: Sequence[str] | None = None,
        *,
        group: str | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[TransactionDescription]:
        return await self._driver.run(self._operations.transactions(states, group, after, limit))

    async def transaction(self, xid: str, epoch: int = 0) -> TransactionDescription:
        return await self._driver.run(self._operations.transaction(xid, epoch))

    async def commit_transaction(
        self, xid: str, epoch: int = 0, *, heuristic: bool = True, force: bool = False
    ) -> TransactionEnd:
        return await self._driver.run(self._operations.commit_transaction(xid, epoch, heuristic, force))

    async def rollback_transaction(
        self, xid: str, epoch: int = 0, *, heuristic: bool = True
    ) -> TransactionEnd:
        return await self._driver.run(self._operations.rollback_transaction(xid, epoch, heuristic))

    async def forget_transaction(self, xid: str, epoch: int = 0) -> bool:
        return await self._driver.run(self._operations.forget_transaction(xid, epoch))

    async def commit_groups(self) -> list[CommitGroupDescription]:
        return await self._driver.run(self._operations.commit_groups())

    async def commit_group(
        self,
        name: str,
        sequence: int,
        run: str,
        transactions: Sequence[tuple[str, int]],
        rows: int,
        *,
        other_total: bool = False,
    ) -> CommitGroupEnd:
        operation = self._operations.commit_group(name, sequence, run, transactions, rows, other_total)
        return await self._driver.run(operation)

    async def abort_commit_group(self, name: str, sequence: int, run: str) -> str:
        return await self._driver.run(self._operations.abort_commit_group(name, sequence, run))

    async def forget_commit_group(self, name: str) -> bool:
        return await self._driver.run(self._operations.forget_commit_group(name))

    async def delayed(
        self,
        topic: str | None = None,
        *,
        partition: int | None = None,
        key: str | bytes | None = None,
        first: Moment | None = None,
        end: Moment | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[DelayedDescription]:
        asked = DelayedQuery(topic, partition, key, first, end)
        return await self._driver.run(self._operations.delayed(asked, after, limit))

    async def delayed_histogram(self, edges: Sequence[Moment], topic: str | None = None) -> DelayedCounts:
        return await self._driver.run(self._operations.delayed_histogram(edges, topic))

    async def describe_delayed(self, handle: str) -> DelayedDescription:
        return await self._driver.run(self._operations.describe_delayed(handle))

    async def cancel(self, handle: str) -> str:
        return await self._driver.run(self._operations.cancel(handle))

    async def reschedule(
        self, handle: str, delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Rescheduled:
        return await self._driver.run(self._operations.reschedule(handle, delay, deliver_at))

    async def schedule(
        self,
        cron: str,
        topic: str,
        payload: Any,
        *,
        name: str | None = None,
        timezone: str | tzinfo = "UTC",
        key: bytes | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        partition: int | None = None,
        misfire: str = "one",
    ) -> ScheduleDescription:
        wish = ScheduleRequest(cron, topic, payload, name, timezone, key, tag, properties, partition, misfire)
        return await self._driver.run(self._operations.schedule(wish))

    async def schedules(self) -> list[ScheduleDescription]:
        return await self._driver.run(self._operations.schedules())

    async def describe_schedule(self, name: str) -> ScheduleDescription:
        return await self._driver.run(self._operations.describe_schedule(name))

    async def pause_schedule(self, name: str) -> ScheduleDescription:
        return await self._driver.run(self._operations.pause_schedule(name))

    async def resume_schedule(self, name: str) -> ScheduleDescription:
        return await self._driver.run(self._operations.resume_schedule(name))

    async def remove_schedule(self, name: str) -> bool:
        return await self._driver.run(self._operations.remove_schedule(name))

    async def close(self) -> None:
        await self._driver.close()

    def __repr__(self) -> str:
        return describe_client(self, self._driver.link.servers)

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
