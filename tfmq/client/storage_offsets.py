"""The offsets of a consumer for whoever saves them in its storage himself: in the transaction of his results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tfmq.client.assignment import place_of
from tfmq.client.consuming import Consuming
from tfmq.client.going_back import void_lost
from tfmq.client.positions import PartitionName, Place
from tfmq.client.received import ReceivedMessage
from tfmq.errors import BadRequest, Fenced
from tfmq.offsets.storage import OffsetStorage, StoredOffset


class Standing(NamedTuple):
    """Where a consumer stood: `offsets` is what the storage gets, `places` what is saved then.

    The last two are taken and told under the consumer's own lock. `fenced`: something that was handed out before is
    another member's by now, and the transaction may have results of it.
    """

    consuming: Consuming
    lock: Any
    storage: OffsetStorage | None
    group: str
    offsets: Mapping[PartitionName, StoredOffset]
    places: Mapping[PartitionName, Place]
    fenced: Fenced | None = None

    def saved(self) -> None:
        """It is committed: the consumer need not save it again."""
        with self.lock:
            self.consuming.positions.saved_elsewhere(self.places)

    def entrusted(self) -> None:
        """It is in a transaction whose end nobody tells: the consumer does not wait for that."""
        with self.lock:
            self.consuming.positions.entrusted(self.places)

    def refused(self, lost: Collection[PartitionName], kept: Mapping[PartitionName, StoredOffset]) -> None:
        """The partitions in `lost` are another member's, and the transaction is rolled back: what it had of the others
        is handed out again, from where `kept`, what is committed, says. Nothing more is read of the lost ones.
        """
        consuming, positions = self.consuming, self.consuming.positions
        with self.lock:
            for name in self.places.keys() - set(lost):
                row = kept.get(name)
                if name not in consuming.fetcher.feeds:  # gone meanwhile
                    continue
                if row is not None and row.incarnation == positions.incarnation(name):
                    consuming.go_to(name, place_of(name, row))
                else:
                    consuming.go_to(name, positions.start_of(name))
            generation_of = consuming.member().generation_of
            consuming.assignment.refused(
                [name for name in lost if generation_of(name) == self.offsets[name].generation]
            )
            positions.said_lost(lost)


def standing(consumer: Any, message: ReceivedMessage[Any] | None) -> Standing:
    """Where `consumer`, of any face, stands behind everything that it handed out, or behind `message` in its partition.

    Raises `TypeError` for what is no consumer, `BadRequest` for one that saves by itself and for a message that it did
    not hand out, `Closed`; and `Fenced` for a message that is another member's.
    """
    consuming = getattr(consumer, "_core", None)
    if not isinstance(consuming, Consuming):
        raise TypeError(f"commit_offsets takes a tfmq consumer, not {type(consumer).__name__}.")
    lock = consumer._driver.lock
    with lock:
        membership = consuming.member()
        if consuming.options.commits != "manual":
            raise BadRequest(
                'commit_offsets needs a consumer with commits="manual": otherwise it saves offsets by itself, before'
                " the transaction is committed."
            )
        if membership.failure is not None:
            raise membership.failure
        positions = consuming.positions
        positions.ledgers.agree("transaction")
        fenced = None
        if message is None:
            void_lost(consuming)
            try:
                positions.check_lost()
            except Fenced as lost:
                fenced = lost
        places = positions.unsaved_out() if message is None else dict([positions.through(message)])
        offsets = {
            name: StoredOffset(
                place.offset, 0, positions.incarnation(name), place.epoch, membership.generation_of(name)
            )
            for name, place in places.items()
        }
        return Standing(
            consuming,
            lock,
            consuming.options.storage,
            membership.group,
            offsets,
            places,
            fenced,
        )
