"""The file that keeps batches: order, bound, one process, and what it says of a broken disk."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from journal.disk import RealDisk
from tfmq.client.producer.outbox import NEVER_SENT, Outbox, SentAs
from tfmq.errors import Busy, NotAllowed, StoreFailed

BLOCKS = [(5, 1, 77)]

PARTITIONS = """
import sys
from tfmq.client.producer.outbox import Outbox
print(Outbox(sys.argv[1], 9).partitions())
"""


@pytest.fixture
def store(tmp_path: Path) -> Outbox:
    return Outbox(str(tmp_path / "below" / "store"), 1000)


def keep(store: Outbox, *data: bytes, topic: str = "orders", partition: int = 0) -> None:
    store.append(topic, partition, [(1, BLOCKS, each, NEVER_SENT) for each in data])


def test_what_is_kept_comes_back_in_order_after_it_was_closed(store: Outbox) -> None:
    keep(store, b"a", b"b")
    keep(store, b"x", partition=1)
    keep(store, b"c")
    store.close()
    again = Outbox(store.path, 1000)
    assert sorted(again.partitions()) == [("orders", 0), ("orders", 1)]
    rows = again.read_oldest("orders", 0, 10, 1000)
    assert [row.data for row in rows] == [b"a", b"b", b"c"]
    assert [row.id for row in rows] == sorted(row.id for row in rows)
    assert {(row.count, tuple(row.blocks), row.sent_as) for row in rows} == {(1, (BLOCKS[0],), NEVER_SENT)}


def test_a_look_is_bounded_and_gives_at_least_one(store: Outbox) -> None:
    keep(store, b"a" * 100, b"b" * 100, b"c" * 100)
    assert len(store.read_oldest("orders", 0, 2, 1000)) == 2
    assert len(store.read_oldest("orders", 0, 9, 250)) == 2
    assert len(store.read_oldest("orders", 0, 9, 1)) == 1
    assert store.read_oldest("orders", 7, 9, 1000) == []


def test_places_are_written_down_and_what_arrived_goes(store: Outbox) -> None:
    keep(store, b"a", b"b")
    first, second = store.read_oldest("orders", 0, 9, 1000)
    store.record_sent_as([(first.id, SentAs(3, 7, 0, 99)), (second.id, SentAs(3, 7, 1, 99))])
    store.remove([first])
    store.close()
    (left,) = store.read_oldest("orders", 0, 9, 1000)
    assert (left.data, left.sent_as) == (b"b", SentAs(3, 7, 1, 99))


def test_the_bound_counts_what_an_earlier_process_left_and_what_went(store: Outbox) -> None:
    keep(store, b"a" * 600)
    store.close()
    with pytest.raises(Busy, match="stores 600 bytes"):
        keep(store, b"b" * 300, b"b" * 101)
    assert len(store.read_oldest("orders", 0, 9, 9999)) == 1, "all or none"
    store.remove(store.read_oldest("orders", 0, 9, 9999))
    keep(store, b"c" * 1000)


def test_another_process_is_refused_until_this_one_is_gone(store: Outbox) -> None:
    program = PARTITIONS
    keep(store, b"a")
    refused = subprocess.run([sys.executable, "-c", program, store.path], capture_output=True, text=True)
    assert "in use by another producer" in refused.stderr
    store.close()
    taken = subprocess.run([sys.executable, "-c", program, store.path], capture_output=True, text=True)
    assert taken.stdout == "[('orders', 0)]\n"


def test_a_second_close_leaves_alone_what_others_have_opened_since(store: Outbox, tmp_path: Path) -> None:
    keep(store, b"a")
    store.close()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(8)]
    store.close()
    for descriptor in others:
        os.close(descriptor)  # raises where it is closed already


def test_a_forked_child_has_nothing_of_its_parents(store: Outbox) -> None:
    keep(store, b"a")
    child = os.fork()
    if not child:
        code = 1
        try:
            store.abandon_after_fork()
            store.partitions()
        except NotAllowed:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    keep(store, b"b")
    assert len(store.read_oldest("orders", 0, 9, 1000)) == 2


def test_every_commit_is_fsynced(store: Outbox) -> None:
    keep(store, b"a")
    database = store._database
    assert database is not None
    assert database.execute("pragma synchronous").fetchone() == (2,)
    assert database.execute("pragma journal_mode").fetchone() == ("wal",)


def test_a_file_that_is_none_of_ours_is_reported(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"something else entirely" * 100)
    store = Outbox(str(tmp_path / "store"), 1000)
    with pytest.raises(StoreFailed, match="not a database"):
        store.partitions()
    (tmp_path / "store").unlink()
    assert store.partitions() == []


def test_a_statement_that_fails_leaves_nothing_half_done(store: Outbox) -> None:
    keep(store, b"a")
    with pytest.raises((sqlite3.Error, StoreFailed)):
        store.append("orders", 0, [(1, BLOCKS, b"b", NEVER_SENT), (None, BLOCKS, b"c", NEVER_SENT)])  # type: ignore[list-item]
    assert [row.data for row in store.read_oldest("orders", 0, 9, 1000)] == [b"a"]


def test_it_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Outbox(str(tmp_path / "made" / "below" / "store"), 1000)
        keep(store, b"a")
    finally:
        os.umask(before)
    for made in (tmp_path / "made").rglob("*"):
        assert made.stat().st_mode & 0o077 == 0, made
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0
    store.close()


def test_what_it_makes_is_on_the_disk_before_anything_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[str] = []
    monkeypatch.setattr(RealDisk, "force_folder", lambda _, path: forced.append(path))
    store = Outbox(str(tmp_path / "made" / "below" / "store"), 1000)
    keep(store, b"a")
    assert forced == [str(tmp_path), str(tmp_path / "made"), str(tmp_path / "made" / "below")]
    store.close()


def test_a_file_of_a_newer_version_is_left_alone(store: Outbox) -> None:
    keep(store, b"a")
    store.close()
    with sqlite3.connect(store.path) as database:
        database.execute("pragma user_version = 99")
    database.close()
    before = Path(store.path).read_bytes()
    with pytest.raises(StoreFailed, match="newer version of tfmq"):
        keep(store, b"b")
    assert Path(store.path).read_bytes() == before


def removed(store: Outbox) -> None:
    """The file is deleted while it is open, as `rm` does."""
    for each in Path(store.path).parent.glob("store*"):
        each.unlink()


def test_what_is_kept_after_a_removal_of_the_file_is_in_the_file_that_is_there(store: Outbox) -> None:
    keep(store, b"a" * 600)
    removed(store)
    keep(store, b"b" * 600)
    store.close()
    assert [row.data for row in Outbox(store.path, 1000).read_oldest("orders", 0, 9, 9999)] == [b"b" * 600]


def test_a_file_that_is_removed_while_it_is_written_has_kept_nothing(store: Outbox) -> None:
    keep(store, b"a")
    with pytest.raises(StoreFailed, match="was removed or replaced"), store._open_database() as database:
        database.execute("delete from kept")
        database.commit()
        removed(store)
    assert store.read_oldest("orders", 0, 9, 9999) == []


def test_rows_of_a_file_that_is_gone_are_not_taken_for_those_of_the_next_one(store: Outbox) -> None:
    keep(store, b"a")
    rows = store.read_oldest("orders", 0, 9, 9999)
    removed(store)
    keep(store, b"b")
    with pytest.raises(StoreFailed, match="was removed or replaced"):
        store.record_sent_as([(rows[0].id, SentAs(3, 7, 0, 99))])
    with pytest.raises(StoreFailed, match="was removed or replaced"):
        store.remove(rows)
    (left,) = store.read_oldest("orders", 0, 9, 9999)
    assert (left.data, left.sent_as) == (b"b", NEVER_SENT)
    store.remove([left])
    assert store.read_oldest("orders", 0, 9, 9999) == []


def test_a_lock_that_was_removed_keeps_out_no_member_and_is_taken_again(store: Outbox) -> None:
    keep(store, b"a")
    os.unlink(store.path + ".lock")
    keep(store, b"b")
    program = PARTITIONS
    refused = subprocess.run([sys.executable, "-c", program, store.path], capture_output=True, text=True)
    assert "in use by another producer" in refused.stderr
    store.close()
