"""The broker's questions: who is asked, what the row answers, and when nothing is said yet."""

import asyncio
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import MetaData, Table, create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

import tfmq.aio
from tests.sql.crash_recovery import SETTINGS, messages, soon
from tests.sql.helpers import put, some_xid
from tests.sql.shop import Base, Order, orders
from tests.sql.test_commit_protocol import async_engine_of
from tests.sql.test_in_doubt import wait_until
from tfmq.client.transaction.check_back import InDoubt
from tfmq.errors import BadRequest
from tfmq.sql import database as rows
from tfmq.sql.database import COMMITTED, TABLE, transaction_table
from tfmq.sql.recovery import CheckBackResponder
from tools.rigs.live_server import LiveServer
from tools.rigs.postgresql import PostgresServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "broker", *SETTINGS)
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with soon(monkeypatch):
        yield


def about(xid: str) -> InDoubt:
    return InDoubt(xid, 1, datetime.now(UTC), ("orders",))


def left_in_doubt(
    server: LiveServer, engine: Engine, number: int, *, decided: bool, group: str | None = None, table: Table = TABLE
) -> str:
    """An owner that died after the broker's prepare, and after its own commit if it `decided`."""
    xid = some_xid(engine, table)
    with tfmq.Producer(server.address, group=group or tfmq.sql.database.default_group_name(engine.url)) as producer:
        transaction = producer.begin(xid)
        for topic in ("orders", "payments"):
            transaction.send(topic, str(number))
        if decided:
            with Session(engine) as session, session.begin():
                session.add(Order(number=number))
                put(session.connection(), xid, table=table)
        transaction.prepare()
    return xid


def state_of(server: LiveServer, xid: str) -> str:
    with tfmq.Admin(server.address) as admin:
        return str(admin.transaction(xid).state)


def test_the_row_answers_for_an_owner_that_died(engine: Engine, server: LiveServer) -> None:
    committed = left_in_doubt(server, engine, 1, decided=True)
    given_up = left_in_doubt(server, engine, 2, decided=False)
    with tfmq.Producer(server.address) as producer:
        tfmq.sql.check(producer, engine)
        wait_until(lambda: state_of(server, committed) == "committed")
        wait_until(lambda: state_of(server, given_up) == "rolled_back")
    assert orders(engine) == messages(server.address, "orders") == [1]


def test_a_transaction_of_its_own_makes_a_producer_answer(engine: Engine, server: LiveServer) -> None:
    committed = left_in_doubt(server, engine, 1, decided=True)
    with tfmq.Producer(server.address) as producer:
        with Session(engine) as session, tfmq.sql.transaction(session, producer):
            session.add(Order(number=7))
        wait_until(lambda: state_of(server, committed) == "committed")


def test_an_asyncio_producer_answers(engine: Engine, server: LiveServer) -> None:
    committed = left_in_doubt(server, engine, 1, decided=True)

    async def answer() -> None:
        awaited = async_engine_of(engine)
        async with tfmq.aio.Producer(server.address) as producer:
            tfmq.sql.check(producer, awaited)
            for _ in range(1000):
                if await asyncio.to_thread(state_of, server, committed) == "committed":
                    break
                await asyncio.sleep(0.01)
        await awaited.dispose()

    asyncio.run(answer())
    assert state_of(server, committed) == "committed"


def test_with_a_group_of_their_own_services_share_databases(
    sqlite_engine: Engine, postgres_engine: Engine, server: LiveServer
) -> None:
    xids = [
        left_in_doubt(server, engine, number, decided=True, group="shop")
        for number, engine in enumerate((sqlite_engine, postgres_engine))
    ]
    with tfmq.Producer(server.address, group="shop") as producer:
        for engine in (sqlite_engine, postgres_engine):
            tfmq.sql.check(producer, engine)
        wait_until(lambda: {state_of(server, xid) for xid in xids} == {"committed"})


def test_the_users_own_check_stands_beside_it(sqlite_engine: Engine, server: LiveServer) -> None:
    mine = []
    with tfmq.Producer(server.address, group="shop") as producer:
        tfmq.sql.check(producer, sqlite_engine)

        @producer.transaction_check
        def decide(transaction: InDoubt) -> str:
            mine.append(transaction.xid)
            return "rollback"

        ours = left_in_doubt(server, sqlite_engine, 1, decided=True, group="shop")
        other = producer.begin("by-hand")
        other.send("orders", "2")
        other.prepare()
        wait_until(lambda: state_of(server, ours) == "committed")
        wait_until(lambda: state_of(server, "by-hand") == "rolled_back")
    assert mine == ["by-hand"]


def test_transactions_of_other_databases_are_not_answered_for(sqlite_engine: Engine, postgres_engine: Engine) -> None:
    answers = CheckBackResponder(sqlite_engine, TABLE)
    for xid in (some_xid(postgres_engine), "by-hand"):
        assert answers.decide(about(xid)) is None
        with sqlite_engine.connect() as connection:
            assert rows.read_state(connection, TABLE, xid) is None


def test_a_database_that_is_down_does_not_answer(postgres: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine(postgres.url())
    answers, xid = CheckBackResponder(engine, TABLE), some_xid(engine)
    postgres.stop()
    try:
        assert answers.decide(about(xid)) is None
        assert (
            asyncio.run(CheckBackResponder(async_engine_of(engine).sync_engine, TABLE).decide_async(about(xid))) is None
        )
    finally:
        postgres.start()
    assert [each.levelno for each in caplog.records if each.name == "tfmq.sql"] == [logging.WARNING] * 2


def test_a_database_that_comes_back_is_asked_again(
    postgres: PostgresServer, postgres_engine: Engine, server: LiveServer
) -> None:
    xid = left_in_doubt(server, postgres_engine, 1, decided=True)
    postgres.stop()
    with tfmq.Producer(server.address) as producer:
        tfmq.sql.check(producer, postgres_engine)
        assert state_of(server, xid) == "prepared"
        postgres.start()
        wait_until(lambda: state_of(server, xid) == "committed", 30)


def test_a_database_without_the_table_does_not_answer(sqlite_engine: Engine) -> None:
    xid = some_xid(sqlite_engine)
    TABLE.drop(sqlite_engine)
    assert CheckBackResponder(sqlite_engine, TABLE).decide(about(xid)) is None


def test_another_table_answers_for_itself(engine: Engine, server: LiveServer) -> None:
    mine = transaction_table(MetaData(), name="shop_transaction")
    mine.drop(engine, checkfirst=True)
    mine.create(engine)
    with (
        tfmq.Producer(server.address) as producer,
        Session(engine) as session,
        tfmq.sql.transaction(session, producer, table=mine) as tx,
    ):
        session.add(Order(number=1))
        tx.send("orders", "1")
    with engine.connect() as connection:
        assert rows.read_state(connection, mine, tx.xid) == COMMITTED
        assert rows.read_state(connection, TABLE, tx.xid) is None
    mine.drop(engine)


def test_each_table_of_a_database_is_answered_for(sqlite_engine: Engine, server: LiveServer) -> None:
    tables = [TABLE, transaction_table(MetaData(), name="shop_transaction")]
    with tfmq.Producer(server.address) as producer:
        for table in tables:
            rows.create_table(sqlite_engine, table)
            tfmq.sql.check(producer, sqlite_engine, table=table)
        xids = [
            left_in_doubt(server, sqlite_engine, number, decided=True, table=table)
            for number, table in enumerate(tables)
        ]
        wait_until(lambda: {state_of(server, xid) for xid in xids} == {"committed"})


def test_a_database_in_memory_is_used_and_not_asked(server: LiveServer) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    tfmq.sql.create_table(engine)
    with tfmq.Producer(server.address) as producer:
        with Session(engine) as session, tfmq.sql.transaction(session, producer) as tx:
            session.add(Order(number=1))
            tx.send("orders", "1")
        assert (orders(engine), producer._core.group) == ([1], None)
    engine.dispose()


def test_an_asyncio_producer_may_be_configured_before_there_is_a_loop(
    sqlite_engine: Engine, server: LiveServer
) -> None:
    committed = left_in_doubt(server, sqlite_engine, 1, decided=True)
    producer, awaited = tfmq.aio.Producer(server.address), async_engine_of(sqlite_engine)
    tfmq.sql.check(producer, awaited)

    async def use() -> None:
        async with producer:
            await producer.send("any", "1")
            for _ in range(1000):
                if await asyncio.to_thread(state_of, server, committed) == "committed":
                    break
                await asyncio.sleep(0.01)
        await awaited.dispose()

    asyncio.run(use())
    assert state_of(server, committed) == "committed"


class TestRefused:
    """What could not be asked is said at once."""

    def test_producer_and_engine_of_two_kinds(self, sqlite_engine: Engine) -> None:
        awaited = async_engine_of(sqlite_engine)
        with pytest.raises(BadRequest, match=r"use a tfmq\.aio\.Producer"):
            tfmq.sql.check(tfmq.Producer("127.0.0.1:1"), awaited)
        with pytest.raises(BadRequest, match=r"use a tfmq\.Producer"):
            tfmq.sql.check(tfmq.aio.Producer("127.0.0.1:1"), sqlite_engine)

    def test_what_is_neither(self, sqlite_engine: Engine) -> None:
        with pytest.raises(BadRequest, match="engine"):
            tfmq.sql.check(tfmq.Producer("127.0.0.1:1"), "sqlite://")
        with pytest.raises(BadRequest, match="Producer"):
            tfmq.sql.check(tfmq.Admin("127.0.0.1:1"), sqlite_engine)
