"""What all drivers have: users' result callbacks, timers, and the reset in a forked child."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.socket import SocketChannel
from tfmq.errors import NotAllowed

log = logging.getLogger("tfmq.client")

_running = threading.local()


class CallbackQueue(deque[Callable[[], object]]):
    """User callbacks, run in the reading thread, outside every lock. What one raises is logged."""

    def run(self) -> None:
        """Run the queued callbacks. Thread-safe: each one runs once. Ignored inside a callback."""
        if getattr(_running, "now", False):
            return
        _running.now = True
        try:
            while self:
                try:
                    callback = self.popleft()
                except IndexError:
                    return
                try:
                    callback()
                except Exception:
                    log.exception("A callback raised.")
        finally:
            _running.now = False


def check_not_in_callback() -> None:
    """Raises `NotAllowed` in a callback: only its thread reads the reply that it would await."""
    if getattr(_running, "now", False):
        raise NotAllowed(
            "A callback must not wait: it runs in the thread that reads the replies. Hand the work to a thread of"
            " your own, or use add_callback again."
        )


@dataclass(slots=True, eq=False)
class Timer:
    """A function and its time. `cancel` prevents the call."""

    due: float
    function: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """A heap of timers. `tick` runs the due ones under the lock of its caller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def add(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer(self._clock() + seconds, function)
        heapq.heappush(self._heap, (timer.due, next(self._numbers), timer))
        return timer

    def next_time(self) -> float:
        """Return the time of the first timer; infinity if there is none."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def tick(self) -> None:
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if not timer.cancelled:
                timer.cancelled = True
                timer.function()

    def clear(self) -> None:
        self._heap.clear()


class Ticker(Protocol):
    """A component with its own timers. Both methods are called under the driver's lock."""

    def next_time(self) -> float: ...

    def tick(self) -> None: ...


class DriverLock(Protocol):
    """The lock of a driver."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


class Driver:
    """The base of all drivers. `_reset_state` is called again in a forked child."""

    lock: DriverLock

    def __init__(self, link: ClientConnection, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.link = link
        self.clock = clock
        self.timers = Timers(clock)
        self.tickers: list[Ticker] = [self.timers]
        self.callbacks = CallbackQueue()
        self.on_fork: list[Callable[[], None]] = []
        """Called in a forked child, to discard the parent's state."""
        self._reset_state()
        register_for_fork(self)

    def _reset_state(self) -> None:
        self.channel = SocketChannel(self.link)
        self.closed = False

    def reset_after_fork(self) -> None:
        """In a forked child: reset the connection and the state of the driver."""
        self.channel.close()
        self.callbacks.clear()
        self.timers.clear()
        was_closed = self.closed
        self.link.reset()
        self._reset_state()
        if was_closed:
            self.closed = True
            self.link.close()
        for forget in self.on_fork:
            forget()

    def next_time(self) -> float:
        """Return the time of the next due action, in the driver's clock. Called under the lock."""
        return min(self.link.next_time(), *[ticker.next_time() for ticker in self.tickers])


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
_held: list[Driver] = []
_forking = threading.Lock()
"""Serialises forks: `_held` belongs to the thread that forks."""


def register_for_fork(driver: Driver) -> None:
    """Call `driver.reset_after_fork` in every forked child."""
    _drivers.add(driver)


def _before_fork() -> None:
    _forking.acquire()
    for driver in list(_drivers):  # A child must never inherit a half-made change.
        driver.lock.acquire()
        _held.append(driver)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().lock.release()
    _forking.release()


def _after_fork_in_child() -> None:
    _forking.release()
    while _held:
        _held.pop().reset_after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
