"""What is learned of a database: once, and only what is so."""

import pytest
from sqlalchemy import MetaData, create_engine
from sqlalchemy.engine import Engine

from tests.sql.conftest import made
from tests.sql.helpers import identity
from tfmq.errors import NotAllowed
from tfmq.sql import database
from tfmq.sql.database import TABLE, create_table, transaction_table
from tools.rigs.postgresql import PostgresServer


def learned(engine: Engine) -> database.DatabaseCapabilities:
    with engine.connect() as connection:
        return database.read_capabilities(connection, TABLE)


def test_sqlite_prepares_nothing(sqlite_engine: Engine) -> None:
    found = learned(sqlite_engine)
    assert not found.two_phase
    assert "sqlite" in found.why_not


def test_postgresql_prepares_where_its_administrator_lets_it(
    postgres_engine: Engine, plain_postgres: PostgresServer
) -> None:
    assert learned(postgres_engine).two_phase
    plain = made(plain_postgres.url())
    assert not learned(plain).two_phase
    assert "max_prepared_transactions" in learned(plain).why_not
    plain.dispose()


def test_a_commit_that_answers_early_is_seen(postgres_engine: Engine) -> None:
    eager = create_engine(postgres_engine.url, connect_args={"options": "-c synchronous_commit=off"})
    assert learned(eager).commits_early
    eager.dispose()


def test_a_table_of_the_users_migrations_gets_its_identity(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(TABLE.delete())
    assert learned(engine).identity == identity(engine)


def test_what_is_known_is_not_asked_again(engine: Engine) -> None:
    assert database.cached_capabilities(engine, TABLE) is None
    found = learned(engine)
    assert database.cached_capabilities(engine, TABLE) == found
    database.discard_capabilities(engine)
    assert database.cached_capabilities(engine, TABLE) is None


def test_what_is_known_of_one_table_is_not_said_of_another(engine: Engine) -> None:
    other = transaction_table(MetaData(), name="other_transaction")
    found = learned(engine)
    assert database.cached_capabilities(engine, other) is None
    with engine.connect() as connection, pytest.raises(NotAllowed, match="other_transaction"):
        database.read_capabilities(connection, other)
    create_table(engine, other)
    try:
        with engine.connect() as connection:
            assert database.read_capabilities(connection, other).identity != found.identity
        assert (
            database.cached_capabilities(engine, other)
            != database.cached_capabilities(engine, TABLE)
            == found
        )
    finally:
        other.drop(engine)


def test_a_missing_table_is_asked_about_again(engine: Engine) -> None:
    TABLE.drop(engine)
    for _ in range(2):
        with pytest.raises(NotAllowed, match="create_table"):
            learned(engine)
    create_table(engine)
    learned(engine)
