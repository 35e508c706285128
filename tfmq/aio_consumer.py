"""The asyncio consumer, with the operations of `tfmq.client.consumer.core` as coroutines.

A call may be cancelled; the consumer remains usable.
"""

import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal

import tfmq.consumer
from tfmq.client.api_variants import awaitable, copy_docs_from
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.consumer.message import Codec, ReceivedMessage, Value
from tfmq.client.consumer.options import (
    DEFAULT_STORE,
    FETCH_BYTES,
    PREFETCH_BYTES,
    REFRESH_SECONDS,
    RETRIES,
    SAVE_SECONDS,
    SESSION_SECONDS,
    TIMEOUT_SECONDS,
    MessageFilter,
    PartitionCallback,
    Partitions,
    Start,
    Topics,
    check_poll,
)
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.worker.asyncio_runner import TaskRunner
from tfmq.client.worker.listeners import Listener
from tfmq.consumer_base import AwaitedConsumer
from tfmq.hooks import Hook
from tfmq.offsets.storage import OffsetStorage


@copy_docs_from(tfmq.consumer.Consumer)
class Consumer(AwaitedConsumer[Value]):
    """`tfmq.Consumer` for asyncio: methods that wait are coroutines, and messages are read in `async for`.

    The constructor uses neither network nor event loop; the consumer belongs to the loop in which it first waits.
    """

    _driver: AsyncDriver
    _runner_type = TaskRunner

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        topics: Topics = None,
        partitions: Partitions = None,
        group: str | None = None,
        start: Start = "earliest",
        read: Literal["forced", "written"] = "forced",
        on_damage: Literal["stop", "skip"] = "stop",
        on_out_of_range: Literal["stop", "earliest", "latest"] = "stop",
        commits: Literal["auto", "manual", "before"] = "auto",
        offsets: str | OffsetStorage = "broker",
        retries: int = RETRIES,
        dead_letters: str | os.PathLike[str] | None = DEFAULT_STORE,
        tags: str | Iterable[str] | None = None,
        where: MessageFilter = None,
        codec: Codec[Value] | Mapping[str, Codec[Value]] | None = None,
        hooks: Sequence[Hook] = (),
        strategy: Literal["sticky", "range", "consistent_hash"] = "sticky",
        broadcast: bool | str = False,
        coordinator: str = "broker",
        on_assigned: PartitionCallback = None,
        on_revoked: PartitionCallback = None,
        timeout: float = TIMEOUT_SECONDS,
        session: float = SESSION_SECONDS,
        save_every: float = SAVE_SECONDS,
        refresh_every: float = REFRESH_SECONDS,
        fetch_bytes: int = FETCH_BYTES,
        prefetch_bytes: int = PREFETCH_BYTES,
        client_id: str | None = None,
        standby: bool = False,
    ) -> None:
        self._connect(locals(), AsyncDriver, awaits=True)

    async def poll(self, timeout: float | None = 1.0, max_messages: int = 500) -> list[ReceivedMessage[Value]]:
        check_poll(timeout, max_messages)
        return await self._driver.run(self._core.poll(timeout, max_messages))

    def arrow_batches(
        self, columns: Iterable[str] | None = None, *, timeout: float | None = None
    ) -> AsyncIterator[Any]:
        return self._read_columns(columns, timeout)

    commit = awaitable(ConsumerCore.commit)
    seek = awaitable(ConsumerCore.seek)
    pause = awaitable(ConsumerCore.pause)
    resume = awaitable(ConsumerCore.resume)
    lag = awaitable(ConsumerCore.lag)
    position = awaitable(ConsumerCore.position)
    committed = awaitable(ConsumerCore.committed)

    async def run(
        self,
        listener: Listener | None = None,
        *,
        workers: int = 1,
        order: Literal["partition", "key", "none"] = "partition",
        signals: bool = True,
        tracebacks: bool = True,
    ) -> None:
        self._driver.check_caller()
        running = self._create_run(listener, workers, order, tracebacks)
        hooks = self._core.options.hooks
        try:
            await self._runner_type(running, self._driver, self._listeners, hooks, self.stop).run(workers, signals)
        finally:
            await self._driver.close()

    async def close(self) -> None:
        await self._close(processed=False)
