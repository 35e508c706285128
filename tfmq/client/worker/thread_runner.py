"""`run` of the blocking consumer, with threads as workers.

A single worker runs in the calling thread; several workers are threads that `run` starts. Listeners that are coroutine
functions run in one event loop, which has its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable
from typing import Any, Final

from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Event, Operation, Wait
from tfmq.client.worker.listeners import check_result, handler_context
from tfmq.client.worker.ordered_queues import HandlerJob
from tfmq.client.worker.runner import ListenerRun, signal_handlers
from tfmq.errors import Closed

STOP_SECONDS: Final = 5.0
"""How long the end of a run waits for tasks that listeners have started and not awaited; they are cancelled first."""


class ListenerLoopThread:
    """A thread with an event loop. All workers use the same loop, because listeners may share objects bound to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Run `awaitable` in the loop, with the caller's context variables. Cancel `awaitable` if the caller is
        interrupted."""

        async def awaited() -> Any:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(awaited(), self._ensure_started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel the tasks that are not finished, and end the thread. Waits for `STOP_SECONDS` at most."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(STOP_SECONDS)

    def _ensure_started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run_loop, args=(loop,), name="tfmq-listeners", daemon=True)
                self._thread.start()
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
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


JOIN_SECONDS: Final = 5.0
"""How long the end of a run waits for each worker thread to end. By then the threads have no message in progress."""


class ThreadRunner(ListenerRun):
    driver: BlockingDriver

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loop: Any = None
        self._active_workers = 0
        self._all_ended = Event()

    def run(self, workers: int, signals: bool) -> None:
        """Run until `stop`, a signal or an error. Then commit, leave the group, and raise the error."""
        driver, running = self.driver, self.runner
        try:
            with signal_handlers(self.stop, signals):
                try:
                    driver.run(running.start())
                    if workers == 1:
                        self._run_worker()
                    else:
                        self._run_worker_threads(workers)
                except Closed:
                    # The consumer was closed meanwhile, which is a regular end. If a listener raised `Closed`, it is
                    # recorded as `HandlerRunner.failure` already.
                    pass
                except BaseException as error:
                    driver.run(running.fail(error))
                try:
                    driver.run(running.close())
                except Exception as error:
                    driver.run(running.fail_in_close(error))
        finally:
            if self._loop is not None:
                self._loop.stop()
            if running.store is not None:
                running.store.close()
        if running.failure is not None:
            raise running.failure

    def _run_worker(self) -> None:
        driver, running = self.driver, self.runner
        while (job := driver.run(running.next_job())) is not None:
            try:
                error = self._call_listener(job)
                driver.run(running.finish_call(job, error))
            except BaseException:
                with contextlib.suppress(Closed):
                    driver.run(running.abandon(job))
                raise

    def _call_listener(self, job: HandlerJob) -> Exception | None:
        listener = self.listeners.find(job.message.topic)
        try:
            with handler_context(job.message, self.hooks):
                found = listener(job.message)
                if inspect.isawaitable(found):
                    found = self._await_in_loop(found)
                check_result(found)
        except Exception as error:
            return error
        return None

    def _await_in_loop(self, awaitable: Any) -> Any:
        with self.driver.lock:
            if self._loop is None:
                # Created only when a listener returns an awaitable: most programs need no loop.
                self._loop = ListenerLoopThread()
        return self._loop.run(awaitable)

    # Several workers

    def _run_worker_threads(self, workers: int) -> None:
        threads = [
            threading.Thread(target=self._run_worker_in_thread, name=f"tfmq-worker-{number}", daemon=True)
            for number in range(workers)
        ]
        self._active_workers = workers
        for thread in threads:
            thread.start()
        with contextlib.suppress(Closed):
            self.driver.run(self._wait_for_workers())
        for thread in threads:
            thread.join(JOIN_SECONDS)

    def _run_worker_in_thread(self) -> None:
        try:
            self._run_worker()
        except Closed:
            pass  # The client was closed before this worker ended.
        except BaseException as error:
            self.driver.run(self.runner.fail(error))
        finally:
            with contextlib.suppress(Closed):
                self.driver.run(self._worker_ended())
            self.driver.set_event(Event())  # Wakes the calling thread, which may be waiting on the socket.

    def _worker_ended(self) -> Operation[None]:
        yield from ()
        self._active_workers -= 1
        if not self._active_workers:
            self._all_ended.complete()

    def _wait_for_workers(self) -> Operation[None]:
        while not self._all_ended.done:
            yield Wait((self._all_ended,))
