"""What a power cut could leave of a simulated disk.

A state is one choice for everything that was unforced: for each folder operation whether it reached the
platter, for each sector written which of its versions stands there, for each file which of its sizes.
`Moment` keeps a disk as it is at one boundary; `crash_states` gives its states: all of them when they are
few, a seeded sample when they are many, each distinct one once (two choices often leave the same bytes).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from journal.testing.content import SECTOR_BYTES, Content, ContentImage, Version
from journal.testing.simulated_disk import SimulatedDisk
from journal.testing.tree import Folder, Node, Operation, apply

ATTEMPTS_PER_STATE = 4
"""A sample gives up on finding new states after this many draws for each state asked for."""

CHANCES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""How probable it is, in one draw, that something behind the draw's prefix reached the platter."""


class Choice(NamedTuple):
    """One state: the operations that took place, and for each file (size, version of each sector)."""

    operations: tuple[bool, ...]
    files: tuple[tuple[int, ...], ...]


class Moment:
    """A disk at one boundary; it stays as it is while the disk goes on."""

    def __init__(self, disk: SimulatedDisk) -> None:
        with disk.mutex:
            self.root = disk.tree.root
            self.operations: tuple[Operation, ...] = tuple(disk.tree.pending)
            self.number = disk.number
            self._entries: dict[Folder, dict[str, Node]] = {}
            self._images: dict[Content, ContentImage] = {}
            self._collect()
        self._changed = [(content, image) for content, image in self._images.items() if image.pending]

    def count(self) -> int:
        """How many choices there are; distinct states are fewer."""
        total = 1 << len(self.operations)
        for _, image in self._changed:
            total *= len({size for _, size in image.sizes})
            for versions in image.versions.values():
                total *= len(versions)
        return total

    def crash(self, generator: random.Random | None = None, keep: str = "some") -> SimulatedDisk:
        """One state: `keep` "nothing" that is unforced, "everything", or what `generator` draws."""
        if keep == "nothing":
            return self.build(self._prefix(0))
        if keep == "everything":
            return self.build(self._prefix(self.number))
        return self.build(self._draw(generator or random.Random(0)))

    def choices(self, limit: int, generator: random.Random) -> Iterator[Choice]:
        """All choices if there are at most `limit`, else prefixes of the calls first, then draws without an
        end.
        """
        if self.count() <= limit:
            yield from self._all()
            return
        numbers = {operation.number for operation in self.operations}
        numbers.update(change.number for _, image in self._changed for change in image.pending)
        for number in sorted({0, *numbers}):
            yield self._prefix(number)
        for _ in range(limit * ATTEMPTS_PER_STATE):
            yield self._draw(generator)

    def build(self, choice: Choice) -> SimulatedDisk:
        """The disk that `choice` leaves; its `digest` names the state."""
        entries = self._entries
        if any(choice.operations):
            entries = {folder: dict(names) for folder, names in entries.items()}
            for operation, reached in zip(self.operations, choice.operations, strict=True):
                if reached:
                    apply(operation, entries.__getitem__)
        contents = {
            content: self._content(image, chosen)
            for (content, image), chosen in zip(self._changed, choice.files, strict=True)
        }
        disk = SimulatedDisk()
        digest = hashlib.blake2b(digest_size=16)
        self._plant(self.root, disk.tree.root, entries, contents, digest)
        disk.digest = digest.digest()
        return disk

    def _collect(self) -> None:
        """Every file and folder that is on the platter or could get there."""
        nodes: list[Node] = [self.root]
        for operation in self.operations:
            for entry in operation.entries:
                nodes.append(entry.folder)
                if entry.node is not None:
                    nodes.append(entry.node)
        while nodes:
            node = nodes.pop()
            if isinstance(node, Content):
                if node not in self._images:
                    self._images[node] = node.image()
            elif node not in self._entries:
                self._entries[node] = dict(node.durable)
                nodes.extend(node.durable.values())

    def _plant(
        self,
        old: Folder,
        new: Folder,
        entries: dict[Folder, dict[str, Node]],
        contents: dict[Content, tuple[bytes, bytes]],
        digest: hashlib.blake2b,
    ) -> None:
        """Copies a folder of the state into the new disk, and everything below it."""
        names = entries[old]
        for name in sorted(names):
            node = names[name]
            digest.update(name.encode())
            if isinstance(node, Folder):
                folder = new.entries[name] = Folder()
                digest.update(b"/{")
                self._plant(node, folder, entries, contents, digest)
                digest.update(b"}")
            else:
                data, data_digest = contents.get(node) or self._content(self._images[node], ())
                new.entries[name] = Content(data)
                digest.update(data_digest)
        new.durable = dict(new.entries)

    def _content(self, image: ContentImage, chosen: tuple[int, ...]) -> tuple[bytes, bytes]:
        """The bytes that a choice leaves of a file, and their digest. () is the file as it was forced."""
        found = image.contents.get(chosen)
        if found is None:
            data = _assemble(image, chosen) if chosen else image.durable
            found = image.contents[chosen] = data, b"\0" + hashlib.blake2b(data, digest_size=16).digest()
        return found

    def _all(self) -> Iterator[Choice]:
        files = [_all_of_file(image) for _, image in self._changed]
        for reached in itertools.product((False, True), repeat=len(self.operations)):
            for chosen in itertools.product(*files):
                yield Choice(reached, chosen)

    def _prefix(self, number: int) -> Choice:
        """Everything up to call `number` reached the platter, nothing behind it."""
        files = tuple(
            (_size_at(image, number), *(_at(versions, number) for versions in image.versions.values()))
            for _, image in self._changed
        )
        return Choice(tuple(operation.number <= number for operation in self.operations), files)

    def _draw(self, generator: random.Random) -> Choice:
        """A prefix of the calls, and behind it whatever the dice say."""
        number = generator.randint(0, self.number) if generator.random() < 0.5 else 0
        chance = generator.choice(CHANCES)
        operations = tuple(
            operation.number <= number or generator.random() < chance for operation in self.operations
        )
        return Choice(
            operations, tuple(_draw(image, number, chance, generator) for _, image in self._changed)
        )


def crash_states(
    disk: SimulatedDisk | Moment, limit: int, generator: random.Random
) -> Iterator[SimulatedDisk]:
    """At most `limit` distinct states that a power cut now could leave, each as a disk with its `digest`."""
    moment = disk if isinstance(disk, Moment) else Moment(disk)
    seen: set[bytes] = set()
    for choice in moment.choices(limit, generator):
        state = moment.build(choice)
        if state.digest not in seen:
            seen.add(state.digest)
            yield state
            if len(seen) >= limit:
                return


def _assemble(image: ContentImage, chosen: tuple[int, ...]) -> bytes:
    size, *versions = chosen
    data = bytearray(image.durable)
    for (sector, known), index in zip(image.versions.items(), versions, strict=True):
        first = sector * SECTOR_BYTES
        if first > len(data):
            data.extend(bytes(first - len(data)))
        data[first : first + SECTOR_BYTES] = known[index].data
    return bytes(data[:size]).ljust(size, b"\0")


def _all_of_file(image: ContentImage) -> list[tuple[int, ...]]:
    sizes = sorted({size for _, size in image.sizes})
    versions = [range(len(known)) for known in image.versions.values()]
    return list(itertools.product(sizes, *versions))


def _at(versions: list[Version], number: int) -> int:
    """The index of the last version that change `number` or an earlier one made."""
    index = 0
    while index + 1 < len(versions) and versions[index + 1].number <= number:
        index += 1
    return index


def _size_at(image: ContentImage, number: int) -> int:
    return [size for changed, size in image.sizes if changed <= number][-1]


def _draw(image: ContentImage, number: int, chance: float, generator: random.Random) -> tuple[int, ...]:
    chosen = [_size_at(image, number)]
    if generator.random() < chance:
        chosen[0] = generator.choice([size for changed, size in image.sizes if changed >= number] or chosen)
    for versions in image.versions.values():
        index = _at(versions, number)
        if generator.random() < chance:
            index = generator.randint(index, len(versions) - 1)
        chosen.append(index)
    return tuple(chosen)
