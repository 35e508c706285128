"""Who answers the broker's questions: every producer that shares transactions with a database.

When a transaction has been prepared for some time and nobody ended it, the broker asks a producer of its group. For
transactions of tfmq.sql the row answers (`decision`). Producers that have no group share one that is named by the
database's address, so that whoever is asked can look there.
"""

from __future__ import annotations

import logging
import sys
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

import tfmq.producer
from tfmq.errors import BadRequest
from tfmq.sql import table as rows
from tfmq.sql.broker import join_group
from tfmq.sql.course import Course, Step, walk, walk_async
from tfmq.sql.database import PREFIX, digest, has_two_phase_driver, is_in_memory
from tfmq.sql.decision import decide
from tfmq.sql.hands import hands_for
from tfmq.sql.prepared import Decision
from tfmq.sql.watching import watch

log = logging.getLogger("tfmq.sql")

_attended: WeakKeyDictionary[Any, set[tuple[str, str]]] = WeakKeyDictionary()
"""For each producer the databases and tables that it answers for."""


def check(producer: Any, engine: Any, *, table: Table = rows.TABLE) -> None:
    """Let `producer` answer the broker's questions about transactions of this database, from now on.

    `tfmq.sql.transaction` does it by itself; call this where a service starts, so that what a crash left is settled
    before it does its next transaction. `engine`: an `Engine`, with a `tfmq.aio.Producer` an `AsyncEngine`.
    """
    kind = sys.modules.get("sqlalchemy.ext.asyncio")
    if kind is not None and isinstance(engine, kind.AsyncEngine):
        engine = engine.sync_engine
    if not isinstance(engine, Engine):
        raise BadRequest(f"An engine of SQLAlchemy is wanted, not {engine!r}.")
    check_producer(producer, engine.dialect.is_async, "engine")
    attend(producer, engine, table)


def check_producer(producer: Any, is_async: bool, other: str) -> None:
    """Raises `BadRequest` unless both block or both are awaited."""
    aio = sys.modules.get("tfmq.aio")
    blocks = isinstance(producer, tfmq.producer.Producer)
    if not blocks and (aio is None or not isinstance(producer, aio.Producer)):
        raise BadRequest(f"A tfmq.Producer or tfmq.aio.Producer is wanted, not {producer!r}.")
    if is_async and blocks:
        raise BadRequest(f"The {other} is one of asyncio, the producer is not: use a tfmq.aio.Producer.")
    if not is_async and not blocks:
        raise BadRequest(
            f"The producer is one of asyncio, the {other} is not: use a tfmq.Producer, or an async {other}."
        )


def attend(producer: Any, engine: Engine, table: Table) -> None:
    """Answer for this database and table, if that is not done yet.

    Not for one in memory: it dies with this process, and the thread that answers would find another, empty one, or,
    with a StaticPool, the very connection that the session is using.
    """
    if is_in_memory(engine.url):
        return
    known = _attended.setdefault(producer, set())
    name = (digest(engine.url), table.fullname)
    if name not in known:
        join_group(producer, engine.url)
        answers = Answers(engine, table)
        answer = answers.answer_async if engine.dialect.is_async else answers.answer
        producer.transaction_check(answer)
        known.add(name)
    if has_two_phase_driver(engine):
        watch(producer, engine)


class Answers:
    """The answers of one database."""

    def __init__(self, engine: Engine, table: Table) -> None:
        self._engine, self._table = engine, table
        self._hands = hands_for(engine)

    def answer(self, asked: Any) -> Decision | None:
        """What is to become of the prepared transaction `asked`; None: it is not known yet."""
        return walk(self._answering(asked.xid))

    async def answer_async(self, asked: Any) -> Decision | None:
        """Likewise."""
        return await walk_async(self._answering(asked.xid))

    def _answering(self, xid: str) -> Course[Decision | None]:
        if not xid.startswith(PREFIX):
            return None  # the user's own

        def look(connection: Connection) -> Decision | None:
            return decide(connection, self._table, xid, "commit")

        try:
            decision: Decision | None = yield Step("row answers", lambda: self._hands.on_connection(look))
        except (SQLAlchemyError, OSError) as error:
            log.warning("The database does not say what became of %s, it is asked again: %s", xid, error)
            return None
        return decision
