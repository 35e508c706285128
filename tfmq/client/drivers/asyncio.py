"""The asyncio driver: runs operations of many tasks over one connection in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from tfmq.client.drivers.blocking import CLOSE_SECONDS
from tfmq.client.drivers.event_loop import EventDriver
from tfmq.client.drivers.event_loop import NoLock as NoLock
from tfmq.client.drivers.socket import resolve_address
from tfmq.client.operation import Event, Future
from tfmq.errors import NotAllowed

OTHER_LOOP = "This client belongs to another event loop; make one for each loop."


class AsyncDriver(EventDriver):
    """Runs operations as coroutines of asyncio tasks, in the event loop that first uses it."""

    _current = staticmethod(asyncio._get_running_loop)

    def _reset_state(self) -> None:
        super()._reset_state()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resolve_task: asyncio.Task[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop it is bound to; None before the first use."""
        return self._loop

    async def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        waited = tuple(futures)
        if any(target.done for target in waited):
            return True
        loop = self._bind_loop()
        future = loop.create_future()

        def wake(_: object) -> None:
            if not future.done():
                future.set_result(True)

        for target in waited:
            target.add_done_callback(wake)
        timer = None if seconds is None else loop.call_later(max(0.0, seconds), wake, None)
        self.wake()
        try:
            await future
        finally:
            if timer is not None:
                timer.cancel()
            for target in waited:
                target.remove_done_callback(wake)
        return any(target.done for target in waited)

    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        def finished(future: asyncio.Future[Any]) -> None:
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            done(None if error is not None else future.result(), error)
            self.wake()

        asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(finished)

    def set_event(self, event: Event) -> None:
        if self._loop is None or self._loop.is_closed():
            event.complete()
        else:
            self._loop.call_soon_threadsafe(event.complete)

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        self.close_now()
        await asyncio.sleep(0)

    def close_now(self) -> None:
        """Close the connection without a running loop, and fail all open requests."""
        super().close_now()
        if self._resolve_task is not None:
            self._resolve_task.cancel()

    # Internal

    def _check_other_caller(self) -> None:
        if asyncio._get_running_loop() is not None:
            self._bind_loop()
        elif self._loop is not None and self._loop.is_running():  # A thread without a loop.
            raise NotAllowed(OTHER_LOOP)

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        """Bind the driver to the running loop, and return it. Raises `NotAllowed` in another one."""
        running = asyncio.get_running_loop()
        if self._loop is None or (self._loop is not running and self._loop.is_closed()):
            self._loop = self._owner = running
            self._watched, self._timer_handle, self._turn_scheduled = None, None, False
            if self.channel.socket is not None:
                self.channel.connection_failed(ConnectionResetError("its event loop is closed"))
        elif self._loop is not running:
            raise NotAllowed(OTHER_LOOP)
        return running

    def _has_loop(self) -> bool:
        if self._loop is None:
            with contextlib.suppress(RuntimeError):
                self._bind_loop()
        return self._loop is not None and not self._loop.is_closed()

    def _call_soon(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon(function)

    def _start_timer(self, seconds: float) -> asyncio.TimerHandle:
        assert self._loop is not None
        return self._loop.call_later(seconds, self._run_turn)

    def _stop_timer(self) -> None:
        if self._timer_handle is not None:
            self._timer_handle.cancel()
            self._timer_handle = None

    def _watch_socket(self, fileno: int, to_write: bool) -> None:
        assert self._loop is not None
        self._loop.add_reader(fileno, self._readable)
        if to_write:
            self._loop.add_writer(fileno, self._writable)

    def _unwatch(self) -> None:
        if self._watched is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._watched[0])
            self._loop.remove_writer(self._watched[0])
        self._watched = None

    def _start_resolving(self) -> None:
        task = self._resolve_task
        if task is None or task.done():  # The end of a loop cancels the task.
            assert self._loop is not None
            self._resolve_task = self._loop.create_task(self._resolve())

    async def _resolve(self) -> None:
        assert self._loop is not None
        self._address_resolved(await self._loop.run_in_executor(None, resolve_address, self.link.server))
        with contextlib.suppress(RuntimeError):
            self._run_turn()
