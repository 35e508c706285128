"""What becomes of the times that a schedule missed: while the broker was down, a partition stopped, a clock stepped.

    one    the latest of them is sent, once; the default
    all    each is sent, the oldest first, at most the newest ALL_MAX
    skip   none is sent

A time that is met within GRACE_MS is not missed. Pure.
"""

from __future__ import annotations

from typing import Final

from tfmq.delay.cron import Cron

ONE, ALL, SKIP = "one", "all", "skip"
RULES: Final = (ONE, ALL, SKIP)

GRACE_MS: Final = 60_000
"""Two times of one schedule are a minute apart at least, so at most one of them can be on time; far longer than a
busy broker, or a step of a clock that is noticed, needs."""

ALL_MAX: Final = 1_000
"""A schedule of every minute has as many in 17 hours; a downtime of a year would be half a million messages."""


def to_send(cron: Cron, rule: str, after_ms: int, now_ms: int) -> list[int]:
    """The times later than `after_ms` that are to be sent at `now_ms`, in their order; none if none is due."""
    if rule == ALL:
        return cron.newest(after_ms, now_ms, ALL_MAX)
    latest = cron.latest(after_ms, now_ms)
    if latest is None or (rule == SKIP and now_ms - latest >= GRACE_MS):
        return []
    return [latest]
