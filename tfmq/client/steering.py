"""How a handler says what is to become of its message: it returns, it raises anything, or it raises one of these."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tfmq.errors import BadRequest


class Reject(Exception):
    """Raised by a handler: this message will never be handled. It becomes a dead letter at once, without a retry."""

    __module__ = "tfmq"  # the name that people write is the one that logs and dead letters show

    def __init__(self, reason: str = "rejected") -> None:
        super().__init__(reason)
        self.reason = reason


class RetryLater(Exception):
    """Raised by a handler: not now. Those behind it go on; it is kept, and handled again after `seconds` (a number from
    0 on, or a timedelta). `reason` is kept with it. Raises `BadRequest` for other times.
    """

    __module__ = "tfmq"

    def __init__(self, seconds: float | timedelta, reason: str = "") -> None:
        found = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            raise BadRequest(
                f"RetryLater({seconds!r}): it takes a number of seconds from 0 on, or a timedelta."
            )
        super().__init__(reason or f"to be handled again after {found:g} s")
        self.seconds = float(found)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """As another process gets it, such as one of a pool that a handler asks."""
        return type(self), (self.seconds, self.reason)
