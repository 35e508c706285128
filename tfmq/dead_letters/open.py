"""Opens the dead-letter store at an address, for a consumer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

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
    parse_address,
)
from tfmq.errors import BadRequest, TfmqError
from tfmq.protocol.commands import Ping

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
    on_dead: Callable[[], object] | None = None,
) -> DeadLetterStore:
    """Return the dead-letter store of a group; it is opened on first use. Raises BadRequest for an invalid address.

    `where`: a path, a SQLAlchemy URL, "topic:NAME", or `DEFAULT_STORE` · `calls_max`: handler calls after which a
    message is dead (`retries` + 1) · `codec`: decodes `message.value` of messages that are handled again · `run`:
    executes the blocking calls of a database · `link`: the consumer's connection, which identifies the broker; required
    only for a topic · `wall_clock`: returns seconds since 1970 · `folder`: where `DEFAULT_STORE` stores GROUP.db,
    instead of the user's state directory; used for an embedded broker, which has the dead letters in its own directory
    · `on_dead`: called after each change that left a letter in the state "dead".
    """

    def broker() -> str | None:
        return "" if link is None else reached_broker_id(link)

    letter_store: LetterStore
    if where != DEFAULT_STORE:
        letter_store = open_letter_store(where, run=run, link=link)
    elif folder is not None:
        letter_store = open_letter_store(default_path(group, Path(folder)), run=run)
    else:
        from tfmq.dead_letters.sql_store import DefaultLetterStore

        letter_store = DefaultLetterStore(group, broker, run)
    return GroupDeadLetterStore(
        letter_store,
        group,
        calls_max,
        wall_clock=wall_clock,
        codec=codec,
        broker=broker,
        has_message=None if link is None else lambda letter: _has_message(link, letter),
        on_dead=on_dead or (lambda: None),
    )


def reached_broker_id(link: ClientConnection) -> str | None:
    """Return the id of the connected broker, as stored in letters; None if no broker was reached yet."""
    return None if link.hello is None else broker_id_text(link.hello.node)


def ask_broker_id(link: ClientConnection, until: float) -> Operation[str]:
    """Connect if needed; return the broker's id, as in letters. Raises ConnectionFailed if no broker is reached."""
    found = reached_broker_id(link)
    if found is None:
        yield from request_with_retries(link, Ping(), until)
        found = reached_broker_id(link)
    assert found is not None, "it answered"
    return found


def _has_message(link: ClientConnection, letter: Letter) -> Operation[bool | None]:
    """Return whether the broker has the letter's message; None if the broker cannot be asked now."""
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
        # Imported here, so that consumers without a database do not need SQLAlchemy.
        from tfmq.dead_letters.sql_store import BlockingSqlStore, SqlLetterStore

        return SqlLetterStore(BlockingSqlStore(address), run)
    if link is None:
        raise BadRequest(f"{address} is in the broker: name its servers.")
    from tfmq.dead_letters.topic_store import TopicLetterStore

    return TopicLetterStore(link, address.value)
