"""Letters in a database: many at once, and what is forgotten. What all stores do is in test_store.py."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine

from journal.disk import RealDisk
from tests.dead_letters.conftest import Stand
from tests.dead_letters.helpers import NOW, Time, failure, finished, group_of, message, sql_letter_store
from tests.dead_letters.test_store import keeping
from tests.scale import scaled
from tfmq.client.operation import run_inline
from tfmq.client.worker.dead_letter_store import StoreUnusable
from tfmq.dead_letters import model
from tfmq.dead_letters.model import DEAD, RedrivePosition, Selection, letter_from_message
from tfmq.dead_letters.sql_store import (
    COLUMNS_WITHOUT_BODY,
    ENDED_MS_KEPT,
    TABLE,
    BlockingSqlStore,
    Database,
    SqlLetterStore,
    create_directory,
    letter_from_row,
    row_from_letter,
)
from tfmq.dead_letters.store import StoreAddress, parse_address
from tfmq.errors import BadRequest, NotSupported, StoreFailed
from tfmq.offsets.sql import SqlOffsets
from tools.rigs.postgresql import PostgresServer


@pytest.fixture(params=["file", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockingSqlStore:
    if request.param == "file":
        return BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    found: BlockingSqlStore = request.getfixturevalue("postgres_store")
    return found


def test_many_threads_that_keep_the_same_make_one_dead_letter_each(store: BlockingSqlStore) -> None:
    steps = [keeping(number) for number in range(5)]
    errors: list[BaseException] = []

    def keep() -> None:
        try:
            for step in steps:
                BlockingSqlStore(store.database.address).apply([step])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=keep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert store.count_by_state() == {("billing", DEAD): 5}


def test_the_table_of_an_earlier_release_gets_its_new_column_in_place(store: BlockingSqlStore) -> None:
    """While several open it; that release goes on writing rows without it."""
    store.apply([keeping(1)])
    with store.database.write_transaction() as connection:
        connection.exec_driver_sql("ALTER TABLE tfmq_dead_letters DROP COLUMN broker")
    store.close()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            assert BlockingSqlStore(store.database.address).count_by_state() == {("billing", DEAD): 1}
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    (letter,) = store.find(Selection())
    assert letter.broker == ""
    store.apply([(letter.id, model.AdoptEvent(20, "node-1"))])
    old = ", ".join(each.name for each in TABLE.c if each.name != "broker")
    with store.database.write_transaction() as connection:
        insert = f"INSERT INTO tfmq_dead_letters (id, {old.removeprefix('id, ')})"
        row = old.replace("id, group_name", "'0123', 'other'", 1)
        connection.exec_driver_sql(f"{insert} SELECT {row} FROM tfmq_dead_letters")
    assert sorted(each.broker for each in store.find(Selection())) == ["", "node-1"]


def test_several_at_once_are_no_trouble_for_a_database_that_is_serializable(
    postgres: PostgresServer, postgres_store: BlockingSqlStore
) -> None:
    """Its default is not ours: each change would be refused because another one read beside it."""
    plain = postgres.url()
    url = f"{plain}{'&' if '?' in plain else '?'}options=-cdefault_transaction_isolation%3Dserializable"
    store = BlockingSqlStore(StoreAddress("url", url))
    steps = [keeping(number) for number in range(20)]
    store.apply(steps)
    with store.database.write_transaction() as connection:
        assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
    errors: list[BaseException] = []

    def claim(token: str) -> None:
        mine = BlockingSqlStore(StoreAddress("url", url))
        try:
            for id, _ in steps:
                mine.apply([(id, model.ClaimEvent(20, token))])
        except BaseException as error:
            errors.append(error)
        mine.close()

    threads = [threading.Thread(target=claim, args=(f"taker {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store.close()
    assert errors == []


def test_of_many_who_claim_the_same_one_has_it(store: BlockingSqlStore) -> None:
    steps = [keeping(number) for number in range(scaled(100) + 3)]
    store.apply(steps)
    won: list[str] = []

    def claim(token: str) -> None:
        own = BlockingSqlStore(store.database.address)
        for id, _ in steps:
            (found,) = own.apply([(id, model.TakeEvent(10**15, token, 10**16))])
            if found is not None:
                won.append(id)

    store.apply([(id, model.RetryEvent(20, 3)) for id, _ in steps])
    threads = [threading.Thread(target=claim, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(won) == sorted(id for id, _ in steps)


def test_a_page_of_changes_is_all_or_nothing(store: BlockingSqlStore) -> None:
    store.apply([keeping(0)])
    broken = keeping(1)[1]._replace(at_ms=1 << 80)
    with pytest.raises(StoreFailed):
        store.apply([(keeping(0)[0], model.DropEvent(20)), (keeping(1)[0], broken)])
    assert store.count_by_state() == {("billing", DEAD): 1}


def test_what_ended_long_ago_is_forgotten_and_nothing_else(store: BlockingSqlStore) -> None:
    steps = [keeping(number) for number in range(3)]
    store.apply(steps)
    store.apply([(steps[0][0], model.DropEvent(100)), (steps[1][0], model.DropEvent(ENDED_MS_KEPT))])
    assert store.delete_expired(ENDED_MS_KEPT + 100) == 0
    assert store.delete_expired(ENDED_MS_KEPT + 101) == 1
    assert {each.id for each in store.find(Selection())} == {steps[1][0], steps[2][0]}


@pytest.mark.long
def test_what_was_kept_outlives_the_kill_of_its_process(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from tests.dead_letters.test_store import keeping\n"
        "from tfmq.dead_letters.store import StoreAddress\n"
        "from tfmq.dead_letters.sql_store import BlockingSqlStore\n"
        "store = BlockingSqlStore(StoreAddress('path', sys.argv[1]))\n"
        "for number in range(3):\n"
        "    store.apply([keeping(number)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "dead.db"
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60)
    assert done.returncode == -9
    assert BlockingSqlStore(StoreAddress("path", str(path))).count_by_state() == {("billing", DEAD): 3}


def test_a_full_disk_is_reported_and_it_goes_on_when_there_is_room(tmp_path: Path) -> None:
    store = BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    store.apply([keeping(0)])
    with store.database.write_transaction() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    store.close()
    letter = letter_from_message(message(9, bytes(10**6)), "billing")
    limited = BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    with limited.database.read_connection() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 5}")
    with pytest.raises(StoreFailed, match="full"):
        limited.apply([(letter.id, model.KeepEvent(10, letter))])
    assert limited.count_by_state() == {("billing", DEAD): 1}
    limited.close()
    store.apply([(letter.id, model.KeepEvent(10, letter))])
    assert store.count_by_state() == {("billing", DEAD): 2}


def test_a_person_can_ask_the_table(tmp_path: Path) -> None:
    store = BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    store.apply([keeping(1)])
    store.close()
    rows = sqlite3.connect(tmp_path / "dead.db").execute(
        "SELECT topic, partition_number, message_offset, state, error FROM tfmq_dead_letters"
    )
    assert list(rows) == [("orders", 0, 100, "dead", "ValueError: no such order")]


def test_the_adapter_is_the_store_as_operations(tmp_path: Path) -> None:
    letter_store = SqlLetterStore(BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db"))), run_inline)
    assert Stand(lambda: (letter_store, finished)).run(letter_store.find(Selection())) == []
    assert letter_store.name == str(tmp_path / "dead.db")
    letter_store.close()


def test_connections_that_the_server_cut_are_made_again(
    postgres_store: BlockingSqlStore, postgres: PostgresServer
) -> None:
    postgres_store.apply([keeping(0)])
    engine = create_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        assert (connection.exec_driver_sql(cut).scalar() or 0) > 0
    engine.dispose()
    postgres_store.apply([keeping(1)])
    assert postgres_store.count_by_state() == {("billing", DEAD): 2}


def test_a_server_that_is_not_there_is_reported_without_the_password() -> None:
    store = BlockingSqlStore(StoreAddress("url", "postgresql+psycopg://me:hunter2@127.0.0.1:1/dead"))
    with pytest.raises(StoreFailed, match=r"127\.0\.0\.1") as failed:
        store.apply([keeping(0)])
    assert "hunter2" not in str(failed.value) and "\n" not in str(failed.value)
    assert failed.value.retriable


def test_a_row_that_was_changed_by_hand_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    path = tmp_path / "dead.db"
    letter_store = sql_letter_store(path)
    kept = group_of(letter_store, Time())
    for number in (1, 2):
        finished(kept.store_letter(message(number), [failure()], retry_after=number))
    bad = letter_from_message(message(1), "billing").id
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tfmq_dead_letters SET failures = '{' WHERE id = ?", (bad,))
    late = group_of(letter_store, Time(NOW + 10))
    with pytest.raises(StoreFailed, match=bad):
        finished(late.lease_next())
    with pytest.raises(StoreFailed, match=bad):
        finished(letter_store.get(bad))
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM tfmq_dead_letters WHERE id = ?", (bad,))
    assert finished(late.lease_next()).message.ordinal == 2


# The database beneath the letters: durable, reported in a sentence when it fails, one for each process.


def database(where: str | Path) -> Database:
    return Database(parse_address(where))


def test_sqlite_is_configured_to_be_on_the_disk_when_it_commits(tmp_path: Path) -> None:
    found = database(tmp_path / "dead.db")
    for _ in range(2):
        with found.write_transaction() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "FULL"
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    url = database(f"sqlite:///{tmp_path / 'other.db'}")
    with url.write_transaction() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "FULL"
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete", "it may be another's file"


def test_postgresql_is_configured_so_too_whatever_its_default(postgres: PostgresServer) -> None:
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


def test_what_is_written_after_a_removal_of_the_file_is_in_the_file_that_is_there(tmp_path: Path) -> None:
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
    with pytest.raises(StoreFailed, match="was removed or replaced") as failed, found.write_transaction() as connection:
        connection.exec_driver_sql("CREATE TABLE t (a)")
        removed(path)
    assert failed.value.retriable


def test_a_path_that_is_not_absolute_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_that_is_no_store_is_reported_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "dead.db"
    path.write_bytes(b"secret payload " * 1000)
    with pytest.raises(StoreFailed) as failed:
        database(path).exists()
    assert str(path) in str(failed.value) and "not a database" in str(failed.value)
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize("place", [".", "no-database", "no-database/dead.db"])
@pytest.mark.parametrize("prefix", ["", "sqlite:///"])
def test_where_no_dead_letter_can_ever_be_kept_no_caller_waits(tmp_path: Path, place: str, prefix: str) -> None:
    (tmp_path / "no-database").write_bytes(b"secret payload " * 1000)
    found = Database(parse_address(f"{prefix}{tmp_path / place}"))
    with pytest.raises(StoreUnusable, match="No dead letters can be stored at") as failed, found.write_transaction():
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
        ("mysql://me@db/x", "MySQLdb", r"pip install mysqlclient\."),
    ],
)
def test_a_driver_that_is_not_installed_is_reported_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadRequest, match=f"is not installed .*{remedy}"):
        database(url)
    with pytest.raises(NotSupported, match=f"is not installed .*{remedy}"):
        SqlOffsets(url).read("billing", [])


# Letters as rows and back, without a database.

JOURNEY = RedrivePosition("again", 8, 3, 99, 5, 1 << 40)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("journey", [None, JOURNEY])
@pytest.mark.parametrize("key", [None, "42", b"42"])
def test_a_dead_letter_comes_back_as_it_was(
    whole: bool, journey: RedrivePosition | None, key: bytes | str | None
) -> None:
    letter = letter_from_message(message(3, b"\x00x", key=key, tag="new"), "billing")
    letter = replace(
        letter, failures=(failure(), failure(1)), journey=journey, state="redriving", calls=3, token="me", lease_ms=5
    )
    letter = letter if whole else replace(letter, body=None)
    row = row_from_letter(letter)
    assert letter_from_row(row) == letter
    assert set(row) == {column.name for column in (TABLE.c if whole else COLUMNS_WITHOUT_BODY)}


def test_what_may_be_large_is_read_only_where_it_is_wanted() -> None:
    assert not {column.name for column in COLUMNS_WITHOUT_BODY} & {"payload", "attribute"}


def test_text_is_such_as_every_database_takes() -> None:
    letter = replace(letter_from_message(message(key="a\0b", tag="\0"), "g"), failures=(failure(0, "bad \ud800\0"),))
    row = row_from_letter(letter)
    assert (row["key_text"], row["tag"], row["error"]) == ("a\ufffdb", "\ufffd", "bad ?\ufffd")
    assert row["failures"].isascii() and "\0" not in row["failures"]
    assert letter_from_row(row).failures == letter.failures


def test_no_row_can_be_twice_for_one_message() -> None:
    (unique,) = [each for each in TABLE.constraints if each.name == "tfmq_dead_letters_message"]
    names = [column.name for column in unique.columns]  # type: ignore[attr-defined]
    assert names == ["group_name", "incarnation", "partition_number", "message_offset", "appended_ms"]
    assert [column.name for column in TABLE.primary_key] == ["id"]
