"""The stores under test: in memory, in a folder, in SQLite, in a PostgreSQL and on an S3 server of the tests' own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.sql.conftest import postgres as postgres
from tfmq.replication.store import Store
from tfmq.replication.stores import file_store, sql_store
from tfmq.replication.stores.open_store import open_store
from tfmq.testing.memory_store import MemoryStore
from tools.rigs.postgresql import PostgresServer
from tools.rigs.s3 import S3Server, program

KINDS: Final = ("memory", "file", "sqlite", "postgresql", "s3")
SMALL_PAGE: Final = 100


class Place:
    """Where objects are kept: empty at first. `url`: "" if other processes cannot open it."""

    def __init__(self, url: str, opened: Callable[[], Store]) -> None:
        self.url = url
        self._opened = opened
        self._stores: list[Store] = []

    def open(self) -> Store:
        """Return another client."""
        self._stores.append(self._opened())
        return self._stores[-1]

    def close(self) -> None:
        for each in self._stores:
            each.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    if program() is None:
        pytest.skip("no S3 server is installed: make setup brings one")
    server = S3Server()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a client of the S3 server, without what this machine may have of its own."""
    for name in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in S3Server.environment.items():
        monkeypatch.setenv(name, value)
    yield


@pytest.fixture
def s3_url(s3: S3Server, credentials: None) -> str:
    return s3.url(f"tests/{secrets.token_hex(8)}")


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    return f"{postgres.url()}&prefix={secrets.token_hex(8)}"


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Each kind in turn, with small pages in lists where the store itself chooses them."""
    monkeypatch.setattr(file_store, "PAGE", SMALL_PAGE)
    monkeypatch.setattr(sql_store, "PAGE", SMALL_PAGE)
    kind: str = request.param
    if kind == "memory":
        shared = MemoryStore(time.time, page=SMALL_PAGE)
        found = Place("", lambda: shared)
    else:
        if kind == "file":
            (tmp_path / "objects").mkdir()
            url = f"file://{tmp_path / 'objects'}"
        elif kind == "sqlite":
            url = f"sqlite:///{tmp_path / 'objects.db'}"
        else:
            url = request.getfixturevalue("postgres_url" if kind == "postgresql" else "s3_url")
        found = Place(url, lambda: open_store(url))
    yield found
    found.close()
