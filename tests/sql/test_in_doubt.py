"""The row decides: who finds it, who finds none, and both at the same moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import tfmq
import tfmq.aio
from tests.scale import scaled, seeded
from tests.sql.conftest import prepared_names
from tests.sql.helpers import named, put, some_xid
from tests.sql.shop import Order, orders
from tfmq.errors import BadRequest, NotSupported
from tfmq.sql import database as rows
from tfmq.sql import in_doubt as decisions
from tfmq.sql.database import ABORTED, COMMITTED, TABLE, create_table, new_xid
from tfmq.sql.in_doubt import (
    Decision,
    PreparedTransaction,
    decide,
    find_prepared,
    finish_prepared,
    prepared_name,
    set_prepared_name,
)
from tools.rigs.postgresql import PostgresServer

LATE_SECONDS = 0.05


def asked(engine: Engine, xid: str = "x", prepared: Decision = "commit") -> Decision | None:
    with engine.connect() as connection:
        return decide(connection, TABLE, named(engine, xid), prepared)


def owner_writes(connection: Connection, xid: str = "x") -> None:
    put(connection, named(connection.engine, xid))


@contextmanager
def prepared_by_its_owner(engine: Engine, xid: str = "x", number: int = 1) -> Iterator[None]:
    """An owner that died between its database's prepare and the commit."""
    connection = engine.connect()
    transaction = connection.begin_twophase(prepared_name(named(engine, xid), "node"))
    session = Session(connection, join_transaction_mode="rollback_only")
    session.add(Order(number=number))
    session.flush()
    owner_writes(connection, xid)
    transaction.prepare()
    connection.invalidate()
    connection.close()
    yield


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test has to wait for a lock as long as in production."""
    monkeypatch.setattr(decisions, "LOCK_SECONDS", 0.1)


@pytest.fixture
def impatient(sqlite_engine: Engine) -> Iterator[Engine]:
    """An SQLite whose driver waits a moment only."""
    engine = create_engine(sqlite_engine.url, connect_args={"timeout": 0.1})
    yield engine
    engine.dispose()


def test_a_row_is_the_answer(engine: Engine) -> None:
    with engine.begin() as connection:
        owner_writes(connection)
        put(connection, named(engine, "y"), ABORTED)
    assert (asked(engine, "x"), asked(engine, "y")) == ("commit", "rollback")


def test_without_a_row_it_is_over_for_the_owner_too(engine: Engine) -> None:
    assert asked(engine) == "rollback"
    with pytest.raises(IntegrityError), engine.begin() as connection:
        owner_writes(connection)
    assert asked(engine) == "rollback"


def test_an_owner_that_is_just_committing_is_waited_for(postgres_engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool, postgres_engine.connect() as owner:
        with owner.begin():
            owner_writes(owner)
            answer = pool.submit(asked, postgres_engine)
            wait_until(lambda: is_waiting(postgres_engine))
        assert answer.result(10) == "commit"


def test_an_owner_that_rolls_back_meanwhile_leaves_rollback(postgres_engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool, postgres_engine.connect() as owner:
        begun = owner.begin()
        owner_writes(owner)
        answer = pool.submit(asked, postgres_engine)
        wait_until(lambda: is_waiting(postgres_engine))
        begun.rollback()
        assert answer.result(10) == "rollback"


@pytest.mark.usefixtures("quick")
def test_an_owner_that_takes_long_is_asked_about_again(postgres_engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool, postgres_engine.connect() as owner, owner.begin():
        owner_writes(owner)
        assert pool.submit(asked, postgres_engine).result(20) is None
    assert asked(postgres_engine) == "commit"


def test_sqlite_answers_later_during_a_write(sqlite_engine: Engine, impatient: Engine) -> None:
    with sqlite_engine.connect() as owner, owner.begin():
        owner_writes(owner)
        assert asked(impatient) is None
    assert asked(impatient) == "commit"


@pytest.mark.parametrize(("answer", "kept"), [("commit", [1]), ("rollback", [])])
def test_what_the_database_holds_prepared_is_finished(
    postgres_engine: Engine, answer: Decision, kept: list[int]
) -> None:
    with prepared_by_its_owner(postgres_engine):
        assert asked(postgres_engine, prepared=answer) == answer
    assert (orders(postgres_engine), prepared_names(postgres_engine)) == (kept, [])


def test_a_vanished_prepared_transaction_proves_nothing(postgres_engine: Engine) -> None:
    for xid, word, answer in (("x", "COMMIT", "commit"), ("y", "ROLLBACK", "rollback")):
        with prepared_by_its_owner(postgres_engine, xid, ord(xid)):
            finish_by_hand(postgres_engine, word, prepared_name(named(postgres_engine, xid), "node"))
        assert asked(postgres_engine, xid, prepared="commit") == answer


@pytest.mark.usefixtures("quick")
def test_a_prepared_transaction_of_another_name_that_holds_the_row_blocks_no_other(postgres_engine: Engine) -> None:
    connection = postgres_engine.connect()
    transaction = connection.begin_twophase("somebody-elses")
    owner_writes(connection)
    transaction.prepare()
    connection.invalidate()
    connection.close()
    began = time.monotonic()
    assert asked(postgres_engine) is None
    assert time.monotonic() - began < 10
    finish_by_hand(postgres_engine, "COMMIT", "somebody-elses")
    assert asked(postgres_engine) == "commit"


def test_an_end_by_another_process_at_the_same_moment_is_no_error(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = finish_prepared

    def gone_already(connection: Connection, gid: str, word: Decision) -> None:
        finish_by_hand(postgres_engine, "COMMIT", gid)
        really(connection, gid, word)

    monkeypatch.setattr(decisions, "finish_prepared", gone_already)
    with prepared_by_its_owner(postgres_engine):
        assert asked(postgres_engine, prepared="rollback") == "commit"


@contextmanager
def commits_that_wait(engine: Engine) -> Iterator[None]:
    """Every commit waits for a replica that is not there."""
    set_replica(engine, "SET synchronous_standby_names = 'nobody'")
    try:
        yield
    finally:
        set_replica(engine, "RESET synchronous_standby_names")


def set_replica(engine: Engine, words: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"ALTER SYSTEM {words}")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
        expected = "nobody" if "nobody" in words else ""
        show = "SHOW synchronous_standby_names"
        wait_until(lambda: connection.exec_driver_sql(show).scalar() == expected)


def test_another_process_that_is_ending_it_is_waited_for(postgres_engine: Engine) -> None:
    """Meanwhile PostgreSQL says that it is busy, and shows no row: with a replica that is no matter of a moment."""
    gid = prepared_name(named(postgres_engine, "x"), "node")
    with ThreadPoolExecutor(2) as pool, prepared_by_its_owner(postgres_engine):
        with commits_that_wait(postgres_engine):
            other = pool.submit(finish_by_hand, postgres_engine, "COMMIT", gid)
            wait_until(lambda: is_in(postgres_engine, "SyncRep"))
            answer = pool.submit(asked, postgres_engine, prepared="rollback")
            wait_until(lambda: is_in(postgres_engine, "PgSleep") or answer.done())
        other.result(10)
        assert answer.result(10) == "commit"


def is_in(engine: Engine, wait: str) -> bool:
    """Whether a session of the server waits for this."""
    with engine.connect() as connection:
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = %s"
        return bool(connection.exec_driver_sql(waits, (wait,)).scalar())


def test_what_may_not_be_finished_is_no_answer(postgres_engine: Engine) -> None:
    with postgres_engine.begin() as connection:
        connection.exec_driver_sql("DROP ROLE IF EXISTS stranger")
        connection.exec_driver_sql("CREATE ROLE stranger LOGIN")
        connection.exec_driver_sql(f"GRANT ALL ON {TABLE.name} TO stranger")
    stranger = create_engine(postgres_engine.url.set(username="stranger"))
    with prepared_by_its_owner(postgres_engine):
        with pytest.raises(Exception, match="permission denied"):
            asked(stranger)
        assert asked(postgres_engine) == "commit"
    stranger.dispose()
    with postgres_engine.begin() as connection:
        connection.exec_driver_sql("DROP OWNED BY stranger")
        connection.exec_driver_sql("DROP ROLE stranger")


def test_another_databases_transaction_of_the_same_name_is_left_alone(postgres_engine: Engine) -> None:
    gid = prepared_name(named(postgres_engine, "x"), "node")
    in_other = create_engine(postgres_engine.url.set(database="template1"))
    connection = in_other.connect()
    transaction = connection.begin_twophase(gid)
    connection.exec_driver_sql("CREATE TABLE other (number int)")
    transaction.prepare()
    connection.invalidate()
    connection.close()
    assert asked(postgres_engine, prepared="commit") == "rollback"
    assert prepared_names(postgres_engine) == [gid]
    finish_by_hand(in_other, "ROLLBACK", gid)
    in_other.dispose()


def test_a_table_decides_its_own_transactions_only(engine: Engine) -> None:
    """A database of the same address on another machine has another identity: it has nothing to say."""
    xid = some_xid(engine)
    TABLE.drop(engine)
    create_table(engine)
    assert asked(engine, xid) is None
    with engine.connect() as connection:
        assert rows.read_state(connection, TABLE, xid) is None


def test_a_table_without_an_identity_decides_nothing(engine: Engine) -> None:
    xid = some_xid(engine)
    with engine.begin() as connection:
        connection.execute(TABLE.delete())
    assert asked(engine, xid) is None


def test_a_database_that_is_down_says_so(postgres: PostgresServer) -> None:
    engine = create_engine(postgres.url().replace("tfmq-postgresql", "tfmq-nowhere"))
    with pytest.raises(OperationalError):
        asked(engine)


def test_owner_and_checkers_never_disagree(engine: Engine) -> None:
    """Whichever is first: the owner's commit and the answers say the same."""
    random = seeded("checkers")
    ended = set()
    with ThreadPoolExecutor(3) as pool:
        for number in range(scaled(300) + 8):
            xid = some_xid(engine)
            wait = [random.random() * 0.004 for _ in range(3)]
            # Half of the rounds are close; in the others one side is late, so that each wins some on any machine.
            if number % 4 == 0:
                wait[0] += LATE_SECONDS
            elif number % 4 == 1:
                wait[1:] = [each + LATE_SECONDS for each in wait[1:]]
            line = threading.Barrier(3)
            owner = pool.submit(commits, engine, xid, number, line, wait[0])
            checkers = [pool.submit(answers, engine, xid, line, each) for each in wait[1:]]
            committed = owner.result(60)
            expected = "commit" if committed else "rollback"
            assert {each.result(60) for each in checkers} <= {expected, None}
            assert asked(engine, xid) == expected
            assert (number in orders(engine)) == committed
            ended.add(expected)
    assert ended == {"commit", "rollback"}, "the race must go both ways to be one"


def commits(engine: Engine, xid: str, number: int, line: threading.Barrier, wait: float) -> bool:
    """An owner; whether it committed."""
    line.wait(60)
    time.sleep(wait)
    try:
        with Session(engine) as session, session.begin():
            session.add(Order(number=number))
            session.flush()
            owner_writes(session.connection(), xid)
    except DBAPIError:
        return False
    return True


def answers(engine: Engine, xid: str, line: threading.Barrier, wait: float) -> Decision | None:
    line.wait(60)
    time.sleep(wait)
    try:
        return asked(engine, xid)
    except OperationalError:  # SQLite: a reader may find it locked, too
        return None


def finish_by_hand(engine: Engine, word: str, xid: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"{word} PREPARED '{xid}'")


def is_waiting(engine: Engine) -> bool:
    """Whether a session of the server waits for another one's lock."""
    with engine.connect() as connection:
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        return bool(connection.exec_driver_sql(waits).scalar())


def wait_until(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_row_that_is_not_committed_decides_nothing_at_any_isolation_level(tmp_path: Path) -> None:
    """In a shared cache SQLite shows at READ UNCOMMITTED what an owner may still roll back."""
    url = f"sqlite:///file:{tmp_path / 'shop.db'}?cache=shared&uri=true"
    engine = create_engine(url, isolation_level="READ UNCOMMITTED")
    rows.create_table(engine)
    with engine.connect() as owner, engine.connect() as asked:
        identity = rows.read_identity(asked, rows.TABLE)
        assert identity is not None
        asked.rollback()
        xid = new_xid(engine.url, identity)
        begun = owner.begin()
        rows.insert_row(owner, rows.TABLE, identity, xid, rows.COMMITTED, rows.utc_now())
        with pytest.raises(OperationalError, match="locked"):
            decide(asked, rows.TABLE, xid, "commit")
        begun.rollback()
        assert decide(asked, rows.TABLE, xid, "commit") == "rollback"
    engine.dispose()


# What PostgreSQL holds prepared: found by name, ended by the first process.


def prepare(engine: Engine, gid: str, number: int) -> None:
    """A transaction that is not ended."""
    with engine.connect() as connection:
        begun = connection.begin_twophase("another name")
        set_prepared_name(connection, gid)
        connection.exec_driver_sql(f'INSERT INTO "order" (number) VALUES ({number})')
        begun.prepare()
        connection.invalidate()


def found(engine: Engine, *xid: str) -> list[PreparedTransaction]:
    with engine.connect() as connection:
        return find_prepared(connection, *xid)


def test_it_bears_the_name_that_it_is_given(postgres_engine: Engine) -> None:
    prepare(postgres_engine, prepared_name("tfmq.sql.x", "node"), 1)
    assert prepared_names(postgres_engine) == ["tfmq.sql.x@node"]
    assert found(postgres_engine, "tfmq.sql.x") == [PreparedTransaction("tfmq.sql.x@node", "tfmq.sql.x", "node")]


def test_only_ours_are_found(postgres_engine: Engine) -> None:
    for number, gid in enumerate(["tfmq.sql.a@n", "tfmq.sql.ab@n", "_sa_1", "tfmq.sql.strange", "other@n"]):
        prepare(postgres_engine, gid, number)
    assert [each.xid for each in found(postgres_engine)] == ["tfmq.sql.a", "tfmq.sql.ab"]
    assert [each.xid for each in found(postgres_engine, "tfmq.sql.a")] == ["tfmq.sql.a"]


def test_a_strangers_name_finishes_nothing_else(postgres_engine: Engine) -> None:
    """A statement with this name in it would end the first one: the quote closes the name, the rest is a comment."""
    prepare(postgres_engine, "tfmq.sql.a@n", 1)
    with postgres_engine.connect() as connection:
        connection.exec_driver_sql('INSERT INTO "order" (number) VALUES (2)')
        connection.exec_driver_sql("PREPARE TRANSACTION 'tfmq.sql.a@n'' --@n'")
        connection.rollback()
    assert [each.gid for each in found(postgres_engine)] == ["tfmq.sql.a@n"]


def test_where_nothing_can_be_prepared_nothing_is_looked_for(sqlite_engine: Engine) -> None:
    assert found(sqlite_engine) == []


@pytest.mark.parametrize(("decision", "kept"), [("commit", [1]), ("rollback", [])])
def test_it_is_finished_by_another_process(postgres_engine: Engine, decision: Decision, kept: list[int]) -> None:
    prepare(postgres_engine, "tfmq.sql.x@n", 1)
    with postgres_engine.connect() as connection:
        finish_prepared(connection, "tfmq.sql.x@n", decision)
        finish_prepared(connection, "tfmq.sql.x@n", decision)  # that it is gone is no error
    assert orders(postgres_engine) == kept


def test_what_cannot_be_finished_says_why(postgres_engine: Engine) -> None:
    with postgres_engine.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        driver.close()
        with pytest.raises(SQLAlchemyError, match="cannot be finished"):
            finish_prepared(connection, "tfmq.sql.x@n", "commit")


def test_a_transaction_of_one_phase_has_no_name(postgres_engine: Engine) -> None:
    with postgres_engine.connect() as connection, connection.begin(), pytest.raises(NotSupported):
        set_prepared_name(connection, "tfmq.sql.x@n")


# Housekeeping: old rows go, unless the broker has not ended their transaction.


@pytest.mark.long
def test_rows_that_the_broker_may_still_ask_for_stay(engine: Engine, tmp_path: Path) -> None:
    old = rows.utc_now() - timedelta(days=30)
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        in_doubt = producer.begin("prepared")
        in_doubt.send("orders", "1")
        in_doubt.prepare()
        is_open = producer.begin("open", timeout=100)
        is_open.send("orders", "2")
        with engine.begin() as connection:
            for xid in ("prepared", "open", "over"):
                put(connection, xid, COMMITTED, old)
            put(connection, "young", COMMITTED, rows.utc_now() - timedelta(days=6))
        with tfmq.Admin(servers) as admin:
            assert tfmq.sql.prune(engine, admin) == 1
            in_doubt.commit()
            is_open.rollback()
            assert tfmq.sql.prune(engine, admin) == 2
            assert tfmq.sql.prune(engine, admin) == 0
    with engine.connect() as connection:
        assert rows.read_state(connection, TABLE, "young") == COMMITTED


def test_without_the_broker_nothing_goes(sqlite_engine: Engine) -> None:
    with sqlite_engine.begin() as connection:
        put(connection, "x", COMMITTED, rows.utc_now() - timedelta(days=30))
    with tfmq.Admin("127.0.0.1:1", timeout=0.2) as admin, pytest.raises(tfmq.TfmqError):
        tfmq.sql.prune(sqlite_engine, admin)
    with pytest.raises(BadRequest):
        tfmq.sql.prune(sqlite_engine)
    with sqlite_engine.connect() as connection:
        assert rows.read_state(connection, TABLE, "x") == COMMITTED


def test_an_asyncio_program_prunes_with_its_own_engine_and_admin(sqlite_engine: Engine, tmp_path: Path) -> None:
    with sqlite_engine.begin() as connection:
        put(connection, "open", COMMITTED, rows.utc_now() - timedelta(days=30))
        put(connection, "over", COMMITTED, rows.utc_now() - timedelta(days=30))

    async def program(servers: str) -> None:
        engine = create_async_engine(sqlite_engine.url.set(drivername="sqlite+aiosqlite"))
        async with tfmq.aio.Producer(servers) as producer, tfmq.aio.Admin(servers) as admin:
            is_open = await producer.begin("open", timeout=100)
            await is_open.send("orders", "1")
            assert await tfmq.aio.sql.prune(engine, admin) == 1
            await is_open.rollback()
            assert await tfmq.aio.sql.prune(engine, admin) == 1
        await engine.dispose()

    with tfmq.local_server(tmp_path / "data") as servers:
        asyncio.run(program(servers))


def test_wrong_objects_are_refused_in_a_sentence(sqlite_engine: Engine) -> None:
    asynchronous = create_async_engine("sqlite+aiosqlite://")
    admin, asyncio_admin = tfmq.Admin("127.0.0.1:1"), tfmq.aio.Admin("127.0.0.1:1")
    for engine, given, sentence in (
        (admin, admin, "takes an engine of SQLAlchemy first"),
        (sqlite_engine, asyncio_admin, "takes a tfmq.Admin for each broker"),
        (sqlite_engine, sqlite_engine, "takes a tfmq.Admin for each broker"),
        (asynchronous, admin, "takes a tfmq.aio.Admin for each broker"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            tfmq.sql.prune(engine, given)  # type: ignore[call-overload]
    for wrong in ("x", asynchronous, admin):
        with pytest.raises(BadRequest, match=r"await connection\.run_sync\(tfmq\.sql\.create_table\)"):
            tfmq.sql.create_table(wrong)  # type: ignore[arg-type]


def test_some_time_is_kept(sqlite_engine: Engine) -> None:
    with pytest.raises(BadRequest, match="older"):
        tfmq.sql.prune(sqlite_engine, older_than=timedelta(0))
