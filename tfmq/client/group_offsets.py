"""The offsets of one group: at the broker, or in a storage of the user's choice. Every save carries a generation.

Each partition is for itself: one that went to another member is refused, and named, while all others are saved.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from tfmq.client.asking import ask
from tfmq.client.link import Link
from tfmq.client.offset_storage import OffsetStorage, StoredOffset, claim, fenced_partitions
from tfmq.client.positions import PartitionName
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.client.work import Run, work
from tfmq.errors import Fenced, TimedOut
from tfmq.protocol.commands import CommitOffsets, GroupOffset, ReadOffsets
from tfmq.protocol.commands import PartitionName as PartitionRow

READ_SECONDS = 30.0
"""How long a read waits for the end of a transaction that has the offsets, where it is to wait."""


class Holder(Protocol):
    """The member whose offsets these are."""

    group: str
    member: str

    @property
    def generation(self) -> int: ...

    def generation_of(self, name: PartitionName) -> int: ...


class GroupOffsets:
    """The offsets of the group of `holder`; `storage` None: the broker keeps them."""

    def __init__(self, link: Link, holder: Holder, run: Run, storage: OffsetStorage | None = None) -> None:
        self.commits = 0
        self._link = link
        self._holder = holder
        self._run = run
        self._storage = storage
        self._ended: Flag | None = None
        """Of the last save in the storage, which goes on when nobody waits for it any more."""

    def read(
        self, names: Iterable[PartitionName], while_busy: bool = True, *, others: bool = False
    ) -> Operation[dict[PartitionName, StoredOffset]]:
        """The offsets that the group has of these partitions (`others`: perhaps of more). Raises `Busy` while a
        transaction in doubt has some of them: at once, or with `while_busy` in the end.
        """
        wanted, group = list(names), self._holder.group
        if self._storage is not None:
            storage = self._storage
            return dict((yield from work(self._run, lambda: storage.read(group, wanted))))
        request = ReadOffsets(group, None if others else [PartitionRow(*name) for name in wanted])
        until = self._link.now() + READ_SECONDS
        reply = yield from ask(self._link, request, until, while_busy=while_busy)
        return {
            PartitionName(each.topic, each.partition): StoredOffset(
                each.offset, each.index, each.incarnation, each.epoch, each.generation
            )
            for each in reply.offsets
        }

    def claim(
        self, names: Iterable[PartitionName]
    ) -> Operation[tuple[dict[PartitionName, StoredOffset], set[PartitionName]]]:
        """As `read`, of partitions that were granted: a storage takes nothing of their former owners from now on. With
        those that it refuses, because it knows a later owner.
        """
        storage, group = self._storage, self._holder.group
        found: dict[PartitionName, StoredOffset] = {}
        refused: set[PartitionName] = set()
        if storage is None:
            return found, refused
        grants: dict[int, list[PartitionName]] = {}
        for name in names:
            grants.setdefault(self._holder.generation_of(name), []).append(name)
        for generation, granted in grants.items():
            while granted:
                try:
                    found |= yield from work(self._run, partial(claim, storage, group, generation, granted))
                    break
                except (
                    Fenced
                ) as fenced:  # the rest is claimed; where it stands was not said, and may have changed
                    late = fenced_partitions(fenced, granted)
                    refused.update(late)
                    granted = [name for name in granted if name not in late]
        return found, refused

    def save(
        self, offsets: Mapping[PartitionName, StoredOffset], until: float
    ) -> Operation[Collection[PartitionName]]:
        """Keeps `offsets`, which are on the disk when this ends, but for those of partitions that are another's by now:
        which these are.
        """
        refused: Collection[PartitionName] = ()
        try:
            if self._storage is not None:
                storage, group, generation = self._storage, self._holder.group, self._holder.generation
                yield from self._in_turn(lambda: storage.save(group, generation, offsets), until)
            else:
                request = self._commit(offsets)
                reply = yield from ask(self._link, request, until, unattended=True)
                refused = {PartitionName(*each) for each in reply.fenced}
        except Fenced as fenced:
            refused = fenced_partitions(fenced, offsets)
        self.commits += len(refused) < len(offsets)
        return refused

    def _in_turn(self, save: Callable[[], None], until: float) -> Operation[None]:
        """`save`, behind the end of the one before: who waited for that may be gone, but its thread is not. Raises
        TimedOut."""
        while self._ended is not None and not self._ended.done:
            if self._link.now() >= until:
                raise TimedOut("An earlier save of offsets has not ended yet.")
            yield Wait((self._ended,), until - self._link.now())
        ended = self._ended = Flag()

        def run(call: Callable[[], None], done: Callable[[Any, BaseException | None], None]) -> None:
            def told(result: Any, error: BaseException | None) -> None:
                ended.settle()
                done(result, error)

            self._run(call, told)

        yield from work(run, save)

    def renew(self) -> None:
        """In a forked child: its parent's saves are its parent's."""
        self._ended = None

    def _commit(self, offsets: Mapping[PartitionName, StoredOffset]) -> CommitOffsets:
        rows = [
            GroupOffset(name.topic, each.incarnation, name.partition, each.offset, each.index, each.epoch)
            for name, each in offsets.items()
        ]
        return CommitOffsets(self._holder.group, self._holder.member, self._holder.generation, rows)
