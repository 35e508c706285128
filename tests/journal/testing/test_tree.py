"""Names are durable when their folder was forced, and not before."""

from __future__ import annotations

import errno
import os

import pytest

from journal.testing.memory_disk import Content, Folder, Tree, parts, walk


@pytest.fixture
def tree() -> Tree:
    tree = Tree()
    tree.add(1, "a", Folder())
    tree.add(2, "b", Folder())
    tree.force(None)
    return tree


def durable(tree: Tree, path: str) -> list[str]:
    return sorted(tree.folder(path).durable)


def test_a_path_is_split_at_slashes() -> None:
    assert parts("/a//b/") == ["a", "b"]
    assert parts("") == []


def test_a_new_name_lasts_after_the_force_of_its_folder(tree: Tree) -> None:
    tree.add(3, "a/x", Content())
    tree.force(tree.folder("b"))
    assert durable(tree, "a") == []
    tree.force(tree.folder("a"))
    assert durable(tree, "a") == ["x"]
    assert tree.pending == []


def test_a_rename_reaches_both_folders_at_once(tree: Tree) -> None:
    tree.add(3, "a/x", Content())
    tree.force(None)
    tree.rename(4, "a/x", "b/y")
    assert (durable(tree, "a"), durable(tree, "b")) == (["x"], [])
    tree.force(tree.folder("b"))
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y"])


def test_a_force_brings_what_it_builds_on(tree: Tree) -> None:
    tree.add(3, "a/x", Content())
    tree.rename(4, "a/x", "b/y")
    tree.force(tree.folder("b"))
    assert tree.pending == []
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y"])


def test_a_force_brings_what_it_builds_on_also_over_others_in_between(tree: Tree) -> None:
    tree.add(3, "a/x", Content())
    tree.add(4, "b/z", Content())
    tree.rename(5, "a/x", "b/y")
    tree.force(tree.folder("b"))
    assert tree.pending == [], "else the file could come back under its old name, too"
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y", "z"])


def test_a_removed_name_may_be_used_again(tree: Tree) -> None:
    first, second = Content(b"1"), Content(b"2")
    tree.add(3, "a/x", first)
    tree.remove(4, "a/x")
    tree.add(5, "a/x", second)
    tree.force(tree.folder("a"))
    assert tree.folder("a").durable == {"x": second}


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda tree: tree.file("none"), errno.ENOENT),
        (lambda tree: tree.file("a"), errno.EISDIR),
        (lambda tree: tree.folder("a/none"), errno.ENOENT),
        (lambda tree: tree.folder("f"), errno.ENOTDIR),
        (lambda tree: tree.add(9, "a", Folder()), errno.EEXIST),
        (lambda tree: tree.add(9, "", Folder()), errno.EBUSY),
        (lambda tree: tree.rename(9, "none", "x"), errno.ENOENT),
        (lambda tree: tree.rename(9, "f", "a"), errno.EISDIR),
        (lambda tree: tree.rename(9, "a", "f"), errno.ENOTDIR),
    ],
)
def test_errors_are_the_systems(tree: Tree, call, number: int) -> None:  # type: ignore[no-untyped-def]
    tree.add(3, "f", Content())
    with pytest.raises(OSError, match=os.strerror(number)):
        call(tree)


def test_a_folder_that_holds_something_is_not_replaced(tree: Tree) -> None:
    tree.add(3, "b/x", Content())
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        tree.rename(4, "a", "b")
    assert [path for path, _ in walk(tree.root)] == ["a", "b", "b/x"]
    tree.rename(4, "b", "a")
    assert [path for path, _ in walk(tree.root)] == ["a", "a/x"]


def test_walking_tells_every_path_in_order(tree: Tree) -> None:
    tree.add(3, "b/x", Content())
    tree.add(4, "c", Content())
    assert [path for path, _ in walk(tree.root)] == ["a", "b", "b/x", "c"]
