"""`run` of the Twisted consumer: workers are coroutines in the reactor, and so are listeners, which must not block.

A reactor that stops waits for it: what is in work is finished and saved first. Signals are the reactor's own until
then; from then on one ends the run at once.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred

from tfmq.client.drivers.twisted import DeferredDriver
from tfmq.client.worker.listeners import Listeners, finished, in_work
from tfmq.client.worker.ordered_queues import Job
from tfmq.client.worker.runner import SIGNALS, Running, at_once
from tfmq.errors import Closed

log = logging.getLogger("tfmq.consumer")


class Shutdown:
    """Within it a reactor that stops calls `stop` and waits; a signal that comes then is told to `again`."""

    def __init__(self, reactor: Any, stop: Callable[[], None], again: Callable[[int], None]) -> None:
        self._reactor = reactor
        self._stop = stop
        self._again = again
        self._before: dict[int, Any] = {}
        self._over: Deferred[None] | None = None
        self._trigger: Any = None

    def __enter__(self) -> Shutdown:
        self._trigger = self._reactor.addSystemEventTrigger("before", "shutdown", self._begins)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: it was not set from Python, and cannot be set back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._over is None:
            self._reactor.removeSystemEventTrigger(self._trigger)
        else:
            self._over.callback(None)

    def _begins(self) -> Deferred[None]:
        log.info("The reactor stops: the messages in work are finished first; a signal ends the run at once.")
        self._over = Deferred()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._came)
        self._stop()
        return self._over

    def _came(self, number: int, frame: object) -> None:
        self._reactor.callFromThread(self._again, number)


class DeferredRun:
    """One run. `stop` is the consumer's."""

    def __init__(
        self,
        running: Running,
        driver: DeferredDriver,
        listeners: Listeners,
        hooks: Sequence[Any],
        stop: Callable[[], None],
    ) -> None:
        self._running = running
        self._driver = driver
        self._listeners = listeners
        self._hooks = hooks
        self._stop = stop
        self._workers: list[Deferred[None]] = []
        self._open = 0
        self._all_over: Deferred[None] = Deferred()
        self._cancelled: BaseException | None = None

    async def run(self, workers: int, signals: bool) -> None:
        """Until `stop`, the reactor's end, or an error, which is raised. Then what is finished is saved, and the group
        left."""
        reactor = self._driver.take_reactor()
        running = self._running
        try:
            with Shutdown(reactor, self._stop, self._again) if signals else contextlib.nullcontext():
                await self._work_all(workers)
        finally:
            if running.store is not None:
                running.store.close()
        if running.failure is not None:
            raise running.failure

    async def _work_all(self, workers: int) -> None:
        driver, running = self._driver, self._running
        try:
            await driver.run(running.starting())
            self._open = workers
            self._workers = [ensureDeferred(self._work()) for _ in range(workers)]
            for worker in self._workers:
                worker.addBoth(self._one_over)
            await self._all_over
        except BaseException as error:
            await self._cancel(error)
            await driver.run(running.failed(error))
        try:
            await driver.run(running.closing())
        except Exception as error:
            await driver.run(running.failed_late(error))

    def _one_over(self, _: object) -> None:
        self._open -= 1
        if not self._open and not self._all_over.called:
            self._all_over.callback(None)

    async def _cancel(self, error: BaseException) -> None:
        """Workers end where they are; they are waited for."""
        if self._open:
            self._all_over = Deferred()
            self._cancelled = error
            # In a turn of its own: a worker whose listener asks for it does not wait for anything yet.
            self._driver.take_reactor().callLater(0, self._cancel_workers, error)
            await self._all_over

    def _cancel_workers(self, error: BaseException) -> None:
        self._cancelled = self._cancelled or error
        for worker in self._workers:
            worker.cancel()

    def _again(self, number: int) -> None:
        self._cancel_workers(at_once(number))

    async def _work(self) -> None:
        """One worker. What ends it ends the run, and is kept there."""
        driver, running = self._driver, self._running
        try:
            while (job := await driver.run(running.next_job())) is not None:
                settled = False
                try:
                    error = await self._called(job)
                    await driver.run(running.settle(job, error))
                    settled = True
                finally:
                    if not settled:
                        with contextlib.suppress(Closed):
                            await driver.run(running.abandon(job))
        except Closed:
            pass  # the consumer was closed meanwhile: that is an end, too; a listener's own stands in `failure`
        except BaseException as error:
            if isinstance(error, CancelledError) and self._cancelled is not None:
                error = self._cancelled
            await driver.run(running.failed(error))

    async def _called(self, job: Job) -> Exception | None:
        """What the listener raised; None: it returned."""
        message = job.message
        listener = self._listeners.of(message.topic)
        try:
            with in_work(message, self._hooks):
                found = listener(message)
                if inspect.isawaitable(found):
                    found = await found
                finished(found)
        except Exception as error:
            if self._cancelled is not None:  # a cancelled Deferred looks like any failure
                raise
            return error
        return None
