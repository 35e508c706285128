"""Offsets in a file: whole or the old ones after any crash, never two writers, never a replaced member."""

import json
import os
import threading
from pathlib import Path

import pytest

from journal.disk import RealDisk
from tests.offsets.contract import Contract, Open
from tfmq.errors import Busy, Damaged, Fenced, NotSupported
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.stored import PartitionName, StoredOffset

A, B = PartitionName("orders", 0), PartitionName("orders", 11)
PLACE = StoredOffset(offset=700, index=0, incarnation=5, epoch=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "offsets.json"


@pytest.fixture
def open_one(path: Path) -> Open:
    return lambda: FileOffsets(str(path))


class TestFile(Contract):
    """As every storage."""


def test_several_members_on_one_machine_share_a_file(path: Path) -> None:
    """Invariant: what any of them saved is there, whatever the others did in the same moment."""

    def member(number: int) -> None:
        storage = FileOffsets(str(path))
        for offset in range(1, 11):
            storage.save("billing", 1, {PartitionName("orders", number): StoredOffset(offset)})

    threads = [threading.Thread(target=member, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    names = [PartitionName("orders", number) for number in range(8)]
    assert {
        name: row.offset for name, row in FileOffsets(str(path)).read("billing", names).items()
    } == dict.fromkeys(names, 10)


def test_a_lock_that_is_not_given_back_is_said_with_its_holder(path: Path) -> None:
    held = RealDisk().lock(f"{path}.lock")
    waited: list[float] = []
    storage = FileOffsets(str(path), pause=waited.append)
    with pytest.raises(Busy, match=rf"offsets\.json has been locked by process {os.getpid()}"):
        storage.save("billing", 1, {A: PLACE})
    assert sum(waited) == pytest.approx(10)
    assert (
        storage.read("billing", [A]) == {}
    )  # a reader finds the old file or the new one, whoever has the lock
    held.release()
    storage.save("billing", 1, {A: PLACE})


def test_a_claim_that_changes_nothing_writes_nothing(path: Path) -> None:
    FileOffsets(str(path)).claim("billing", 4, [A])
    assert FileOffsets(str(path), Failing(1)).claim("billing", 4, [A]) == {}


def test_a_file_of_the_first_version_fences_with_its_group(path: Path) -> None:
    row = {"offset": 5, "index": 0, "incarnation": 1, "epoch": 0, "generation": 3}
    path.write_text(
        json.dumps({"version": 1, "groups": {"g": {"generation": 7, "offsets": {"orders": {"0": row}}}}})
    )
    storage = FileOffsets(str(path))
    assert storage.read("g", [A]) == {A: StoredOffset(5, 0, 1, 0, 7)}
    with pytest.raises(Fenced):
        storage.save("g", 6, {A: PLACE})
    storage.save("g", 7, {A: PLACE})
    assert json.loads(path.read_text())["version"] == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 1, "groups": []}',
        '{"version": 1, "groups": {"g": {"generation": 1, "offsets": {"t": {"0": {"offset": -1}}}}}}',
        '{"version": 1, "groups": {"g": {"generation": "1", "offsets": {}}}}',
        '{"version": 1, "groups": {"g": {"generation": 1, "offsets": {"t": {"x": {}}}}}}',
        '{"version": 1, "groups": {"g": {"generation": 1, "offsets": {"t": {"0": 5}}}}}',
        '{"version": 1, "groups": {"g": {"generation": 1, "offsets": {"t": 5}}}}',
        '{"version": 1, "groups": {"g": 5}}',
        '{"version": 2, "groups": {"g": {"t": {"0": {"offset": -2, "index": 0, "incarnation": 0, "epoch": 0}}}}}',
        '{"version": 2, "groups": {"g": {"t": []}}}',
        "\0" * 100,
    ],
)
def test_a_file_that_is_something_else_is_refused_and_kept(path: Path, content: str) -> None:
    path.write_text(content)
    storage = FileOffsets(str(path))
    for _ in range(2):
        with pytest.raises(Damaged, match=r"offsets\.json"):
            storage.read("g", [PartitionName("t", 0)])
    assert path.read_text() == content


def test_a_newer_file_is_refused_clearly(path: Path) -> None:
    path.write_text(json.dumps({"version": 3, "groups": {}}))
    with pytest.raises(NotSupported, match="version 3"):
        FileOffsets(str(path)).read("g", [A])


class Failing(RealDisk):
    """Fails the n-th call that changes something."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "planted")

    def create(self, path: str):  # type: ignore[no-untyped-def]
        self._count()
        return super().create(path)

    def rename(self, source: str, target: str) -> None:
        self._count()
        super().rename(source, target)

    def force_folder(self, path: str) -> None:
        self._count()
        super().force_folder(path)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_save_that_fails_says_so_and_leaves_a_whole_file(path: Path, at: int) -> None:
    before = FileOffsets(str(path))
    before.save("billing", 1, {A: PLACE})
    before.close()
    storage = FileOffsets(str(path), Failing(at))
    with pytest.raises(OSError, match="planted"):
        storage.save("billing", 1, {A: PLACE._replace(offset=900)})
    storage.close()
    assert FileOffsets(str(path)).read("billing", [A])[A].offset in (700, 900)


def test_what_a_crash_left_behind_is_no_obstacle(path: Path) -> None:
    path.with_name("offsets.json.new").write_text("half a fi")
    storage = FileOffsets(str(path))
    storage.save("billing", 1, {A: PLACE})
    assert storage.read("billing", [A])[A].offset == 700
