"""Fork handling: a forked child gets a new connection and empty buffers.

All driver locks are acquired before a fork, so that the child never inherits a half-made change. The parent is not
affected.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Lockable(Protocol):
    """The lock of a driver."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


class Renewable(Protocol):
    """A driver that can be reset in a forked child."""

    @property
    def lock(self) -> Lockable: ...

    def renew(self) -> None: ...


_drivers: weakref.WeakSet[Renewable] = weakref.WeakSet()
_held: list[Renewable] = []
_forking = threading.Lock()
"""Serialises forks: `_held` belongs to the thread that forks."""


def after_fork(driver: Renewable) -> None:
    """Call `driver.reset_after_fork` in every forked child."""
    _drivers.add(driver)


def _before() -> None:
    _forking.acquire()
    for driver in list(_drivers):
        driver.lock.acquire()
        _held.append(driver)


def _in_parent() -> None:
    while _held:
        _held.pop().lock.release()
    _forking.release()


def _in_child() -> None:
    _forking.release()
    while _held:
        _held.pop().renew()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
