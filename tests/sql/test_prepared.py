"""What PostgreSQL holds prepared: found by name, finished by whoever comes first."""

import pytest
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from tests.sql.conftest import prepared_names
from tests.sql.shop import orders
from tfmq.errors import NotSupported
from tfmq.sql.decision import (
    Decision,
    PreparedTransaction,
    find_prepared,
    finish_prepared,
    prepared_name,
    set_prepared_name,
)


def prepare(engine: Engine, gid: str, number: int) -> None:
    """A transaction that nobody finishes."""
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
    assert found(postgres_engine, "tfmq.sql.x") == [
        PreparedTransaction("tfmq.sql.x@node", "tfmq.sql.x", "node")
    ]


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
def test_it_is_finished_by_somebody_else(
    postgres_engine: Engine, decision: Decision, kept: list[int]
) -> None:
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
