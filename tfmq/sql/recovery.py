"""Who answers the broker's questions: every producer that shares transactions with a database.

When a transaction has been prepared for some time and nobody ended it, the broker asks a producer of its group. For
transactions of tfmq.sql the row answers (`decision`). Producers that have no group share one that is named by the
database's address, so that whoever is asked can look there.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

import tfmq.producer
from tfmq.errors import BadRequest, TfmqError
from tfmq.sql import database as rows
from tfmq.sql.commit_protocol import Course, Step, hands_for, walk, walk_async
from tfmq.sql.database import PREFIX, digest, has_two_phase_driver, is_in_memory
from tfmq.sql.decision import Decision, Prepared, decide, finish, prepared_in
from tfmq.sql.session import describe, is_closed, join_group, node_of

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


# What PostgreSQL holds prepared of owners that are gone, and that the broker will never ask about.
#
# The database prepares before the broker. An owner that dies between the two leaves a transaction that holds its locks
# in the database, while the broker, which never prepared, lets its part end by time and asks nobody. So whoever uses
# the database in two phases looks now and then, and finishes what the broker says is over:
#
#     at the broker                        in the database
#     committed, applying, read only       commit
#     rolled back                          roll back
#     unknown, at the node that began it   roll back: it was never prepared there, or is long over
#     unknown, at another node             leave it, and say so
#     open, prepared, in between           leave it: its owner goes on, or the broker asks

DECISIONS: Final[dict[str, Decision]] = {
    "committed": "commit",
    "applying": "commit",
    "read_only": "commit",
    "heuristic_committed": "commit",
    "rolled_back": "rollback",
    "heuristic_rolled_back": "rollback",
}
"""What becomes of the database's part, by the state at the broker; other states: nothing."""


class Looked(NamedTuple):
    """What a look found: how many it finished, and how many wait for their owner or for the broker."""

    finished: int = 0
    waiting: int = 0


class Leftovers:
    """Those of one database."""

    def __init__(self, hands: Any) -> None:
        self._hands = hands
        self._told: set[str] = set()

    def look(self, producer: Any) -> Course[Looked]:
        """Ask the broker of `producer`, and finish what is over.

        Raises what SQLAlchemy raises, and what the broker answers.
        """
        found = yield Step("look for what is prepared", lambda: self._hands.on_connection(prepared_in))
        finished = waiting = 0
        for each in found:
            decision = yield from self._decision(each, producer)
            if decision in ("commit", "rollback"):
                yield from self._finish(each, decision)
                finished += 1
            waiting += decision == "wait"
        return Looked(finished, waiting)

    def _decision(self, left: Prepared, producer: Any) -> Course[Any]:
        """What becomes of it; or "wait", or "leave" it to its own broker."""
        found = yield Step("ask the broker", lambda: describe(producer, left.xid))
        if found.state != "unknown":
            return DECISIONS.get(found.state, "wait")
        if left.node == node_of(producer):
            return "rollback"
        self._tell(left)
        return "leave"

    def _finish(self, left: Prepared, decision: Decision) -> Course[None]:
        def work(connection: Connection) -> None:
            finish(connection, left.gid, decision)

        yield Step("finish it", lambda: self._hands.on_connection(work))
        log.warning(
            "PostgreSQL held %s prepared, whose owner is gone: %s, as the broker did.", left.gid, decision
        )

    def _tell(self, left: Prepared) -> None:
        """Once: an operator must look."""
        if left.gid not in self._told:
            self._told.add(left.gid)
            log.error(
                "PostgreSQL holds %s prepared, begun at another broker (node %s): if that one knows nothing of it"
                " (tfmq tx show %s), ROLLBACK PREPARED '%s'. It holds locks.",
                left.gid,
                left.node,
                left.xid,
                left.gid,
            )


# Looks for leftovers now and then: in one thread for each database, or, with an asyncio engine, in a task of the loop.
#
# Not by the way of the next transaction, because that may be waiting for the very locks that a leftover holds.

LOOK_SECONDS: Final = 30.0
"""One question of the database each; a leftover has to wait for the broker's timeout (60 seconds) anyway."""

SOON_SECONDS: Final = 2.0
"""While something waits: it holds locks, and its time is running out."""

Name = tuple[str, Any]
_watches: dict[Name, _Watch] = {}
"""Those at work, by database and event loop. Behind `_lock`."""
_lock = threading.Lock()


def _forked() -> None:
    """The child has none of its parent's threads, and its lock may be held for ever."""
    global _lock
    _lock = threading.Lock()
    _watches.clear()


os.register_at_fork(after_in_child=_forked)


def watch(producer: Any, engine: Engine) -> None:
    """Look at once, and then every `LOOK_SECONDS` until the producer is closed. An asyncio engine needs its loop."""
    loop = None
    if engine.dialect.is_async:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # the first transaction will have one
    name = (digest(engine.url), loop)
    with _lock:
        known = _watches.get(name)
        if known is None:
            known = _watches[name] = _Watch(name, engine) if loop is None else _AsyncWatch(name, engine)
            known.producers.add(producer)
            known.start()
        elif producer not in known.producers:
            known.producers.add(producer)
            known.wake()


def pause(looked: Looked) -> float:
    """How long to wait for the next look."""
    return min(SOON_SECONDS, LOOK_SECONDS) if looked.waiting else LOOK_SECONDS


class _Watch:
    """Of one database, for the producers that are open; ends with the last of them."""

    def __init__(self, name: Name, engine: Engine) -> None:
        self.producers: WeakSet[Any] = WeakSet()
        self._name = name
        self._leftovers = Leftovers(hands_for(engine))
        self._failed = False
        self._over = False
        self._woken = threading.Event()

    def start(self) -> None:
        atexit.register(self.stop)
        threading.Thread(target=self._run, name="tfmq-sql-leftovers", daemon=True).start()

    def wake(self) -> None:
        """Look now."""
        self._woken.set()

    def stop(self) -> None:
        """The program ends."""
        self._over = True
        self.wake()

    def _run(self) -> None:
        while (producer := self._open_producer()) is not None:
            self._woken.clear()
            looked = Looked()
            try:
                looked = walk(self._leftovers.look(producer))
                self._failed = False
            except (SQLAlchemyError, TfmqError, OSError) as error:
                self._tell(error)
            del producer  # nobody is kept by being watched for
            self._woken.wait(pause(looked))
        atexit.unregister(self.stop)

    def _open_producer(self) -> Any:
        """One that can ask the broker; None: the watch is over, and whoever comes next begins another."""
        with _lock:
            if not self._over:
                for each in self.producers:
                    if not is_closed(each):
                        return each
            _watches.pop(self._name, None)
            return None

    def _tell(self, error: Exception) -> None:
        """Once for each outage."""
        if not self._failed:
            log.warning("What PostgreSQL holds prepared of owners that are gone was not looked at: %s", error)
        self._failed = True


class _AsyncWatch(_Watch):
    """The same, in a task of the running loop."""

    def start(self) -> None:
        self._soon = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run_async(), name="tfmq-sql-leftovers")

    def wake(self) -> None:
        self._soon.set()

    async def _run_async(self) -> None:
        try:
            while (producer := self._open_producer()) is not None:
                self._soon.clear()
                looked = Looked()
                try:
                    looked = await walk_async(self._leftovers.look(producer))
                    self._failed = False
                except (SQLAlchemyError, TfmqError, OSError) as error:
                    self._tell(error)
                del producer
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._soon.wait(), pause(looked))
        finally:
            with _lock:
                _watches.pop(self._name, None)
