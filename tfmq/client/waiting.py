"""What an operation can wait for, apart from who waits and how.

An *operation* is a generator that does something of several steps. It runs in its driver's thread (under the
driver's lock), so it may touch the link and everything built on it without further care. It yields a `Wait`; the
driver sends and receives until one of the things waited for is done or the time is over, and resumes it. Nothing
is sent into it: it looks at what it waits for.

    def round_trip(link):
        call = link.call(commands.PING)
        yield Wait((call,), seconds=5.0)
        if not call.done: ...
        return call.result()
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class Waitable:
    """Something that becomes done once, and stays so. `callbacks` run at that moment, in the thread and under the
    lock of the driver; they must not block and must not run user code.
    """

    __slots__ = ("__weakref__", "callbacks", "done")

    def __init__(self) -> None:
        self.done = False
        self.callbacks: list[Callable[[Any], None]] = []

    def when_done(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(self)` once it is done: at once if it is already."""
        if self.done:
            callback(self)
        else:
            self.callbacks.append(callback)

    def forget(self, callback: Callable[[Any], None]) -> None:
        """Take back what `when_done` registered; nothing happens if it is gone."""
        if callback in self.callbacks:
            self.callbacks.remove(callback)

    def settle(self) -> None:
        """Make it done. A second time does nothing."""
        if self.done:
            return
        self.done = True
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback(self)


class Flag(Waitable):
    """A `Waitable` for one side to raise and another to wait for: a stop, room in a buffer, an arrival."""

    __slots__ = ()


class Wait(NamedTuple):
    """Resume when any of `targets` is done, or after `seconds` (None: no limit). No targets: a plain sleep. A driver
    goes through `targets` once, outside of its lock.
    """

    targets: Iterable[Waitable]
    seconds: float | None = None


Operation = Generator[Wait, None, Result]
