"""What the drivers of event loops share: operations of many callers over one connection, in one thread.

A driver is told of every change by `attend` and looks around once this turn of the loop is over: what is due, what the
link has to say, what the socket and the clock are to be watched for. A caller that is cancelled leaves nothing behind:
what it waited for goes on, its answer is dropped where nobody else wants it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tfmq.client.connection.connection import Link
from tfmq.client.drivers.blocking import FOREVER_SECONDS, Ticker
from tfmq.client.drivers.callbacks import Callbacks, Timer, Timers
from tfmq.client.drivers.fork import after_fork
from tfmq.client.drivers.socket import Channel, Found, choose
from tfmq.client.operation import Flag, Operation, Waitable
from tfmq.errors import TfmqError

Result = TypeVar("Result")


class NoLock:
    """What stands for the driver's lock where one thread does everything."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None: ...


class EventDriver(ABC):
    """Runs operations as coroutines. All of it belongs to the thread of its loop, but for `raise_flag`.

    What knows the loop is below "What a kind of loop is asked"; its `_begin` comes again in a forked child.
    """

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
        self._watched: tuple[int, bool] | None = None
        self._handle: Any = None
        self._soon = False

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

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Run `function` once in the loop. `timer.cancel()` takes it back."""
        timer = self.timers.add(seconds, function)
        self.attend()
        return timer

    def attend(self) -> None:
        """Something changed: look around once this turn of the loop is over. Without a loop nothing is due yet."""
        if not self._soon and not self.closed and self._has_loop():
            self._soon = True
            self._call_soon(self._look)

    def flush(self) -> None:
        """Write what the link has to say, as far as that needs no waiting."""
        self.channel.flush()
        self.attend()

    glance = flush

    def close_now(self) -> None:
        """Drop the connection; open calls fail. It needs no loop."""
        self.closed = True
        self.link.close()
        self.channel.close()
        self._stop_timer()
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

    # What a kind of loop is asked

    @abstractmethod
    async def wait(self, targets: Iterable[Waitable], seconds: float | None = None) -> bool:
        """Whether any of `targets` was done within `seconds` (None: wait for ever)."""

    @abstractmethod
    def in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Have `work()` done in the loop's pool of threads, as it may wait for a disk or a network."""

    @abstractmethod
    def raise_flag(self, flag: Flag) -> None:
        """Settle `flag` from any thread, or from a signal handler."""

    @abstractmethod
    def _has_loop(self) -> bool:
        """Whether there is a loop that goes on, the one it belongs to; takes one if it can."""

    @abstractmethod
    def _call_soon(self, function: Callable[[], None]) -> None:
        """Call it behind what the loop does now."""

    @abstractmethod
    def _start_timer(self, seconds: float) -> Any:
        """Have `_look` called then."""

    @abstractmethod
    def _stop_timer(self) -> None:
        """Take back what `_start_timer` wanted, if it wanted anything."""

    @abstractmethod
    def _watch_socket(self, fileno: int, to_write: bool) -> None:
        """From now on call `_readable`, and with `to_write` also `_writable`, when the socket is."""

    @abstractmethod
    def _unwatch(self) -> None:
        """Watch the socket no more; a second time does nothing."""

    @abstractmethod
    def _look_up(self) -> None:
        """Ask for the addresses of `link.server` and have `_found` told; once at a time."""

    # Inside

    def _look(self) -> None:
        """Everything that is due; then watch the socket and the clock for what comes next."""
        self._soon = False
        if self.closed:
            return
        for ticker in self.tickers:
            ticker.tick()
        self.channel.tick()
        if self.channel.socket is None and self.link.wants_connection():
            self._look_up()
        self.channel.flush()
        self._watch()
        self.callbacks.run()

    def next_time(self) -> float:
        """When the next thing is due, in the clock's seconds."""
        return min(self.link.next_time(), *(ticker.next_time() for ticker in self.tickers))

    def _watch(self) -> None:
        channel = self.channel
        wanted = (channel.fileno(), channel.wants_write) if channel.socket is not None else None
        if wanted != self._watched:
            self._unwatch()
            if wanted is not None:
                self._watch_socket(*wanted)
            self._watched = wanted
        self._stop_timer()
        due = self.next_time()
        if due != float("inf"):
            self._handle = self._start_timer(min(max(0.0, due - self.clock()), FOREVER_SECONDS))

    def _readable(self) -> None:
        if self.channel.connecting:
            self.channel.writable()
        self.channel.take(self.channel.receive())
        self._look()

    def _writable(self) -> None:
        self.channel.writable()
        self._look()

    def _found(self, found: Found | OSError | TfmqError) -> None:
        """What `look_up` found."""
        if not isinstance(found, list):
            self.channel.broke(found)
        elif not self.closed and self.channel.socket is None:
            self.channel.open(choose(found))
