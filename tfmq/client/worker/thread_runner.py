"""An event loop in a thread, for listeners that are coroutine functions of a consumer that is blocking."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Flag, Operation, Wait
from tfmq.client.worker.listeners import Listeners, finished, in_work
from tfmq.client.worker.ordered_queues import Job
from tfmq.client.worker.runner import Running, Signals
from tfmq.errors import Closed

STOP_SECONDS: Final = 5.0
"""For tasks that listeners left behind, once the run is over."""


class ListenerLoop:
    """One loop for all workers, so that what listeners share (a session, a pool) belongs to it. Started when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """What it comes to, in the caller's context; any thread but the loop's. Interrupted, it is cancelled."""

        async def awaited() -> Any:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(awaited(), self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what is left, end the thread. Bounded."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(STOP_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_turn, args=(loop,), name="tfmq-listeners", daemon=True
                )
                self._thread.start()
            return self._loop


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=STOP_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


# `run` of the blocking consumer: one worker is the calling thread, several are threads of their own.

JOIN_SECONDS: Final = 5.0
"""Workers that have nothing in work any more end at once."""


class ThreadRun:
    """One run. `stop` is the consumer's."""

    def __init__(
        self,
        running: Running,
        driver: BlockingDriver,
        listeners: Listeners,
        hooks: Sequence[Any],
        stop: Callable[[], None],
    ) -> None:
        self._running = running
        self._driver = driver
        self._listeners = listeners
        self._hooks = hooks
        self._stop = stop
        self._loop: Any = None
        self._left = 0
        self._all_ended = Flag()

    def run(self, workers: int, signals: bool) -> None:
        """Until `stop`, a signal, or an error, which is raised. Then what is finished is saved, and the group left."""
        driver, running = self._driver, self._running
        try:
            with Signals(self._stop, signals):
                try:
                    driver.run(running.starting())
                    if workers == 1:
                        self._work()
                    else:
                        self._work_beside(workers)
                except Closed:
                    pass  # the consumer was closed meanwhile: that is an end, too; a listener's own stands in `failure`
                except BaseException as error:
                    driver.run(running.failed(error))
                try:
                    driver.run(running.closing())
                except Exception as error:
                    driver.run(running.failed_late(error))
        finally:
            if self._loop is not None:
                self._loop.stop()
            if running.store is not None:
                running.store.close()
        if running.failure is not None:
            raise running.failure

    def _work(self) -> None:
        """One worker: a message at a time, until the run ends."""
        driver, running = self._driver, self._running
        while (job := driver.run(running.next_job())) is not None:
            settled = False
            try:
                error = self._called(job)
                driver.run(running.settle(job, error))
                settled = True
            finally:
                if not settled:
                    with contextlib.suppress(Closed):
                        driver.run(running.abandon(job))

    def _called(self, job: Job) -> Exception | None:
        """What the listener raised; None: it returned."""
        listener = self._listeners.of(job.message.topic)
        try:
            with in_work(job.message, self._hooks):
                found = listener(job.message)
                if inspect.isawaitable(found):
                    found = self._waited(found)
                finished(found)
        except Exception as error:
            return error
        return None

    def _waited(self, awaitable: Any) -> Any:
        with self._driver.lock:
            if self._loop is None:
                pass  # MOVED  # who awaits nothing needs no event loop

                self._loop = ListenerLoop()
        return self._loop.run(awaitable)

    # Several workers

    def _work_beside(self, workers: int) -> None:
        """The calling thread waits, and takes signals. Threads that a second one leaves behind end with the process."""
        threads = [
            threading.Thread(target=self._work_in_thread, name=f"tfmq-worker-{number}", daemon=True)
            for number in range(workers)
        ]
        self._left = workers
        for thread in threads:
            thread.start()
        with contextlib.suppress(Closed):
            self._driver.run(self._ended())
        for thread in threads:
            thread.join(JOIN_SECONDS)

    def _work_in_thread(self) -> None:
        try:
            self._work()
        except Closed:
            pass  # the run ended without this worker, at once
        except BaseException as error:
            self._driver.run(self._running.failed(error))
        finally:
            with contextlib.suppress(Closed):
                self._driver.run(self._end())
            self._driver.raise_flag(Flag())  # the caller may sleep on the socket

    def _end(self) -> Operation[None]:
        yield from ()
        self._left -= 1
        if not self._left:
            self._all_ended.settle()

    def _ended(self) -> Operation[None]:
        while not self._all_ended.done:
            yield Wait((self._all_ended,))
