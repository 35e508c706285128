"""The base classes of the blocking, asyncio and Twisted consumers, with the set-up of `run`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Generic, Self

from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.factory import in_process_state_folder, make_client_parts
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.consumer.message import ReceivedMessage, Value
from tfmq.client.consumer.options import DEFAULT_STORE, check_arguments
from tfmq.client.operation import Event, Executor
from tfmq.client.worker.dead_letter_store import DeadLetterStore
from tfmq.client.worker.listeners import Function, Listener, Listeners, check_listener
from tfmq.client.worker.message_context import MessageContextFactory
from tfmq.client.worker.ordered_queues import ORDERS
from tfmq.client.worker.runner import HandlerRunner
from tfmq.dead_letters import Retrying, open_dead_letters
from tfmq.errors import BadRequest, Closed

log = logging.getLogger("tfmq.consumer")

WORKERS_MAX: Final = 1000  # more threads in one process only wait for each other


class BaseConsumer:
    """Base of all consumers: their set-up, and the methods that do not wait."""

    _core: ConsumerCore
    _driver: Any

    def _connect(
        self, arguments: Mapping[str, Any], driver_type: Callable[[ClientConnection], Any], *, awaits: bool
    ) -> None:
        """Create connection, driver and core from the arguments of the constructor, without I/O.

        `awaits`: whether the driver needs an event loop (asyncio, Twisted). Raises `BadRequest` for an invalid
        argument, `NotSupported` if an argument needs a library that is not installed.
        """
        options = check_arguments(arguments, awaits=awaits)
        link, driver, self._wall_clock = make_client_parts(
            arguments["servers"], driver_type, client_id=arguments["client_id"]
        )
        link.reads_standby = arguments["standby"]
        self._driver = driver
        self._executor: Executor = driver.run_in_threads if awaits else driver.run_in_thread
        self._core = ConsumerCore(
            options, link, self._executor, wake_driver=driver.wake, flush=driver.flush, complete_event=driver.set_event
        )
        driver.tickers.append(self._core.tasks)
        driver.on_fork.append(self._core.reset_after_fork)
        self._listeners = Listeners()
        self._handling = MessageContextFactory(
            self._core, driver.run, self._open_dead_letter_store, wall_clock=self._wall_clock, is_async=awaits
        )
        self._core.fetcher.failure_handler = self._handling
        self._loop: Any = None

    def _create_run(self, listener: Listener | None, workers: int, order: str, tracebacks: bool) -> HandlerRunner:
        """Create the runner, without workers yet, for one call of `run`. Raises Closed if the consumer is closed,
        NotAllowed if another `run` is active, BadRequest for an invalid argument or a topic without a listener."""
        core, options = self._core, self._core.options
        if core.closed:
            raise Closed("The consumer is closed, as it always is after a run; make a new one.")
        core.positions.ack_trackers.raise_if_run_active()
        if type(workers) is not int or not 1 <= workers <= WORKERS_MAX:
            raise BadRequest(f"workers={workers!r} is no number of workers; it takes one from 1 to {WORKERS_MAX}.")
        if order not in ORDERS:
            words = ", ".join(f'"{each}"' for each in ORDERS)
            raise BadRequest(f"order={order!r} is not known; it takes {words}.")
        if options.commits == "before" and order != "partition":
            raise BadRequest(
                'commits="before" needs order="partition": an offset cannot be saved before one message and after'
                " another."
            )
        if listener is not None:
            self._listeners.default = check_listener(listener)
        self._listeners.check(options.subscription.topics_to_request() or (), options.subscription.reads)
        store, wall_clock = self._open_dead_letter_store(), self._wall_clock
        running = HandlerRunner(
            core,
            store,
            order=order,
            tracebacks=tracebacks,
            wall_clock=wall_clock,
            complete_event=Event.complete if self._handling.is_async else self._driver.set_event,
        )
        if store is not None:
            # The default store is not logged here: its path is not known before the client is connected.
            if options.dead_letters != DEFAULT_STORE:
                log.info("Dead letters of group %s are kept in %s.", options.group, store.address)
            running.retry_loop = Retrying(store, running.redeliver, now=core.link.now, wall_clock=wall_clock)
        core.positions.ack_trackers.is_run_active = True
        return running

    def _open_dead_letter_store(self) -> DeadLetterStore | None:
        """Open the dead-letter store; None without a store or a group. Raises BadRequest for an invalid address."""
        options, link, member = self._core.options, self._core.link, self._core.membership
        if options.dead_letters is None or options.group is None:
            return None
        return open_dead_letters(
            options.dead_letters,
            group=options.group,
            calls_max=options.retries + 1,
            codec=options.codec,
            run=self._executor,
            link=link,
            wall_clock=self._wall_clock,
            folder=in_process_state_folder(link),
            on_dead=None if member is None else member.count_dead_letter,
        )

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, and the state of each partition."""
        with self._driver.lock:
            return self._core.stats()

    def on(self, topic: str) -> Callable[[Function], Function]:
        """Decorator: register a listener for `run`, as `@consumer.on("orders")`."""
        return self._listeners.on(topic)

    def stop(self) -> None:
        """Stop iteration after the current message; `poll` then returns []. Threads and signal handlers may call it."""
        self._core.stop()
        self._driver.set_event(self._core.stop_requested)

    def __repr__(self) -> str:
        options = self._core.options
        return describe_client(self, self._core.link.servers, topics=options.subscription.shown, group=options.group)


class AwaitedConsumer(BaseConsumer, Generic[Value]):
    """Base of the asyncio and Twisted consumers, which are read in coroutines."""

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage[Value]]:
        """Iterate over the messages without end, until `stop` is called."""
        core = self._core
        positions = core.positions
        while (messages := await self._driver.run(core.next_batch())) is not None:
            for message in messages:
                positions.current = message
                yield message

    async def __anext__(self) -> ReceivedMessage[Value]:
        """Wait for the next message and return it."""
        self._driver.check_caller()
        loop = self._loop = self._loop or aiter(self)
        try:
            return await anext(loop)
        except BaseException:
            self._loop = None
            raise

    async def _read_columns(self, columns: Iterable[str] | None, timeout: float | None) -> AsyncIterator[Any]:
        self._driver.check_caller()
        core = self._core
        core.start_columns(columns)
        try:
            while (batch := await self._driver.run(core.next_columns(timeout))) is not None:
                yield batch
        finally:
            core.end_columns()

    async def _close(self, processed: bool) -> None:
        self._driver.check_caller()
        try:
            await self._driver.run(self._core.close(processed))
        finally:
            self._handling.close()
            await self._driver.close()

    async def __aenter__(self) -> Self:
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
            log.warning("Closing after an error failed with another one: %s", closing)
