"""The apply target: writes effects to partitions, group offsets and the arrival log.

Effects are the changes made by committed transactions, due delayed messages and schedules.
"""

from collections.abc import Sequence
from typing import Final

from journal.log.log import Log
from journal.record.batch import Batch
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import split_id
from tfmq.apply_target import (
    ARRIVALS_KEY,
    OFFSETS_KEY,
    Append,
    AppendResult,
    AppliedCallback,
    CommitOffsets,
    DurableCallback,
    Effect,
    GroupPositions,
    SourceId,
)
from tfmq.broker import reply
from tfmq.broker.catalog import Catalog
from tfmq.broker.catalog_state import DELETING
from tfmq.broker.delay_commands import DelayCommands
from tfmq.broker.delayed_produce import DelayedEffectAppend
from tfmq.broker.groups.offset_commands import OffsetCommands
from tfmq.broker.groups.offsets import OffsetLocks, TransactionOffsetQueue
from tfmq.broker.partition import TOPIC_DELETED, EffectAppend, Partition
from tfmq.broker.produce import ProduceHandler
from tfmq.broker.reply import Session
from tfmq.broker.runtime import Runtime
from tfmq.broker.topics import Topics
from tfmq.errors import NOT_DONE, UNKNOWN, DiskFull, StorageStopped, TfmqError, UnknownTopic
from tfmq.protocol.commands import TransactionOffsets

TRANSACTION_APPEND_BYTES: Final = 256 << 10
"""Maximum bytes of one append of effects, unless a single batch is larger. Small, because other appends wait for it."""


class BrokerApplyTarget:
    """The broker's apply target. `tfmq.apply_target.ApplyTarget` specifies each method."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        topics: Topics,
        catalog: Catalog,
        writes: ProduceHandler,
        offset_effects: TransactionOffsetQueue,
        locks: OffsetLocks,
        group_offsets: OffsetCommands,
    ) -> None:
        self._disk, self._data = runtime.disk, runtime.data
        self._topics, self._catalog, self._writes = topics, catalog, writes
        self._offset_effects, self._locks = offset_effects, locks
        self._group_offsets = group_offsets
        self._reserved_bytes = 0
        self.delayed: DelayCommands | None = None
        """Gives access to the arrival log. A start opens that log after the partitions; until then this is None."""

    # Disk space

    def check_space(self, key: int, size_bytes: int) -> None:
        stopped = self._catalog.log.stopped if key == OFFSETS_KEY else self._open_partition(key).log.stopped
        if stopped is not None:
            error = StorageStopped(reason=stopped, outcome=NOT_DONE)
            raise reply.arrival_log_error(error) if key == ARRIVALS_KEY else error
        if self._reserved_bytes + size_bytes > self._disk.free_space(self._data):
            raise DiskFull()

    def reserve_bytes(self, size_bytes: int) -> None:
        self._reserved_bytes += size_bytes

    def release_bytes(self, size_bytes: int) -> None:
        self._reserved_bytes -= size_bytes

    # Targets by key, and what was applied to them

    def display_name(self, key: int) -> str | None:
        if key == OFFSETS_KEY:
            return "the offsets of groups"
        if key == ARRIVALS_KEY:
            return "the delayed messages"
        incarnation, number = split_id(key)
        row = None if self._is_deleted(incarnation) else self._catalog.state.topics.get(incarnation)
        return None if row is None else f"{row.name}-{number}"

    def _is_deleted(self, incarnation: int) -> bool:
        row = self._catalog.state.topics.get(incarnation)
        return row is None or (row.state == DELETING and self._topics.by_incarnation(incarnation) is None)

    def _open_partition(self, key: int) -> Partition:
        """Return the open partition (or the arrival log) whose log id is `key`. Raises UnknownTopic, StorageStopped."""
        partition = self._find_partition(key)
        if partition is not None:
            return partition
        incarnation = split_id(key)[0]
        if key != ARRIVALS_KEY and self._is_deleted(incarnation):
            raise UnknownTopic(TOPIC_DELETED.format(name=f"of incarnation {incarnation}"))
        raise StorageStopped(f"The partition {self.display_name(key)} could not be opened.", outcome=NOT_DONE)

    def _find_partition(self, key: int) -> Partition | None:
        if key == ARRIVALS_KEY:
            return None if self.delayed is None else self.delayed.partition
        return self._topics.find_partition(*split_id(key))

    def last_applied(self, key: int, source: SourceId) -> tuple[int, int] | None:
        kind, source_id = source
        if key == OFFSETS_KEY:
            return self._catalog.state.applied_lsns.get(source_id) if kind == SOURCE_TRANSACTION else None
        partition = self._find_partition(key)
        return None if partition is None else partition.log.applied(kind, source_id)

    def last_durable(self, key: int, source: SourceId) -> tuple[int, int] | None:
        if key == OFFSETS_KEY:
            log = self._catalog.log
            return None if log.stopped is not None or log.waits_for_space else self.last_applied(key, source)
        partition = self._find_partition(key)
        return None if partition is None else partition.log.settled(*source)

    def check_batch(self, partition: Partition, batch: Batch) -> None:
        """Check that the log accepts a batch, so that it is not rejected later, when it is applied. Raises BadBatch."""
        partition.log.check(batch)

    def append_bytes_max(self, key: int) -> int:
        """Return the maximum bytes of all batches in one `Append` to the log with the id `key`."""
        partition = self._find_partition(key)
        own_max = TRANSACTION_APPEND_BYTES if partition is None else partition.append_bytes_max
        return min(TRANSACTION_APPEND_BYTES, own_max)

    # Writing effects

    def apply(self, effect: Effect, done: AppliedCallback) -> None:
        if isinstance(effect, CommitOffsets):
            self._offset_effects.enqueue(effect, done)
            return
        try:
            partition = self._open_partition(effect.key)
        except TfmqError as error:
            done(None, error)
            return
        if isinstance(effect, Append):
            self._writes.enqueue(partition, EffectAppend(effect, done))
        elif self.delayed is not None:
            self._writes.enqueue(partition, DelayedEffectAppend(effect, done, self.delayed.queue))

    def begin_exclusive(self, key: int, source: SourceId) -> None:
        partition = self._topics.find_partition(*split_id(key))
        if partition is not None:
            partition.begin_exclusive(source)

    def end_exclusive(self, key: int) -> None:
        partition = self._topics.find_partition(*split_id(key))
        if partition is not None:
            self._writes.end_exclusive(partition)

    # Durability of written effects

    def is_durable(self, result: AppendResult) -> bool:
        if result.key == OFFSETS_KEY:
            return _is_durable(self._catalog.log, result.end)
        partition = self._find_partition(result.key)
        if partition is None:
            return self._is_deleted(split_id(result.key)[0])
        return _is_durable(partition.log, result.end)

    def fsync_to(self, result: AppendResult, done: DurableCallback) -> None:
        if result.key == OFFSETS_KEY:
            self._catalog.when_durable(done, result.end)
            return
        try:
            partition = self._open_partition(result.key)
        except UnknownTopic:
            done(None)
            return
        except TfmqError as error:
            done(error)
            return
        if result.end > partition.log.end_offset:
            # A resume of the partition truncated the append. `last_applied` shows which effects are still in the log.
            done(StorageStopped(f"The end of {self.display_name(result.key)} was lost.", outcome=UNKNOWN))
            return

        def durable(error: BaseException | None) -> None:
            is_deleted = isinstance(error, UnknownTopic) and partition.deleted
            done(None if error is None or is_deleted else reply.client_error(error, UNKNOWN))

        partition.when_durable(result.end, durable)

    # Group offsets in transactions

    def check_offsets(self, rows: Sequence[TransactionOffsets], session: Session) -> list[GroupPositions]:
        found = []
        for row in rows:
            positions = self._group_offsets.transaction_rows(row.group, row.member, row.generation, row.offsets)
            if positions:
                found.append(GroupPositions(row.group, row.generation, positions))
        return found

    def lock_offsets(self, epoch: int, xid: str, groups: Sequence[GroupPositions]) -> None:
        self._locks.lock(epoch, xid, groups)

    def unlock_offsets(self, epoch: int) -> None:
        self._locks.unlock(epoch)


def _is_durable(log: Log, end: int) -> bool:
    # While `waits_for_space` is set, recovery has found appends after `end_offset`, but could not make them durable. An
    # effect in such an append counts as applied, and `end_offset` is reported as its end. But the effect may still be
    # lost. So nothing that ends at `end_offset` counts as durable.
    return end <= log.forced_offset and not (log.waits_for_space and end >= log.end_offset)
