"""The pause between two calls of a handler for the same message. Pure functions."""

from __future__ import annotations

from typing import Final

FIRST_SECONDS: Final = 0.1
"""Long enough for short failures, such as a database lock or a lost connection, to be over."""
MAX_SECONDS: Final = 30.0
"""The following messages of the ordered queue wait, too.

A failure that needs longer is a case for the dead letter store or for `RetryLater`.
"""
DOUBLINGS_MAX: Final = 16
JITTER: Final = 0.2
"""Maximum fraction of the pause that is added at random.

Handlers that failed together then do not retry together.
"""


def backoff_seconds(failures: int, jitter: float) -> float:
    """Return the pause after the `failures`-th consecutive failure. `jitter` is from 0 to 1."""
    pause = min(MAX_SECONDS, FIRST_SECONDS * (1 << min(DOUBLINGS_MAX, max(0, failures - 1))))
    return pause * (1 + JITTER * jitter)
