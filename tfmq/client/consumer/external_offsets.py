"""The offsets of a consumer for whoever saves them in its storage himself: in the transaction of his results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tfmq.client.consumer.assignment import place_of
from tfmq.client.consumer.core import Consuming, go_back, void_lost
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.positions import Place
from tfmq.errors import BadRequest, Fenced
from tfmq.offsets.storage import OffsetStorage, PartitionName, StoredOffset
from tfmq.protocol.commands import GroupOffset, TransactionOffsets


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


# The offsets of a consumer inside a transaction: what it was handed out counts as processed if that commits.


class HandedOut(NamedTuple):
    """Where a consumer stood: `row` is what the broker gets, `places` what the consumer has saved once it commits.

    The last two are taken and told under the consumer's own lock, which is never taken under another one's.
    """

    consuming: Consuming
    lock: Any
    row: TransactionOffsets
    places: Mapping[PartitionName, Place]
    grants: Mapping[PartitionName, int]

    def committed(self) -> None:
        """The transaction is committed: the consumer's next save goes on from there."""
        with self.lock:
            self.consuming.positions.saved_elsewhere(self.places)

    def came_to_nothing(self) -> None:
        """The transaction is rolled back: what it had is handed out again, where the consumer has it yet."""
        with self.lock:
            membership = self.consuming.membership
            if membership is not None and not self.consuming.closed:
                kept = membership.share.keys() & self.grants.keys()
                go_back(
                    self.consuming,
                    [name for name in kept if membership.generation_of(name) == self.grants[name]],
                )


def handed_out(consumer: Any) -> HandedOut:
    """Where `consumer`, a `Consumer` of either face, stands. Raises `BadRequest` for one whose offsets cannot be part
    of a transaction, `TypeError` for what is no consumer, `Closed`, `Fenced`.
    """
    consuming = getattr(consumer, "_core", None)
    if not isinstance(consuming, Consuming):
        raise TypeError(f"commit_offsets takes a tfmq consumer, not {type(consumer).__name__}.")
    with consumer._driver.lock:
        return HandedOut(consuming, consumer._driver.lock, *_standing(consuming))


def _standing(
    consuming: Consuming,
) -> tuple[TransactionOffsets, dict[PartitionName, Place], dict[PartitionName, int]]:
    membership = consuming.member()
    if consuming.options.commits != "manual":
        raise BadRequest(
            'commit_offsets needs a consumer with commits="manual": otherwise it saves offsets by itself, before the'
            " transaction is committed."
        )
    if consuming.options.storage is not None:
        raise BadRequest(
            'commit_offsets needs a consumer with offsets="broker": the broker cannot commit what is kept elsewhere.'
        )
    if membership.failure is not None:
        raise membership.failure
    consuming.positions.ledgers.agree("transaction")
    void_lost(consuming)
    places = consuming.positions.unsaved_out()
    try:
        consuming.positions.check_lost()
    except Fenced:
        go_back(consuming, places)
        raise
    rows = [
        GroupOffset(
            name.topic,
            consuming.positions.incarnation(name),
            name.partition,
            place.offset,
            0,
            place.epoch,
        )
        for name, place in places.items()
    ]
    row = TransactionOffsets(membership.group, membership.member, membership.generation, rows)
    return row, places, {name: membership.generation_of(name) for name in places}
