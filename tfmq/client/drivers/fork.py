"""Fork handling: a forked child gets a new connection and empty buffers.

All driver locks are acquired before a fork, so that the child never inherits a half-made change. The parent is not
affected.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class DriverLock(Protocol):
    """The lock of a driver."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


class ForkAware(Protocol):
    """A driver that can be reset in a forked child."""

    @property
    def lock(self) -> DriverLock: ...

    def reset_after_fork(self) -> None: ...


_drivers: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_held: list[ForkAware] = []
_forking = threading.Lock()
"""Serialises forks: `_held` belongs to the thread that forks."""


def register_for_fork(driver: ForkAware) -> None:
    """Call `driver.reset_after_fork` in every forked child."""
    _drivers.add(driver)


def _before_fork() -> None:
    _forking.acquire()
    for driver in list(_drivers):
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


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
