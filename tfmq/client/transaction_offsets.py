"""The offsets of a consumer inside a transaction: what it was handed out counts as processed if that commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tfmq.client.consuming import Consuming
from tfmq.client.going_back import go_back, void_lost
from tfmq.client.positions import PartitionName, Place
from tfmq.errors import BadRequest, Fenced
from tfmq.protocol.commands import GroupOffset, TransactionOffsets


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
