"""The base class of the drivers, with timers, the queue of users' callbacks, and the reset in a forked child."""

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
from operator import attrgetter
from typing import Any, Protocol

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.socket import SocketChannel
from tfmq.errors import NotAllowed

log = logging.getLogger("tfmq.client")


class RunningCallbacks(threading.local):
    """Whether this thread runs users' callbacks now."""

    now = False


running_callbacks = RunningCallbacks()


class CallbackQueue(deque[Callable[[], object]]):
    """User callbacks, run without any lock in the thread that reads replies. An exception of a callback is logged."""

    def run(self) -> None:
        """Run the queued callbacks, each once even if several threads call this. In a callback this does nothing."""
        if running_callbacks.now:
            return
        running_callbacks.now = True
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
            running_callbacks.now = False


def check_not_in_callback() -> None:
    """Raises `NotAllowed` if called by a callback. Callbacks must not wait: their thread reads the replies."""
    if running_callbacks.now:
        raise NotAllowed(
            "A callback must not wait: it runs in the thread that reads the replies. Hand the work to a thread of"
            " your own, or use add_callback again."
        )


@dataclass(slots=True, eq=False)
class Timer:
    """A function to call at the time `due`. `cancel` prevents the call."""

    due: float
    function: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """A heap of timers. The driver calls `tick` under its lock; `tick` calls the functions of the due timers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def add(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer(self._clock() + seconds, function)
        heapq.heappush(self._heap, (timer.due, next(self._numbers), timer))
        return timer

    def next_time(self) -> float:
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
    """A component with its own time limits. The driver calls `tick` under its lock, at `next_time()` at the latest."""

    def next_time(self) -> float: ...

    def tick(self) -> None: ...


is_done = attrgetter("done")


class Driver:
    """The base class of all drivers. `_reset_state` is called again in a forked child.

    `wait(futures, seconds)` of a driver ends when one of the futures is done or after `seconds` (None: no limit). It
    returns True if a future is done, even if the time limit has passed as well, so that no result is lost. It returns
    False if only the time limit has passed. The blocking driver's `wait` raises `Closed` if the driver is closed before
    a future is done. The other drivers do not raise it, because their `close_now` completes every request.
    """

    lock: Any
    """A `threading.RLock`, or `NoLock` if only one thread uses the driver."""

    def __init__(self, link: ClientConnection, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.link = link
        self.clock = clock
        self.timers = Timers(clock)
        self.tickers: list[Ticker] = [self.timers]
        self.callbacks = CallbackQueue()
        self.on_fork: list[Callable[[], None]] = []
        """Functions that a forked child calls to discard the parent's state in the objects that use the driver."""
        self._reset_state()
        drivers.add(self)

    def _reset_state(self) -> None:
        self.channel = SocketChannel(self.link)
        self.closed = False

    def reset_after_fork(self) -> None:
        """Reset the connection and the state of the driver in a forked child."""
        self.channel.close()
        self.callbacks.clear()
        self.timers.clear()
        was_closed = self.closed
        self.link.reset()
        self._reset_state()
        if was_closed:
            self.closed = True
            self.link.close()
        for callback in self.on_fork:
            callback()

    def next_time(self) -> float:
        """Return the time of the next due action, in the driver's clock. Called under the lock."""
        soonest = self.link.next_time()
        for ticker in self.tickers:
            soonest = min(soonest, ticker.next_time())
        return soonest


drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
"""All drivers. `reset_after_fork` of each is called in every forked child."""
_held: list[Driver] = []
_forking = threading.Lock()
"""Permits one fork at a time, because there is one list `_held`: the drivers that the forking thread has locked."""


def _before_fork() -> None:
    _forking.acquire()
    for driver in list(drivers):  # The child must not inherit a driver that another thread is changing.
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
