"""Opens the store that an address names, for a consumer."""

from __future__ import annotations

import os
from collections.abc import Callable

from tfmq.client.dead_letters import DeadLetters
from tfmq.client.link import Link
from tfmq.client.received import Codec
from tfmq.client.work import Run, inline


def open_dead_letters(
    where: str | os.PathLike[str],
    *,
    group: str,
    calls_max: int,
    codec: Codec | None = None,
    run: Run = inline,
    link: Link | None = None,
    wall_clock: Callable[[], float],
) -> DeadLetters:
    """The store of `group` at `where`: a path, a SQLAlchemy URL or "topic:NAME" (see `address`). Nothing is opened yet.

    `calls_max`: how often a handler is called with one message before it is dead (`retries` + 1) · `codec`: what makes
    `message.value` of those that are handled again · `run`: does the work of a database, as for offset storages ·
    `link`: the consumer's, which only a topic needs · `wall_clock`: seconds since 1970 (`reach` gives it).
    Raises `BadRequest` for what names no store.
    """
    raise AssertionError("being written")
