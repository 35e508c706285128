"""Consumer offsets in a transaction: one of the user's storage, or one of the broker.

`ExternalOffsets` is for a transaction of the user's storage, `TransactionPositions` for one of the broker. In
both a commit acks what was delivered, and a rollback delivers it again.
"""

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
    """Consumer snapshot for a storage transaction: `offsets` to store, and their `positions`.

    `lock` is the consumer's; all methods acquire it. `fenced`: a partition with delivered messages was lost
    before; the transaction may contain results of it and must not be committed.
    """

    consuming: Consuming
    lock: Any
    storage: OffsetStorage | None
    group: str
    offsets: Mapping[PartitionName, StoredOffset]
    places: Mapping[PartitionName, Place]
    fenced: Fenced | None = None

    def saved(self) -> None:
        """Record the commit of the transaction, so that the consumer does not commit the same again."""
        with self.lock:
            self.consuming.positions.saved_elsewhere(self.places)

    def entrusted(self) -> None:
        """Record that a transaction has the offsets; do not wait for its end, which is not reported."""
        with self.lock:
            self.consuming.positions.entrusted(self.places)

    def refused(self, lost: Collection[PartitionName], kept: Mapping[PartitionName, StoredOffset]) -> None:
        """Record that the transaction was fenced: the partitions in `lost` belong to another member.

        Messages of the other partitions are delivered again, from the committed offsets in `kept`. The lost
        ones are not read any more.
        """
        consuming, positions = self.consuming, self.consuming.positions
        with self.lock:
            for name in self.places.keys() - set(lost):
                row = kept.get(name)
                if name not in consuming.fetcher.feeds:  # removed meanwhile
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
    """Return a snapshot of `consumer` after all delivered messages, or after `message`.

    Raises TypeError for what is no consumer, BadRequest for one that commits by itself and for a message that
    it did not deliver, Closed, and Fenced for a message whose partition belongs to another member. Also
    raises NotAllowed in a handler if handlers use `commit()`, and a permanent failure of the membership.
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


class HandedOut(NamedTuple):
    """Snapshot of a consumer for a broker transaction.

    `row` is sent to the broker, `positions` are the consumer's once it commits, `generations` those of the
    partitions. `lock` is the consumer's; the methods acquire it, and it must never be acquired while another
    consumer's lock is held.
    """

    consuming: Consuming
    lock: Any
    row: TransactionOffsets
    places: Mapping[PartitionName, Place]
    grants: Mapping[PartitionName, int]

    def committed(self) -> None:
        """Record the commit of the transaction; the consumer's next commit continues there."""
        with self.lock:
            self.consuming.positions.saved_elsewhere(self.places)

    def came_to_nothing(self) -> None:
        """Deliver the messages again after a rollback, for partitions that are still owned."""
        with self.lock:
            membership = self.consuming.membership
            if membership is not None and not self.consuming.closed:
                kept = membership.share.keys() & self.grants.keys()
                go_back(
                    self.consuming,
                    [name for name in kept if membership.generation_of(name) == self.grants[name]],
                )


def handed_out(consumer: Any) -> HandedOut:
    """Return a snapshot of `consumer` for a broker transaction.

    Raises BadRequest for a consumer whose offsets cannot be part of a transaction, TypeError for what is no
    consumer, Closed, Fenced. Also raises NotAllowed in a handler if handlers use `commit()`, and a permanent
    failure of the membership.
    """
    consuming = getattr(consumer, "_core", None)
    if not isinstance(consuming, Consuming):
        raise TypeError(f"commit_offsets takes a tfmq consumer, not {type(consumer).__name__}.")
    with consumer._driver.lock:
        return HandedOut(consuming, consumer._driver.lock, *_standing(consuming))


def _standing(
    consuming: Consuming,
) -> tuple[TransactionOffsets, dict[PartitionName, Place], dict[PartitionName, int]]:
    """Return the row for the broker, the positions and the generations; the consumer is locked."""
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
