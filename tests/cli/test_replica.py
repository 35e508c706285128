"""`tfmq replica`: a data folder is restored from a store, a store is verified, a snapshot is stored."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import tfmq
from journal.disk import RealDisk, RealFile
from journal.errors import Full
from tests.cli.conftest import Cli
from tests.replication.objects import HookedStore, Primary, Tree, copy_to_folder, failing_after, make_snapshotter
from tfmq.cli.output import iso_text
from tfmq.replication.entries import Position, entry_key, manifest_key
from tfmq.replication.errors import StoreUnavailable
from tfmq.replication.materialize import MARKER_PATH, find_start, materialize
from tfmq.replication.snapshot import FolderSource
from tfmq.replication.stores.file_store import FileStore
from tools.rigs.live_server import LiveServer

NOON_MS = round(datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp() * 1000)


def at(time_ms: int) -> str:
    return str(iso_text(time_ms))


@pytest.fixture
def primary() -> Primary:
    """A history of four entries, one in ten seconds from noon on, with a snapshot after the second."""
    primary = Primary(HookedStore())
    primary.time_ms = NOON_MS
    primary.begin()
    for number in range(3):
        primary.time_ms = NOON_MS + (number + 1) * 10_000
        primary.generator.seed(3)  # whose first number below 3 is 0
        primary.write_file("segment", b"%d" % number * 2000, number * 2000)
        if number == 0:
            primary.snapshot()
    return primary


@pytest.fixture
def url(primary: Primary, tmp_path: Path) -> str:
    return copy_to_folder(primary.store, tmp_path / "store")


def changed(url: str, key: str, data: bytes | None) -> None:
    with closing(FileStore(url.removeprefix("file://"))) as store:
        store.delete(key)
        if data is not None:
            store.put_new(key, data)


def tree(folder: Path) -> Tree:
    paths = [each for each in folder.rglob("*") if each.name not in ("lock", "replica")]
    return {str(each.relative_to(folder)): None if each.is_dir() else each.read_bytes() for each in paths}


def test_the_newest_state_and_one_of_a_moment(offline: Cli, primary: Primary, url: str, tmp_path: Path) -> None:
    data = tmp_path / "newest"
    ran = offline("replica", "restore", url, str(data))
    assert (ran.code, ran.out) == (0, b"")
    assert f"{data} is as it was at " in ran.err and "snapshot: 2.0 KiB downloaded; 2 entries applied" in ran.err
    assert tree(data) == primary.trees[primary.position]
    for time_ms, slot in ((NOON_MS + 10_500, 1), (NOON_MS + 20_000, 2), (NOON_MS + 29_999, 2), (NOON_MS + 30_000, 3)):
        data = tmp_path / str(time_ms)
        ran = offline("replica", "restore", url, str(data), "--at", at(time_ms), "--json")
        assert ran.code == 0 and ran.err == ""
        assert (ran.json["term"], ran.json["slot"], ran.json["damage"]) == (1, slot, None)
        assert ran.json["at"] == at(primary.times[Position(1, slot)])
        assert tree(data) == primary.trees[Position(1, slot)]


def test_a_moment_outside_of_the_history_is_told_what_is_there(offline: Cli, url: str, tmp_path: Path) -> None:
    for time_ms, advice in (
        (NOON_MS + 9_999, "older entries were swept, or never made"),
        (NOON_MS + 30_001, "without --at you get the newest"),
    ):
        ran = offline("replica", "restore", url, str(tmp_path / "data"), "--at", at(time_ms))
        assert ran.code == 1
        assert f"the history at {url} goes from " in ran.err and ":10.000 " in ran.err and ":30.000 " in ran.err
        assert advice in ran.err and ran.err.count("\n") == 1
        assert not (tmp_path / "data").exists()


def test_a_folder_that_has_anything_is_left_alone(offline: Cli, url: str, tmp_path: Path) -> None:
    assert (ran := offline("replica", "restore", url, "")).code == 2 and "DATA is empty" in ran.err
    data = tmp_path / "data"
    data.write_bytes(b"")
    assert "is no folder" in offline("replica", "restore", url, str(data)).err
    data.unlink()
    data.mkdir()
    (data / "letter").write_bytes(b"mine")
    ran = offline("replica", "restore", url, str(data))
    assert ran.code == 1 and "is not empty (letter)" in ran.err
    assert [each.name for each in data.iterdir()] == ["letter"]
    lock = RealDisk().lock(str(data / "lock"))
    assert f"a server is running on {data}" in offline("replica", "restore", url, str(data)).err
    lock.release()
    assert "is not empty (letter)" in offline("replica", "restore", url, str(data)).err
    ran = offline("replica", "restore", url, str(tmp_path / "not" / "there"))
    assert ran.code == 1 and f"there is no folder {tmp_path / 'not'}: create that first" in ran.err
    (data / "letter").unlink()
    (data / "server.log").write_bytes(b"the shell's")
    assert offline("replica", "restore", url, str(data)).code == 0


def test_ctrl_c_says_that_the_same_command_goes_on(
    offline: Cli, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tfmq.cli.replica.materialize", interrupted)
        ran = offline("replica", "restore", url, str(tmp_path / "data"))
    assert ran.code == 130 and "is incomplete: repeat the command, and it goes on" in ran.err
    assert offline("replica", "restore", url, str(tmp_path / "data")).code == 0


def test_an_interrupted_restore_is_completed(offline: Cli, primary: Primary, url: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    start = find_start(primary.store)
    primary.store.before = failing_after(primary.store, 2)
    with ThreadPoolExecutor(1) as threads, pytest.raises(StoreUnavailable):
        materialize(primary.store, RealDisk(), str(data), threads, start)
    assert (data / "replica" / "materializing").exists()
    assert offline("replica", "restore", url, str(data)).code == 0
    assert tree(data) == primary.trees[primary.position]
    ran = offline("replica", "restore", url, str(data))
    assert ran.code == 1 and "is not empty (segment)" in ran.err


def test_a_server_starts_in_a_restored_folder_and_in_no_incomplete_one(
    offline: Cli, own_broker: LiveServer, tmp_path: Path
) -> None:
    with tfmq.Producer(own_broker.address) as producer:
        producer.send_many("orders", [b"first", b"second"])
    own_broker.stop()
    store = HookedStore()
    primary = Primary(store)
    primary.begin()
    source = FolderSource(RealDisk(), str(own_broker.data))
    snapshotter = make_snapshotter(store)
    snapshotter.store_manifest(primary.position, primary.time_ms, snapshotter.upload(source))
    restored = LiveServer(tmp_path / "restored")
    assert offline("replica", "restore", copy_to_folder(store, tmp_path / "store"), str(restored.data)).code == 0
    marker = restored.data / MARKER_PATH
    marker.write_bytes(b"")
    with pytest.raises(RuntimeError, match=f"The data folder {restored.data} is not complete: "):
        restored.start()
    marker.unlink()
    restored.start()
    with tfmq.Consumer(restored.address, topics="orders") as consumer:
        messages: list[bytes | None] = []
        while len(messages) < 2:
            messages += [message.payload for message in consumer.poll(timeout=5)]
    restored.stop()
    assert messages == [b"first", b"second"]


def test_a_full_disk_or_a_lost_store_in_the_middle_is_one_sentence(
    offline: Cli, primary: Primary, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    write, get = RealFile.pwritev, FileStore.get

    def full(file: RealFile, buffers: Any, position: int) -> int:
        if len(buffers[0]) > 1000:
            raise Full(f"{file.path}: no space")
        return write(file, buffers, position)

    def lost(store: FileStore, key: str) -> bytes | None:
        if key.startswith("chunks/"):
            raise StoreUnavailable(f"The store {store.name} cannot be reached.")
        return get(store, key)

    for patched, name, function in ((RealFile, "pwritev", full), (FileStore, "get", lost)):
        with monkeypatch.context() as patch:
            patch.setattr(patched, name, function)
            ran = offline("replica", "restore", url, str(data))
        assert ran.code == 1 and ran.err.count("\n") == 1
        assert ran.err.endswith(f"{data} is incomplete: repeat the command, and it goes on\n")
    assert offline("replica", "restore", url, str(data)).code == 0
    assert tree(data) == primary.trees[primary.position]


def test_a_wrong_url_and_an_empty_store_are_one_sentence(offline: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given, code, why in (
        ("nonsense", 2, "is no URL of a store"),
        (f"file://{tmp_path}/missing", 2, "is no folder"),
        (f"file://{tmp_path}/empty", 1, f"there is no replica at file://{tmp_path}/empty"),
    ):
        for command in (["restore", given, str(tmp_path / "data")], ["verify", given], ["snapshot", given]):
            ran = offline("replica", *command)
            assert ran.code == code and why in ran.err and ran.err.count("\n") == 1


def test_a_misspelled_database_is_refused_and_nothing_is_created(offline: Cli, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
        connection.commit()
    before = other.read_bytes()
    for path, why in ((tmp_path / "typo.db", "does not exist"), (other, "has no table tfmq_objects")):
        given = f"sqlite:///{path}"
        for command in (["restore", given, str(tmp_path / "data")], ["verify", given], ["snapshot", given]):
            ran = offline("replica", *command)
            assert (ran.code, ran.err.count("\n")) == (2, 1)
            assert f"{given} {why}" in ran.err and "correct the URL" in ran.err
    assert list(tmp_path.iterdir()) == [other] and other.read_bytes() == before


def test_damage_is_found_and_named(offline: Cli, primary: Primary, url: str, tmp_path: Path) -> None:
    ran = offline("replica", "verify", url)
    assert ran.code == 0 and "1 snapshot, 2 entries, " in ran.err and ": no damage" in ran.err
    found = offline("replica", "verify", url, "--json").json
    assert (found["damaged"], found["findings"], found["from"]) == (False, [], at(NOON_MS + 10_000))
    key = entry_key(Position(1, 2))
    changed(url, key, b"forged")
    ran = offline("replica", "verify", url)
    assert ran.code == 4 and "1 damaged object" in ran.err
    assert key in ran.out.decode() and "is no entry" in ran.out.decode() and "all after " in ran.out.decode()
    found = offline("replica", "verify", url, "--json")
    assert found.code == 4
    lost = [{"from": at(NOON_MS + 10_000), "to": None}]
    assert found.json["findings"] == [{"object": key, "what": "is no entry", "lost": lost}]
    ran = offline("replica", "restore", url, str(tmp_path / "data"))
    assert ran.code == 4 and f"{key} is no entry: `tfmq replica verify` says" in ran.err
    changed(url, key, primary.store.objects[key][0])
    changed(url, entry_key(Position(1, 3)), b"forged")
    ran = offline("replica", "restore", url, str(tmp_path / "earlier"), "--at", at(NOON_MS + 15_000))
    assert ran.code == 0, "what is damaged is not needed"
    assert tree(tmp_path / "earlier") == primary.trees[Position(1, 1)]


def test_a_snapshot_is_stored_and_used(offline: Cli, primary: Primary, url: str, tmp_path: Path) -> None:
    ran = offline("replica", "snapshot", url, "--json")
    assert ran.code == 0
    assert (ran.json["manifest"], ran.json["bytes"], ran.json["at"]) == (
        manifest_key(primary.position),
        6000,
        at(primary.time_ms),
    )
    assert offline("replica", "snapshot", url).code == 0, "a second one of the same entry is not needed"
    assert offline("replica", "verify", url, "--json").json["manifests"] == 2
    changed(url, entry_key(Position(1, 2)), None)
    assert offline("replica", "restore", url, str(tmp_path / "data")).code == 0
    assert tree(tmp_path / "data") == primary.trees[primary.position]
