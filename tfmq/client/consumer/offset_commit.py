"""The offsets of one group: at the broker, or in a storage of the user's choice. Every save carries a generation.

Each partition is for itself: one that went to another member is refused, and named, while all others are saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from tfmq.client.connection.connection import Link
from tfmq.client.connection.requests import ask
from tfmq.client.consumer.membership import Membership
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.options import ConsumerOptions
from tfmq.client.consumer.positions import Place, Positions
from tfmq.client.operation import Flag, Operation, Run, Wait, work
from tfmq.errors import Fenced, TfmqError, TimedOut
from tfmq.offsets.storage import OffsetStorage, PartitionName, StoredOffset, claim, fenced_partitions
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


# When and what a consumer saves: on demand, every few seconds, and never two saves at the same time.
#
# One save at a time, each of the places that hold when its turn has come: so an older one cannot overtake a newer one,
# also where requests are repeated over a broken connection.

log = logging.getLogger("tfmq.consumer")

NEVER: Final = float("inf")


class Saving:
    """The saves of one member."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: Link,
        positions: Positions,
        membership: Membership,
        offsets: GroupOffsets,
    ) -> None:
        self.refused: Callable[[Collection[PartitionName]], None] = lambda names: None
        """Called with partitions that were another's when they were to be saved."""
        self._options = options
        self._link = link
        self._positions = positions
        self._membership = membership
        self._offsets = offsets
        self._under_way: Flag | None = None

    def commit(self, message: ReceivedMessage | None, until: float) -> Operation[None]:
        """Saves all that was handed out, or one partition up to `message` and including it. Raises Fenced where some of
        that is another's by now; all else is saved."""
        positions = self._positions
        if message is None:
            positions.settle_all_out()
            names: Iterable[PartitionName] = list(positions.names())
        else:
            names = [positions.settle_to(message)]
        refused = yield from self.save(lambda: self._unsaved(names), until)
        positions.check_lost(refused, message)

    def save(
        self, choose: Callable[[], Mapping[PartitionName, Place]], until: float
    ) -> Operation[Collection[PartitionName]]:
        """Saves what `choose` gives when its turn has come; which of it is another's by now. Raises TimedOut at
        `until`, and what the store does."""
        while self._under_way is not None:
            if self._link.now() >= until:
                raise TimedOut("An earlier save of offsets has not ended yet.")
            yield Wait((self._under_way,), until - self._link.now())
        places = choose()
        if not places:
            return ()
        under_way = self._under_way = Flag()
        try:
            stored = {name: self._stored(name, place) for name, place in places.items()}
            refused = yield from self._offsets.save(stored, until)
            self._positions.note_saved({n: place for n, place in places.items() if n not in refused})
        finally:
            self._under_way = None
            under_way.settle()
        lost = [name for name in refused if self._generation(name) == stored[name].generation]
        if lost:
            self.refused(lost)
        return refused

    def keep(self) -> Operation[None]:
        """Never ends: saves in time. Raises what the store does and does not pass."""
        while True:
            yield Wait((), self._options.save)
            until = self._link.now() + self._options.timeout
            try:
                yield from self.save(self._positions.unsaved, until)
            except TfmqError as error:
                if not error.retriable:
                    raise
                log.warning(
                    "Offsets of group %s were not saved, trying again: %s", self._options.group, error
                )

    def renew(self) -> None:
        """In a forked child: no save is under way."""
        self._under_way = None
        self._offsets.renew()

    def _unsaved(self, names: Iterable[PartitionName]) -> dict[PartitionName, Place]:
        unsaved = self._positions.unsaved()
        return {name: unsaved[name] for name in names if name in unsaved}

    def _generation(self, name: PartitionName) -> int:
        return self._membership.generation_of(name)

    def _stored(self, name: PartitionName, place: Place) -> StoredOffset:
        incarnation = self._positions.incarnation(name)
        return StoredOffset(place.offset, 0, incarnation, place.epoch, self._generation(name))
