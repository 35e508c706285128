"""The databases that the tests of tfmq.sql run with: SQLite in a file, and a PostgreSQL server of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine

from tests.sql.shop import Base
from tfmq.sql import database
from tools.rigs.postgresql import PostgresServer, programs


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that prepares transactions."""
    if programs() is None:
        pytest.skip("no PostgreSQL server is installed: make system brings one")
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="module")
def plain_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL as it is shipped: max_prepared_transactions = 0."""
    if programs() is None:
        pytest.skip("no PostgreSQL server is installed: make system brings one")
    server = PostgresServer(prepared=0)
    try:
        server.start()
        yield server
    finally:
        server.remove()


def made(url: str) -> Engine:
    """An engine for a database with the tables of the tests, empty."""
    engine = create_engine(url)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    database.TABLE.drop(engine, checkfirst=True)
    database.create_table(engine)
    return engine


@pytest.fixture
def postgres_engine(postgres: PostgresServer) -> Iterator[Engine]:
    """A PostgreSQL with empty tables and nothing prepared."""
    clear_prepared(postgres)
    engine = made(postgres.url())
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite_engine(tmp_path: Path) -> Iterator[Engine]:
    """An SQLite file with empty tables."""
    engine = made(f"sqlite:///{tmp_path / 'shop.db'}")
    yield engine
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each of the two in turn."""
    name = "sqlite_engine" if request.param == "sqlite" else "postgres_engine"
    found: Engine = request.getfixturevalue(name)
    return found


def prepared_names(engine: Engine) -> list[str]:
    """What PostgreSQL holds prepared."""
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT gid FROM pg_prepared_xacts ORDER BY gid")))


def clear_prepared(server: PostgresServer) -> None:
    """What a test that failed left prepared holds locks that the next one would wait for."""
    engine = create_engine(server.url(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for name in prepared_names(engine):
            quoted = name.replace("'", "''")
            connection.exec_driver_sql(f"ROLLBACK PREPARED '{quoted}'")
    engine.dispose()
