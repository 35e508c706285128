"""A consumer's place in its group: joining, heartbeats, leaving, and offsets saved under the generation.

The broker gives the partitions of a group to its members, by grants from a durable counter. What this member saves
carries the last one that it knows, so whoever took a partition over cannot be overwritten. Once it is no member any
more everything here raises `Fenced`, for good. A broken connection, or a restart of the broker, does not end a
membership: the next request renews it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from tfmq.client.asking import ask
from tfmq.client.link import Link
from tfmq.client.offset_storage import OffsetStorage, StoredOffset, claim
from tfmq.client.positions import PartitionName
from tfmq.client.waiting import Flag, Operation
from tfmq.client.work import Run, work
from tfmq.errors import Fenced, TfmqError
from tfmq.protocol.commands import (
    CommitOffsets,
    GrantedPartition,
    GroupOffset,
    Heartbeat,
    HeldPartition,
    JoinGroup,
    LeaveGroup,
    ReadOffsets,
    Subscription,
)
from tfmq.protocol.commands import PartitionName as PartitionRow
from tfmq.protocol.group_commands import STICKY

BEATS_A_SESSION: Final = 3
"""Heartbeats in one session time: two may be lost before the broker takes the member for dead."""


class Membership:
    """One member of one group; `storage` None: the broker keeps the offsets."""

    def __init__(
        self,
        link: Link,
        group: str,
        *,
        run: Run,
        session_ms: int,
        storage: OffsetStorage | None = None,
    ) -> None:
        self.group = group
        self.member = ""
        self.generation = 0
        self.joined = False
        self.failure: TfmqError | None = None
        self.commits = 0
        self.granted: dict[PartitionName, GrantedPartition] = {}
        """The partitions that are this member's."""
        self.changed = Flag()
        """Settled, and another one from then on, when `granted` has changed."""
        self._wishes = Subscription([], session_ms, STICKY)
        self._link = link
        self._run = run
        self._storage = storage
        self._session_ms = session_ms
        self._beat_at = 0.0

    def join(
        self, topics: Sequence[str], until: float, only: Sequence[PartitionName] | None = None
    ) -> Operation[None]:
        """Becomes a member of the group, and learns what is its."""
        self.want(topics, only)
        request = JoinGroup(self.group, self.member, *self._wishes)
        reply = yield from ask(self._link, request, until)
        self.member, self.generation, self.joined = reply.member, reply.generation, True
        self._take(reply.partitions)
        self._beat_at = self._link.now() + self.beat_seconds

    def want(self, topics: Sequence[str], only: Sequence[PartitionName] | None) -> None:
        """What the next heartbeats ask for; `only`: no other partitions than these."""
        rows = None if only is None else [PartitionRow(*name) for name in only]
        self._wishes = Subscription(list(topics), self._session_ms, STICKY, rows)

    def has(self, name: PartitionName, incarnation: int) -> bool:
        """Whether the partition of that incarnation is this member's."""
        granted = self.granted.get(name)
        return granted is not None and granted.incarnation == incarnation

    def _take(self, rows: Sequence[GrantedPartition]) -> None:
        self.granted = {PartitionName(each.topic, each.partition): each for each in rows}
        changed, self.changed = self.changed, Flag()
        changed.settle()

    @property
    def beat_seconds(self) -> float:
        return self._session_ms / 1000 / BEATS_A_SESSION

    def beat_due(self) -> float:
        """When the next heartbeat is due; infinity for who has not joined."""
        return self._beat_at if self.joined and self.failure is None else float("inf")

    def beat(self) -> Operation[None]:
        """One heartbeat; a failure that is final is kept in `failure`, a passing one is left to the next beat."""
        self._beat_at = self._link.now() + self.beat_seconds
        held = [HeldPartition(each.topic, each.incarnation, each.partition) for each in self.granted.values()]
        request = Heartbeat(self.group, self.member, self.generation, held, 0, self._wishes)
        try:
            reply = yield from ask(self._link, request, self._beat_at, unattended=True)
        except TfmqError as error:
            self._note(error)
            return
        self.generation = reply.generation
        if reply.assigned is not None:
            self._take(reply.assigned)

    def read(
        self, names: Iterable[PartitionName], while_busy: bool = True
    ) -> Operation[dict[PartitionName, StoredOffset]]:
        """The offsets that the group has of these partitions. Raises `Busy` while a transaction in doubt has some of
        them: at once, or with `while_busy` in the end.
        """
        wanted = list(names)
        if self._storage is not None:
            storage = self._storage
            return dict((yield from work(self._run, lambda: storage.read(self.group, wanted))))
        request = ReadOffsets(self.group, [PartitionRow(*name) for name in wanted])
        until = self._link.now() + self._session_ms / 1000
        reply = yield from ask(self._link, request, until, while_busy=while_busy)
        return {
            PartitionName(each.topic, each.partition): StoredOffset(
                each.offset, each.index, each.incarnation, each.epoch, each.generation
            )
            for each in reply.offsets
        }

    def claim(self, names: Iterable[PartitionName]) -> Operation[Mapping[PartitionName, StoredOffset]]:
        """As `read`, of partitions that were granted; a storage of offsets takes nothing of their former owners now."""
        storage = self._storage
        found: dict[PartitionName, StoredOffset] = {}
        if storage is not None:
            grants: dict[int, list[PartitionName]] = {}
            for name in names:
                grants.setdefault(self.generation_of(name), []).append(name)
            for generation, granted in grants.items():
                call = partial(claim, storage, self.group, generation, granted)
                found |= yield from work(self._run, call)
        return found

    def generation_of(self, name: PartitionName) -> int:
        """The number under which the partition was granted, which storages of offsets fence with."""
        granted = self.granted.get(name)
        return self.generation if granted is None else granted.grant

    def save(self, offsets: Mapping[PartitionName, StoredOffset], until: float) -> Operation[None]:
        """Keeps `offsets`; they are on the disk when this ends. Raises Fenced for a member that was replaced."""
        if self.failure is not None:
            raise self.failure
        try:
            if self._storage is not None:
                storage, generation = self._storage, self.generation
                yield from work(self._run, lambda: storage.save(self.group, generation, offsets))
            else:
                rows = [
                    GroupOffset(
                        name.topic, each.incarnation, name.partition, each.offset, each.index, each.epoch
                    )
                    for name, each in offsets.items()
                ]
                request = CommitOffsets(self.group, self.member, self.generation, rows)
                reply = yield from ask(self._link, request, until, unattended=True)
                self._beat_at = self._link.now() + (0 if reply.fenced else self.beat_seconds)
        except TfmqError as error:
            self._note(error)
            raise
        self.commits += 1

    def leave(self, until: float) -> Operation[None]:
        """Gives the place up, so that another member need not wait; best effort."""
        if not self.joined or self.failure is not None:
            return
        self.joined = False
        yield from ask(self._link, LeaveGroup(self.group, self.member, self.generation), until)

    def renew(self) -> None:
        """In a forked child: the parent is the member, this one must join by itself."""
        self.member, self.generation, self.joined, self.failure = "", 0, False, None
        self._take(())

    def _note(self, error: TfmqError) -> None:
        if isinstance(error, Fenced):
            self.failure = error
