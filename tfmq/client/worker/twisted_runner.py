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
    """Context manager that makes the reactor's shutdown wait for the end of a run.

    The shutdown calls `stop`. A signal during the shutdown is passed to `again`.
    """

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
            # None: the handler was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._over is None:
            self._reactor.removeSystemEventTrigger(self._trigger)
        else:
            self._over.callback(None)

    def _begins(self) -> Deferred[None]:
        """Stop the run and return a Deferred that fires at its end."""
        log.info("The reactor stops: messages in progress are finished first; a signal ends the run at once.")
        self._over = Deferred()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._came)
        self._stop()
        return self._over

    def _came(self, number: int, frame: object) -> None:
        """Pass a signal to the run, in the reactor's thread."""
        self._reactor.callFromThread(self._again, number)


class DeferredRun:
    """One `run` of a Twisted consumer. `stop` is the consumer's."""

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
        """Run until `stop`, the reactor's shutdown or an error.

        Then commit what is acked and leave the group. Raises the error that ended the run.
        """
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
        """Run the workers, then close the consumer."""
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
        """Count a worker as ended."""
        self._open -= 1
        if not self._open and not self._all_over.called:
            self._all_over.callback(None)

    async def _cancel(self, error: BaseException) -> None:
        """Cancel the workers and wait for them."""
        if self._open:
            self._all_over = Deferred()
            self._cancelled = error
            # In another reactor iteration: a worker whose listener caused this is not waiting for anything
            # yet.
            self._driver.take_reactor().callLater(0, self._cancel_workers, error)
            await self._all_over

    def _cancel_workers(self, error: BaseException) -> None:
        """Cancel all workers because of `error`."""
        self._cancelled = self._cancelled or error
        for worker in self._workers:
            worker.cancel()

    def _again(self, number: int) -> None:
        """End the run at once on a signal."""
        self._cancel_workers(at_once(number))

    async def _work(self) -> None:
        """Handle one message after the other until the run ends. An error ends the run."""
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
            # The consumer was closed meanwhile, which is a regular end. A `Closed` that a listener raised is
            # in `failure`.
            pass
        except BaseException as error:
            if isinstance(error, CancelledError) and self._cancelled is not None:
                error = self._cancelled
            await driver.run(running.failed(error))

    async def _called(self, job: Job) -> Exception | None:
        """Call the listener. Return what it raised, or None."""
        message = job.message
        listener = self._listeners.of(message.topic)
        try:
            with in_work(message, self._hooks):
                found = listener(message)
                if inspect.isawaitable(found):
                    found = await found
                finished(found)
        except Exception as error:
            if self._cancelled is not None:  # the exception of a cancelled Deferred may be of any kind
                raise
            return error
        return None
