"""Opening of the dead-letter store that an address names, for a consumer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from tfmq.client.connection.connection import READY, ClientConnection
from tfmq.client.connection.requests import request_with_retries
from tfmq.client.consumer.message import Codec
from tfmq.client.operation import Executor, Operation, run_inline
from tfmq.client.worker.dead_letter_store import DeadLetterStore
from tfmq.dead_letters.model import Letter
from tfmq.dead_letters.store import (
    DEFAULT_STORE,
    GroupDeadLetterStore,
    LetterStore,
    broker_id_text,
    default_path,
    existing_or_default_path,
    parse_address,
)
from tfmq.errors import BadRequest, StoreFailed, TfmqError
from tfmq.protocol.commands import Ping

log = logging.getLogger("tfmq.consumer")

MESSAGE_LOOKUP_SECONDS = 10.0
"""Time limit for asking whether the broker has the message of a letter."""


def open_dead_letters(
    where: str | os.PathLike[str],
    *,
    group: str,
    calls_max: int,
    codec: Codec | Mapping[str, Codec] | None = None,
    run: Executor = run_inline,
    link: ClientConnection | None = None,
    wall_clock: Callable[[], float],
    folder: str | None = None,
) -> DeadLetterStore:
    """Return the dead-letter store of a group.

    `where`: a path, a SQLAlchemy URL, "topic:NAME", or `DEFAULT_STORE`.
    The store is opened on first use. `calls_max`: handler calls per message before it is dead (`retries` + 1)
    · `codec`: decodes `message.value` of messages that are handled again · `run`: executes database calls, as
    for offset storages · `link`: the consumer's connection, which identifies the broker; required only for a
    topic · `wall_clock`: seconds since 1970 · `folder`: directory of `DEFAULT_STORE`, as GROUP.db, for a
    broker in a directory of its own. Raises BadRequest for an invalid address.
    """

    def broker() -> str | None:
        return "" if link is None else reached_broker_id(link)

    letter_store: LetterStore
    if where == DEFAULT_STORE and folder is None:
        letter_store = DefaultLetterStore(group, broker, run)
    else:
        own = None if folder is None else default_path(group, Path(folder))
        letter_store = open_letter_store(
            own if where == DEFAULT_STORE and own is not None else where, run=run, link=link
        )
    return GroupDeadLetterStore(
        letter_store,
        group,
        calls_max,
        wall_clock=wall_clock,
        codec=codec,
        broker=broker,
        has_message=None if link is None else lambda letter: _has_message(link, letter),
    )


def reached_broker_id(link: ClientConnection) -> str | None:
    """Return the id of the connected broker, as stored in letters; None if none was reached yet."""
    return None if link.hello is None else broker_id_text(link.hello.node)


def ask_broker_id(link: ClientConnection, until: float) -> Operation[str]:
    """Connect if necessary and return the broker's id, as stored in letters.

    Raises ConnectionFailed.
    """
    found = reached_broker_id(link)
    if found is None:
        yield from request_with_retries(link, Ping(), until)
        found = reached_broker_id(link)
    assert found is not None, "it answered"
    return found


def _has_message(link: ClientConnection, letter: Letter) -> Operation[bool | None]:
    """Return whether the broker has the letter's message; None if it cannot be asked now."""
    from tfmq.dead_letters.topic_store import has_message

    if link.state != READY:
        return None
    try:
        return (yield from has_message(link, letter, link.now() + MESSAGE_LOOKUP_SECONDS))
    except TfmqError:
        return None


def open_letter_store(
    where: str | os.PathLike[str], *, run: Executor = run_inline, link: ClientConnection | None = None
) -> LetterStore:
    """Return the letter store at the address `where`, a database or a topic.

    `run` executes database calls; a topic needs `link`, the connection to its broker. Raises BadRequest for
    an invalid address, and for a topic without `link`.
    """
    address = parse_address(where)
    if address.kind != "topic":
        # a consumer without a store needs no database
        from tfmq.dead_letters.sql_store import BlockingSqlStore, SqlLetterStore

        return SqlLetterStore(BlockingSqlStore(address), run)
    if link is None:
        raise BadRequest(f"{address} is in the broker: name its servers.")
    from tfmq.dead_letters.topic_store import TopicLetterStore

    return TopicLetterStore(link, address.value)


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _of_opened_store(
    call: Callable[Concatenate[LetterStore, Parameters], Result],
) -> Callable[Concatenate[DefaultLetterStore, Parameters], Result]:
    """Return a method that makes the same call of the store that `_open` returns."""

    @wraps(call)
    def method(self: DefaultLetterStore, /, *arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        result: Result = getattr(self._open(), call.__name__)(*arguments, **named)
        return result

    return method


class DefaultLetterStore:
    """Default store of a group: a file whose path contains the broker's id. See `LetterStore`.

    The id is not known before the broker was reached; until then all methods raise StoreFailed.
    """

    def __init__(self, group: str, broker: Callable[[], str | None], run: Executor = run_inline) -> None:
        self._group = group
        self._broker = broker
        self._run = run
        self._opened_store: tuple[str, LetterStore] | None = None

    @property
    def name(self) -> str:
        """Path of the file, with NODE in place of the broker's id while that is unknown."""
        if self._opened_store is not None:
            return self._opened_store[1].name
        return default_path(self._group, broker="NODE")

    def _open(self) -> LetterStore:
        """Return the store for the current broker. Raises StoreFailed until the broker is reached."""
        broker = self._broker()
        if broker is None:
            raise StoreFailed(
                "The broker was not reached yet, and the path of the dead letters has its id in it: they are stored,"
                " and handled again, when it is reached."
            )
        if self._opened_store is None or self._opened_store[0] != broker:
            self.close()
            letter_store = open_letter_store(existing_or_default_path(self._group, broker), run=self._run)
            log.info("Dead letters of group %s are kept in %s.", self._group, letter_store.name)
            self._opened_store = (broker, letter_store)
        return self._opened_store[1]

    apply = _of_opened_store(LetterStore.apply)
    find = _of_opened_store(LetterStore.find)
    next_due_id = _of_opened_store(LetterStore.next_due_id)
    next_due_ms = _of_opened_store(LetterStore.next_due_ms)
    find_foreign_waiting = _of_opened_store(LetterStore.find_foreign_waiting)
    get = _of_opened_store(LetterStore.get)
    failing_offsets = _of_opened_store(LetterStore.failing_offsets)
    count_by_state = _of_opened_store(LetterStore.count_by_state)
    delete_expired = _of_opened_store(LetterStore.delete_expired)

    def close(self) -> None:
        if self._opened_store is not None:
            self._opened_store[1].close()
