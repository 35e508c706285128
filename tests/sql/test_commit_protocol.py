"""Invariant: whichever step fails, before or after what it does, database and broker agree in the end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.scale import SCALE
from tests.sql.conftest import prepared_names
from tests.sql.fakes import BrokerTransaction, Failing
from tests.sql.shop import Order, orders
from tfmq.errors import (
    Damaged,
    HeuristicOutcome,
    NotAllowed,
    StorageStopped,
    TimedOut,
    TransactionRolledBack,
    UnknownTransaction,
)
from tfmq.sql import commit_protocol
from tfmq.sql import database as rows
from tfmq.sql.commit_protocol import (
    AsyncExecutor,
    BlockingExecutor,
    SharedTransaction,
    executor_for,
    run_steps,
    run_steps_async,
)
from tfmq.sql.database import TABLE
from tfmq.sql.in_doubt import decide, find_prepared, finish_prepared
from tfmq.sql.recovery import DECISION_BY_BROKER_STATE
from tfmq.sql.session import SessionParticipant

STEPS = (
    "session is checked",
    "broker begins",
    "session begins",
    "database prepares",
    "broker prepares",
    "database commits",
    "broker commits",
)
ROLLED_BACK_IF_IT_FAILS = {*STEPS} - {"broker commits"}


class Broken(Exception):
    """What a step fails with that knows nothing of databases and brokers."""


KINDS: list[type[BaseException]] = [Broken, TimedOut, KeyboardInterrupt, asyncio.CancelledError, OSError]


class Way(NamedTuple):
    """One of the ways that the tests go: which database, in how many phases, with which face."""

    engine: Engine
    two_phase: bool
    is_async: bool


@pytest.fixture(
    params=["sqlite", "postgresql", "postgresql two-phase", "sqlite asyncio", "postgresql two-phase asyncio"]
)
def way(request: pytest.FixtureRequest) -> Way:
    words = request.param.split()
    engine = request.getfixturevalue("sqlite_engine" if words[0] == "sqlite" else "postgres_engine")
    return Way(engine, "two-phase" in words, "asyncio" in words)


class BlockingSession(BlockingExecutor):
    def in_session(self, work: Any) -> Any:
        return work()


class AwaitedSession(AsyncExecutor):
    def __init__(self, session: AsyncSession) -> None:
        super().__init__(session.sync_session.get_bind().engine)
        self.session = session

    def in_session(self, work: Any) -> Any:
        return self.session.run_sync(lambda _: work())


class Shop:
    """Sells one order in a transaction, and knows afterwards what became of it."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.broker = BrokerTransaction()
        self.xid = ""
        self.is_empty = False
        self.in_block: BaseException | None = None

    def sell(self) -> None:
        """Raises what leaves the `with`."""
        if self.way.is_async:
            asyncio.run(self._sell_async())
        else:
            self._sell()

    def _sharing(self, session: Session, hands: Any) -> SharedTransaction:
        part = SessionParticipant(session, TABLE, self.way.two_phase)
        sharing = SharedTransaction(part, hands, self._begin, lambda: "node")
        sharing.is_empty = self.is_empty
        return sharing

    def _begin(self, xid: str) -> BrokerTransaction:
        self.xid = xid
        return self.broker

    def _block(self, session: Session) -> None:
        session.add(Order(number=1))
        if self.in_block is not None:
            raise self.in_block

    def _sell(self) -> None:
        with Session(self.way.engine) as session:
            sharing = self._sharing(session, BlockingSession(self.way.engine))
            run_steps(sharing.begin())
            try:
                self._block(session)
            except BaseException as error:
                run_steps(sharing.end(error))
                raise
            run_steps(sharing.end(None))

    async def _sell_async(self) -> None:
        engine = async_engine_of(self.way.engine)
        try:
            async with AsyncSession(engine) as session:
                sharing = self._sharing(session.sync_session, AwaitedSession(session))
                await run_steps_async(sharing.begin())
                try:
                    self._block(session.sync_session)
                except BaseException as error:
                    await run_steps_async(sharing.end(error))
                    raise
                await run_steps_async(sharing.end(None))
        finally:
            await engine.dispose()

    def settle(self) -> None:
        """What happens by itself afterwards: the broker's timeout, its question, a look for leftovers."""
        self.broker.times_out()
        with self.way.engine.connect() as connection:
            if self.broker.state == "prepared":
                decision = decide(connection, TABLE, self.xid, "commit")
                assert decision is not None
                getattr(self.broker, decision)()
            for left in find_prepared(connection):
                finish_prepared(connection, left.gid, DECISION_BY_BROKER_STATE[self.broker.state])

    @property
    def sold(self) -> bool:
        """Both agree. Whether it was sold."""
        found = orders(self.way.engine)
        assert (self.broker.state, found) in (("committed", [1]), ("rolled_back", []), ("open", []))
        if self.way.engine.dialect.name == "postgresql":
            assert prepared_names(self.way.engine) == []
        return found == [1]


def async_engine_of(engine: Engine) -> AsyncEngine:
    driver = "sqlite+aiosqlite" if engine.dialect.name == "sqlite" else engine.url.drivername
    return create_async_engine(engine.url.set(drivername=driver))


@pytest.fixture
def shop(way: Way) -> Iterator[Shop]:
    yield Shop(way)


def test_both_commit(shop: Shop) -> None:
    shop.sell()
    assert shop.sold


def test_an_exception_of_the_block_rolls_both_back_and_goes_on(shop: Shop) -> None:
    shop.in_block = error = Broken("in the block")
    with pytest.raises(Broken) as caught:
        shop.sell()
    assert caught.value is error
    assert not getattr(error, "__notes__", [])
    assert (shop.broker.state, shop.sold) == ("rolled_back", False)


def test_without_messages_the_database_commits_alone(shop: Shop) -> None:
    shop.is_empty = True
    shop.sell()
    assert (shop.broker.state, orders(shop.way.engine)) == ("rolled_back", [1])
    with shop.way.engine.connect() as connection:
        assert rows.read_state(connection, TABLE, shop.xid) is None


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", KINDS if SCALE >= 1 else KINDS[:2], ids=lambda kind: kind.__name__)
def test_a_step_that_fails_leaves_both_or_neither(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, name: str, after: bool, kind: type[BaseException]
) -> None:
    failing = Failing(name, kind("by the test"), after=after)
    monkeypatch.setattr(commit_protocol, "run_step", failing)
    raised: BaseException | None = None
    try:
        shop.sell()
    except BaseException as error:
        raised = error
    assert name in failing.seen
    is_late = name == "broker commits" or (name == "database commits" and after)
    if kind is TimedOut and name == "broker commits":
        assert raised is None, "the decision has fallen, and the broker asks"
    else:
        assert raised is failing.error
    shop.settle()
    assert shop.sold == is_late


def test_a_broker_that_takes_no_commit_now_asks_later(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_protocol, "run_step", Failing("broker commits", StorageStopped(), after=False))
    shop.sell()
    assert shop.broker.state == "prepared"
    shop.settle()
    assert shop.sold


@pytest.mark.parametrize("state", ["rolled_back", "heuristic_rolled_back", "unknown", "damaged"])
def test_a_broker_that_contradicts_is_reported(shop: Shop, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    really = commit_protocol.run_step

    def contradicts(step: commit_protocol.Step) -> Any:
        if step.name == "broker commits":
            shop.broker.state = state
        return really(step)

    monkeypatch.setattr(commit_protocol, "run_step", contradicts)
    with pytest.raises((TransactionRolledBack, HeuristicOutcome, UnknownTransaction, Damaged)) as caught:
        shop.sell()
    note = caught.value.__notes__[-1]
    assert "has committed its part" in note
    assert ("were not sent" in note) == (state != "unknown")
    assert ("is not known" in note) == (state == "unknown")


def test_an_operator_who_committed_it_is_no_contradiction(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    really = commit_protocol.run_step

    def by_hand(step: commit_protocol.Step) -> Any:
        if step.name == "broker commits":
            shop.broker.state = "heuristic_committed"
        return really(step)

    monkeypatch.setattr(commit_protocol, "run_step", by_hand)
    shop.sell()
    assert orders(shop.way.engine) == [1]


def test_a_broker_that_gave_up_meanwhile_rolls_the_database_back(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    really = commit_protocol.run_step

    def too_late(step: commit_protocol.Step) -> Any:
        if step.name == "broker prepares":
            shop.broker.times_out()
        return really(step)

    monkeypatch.setattr(commit_protocol, "run_step", too_late)
    with pytest.raises(TransactionRolledBack):
        shop.sell()
    assert not shop.sold


def test_a_question_that_is_answered_before_the_owner_commits_wins(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker asks just when everything is prepared: with two phases that commits, without it has to wait."""
    really = commit_protocol.run_step
    answers = []
    options = {"timeout": 0.1} if shop.way.engine.dialect.name == "sqlite" else {}
    impatient = create_engine(shop.way.engine.url, connect_args=options)

    def asked(step: commit_protocol.Step) -> Any:
        if step.name == "database commits":
            with impatient.connect() as connection:
                answers.append(decide(connection, TABLE, shop.xid, "commit"))
        return really(step)

    monkeypatch.setattr(commit_protocol, "run_step", asked)
    monkeypatch.setattr("tfmq.sql.in_doubt.LOCK_SECONDS", 0.1)
    shop.sell()
    assert answers == ["commit" if shop.way.two_phase else None]
    assert shop.sold
    impatient.dispose()


def test_a_question_that_comes_before_the_row_is_written_ends_it(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    really = commit_protocol.run_step

    def asked(step: commit_protocol.Step) -> Any:
        if step.name == "database prepares":
            with shop.way.engine.connect() as connection:
                assert decide(connection, TABLE, shop.xid, "commit") == "rollback"
        return really(step)

    monkeypatch.setattr(commit_protocol, "run_step", asked)
    with pytest.raises(TransactionRolledBack):
        shop.sell()
    assert not shop.sold


def kill_sessions(engine: Engine) -> None:
    """End every other session of the server, as its operator can."""
    with engine.connect() as connection:
        others = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        connection.execute(text(f"{others} AND backend_type = 'client backend'"))


@pytest.mark.parametrize("two_phase", [False, True], ids=["one phase", "two phases"])
@pytest.mark.parametrize("name", ["database prepares", "broker prepares", "database commits"])
def test_a_connection_that_breaks_leaves_both_or_neither(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, two_phase: bool
) -> None:
    really = commit_protocol.run_step
    broken: list[str] = []

    def breaks(step: commit_protocol.Step) -> Any:
        if step.name == name and not broken:
            broken.append(step.name)
            kill_sessions(postgres_engine)
        return really(step)

    monkeypatch.setattr(commit_protocol, "run_step", breaks)
    shop = Shop(Way(postgres_engine, two_phase, False))
    prepared = two_phase and name != "database prepares"
    if prepared:
        shop.sell()
    else:
        with pytest.raises(OperationalError):
            shop.sell()
    shop.settle()
    assert shop.sold is prepared


def test_a_lost_answer_to_the_commit_is_looked_up(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OperationalError("the answer is lost", None, Exception())
    monkeypatch.setattr(commit_protocol, "run_step", Failing("database commits", error, after=True))
    shop.sell()
    assert shop.sold


def test_what_a_hook_raises_after_the_commit_goes_on(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_protocol, "run_step", Failing("database commits", Broken("a hook"), after=True))
    with pytest.raises(Broken) as caught:
        shop.sell()
    assert "committed nevertheless" in caught.value.__notes__[-1]
    assert shop.sold


def test_a_refused_session_begins_nothing(sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    TABLE.drop(sqlite_engine)
    failing = Failing("", Broken(), after=False)
    monkeypatch.setattr(commit_protocol, "run_step", failing)
    with pytest.raises(NotAllowed):
        Shop(Way(sqlite_engine, False, False)).sell()
    assert failing.seen == ["session is checked"]


# Both ways of doing a step give what it gives, on a connection that is given back.


def two(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT 2").scalar() or 0)


def test_a_blocking_engine_is_used_at_once(engine: Engine) -> None:
    hands = executor_for(engine)
    assert isinstance(hands, BlockingExecutor)
    assert hands.on_connection(two) == 2


def test_an_asyncio_engine_is_awaited(engine: Engine) -> None:
    async def use() -> int:
        awaited = async_engine_of(engine)
        hands = executor_for(awaited.sync_engine)
        assert isinstance(hands, AsyncExecutor)
        made = hands.on_connection(two)
        assert inspect.isawaitable(made)
        found = await made
        await awaited.dispose()
        return found

    assert asyncio.run(use()) == 2


def test_the_connection_goes_back(sqlite_engine: Engine) -> None:
    kept: list[Connection] = []
    BlockingExecutor(sqlite_engine).on_connection(kept.append)
    assert kept[0].closed

    def fails(connection: Connection) -> None:
        kept.append(connection)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BlockingExecutor(sqlite_engine).on_connection(fails)
    assert kept[1].closed
