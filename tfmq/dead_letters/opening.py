"""Opens the store that an address names, for a consumer."""

from __future__ import annotations

import os
from collections.abc import Callable

from tfmq.client.dead_letters import DeadLetters
from tfmq.client.link import Link
from tfmq.client.received import Codec
from tfmq.client.work import Run, inline
from tfmq.dead_letters.address import OWN_STORE, default_path, parse_address
from tfmq.dead_letters.keeping import GroupDeadLetters
from tfmq.dead_letters.shelf import Shelf
from tfmq.errors import BadRequest


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
    """The store of `group` at `where`: a path, a SQLAlchemy URL or "topic:NAME" (see `address`); `OWN_STORE`: the one
    that a group has unless it is told. Nothing is opened yet.

    `calls_max`: how often a handler is called with one message before it is dead (`retries` + 1) · `codec`: what makes
    `message.value` of those that are handled again · `run`: does the work of a database, as for offset storages ·
    `link`: the consumer's, which only a topic needs · `wall_clock`: seconds since 1970 (`reach` gives it).
    Raises `BadRequest` for what names no store.
    """
    shelf = open_shelf(default_path(group) if where == OWN_STORE else where, run=run, link=link)
    return GroupDeadLetters(shelf, group, calls_max, wall_clock=wall_clock, codec=codec)


def open_shelf(where: str | os.PathLike[str], *, run: Run = inline, link: Link | None = None) -> Shelf:
    """The shelf at `where`. Raises `BadRequest`."""
    address = parse_address(where)
    if address.kind != "topic":
        from tfmq.dead_letters.sql_store import (
            SqlShelf,
            SqlStore,
        )  # a consumer without a store needs no database

        return SqlShelf(SqlStore(address), run)
    if link is None:
        raise BadRequest(f"{address} is in the broker: name its servers.")
    from tfmq.dead_letters.topic_shelf import TopicShelf

    return TopicShelf(link, address.value)
