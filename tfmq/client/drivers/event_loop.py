"""The base class of the event loop drivers: operations of many callers in one thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from tfmq.client.drivers.blocking import POLL_SECONDS_MAX
from tfmq.client.drivers.driver import Driver, Timer, is_done
from tfmq.client.drivers.socket import SocketAddress
from tfmq.client.operation import NEVER, CallUserCode, Event, Future, Operation
from tfmq.errors import TfmqError

Result = TypeVar("Result")


class NoLock:
    """A lock without effect, for a driver that is used in a single thread."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None: ...


class EventDriver(Driver, ABC):
    """Runs operations as coroutines. Not thread-safe, except `set_event`.

    `wake` schedules a turn of the driver after the current turn of the event loop. In its turn the driver runs due
    work, writes the connection's output, and registers the socket and a timer with the loop. If a caller is cancelled,
    its request continues, and the reply is ignored if no other caller waits for it.
    """

    _current: Callable[[], object]
    """Returns the running loop (asyncio) or the thread's number (Twisted). A C function, because each send calls it."""
    _owner: object
    """The loop or thread (as `_current` returns it) in which the driver may be used; None before the first use."""

    lock = NoLock()

    def _reset_state(self) -> None:
        super()._reset_state()
        self.channel.before_close = self._unwatch  # Otherwise the loop would continue to watch a closed descriptor.
        self._owner = None
        self._watched: tuple[int, bool] | None = None
        self._timer_handle: Any = None
        self._turn_scheduled = False

    # For the API variants

    async def run(self, operation: Operation[Result]) -> Result:
        """Run `operation`. Return its result or raise its error. Raises `NotAllowed` outside the driver's loop."""
        if self._current() != self._owner:  # As `check_caller`, inline for speed: each send runs this.
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

    async def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Wait until any of `futures` is done, at most `seconds` (None: no limit). Return whether one is done."""
        waited = tuple(futures)
        if any(map(is_done, waited)):
            return True
        sleep, end = self._create_sleep()
        for target in waited:
            target.add_done_callback(end)
        timer = None if seconds is None else self._call_later(max(0.0, seconds), end)
        self.wake()
        try:
            await sleep
        finally:
            if timer is not None:
                self._cancel_call(timer)
            for target in waited:
                target.remove_done_callback(end)
        return any(map(is_done, waited))

    def check_caller(self) -> None:
        """Raises `NotAllowed` outside of the loop or thread to which the client belongs."""
        if self._current() != self._owner:
            self._check_other_caller()

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call `function` once in the loop after `seconds`. The timer's `cancel` prevents the call."""
        timer = self.timers.add(seconds, function)
        self.wake()
        return timer

    def wake(self) -> None:
        """Schedule a turn of the driver after the loop's current turn. Does nothing if the driver has no loop yet."""
        if not self._turn_scheduled and not self.closed and self._has_loop():
            self._call_soon(self._run_turn)
            self._turn_scheduled = True  # Set last: in debug mode `_call_soon` may raise an error.

    def flush(self) -> None:
        """Write as much of the connection's output as the socket accepts without blocking."""
        self.channel.flush()
        self.wake()

    poll_nonblocking = flush

    def close_now(self) -> None:
        """Close the connection and fail all open requests. May be called when no loop runs."""
        self.closed = True
        self.link.close()
        self.channel.close()
        if self._timer_handle is not None:
            self._cancel_call(self._timer_handle)
        self.callbacks.run()

    def reset_after_fork(self) -> None:
        self.channel.before_close = None  # The parent's loop must not be changed.
        super().reset_after_fork()

    # Implemented by subclasses for their event loop

    @abstractmethod
    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work`, which may block, in the loop's thread pool. Then call `done` with its result or error."""

    @abstractmethod
    def set_event(self, event: Event) -> None:
        """Set `event` from any thread, or from a signal handler."""

    @abstractmethod
    def _check_other_caller(self) -> None:
        """Bind the driver to the caller's loop. Raises `NotAllowed` if the driver is bound to another loop already."""

    @abstractmethod
    def _has_loop(self) -> bool:
        """If the driver has no loop, bind it to the running loop, if any. Return whether it has an open loop now."""

    @abstractmethod
    def _call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` after the current turn of the loop."""

    @abstractmethod
    def _call_later(self, seconds: float, function: Callable[[], None]) -> Any:
        """Call `function` after `seconds`. Return a handle for `_cancel_call`."""

    @abstractmethod
    def _cancel_call(self, call: Any) -> None:
        """Cancel a call that `_call_later` has scheduled. Does nothing if the call was made already."""

    @abstractmethod
    def _create_sleep(self) -> tuple[Awaitable[None], Callable[..., None]]:
        """Return an awaitable for `wait`, and a function that completes it. The function ignores its argument."""

    @abstractmethod
    def _watch_socket(self, fileno: int, to_write: bool) -> None:
        """Let the loop call `_readable` when the socket is readable and, if `to_write`, `_writable` when writable."""

    @abstractmethod
    def _unwatch(self) -> None:
        """Stop watching the socket. Does nothing if the socket is not watched."""

    @abstractmethod
    def _start_resolving(self) -> None:
        """Start to resolve `link.server`, unless that is in progress. Later pass the result to `_address_resolved`."""

    def _run_turn(self) -> None:
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
        if self._timer_handle is not None:
            self._cancel_call(self._timer_handle)
            self._timer_handle = None
        due = self.next_time()
        if due != NEVER:
            pause = min(max(0.0, due - self.clock()), POLL_SECONDS_MAX)
            self._timer_handle = self._call_later(pause, self._run_turn)

    def _readable(self) -> None:
        if self.channel.connecting:
            self.channel.on_writable()
        self.channel.process_received(self.channel.receive())
        self._run_turn()

    def _writable(self) -> None:
        self.channel.on_writable()
        self._run_turn()

    def _address_resolved(self, found: SocketAddress | OSError | TfmqError) -> None:
        if isinstance(found, Exception):
            self.channel.connection_failed(found)
        elif not self.closed and self.channel.socket is None:
            self.channel.start_connecting(found)
