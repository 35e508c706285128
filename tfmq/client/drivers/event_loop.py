"""The base class of the event loop drivers: operations of many callers in one thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tfmq.client.drivers.blocking import POLL_SECONDS_MAX
from tfmq.client.drivers.callbacks import Driver, Timer
from tfmq.client.drivers.socket import ResolvedAddresses, choose_address
from tfmq.client.operation import CallUserCode, Event, Future, Operation
from tfmq.errors import TfmqError

Result = TypeVar("Result")


class NoLock:
    """A lock without effect, for a driver that runs in a single thread."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None: ...


class EventDriver(Driver, ABC):
    """Runs operations as coroutines. Not thread-safe, except `set_event`.

    `wake` schedules one turn after the current one of the loop. A turn runs what is due, writes the connection's
    output, and registers the socket and a timer with the loop. A cancelled caller leaves no state: its request
    continues, and the reply is dropped if no other caller needs it.

    Subclasses implement the methods in "Event loop interface".
    """

    _current: Callable[[], object]
    """Return the running loop, or the thread, in which it is called. Written in C, because every send calls it."""
    _owner: object
    """What `_current` returns where the driver may be used; None before the first use."""

    lock = NoLock()

    def _reset_state(self) -> None:
        super()._reset_state()
        self.channel.before_close = self._unwatch  # A loop must not use a closed descriptor.
        self._owner = None
        self._watched: tuple[int, bool] | None = None
        self._timer_handle: Any = None
        self._turn_scheduled = False

    # For the API variants

    async def run(self, operation: Operation[Result]) -> Result:
        """Run `operation` to its end. Return its result or raise its error; first as `check_caller`."""
        if self._current() != self._owner:  # Inline, to save every send a call.
            self._check_other_caller()
        try:
            while True:
                step = next(operation)
                if isinstance(step, CallUserCode):
                    step.function()
                else:
                    await self.wait(step.futures, step.seconds)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            operation.close()
            self.wake()

    def check_caller(self) -> None:
        """Raise `NotAllowed` outside of the loop, or the thread, that the client belongs to."""
        if self._current() != self._owner:
            self._check_other_caller()

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call `function` once in the loop after `seconds`. `cancel` of the timer prevents it."""
        timer = self.timers.add(seconds, function)
        self.wake()
        return timer

    def wake(self) -> None:
        """Schedule a turn after the current turn of the loop. Does nothing without a loop."""
        if not self._turn_scheduled and not self.closed and self._has_loop():
            self._call_soon(self._run_turn)
            self._turn_scheduled = True  # Only now: a loop in debug mode may have refused the call.

    def flush(self) -> None:
        """Write as much of the connection's output as the socket accepts without blocking."""
        self.channel.flush()
        self.wake()

    poll_nonblocking = flush

    def close_now(self) -> None:
        """Close the connection and fail all open requests. Needs no running loop."""
        self.closed = True
        self.link.close()
        self.channel.close()
        self._stop_timer()
        self.callbacks.run()

    def reset_after_fork(self) -> None:
        self.channel.before_close = None  # The parent's loop must not be changed.
        super().reset_after_fork()

    # Event loop interface

    @abstractmethod
    async def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Return whether any of `futures` is done within `seconds` (None: no limit)."""

    @abstractmethod
    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work()` in the loop's thread pool, because it may block. An `Executor`."""

    @abstractmethod
    def set_event(self, event: Event) -> None:
        """Set `event` from any thread, or from a signal handler."""

    @abstractmethod
    def _check_other_caller(self) -> None:
        """Bind to the loop of a caller that is not known yet. Raises `NotAllowed` for a different one."""

    @abstractmethod
    def _has_loop(self) -> bool:
        """Return whether there is an open loop for this driver; bind to the current one if possible."""

    @abstractmethod
    def _call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` after the current turn of the loop."""

    @abstractmethod
    def _start_timer(self, seconds: float) -> Any:
        """Call `_run_turn` after `seconds`."""

    @abstractmethod
    def _stop_timer(self) -> None:
        """Cancel the timer, if there is one."""

    @abstractmethod
    def _watch_socket(self, fileno: int, to_write: bool) -> None:
        """Call `_readable`, and with `to_write` also `_writable`, when the socket is."""

    @abstractmethod
    def _unwatch(self) -> None:
        """Stop watching the socket. Ignored if it is not watched."""

    @abstractmethod
    def _start_resolving(self) -> None:
        """Resolve `link.server`, unless that is in progress, and pass it to `_address_resolved`."""

    # Internal

    def _run_turn(self) -> None:
        """Run what is due, then watch the socket and the clock."""
        self._turn_scheduled = False
        if self.closed:
            return
        for ticker in self.tickers:
            ticker.tick()
        self.channel.tick()
        if self.channel.socket is None and self.link.wants_connection():
            self._start_resolving()
        self.channel.flush()
        self._watch()
        self.callbacks.run()

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
            self._timer_handle = self._start_timer(min(max(0.0, due - self.clock()), POLL_SECONDS_MAX))

    def _readable(self) -> None:
        if self.channel.connecting:
            self.channel.on_writable()
        self.channel.process_received(self.channel.receive())
        self._run_turn()

    def _writable(self) -> None:
        self.channel.on_writable()
        self._run_turn()

    def _address_resolved(self, found: ResolvedAddresses | OSError | TfmqError) -> None:
        """Connect to the address, or report the error of the resolution."""
        if not isinstance(found, list):
            self.channel.connection_failed(found)
        elif not self.closed and self.channel.socket is None:
            self.channel.start_connecting(choose_address(found))
