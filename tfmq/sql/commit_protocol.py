"""The commit protocol of a transaction shared by a database and the broker.

The protocol is written once, as generators that yield their steps, for the blocking and the asyncio API: `run_steps`
executes the steps one after another, `run_steps_async` awaits each step. Whether the database's transaction is prepared
(two phases) or only committed is decided by the participant, `SessionParticipant._use_two_phase` in `session.py`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

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
from tfmq.sql.in_doubt import Decision, decide, prepared_name
from tfmq.sql.session import SessionParticipant
from tfmq.transaction.states import HEURISTIC_COMMITTED

log = logging.getLogger("tfmq.sql")

Result = TypeVar("Result")


class Step(NamedTuple):
    """One step of the commit protocol. `do()` executes it and returns its result, or an awaitable for it."""

    name: str
    do: Callable[[], Any]


Steps = Generator[Step, Any, Result]

CONTRADICTIONS = (TransactionRolledBack, UnknownTransaction, StaleEpoch, HeuristicOutcome, Damaged)
"""Errors of a commit at the broker after which the messages may never be sent, although the database has committed.

After any other error the messages are sent later, by check-back: the broker asks the producer group for the outcome.
"""


class SharedTransaction:
    """One transaction shared by a database session, which `participant` controls, and the broker.

    The protocol:

        check the session, begin at the broker, begin the session's transaction
        ... the user's block: changes, sends ...
        write the changes and the row of the transaction; prepare both if the database supports it
        prepare at the broker               from here on the broker checks back if the client is lost
        commit the database                 THE DECISION: the row becomes visible
        commit at the broker

    Any failure before the decision rolls back the database and the broker. If the database's commit fails, it may have
    taken effect nevertheless, so the row is read (`tfmq.sql.in_doubt`). After the decision nothing can revert the
    transaction: if the broker cannot be reached, it later asks the producer group for the outcome (check-back), and a
    member that finds the row commits. `begin(xid)` begins the broker's transaction; `node()` returns the broker's id.
    """

    def __init__(
        self,
        participant: SessionParticipant,
        executor: BlockingExecutor | AsyncExecutor,
        begin: Callable[[str], Any],
        node: Callable[[], str],
    ) -> None:
        self.participant, self._executor = participant, executor
        self._begin, self._node = begin, node
        self.xid = ""
        self.transaction: Any = None
        self.is_empty = True  # True while nothing was sent; then `end` commits the database only.

    def begin(self) -> Steps[None]:
        identity = yield self._in_session("session is checked", self.participant.check_session)
        self.xid = new_xid(self.participant.engine.url, identity)
        self.transaction = yield Step("broker begins", lambda: self._begin(self.xid))
        gid = prepared_name(self.xid, self._node())
        try:
            yield self._in_session("session begins", lambda: self.participant.begin(gid))
        except BaseException as error:
            yield from self._rollback_broker(error)
            raise

    def end(self, error: BaseException | None) -> Steps[None]:
        """After the user's block, commit at the database and the broker; if `error` ended the block, roll back both.

        Raises the error that prevents the commit, but not `error`, which the `with` statement raises again.
        """
        if error is not None:
            yield from self._rollback_both(error)
        elif self.is_empty:
            yield from self._commit_session_only()
        else:
            yield from self._prepare_database()
            is_decided = yield from self._prepare_broker()
            if not is_decided:
                yield from self._commit_database()
            yield from self._commit_broker()

    def _commit_session_only(self) -> Steps[None]:
        try:
            yield self._in_session("database commits", self.participant.commit)
        except BaseException as error:
            yield from self._rollback_both(error)
            raise
        yield from self._rollback_broker(None)

    def _prepare_database(self) -> Steps[None]:
        try:
            yield self._in_session("database prepares", lambda: self.participant.prepare(self.xid))
        except BaseException as error:
            yield from self._rollback_session(error)
            if self.participant.may_be_prepared:
                # The database may have prepared, with its reply lost. To decide "rollback" is safe, because the broker
                # is not prepared, so no other client commits the database's part after a check-back query.
                yield from self._read_decision("rollback", error)
            yield from self._rollback_broker(error)
            raise

    def _prepare_broker(self) -> Steps[bool]:
        """Prepare at the broker; return True if another client has committed the database's part after check-back."""
        try:
            yield Step("broker prepares", self.transaction.prepare)
        except BaseException as error:
            is_rolled_back = yield from self._rollback_session(error)
            if not is_rolled_back and self.participant.two_phase:
                # Database and broker may both be prepared. So another client may have committed after check-back.
                decision = yield from self._read_decision("rollback", error)
                if decision == "commit" and isinstance(error, TfmqError):
                    return True
                if decision == "commit":
                    yield from self._commit_despite_error(error)
                    raise
                if decision is None and may_have_taken_effect(error):
                    # The broker may be prepared, too, and another client may be committing after check-back right now.
                    self._raise_outcome_unknown(error)
                    raise
            yield from self._rollback_broker(error)
            raise
        return False

    def _commit_database(self) -> Steps[None]:
        try:
            yield self._in_session("database commits", self.participant.commit)
        except BaseException as error:
            yield from self._rollback_session(error)
            decision = yield from self._read_decision("commit", error)
            if decision == "commit":
                if isinstance(error, DBAPIError):
                    return  # The database has committed, and only its reply was lost.
                yield from self._commit_despite_error(error)
            elif decision == "rollback":
                yield from self._rollback_broker(error)
            else:
                self._raise_outcome_unknown(error)
            raise

    def _raise_outcome_unknown(self, error: BaseException) -> None:
        """Raise TransactionError: the outcome is unknown. If `error` is no Exception, return; the caller raises it.

        Nothing is rolled back here. If the broker has prepared the transaction, check-back ends the transaction;
        otherwise the broker rolls it back after its timeout.
        """
        if isinstance(error, Exception):
            raise TransactionError(
                f"It is not known yet whether the transaction {self.xid} was committed: the database cannot"
                " be read. Messages and changes will be consistent: check-back is repeated until the row decides."
            ) from error

    def _commit_despite_error(self, error: BaseException) -> Steps[None]:
        yield from self._commit_broker()
        error.add_note(f"The transaction {self.xid} is committed nevertheless, its messages too.")

    def _commit_broker(self) -> Steps[None]:
        """Commit at the broker, after the database has committed. Raises only CONTRADICTIONS; logs other errors."""
        try:
            yield Step("broker commits", self.transaction.commit)
        except CONTRADICTIONS as error:
            if isinstance(error, HeuristicOutcome) and error.state == HEURISTIC_COMMITTED:
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
                "The transaction %s is committed in the database; check-back will commit it at the broker: %s",
                self.xid,
                error,
            )

    def _read_decision(self, prepared: Decision, error: BaseException) -> Steps[Decision | None]:
        """Return how the transaction ends, by its row in the database (see `decide`); None if that is unknown now.

        `prepared`: how to finish the database's part if it is still prepared. `error` gets a note about a failed read.
        """

        def read(connection: Connection) -> Decision | None:
            return decide(connection, self.participant.table, self.xid, prepared)

        try:
            decision: Decision | None = yield Step("row decides", lambda: self._executor.on_connection(read))
        except Exception as failure:
            error.add_note(f"Besides: {failure}")
            return None
        return decision

    def _rollback_both(self, error: BaseException) -> Steps[None]:
        yield from self._rollback_session(error)
        yield from self._rollback_broker(error)

    def _rollback_session(self, error: BaseException) -> Steps[bool]:
        """Roll back the session. If the database does not confirm the rollback, add a note to `error`, return False."""
        try:
            yield self._in_session("database rolls back", self.participant.rollback)
        except Exception as failure:
            error.add_note(f"Besides: {failure}")
            return False
        return True

    def _rollback_broker(self, error: BaseException | None) -> Steps[None]:
        """Roll back at the broker. If the rollback fails, only add a note to `error`."""
        # After a failure the broker still ends the transaction: an unprepared one by timeout, else by check-back.
        try:
            yield Step("broker rolls back", self.transaction.rollback)
        except TfmqError as failure:
            if error is not None:
                error.add_note(f"Besides: {failure}")

    def _in_session(self, name: str, work: Callable[[], Any]) -> Step:
        return Step(name, lambda: self._executor.in_session(work))


def may_have_taken_effect(error: BaseException) -> bool:
    refused = isinstance(error, TfmqError) and error.outcome == NOT_DONE
    return not refused or isinstance(error, TransactionCommitted)


def run_steps(steps: Steps[Result]) -> Result:
    try:
        step = next(steps)
        while True:
            try:
                result = run_step(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: Result = end.value
        return value


async def run_steps_async(steps: Steps[Result]) -> Result:
    try:
        step = next(steps)
        while True:
            try:
                result = run_step(step)
                if inspect.isawaitable(result):
                    result = await result
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: Result = end.value
        return value


def run_step(step: Step) -> Any:
    """Execute one step. Tests replace this function to inject failures between steps."""
    return step.do()


class BlockingExecutor:
    """Executes database work for an engine with a blocking driver."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def in_session(self, work: Callable[[], Result]) -> Result:
        return work()

    def on_connection(self, work: Callable[[Connection], Result]) -> Result:
        with self._engine.connect() as connection:
            return work(connection)


class AsyncExecutor:
    """Executes database work for an engine with an asyncio driver. `session`: the AsyncSession, if there is one."""

    def __init__(self, engine: Engine, session: Any = None) -> None:
        from sqlalchemy.ext.asyncio import AsyncEngine  # Importable, because the engine is for asyncio.

        self._engine, self._session = AsyncEngine(engine), session

    async def in_session(self, work: Callable[[], Result]) -> Result:
        """Run `work` in `AsyncSession.run_sync`: the blocking session may be used only inside this method."""
        result: Result = await self._session.run_sync(lambda _: work())
        return result

    async def on_connection(self, work: Callable[[Connection], Result]) -> Result:
        async with self._engine.connect() as connection:
            return await connection.run_sync(work)


def executor_for(engine: Engine) -> Any:
    return AsyncExecutor(engine) if engine.dialect.is_async else BlockingExecutor(engine)
