"""Pauses between repeated attempts, doubled after each failure up to a maximum. This module does not wait itself."""

from __future__ import annotations

from typing import Final

from tfmq.errors import Busy

BUSY_WAIT_SECONDS_MAX: Final = 60.0
"""The longest pause that a busy broker can ask for. If it is still busy after that, it asks again."""
_DOUBLINGS_MAX = 60  # enough for any maximum; a larger exponent would overflow a float


def backoff_seconds(failures: int, first: float, maximum: float, spread: float = 0.0) -> float:
    """Return the pause after the `failures`-th consecutive failure; the first failure is 1.

    `spread`: the fraction of the pause that is added to it. Callers pass a random fraction, so that clients that fail
    together do not all retry together.
    """
    return min(maximum, first * 2.0 ** min(_DOUBLINGS_MAX, max(0, failures - 1))) * (1 + spread)


class Backoff:
    """The pauses of one repeated operation. `seconds` is the next pause."""

    __slots__ = ("_first", "_maximum", "seconds")

    def __init__(self, first: float, maximum: float) -> None:
        self._first, self._maximum = first, maximum
        self.seconds = first

    def advance(self) -> float:
        """Return the next pause, and double the pause after it, up to the maximum."""
        seconds, self.seconds = self.seconds, min(self._maximum, 2 * self.seconds)
        return seconds

    def reset(self) -> None:
        self.seconds = self._first


def pause_seconds(error: BaseException | None, seconds: float) -> float:
    """Return the pause before the next attempt after `error`: `seconds`, or longer if a busy broker asks for that."""
    if not isinstance(error, Busy):
        return seconds
    return max(seconds, min(error.wait_ms / 1000, BUSY_WAIT_SECONDS_MAX))
