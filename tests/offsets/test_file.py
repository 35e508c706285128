"""Offsets in a file: whole or the old ones after any crash, never two writers, never a replaced member."""

import json
from pathlib import Path

import pytest

from journal.disk import RealDisk
from tfmq.errors import Closed, Damaged, Fenced, NotAllowed, NotSupported
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.stored import PartitionName, StoredOffset

A, B = PartitionName("orders", 0), PartitionName("orders", 11)
PLACE = StoredOffset(offset=700, index=0, incarnation=5, epoch=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "offsets.json"


def test_what_was_saved_is_read_again_with_its_generation(path: Path) -> None:
    first = FileOffsets(str(path))
    assert first.read("billing", [A, B]) == {}
    first.save("billing", 3, {A: PLACE})
    first.close()
    assert FileOffsets(str(path)).read("billing", [A, B]) == {A: PLACE._replace(generation=3)}


def test_groups_and_partitions_do_not_disturb_each_other(path: Path) -> None:
    storage = FileOffsets(str(path))
    storage.save("one", 1, {A: PLACE})
    storage.save("one", 1, {B: PLACE._replace(offset=1)})
    storage.save("two", 9, {A: PLACE._replace(offset=2)})
    assert {name: each.offset for name, each in storage.read("one", [A, B]).items()} == {A: 700, B: 1}
    assert storage.read("two", [A])[A].offset == 2


def test_a_member_that_was_replaced_is_fenced_and_changes_nothing(path: Path) -> None:
    storage = FileOffsets(str(path))
    storage.save("billing", 4, {A: PLACE})
    with pytest.raises(Fenced, match="generation 4"):
        storage.save("billing", 3, {A: PLACE._replace(offset=1)})
    assert storage.read("billing", [A])[A].offset == 700


def test_two_writers_are_one_too_many(path: Path) -> None:
    first, second = FileOffsets(str(path)), FileOffsets(str(path))
    first.read("billing", [A])
    with pytest.raises(NotAllowed, match=r"offsets\.json"):
        second.read("billing", [A])
    first.close()
    assert second.read("billing", [A]) == {}
    with pytest.raises(Closed):
        first.read("billing", [A])


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
    path.write_text(json.dumps({"version": 2, "groups": {}}))
    with pytest.raises(NotSupported, match="version 2"):
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
