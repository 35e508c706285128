"""A folder as a store: what is durable when, what killed writers leave, folders that refuse or vanish."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from journal.disk import RealDisk
from tests.e2e.small_disk import BALLAST_BYTES, empty, fill, small_disk
from tests.paths import ROOT
from tfmq.broker.catalog import write_version
from tfmq.data_dir import META_NAME
from tfmq.replication.errors import StoreRefused, StoreUnavailable
from tfmq.replication.stores import file_store
from tfmq.replication.stores.file_store import LEFTOVER_SECONDS, TEMPORARY, FileStore
from tfmq.replication.stores.open_store import open_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "objects"
    found.mkdir()
    return found


@pytest.fixture
def store(folder: Path) -> Iterator[FileStore]:
    found = FileStore(str(folder))
    yield found
    found.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """The calls that make names and make things durable, in order; temporary files are called TEMPORARY."""
    made: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def name_of(descriptor: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(folder).as_posix()
        return TEMPORARY if path.startswith(TEMPORARY) else path

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        made.append(f"fsync {name_of(descriptor)}")

    def link(source: str, target: str, **folders: Any) -> None:
        real_link(source, target, **folders)
        made.append(f"link {target}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    return made


def test_an_object_is_durable_before_anybody_is_told_of_it(store: FileStore, folder: Path, calls: list[str]) -> None:
    assert store.put_new("entries/1/7", b"seven")
    assert calls == [f"fsync {TEMPORARY}", "link entries/1/7", "fsync .", "fsync entries", "fsync entries/1"]
    calls.clear()
    assert store.put_new("entries/1/8", b"eight")
    assert calls == [f"fsync {TEMPORARY}", "link entries/1/8", "fsync entries/1"], "its folders are durable already"
    calls.clear()
    other = FileStore(str(folder))
    assert not other.put_new("entries/1/7", b"other")
    assert calls == ["fsync .", "fsync entries", "fsync entries/1"], "its writer may not have come to that yet"
    calls.clear()
    assert other.get("entries/1/8") == b"eight" and calls == ["fsync entries/1"]
    other.close()


def test_what_a_killed_writer_leaves_is_no_object_and_removed_an_hour_later(folder: Path, store: FileStore) -> None:
    program = (
        "import os, signal, sys\n"
        "from tfmq.replication.stores.file_store import FileStore\n"
        "os.link = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "FileStore(sys.argv[1]).put_new('entries/1', b'torn')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], cwd=ROOT, timeout=60)
    assert done.returncode == -9
    (left,) = (folder / TEMPORARY).iterdir()
    assert list(store.list("")) == [] and store.get("entries/1") is None
    assert store.put_new("entries/1", b"whole")
    assert list((folder / TEMPORARY).iterdir()) == [left], "it may be the file of a writer that is slow"
    old = time.time() - LEFTOVER_SECONDS - 60
    os.utime(left, (old, old))
    later = FileStore(str(folder))
    assert later.put_new("entries/2", b"whole") and list((folder / TEMPORARY).iterdir()) == []
    later.close()


def test_a_link_that_a_network_file_system_repeats_is_our_own(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_link = os.link

    def repeated(source: str, target: str, **folders: Any) -> None:
        real_link(source, target, **folders)
        real_link(source, target, **folders)

    monkeypatch.setattr(file_store.os, "link", repeated)
    assert store.put_new("replica", b"mine") and not store.put_new("replica", b"other")


def test_an_object_of_somebody_else_at_the_moment_of_the_link_wins(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_link = os.link

    def late(source: str, target: str, **folders: Any) -> None:
        (folder / target).write_bytes(b"theirs")
        real_link(source, target, **folders)

    monkeypatch.setattr(file_store.os, "link", late)
    assert not store.put_new("replica", b"mine") and store.get("replica") == b"theirs"
    assert list((folder / TEMPORARY).iterdir()) == []


def test_a_list_reads_each_folder_once(folder: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "PAGE", 10)
    monkeypatch.setattr(file_store, "PAGE_READ_BYTES", 100)
    keys = [f"entries/{term:016d}/{slot:016d}" for term in range(3) for slot in range(105)]
    for key in keys:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).touch()
    names = FileStore._names
    looked_at = 0

    def counted(store: FileStore, folder: str) -> Iterator[Any]:
        nonlocal looked_at
        for each in names(store, folder):
            looked_at += 1
            yield each

    monkeypatch.setattr(FileStore, "_names", counted)
    assert [each.key for each in store.list("entries/")] == keys
    assert looked_at == 3 + len(keys)
    monkeypatch.setattr(file_store, "SPOOL_BYTES", 100)
    assert [each.key for each in store.list("entries/")] == keys
    monkeypatch.setattr("tempfile.tempdir", str(folder / "gone"))
    with pytest.raises(StoreUnavailable, match=r"needs a temporary file in \S+/gone, which failed: No such file"):
        list(store.list("entries/"))


def test_a_full_disk_is_waited_for() -> None:
    with small_disk("tmpfs") as place:
        store = FileStore(str(place))
        fill(place)
        with pytest.raises(StoreUnavailable, match=r"^The store file:///\S+ is full: No space left on device\.$"):
            store.put_new("entries/1", bytes(BALLAST_BYTES))
        assert store.get("entries/1") is None and list(store.list("entries/")) == []
        empty(place)
        assert store.put_new("entries/1", bytes(BALLAST_BYTES))
        assert [each.name for each in (place / TEMPORARY).iterdir()] == []
        store.close()


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without the rights of root, which no folder refuses."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_may_not_be_written_is_refused(folder: Path, store: FileStore) -> None:
    store.put_new("replica", b"1")
    folder.chmod(0o555)
    (folder / TEMPORARY).chmod(0o555)
    (folder / "replica").chmod(0o444)
    with unprivileged():
        assert store.get("replica") == b"1"
        with pytest.raises(StoreRefused, match=r"refuses this user \(Permission denied\): permit it to read and to w"):
            store.put_new("entries/1", b"")
    folder.chmod(0o755)
    (folder / TEMPORARY).chmod(0o755)


def test_a_file_system_without_hard_links_is_refused(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(file_store.os, "link", refuse)
    with pytest.raises(StoreRefused, match="makes no hard links"):
        store.put_new("replica", b"1")


def test_a_folder_that_was_removed_is_refused_instead_of_looking_empty(store: FileStore, folder: Path) -> None:
    store.put_new("replica", b"1")
    shutil.rmtree(folder)
    folder.mkdir()
    calls: list[Callable[[], object]] = [
        lambda: store.get("replica"),
        lambda: list(store.list("")),
        lambda: store.put_new("replica", b"2"),
    ]
    for call in calls:
        with pytest.raises(StoreRefused, match=r"The folder of the store file:///.* was removed"):
            call()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file:///proc/nowhere", r"^The store file:///proc/nowhere is no folder \(No such file or directory\): m"),
        ("file:///etc/passwd", r"is no folder \(Not a directory\): mount the file system, or create the folder\.$"),
        ("file://host/objects", "is no URL of a folder: write file:///FOLDER, with three slashes"),
        ("file:objects", "'file:objects' is no URL of a store: write s3://BUCKET/PREFIX, .*file:///FOLDER"),
        ("file:///a?b=c", "has options, which a folder has not: in its name write %3F"),
        ("file:///", "names the root of the file system: write file:///FOLDER"),
        ("file:////./", "names the root of the file system"),
        ("", "is no URL of a store"),
    ],
)
def test_a_url_without_a_folder_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(StoreRefused, match=sentence):
        open_store(url)


def test_the_data_folder_of_a_broker_is_no_store(tmp_path: Path) -> None:
    meta = f"{tmp_path}/{META_NAME}"
    RealDisk().make_folder(meta)
    write_version(RealDisk(), meta, "node")
    with pytest.raises(StoreRefused, match="is the data folder of a broker: name a folder that has only the store"):
        open_store(f"file://{tmp_path}")


def test_a_folder_with_a_space_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "two words").mkdir()
    store = open_store(f"file://{tmp_path}/two%20words")
    assert store.put_new("replica", b"1") and (tmp_path / "two words" / "replica").read_bytes() == b"1"
    store.close()
