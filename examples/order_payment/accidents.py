"""Crashes, on purpose: the process kills itself, with SIGKILL, just before or just behind a step.

For that it reaches into tfmq, as no program in earnest has to.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from tfmq.client.transaction import check_back
from tfmq.sql import commit_protocol

STEPS = (
    "broker begins",
    "session begins",
    "database prepares",
    "broker prepares",
    "database commits",
    "broker commits",
)
"""The steps of tfmq.sql.transaction, in their order; docs/database-transactions.md tells of them."""

Accident = tuple[str, bool]
"""A step, and whether it is done first."""
EACH: tuple[Accident, ...] = tuple((step, behind) for step in STEPS for behind in (False, True))


def hurry() -> None:
    """Let this process see the broker's questions at once, instead of within seconds: the rest of the show waits."""
    check_back.POLL_SECONDS = 0.1  # type: ignore[misc]


def prepare_accident(accident: Accident | None) -> None:
    """Let this process die at the first step of that name."""
    if accident is None:
        return
    name, behind = accident
    really = commit_protocol.run_step

    def perform(step: commit_protocol.Step) -> Any:
        if step.name != name:
            return really(step)
        if behind:
            really(step)
        os.kill(os.getpid(), signal.SIGKILL)

    commit_protocol.run_step = perform
