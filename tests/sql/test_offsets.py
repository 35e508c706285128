"""`tfmq.sql.commit_offsets`: results and offset in one transaction, in SQLite and PostgreSQL, of either face."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, insert, text
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import tfmq
import tfmq.sql
from tests.offsets.contention import OpenShaky
from tests.offsets.contract import PLACE, A, Contract, Open
from tests.offsets.failing_sql import ShakySql
from tests.sql.shop import Order, orders
from tests.sql.test_commit_protocol import async_engine_of
from tfmq.errors import BadRequest, Busy, Fenced, NotAllowed, StoreFailed
from tfmq.offsets import sql
from tfmq.offsets.sql import SqlOffsets
from tfmq.offsets.storage import PartitionName
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.postgresql import PostgresServer

ORDERS = PartitionName("orders", 0)


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    """A database without the table of offsets."""
    sql.TABLE.drop(engine, checkfirst=True)
    return engine


@pytest.fixture
def open_one(fresh: Engine) -> Iterator[Open]:
    made: list[SqlOffsets] = []

    def opened() -> SqlOffsets:
        made.append(SqlOffsets(url_of(fresh)))
        return made[-1]

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def open_shaky(fresh: Engine) -> OpenShaky:
    return lambda random: ShakySql(url_of(fresh), random)


class TestPostgreSQL(Contract):
    """As every storage; SQLite is in tests/offsets/test_sql.py."""

    @pytest.fixture
    def fresh(self, postgres_engine: Engine) -> Engine:
        sql.TABLE.drop(postgres_engine, checkfirst=True)
        return postgres_engine


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as broker:
        producer = broker.producer()
        for number in range(4):
            producer.send("orders", str(number), partition=0).result()
        yield broker


@pytest.fixture
def consumer(broker: SimulatedBroker, fresh: Engine) -> Iterator[tfmq.Consumer[Any]]:
    with broker.consumer("orders", group="billing", commits="manual", offsets=f"sql:{url_of(fresh)}") as consumer:
        yield consumer


@pytest.fixture
def kept(open_one: Open) -> Callable[[], int | None]:
    """The offset of the group in the database."""

    def kept() -> int | None:
        row = open_one().read("billing", [ORDERS]).get(ORDERS)
        return None if row is None else row.offset

    return kept


Kept = Callable[[], "int | None"]


def test_results_and_offset_come_together(fresh: Engine, consumer: tfmq.Consumer[Any], kept: Kept) -> None:
    message = next(consumer)
    with Session(fresh) as session, session.begin():
        session.add(Order(number=int(message.text)))
        tfmq.sql.commit_offsets(session, consumer, message)
        assert kept() is None
    assert (orders(fresh), kept()) == ([0], message.next_offset)
    assert consumer.committed("orders", 0) == message.next_offset


def test_an_exception_leaves_neither(fresh: Engine, consumer: tfmq.Consumer[Any], kept: Kept) -> None:
    message = next(consumer)
    with pytest.raises(LookupError), Session(fresh) as session, session.begin():
        session.add(Order(number=int(message.text)))
        tfmq.sql.commit_offsets(session, consumer, message)
        raise LookupError
    assert (orders(fresh), kept()) == ([], None)
    with Session(fresh) as session, session.begin():
        tfmq.sql.commit_offsets(session, consumer)
    assert kept() == message.next_offset


def test_without_a_message_all_that_was_handed_out_is_meant(
    fresh: Engine, broker: SimulatedBroker, consumer: tfmq.Consumer[Any], kept: Kept
) -> None:
    first, second = next(consumer), next(consumer)
    with Session(fresh) as session, session.begin():
        tfmq.sql.commit_offsets(session, consumer, first)
    assert kept() == first.next_offset
    with fresh.begin() as connection:
        tfmq.sql.commit_offsets(connection, consumer)
    assert kept() == second.next_offset
    consumer.close()
    again = broker.consumer("orders", group="billing", commits="manual", offsets=f"sql:{url_of(fresh)}")
    assert [message.text for message in again.poll(30)] == ["2", "3"]
    again.close()


def test_what_is_committed_is_not_written_again(fresh: Engine, consumer: tfmq.Consumer[Any]) -> None:
    message = next(consumer)
    statements: list[str] = []
    with Session(fresh) as session:
        for _ in range(2):
            tfmq.sql.commit_offsets(session, consumer, message)
            session.commit()
        connection = session.connection()
        event.listen(connection, "before_execute", lambda *each: statements.append(str(each[1])))
        tfmq.sql.commit_offsets(session, consumer)
        session.commit()
    assert statements == []


def test_a_savepoint_that_is_rolled_back_takes_the_offset_with_it(
    fresh: Engine, consumer: tfmq.Consumer[Any], kept: Kept
) -> None:
    message = next(consumer)
    with Session(fresh) as session, session.begin():
        session.add(Order(number=7))
        session.flush()
        nested = session.begin_nested()
        tfmq.sql.commit_offsets(session, consumer, message)
        nested.rollback()
    assert (orders(fresh), kept()) == ([7], None)
    assert saved(consumer) is None


def test_a_savepoint_that_is_released_has_not_committed_yet(
    fresh: Engine, consumer: tfmq.Consumer[Any], kept: Kept
) -> None:
    message = next(consumer)
    with Session(fresh) as session:
        session.add(Order(number=7))
        session.flush()
        with session.begin_nested():
            tfmq.sql.commit_offsets(session, consumer, message)
        assert saved(consumer) is None
        session.rollback()
        assert (orders(fresh), kept(), saved(consumer)) == ([], None, None)
        with session.begin_nested():
            tfmq.sql.commit_offsets(session, consumer, message)
        session.commit()
    assert kept() == saved(consumer) == message.next_offset


def saved(consumer: tfmq.Consumer[Any]) -> int | None:
    """What the consumer takes for saved."""
    found: int | None = consumer.stats()["partitions"]["orders-0"]["saved_offset"]
    return found


def test_a_member_that_lost_the_partition_commits_nothing(
    fresh: Engine, consumer: tfmq.Consumer[Any], open_one: Open, kept: Kept
) -> None:
    message = next(consumer)
    open_one().claim("billing", 1 << 40, [ORDERS])
    with pytest.raises(Fenced, match="orders-0"), Session(fresh) as session, session.begin():
        session.add(Order(number=int(message.text)))
        tfmq.sql.commit_offsets(session, consumer, message)
    assert (orders(fresh), kept()) == ([], None)


@pytest.mark.parametrize("of_connection", [False, True])
def test_what_was_refused_does_not_count_as_saved_even_where_the_program_goes_on_to_commit(
    fresh: Engine, consumer: tfmq.Consumer[Any], open_one: Open, kept: Kept, of_connection: bool
) -> None:
    message = next(consumer)
    reported: list[Any] = []
    positions = consumer._core.positions
    positions.mark_committed_by_transaction = reported.append  # type: ignore[method-assign]
    positions.delegate_to_transaction = reported.append  # type: ignore[method-assign]
    open_one().claim("billing", 1 << 40, [ORDERS])
    with Session(fresh) as session, session.begin(), pytest.raises(Fenced):
        where = session.connection() if of_connection else session
        tfmq.sql.commit_offsets(where, consumer, message)
    assert (kept(), reported) == (None, [])


def test_after_a_refusal_the_other_partitions_of_the_batch_come_again(
    fresh: Engine, broker: SimulatedBroker, open_one: Open
) -> None:
    """Invariant: who lets Fenced roll the transaction back, and goes on, has each result once, and all of his own."""
    broker.admin().create_topic("parts", partitions=3)
    producer = broker.producer()
    for number in range(9):
        producer.send("parts", str(number), partition=number % 3).result()
    options = {"group": "billing", "commits": "manual", "offsets": f"sql:{url_of(fresh)}"}
    with broker.consumer("parts", **options) as consumer:
        for _ in range(2):  # of the first partition something is committed, of the others nothing yet
            handled(fresh, consumer, consumer.poll(30, max_messages=1))
        for number in range(9, 18):
            producer.send("parts", str(number), partition=number % 3).result()
        refused, batches = 0, [consumer.poll(30)]
        while len({message.partition for message in batches[-1]}) < 2:
            handled(fresh, consumer, batches[-1])
            batches.append(consumer.poll(30))
        (lost, *_) = sorted({message.partition for message in batches[-1]})
        open_one().claim("billing", 1 << 40, [PartitionName("parts", lost)])
        while batches[-1]:
            try:
                handled(fresh, consumer, batches[-1])
            except Fenced:
                refused += 1
            batches.append(consumer.poll(1))
    assert refused == 1
    found = Counter(number for number in orders(fresh) if number % 3 != lost)
    assert found == dict.fromkeys((number for number in range(18) if number % 3 != lost), 1)


def test_after_a_loss_that_the_broker_reported_the_others_come_again_as_well(
    fresh: Engine, broker: SimulatedBroker
) -> None:
    broker.admin().create_topic("parts", partitions=3)
    producer = broker.producer()
    for number in range(9):
        producer.send("parts", str(number), partition=number % 3).result()
    options = {"group": "billing", "commits": "manual", "offsets": f"sql:{url_of(fresh)}"}
    with broker.consumer("parts", **options) as consumer:
        messages: list[Any] = []
        while len({message.partition for message in messages}) < 2:
            messages = consumer.poll(30)
        consumer._core.assignment.partitions_fenced([PartitionName("parts", messages[0].partition)])
        with pytest.raises(Fenced):
            handled(fresh, consumer, messages)
        while messages := consumer.poll(1):
            handled(fresh, consumer, messages)
    assert orders(fresh) == list(range(9)), "it was granted anew, and nothing was skipped"


def handled(engine: Engine, consumer: tfmq.Consumer[Any], messages: list[Any]) -> None:
    """The results of `messages`, and where the consumer stands, in one transaction."""
    with engine.begin() as connection:
        connection.execute(insert(Order), [{"number": int(message.text)} for message in messages])
        tfmq.sql.commit_offsets(connection, consumer)


def test_a_new_owner_waits_for_the_transaction_of_the_old_one(
    fresh: Engine, consumer: tfmq.Consumer[Any], open_one: Open
) -> None:
    """Otherwise it would begin at the old offset, and the results were there twice."""
    message, storage = next(consumer), open_one()
    storage.read("billing", [ORDERS])
    found: list[Any] = []
    with Session(fresh) as session, session.begin():
        session.add(Order(number=int(message.text)))
        tfmq.sql.commit_offsets(session, consumer, message)
        session.flush()
        claiming = threading.Thread(
            target=lambda: found.append(storage.claim("billing", 1 << 40, [ORDERS])), daemon=True
        )
        claiming.start()
        claiming.join(0.2)
        assert claiming.is_alive()
    claiming.join(10)
    assert found[0][ORDERS].offset == message.next_offset


@pytest.mark.long
def test_a_transaction_that_does_not_end_is_not_waited_for_without_end(
    fresh: Engine, consumer: tfmq.Consumer[Any], open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "LOCK_SECONDS", 0.1)
    message, storage = next(consumer), open_one()
    with Session(fresh) as session, session.begin():
        tfmq.sql.commit_offsets(session, consumer, message)
        with pytest.raises(Busy):
            storage.claim("billing", 1 << 40, [ORDERS])
    assert storage.claim("billing", 1 << 40, [ORDERS])[ORDERS].offset == message.next_offset


def test_a_session_kept_by_thread_is_taken(fresh: Engine, consumer: tfmq.Consumer[Any], kept: Kept) -> None:
    message, session = next(consumer), scoped_session(sessionmaker(fresh))
    tfmq.sql.commit_offsets(session, consumer, message)
    session.commit()
    session.remove()
    assert kept() == message.next_offset


def test_asyncio_sessions_and_connections_are_awaited(fresh: Engine, consumer: tfmq.Consumer[Any], kept: Kept) -> None:
    async def run() -> None:
        engine = async_engine_of(fresh)
        async with AsyncSession(engine) as session, session.begin():
            session.add(Order(number=1))
            await tfmq.sql.commit_offsets(session, consumer, first)
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        await tfmq.sql.commit_offsets(scoped, consumer, second)
        await scoped.rollback()
        await scoped.remove()
        assert kept() == first.next_offset
        async with engine.begin() as connection:
            await tfmq.sql.commit_offsets(connection, consumer)
        await engine.dispose()

    first, second = next(consumer), next(consumer)
    asyncio.run(run())
    assert (orders(fresh), kept()) == ([1], second.next_offset)


def test_a_database_that_was_started_again_is_used_again(postgres: PostgresServer, postgres_engine: Engine) -> None:
    sql.TABLE.drop(postgres_engine, checkfirst=True)
    storage = SqlOffsets(postgres.url())
    storage.save("billing", 1, {A: PLACE})
    postgres.stop()
    with pytest.raises(StoreFailed):
        storage.save("billing", 1, {A: PLACE})
    postgres.start()
    assert storage.read("billing", [A]) == {A: PLACE._replace(generation=1)}
    storage.close()


# What is refused


def test_a_consumer_that_saves_by_itself_is_refused(broker: SimulatedBroker, fresh: Engine) -> None:
    url = f"sql:{url_of(fresh)}"
    for wrong, words in (
        ({"commits": "auto", "offsets": url}, 'commits="manual"'),
        ({"commits": "manual"}, 'offsets="sql:URL"'),
    ):
        with broker.consumer("orders", group="other", **wrong) as consumer, Session(fresh) as session:
            consumer.poll()
            with pytest.raises(BadRequest, match=words):
                tfmq.sql.commit_offsets(session, consumer)


def test_another_database_is_refused(fresh: Engine, broker: SimulatedBroker, tmp_path: Any) -> None:
    options = {"group": "billing", "commits": "manual", "offsets": f"sql:sqlite:///{tmp_path / 'other.db'}"}
    with broker.consumer("orders", **options) as consumer, Session(fresh) as session:
        consumer.poll()
        with pytest.raises(NotAllowed, match=r"other\.db"):
            tfmq.sql.commit_offsets(session, consumer)


def test_what_is_no_session_and_no_consumer_is_refused(fresh: Engine, consumer: tfmq.Consumer[Any]) -> None:
    with pytest.raises(BadRequest, match="session"):
        tfmq.sql.commit_offsets(fresh, consumer)  # type: ignore[call-overload]
    with Session(fresh) as session, pytest.raises(TypeError, match="consumer"):
        tfmq.sql.commit_offsets(session, fresh)
    with Session(fresh) as session, pytest.raises(BadRequest, match="not delivered"):
        message = next(consumer)
        tfmq.sql.commit_offsets(session, consumer, message._replace(offset=1 << 40, next_offset=1 << 41))


def test_a_connection_without_transactions_is_refused(fresh: Engine, consumer: tfmq.Consumer[Any]) -> None:
    message = next(consumer)
    with (
        fresh.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(NotAllowed, match="AUTOCOMMIT"),
    ):
        connection.execute(text("SELECT 1"))
        tfmq.sql.commit_offsets(connection, consumer, message)


def test_the_row_is_the_one_that_the_storage_reads(fresh: Engine, open_one: Open) -> None:
    with fresh.begin() as connection:
        open_one().read("billing", [A])
        sql.save_rows(connection, "billing", {A: PLACE._replace(generation=1)})
    assert open_one().read("billing", [A]) == {A: PLACE._replace(generation=1)}
