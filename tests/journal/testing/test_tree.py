"""Names are durable when their folder was forced, and not before."""

from __future__ import annotations

import errno
import os

import pytest

from journal.testing.memory_disk import FileContent, FolderTree, SimulatedFolder, path_names, walk_tree


@pytest.fixture
def tree() -> FolderTree:
    tree = FolderTree()
    tree.add(1, "a", SimulatedFolder())
    tree.add(2, "b", SimulatedFolder())
    tree.fsync(None)
    return tree


def durable(tree: FolderTree, path: str) -> list[str]:
    return sorted(tree.folder(path).durable)


def test_a_path_is_split_at_slashes() -> None:
    assert path_names("/a//b/") == ["a", "b"]
    assert path_names("") == []


def test_a_new_name_lasts_after_the_force_of_its_folder(tree: FolderTree) -> None:
    tree.add(3, "a/x", FileContent())
    tree.fsync(tree.folder("b"))
    assert durable(tree, "a") == []
    tree.fsync(tree.folder("a"))
    assert durable(tree, "a") == ["x"]
    assert tree.pending == []


def test_a_rename_reaches_both_folders_at_once(tree: FolderTree) -> None:
    tree.add(3, "a/x", FileContent())
    tree.fsync(None)
    tree.rename(4, "a/x", "b/y")
    assert (durable(tree, "a"), durable(tree, "b")) == (["x"], [])
    tree.fsync(tree.folder("b"))
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y"])


def test_a_force_brings_what_it_builds_on(tree: FolderTree) -> None:
    tree.add(3, "a/x", FileContent())
    tree.rename(4, "a/x", "b/y")
    tree.fsync(tree.folder("b"))
    assert tree.pending == []
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y"])


def test_a_force_brings_what_it_builds_on_also_over_others_in_between(tree: FolderTree) -> None:
    tree.add(3, "a/x", FileContent())
    tree.add(4, "b/z", FileContent())
    tree.rename(5, "a/x", "b/y")
    tree.fsync(tree.folder("b"))
    assert tree.pending == [], "else the file could come back under its old name, too"
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y", "z"])


def test_a_removed_name_may_be_used_again(tree: FolderTree) -> None:
    first, second = FileContent(b"1"), FileContent(b"2")
    tree.add(3, "a/x", first)
    tree.remove(4, "a/x")
    tree.add(5, "a/x", second)
    tree.fsync(tree.folder("a"))
    assert tree.folder("a").durable == {"x": second}


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda tree: tree.file("none"), errno.ENOENT),
        (lambda tree: tree.file("a"), errno.EISDIR),
        (lambda tree: tree.folder("a/none"), errno.ENOENT),
        (lambda tree: tree.folder("f"), errno.ENOTDIR),
        (lambda tree: tree.add(9, "a", SimulatedFolder()), errno.EEXIST),
        (lambda tree: tree.add(9, "", SimulatedFolder()), errno.EBUSY),
        (lambda tree: tree.rename(9, "none", "x"), errno.ENOENT),
        (lambda tree: tree.rename(9, "f", "a"), errno.EISDIR),
        (lambda tree: tree.rename(9, "a", "f"), errno.ENOTDIR),
    ],
)
def test_errors_are_the_systems(tree: FolderTree, call, number: int) -> None:  # type: ignore[no-untyped-def]
    tree.add(3, "f", FileContent())
    with pytest.raises(OSError, match=os.strerror(number)):
        call(tree)


def test_a_folder_that_holds_something_is_not_replaced(tree: FolderTree) -> None:
    tree.add(3, "b/x", FileContent())
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        tree.rename(4, "a", "b")
    assert [path for path, _ in walk_tree(tree.root)] == ["a", "b", "b/x"]
    tree.rename(4, "b", "a")
    assert [path for path, _ in walk_tree(tree.root)] == ["a", "a/x"]


def test_walking_tells_every_path_in_order(tree: FolderTree) -> None:
    tree.add(3, "b/x", FileContent())
    tree.add(4, "c", FileContent())
    assert [path for path, _ in walk_tree(tree.root)] == ["a", "b", "b/x", "c"]
