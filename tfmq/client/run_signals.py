"""SIGTERM and SIGINT while a consumer runs handlers: the first one ends the run in order, a second one at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

log = logging.getLogger("tfmq.consumer")

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_CODE_BASE: Final = 128
"""What shells add to a signal's number where a program ended by it."""


def at_once(number: int) -> BaseException:
    """What ends a program that was told twice."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_CODE_BASE + number)


def tell(number: int) -> None:
    """Say what a first signal does."""
    log.info(
        "%s: the messages in work are finished first; a second signal ends at once.",
        signal.Signals(number).name,
    )


class Signals:
    """Within it signals call `stop`, a second one raises. Only the main thread can have them: elsewhere, and where
    `wanted` is false, it does nothing."""

    def __init__(self, stop: Callable[[], None], wanted: bool = True) -> None:
        self._stop = stop
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._told = False

    def __enter__(self) -> Signals:
        if self._wanted:
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: it was not set from Python, and cannot be set back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._told:
            self._restore()
            raise at_once(number)
        self._told = True
        tell(number)
        self._stop()
