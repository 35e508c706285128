"""`tfmq.sql.commit_offsets` where transactions get into each other's way, and where the database is not as expected."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, insert, text
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateTable

import tfmq
import tfmq.sql
from tests.sql.shop import Customer, Order, orders
from tests.sql.test_commit_protocol import async_engine_of
from tests.sql.test_offsets import url_of
from tests.zookeeper.conftest import until
from tfmq.errors import Fenced, NotAllowed, NotSupported, StoreFailed
from tfmq.offsets import sql
from tfmq.offsets.sql import SqlOffsets
from tfmq.offsets.storage import PartitionName
from tfmq.testing.broker import SimulatedBroker

A, B = PartitionName("orders", 0), PartitionName("orders", 1)
LATER = 1 << 40


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as broker:
        broker.admin().create_topic("orders", partitions=2)
        producer = broker.producer()
        for number in range(4):
            producer.send("orders", str(number), partition=number % 2).result()
        yield broker


def consumer_of(broker: SimulatedBroker, engine: Engine) -> tfmq.Consumer[Any]:
    sql.TABLE.drop(engine, checkfirst=True)
    return broker.consumer("orders", group="billing", commits="manual", offsets=f"sql:{url_of(engine)}")


def both(consumer: tfmq.Consumer[Any]) -> dict[int, Any]:
    """The last message of each of the two partitions."""
    found: dict[int, Any] = {}
    while len(found) < 2:
        found |= {message.partition: message for message in consumer.poll(1.0)}
    return found


@pytest.fixture
def storage(engine: Engine) -> Iterator[SqlOffsets]:
    storage = SqlOffsets(url_of(engine))
    yield storage
    storage.close()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_that_is_too_old_commits_nothing_and_the_next_is_fenced(
    postgres_engine: Engine, broker: SimulatedBroker, level: str
) -> None:
    with consumer_of(broker, postgres_engine) as consumer:
        message = both(consumer)[0]
        engine = postgres_engine.execution_options(isolation_level=level)
        with pytest.raises(OperationalError, match="could not serialize"), Session(engine) as session:
            session.add(Order(number=1))
            session.flush()  # the snapshot is of now
            SqlOffsets(url_of(postgres_engine)).claim("billing", LATER, [A])
            tfmq.sql.commit_offsets(session, consumer, message)
        with pytest.raises(Fenced), Session(engine) as session, session.begin():
            session.add(Order(number=1))
            tfmq.sql.commit_offsets(session, consumer, message)
    assert orders(postgres_engine) == []


def test_two_that_wait_for_each_other_end_and_nothing_is_there_twice(
    postgres_engine: Engine, broker: SimulatedBroker
) -> None:
    """The rows of one call are taken in order; those of two calls are the user's business, and the database's."""
    storage = SqlOffsets(url_of(postgres_engine))
    found: list[Any] = []
    with consumer_of(broker, postgres_engine) as consumer:
        messages = both(consumer)
        claiming = threading.Thread(target=lambda: found.append(storage.claim("billing", LATER, [A, B])))
        with pytest.raises(OperationalError, match="deadlock"), Session(postgres_engine) as session, session.begin():
            session.execute(text("SET LOCAL deadlock_timeout = '20ms'"))
            session.add(Order(number=1))
            tfmq.sql.commit_offsets(session, consumer, messages[1])
            claiming.start()
            until(lambda: waiting(postgres_engine))
            tfmq.sql.commit_offsets(session, consumer, messages[0])
        claiming.join(60)
    storage.close()
    assert found == [{}], "nothing was committed, and the new owner has both"
    assert orders(postgres_engine) == []


def waiting(engine: Engine) -> bool:
    """Whether a transaction waits for a lock."""
    with engine.connect() as connection:
        return bool(connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")))


def test_a_savepoint_of_a_connection_that_is_rolled_back_takes_the_offset_with_it(
    engine: Engine, broker: SimulatedBroker, storage: SqlOffsets
) -> None:
    with consumer_of(broker, engine) as consumer:
        message = both(consumer)[0]
        with engine.begin() as connection:
            connection.execute(insert(Order), [{"number": 1}])
            with pytest.raises(LookupError), connection.begin_nested():
                tfmq.sql.commit_offsets(connection, consumer, message)
                raise LookupError
        assert (orders(engine), storage.read("billing", [A])) == ([1], {})
        with engine.begin() as connection, connection.begin_nested():
            tfmq.sql.commit_offsets(connection, consumer, message)
        assert storage.read("billing", [A])[A].offset == message.next_offset


def test_a_savepoint_of_an_asyncio_session_that_is_rolled_back_takes_the_offset_with_it(
    engine: Engine, broker: SimulatedBroker, storage: SqlOffsets
) -> None:
    async def run(message: Any) -> None:
        asynchronous = async_engine_of(engine)
        async with AsyncSession(asynchronous) as session, session.begin():
            session.add(Order(number=1))
            await session.flush()
            nested = await session.begin_nested()
            await tfmq.sql.commit_offsets(session, consumer, message)
            await nested.rollback()
        await asynchronous.dispose()

    with consumer_of(broker, engine) as consumer:
        asyncio.run(run(both(consumer)[0]))
    assert (orders(engine), storage.read("billing", [A])) == ([1], {})


def test_another_engine_of_the_same_database_will_do(
    engine: Engine, broker: SimulatedBroker, storage: SqlOffsets
) -> None:
    other = create_engine(engine.url, pool_size=1)
    with consumer_of(broker, engine) as consumer, Session(other) as session, session.begin():
        message = both(consumer)[0]
        tfmq.sql.commit_offsets(session, consumer, message)
    other.dispose()
    assert storage.read("billing", [A])[A].offset == message.next_offset


def test_a_session_of_two_databases_is_refused(sqlite_engine: Engine, broker: SimulatedBroker, tmp_path: Any) -> None:
    other = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with (
        consumer_of(broker, sqlite_engine) as consumer,
        Session(binds={Order: sqlite_engine, Customer: other}) as session,
    ):
        message = both(consumer)[0]
        with pytest.raises(NotAllowed, match="no database as a whole"):
            tfmq.sql.commit_offsets(session, consumer, message)
    other.dispose()


# The table


def test_a_table_of_another_release_is_refused_with_its_columns(engine: Engine) -> None:
    sql.TABLE.drop(engine, checkfirst=True)
    older = sql.offsets_table(MetaData())
    for name in ("log_epoch", "generation"):
        older._columns.remove(older.columns[name])
    older.create(engine)
    storage = SqlOffsets(url_of(engine))
    try:
        for _ in range(2):
            with pytest.raises(NotSupported, match=r"tfmq_offsets has no log_epoch, generation"):
                storage.read("billing", [A])
    finally:
        storage.close()
        older.drop(engine)


def test_a_user_who_may_not_make_the_table_gets_an_error(postgres_engine: Engine) -> None:
    sql.TABLE.drop(postgres_engine, checkfirst=True)
    with postgres_engine.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS reader"))
        connection.execute(text("CREATE ROLE reader LOGIN"))
    storage = SqlOffsets(url_of(postgres_engine).replace("tfmq@", "reader@"))
    with pytest.raises(StoreFailed, match="refuses the table of offsets tfmq_offsets: permission denied") as caught:
        storage.read("billing", [A])
    assert not caught.value.retriable and "\n" not in str(caught.value)
    storage.close()


def test_mysql_would_understand_every_statement() -> None:
    """It is not among the databases of the tests; this is all that is known."""
    dialect = mysql.dialect()
    made = str(CreateTable(sql.TABLE).compile(dialect=dialect))
    assert "PRIMARY KEY (consumer_group, topic, topic_partition)" in made and "BIGINT NOT NULL" in made
    key = sql._row_condition("billing", A)
    for statement in (
        sql.TABLE.select().where(key),
        sql.TABLE.update().where(key, sql.TABLE.c.generation <= 3).values(generation=3),
        sql.TABLE.insert().values({column.name: 1 for column in sql.TABLE.columns}),
    ):
        assert "tfmq_offsets" in str(statement.compile(dialect=dialect))
