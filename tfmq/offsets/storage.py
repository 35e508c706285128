"""Offset storages: the interface, its data types, and helpers that storages share.

A storage has a `StoredOffset` for each group and partition. Its generation is that of the assignment with which the
offset was committed. Generations come from a durable counter, so a new owner of a partition has a higher generation
than all former owners. A storage rejects commits with a lower generation. So if a member has lost the partition without
noticing, it cannot commit. By default the broker stores the offsets, and no storage of this interface is used (see
`tfmq.client.consumer.offset_commit`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from tfmq.errors import Fenced

NO_OFFSET: Final = -1
"""Stored in place of the offset of a partition that was claimed and has no committed offset."""


class PartitionName(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class StoredOffset(NamedTuple):
    """Committed offset of a group in one partition.

    Reading continues at byte `offset`. If the record there is a compressed batch, its first `index` messages are left
    out; otherwise `index` is 0. `incarnation`: that of the topic. `epoch`: the log's epoch when the offset was read.
    `generation`: that of the assignment of the partition to the member that commits. In a call of `save`, 0 stands for
    the argument `generation` of the call.
    """

    offset: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    incarnation: int = 0
    epoch: int = -1
    generation: int = 0


@runtime_checkable
class OffsetStorage(Protocol):
    """Storage of offsets. Its methods may wait for a disk or a network; only one of them is called at a time.

    If a storage has `claim` (see `ClaimingStorage`), the new owner of a partition calls `claim`, which fences members
    that have lost the partition without noticing. If a storage has no `claim`, the new owner calls `read`, and these
    members are fenced only by its first commit.
    """

    def read(self, group: str, partitions: Sequence[PartitionName]) -> Mapping[PartitionName, StoredOffset]:
        """Return the committed offsets of these partitions. Partitions without an offset are left out."""
        ...

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        """Commit `offsets`, each with its own generation, or with `generation` if its own is 0. Durable on return.

        If a partition has a higher stored generation, it is not changed; after all others are committed, Fenced (see
        `fenced`) is raised and names it. After any other error it is unknown what was committed.
        """
        ...

    def close(self) -> None:
        """Release all resources; a second call has no effect."""
        ...


@runtime_checkable
class ClaimingStorage(OffsetStorage, Protocol):
    """Storage that fences the former owners of a partition when a new owner calls `claim`, before its first commit."""

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> Mapping[PartitionName, StoredOffset]:
        """Set the generation of these partitions and return their offsets, in one atomic step.

        Partitions without an offset are left out of the result. After the call, commits with a lower generation are
        rejected. If partitions have a higher generation, claims all others and raises Fenced (see `fenced`).
        """
        ...


def under(generation: int, row: StoredOffset) -> StoredOffset:
    """Return `row` with its own generation, or with `generation` if its own is 0."""
    return row if row.generation else row._replace(generation=generation)


def claim(
    storage: OffsetStorage, group: str, generation: int, partitions: Sequence[PartitionName]
) -> Mapping[PartitionName, StoredOffset]:
    """Claim partitions in `storage` and return their offsets; if the storage cannot claim, only read the offsets."""
    if isinstance(storage, ClaimingStorage):
        return storage.claim(group, generation, partitions)
    return storage.read(group, partitions)


def fenced(where: str, group: str, kept: Mapping[PartitionName, int]) -> Fenced:
    """Return the error for the partitions `kept`, whose stored generations are higher. `where`: the storage's name."""
    names = ", ".join(f"{name} (generation {kept[name]})" for name in sorted(kept))
    return Fenced(
        f"{where}: another member of group {group} has taken over {names}. (After a broker was set up again: remove the"
        " group's offsets there, because they are of the former one.)",
        partitions=[list(name) for name in sorted(kept)],
    )


def fenced_partitions(error: Fenced, asked: Iterable[PartitionName]) -> Collection[PartitionName]:
    """Return the partitions that `error` names. If it names no partitions, return `asked`, those of the failed call."""
    named = error.details.get("partitions")
    return frozenset(asked) if named is None else frozenset(PartitionName(*each) for each in named)
