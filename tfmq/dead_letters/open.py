"""Opening of the dead-letter store that an address names, for a consumer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfmq.client.connection.connection import Link
from tfmq.client.connection.requests import ask
from tfmq.client.consumer.message import Codec
from tfmq.client.operation import Operation, Run, inline
from tfmq.client.worker.dead_letter_store import DeadLetters
from tfmq.dead_letters.model import PAGE_LETTERS, START, Letter, Page, Selection
from tfmq.dead_letters.store import (
    OWN_STORE,
    GroupDeadLetters,
    Shelf,
    Step,
    broker_name,
    default_path,
    own_path,
    parse_address,
)
from tfmq.errors import BadRequest, StoreFailed, TfmqError
from tfmq.protocol.commands import Ping

log = logging.getLogger("tfmq.consumer")

LOOK_SECONDS = 10.0
"""Time limit for asking whether the broker has the message of a letter."""


def open_dead_letters(
    where: str | os.PathLike[str],
    *,
    group: str,
    calls_max: int,
    codec: Codec | Mapping[str, Codec] | None = None,
    run: Run = inline,
    link: Link | None = None,
    wall_clock: Callable[[], float],
    folder: str | None = None,
) -> DeadLetters:
    """Return the dead-letter store of a group.

    `where`: a path, a SQLAlchemy URL, "topic:NAME", or `DEFAULT_STORE`.
    The store is opened on first use. `calls_max`: handler calls per message before it is dead (`retries` + 1)
    · `codec`: decodes `message.value` of messages that are handled again · `run`: executes database calls, as
    for offset storages · `link`: the consumer's connection, which identifies the broker; required only for a
    topic · `wall_clock`: seconds since 1970 · `folder`: directory of `DEFAULT_STORE`, as GROUP.db, for a
    broker in a directory of its own. Raises BadRequest for an invalid address.
    """

    def broker() -> str | None:
        return "" if link is None else known_broker(link)

    shelf: Shelf
    if where == OWN_STORE and folder is None:
        shelf = OwnShelf(group, broker, run)
    else:
        own = None if folder is None else default_path(group, Path(folder))
        shelf = open_shelf(own if where == OWN_STORE and own is not None else where, run=run, link=link)
    return GroupDeadLetters(
        shelf,
        group,
        calls_max,
        wall_clock=wall_clock,
        codec=codec,
        broker=broker,
        stands_here=None if link is None else lambda letter: _stands_here(link, letter),
    )


def known_broker(link: Link) -> str | None:
    """Return the id of the broker that `link` has reached, as letters have it; None: none yet."""
    return None if link.hello is None else broker_name(link.hello.node)


def find_broker(link: Link, until: float) -> Operation[str]:
    """Connect if necessary and return the broker's id, as letters have it.

    Raises ConnectionFailed.
    """
    found = known_broker(link)
    if found is None:
        yield from ask(link, Ping(), until)
        found = known_broker(link)
    assert found is not None, "it answered"
    return found


def _stands_here(link: Link, letter: Letter) -> Operation[bool | None]:
    """Return whether the broker has the letter's message; None if that is unknown at the moment."""
    from tfmq.dead_letters.topic_store import stands_here

    if link.state != "ready":
        return None
    try:
        return (yield from stands_here(link, letter, link.now() + LOOK_SECONDS))
    except TfmqError:
        return None


def open_shelf(where: str | os.PathLike[str], *, run: Run = inline, link: Link | None = None) -> Shelf:
    """Return the letter store at `where`. Raises BadRequest."""
    address = parse_address(where)
    if address.kind != "topic":
        from tfmq.dead_letters.sql_store import (
            SqlShelf,
            SqlStore,
        )  # a consumer without a store needs no database

        return SqlShelf(SqlStore(address), run)
    if link is None:
        raise BadRequest(f"{address} is in the broker: name its servers.")
    from tfmq.dead_letters.topic_store import TopicShelf

    return TopicShelf(link, address.value)


class OwnShelf:
    """Default store of a group: a file whose path contains the broker's id.

    Therefore all methods raise StoreFailed until the broker is reached. See `LetterStore`.
    """

    def __init__(self, group: str, broker: Callable[[], str | None], run: Run = inline) -> None:
        self._group = group
        self._broker = broker
        self._run = run
        self._known: tuple[str, Shelf] | None = None

    @property
    def name(self) -> str:
        """Path of the file, with NODE in place of the broker's id while that is unknown."""
        if self._known is not None:
            return self._known[1].name
        return default_path(self._group, broker="NODE")

    def _opened(self) -> Shelf:
        """Return the store for the current broker. Raises StoreFailed until the broker is reached."""
        broker = self._broker()
        if broker is None:
            raise StoreFailed(
                "The broker was not reached yet, and the path of the dead letters has its id in it: they are stored,"
                " and handled again, when it is reached."
            )
        if self._known is None or self._known[0] != broker:
            self.close()
            shelf = open_shelf(own_path(self._group, broker), run=self._run)
            log.info("Dead letters of group %s are kept in %s.", self._group, shelf.name)
            self._known = (broker, shelf)
        return self._known[1]

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        return self._opened().apply(steps)

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        return self._opened().find(selection, after, count, whole=whole)

    def due(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        return self._opened().due(group, now_ms, broker)

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        return self._opened().next_due_ms(group, broker)

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> Operation[list[Letter]]:
        return self._opened().waiting_for_others(group, broker, after)

    def get(self, id: str) -> Operation[Letter | None]:
        return self._opened().get(id)

    def counts(self) -> Operation[dict[tuple[str, str], int]]:
        return self._opened().counts()

    def prune(self, now_ms: int) -> Operation[int]:
        return self._opened().prune(now_ms)

    def close(self) -> None:
        if self._known is not None:
            self._known[1].close()
