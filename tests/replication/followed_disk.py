"""A recording disk whose operations a follower applies at once, to its own disk, and is compared after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from journal.testing import SimulatedDisk
from journal.testing.memory_disk import FileContent, SimulatedFolder
from tfmq.replication.entries import EntryKind, Position, decode_entry, encode_entry
from tfmq.replication.operations import OperationApplier, decode_operations, is_replicated
from tfmq.replication.recording_disk import Body, RecordingDisk

DATA = "/data"


class Follower:
    """Applies bodies, as they come out of the store, to the folder DATA of its own disk."""

    def __init__(self, disk: SimulatedDisk | None = None) -> None:
        self.disk = SimulatedDisk() if disk is None else disk
        if not self.disk.exists(DATA):
            self.disk.make_folder(DATA)
        self.applier = OperationApplier(self.disk, DATA)
        self.position = Position(1, 0)

    def follow(self, body: Body) -> None:
        self.position = Position(1, self.position.slot + 1)
        stored = encode_entry(EntryKind.OPERATIONS, self.position, 0, body.parts, body.operation_count)
        entry = decode_entry(stored, self.position)
        operations = list(decode_operations(entry.body))
        assert len(operations) == entry.operation_count == body.operation_count
        assert len(entry.body) == body.size_bytes
        self.applier.apply(operations)


class Tally:
    """What was compared in all lives of a test. `each`: called with the disk after each comparison."""

    def __init__(self, each: Callable[[FollowedDisk], None] = lambda disk: None) -> None:
        self.compared = 0
        """How many operations were followed by a comparison of the whole folders."""
        self.kinds: Counter[int] = Counter()
        """Number of operations of each kind."""
        self.each = each


class FollowedDisk(RecordingDisk):
    """Each operation is a body of its own, and followed before its call returns.

    What else tests use of a simulated disk is that of the disk below.
    """

    def __init__(
        self, inner: SimulatedDisk | None = None, follower: Follower | None = None, tally: Tally | None = None
    ) -> None:
        self.simulated = SimulatedDisk() if inner is None else inner
        self.follower = Follower() if follower is None else follower
        self.tally = Tally() if tally is None else tally
        super().__init__(self.simulated, DATA, wake=self.follow, cut_bytes=1)

    def follow(self) -> None:
        bodies = self.take()
        for body in bodies:
            self.follower.follow(body)
            self.tally.kinds[body.parts[0][0]] += 1
            assert body.operation_count == 1
        assert len(bodies) == 1, "no operation without a comparison after it"
        self.compare()
        self.tally.compared += 1
        self.tally.each(self)

    def compare(self) -> None:
        difference = first_difference(self.simulated, self.follower.disk)
        assert difference is None, f"after operation {self.number}: {difference}"

    def __getattr__(self, name: str) -> Any:
        if name == "simulated":
            raise AttributeError(name)
        return getattr(self.simulated, name)

    @property
    def after(self) -> Any:
        return self.simulated.after

    @after.setter
    def after(self, call: Any) -> None:
        self.simulated.after = call

    @property
    def space_bytes(self) -> int | None:
        return self.simulated.space_bytes

    @space_bytes.setter
    def space_bytes(self, value: int | None) -> None:
        self.simulated.space_bytes = value

    def crash(self, *args: Any, **options: Any) -> FollowedDisk:
        """What a crash leaves, followed by a follower that has a copy of it."""
        left = self.simulated.crash(*args, **options)
        is_whole = not any(content.lost for _, content in self.simulated.all_files())
        if options.get("keep") == "everything" and is_whole:
            # Only the process died, and no fsync had failed before: what the follower has is what is there.
            following = FollowedDisk(left, self.follower, self.tally)
            following.compare()
            return following
        return FollowedDisk(left, Follower(copy_of(left)), self.tally)


def copy_of(disk: SimulatedDisk) -> SimulatedDisk:
    """A copy of the replicated files, as a follower gets it that begins with a snapshot."""
    copy = SimulatedDisk()
    copy.make_folder(DATA)
    folder = disk.tree.find(DATA)
    if isinstance(folder, SimulatedFolder):
        _copy(copy, folder, "")
    return copy


def _copy(disk: SimulatedDisk, folder: SimulatedFolder, prefix: str) -> None:
    for name, node in folder.entries.items():
        if not is_replicated(prefix + name):
            continue
        if isinstance(node, SimulatedFolder):
            disk.make_folder(f"{DATA}/{prefix}{name}")
            _copy(disk, node, f"{prefix}{name}/")
        else:
            disk.write_file(f"{DATA}/{prefix}{name}", bytes(node.data))


def first_difference(one: SimulatedDisk, other: SimulatedDisk) -> str | None:
    """Where the folders DATA of two disks differ as readers see them, in what is replicated; None: nowhere."""
    left, right = one.tree.find(DATA), other.tree.find(DATA)
    if not isinstance(left, SimulatedFolder) or not isinstance(right, SimulatedFolder):
        return None if left is None else f"{DATA} is {left} and {right}"
    return _difference(left, right, "")


def _difference(left: SimulatedFolder, right: SimulatedFolder, prefix: str) -> str | None:
    if left.entries.keys() != right.entries.keys():
        names = {name for name in left.entries.keys() ^ right.entries.keys() if is_replicated(prefix + name)}
        if names:
            return f"{prefix}: only one of them has {sorted(names)}"
    for name, node in left.entries.items():
        other = right.entries.get(name)
        if isinstance(node, FileContent) and isinstance(other, FileContent):
            if node.data != other.data and is_replicated(prefix + name):
                return f"{prefix}{name}: {len(node.data)} and {len(other.data)} bytes, or others"
        elif isinstance(node, SimulatedFolder) and isinstance(other, SimulatedFolder):
            found = _difference(node, other, f"{prefix}{name}/") if is_replicated(prefix + name) else None
            if found is not None:
                return found
        elif is_replicated(prefix + name):
            return f"{prefix}{name}: one is a folder"
    return None
