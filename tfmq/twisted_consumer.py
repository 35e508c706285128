"""The Twisted consumer, with the operations of `tfmq.client.consumer.core` as Deferreds.

A call may be cancelled; the consumer remains usable.
"""

import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal

import tfmq.aio_consumer
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
from tfmq.client.drivers.twisted import DeferredDriver, deferred, start_deferred
from tfmq.client.worker.twisted_runner import DeferredRunner
from tfmq.consumer_base import AwaitedConsumer
from tfmq.hooks import Hook
from tfmq.offsets.storage import OffsetStorage


@copy_docs_from(tfmq.consumer.Consumer)
class Consumer(AwaitedConsumer[Value]):
    """`tfmq.Consumer` for Twisted: methods that wait return Deferreds; coroutines can read with `async for`.

    `reactor` None: the installed reactor.
    """

    _driver: DeferredDriver
    _runner_type = DeferredRunner

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
        reactor: Any = None,
    ) -> None:
        self._connect(locals(), DeferredDriver, awaits=True)
        self._driver.reactor = reactor
        if self._core.membership is not None:
            self._core.rebalance.start_await = start_deferred

    @deferred
    async def poll(self, timeout: float | None = 1.0, max_messages: int = 500) -> list[ReceivedMessage[Value]]:
        check_poll(timeout, max_messages)
        return await self._driver.run(self._core.poll(timeout, max_messages))

    def arrow_batches(
        self, columns: Iterable[str] | None = None, *, timeout: float | None = None
    ) -> AsyncIterator[Any]:
        return self._read_columns(columns, timeout)

    commit = deferred(awaitable(ConsumerCore.commit))
    seek = deferred(awaitable(ConsumerCore.seek))
    pause = deferred(awaitable(ConsumerCore.pause))
    resume = deferred(awaitable(ConsumerCore.resume))
    lag = deferred(awaitable(ConsumerCore.lag))
    position = deferred(awaitable(ConsumerCore.position))
    committed = deferred(awaitable(ConsumerCore.committed))

    run = deferred(
        tfmq.aio_consumer.Consumer.run,
        """Here listeners are called in the reactor: they must not block, and may be coroutine functions or return
        Deferreds; what blocks goes through `deferToThread`. `signals`: a reactor that is told to stop, by SIGTERM and
        SIGINT too, waits for the end of `run`; a second signal ends at once.
        """,
    )
    close = deferred(tfmq.aio_consumer.Consumer.close)
