"""What every store promises: the interface `tfmq.replication.store.Store`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.paths import ROOT
from tests.replication.stores.conftest import SMALL_PAGE, Place
from tfmq.replication import store as interface
from tfmq.replication.errors import InvalidObject
from tfmq.replication.stores import file_store, object_store, sql_store

THREADS = 8
RACER_SECONDS = 60.0


def test_an_object_is_stored_once_and_never_changes(place: Place) -> None:
    store = place.open()
    assert store.get("replica") is None
    assert store.put_new("replica", b"first")
    assert not store.put_new("replica", b"second") and not store.put_new("replica", b"first")
    assert store.get("replica") == b"first" == place.open().get("replica")


@pytest.mark.parametrize("data", [b"", bytes(range(256)), b"\xff" * (4 << 20)], ids=["empty", "all bytes", "4 MiB"])
def test_what_is_stored_is_returned(place: Place, data: bytes) -> None:
    store = place.open()
    assert store.put_new("chunks/0a", data)
    assert place.open().get("chunks/0a") == data
    (listed,) = store.list("chunks/")
    assert listed.size_bytes == len(data) and abs(listed.modified - time.time()) < 60


def test_two_clients_see_at_once_what_the_other_has_done(place: Place) -> None:
    one, other = place.open(), place.open()
    for number in range(10):
        key = f"terms/{number:016d}"
        assert one.get(key) is None and other.put_new(key, b"%d" % number)
        assert one.get(key) == b"%d" % number and [each.key for each in one.list("terms/")] == [key]
        one.delete(key)
        assert other.get(key) is None and list(other.list("terms/")) == []
        one, other = other, one


def test_a_deleted_object_is_gone_and_its_key_is_free(place: Place) -> None:
    store = place.open()
    store.delete("handovers/1")  # there is none
    assert store.put_new("handovers/1", b"one")
    store.delete("handovers/1")
    store.delete("handovers/1")
    assert store.get("handovers/1") is None and list(store.list("")) == []
    assert store.put_new("handovers/1", b"other") and store.get("handovers/1") == b"other"
    keys = [f"handovers/{number}" for number in range(10)]
    for key in keys[2:]:
        assert store.put_new(key, b"one of many")
    store.delete(*keys[1:9], *(f"chunks/{number}" for number in range(interface.DELETED_MAX - 8)))
    assert [each.key for each in store.list("")] == ["handovers/9"]


def test_a_list_has_the_objects_of_a_prefix_after_a_key_in_order(place: Place) -> None:
    store = place.open()
    keys = [
        "chunks/0a-1",
        "chunks/0a.2",
        "chunks/0a12",
        "chunks/0b",
        "entries/1/07",
        "entries/1/7",
        "entries/1/8",
        "entries/12/1",
        "entries/2/1",
        "entries-of-others/1",
        "replica",
    ]
    for key in reversed(keys):
        assert store.put_new(key, key.encode())

    def listed(prefix: str, after: str = "") -> list[str]:
        found = list(store.list(prefix, after))
        assert all(each.size_bytes == len(each.key) for each in found)
        return [each.key for each in found]

    assert listed("entries/") == ["entries/1/07", "entries/1/7", "entries/1/8", "entries/12/1", "entries/2/1"]
    assert listed("entries/1/") == ["entries/1/07", "entries/1/7", "entries/1/8"]
    assert listed("entries/1") == ["entries/1/07", "entries/1/7", "entries/1/8", "entries/12/1"]
    assert listed("entries/1/", "entries/1/07") == ["entries/1/7", "entries/1/8"]
    assert listed("entries/1/", "entries/1/071") == ["entries/1/7", "entries/1/8"], "a key that is not there"
    assert listed("entries/", "entries/1/8") == ["entries/12/1", "entries/2/1"]
    assert listed("entries/1/", "entries/1/8") == listed("entries/1/", "replica") == listed("nothing/") == []
    assert listed("entries/2/", "chunks/0b") == ["entries/2/1"]
    assert listed("chunks/0a") == ["chunks/0a-1", "chunks/0a.2", "chunks/0a12"]
    assert listed("replica") == listed("re") == ["replica"]
    if not place.url.startswith("s3"):  # SeaweedFS sorts names of folders without the "/" behind them
        assert listed("") == sorted(keys) and listed("e") == sorted(keys)[4:10]


def test_a_list_goes_on_beyond_a_page(place: Place) -> None:
    one, other = place.open(), place.open()
    keys = [f"entries/{number:016d}" for number in range(1050)]
    with ThreadPoolExecutor(THREADS) as threads:
        assert all(threads.map(lambda key: one.put_new(key, b"x"), keys))
    assert [each.key for each in other.list("entries/")] == keys
    assert [each.key for each in other.list("entries/", keys[1023])] == keys[1024:]
    lazy = other.list("entries/")
    assert next(lazy).key == keys[0]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(one.delete, keys[1:]))
    if not place.url.startswith("s3"):  # its page has 1,000, chosen by the server
        assert len(list(lazy)) < 2 * SMALL_PAGE, "pages are read when they are needed"
    assert [each.key for each in one.list("entries/")] == keys[:1]


def test_of_racing_threads_one_stores_each_object(place: Place) -> None:
    stores = [place.open(), place.open()]

    def race(turn: int) -> bool:
        return stores[turn % 2].put_new(f"race/{turn // THREADS}", b"%d" % turn)

    with ThreadPoolExecutor(THREADS) as threads:
        won = [turn for turn, stored in enumerate(threads.map(race, range(200))) if stored]
    assert [turn // THREADS for turn in won] == list(range(200 // THREADS))
    assert [stores[0].get(f"race/{turn // THREADS}") for turn in won] == [b"%d" % turn for turn in won]


@pytest.mark.parametrize("place", ["file", "sqlite", "postgresql", "s3"], indirect=True)
def test_of_racing_processes_one_stores_each_object(place: Place) -> None:
    """Also the first use, which makes folders and tables, is a race."""
    names, count = ("a", "b", "c"), 67
    command = [sys.executable, "-m", "tests.replication.stores.racer", place.url, str(count), *names]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=RACER_SECONDS, check=True)
    won = [(int(number), line[0]) for line in done.stdout.splitlines() for number in line.split()[1:]]
    assert sorted(number for number, _ in won) == list(range(count))
    store = place.open()
    assert [store.get(f"race/{number}") for number, _ in won] == [name.encode() for _, name in won]


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/./b", ".a", "a/.b", "a b", "ä", "a_b", "a\n", "a" * 201]
)
def test_other_keys_are_refused(place: Place, key: str) -> None:
    store = place.open()
    calls: list[Callable[[], object]] = [
        lambda: store.put_new(key, b""),
        lambda: store.get(key),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="cannot be the key of an object"):
            call()


def test_an_object_that_is_too_large_is_neither_stored_nor_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open()
    store.put_new("chunks/1", bytes(1001))
    for module in (interface, file_store, object_store, sql_store):
        monkeypatch.setattr(module, "OBJECT_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match="more than 1000"):
        store.put_new("chunks/2", bytes(1001))
    assert store.get("chunks/2") is None
    if place.url:
        with pytest.raises(InvalidObject, match=r"chunks/1 in .* more than 1000 bytes"):
            store.get("chunks/1")
