"""Letters in a database: many at once, and what is forgotten. What all stores do is in test_shelf.py."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from tests.dead_letters.conftest import Stand
from tests.dead_letters.helpers import NOW, Time, failure, finished, group_of, message, sql_shelf
from tests.dead_letters.test_shelf import keeping
from tests.scale import scaled
from tfmq.client.operation import run_inline
from tfmq.dead_letters import model
from tfmq.dead_letters.model import DEAD, Selection, letter_from_message
from tfmq.dead_letters.sql_store import ENDED_MS_KEPT, TABLE, BlockingSqlStore, SqlLetterStore
from tfmq.dead_letters.store import StoreAddress
from tfmq.errors import StoreFailed
from tools.rigs.postgresql import PostgresServer


@pytest.fixture(params=["file", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockingSqlStore:
    if request.param == "file":
        return BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    found: BlockingSqlStore = request.getfixturevalue("postgres_store")
    return found


def test_many_threads_that_keep_the_same_make_one_letter_each(store: BlockingSqlStore) -> None:
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
        "from tests.dead_letters.test_shelf import keeping\n"
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


def test_a_full_disk_is_told_and_it_goes_on_when_there_is_room(tmp_path: Path) -> None:
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


def test_the_shelf_is_the_store_as_operations(tmp_path: Path) -> None:
    shelf = SqlLetterStore(BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db"))), run_inline)
    assert Stand(lambda: (shelf, finished)).run(shelf.find(Selection())) == []
    assert shelf.name == str(tmp_path / "dead.db")
    shelf.close()


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


def test_a_server_that_is_not_there_is_told_without_the_password() -> None:
    store = BlockingSqlStore(StoreAddress("url", "postgresql+psycopg://me:hunter2@127.0.0.1:1/dead"))
    with pytest.raises(StoreFailed, match=r"127\.0\.0\.1") as failed:
        store.apply([keeping(0)])
    assert "hunter2" not in str(failed.value) and "\n" not in str(failed.value)
    assert failed.value.retriable


def test_a_row_that_was_changed_by_hand_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    path = tmp_path / "dead.db"
    shelf = sql_shelf(path)
    kept = group_of(shelf, Time())
    for number in (1, 2):
        finished(kept.store_letter(message(number), [failure()], retry_after=number))
    bad = letter_from_message(message(1), "billing").id
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tfmq_dead_letters SET failures = '{' WHERE id = ?", (bad,))
    late = group_of(shelf, Time(NOW + 10))
    with pytest.raises(StoreFailed, match=bad):
        finished(late.lease_next())
    with pytest.raises(StoreFailed, match=bad):
        finished(shelf.get(bad))
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM tfmq_dead_letters WHERE id = ?", (bad,))
    assert finished(late.lease_next()).message.ordinal == 2
