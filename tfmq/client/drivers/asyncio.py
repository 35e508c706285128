"""The asyncio driver: runs operations of many tasks over one connection in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from tfmq.client.drivers.event_loop import EventDriver
from tfmq.client.drivers.socket import resolve_address
from tfmq.client.operation import Event
from tfmq.errors import NotAllowed

OTHER_LOOP = "This client belongs to another event loop; make one for each loop."


class AsyncDriver(EventDriver):
    """Runs operations as coroutines of asyncio tasks, in the event loop that first uses it."""

    _current = staticmethod(asyncio._get_running_loop)

    def _reset_state(self) -> None:
        super()._reset_state()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop in which the driver is used; None before the first use."""
        self._resolve_task: asyncio.Task[None] | None = None

    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        def finished(future: asyncio.Future[Any]) -> None:
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            done(None if error is not None else future.result(), error)
            self.wake()

        asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(finished)

    def set_event(self, event: Event) -> None:
        if self.loop is None or self.loop.is_closed():
            event.complete()
        else:
            self.loop.call_soon_threadsafe(event.complete)

    async def close(self) -> None:
        self.close_now()
        await asyncio.sleep(0)

    def close_now(self) -> None:
        super().close_now()
        if self._resolve_task is not None:
            self._resolve_task.cancel()

    def _check_other_caller(self) -> None:
        if asyncio._get_running_loop() is not None:
            self._bind_loop()
        elif self.loop is not None and self.loop.is_running():  # The caller is in another thread that has no loop.
            raise NotAllowed(OTHER_LOOP)

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        """Bind the driver to the running loop. Return the loop. Raises `NotAllowed` if bound to another open loop."""
        running = asyncio.get_running_loop()
        if self.loop is None or (self.loop is not running and self.loop.is_closed()):
            self.loop = self._owner = running
            self._watched, self._timer_handle, self._turn_scheduled = None, None, False
            if self.channel.socket is not None:
                self.channel.connection_failed(ConnectionResetError("its event loop is closed"))
        elif self.loop is not running:
            raise NotAllowed(OTHER_LOOP)
        return running

    def _has_loop(self) -> bool:
        if self.loop is None:
            with contextlib.suppress(RuntimeError):
                self._bind_loop()
        return self.loop is not None and not self.loop.is_closed()

    def _call_soon(self, function: Callable[[], None]) -> None:
        assert self.loop is not None
        self.loop.call_soon(function)

    def _create_sleep(self) -> tuple[asyncio.Future[None], Callable[..., None]]:
        future = self._bind_loop().create_future()

        def end(_: object = None) -> None:
            if not future.done():
                future.set_result(None)

        return future, end

    def _call_later(self, seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        assert self.loop is not None
        return self.loop.call_later(seconds, function)

    def _cancel_call(self, call: asyncio.TimerHandle) -> None:
        call.cancel()

    def _watch_socket(self, fileno: int, to_write: bool) -> None:
        assert self.loop is not None
        self.loop.add_reader(fileno, self._readable)
        if to_write:
            self.loop.add_writer(fileno, self._writable)

    def _unwatch(self) -> None:
        if self._watched is not None and self.loop is not None and not self.loop.is_closed():
            self.loop.remove_reader(self._watched[0])
            self.loop.remove_writer(self._watched[0])
        self._watched = None

    def _start_resolving(self) -> None:
        task = self._resolve_task
        if task is None or task.done():  # A task of a closed loop counts as done: the loop's end has cancelled it.
            assert self.loop is not None
            self._resolve_task = self.loop.create_task(self._resolve())

    async def _resolve(self) -> None:
        assert self.loop is not None
        self._address_resolved(await self.loop.run_in_executor(None, resolve_address, self.link.server))
        with contextlib.suppress(RuntimeError):
            self._run_turn()
