"""When and what a consumer saves: on demand, every few seconds, and never two saves at the same time.

One save at a time, each of the places that hold when its turn has come: so an older one cannot overtake a newer one,
also where requests are repeated over a broken connection.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from tfmq.client.consumer_options import ConsumerOptions
from tfmq.client.fetcher import Fetcher
from tfmq.client.link import Link
from tfmq.client.membership import Membership
from tfmq.client.offset_storage import StoredOffset
from tfmq.client.positions import PartitionName, Place, Positions
from tfmq.client.received import ReceivedMessage
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.errors import Fenced, TfmqError, TimedOut

log = logging.getLogger("tfmq.consumer")

NEVER: Final = float("inf")


class Saving:
    """The saves of one consumer; without a membership there is nothing to save to, and nothing is done."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: Link,
        positions: Positions,
        fetcher: Fetcher,
        membership: Membership | None,
    ) -> None:
        self._options = options
        self._link = link
        self._positions = positions
        self._fetcher = fetcher
        self._membership = membership
        self._under_way: Flag | None = None

    def commit(self, message: ReceivedMessage | None, until: float) -> Operation[None]:
        """Saves all that was handed out, or one partition up to `message` and including it."""
        positions = self._positions
        if message is None:
            positions.settle_all_out()
            names: Iterable[PartitionName] = list(positions.names())
        else:
            names = [positions.settle_to(message)]
        yield from self.save(lambda: self._unsaved(names), until)

    def save(self, choose: Callable[[], dict[PartitionName, Place]], until: float) -> Operation[None]:
        """Saves what `choose` gives when its turn has come. Raises TimedOut at `until`, Fenced, what the store does."""
        while self._under_way is not None:
            if self._link.now() >= until:
                raise TimedOut("An earlier save of offsets has not ended yet.")
            yield Wait((self._under_way,), until - self._link.now())
        membership = self._membership
        if membership is None:
            return
        if membership.failure is not None:
            raise membership.failure
        places = choose()
        if not places:
            return
        under_way = self._under_way = Flag()
        try:
            stored = {name: self._stored(membership, name, place) for name, place in places.items()}
            yield from membership.save(stored, until)
            self._positions.note_saved(places)
        finally:
            self._under_way = None
            under_way.settle()

    def keep(self) -> Operation[None]:
        """Heartbeats and saves in time; ends when the place in the group is lost, raises what the store does."""
        membership, link = self._membership, self._link
        if membership is None:
            return
        automatic = self._options.commits == "auto"
        save_at = link.now() + self._options.save if automatic else NEVER
        while membership.failure is None:
            yield Wait((), max(0.0, min(membership.beat_due(), save_at) - link.now()))
            if link.now() >= save_at:
                yield from self._save_beside(link.now() + self._options.timeout)
                save_at = link.now() + self._options.save
            if link.now() >= membership.beat_due():
                yield from membership.beat()

    def renew(self) -> None:
        """In a forked child: no save is under way."""
        self._under_way = None

    def _save_beside(self, until: float) -> Operation[None]:
        """A save that nobody waits for: a passing failure is left to the next one, any other is raised."""
        try:
            yield from self.save(self._positions.unsaved, until)
        except Fenced:
            return
        except TfmqError as error:
            if not error.retriable:
                raise
            log.warning("Offsets of group %s were not saved, trying again: %s", self._options.group, error)

    def _unsaved(self, names: Iterable[PartitionName]) -> dict[PartitionName, Place]:
        unsaved = self._positions.unsaved()
        return {name: unsaved[name] for name in names if name in unsaved}

    def _stored(self, membership: Membership, name: PartitionName, place: Place) -> StoredOffset:
        incarnation = self._fetcher.feeds[name].incarnation
        return StoredOffset(place.offset, 0, incarnation, place.epoch, membership.generation_of(name))
