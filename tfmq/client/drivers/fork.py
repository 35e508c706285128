"""What a fork does to clients: the child gets a fresh connection and empty buffers; the parent notices nothing.

All locks of all drivers are taken before a fork, so that the child never inherits a half-made change.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Lockable(Protocol):
    """A lock of either driver."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


class Renewable(Protocol):
    """A driver, as a fork sees it."""

    @property
    def lock(self) -> Lockable: ...

    def renew(self) -> None: ...


_drivers: weakref.WeakSet[Renewable] = weakref.WeakSet()
_held: list[Renewable] = []
_forking = threading.Lock()
"""One fork at a time: `_held` belongs to the thread that forks."""


def after_fork(driver: Renewable) -> None:
    """Have `driver` renewed in every forked child."""
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
