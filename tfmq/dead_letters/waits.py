"""How long a kept message waits before it is handled again behind a failure. Pure."""

from __future__ import annotations

from typing import Final

FIRST_MS: Final = 1_000
"""The quick retries were made before it was kept: what failed then needs longer."""
MAX_MS: Final = 3_600_000
"""A person who mended the cause does not wait longer than an hour; `tfmq dlq retry` does not wait at all."""
DOUBLINGS_MAX: Final = 20
JITTER: Final = 0.2
"""Up to so much of a wait is added, so that what failed together does not come back together."""


def wait_ms(calls: int, chance: float) -> int:
    """The wait behind the `calls`-th call: doubled each time; `chance` is from 0 to 1."""
    wait = min(MAX_MS, FIRST_MS << min(DOUBLINGS_MAX, max(0, calls - 1)))
    return round(wait * (1 + JITTER * chance))
