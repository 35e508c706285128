"""The name of a database: the same for all who use it, and without what nobody else may know."""

from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from tfmq.limits import is_valid_name
from tfmq.sql import database
from tfmq.sql.decision import prepared_name

SERVER = "postgresql+psycopg://shop:secret@db.example:5432/shop"


def test_user_password_and_options_are_no_part_of_it() -> None:
    other = "postgresql+psycopg://admin:other@db.example:5432/shop?sslpassword=hidden&application_name=x"
    assert database.database_address(make_url(SERVER)) == database.database_address(make_url(other))
    for word in ("secret", "hidden", "admin"):
        assert word not in database.database_address(make_url(other))


@pytest.mark.parametrize(
    "other",
    [
        "postgresql+psycopg://shop@db.example:5432/stock",
        "postgresql+psycopg://shop@db2.example:5432/shop",
        "postgresql+psycopg://shop@db.example:5433/shop",
        "postgresql+psycopg://shop@/shop?host=/run/other",
        "mysql+pymysql://shop@db.example:5432/shop",
    ],
)
def test_another_database_has_another_name(other: str) -> None:
    assert database.address_digest(make_url(SERVER)) != database.address_digest(make_url(other))


def test_blocking_and_asyncio_drivers_lead_to_the_same_database() -> None:
    assert database.address_digest(make_url("sqlite:///shop.db")) == database.address_digest(
        make_url("sqlite+aiosqlite:///shop.db")
    )


def test_a_file_is_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert database.database_address(make_url("sqlite:///shop.db")) == database.database_address(
        make_url(f"sqlite:///{tmp_path}/shop.db")
    )


def test_memory_belongs_to_one_process() -> None:
    for url in ("sqlite://", "sqlite:///:memory:", "sqlite:///file:shop?mode=memory&uri=true"):
        assert database.is_in_memory(make_url(url))
        assert database.database_address(make_url(url)).startswith("sqlite:memory:")
    for url in (SERVER, "sqlite:///shop.db", "postgresql+psycopg://"):
        assert not database.is_in_memory(make_url(url))


@pytest.mark.parametrize(
    "url", [SERVER, "sqlite:////var/lib/my shop.db", "sqlite://", "postgresql+psycopg:///?host=/x"]
)
def test_its_group_has_a_name_that_the_broker_takes(url: str) -> None:
    name = database.default_group_name(make_url(url))
    assert is_valid_name(name)
    assert len(name) < 100


def test_a_transaction_bears_the_name_of_its_table() -> None:
    here, there = make_url(SERVER), make_url("sqlite:///shop.db")
    xid = database.new_xid(here, "identity")
    assert xid.startswith(database.xid_prefix(here, "identity"))
    assert xid != database.new_xid(here, "identity")
    for other in (database.xid_prefix(there, "identity"), database.xid_prefix(here, "another")):
        assert not xid.startswith(other)


def test_a_name_fits_where_postgresql_keeps_it() -> None:
    assert len(prepared_name(database.new_xid(make_url(SERVER), "identity"), "0" * 32)) < 200


@pytest.mark.parametrize(
    ("url", "can"),
    [("postgresql+psycopg://", True), ("sqlite://", False), ("sqlite+aiosqlite://", False)],
)
def test_who_prepares(url: str, can: bool) -> None:
    assert database.has_two_phase_driver(create_engine(url)) is can
