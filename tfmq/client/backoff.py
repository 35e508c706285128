"""How long a message waits, at the head of its lane, between two calls of its handler. Pure."""

from __future__ import annotations

from typing import Final

FIRST_SECONDS: Final = 0.1
"""What fails for a moment, a lock or a connection that was cut, is over by then."""
MAX_SECONDS: Final = 30.0
"""Those behind it wait, too: what needs longer is a matter for the store of dead letters, or for `RetryLater`."""
DOUBLINGS_MAX: Final = 16
JITTER: Final = 0.2
"""Up to so much of a pause is added, so that what failed together does not come back together."""


def pause_seconds(failures: int, chance: float) -> float:
    """The pause behind the `failures`-th failure: doubled each time; `chance` is from 0 to 1."""
    pause = min(MAX_SECONDS, FIRST_SECONDS * (1 << min(DOUBLINGS_MAX, max(0, failures - 1))))
    return pause * (1 + JITTER * chance)
