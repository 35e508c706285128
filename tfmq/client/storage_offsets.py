"""The offsets of a consumer for whoever saves them in its storage himself: in the transaction of his results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tfmq.client.consuming import Consuming
from tfmq.client.positions import PartitionName, Place
from tfmq.client.received import ReceivedMessage
from tfmq.errors import BadRequest
from tfmq.offsets.stored import OffsetStorage, StoredOffset


class Standing(NamedTuple):
    """Where a consumer stood: `offsets` is what the storage gets, `places` what is saved then.

    The last two are taken and told under the consumer's own lock.
    """

    consuming: Consuming
    lock: Any
    storage: OffsetStorage | None
    group: str
    offsets: Mapping[PartitionName, StoredOffset]
    places: Mapping[PartitionName, Place]

    def saved(self) -> None:
        """It is committed: the consumer need not save it again."""
        with self.lock:
            self.consuming.positions.saved_elsewhere(self.places)


def standing(consumer: Any, message: ReceivedMessage[Any] | None) -> Standing:
    """Where `consumer`, of any face, stands behind everything that it handed out, or behind `message` in its partition.

    Raises `TypeError` for what is no consumer, `BadRequest` for one that saves by itself and for a message that it did
    not hand out, `Closed`, `Fenced`.
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
        if message is None:
            consuming.void_lost()
            positions.check_lost()
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
        )
