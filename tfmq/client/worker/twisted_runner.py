"""`run` of the Twisted consumer, with coroutines as workers.

Listeners run in the reactor as well, so they must not block. A reactor that shuts down waits for the run:
messages in progress are finished and committed. Until then signals are handled by the reactor; during the
shutdown a signal ends the run at once.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred

from tfmq.client.drivers.twisted import DeferredDriver
from tfmq.client.worker.listeners import check_result, handler_context
from tfmq.client.worker.ordered_queues import HandlerJob
from tfmq.client.worker.runner import SIGNALS, EventLoopRun, immediate_exit
from tfmq.errors import Closed

log = logging.getLogger("tfmq.consumer")


class ReactorShutdown:
    """Makes the reactor's shutdown call `stop` and wait; a signal meanwhile calls `again`."""

    def __init__(self, reactor: Any, stop: Callable[[], None], again: Callable[[int], None]) -> None:
        self._reactor = reactor
        self._stop = stop
        self._on_signal_callback = again
        self._former_handlers: dict[int, Any] = {}
        self._run_ended: Deferred[None] | None = None
        self._trigger: Any = None

    def __enter__(self) -> ReactorShutdown:
        self._trigger = self._reactor.addSystemEventTrigger("before", "shutdown", self._on_shutdown)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former_handlers.items():
            # None: the handler was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._run_ended is None:
            self._reactor.removeSystemEventTrigger(self._trigger)
        else:
            self._run_ended.callback(None)

    def _on_shutdown(self) -> Deferred[None]:
        """Stop the run and return a Deferred that fires at its end."""
        log.info("The reactor stops: messages in progress are finished first; a signal ends the run at once.")
        self._run_ended = Deferred()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._former_handlers[number] = signal.signal(number, self._on_signal)
        self._stop()
        return self._run_ended

    def _on_signal(self, number: int, frame: object) -> None:
        self._reactor.callFromThread(self._on_signal_callback, number)


class DeferredRunner(EventLoopRun):
    """One `run` of a Twisted consumer."""

    _driver: DeferredDriver

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._workers: list[Deferred[None]] = []
        self._active_workers = 0
        self._all_ended: Deferred[None] = Deferred()
        self._cancelled: BaseException | None = None

    async def run(self, workers: int, signals: bool) -> None:
        """Run until `stop`, the shutdown or an error, which is raised; commit and leave the group."""
        reactor = self._driver.get_reactor()
        running = self._runner
        try:
            with (
                ReactorShutdown(reactor, self._stop, self._cancel_on_signal)
                if signals
                else contextlib.nullcontext()
            ):
                await self._run_workers(workers)
        finally:
            if running.store is not None:
                running.store.close()
        if running.failure is not None:
            raise running.failure

    async def _run_workers(self, workers: int) -> None:
        driver, running = self._driver, self._runner
        try:
            await driver.run(running.start())
            self._active_workers = workers
            self._workers = [ensureDeferred(self._run_worker()) for _ in range(workers)]
            for worker in self._workers:
                worker.addBoth(self._worker_ended)
            await self._all_ended
        except BaseException as error:
            await self._cancel_and_wait(error)
            await driver.run(running.fail(error))
        try:
            await driver.run(running.close())
        except Exception as error:
            await driver.run(running.fail_in_close(error))

    def _worker_ended(self, _: object) -> None:
        self._active_workers -= 1
        if not self._active_workers and not self._all_ended.called:
            self._all_ended.callback(None)

    async def _cancel_and_wait(self, error: BaseException) -> None:
        if self._active_workers:
            self._all_ended = Deferred()
            self._cancelled = error
            # In another reactor iteration: a worker whose listener caused this is not waiting for anything yet.
            self._driver.get_reactor().callLater(0, self._cancel_workers, error)
            await self._all_ended

    def _cancel_workers(self, error: BaseException) -> None:
        self._cancelled = self._cancelled or error
        for worker in self._workers:
            worker.cancel()

    def _cancel_on_signal(self, number: int) -> None:
        self._cancel_workers(immediate_exit(number))

    async def _run_worker(self) -> None:
        """Handle one message after the other until the run ends. An error ends the run."""
        try:
            await self._handle_messages()
        except Closed:
            # The consumer was closed meanwhile, which is a regular end. A `Closed` that a listener raised is
            # in `failure`.
            pass
        except BaseException as error:
            if isinstance(error, CancelledError) and self._cancelled is not None:
                error = self._cancelled
            await self._driver.run(self._runner.fail(error))

    async def _call_listener(self, job: HandlerJob) -> Exception | None:
        message = job.message
        listener = self._listeners.find(message.topic)
        try:
            with handler_context(message, self._hooks):
                found = listener(message)
                if inspect.isawaitable(found):
                    found = await found
                check_result(found)
        except Exception as error:
            if self._cancelled is not None:  # the exception of a cancelled Deferred may be of any kind
                raise
            return error
        return None
