"""`run` of the Twisted consumer, with coroutines as workers.

Listeners run in the reactor as well, so they must not block. When the reactor shuts down, it waits until the run has
finished and committed the messages in progress. The reactor handles signals as usual; a further signal during the
shutdown ends the run at once.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred

from tfmq.client.drivers.twisted import DeferredDriver
from tfmq.client.worker.listeners import check_result, handler_context
from tfmq.client.worker.ordered_queues import HandlerJob
from tfmq.client.worker.runner import SIGNALS, EventLoopRun, immediate_exit, restore_signal_handlers

log = logging.getLogger("tfmq.consumer")


@contextlib.contextmanager
def shutdown_handler(reactor: Any, stop: Callable[[], None], again: Callable[[int], None]) -> Iterator[None]:
    """Return a context in which the reactor's shutdown calls `stop`, and waits until the context has ended. A signal
    during the shutdown calls `again` with the number of the signal."""
    former: dict[int, Any] = {}
    waiting: list[Deferred[None]] = []

    def on_signal(number: int, frame: object) -> None:
        reactor.callFromThread(again, number)

    def on_shutdown() -> Deferred[None]:
        log.info("The reactor stops: messages in progress are finished first; a signal ends the run at once.")
        waiting.append(Deferred())
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                former[number] = signal.signal(number, on_signal)
        stop()
        return waiting[0]

    trigger = reactor.addSystemEventTrigger("before", "shutdown", on_shutdown)
    try:
        yield
    finally:
        restore_signal_handlers(former)
        if not waiting:
            reactor.removeSystemEventTrigger(trigger)
        for each in waiting:
            each.callback(None)


class DeferredRunner(EventLoopRun):
    driver: DeferredDriver

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._workers: list[Deferred[None]] = []
        self._active_workers = 0
        self._all_ended: Deferred[None] = Deferred()
        self._cancelled: BaseException | None = None

    async def run(self, workers: int, signals: bool) -> None:
        """Run until `stop`, the reactor's shutdown or an error. Then commit, leave the group, and raise the error."""
        reactor = self.driver.get_reactor()
        running = self.runner
        try:
            with (
                shutdown_handler(reactor, self.stop, lambda number: self._cancel_workers(immediate_exit(number)))
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
        driver, running = self.driver, self.runner
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
            # The workers are cancelled in a later reactor iteration. If a worker's listener has caused the error, this
            # worker is still running, and cannot be cancelled before it waits.
            self.driver.get_reactor().callLater(0, self._cancel_workers, error)
            await self._all_ended

    def _cancel_workers(self, error: BaseException) -> None:
        self._cancelled = self._cancelled or error
        for worker in self._workers:
            worker.cancel()

    def _end_reason(self, error: BaseException) -> BaseException:
        return (self._cancelled or error) if isinstance(error, CancelledError) else error

    async def _call_listener(self, job: HandlerJob) -> Exception | None:
        message = job.message
        listener = self.listeners.find(message.topic)
        try:
            with handler_context(message, self.hooks):
                found = listener(message)
                if inspect.isawaitable(found):
                    found = await found
                check_result(found)
        except Exception as error:
            if self._cancelled is not None:  # A cancelled Deferred may raise an exception of any class.
                raise
            return error
        return None
