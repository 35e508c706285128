"""`run` of the asyncio consumer: workers are tasks; listeners that are plain functions run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FuturesCancelled
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.worker.listeners import Listener, check_result, handler_context, is_coroutine_listener
from tfmq.client.worker.ordered_queues import HandlerJob
from tfmq.client.worker.runner import SIGNALS, EventLoopRun, immediate_exit, log_first_signal


def run_in_new_loop(run: Coroutine[Any, Any, None]) -> None:
    asyncio.run(run)


class HandlerThreads:
    """Daemon threads in which tasks call plain functions. If all threads are busy, another one is started."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._count = self._busy = 0

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call `function` in a thread, with the caller's context variables. If the caller is cancelled, the function
        continues."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self._busy == self._count:
            self._count += 1
            threading.Thread(target=self._run_calls, name=f"tfmq-worker-{self._count}", daemon=True).start()
        self._busy += 1
        self._queue.put(partial(copy_context().run, self._execute, loop, future, function))
        return await future

    def stop(self) -> None:
        for _ in range(self._count):
            self._queue.put(None)

    def _run_calls(self) -> None:
        while (call := self._queue.get()) is not None:
            call()

    def _execute(
        self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], function: Callable[[], Any]
    ) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = function()
        except StopIteration as error:  # Replaced, because futures and coroutines cannot raise StopIteration.
            failure = RuntimeError("The listener raised StopIteration.")
            failure.__cause__ = error
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # Raised if the loop is closed; then no task waits any more.
            loop.call_soon_threadsafe(self._set_result, future, result, failure)

    def _set_result(self, future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
        self._busy -= 1
        if future.done():
            return
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)


class TaskRunner(EventLoopRun):
    driver: AsyncDriver

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._threads = HandlerThreads()
        self._tasks: list[asyncio.Task[None]] = []
        self._signal: int | None = None

    async def run(self, workers: int, signals: bool) -> None:
        """Run until `stop`, a signal or an error. Then commit, leave the group, and raise the error."""
        driver, running = self.driver, self.runner
        installed = self._install_signal_handlers() if signals else []
        try:
            try:
                await driver.run(running.start())
                self._tasks = [asyncio.create_task(self._run_worker()) for _ in range(workers)]
                await asyncio.wait(self._tasks)
            except BaseException as error:
                await self._cancel_workers()
                await driver.run(running.fail(error))
            try:
                await driver.run(running.close())
            except Exception as error:
                await driver.run(running.fail_in_close(error))
        finally:
            for number in installed:
                asyncio.get_running_loop().remove_signal_handler(number)
            self._threads.stop()
            if running.store is not None:
                running.store.close()
        if running.failure is not None:
            raise running.failure

    async def _cancel_workers(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _end_reason(self, error: BaseException) -> BaseException:
        if isinstance(error, asyncio.CancelledError) and self._signal is not None:
            return immediate_exit(self._signal)
        return error

    async def _call_listener(self, job: HandlerJob) -> Exception | None:
        message = job.message
        listener = self.listeners.find(message.topic)
        try:
            if is_coroutine_listener(listener):
                with handler_context(message, self.hooks):
                    check_result(await listener(message))
            else:
                found = await self._threads.call(partial(self._call_plain_listener, listener, message))
                if inspect.isawaitable(found):
                    with handler_context(message, ()):
                        check_result(await found)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The listener awaited an object that was cancelled. This task was not cancelled, so the listener has failed
            # as with any other exception.
            failure = FuturesCancelled(*error.args)
            failure.__cause__ = error
            return failure
        except Exception as error:
            return error
        return None

    def _call_plain_listener(self, listener: Listener, message: ReceivedMessage[Any]) -> Any:
        """Call a listener that is a plain function; runs in a thread. Return its result, which may be awaitable."""
        with handler_context(message, self.hooks):
            found = listener(message)
            if not inspect.isawaitable(found):
                check_result(found)
            return found

    def _install_signal_handlers(self) -> list[int]:
        loop = asyncio.get_running_loop()
        installed: list[int] = []
        for number in SIGNALS:
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self._on_signal, number)
                installed.append(number)
        return installed

    def _on_signal(self, number: int) -> None:
        """Handle a signal: stop the run, or cancel the workers if the run is stopping already."""
        if self._signal is None and not self.runner.is_stopping:
            log_first_signal(number)
            self.stop()
            self._signal = number
        else:
            self._signal = number
            for task in self._tasks:
                task.cancel()
