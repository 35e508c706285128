"""`with tfmq.sql.transaction(session, producer)` as its users write it, with a real broker."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import create_engine, event, select, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import tfmq.aio
from tests.sql.conftest import prepared_names
from tests.sql.crash_recovery import SETTINGS, messages
from tests.sql.shop import Order, orders
from tests.sql.test_commit_protocol import async_engine_of
from tfmq.errors import BadRequest, Busy, ConnectionFailed, NotAllowed, TransactionError
from tfmq.sql.database import TABLE
from tools.rigs.live_server import LiveServer


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path_factory.mktemp("broker") / "data", *SETTINGS)
    server.start()
    yield server
    server.stop()
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def producer(broker: LiveServer) -> Iterator[tfmq.Producer]:
    with tfmq.Producer(broker.address) as producer:
        yield producer


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


def test_order_and_message_come_together(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    with Session(engine) as session, tfmq.sql.transaction(session, producer) as tx:
        session.add(Order(number=1))
        delivery = tx.send(topic, "1", key="a")
        assert messages(broker.address, topic) == []
    assert (tx.state, orders(engine), messages(broker.address, topic)) == ("committed", [1], [1])
    assert delivery.result().topic == topic
    with tfmq.Admin(broker.address) as admin:
        assert admin.transaction(tx.xid).state == "committed"


def test_an_exception_leaves_neither_and_is_the_callers(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    error = LookupError("in the block")
    with (
        pytest.raises(LookupError) as caught,
        Session(engine) as session,
        tfmq.sql.transaction(session, producer) as tx,
    ):
        session.add(Order(number=1))
        tx.send(topic, "1")
        raise error
    assert caught.value is error
    assert not getattr(error, "__notes__", None)
    assert (tx.state, orders(engine), messages(broker.address, topic)) == ("rolled_back", [], [])


def test_after_an_exception_the_session_has_nothing_left_to_commit(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    with Session(engine) as session:
        with pytest.raises(LookupError), tfmq.sql.transaction(session, producer) as tx:
            session.add(Order(number=1))
            session.flush()
            tx.send(topic, "1")
            raise LookupError
        session.commit()
    assert (orders(engine), messages(broker.address, topic)) == ([], [])


def test_the_database_refuses_so_nothing_is_sent(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    with Session(engine) as session:
        with tfmq.sql.transaction(session, producer) as tx:
            session.add(Order(number=1))
            tx.send(topic, "1")
        with pytest.raises(IntegrityError), tfmq.sql.transaction(session, producer) as tx:
            session.execute(text('INSERT INTO "order" (number) VALUES (1)'))
            tx.send(topic, "11")
        with pytest.raises(IntegrityError), tfmq.sql.transaction(session, producer) as tx:
            session.add(Order(number=1, customer=None))
            session.expunge_all()
            session.add(Order(number=1))
            tx.send(topic, "11")
        with tfmq.sql.transaction(session, producer) as tx:
            session.add(Order(number=2))
            tx.send_many(topic, ["2", "3"])
    assert (orders(engine), messages(broker.address, topic)) == ([1, 2], [1, 2, 3])


def test_offsets_of_what_was_read_are_part_of_it(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    producer.send_many(topic, ["1", "2", "3"])
    producer.flush()
    read: list[int] = []

    def reader() -> tfmq.Consumer[Any]:
        return tfmq.Consumer(broker.address, topics=topic, group=topic, commits="manual", read="written")

    with reader() as consumer, Session(engine) as session:
        for message in consumer:
            with tfmq.sql.transaction(session, producer) as tx:
                session.add(Order(number=int(message.text)))
                tx.commit_offsets(consumer)
            if message.text == "2":
                break
    with reader() as consumer:
        for message in consumer:
            read.append(int(message.text))
            break
    assert (orders(engine), read) == ([1, 2], [3])


def test_without_messages_it_is_a_transaction_of_the_database(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer
) -> None:
    with Session(engine) as session, tfmq.sql.transaction(session, producer) as tx:
        session.add(Order(number=1))
    assert orders(engine) == [1]
    with tfmq.Admin(broker.address) as admin:
        assert admin.transaction(tx.xid).state in ("rolled_back", "read_only", "unknown")


def test_without_changes_it_is_one_of_the_broker(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    with Session(engine) as session, tfmq.sql.transaction(session, producer) as tx:
        tx.send(topic, "1")
    assert messages(broker.address, topic) == [1]


def test_what_the_session_read_before_is_no_hindrance(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    with Session(engine) as session:
        assert session.scalars(select(Order)).all() == []
        session.add(Order(number=1))
        with tfmq.sql.transaction(session, producer) as tx:
            session.add(Order(number=2))
            tx.send(topic, "2")
    assert (orders(engine), messages(broker.address, topic)) == ([1, 2], [2])


def test_one_session_has_many_one_after_the_other(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    with Session(engine) as session:
        for number in range(5):
            with tfmq.sql.transaction(session, producer) as tx:
                session.add(Order(number=number))
                tx.send(topic, str(number))
            assert session.get(Order, number) is not None
            session.rollback()
    assert orders(engine) == messages(broker.address, topic) == [0, 1, 2, 3, 4]


def test_many_threads_share_a_producer(engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str) -> None:
    sessions = scoped_session(sessionmaker(engine))

    def sell(first: int) -> None:
        for number in range(first, first + 5):
            with tfmq.sql.transaction(sessions, producer) as tx:
                sessions.add(Order(number=number))
                tx.send(topic, str(number))
        sessions.remove()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(sell, 10 * each) for each in range(4)]:
            done.result(60)
    assert orders(engine) == messages(broker.address, topic)
    assert len(orders(engine)) == 20


@pytest.mark.parametrize("two_phase", [None, True, False])
def test_two_phases_are_had_where_they_can_be(
    postgres_engine: Engine, producer: tfmq.Producer, topic: str, two_phase: bool | None
) -> None:
    seen: list[str] = []
    event.listen(postgres_engine, "prepare_twophase", lambda _, gid: seen.append(gid))
    with Session(postgres_engine) as session, tfmq.sql.transaction(session, producer, two_phase=two_phase) as tx:
        session.add(Order(number=1))
        tx.send(topic, "1")
    assert [each.split("@")[0] for each in seen] == ([] if two_phase is False else [tx.xid])
    assert prepared_names(postgres_engine) == []
    assert orders(postgres_engine) == [1]


def test_a_block_that_takes_too_long_is_rolled_back(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    with (
        Session(engine) as session,
        pytest.raises(TransactionError),
        tfmq.sql.transaction(session, producer, timeout=0.05) as tx,
    ):
        session.add(Order(number=1))
        tx.send(topic, "1")
        threading.Event().wait(0.6)
    assert (orders(engine), messages(broker.address, topic)) == ([], [])


def test_a_broker_that_is_away_is_said_before_anything_happens(engine: Engine) -> None:
    with tfmq.Producer("127.0.0.1:1", timeout=0.3) as producer, Session(engine) as session:
        with pytest.raises((ConnectionFailed, tfmq.TimedOut)), tfmq.sql.transaction(session, producer):
            raise AssertionError("the block is not entered")
        assert not session.in_transaction()
        session.add(Order(number=1))
        session.commit()
    assert orders(engine) == [1]


def test_what_a_session_had_begun_survives_a_refusal(engine: Engine) -> None:
    with tfmq.Producer("127.0.0.1:1", timeout=0.3) as producer, Session(engine) as session:
        session.add(Order(number=1))
        session.flush()
        with pytest.raises((ConnectionFailed, tfmq.TimedOut)), tfmq.sql.transaction(session, producer):
            raise AssertionError("the block is not entered")
        session.commit()
    assert orders(engine) == [1]


def test_a_database_that_is_away_leaves_nothing_at_the_broker(postgres_engine: Engine, producer: tfmq.Producer) -> None:
    nowhere = create_engine(str(postgres_engine.url).replace("tfmq-postgresql", "tfmq-nowhere"))
    with Session(nowhere) as session, pytest.raises(OperationalError), tfmq.sql.transaction(session, producer):
        raise AssertionError("the block is not entered")


@pytest.mark.long
def test_a_generator_that_is_thrown_away_leaves_neither(
    engine: Engine, broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    def dependency() -> Iterator[Session]:
        with Session(engine) as session, tfmq.sql.transaction(session, producer) as tx:
            session.add(Order(number=1))
            tx.send(topic, "1")
            yield session

    thrown_away = dependency()
    next(thrown_away)
    del thrown_away
    gc.collect()
    assert (orders(engine), messages(broker.address, topic)) == ([], [])


class TestAsyncio:
    """The same with `async with`."""

    def test_they_come_together(self, engine: Engine, broker: LiveServer, topic: str) -> None:
        async def sell() -> str:
            awaited = async_engine_of(engine)
            async with tfmq.aio.Producer(broker.address) as producer, AsyncSession(awaited) as session:
                async with tfmq.aio.sql.transaction(session, producer) as tx:
                    session.add(Order(number=1))
                    delivery = await tx.send(topic, "1")
                    await tx.send_many(topic, ["2"])
                assert (await delivery).topic == topic
                state: str = tx.state
            await awaited.dispose()
            return state

        assert asyncio.run(sell()) == "committed"
        assert (orders(engine), messages(broker.address, topic)) == ([1], [1, 2])

    def test_an_exception_leaves_neither(self, engine: Engine, broker: LiveServer, topic: str) -> None:
        async def sell() -> None:
            awaited = async_engine_of(engine)
            sessions = async_scoped_session(async_sessionmaker(awaited), asyncio.current_task)
            async with tfmq.aio.Producer(broker.address) as producer:
                with pytest.raises(LookupError):
                    async with tfmq.sql.transaction(sessions, producer) as tx:
                        sessions.add(Order(number=1))
                        await tx.send(topic, "1")
                        raise LookupError
            await sessions.remove()
            await awaited.dispose()

        asyncio.run(sell())
        assert (orders(engine), messages(broker.address, topic)) == ([], [])

    @pytest.mark.long
    def test_a_task_that_is_cancelled_leaves_both_or_neither(
        self, engine: Engine, broker: LiveServer, topic: str
    ) -> None:
        async def sell(number: int, producer: tfmq.aio.Producer, awaited: Any) -> None:
            async with AsyncSession(awaited) as session, tfmq.sql.transaction(session, producer) as tx:
                session.add(Order(number=number))
                await tx.send(topic, str(number))

        async def cancelled() -> int:
            awaited = async_engine_of(engine)
            ended = 0
            async with tfmq.aio.Producer(broker.address) as producer:
                await sell(1000, producer, awaited)
                for number in range(25):
                    task = asyncio.create_task(sell(number, producer, awaited))
                    for _ in range(number):
                        await asyncio.sleep(0)
                    await asyncio.sleep(0.0003 * number)
                    task.cancel()
                    await asyncio.wait([task])
                    ended += task.cancelled()
                deadline = asyncio.get_running_loop().time() + 30
                async with tfmq.aio.Admin(broker.address) as admin:
                    while await admin.transactions(("open", "prepared")):
                        assert asyncio.get_running_loop().time() < deadline
                        await asyncio.sleep(0.05)
            await awaited.dispose()
            return ended

        assert asyncio.run(cancelled()) > 0
        assert orders(engine) == messages(broker.address, topic)

    def test_blocking_and_awaited_do_not_mix(self, sqlite_engine: Engine) -> None:
        awaited = AsyncSession(async_engine_of(sqlite_engine))
        with pytest.raises(BadRequest, match=r"the producer is not: use a tfmq\.aio\.Producer"):
            tfmq.sql.transaction(awaited, tfmq.Producer("127.0.0.1:1"))  # type: ignore[call-overload]
        with pytest.raises(BadRequest, match=r"the session is not: use a tfmq\.Producer"):
            tfmq.sql.transaction(Session(sqlite_engine), tfmq.aio.Producer("127.0.0.1:1"))  # type: ignore[call-overload]

    def test_the_wrong_with_says_so(self, sqlite_engine: Engine) -> None:
        async def enter() -> None:
            producer = tfmq.Producer("127.0.0.1:1")
            async with tfmq.sql.transaction(Session(sqlite_engine), producer):
                raise AssertionError("it is not entered")

        with pytest.raises(NotAllowed, match="This session blocks"):
            asyncio.run(enter())
        awaited = AsyncSession(async_engine_of(sqlite_engine))
        with pytest.raises(NotAllowed, match="async with"), tfmq.sql.transaction(awaited, tfmq.aio.Producer()):
            raise AssertionError("it is not entered")


class TestRefused:
    """Wrong use gets one clear sentence."""

    def test_what_is_no_session(self, producer: tfmq.Producer, sqlite_engine: Engine) -> None:
        with pytest.raises(BadRequest, match="Session or an AsyncSession"):
            tfmq.sql.transaction(sqlite_engine, producer)  # type: ignore[call-overload]

    def test_what_is_no_producer(self, sqlite_engine: Engine) -> None:
        with pytest.raises(BadRequest, match=r"A tfmq\.Producer or tfmq\.aio\.Producer is wanted"):
            tfmq.sql.transaction(Session(sqlite_engine), "127.0.0.1:8367")  # type: ignore[call-overload]

    def test_sending_before_the_block(self, producer: tfmq.Producer, sqlite_engine: Engine) -> None:
        tx = tfmq.sql.transaction(Session(sqlite_engine), producer)
        assert (tx.state, tx.xid) == ("new", "")
        with pytest.raises(NotAllowed, match="inside the block"):
            tx.send("orders", "1")

    def test_entering_it_twice(self, producer: tfmq.Producer, sqlite_engine: Engine) -> None:
        with Session(sqlite_engine) as session:
            tx = tfmq.sql.transaction(session, producer)
            with tx:
                session.add(Order(number=1))
            with pytest.raises(NotAllowed, match="entered once"), tx:
                raise AssertionError("it is not entered")

    def test_a_missing_table(self, producer: tfmq.Producer, sqlite_engine: Engine) -> None:
        TABLE.drop(sqlite_engine)
        with (
            Session(sqlite_engine) as session,
            pytest.raises(NotAllowed, match="create_table"),
            tfmq.sql.transaction(session, producer),
        ):
            raise AssertionError("it is not entered")

    def test_a_commit_inside_the_block(self, producer: tfmq.Producer, sqlite_engine: Engine, topic: str) -> None:
        with (
            Session(sqlite_engine) as session,
            pytest.raises(NotAllowed, match="leave commit"),
            tfmq.sql.transaction(session, producer) as tx,
        ):
            tx.send(topic, "1")
            session.commit()
        assert tx.state == "rolled_back"

    def test_a_timeout_that_is_none(self, producer: tfmq.Producer, sqlite_engine: Engine) -> None:
        with (
            Session(sqlite_engine) as session,
            pytest.raises((BadRequest, Busy)),
            tfmq.sql.transaction(session, producer, timeout=0),
        ):
            raise AssertionError("it is not entered")
