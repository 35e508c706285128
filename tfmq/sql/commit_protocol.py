"""The course of a transaction of database and broker: which step follows which, and what is done when one fails.

    session is looked at, broker begins, session begins
    ... the user's block: changes, sends ...
    the changes and the row are written, and prepared where the database prepares
    broker prepares                     from here on the broker asks, when nobody comes back
    database commits                    THE DECISION: now the row is there
    broker commits

Before the decision every failure rolls both back. What fails at the decision itself is settled by looking at the row
(`decision`), as the broker's question would be. Behind it nothing can undo the transaction: a broker that cannot be
reached asks later, and the row answers "commit".

Written once for both faces: generators of steps, which `walk` does one after another and `walk_async` awaits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Damaged,
    HeuristicOutcome,
    StaleEpoch,
    TfmqError,
    TransactionCommitted,
    TransactionError,
    TransactionRolledBack,
    UnknownTransaction,
)
from tfmq.sql.database import new_xid
from tfmq.sql.decision import Decision, decide, name
from tfmq.sql.session import SessionPart

log = logging.getLogger("tfmq.sql")

Result = TypeVar("Result")


class Step(NamedTuple):
    """One thing to do, by its name; `do()` gives its result, or something to await."""

    name: str
    do: Callable[[], Any]


Course = Generator[Step, Any, Result]

CONTRADICTIONS = (TransactionRolledBack, UnknownTransaction, StaleEpoch, HeuristicOutcome, Damaged)
"""What a broker may say to the commit of a transaction that the database has committed, and that is not "later"."""


class Hands(Protocol):
    """How a face does things: at once, or giving something to await."""

    def in_session(self, work: Callable[[], Any]) -> Any:
        """Do `work` where the session may be used."""
        ...

    def on_connection(self, work: Callable[[Connection], Any]) -> Any:
        """Do `work` with a fresh connection of the session's engine."""
        ...


class Sharing:
    """One transaction that the session of `part` and the broker share. `begin(xid)` begins the broker's, `node()` is
    then the broker's id.
    """

    def __init__(
        self, part: SessionPart, hands: Hands, begin: Callable[[str], Any], node: Callable[[], str]
    ) -> None:
        self.part, self._hands = part, hands
        self._begin, self._node = begin, node
        self.xid = ""
        self.transaction: Any = None
        self.is_empty = True
        """Nothing was sent: then the database commits alone."""

    def begin(self) -> Course[None]:
        identity = yield self._in_session("session is looked at", self.part.look)
        self.xid = new_xid(self.part.engine.url, identity)
        self.transaction = yield Step("broker begins", lambda: self._begin(self.xid))
        gid = name(self.xid, self._node())
        try:
            yield self._in_session("session begins", lambda: self.part.begin(gid))
        except BaseException as error:
            yield from self._rollback_broker(error)
            raise

    def end(self, error: BaseException | None) -> Course[None]:
        """Behind the user's block, which `error` ended. Raises what is to be raised instead of it."""
        if error is not None:
            yield from self._rollback_both(error)
        elif self.is_empty:
            yield from self._commit_session_alone()
        else:
            yield from self._commit_both()

    def _commit_session_alone(self) -> Course[None]:
        try:
            yield self._in_session("database commits", self.part.commit)
        except BaseException as error:
            yield from self._rollback_both(error)
            raise
        yield from self._rollback_broker(None)

    def _commit_both(self) -> Course[None]:
        yield from self._prepare_database()
        decided = yield from self._prepare_broker()
        if not decided:
            yield from self._decide()
        yield from self._commit_broker()

    def _prepare_database(self) -> Course[None]:
        try:
            yield self._in_session("database prepares", lambda: self.part.prepare(self.xid))
        except BaseException as error:
            yield from self._rollback_session(error)
            if self.part.may_be_prepared:
                # The answer to its prepare may be what was lost. The broker is not prepared, so nobody commits it.
                yield from self._settle("rollback", error)
            yield from self._rollback_broker(error)
            raise

    def _prepare_broker(self) -> Course[bool]:
        """True: somebody who was asked has committed the database's part already."""
        try:
            yield Step("broker prepares", self.transaction.prepare)
        except BaseException as error:
            gone = yield from self._rollback_session(error)
            if not gone and self.part.two_phase:
                # Prepared on both sides after all, it may be committed by who was asked.
                decision = yield from self._settle("rollback", error)
                if decision == "commit" and isinstance(error, TfmqError):
                    return True
                if decision == "commit":
                    yield from self._commit_nevertheless(error)
                    raise
                if decision is None and may_be_done(error):
                    # So may this one, already: then who was asked is about to tell the broker.
                    self._raise_not_known(error)
                    raise
            yield from self._rollback_broker(error)
            raise
        return False

    def _decide(self) -> Course[None]:
        try:
            yield self._in_session("database commits", self.part.commit)
        except BaseException as error:
            yield from self._rollback_session(error)
            decision = yield from self._settle("commit", error)
            if decision == "commit":
                if isinstance(error, DBAPIError):
                    return  # only its answer was lost
                yield from self._commit_nevertheless(error)
            elif decision == "rollback":
                yield from self._rollback_broker(error)
            else:
                self._raise_not_known(error)
            raise

    def _raise_not_known(self, error: BaseException) -> None:
        """Instead of `error`, unless that is to end more than the transaction. Nothing more is done: the broker, which
        may have prepared, asks; one that has not gives it up.
        """
        if isinstance(error, Exception):
            raise TransactionError(
                f"It is not known yet whether the transaction {self.xid} was committed: the database does not"
                " say. Messages and changes will agree: the broker asks until the row answers."
            ) from error

    def _commit_nevertheless(self, error: BaseException) -> Course[None]:
        yield from self._commit_broker()
        error.add_note(f"The transaction {self.xid} is committed nevertheless, its messages too.")

    def _commit_broker(self) -> Course[None]:
        """The database has committed: only what contradicts that is raised."""
        try:
            yield Step("broker commits", self.transaction.commit)
        except CONTRADICTIONS as error:
            if isinstance(error, HeuristicOutcome) and error.state == "heuristic_committed":
                return
            messages = (
                f"whether its messages were sent is not known (tfmq tx show {self.xid})"
                if error.outcome == UNKNOWN
                else "the messages were not sent"
            )
            error.add_note(f"The database has committed its part of {self.xid}, {messages}.")
            raise
        except TfmqError as error:
            log.warning(
                "The transaction %s is committed in the database; the broker will learn it when it asks: %s",
                self.xid,
                error,
            )

    def _settle(self, prepared: Decision, error: BaseException) -> Course[Decision | None]:
        """What the row says; None: nothing yet."""

        def look(connection: Connection) -> Decision | None:
            return decide(connection, self.part.table, self.xid, prepared)

        try:
            decision: Decision | None = yield Step("row decides", lambda: self._hands.on_connection(look))
        except Exception as failure:
            error.add_note(f"Besides: {failure}")
            return None
        return decision

    def _rollback_both(self, error: BaseException) -> Course[None]:
        yield from self._rollback_session(error)
        yield from self._rollback_broker(error)

    def _rollback_session(self, error: BaseException) -> Course[bool]:
        """Whether the database said that it is rolled back. `error` goes on, and gets a note of what else failed."""
        try:
            yield self._in_session("database rolls back", self.part.rollback)
        except Exception as failure:
            error.add_note(f"Besides: {failure}")
            return False
        return True

    def _rollback_broker(self, error: BaseException | None) -> Course[None]:
        """An unprepared one ends by itself, of a prepared one the broker asks: its failure is worth a note only."""
        try:
            yield Step("broker rolls back", self.transaction.rollback)
        except TfmqError as failure:
            if error is not None:
                error.add_note(f"Besides: {failure}")

    def _in_session(self, name: str, work: Callable[[], Any]) -> Step:
        return Step(name, lambda: self._hands.in_session(work))


def may_be_done(error: BaseException) -> bool:
    """Whether a request to the broker that ended with `error` may have had its effect, as far as that says."""
    refused = isinstance(error, TfmqError) and error.outcome == NOT_DONE
    return not refused or isinstance(error, TransactionCommitted)


def walk(course: Course[Result]) -> Result:
    """Do the steps one after another."""
    try:
        step = next(course)
        while True:
            try:
                result = perform(step)
            except BaseException as error:
                step = course.throw(error)
            else:
                step = course.send(result)
    except StopIteration as end:
        value: Result = end.value
        return value


async def walk_async(course: Course[Result]) -> Result:
    """Do the steps one after another, awaiting each."""
    try:
        step = next(course)
        while True:
            try:
                result = perform(step)
                if inspect.isawaitable(result):
                    result = await result
            except BaseException as error:
                step = course.throw(error)
            else:
                step = course.send(result)
    except StopIteration as end:
        value: Result = end.value
        return value


def perform(step: Step) -> Any:
    """Do one step: the place where tests stand between them."""
    return step.do()


# The two ways of doing the steps: at once, and by awaiting them.


class BlockingHands:
    """With an engine whose driver blocks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def on_connection(self, work: Callable[[Connection], Result]) -> Result:
        """Do `work` with a connection of its own."""
        with self._engine.connect() as connection:
            return work(connection)


class AsyncHands:
    """With an engine whose driver is awaited."""

    def __init__(self, engine: Engine) -> None:
        from sqlalchemy.ext.asyncio import AsyncEngine  # who has such an engine has what this needs

        self._engine = AsyncEngine(engine)

    async def on_connection(self, work: Callable[[Connection], Result]) -> Result:
        """Do `work` with a connection of its own."""
        async with self._engine.connect() as connection:
            return await connection.run_sync(work)


def hands_for(engine: Engine) -> Any:
    """Those that fit the engine's driver."""
    return AsyncHands(engine) if engine.dialect.is_async else BlockingHands(engine)
