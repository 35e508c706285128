"""The three kinds of store: a file, a PostgreSQL server of the tests' own, a topic of a broker in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from tests.dead_letters.helpers import Process, finished, sql_letter_store
from tests.sql.conftest import postgres as postgres
from tfmq.client.operation import Operation, run_inline
from tfmq.dead_letters.sql_store import METADATA, BlockingSqlStore, SqlLetterStore
from tfmq.dead_letters.store import LetterStore, StoreAddress
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.postgresql import PostgresServer


class Stand:
    """A store and how its operations are run. `open` gives another one on the same letters."""

    def __init__(self, open: Callable[[], tuple[LetterStore, Callable[[Operation[Any]], Any]]]) -> None:
        self.open = open
        self.letter_store, self.run = open()


@pytest.fixture
def postgres_store(postgres: PostgresServer) -> BlockingSqlStore:
    """An empty store in PostgreSQL."""
    engine = create_engine(postgres.url())
    METADATA.drop_all(engine)
    engine.dispose()
    return BlockingSqlStore(StoreAddress("url", postgres.url()))


@pytest.fixture(params=["file", "postgresql", "topic"])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """Each kind in turn."""
    if request.param == "file":
        yield Stand(lambda: (sql_letter_store(tmp_path / "dead.db"), finished))
    elif request.param == "postgresql":
        store = request.getfixturevalue("postgres_store")
        yield Stand(lambda: (SqlLetterStore(BlockingSqlStore(store.database.address), run_inline), finished))
        store.close()
    else:
        with SimulatedBroker() as broker:

            def open() -> tuple[LetterStore, Callable[[Operation[Any]], Any]]:
                process = Process(broker, "dead")
                return process.letter_store, process.run

            yield Stand(open)
