"""The asyncio driver: operations of many tasks over one connection, in one event loop.

It takes the loop of whoever first waits, and belongs to it from then on. A task that is cancelled leaves nothing
behind: what it waited for goes on, its answer is dropped where nobody else wants it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tfmq.client.drivers.blocking import CLOSE_SECONDS, FOREVER_SECONDS, Ticker
from tfmq.client.drivers.callbacks import Callbacks
from tfmq.client.drivers.channel import Channel, choose
from tfmq.client.drivers.fork import after_fork
from tfmq.client.drivers.timers import Timer, Timers
from tfmq.client.link import Link
from tfmq.client.waiting import Flag, Operation, Waitable
from tfmq.errors import NotAllowed

Result = TypeVar("Result")


class NoLock:
    """What stands for the driver's lock where one thread does everything."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None: ...


class AsyncDriver:
    """Runs operations as coroutines. All of it belongs to the thread of its event loop, but for `raise_flag`."""

    def __init__(self, link: Link, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.link = link
        self.clock = clock
        self.timers = Timers(clock)
        self.tickers: list[Ticker] = [self.timers]
        self.callbacks = Callbacks()
        self.on_fork: list[Callable[[], None]] = []
        self.lock = NoLock()
        self._begin()
        after_fork(self)

    def _begin(self) -> None:
        self.channel = Channel(self.link)
        self.channel.before_close = self._unwatch  # a loop must not be told of a descriptor that is closed
        self.closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: tuple[int, bool] | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._soon = False
        self._looking_up: asyncio.Task[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that it belongs to; None before anybody waited."""
        return self._loop

    # For the faces

    async def run(self, operation: Operation[Result]) -> Result:
        """Run `operation` to its end and give its result. Raises what it raises."""
        try:
            while True:
                step = next(operation)
                await self.wait(step.targets, step.seconds)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            operation.close()
            self.attend()

    async def wait(self, targets: Iterable[Waitable], seconds: float | None = None) -> bool:
        """Whether any of `targets` was done within `seconds` (None: wait for ever)."""
        waited = tuple(targets)
        if any(target.done for target in waited):
            return True
        loop = self._take_loop()
        future = loop.create_future()

        def wake(_: object) -> None:
            if not future.done():
                future.set_result(True)

        for target in waited:
            target.when_done(wake)
        timer = None if seconds is None else loop.call_later(max(0.0, seconds), wake, None)
        self.attend()
        try:
            await future
        finally:
            if timer is not None:
                timer.cancel()
            for target in waited:
                target.forget(wake)
        return any(target.done for target in waited)

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Run `function` once in the loop. `timer.cancel()` takes it back."""
        timer = self.timers.add(seconds, function)
        self.attend()
        return timer

    def in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Have `work()` done in the loop's pool of threads, as it may wait for a disk or a network."""

        def finished(future: asyncio.Future[Any]) -> None:
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            done(None if error is not None else future.result(), error)
            self.attend()

        asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(finished)

    def raise_flag(self, flag: Flag) -> None:
        """Settle `flag` from any thread, or from a signal handler."""
        if self._loop is None or self._loop.is_closed():
            flag.settle()
        else:
            self._loop.call_soon_threadsafe(flag.settle)

    def attend(self) -> None:
        """Something changed: look around once this turn of the loop is over. Without a loop nothing is due yet."""
        if self._soon or self.closed:
            return
        if self._loop is None:
            try:
                self._take_loop()
            except RuntimeError:
                return
        if self._loop is not None and not self._loop.is_closed():
            self._soon = True
            self._loop.call_soon(self._look)

    def flush(self) -> None:
        """Write what the link has to say, as far as that needs no waiting."""
        self.channel.flush()
        self.attend()

    glance = flush

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Drop the connection; open calls fail."""
        self.close_now()
        await asyncio.sleep(0)

    def close_now(self) -> None:
        """As `close`, where no loop runs any more."""
        self.closed = True
        self.link.close()
        self.channel.close()
        if self._handle is not None:
            self._handle.cancel()
        if self._looking_up is not None:
            self._looking_up.cancel()
        self.callbacks.run()

    def renew(self) -> None:
        """In a forked child: a fresh connection, nothing of the parent's; the parent's loop is left alone."""
        was_closed = self.closed
        self.channel.before_close = None
        self.channel.close()
        self.callbacks.clear()
        self.timers.clear()
        self.link.renew()
        self._begin()
        if was_closed:
            self.closed = True
            self.link.close()
        for forget in self.on_fork:
            forget()

    # Inside

    def _take_loop(self) -> asyncio.AbstractEventLoop:
        running = asyncio.get_running_loop()
        if self._loop is None or (self._loop is not running and self._loop.is_closed()):
            self._loop, self._watched, self._handle, self._soon = running, None, None, False
            if self.channel.socket is not None:
                self.channel.broke(ConnectionResetError("its event loop is closed"))
        elif self._loop is not running:
            raise NotAllowed("This client belongs to another event loop; make one for each loop.")
        return running

    def _look(self) -> None:
        """Everything that is due; then watch the socket and the clock for what comes next."""
        self._soon = False
        if self.closed:
            return
        for ticker in self.tickers:
            ticker.tick()
        self.channel.tick()
        self._connect()
        self.channel.flush()
        self._watch()
        self.callbacks.run()

    def next_time(self) -> float:
        """When the next thing is due, in the clock's seconds."""
        return min(self.link.next_time(), *(ticker.next_time() for ticker in self.tickers))

    def _watch(self) -> None:
        loop = self._loop
        assert loop is not None
        channel = self.channel
        wanted = (channel.fileno(), channel.wants_write) if channel.socket is not None else None
        if wanted != self._watched:
            self._unwatch()
            if wanted is not None:
                loop.add_reader(wanted[0], self._readable)
                if wanted[1]:
                    loop.add_writer(wanted[0], self._writable)
            self._watched = wanted
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        due = self.next_time()
        if due != float("inf"):
            pause = min(max(0.0, due - self.clock()), FOREVER_SECONDS)
            self._handle = loop.call_later(pause, self._look)

    def _unwatch(self) -> None:
        if self._watched is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._watched[0])
            self._loop.remove_writer(self._watched[0])
        self._watched = None

    def _readable(self) -> None:
        if self.channel.connecting:
            self.channel.writable()
        self.channel.take(self.channel.receive())
        self._look()

    def _writable(self) -> None:
        self.channel.writable()
        self._look()

    def _connect(self) -> None:
        task = self._looking_up
        looking_up = task is not None and not task.done()  # the end of a loop cancels it
        if self.channel.socket is None and not looking_up and self.link.wants_connection():
            assert self._loop is not None
            self._looking_up = self._loop.create_task(self._look_up())

    async def _look_up(self) -> None:
        server = self.link.server
        found: Any
        try:
            assert self._loop is not None
            found = await self._loop.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
        except OSError as error:
            found = OSError(f"the name {server.host} cannot be looked up ({error.strerror})")
        if isinstance(found, OSError):
            self.channel.broke(found)
        elif not self.closed and self.channel.socket is None:
            self.channel.open(choose(found))
        with contextlib.suppress(RuntimeError):
            self._look()
