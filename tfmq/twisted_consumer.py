"""The Twisted consumer: one method a line over `tfmq.client.consumer.core`; a cancelled Deferred leaves it usable."""

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal

import tfmq.consumer
from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.consumer.core import ConsumerCore, Lag, log
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
    ConsumerArguments,
    MessageFilter,
    PartitionCallback,
    Partitions,
    Start,
    Topics,
    check_arguments,
    check_poll,
    seek_position,
)
from tfmq.client.drivers.twisted import DeferredDriver, deferred, start_deferred
from tfmq.client.faces import copy_docs_from
from tfmq.client.worker.listeners import Function, Listener, Listeners
from tfmq.client.worker.message_context import MessageContextFactory
from tfmq.client.worker.twisted_runner import DeferredRunner
from tfmq.hooks import Hook
from tfmq.offsets.storage import OffsetStorage, PartitionName
from tfmq.runs import create_run, open_dead_letter_store


@copy_docs_from(tfmq.consumer.Consumer)
class Consumer(Generic[Value]):
    """`tfmq.Consumer` for Twisted: methods that wait give Deferreds, and coroutines read in `async for`.

    `reactor`: None: the installed one.
    """

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
        reactor: Any = None,
    ) -> None:
        options = check_arguments(ConsumerArguments.from_mapping(locals()))
        link, self._driver, self._wall_clock = make_client_parts(servers, DeferredDriver, client_id=client_id)
        self._driver.reactor = reactor
        self._core = ConsumerCore(
            options,
            link,
            self._driver.run_in_threads,
            wake_driver=self._driver.wake,
            flush=self._driver.flush,
            raise_flag=self._driver.set_event,
        )
        if self._core.membership is not None:
            self._core.rebalance.start_await = start_deferred
        self._driver.tickers.append(self._core.tasks)
        self._driver.on_fork.append(self._core.reset_after_fork)
        self._listeners = Listeners()
        self._handling = MessageContextFactory(
            self._core,
            self._driver.run,
            partial(
                open_dead_letter_store, options, self._driver.run_in_threads, self._core, self._wall_clock
            ),
            wall_clock=self._wall_clock,
            is_async=True,
        )
        self._core.fetcher.failure_handler = self._handling
        self._loop: AsyncIterator[ReceivedMessage[Value]] | None = None

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage[Value]]:
        """Every message in turn, without end; until `stop` is called."""
        core = self._core
        positions = core.positions
        while (messages := await self._driver.run(core.next_batch())) is not None:
            for message in messages:
                positions.current = message
                yield message

    async def __anext__(self) -> ReceivedMessage[Value]:
        """The next message; waits for it."""
        loop = self._loop = self._loop or aiter(self)
        try:
            return await anext(loop)
        except BaseException:
            self._loop = None
            raise

    @deferred
    async def poll(
        self, timeout: float | None = 1.0, max_messages: int = 500
    ) -> list[ReceivedMessage[Value]]:
        check_poll(timeout, max_messages)
        return await self._driver.run(self._core.poll(timeout, max_messages))

    @deferred
    async def commit(self, message: ReceivedMessage[Any] | None = None) -> None:
        await self._driver.run(self._core.commit(message))

    @deferred
    async def seek(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        ordinal: int | None = None,
        time: datetime | None = None,
        to: Literal["earliest", "latest"] | None = None,
    ) -> None:
        question = seek_position(offset, ordinal, time, to)
        await self._driver.run(self._core.seek(PartitionName(topic, partition), question))

    @deferred
    async def pause(self, topic: str, partition: int) -> None:
        await self._driver.run(self._core.pause(PartitionName(topic, partition)))

    @deferred
    async def resume(self, topic: str, partition: int) -> None:
        await self._driver.run(self._core.resume(PartitionName(topic, partition)))

    @deferred
    async def lag(self) -> Lag:
        return await self._driver.run(self._core.lag())

    @deferred
    async def position(self, topic: str, partition: int) -> int:
        return await self._driver.run(self._core.position(PartitionName(topic, partition)))

    @deferred
    async def committed(self, topic: str, partition: int) -> int | None:
        return await self._driver.run(self._core.committed(PartitionName(topic, partition)))

    def stats(self) -> dict[str, Any]:
        return self._core.stats()

    @deferred
    async def run(
        self,
        listener: Listener | None = None,
        *,
        workers: int = 1,
        order: Literal["partition", "key", "none"] = "partition",
        signals: bool = True,
        tracebacks: bool = True,
    ) -> None:
        """Here listeners are called in the reactor: they must not block, and may be coroutine functions or return
        Deferreds; what blocks goes through `deferToThread`. `signals`: a reactor that is told to stop, by SIGTERM and
        SIGINT too, waits for the end of `run`; a second signal ends at once.
        """
        running = create_run(
            self._core,
            self._listeners,
            listener,
            workers=workers,
            order=order,
            tracebacks=tracebacks,
            beside=self._driver.run_in_threads,
            wall_clock=self._wall_clock,
        )
        hooks = self._core.options.hooks
        try:
            await DeferredRunner(running, self._driver, self._listeners, hooks, self.stop).run(
                workers, signals
            )
        finally:
            await self._driver.close()

    def on(self, topic: str) -> Callable[[Function], Function]:
        return self._listeners.on(topic)

    def stop(self) -> None:
        self._core.stop()
        self._driver.set_event(self._core.stop_requested)

    @deferred
    async def close(self) -> None:
        await self._close(processed=False)

    async def _close(self, processed: bool) -> None:
        try:
            await self._driver.run(self._core.close(processed))
        finally:
            self._handling.close()
            await self._driver.close()

    def __repr__(self) -> str:
        options = self._core.options
        return describe_client(
            self, self._core.link.servers, topics=options.subscription.shown, group=options.group
        )

    async def __aenter__(self) -> "Consumer[Value]":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self._close(processed=True)
            return
        try:
            await self._close(processed=False)
        except Exception as closing:
            log.warning("Closing behind an error met another one: %s", closing)
