"""Consumer offsets that a transaction commits, in the user's storage or in the broker.

`ExternalOffsets` is for a transaction of the user's storage, `TransactionPositions` for a transaction of the broker. In
both cases the commit of the transaction acks the delivered messages; after a rollback they are delivered again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from tfmq.client.consumer.core import ConsumerCore, redeliver_lost_partitions
from tfmq.client.consumer.membership import Membership
from tfmq.client.consumer.message import ReadPosition, ReceivedMessage
from tfmq.client.consumer.start_position import read_position_of
from tfmq.client.operation import Operation, Wait
from tfmq.errors import BadRequest, Fenced, TfmqError
from tfmq.offsets.storage import OffsetStorage, PartitionName, StoredOffset
from tfmq.protocol.commands import GroupOffset, TransactionOffsets

log = logging.getLogger("tfmq.consumer")


class ExternalOffsets(NamedTuple):
    """Snapshot of a consumer for a transaction of the user's storage.

    `offsets`: what the transaction is to store; `positions`: the read positions at these offsets. `storage`: None if
    the broker stores the offsets. `lock`: the consumer's lock, which all methods acquire. `fenced`: an error if a
    partition with delivered messages was lost; the transaction may contain their results and must not be committed.
    """

    core: ConsumerCore
    lock: Any
    storage: OffsetStorage | None
    group: str
    offsets: Mapping[PartitionName, StoredOffset]
    positions: Mapping[PartitionName, ReadPosition]
    fenced: Fenced | None = None

    def mark_committed(self) -> None:
        """Record the commit, so that the consumer does not commit these offsets again."""
        with self.lock:
            self.core.positions.mark_committed_by_transaction(self.positions)

    def mark_delegated(self) -> None:
        """Record that a transaction will commit the offsets. Revoked partitions are then released before this commit.
        Called instead of `mark_committed` if the consumer will not learn how the transaction ends."""
        with self.lock:
            self.core.positions.delegate_to_transaction(self.positions)

    def mark_fenced(self, lost: Collection[PartitionName], kept: Mapping[PartitionName, StoredOffset]) -> None:
        """Stop reading the partitions `lost`, and read the others again from their committed offsets, which are in
        `kept`. Called if the commit was refused because other members own the partitions `lost`."""
        consuming, positions = self.core, self.core.positions
        with self.lock:
            for name in self.positions.keys() - set(lost):
                row = kept.get(name)
                if name not in consuming.fetcher.partitions:  # The partition was removed meanwhile.
                    continue
                if row is not None and row.incarnation == positions.incarnations[name]:
                    consuming.set_position(name, read_position_of(name, row))
                else:
                    consuming.set_position(name, positions.start_position(name))
            generation_of = consuming.require_membership().generation_of
            consuming.assignment.partitions_fenced(
                [name for name in lost if generation_of(name) == self.offsets[name].generation]
            )
            positions.lost.difference_update(lost)


def external_offsets(consumer: Any, message: ReceivedMessage[Any] | None) -> ExternalOffsets:
    """Return a snapshot of `consumer`, with the position after `message`. If `message` is None, the snapshot has the
    positions after all delivered messages.

    Raises: TypeError if `consumer` is no consumer; Closed if it is closed; BadRequest if it has no group, is not in
    manual mode or has not delivered `message`, or if in a handler an earlier message of the partition is not acked;
    Fenced if another member owns the partition of `message`; NotAllowed in a handler if handlers use `commit()`. If the
    membership has a permanent failure, raises this failure.
    """
    consuming, lock = _consumer_core(consumer), consumer._driver.lock
    with lock:
        membership = _check_consumer(consuming)
        positions = consuming.positions
        fenced = None
        if message is None:
            redeliver_lost_partitions(consuming)
            try:
                positions.raise_if_lost()
            except Fenced as lost:
                fenced = lost
        read_positions = (
            positions.transaction_positions() if message is None else dict([positions.position_after(message)])
        )
        offsets = {
            name: StoredOffset(
                position.offset, 0, positions.incarnations[name], position.epoch, membership.generation_of(name)
            )
            for name, position in read_positions.items()
        }
        storage = consuming.options.storage
        return ExternalOffsets(consuming, lock, storage, membership.group, offsets, read_positions, fenced)


def _consumer_core(consumer: Any) -> ConsumerCore:
    core = getattr(consumer, "_core", None)
    if not isinstance(core, ConsumerCore):
        raise TypeError(f"commit_offsets takes a tfmq consumer, not {type(consumer).__name__}.")
    return core


def _check_consumer(consuming: ConsumerCore, in_broker: bool = False) -> Membership:
    """Return the membership. Raises: Closed if the consumer is closed; BadRequest if it has no group, is not in manual
    mode, or with `in_broker`, if its offsets are stored outside the broker; NotAllowed in a handler if handlers use
    `commit()`. If the membership has a permanent failure, raises this failure."""
    membership = consuming.require_membership()
    if consuming.options.commits != "manual":
        raise BadRequest(
            'commit_offsets needs a consumer with commits="manual": otherwise it saves offsets by itself, before the'
            " transaction is committed."
        )
    if in_broker and consuming.options.storage is not None:
        raise BadRequest(
            'commit_offsets needs a consumer with offsets="broker": the broker cannot commit what is kept elsewhere.'
        )
    if membership.failure is not None:
        raise membership.failure
    consuming.positions.ack_trackers.check_commit_method("transaction")
    return membership


class TransactionPositions(NamedTuple):
    """Snapshot of a consumer for a broker transaction.

    `row`: the offsets as they are sent to the broker. `positions`: these offsets in the form of read positions.
    `generations`: the generation of each partition's assignment. `lock`: the consumer's lock, which the methods
    acquire. To avoid a deadlock, call the methods only while no other consumer's lock is held.
    """

    core: ConsumerCore
    lock: Any
    row: TransactionOffsets
    positions: Mapping[PartitionName, ReadPosition]
    generations: Mapping[PartitionName, int]

    def mark_committed(self) -> None:
        """Record that the transaction was committed, so that the consumer does not commit its offsets again."""
        with self.lock:
            self.core.positions.mark_committed_by_transaction(self.positions)

    def mark_rolled_back(self) -> None:
        """Deliver the messages again after a rollback, in the partitions that the consumer still owns."""
        with self.lock:
            membership = self.core.membership
            if membership is not None and not self.core.closed:
                kept = membership.assigned.keys() & self.generations.keys()
                rewind_to_committed(
                    self.core, [name for name in kept if membership.generation_of(name) == self.generations[name]]
                )


def transaction_positions(consumer: Any) -> TransactionPositions:
    """Return a snapshot of `consumer` for a broker transaction.

    Raises: TypeError if `consumer` is no consumer; Closed if it is closed; BadRequest if it has no group, is not in
    manual mode or stores its offsets outside the broker, or if in a handler an earlier message of the partition is not
    acked; Fenced if a partition with delivered messages was lost; NotAllowed in a handler if handlers use `commit()`.
    If the membership has a permanent failure, raises this failure.
    """
    consuming, lock = _consumer_core(consumer), consumer._driver.lock
    with lock:
        membership, positions = _check_consumer(consuming, in_broker=True), consuming.positions
        redeliver_lost_partitions(consuming)
        read_positions = positions.transaction_positions()
        try:
            positions.raise_if_lost()
        except Fenced:
            rewind_to_committed(consuming, read_positions)
            raise
        rows = [
            GroupOffset(n.topic, positions.incarnations[n], n.partition, position.offset, 0, position.epoch)
            for n, position in read_positions.items()
        ]
        row = TransactionOffsets(membership.group, membership.member_id, membership.generation, rows)
        generations = {name: membership.generation_of(name) for name in read_positions}
        return TransactionPositions(consuming, lock, row, read_positions, generations)


# Redelivery after a rollback.

RETRY_SECONDS: Final = 1.0
"""Pause before the group's offsets are requested again after an error."""


def rewind_to_committed(core: ConsumerCore, names: Collection[PartitionName]) -> None:
    """Rewind partitions to their committed offsets after a rolled back transaction.

    Call this under the driver's lock. Partitions that handlers of `run` work on are not rewound, because `run` calls
    the handlers again with the same messages. Another member may have committed a later offset than this consumer
    knows. So a rewound partition delivers nothing until its committed offset has been read from the group again, or
    until a `seek`.
    """
    positions = core.positions
    found = [n for n in names if n in core.fetcher.partitions and n not in positions.ack_trackers]
    for name in found:
        offset = positions.committed[name]
        core.set_position(name, positions.start_position(name) if offset is None else ReadPosition(offset))
        core.suspended.add(name)
    if found and not core.closed:
        core.tasks.start(_rewind_when_read(core, found), core.task_failed)
        _wake_waiters(core)


def _rewind_when_read(core: ConsumerCore, names: Collection[PartitionName]) -> Operation[None]:
    """Read the committed offsets of the partitions `names` from the group. If an offset differs from the one that this
    consumer knew, move the partition's read position to it. Then deliver messages of all these partitions again."""
    positions = core.positions
    try:
        while True:
            try:
                stored = yield from core.offsets.read(names)
                break
            except TfmqError as error:
                if not error.retriable:
                    raise
                log.warning("Group %s waits for its offsets: %s", core.options.group, error)
            yield Wait((), RETRY_SECONDS)
        for name in core.suspended.intersection(names, stored, core.fetcher.partitions):
            row, known = stored[name], positions.committed[name]
            if row.incarnation == positions.incarnations[name] and row.offset != known:
                position = read_position_of(name, row)
                positions.mark_committed({name: position})
                core.set_position(name, position)
    finally:
        core.suspended.difference_update(names)
    _wake_waiters(core)


def _wake_waiters(core: ConsumerCore) -> None:
    """Send due requests now and wake the callers that wait, in any thread."""
    core.fetch_session.send_fetches()
    core.wake_driver()
    core.rebalance.on_callback_returned()
