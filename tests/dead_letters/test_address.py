"""What users write for a store, and what it names."""

from pathlib import Path

import pytest

from tfmq.dead_letters.sql_store import Database
from tfmq.dead_letters.store import StoreAddress, default_path, parse_address
from tfmq.errors import BadRequest


@pytest.mark.parametrize(
    ("where", "address"),
    [
        ("dead.db", StoreAddress("path", "dead.db")),
        ("/var/lib/x/dead letters.db", StoreAddress("path", "/var/lib/x/dead letters.db")),
        (Path("dead.db"), StoreAddress("path", "dead.db")),
        ("C:\\dead.db", StoreAddress("path", "C:\\dead.db")),
        ("sqlite:///dead.db", StoreAddress("url", "sqlite:///dead.db")),
        ("postgresql+psycopg://u@h/d", StoreAddress("url", "postgresql+psycopg://u@h/d")),
        ("topic:dead", StoreAddress("topic", "dead")),
    ],
)
def test_a_path_a_url_and_a_topic_are_told_apart(where: str | Path, address: StoreAddress) -> None:
    assert parse_address(where) == address


@pytest.mark.parametrize("where", ["", "topic:", "topic:a/b", "topic:..", None, 7, b"dead.db"])
def test_what_names_no_store_is_said_so(where: object) -> None:
    with pytest.raises(BadRequest, match=r"takes a path|topic's name"):
        parse_address(where)  # type: ignore[arg-type]


def test_a_password_is_never_shown() -> None:
    assert str(parse_address("postgresql://me:se:cret@host/db")) == "postgresql://me:***@host/db"
    assert str(parse_address("topic:dead")) == "topic:dead"
    assert str(parse_address("postgresql:///db?host=/run")) == "postgresql:///db?host=/run"


def test_the_default_lies_where_programs_keep_their_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path("billing") == str(tmp_path / ".local/state/tfmq/billing.db")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_path("billing") == str(tmp_path / "state/tfmq/billing.db")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hun/ter2@host/db",
        "postgresql://me:hun@ter2@host/db",
        "postgresql://me:hun?ter2@host/db",
        "postgresql+psycopg://host/db?user=me&password=hunter2",
        "mssql+pyodbc://?odbc_connect=DRIVER%3Dx%3BPWD%3Dhunter2",
    ],
)
def test_a_password_is_not_shown_wherever_it_stands(url: str) -> None:
    assert "ter2" not in str(parse_address(url)), "it is logged with each dead letter"


def test_what_is_no_url_of_a_database_is_refused_without_its_password() -> None:
    with pytest.raises(BadRequest) as refused:
        Database(parse_address("postgresql+psycopg://me:se@cret:hunter2@host/db"))
    assert "hunter2" not in str(refused.value) and "cret" not in str(refused.value)
