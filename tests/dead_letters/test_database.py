"""The database beneath the letters: durable, told in a sentence when it fails, one for each process."""

from __future__ import annotations

import os
import stat
import sys
import threading
import traceback
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine

from journal.disk import RealDisk
from tests.dead_letters.test_shelf import keeping
from tfmq.client.worker.dead_letter_store import StoreUnusable
from tfmq.dead_letters.model import DEAD
from tfmq.dead_letters.sql_store import BlockingSqlStore, Database, create_directory
from tfmq.dead_letters.store import StoreAddress, parse_address
from tfmq.errors import BadRequest, NotSupported, StoreFailed
from tfmq.offsets.sql import SqlOffsets
from tools.rigs.postgresql import PostgresServer


def database(where: str | Path) -> Database:
    return Database(parse_address(where))


def test_sqlite_is_told_to_be_on_the_disk_when_it_commits(tmp_path: Path) -> None:
    found = database(tmp_path / "dead.db")
    for _ in range(2):
        with found.write_transaction() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "FULL"
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    url = database(f"sqlite:///{tmp_path / 'other.db'}")
    with url.write_transaction() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "FULL"
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete", (
            "it may be another's file"
        )


def test_postgresql_is_told_so_too_whatever_its_default(postgres: PostgresServer) -> None:
    plain = postgres.url()
    off = f"{plain}{'&' if '?' in plain else '?'}options=-csynchronous_commit%3Doff"
    with database(off).write_transaction() as connection:
        assert connection.scalar(text("SHOW synchronous_commit")) == "on"


def test_folders_are_made_private_and_put_on_the_disk(tmp_path: Path) -> None:
    forced: list[str] = []

    class Watched(RealDisk):
        def force_folder(self, path: str) -> None:
            forced.append(path)
            super().force_folder(path)

    folder = tmp_path / "a" / "b" / "c"
    create_directory(folder, Watched())
    assert forced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)} == {0o700}
    create_directory(folder, Watched())
    assert len(forced) == 3


def test_the_file_is_its_owners_alone_also_in_a_folder_that_is_everybodys(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        found = BlockingSqlStore(parse_address(tmp_path / "dead.db"))
        assert found.count_by_state() == {}
        assert {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == dict.fromkeys(
            ("dead.db", "dead.db-wal", "dead.db-shm"), 0o600
        )
    finally:
        os.umask(before)


def removed(path: Path) -> None:
    """The store is deleted while it is open, as `rm` does."""
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def test_what_is_written_behind_a_removal_of_the_file_is_in_the_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "dead.db"
    found = BlockingSqlStore(parse_address(path))
    found.apply([keeping(0)])
    removed(path)
    found.apply([keeping(1)])
    assert BlockingSqlStore(parse_address(path)).count_by_state() == {("billing", DEAD): 1}


def test_of_two_who_have_a_removed_file_open_neither_takes_from_the_other(tmp_path: Path) -> None:
    path = tmp_path / "dead.db"
    first, second = BlockingSqlStore(parse_address(path)), BlockingSqlStore(parse_address(path))
    first.apply([keeping(0)])
    second.apply([keeping(1)])
    removed(path)
    first.apply([keeping(2)])
    second.apply([keeping(3)])  # it closes what it had: SQLite must not remove what is beside the new file
    first.apply([keeping(4)])
    assert BlockingSqlStore(parse_address(path)).count_by_state() == {("billing", DEAD): 3}
    for each in (first, second):
        each.close()
    assert BlockingSqlStore(parse_address(path)).count_by_state() == {("billing", DEAD): 3}


def test_a_file_that_is_removed_while_it_is_written_has_kept_nothing(tmp_path: Path) -> None:
    path = tmp_path / "dead.db"
    found = database(path)
    with found.write_transaction():
        pass
    with (
        pytest.raises(StoreFailed, match="was removed or replaced") as failed,
        found.write_transaction() as connection,
    ):
        connection.exec_driver_sql("CREATE TABLE t (a)")
        removed(path)
    assert failed.value.retriable


def test_a_path_that_is_not_absolute_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = BlockingSqlStore(parse_address("dead.db"))
    found.apply([keeping(0)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found.apply([keeping(1)])
    assert BlockingSqlStore(parse_address(tmp_path / "dead.db")).count_by_state() == {("billing", DEAD): 2}


def test_looking_makes_nothing(tmp_path: Path) -> None:
    found = database(tmp_path / "folder" / "dead.db")
    assert not found.exists()
    assert list(tmp_path.iterdir()) == []
    BlockingSqlStore(parse_address(tmp_path / "dead.db")).count_by_state()
    assert database(tmp_path / "dead.db").exists()


def test_a_file_that_is_no_store_is_told_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "dead.db"
    path.write_bytes(b"secret payload " * 1000)
    with pytest.raises(StoreFailed) as failed:
        database(path).exists()
    assert str(path) in str(failed.value) and "not a database" in str(failed.value)
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize("place", [".", "no-database", "no-database/dead.db"])
@pytest.mark.parametrize("prefix", ["", "sqlite:///"])
def test_where_no_letter_can_ever_be_kept_nobody_waits(tmp_path: Path, place: str, prefix: str) -> None:
    (tmp_path / "no-database").write_bytes(b"secret payload " * 1000)
    found = Database(parse_address(f"{prefix}{tmp_path / place}"))
    with (
        pytest.raises(StoreUnusable, match="No dead letters can be stored at") as failed,
        found.write_transaction(),
    ):
        pass
    assert not failed.value.retriable


def test_a_right_that_postgresql_does_not_give_never_comes_by_waiting(postgres: PostgresServer) -> None:
    engine = create_engine(postgres.url())
    with engine.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS nobody_here"))
        connection.execute(text("CREATE ROLE nobody_here"))
    found = Database(StoreAddress("url", postgres.url()))
    with pytest.raises(StoreUnusable, match="permission denied"), found.write_transaction() as connection:
        connection.execute(text("SET LOCAL ROLE nobody_here"))
        connection.execute(text("SELECT * FROM tfmq_dead_letters"))
    found.close()
    with engine.begin() as connection:
        connection.execute(text("DROP ROLE nobody_here"))
    engine.dispose()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "nosuch://x",
        "postgresql+nosuch://x/y",
        "oracle://x/y",
        "sqlite+aiosqlite:////x.db",
    ],
)
def test_an_address_that_cannot_keep_anything_is_refused_at_once(url: str) -> None:
    with pytest.raises(BadRequest):
        database(url)


def test_an_error_never_shows_values_of_a_row(tmp_path: Path) -> None:
    found = database(tmp_path / "dead.db")
    with pytest.raises(StoreFailed) as failed, found.write_transaction() as connection:
        connection.execute(text("INSERT INTO nowhere VALUES (:payload)"), {"payload": "terces"[::-1]})
    assert "secret" not in str(failed.value)
    assert "secret" not in "".join(traceback.format_exception(failed.value)), "nor in what a log prints of it"


def test_a_row_that_postgresql_refuses_is_not_shown(postgres: PostgresServer) -> None:
    found = database(postgres.url())
    with pytest.raises(StoreFailed, match="not-null") as failed, found.write_transaction() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE refusing (a text, b text NOT NULL)"))
        connection.execute(text("INSERT INTO refusing VALUES (:payload, NULL)"), {"payload": "secret"})
    assert "secret" not in str(failed.value)
    found.close()


def test_one_who_writes_waits_for_another(tmp_path: Path) -> None:
    first, second = database(tmp_path / "dead.db"), database(tmp_path / "dead.db")
    with second.write_transaction():
        pass
    entered = threading.Event()
    done = threading.Event()

    def write() -> None:
        entered.set()
        with second.write_transaction() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS t (a)")
        done.set()

    with first.write_transaction() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS s (a)")
        thread = threading.Thread(target=write)
        thread.start()
        entered.wait(5)
        assert not done.wait(0.05)
        with first.read_connection() as reader:
            assert reader.exec_driver_sql("SELECT 1").scalar() == 1
    thread.join(10)
    assert done.is_set()


def test_a_forked_child_opens_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = database(tmp_path / "dead.db")
    engines: list[Engine] = [found._current_engine(), found._current_engine()]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    engines.append(found._current_engine())
    assert engines[0] is engines[1] is not engines[2]
    found.close()


@pytest.mark.parametrize(
    ("url", "module", "remedy"),
    [
        (
            "postgresql+psycopg2://me@db/x",
            "psycopg2",
            r'pip install "tfmq\[postgresql\]", and write .* postgresql\+psycopg://',
        ),
        ("postgresql+psycopg://me@db/x", "psycopg", r'pip install "tfmq\[postgresql\]"\.'),
        ("mysql+pymysql://me@db/x", "pymysql", r"pip install pymysql\."),
    ],
)
def test_a_driver_that_is_not_installed_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadRequest, match=f"is not installed .*{remedy}"):
        database(url)
    with pytest.raises(NotSupported, match=f"is not installed .*{remedy}"):
        SqlOffsets(url).read("billing", [])
