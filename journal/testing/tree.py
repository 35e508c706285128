"""The folders of a simulated disk: what is seen, what is on the platter, and the entries on the way.

A folder's entries are durable only after a force of that folder. Until then each create, rename or removal
may or may not have reached the platter, in any combination: no order is assumed, but one operation is atomic,
a rename too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from journal.testing.content import Content


@dataclass(eq=False)
class Folder:
    """A folder: the entries that are seen, and those on the platter."""

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node: TypeAlias = Content | Folder
EntriesOf: TypeAlias = Callable[[Folder], dict[str, Node]]


class Entry(NamedTuple):
    """`name` in `folder` now means `node`; None: no longer means `old`."""

    folder: Folder
    name: str
    node: Node | None
    old: Node | None


class Operation(NamedTuple):
    """An unforced change of folders: all of its entries reach the platter, or none."""

    number: int
    entries: tuple[Entry, ...]

    def touches(self, folder: Folder) -> bool:
        return any(entry.folder is folder for entry in self.entries)


class Tree:
    """The names of a disk. Paths are split at "/"; "" is the root."""

    def __init__(self, root: Folder | None = None) -> None:
        self.root = root or Folder()
        self.pending: list[Operation] = []

    def find(self, path: str) -> Node | None:
        """What is at `path`, or None."""
        node: Node = self.root
        for name in parts(path):
            if not isinstance(node, Folder) or name not in node.entries:
                return None
            node = node.entries[name]
        return node

    def file(self, path: str) -> Content:
        """The file at `path`, or the error that the system would give."""
        node = self.find(path)
        if node is None:
            raise failure(errno.ENOENT, path)
        if isinstance(node, Folder):
            raise failure(errno.EISDIR, path)
        return node

    def folder(self, path: str) -> Folder:
        """The folder at `path`, or the error that the system would give."""
        node = self.find(path)
        if node is None:
            raise failure(errno.ENOENT, path)
        if not isinstance(node, Folder):
            raise failure(errno.ENOTDIR, path)
        return node

    def add(self, number: int, path: str, node: Node) -> None:
        """A new name."""
        folder, name = self._place(path)
        if name in folder.entries:
            raise failure(errno.EEXIST, path)
        folder.entries[name] = node
        self.pending.append(Operation(number, (Entry(folder, name, node, None),)))

    def remove(self, number: int, path: str) -> None:
        """A name goes."""
        folder, name = self._place(path)
        old = folder.entries.pop(name)
        self.pending.append(Operation(number, (Entry(folder, name, None, old),)))

    def rename(self, number: int, source: str, target: str) -> None:
        """A name moves, over a file that may be there."""
        old_folder, old_name = self._place(source)
        new_folder, new_name = self._place(target)
        node = old_folder.entries.get(old_name)
        if node is None:
            raise failure(errno.ENOENT, source)
        replaced = new_folder.entries.get(new_name)
        if isinstance(replaced, Folder) and replaced.entries:
            raise failure(errno.ENOTEMPTY, target)
        if replaced is not None and isinstance(replaced, Folder) != isinstance(node, Folder):
            raise failure(errno.EISDIR if isinstance(replaced, Folder) else errno.ENOTDIR, target)
        del old_folder.entries[old_name]
        new_folder.entries[new_name] = node
        entries = (Entry(old_folder, old_name, None, node), Entry(new_folder, new_name, node, replaced))
        self.pending.append(Operation(number, entries))

    def force(self, folder: Folder | None) -> None:
        """The pending operations of `folder` (None: all) reach the platter, with those that they build on."""
        chosen = self.pending if folder is None else _closure(self.pending, folder)
        for operation in chosen:
            apply(operation, lambda changed: changed.durable)
        reached = {operation.number for operation in chosen}
        self.pending = [operation for operation in self.pending if operation.number not in reached]

    def _place(self, path: str) -> tuple[Folder, str]:
        names = parts(path)
        if not names:
            raise failure(errno.EBUSY, path)
        return self.folder("/".join(names[:-1])), names[-1]


def parts(path: str) -> list[str]:
    """The names in a path."""
    return [name for name in path.split("/") if name]


def failure(number: int, path: str) -> OSError:
    """The error that the system would raise."""
    return OSError(number, os.strerror(number), path)


def apply(operation: Operation, entries_of: EntriesOf) -> None:
    """Puts an operation on the entries that `entries_of` gives for a folder.

    A removal takes only what it meant: if the name means something else there, it stays.
    """
    for entry in operation.entries:
        entries = entries_of(entry.folder)
        if entry.node is not None:
            entries[entry.name] = entry.node
        elif entries.get(entry.name) is entry.old:
            entries.pop(entry.name, None)


def walk(folder: Folder, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every path below a folder that is seen, folders before what they hold, sorted."""
    for name, node in sorted(folder.entries.items()):
        yield f"{path}{name}", node
        if isinstance(node, Folder):
            yield from walk(node, f"{path}{name}/")


def _closure(pending: Iterable[Operation], folder: Folder) -> list[Operation]:
    """The operations of `folder`, and all earlier ones on the same names."""
    chosen: list[Operation] = []
    names: set[tuple[int, str]] = set()
    for operation in reversed(list(pending)):
        keys = {(id(entry.folder), entry.name) for entry in operation.entries}
        if operation.touches(folder) or keys & names:
            chosen.append(operation)
            names |= keys
    return chosen[::-1]
