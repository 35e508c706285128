"""What tfmq.sql asks of a producer: the group it belongs to, the broker it speaks with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select, text
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import tfmq
from tests.sql.conftest import made, prepared_names
from tests.sql.helpers import put
from tests.sql.shop import Order, orders
from tfmq.errors import NotAllowed, NotSupported, TransactionRolledBack
from tfmq.sql import database
from tfmq.sql import database as rows
from tfmq.sql.database import TABLE, default_group_name
from tfmq.sql.session import SessionParticipant, broker_node, describe_transaction, is_closed, join_group
from tools.rigs.postgresql import PostgresServer

SHOP, STOCK = make_url("postgresql+psycopg://u:p@db/shop"), make_url("postgresql+psycopg://u:p@db/stock")


def test_a_producer_without_a_group_gets_the_databases() -> None:
    with tfmq.Producer("127.0.0.1:1") as producer:
        join_group(producer, SHOP)
        join_group(producer, SHOP.set(username="another"))
        assert producer._core.group == default_group_name(SHOP)


def test_it_serves_one_database() -> None:
    with tfmq.Producer("127.0.0.1:1") as producer:
        join_group(producer, SHOP)
        with pytest.raises(NotAllowed, match=r"Producer\(group="):
            join_group(producer, STOCK)


def test_one_with_a_group_serves_all_its_databases() -> None:
    with tfmq.Producer("127.0.0.1:1", group="shop") as producer:
        join_group(producer, SHOP)
        join_group(producer, STOCK)
        assert producer._core.group == "shop"


def test_looking_at_a_transaction_does_not_take_it_up(tmp_path: Path) -> None:
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        assert broker_node(producer) == ""
        transaction = producer.begin("x")
        transaction.send("orders", "1")
        assert len(broker_node(producer)) == 32
        with tfmq.Producer(servers) as other:
            assert describe_transaction(other, "x").state == "open"
            assert describe_transaction(other, "y").state == "unknown"
        assert is_closed(other)
        assert not is_closed(producer)
        assert transaction.commit() == "committed"


# The user's session: what is joined, what is refused with a sentence, what the database holds at each step.


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def part_of(session: Session, two_phase: bool | None = None) -> SessionParticipant:
    return SessionParticipant(session, TABLE, two_phase)


def join(part: SessionParticipant, gid: str = "x") -> None:
    part.check_session()
    part.begin(gid)


def refused(session: Session, two_phase: bool | None = None) -> str:
    """The sentence; and the session is as it was."""
    before = session.twophase, session.get_transaction()
    with pytest.raises((NotAllowed, NotSupported)) as caught:
        join(part_of(session, two_phase))
    assert (session.twophase, session.get_transaction()) == before
    return str(caught.value)


def decided(engine: Engine, xid: str = "x") -> str | None:
    with engine.connect() as connection:
        return rows.read_state(connection, TABLE, xid)


def test_row_and_changes_come_together(engine: Engine, session: Session) -> None:
    part = part_of(session)
    join(part)
    session.add(Order(number=1))
    part.prepare("x")
    part.commit()
    assert (orders(engine), decided(engine)) == ([1], "committed")


def test_before_the_commit_neither_is_visible(postgres_engine: Engine) -> None:
    with Session(postgres_engine) as session:
        part = part_of(session)
        join(part)
        session.add(Order(number=1))
        part.prepare("x")
        assert (orders(postgres_engine), decided(postgres_engine)) == ([], None)
        part.rollback()
    assert (orders(postgres_engine), decided(postgres_engine)) == ([], None)


def test_the_database_holds_it_prepared_under_its_own_name(postgres_engine: Engine) -> None:
    with Session(postgres_engine) as session:
        part = part_of(session)
        join(part, "tfmq.sql.x")
        session.add(Order(number=1))
        part.prepare("tfmq.sql.x")
        assert prepared_names(postgres_engine) == ["tfmq.sql.x"]
        part.commit()
    assert (orders(postgres_engine), prepared_names(postgres_engine)) == ([1], [])


def test_what_is_prepared_can_be_rolled_back(postgres_engine: Engine) -> None:
    with Session(postgres_engine) as session:
        part = part_of(session)
        join(part)
        session.add(Order(number=1))
        part.prepare("x")
        part.rollback()
    assert (orders(postgres_engine), prepared_names(postgres_engine)) == ([], [])


@pytest.mark.parametrize("two_phase", [None, True, False])
def test_the_session_is_afterwards_as_it_was(postgres_engine: Engine, two_phase: bool | None) -> None:
    with Session(postgres_engine, twophase=two_phase is True) as session:
        for ending in ("commit", "rollback"):
            part = part_of(session, two_phase)
            join(part, ending)
            assert session.twophase is part.two_phase is (two_phase is not False)
            part.prepare(ending)
            getattr(part, ending)()
            assert session.twophase is (two_phase is True)
            session.add(Order(number=len(ending)))
            session.commit()
    assert orders(postgres_engine) == [6, 8]


def test_one_phase_is_had_where_it_is_asked_for(postgres_engine: Engine) -> None:
    with Session(postgres_engine) as session:
        part = part_of(session, two_phase=False)
        join(part)
        part.prepare("x")
        assert prepared_names(postgres_engine) == []
        part.commit()
    assert decided(postgres_engine) == "committed"


def test_what_the_session_did_before_belongs_to_it(engine: Engine, session: Session) -> None:
    session.add(Order(number=1))
    session.flush()
    part = part_of(session)
    join(part)
    assert not part.two_phase
    session.add(Order(number=2))
    part.prepare("x")
    assert decided(engine) is None
    part.commit()
    assert (orders(engine), decided(engine)) == ([1, 2], "committed")


def test_what_was_only_added_before_is_prepared_with_it(postgres_engine: Engine) -> None:
    with Session(postgres_engine) as session:
        session.add(Order(number=1))
        part = part_of(session)
        join(part)
        part.prepare("x")
        assert prepared_names(postgres_engine) == ["x"]
        part.commit()
    assert orders(postgres_engine) == [1]


def test_a_session_that_does_not_begin_by_itself_is_begun(engine: Engine) -> None:
    with Session(engine, autobegin=False) as session:
        part = part_of(session)
        join(part)
        session.add(Order(number=1))
        part.prepare("x")
        part.commit()
    assert orders(engine) == [1]


def test_a_name_that_was_given_up_cannot_be_committed(engine: Engine, session: Session) -> None:
    with engine.begin() as connection:
        put(connection, "x", rows.ABORTED)
    part = part_of(session)
    join(part)
    session.add(Order(number=1))
    with pytest.raises(TransactionRolledBack):
        part.prepare("x")
    part.rollback()
    assert (orders(engine), decided(engine)) == ([], "aborted")


def test_what_the_database_refuses_at_its_prepare_leaves_nothing(postgres_engine: Engine) -> None:
    with Session(postgres_engine) as session:
        part = part_of(session)
        join(part)
        session.add(Order(number=1, customer="nobody"))
        with pytest.raises(IntegrityError) as caught:
            part.prepare("x")
        assert not getattr(caught.value, "__notes__", None)
        assert not part.may_be_prepared, "it failed before the database was told to prepare"
        part.rollback()
        session.add(Order(number=2))
        session.commit()
    assert (orders(postgres_engine), prepared_names(postgres_engine)) == ([2], [])


def test_what_cannot_be_prepared_comes_with_a_way_out(postgres_engine: Engine) -> None:
    with Session(postgres_engine) as session:
        part = part_of(session)
        join(part)
        session.execute(text("CREATE TEMPORARY TABLE cart (number int)"))
        try:
            raise IntegrityError("an error that is being handled", None, ValueError())
        except IntegrityError:
            with pytest.raises(DBAPIError, match="temporary objects") as caught:
                part.prepare("x")
        part.rollback()
    assert any("two_phase=False" in note for note in caught.value.__notes__)


def test_a_commit_that_answers_early_is_made_to_wait(postgres_engine: Engine) -> None:
    eager = create_engine(
        postgres_engine.url, connect_args={"options": "-c synchronous_commit=off"}, poolclass=NullPool
    )
    with Session(eager) as session:
        part = part_of(session, two_phase=False)
        join(part)
        part.prepare("x")
        assert session.scalar(text("SHOW synchronous_commit")) == "on"
        part.commit()
        assert session.scalar(text("SHOW synchronous_commit")) == "off"


class TestRefused:
    """What would not be atomic is refused with a sentence that says what to do, and nothing has happened."""

    def test_a_block_of_the_sessions_own(self, engine: Engine) -> None:
        with Session(engine) as session, session.begin():
            assert "leave session.begin() out" in refused(session)

    def test_a_savepoint(self, session: Session) -> None:
        with session.begin_nested():
            assert "savepoint" in refused(session)

    def test_a_connection_with_a_transaction_of_its_own(self, engine: Engine) -> None:
        with engine.connect() as connection, connection.begin(), Session(connection) as session:
            assert "bind it to an engine" in refused(session)

    def test_a_connection_without_one_is_fine(self, engine: Engine) -> None:
        with engine.connect() as connection, Session(connection) as session:
            part = part_of(session)
            join(part)
            session.add(Order(number=1))
            part.prepare("x")
            part.commit()
        assert (orders(engine), decided(engine)) == ([1], "committed")

    def test_a_session_without_a_database(self) -> None:
        with pytest.raises(NotAllowed, match=r"Session\(engine\)"):
            part_of(Session())

    def test_a_database_without_the_table(self, engine: Engine, session: Session) -> None:
        TABLE.drop(engine)
        assert "create_table" in refused(session)
        rows.create_table(engine)
        join(part_of(session))

    def test_a_database_that_commits_each_statement(self, engine: Engine) -> None:
        with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            assert "AUTOCOMMIT" in refused(session, two_phase=False)
            session.add(Order(number=1))
            assert "AUTOCOMMIT" in refused(session, two_phase=False)
            assert len(session.new) == 1, "what the session had begun by itself is untouched"

    def test_two_phases_where_there_is_one(self, sqlite_engine: Engine) -> None:
        assert "PostgreSQL" in refused(Session(sqlite_engine), two_phase=True)
        assert "PostgreSQL" in refused(Session(sqlite_engine, twophase=True))

    def test_two_phases_of_a_session_that_has_begun(self, postgres_engine: Engine) -> None:
        with Session(postgres_engine) as session:
            session.scalars(select(Order)).all()
            assert "begun its transaction already" in refused(session, two_phase=True)

    def test_two_phases_where_the_server_has_them_switched_off(self, plain_postgres: PostgresServer) -> None:
        engine = made(plain_postgres.url())
        with Session(engine, twophase=True) as session:
            assert "max_prepared_transactions" in refused(session)
        with Session(engine) as session:
            part = part_of(session)
            join(part)
            assert not part.two_phase
            part.prepare("x")
            part.commit()
        assert decided(engine) == "committed"
        engine.dispose()

    def test_a_driver_that_prepares_nothing(self, monkeypatch: pytest.MonkeyPatch, postgres_engine: Engine) -> None:
        monkeypatch.setattr(postgres_engine.dialect, "driver", "pg8000")
        assert "psycopg" in refused(Session(postgres_engine), two_phase=True)

    def test_a_commit_inside_the_block(self, engine: Engine, session: Session) -> None:
        part = part_of(session)
        join(part)
        session.add(Order(number=1))
        session.commit()
        with pytest.raises(NotAllowed, match=r"leave commit.* has committed stays"):
            part.prepare("x")

    def test_an_open_savepoint_at_the_end(self, session: Session) -> None:
        part = part_of(session)
        join(part)
        session.begin_nested()
        with pytest.raises(NotAllowed, match="savepoint"):
            part.prepare("x")

    def test_a_table_that_others_do_not_find(self, postgres_engine: Engine) -> None:
        with postgres_engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA IF EXISTS tenant CASCADE")
            connection.exec_driver_sql("CREATE SCHEMA tenant")
            tenant = connection.execution_options(schema_translate_map={None: "tenant"})
            rows.create_table(tenant)
        with Session(postgres_engine) as session:
            part = part_of(session)
            join(part)
            session.execute(text("SET search_path TO tenant"))
            with pytest.raises(NotAllowed, match="search_path"):
                part.prepare("x")
            part.rollback()

    def test_a_second_database(self, sqlite_engine: Engine, postgres_engine: Engine) -> None:
        with Session(sqlite_engine, binds={Order: postgres_engine}) as session:
            part = part_of(session)
            join(part)
            session.add(Order(number=1))
            with pytest.raises(NotAllowed, match="more than one database"):
                part.prepare("x")
            part.rollback()
        assert orders(postgres_engine) == []


def test_a_database_that_is_down_says_so_at_the_beginning(postgres: PostgresServer) -> None:
    engine = create_engine(postgres.url().replace("tfmq-postgresql", "tfmq-nowhere"))
    session = Session(engine)
    with pytest.raises(OperationalError):
        join(part_of(session))


def test_one_connection_is_enough(postgres: PostgresServer, postgres_engine: Engine) -> None:
    """With a pool of one no caller waits for itself."""
    small = create_engine(postgres.url(), pool_size=1, max_overflow=0, pool_timeout=1)
    with Session(small) as session:
        for number, before in enumerate([False, True]):
            if before:
                session.scalars(select(Order)).all()
            database.discard_capabilities(small)
            part = part_of(session)
            join(part, f"x{number}")
            session.add(Order(number=number))
            part.prepare(f"x{number}")
            part.commit()
    assert orders(postgres_engine) == [0, 1]
    small.dispose()
