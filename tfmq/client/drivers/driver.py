"""The base of all drivers: how a wait ends, users' result callbacks, timers, and the reset in a forked child."""

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
        """Run the queued callbacks, each once even if several threads call this. Does nothing in a callback."""
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
    """Raises `NotAllowed` in a callback: it runs in the thread that would have to read the awaited reply."""
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
    """A heap of timers. `tick`, called under the driver's lock, runs those that are due."""

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
    """A component with its own timers. The driver calls `tick` under its lock, at `next_time` or earlier."""

    def next_time(self) -> float: ...

    def tick(self) -> None: ...


is_done = attrgetter("done")


class Driver:
    """The base of all drivers. `_reset_state` is called again in a forked child.

    `wait(futures, seconds)` of a driver ends when one of the futures is done or after `seconds` (None: no limit). It
    returns whether a future is done, also if the deadline has passed at the same time, so that no result is lost. The
    caller decides what a passed deadline means. The blocking driver raises `Closed` if it is closed before a future is
    done; the other drivers do not, because their `close_now` completes every request.
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
        """Functions that are called in a forked child to discard the parent's state."""
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
        for forget in self.on_fork:
            forget()

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
"""Permits one fork at a time, because `_held` has the drivers that the forking thread has locked."""


def _before_fork() -> None:
    _forking.acquire()
    for driver in list(drivers):  # A child must not inherit a driver in the middle of a change by another thread.
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
