"""When something that was refused is tried again."""

from collections.abc import Callable
from typing import Any, Final

from tfmq.delay.requests import Timers

PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 30.0
"""A target that takes nothing is tried again after pauses that double between these, besides when it is resumed."""


class Patience:
    """One pause at a time; `go()` at its end."""

    def __init__(self, timers: Timers, go: Callable[[], None]) -> None:
        self._timers, self._go = timers, go
        self._pause = PAUSE_SECONDS
        self._timer: Any = None

    @property
    def waits(self) -> bool:
        """Whether a pause is under way."""
        return self._timer is not None

    def hold(self, seconds: float) -> None:
        """A pause of that length, unless there is one."""
        if self._timer is None:
            self._timer = self._timers.after(seconds, self.end)

    def refused(self) -> None:
        """A pause, twice as long as the last one."""
        self.stop()
        self._timer = self._timers.after(self._pause, self.end)
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)

    def end(self) -> None:
        """No pause any more: on it goes."""
        self.stop()
        self._go()

    def stop(self) -> None:
        """No pause any more, and nothing comes of it."""
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def renew(self) -> None:
        """The next pause is a short one again."""
        self._pause = PAUSE_SECONDS
