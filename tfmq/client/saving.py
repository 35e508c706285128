"""When and what a consumer saves: on demand, every few seconds, and never two saves at the same time.

One save at a time, each of the places that hold when its turn has come: so an older one cannot overtake a newer one,
also where requests are repeated over a broken connection.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from tfmq.client.consumer_options import ConsumerOptions
from tfmq.client.group_offsets import GroupOffsets
from tfmq.client.link import Link
from tfmq.client.membership import Membership
from tfmq.client.offset_storage import StoredOffset
from tfmq.client.positions import PartitionName, Place, Positions
from tfmq.client.received import ReceivedMessage
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.errors import TfmqError, TimedOut

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
