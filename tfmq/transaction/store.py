"""The durable store of transactions: the transaction journal, and the table in memory that is replayed from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from journal.clock import Clock
from journal.disk import Disk
from journal.errors import Corrupt, Full, JournalError
from journal.wal import entry
from journal.wal.store import JournalOptions, JournalStore
from tfmq.apply_target import DurableCallback, GroupPositions, RunInWorker
from tfmq.errors import Busy, DiskFull, StorageStopped
from tfmq.limits import PRODUCER_IDLE_SECONDS
from tfmq.transaction import journal_records, slicer, states
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.compaction import JournalCompaction
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.journal_writer import JournalWriter, RequestFsync, WrittenCallback
from tfmq.transaction.model import Decision, IncomingBatch, Slice, Transaction
from tfmq.transaction.outcomes import LOCAL_OUTCOME_MS, LOCAL_OUTCOMES_MAX, LOCAL_PREFIX, Outcomes
from tfmq.transaction.producer_state import LeaseTime, ProducerStates
from tfmq.transaction.slicer import SLICE_BYTES
from tfmq.transaction.transaction_table import FileReferences, TransactionTable

logger = logging.getLogger("tfmq.transaction")

EPOCH_RANGE: Final = 1 << 20
"""Number of epochs leased at once. Each start leases a range; epochs have 63 bits, enough for any number of starts."""

RENEW_BELOW: Final = EPOCH_RANGE // 2
"""If fewer leased epochs are left than this, the next range is leased, to be durable before none is left."""

LEASE_PENDING = (
    "The broker's transaction journal is being written; new transactions wait for it. Try again in a moment."
)

EPOCHS_PER_SECOND: Final = 1 << 17
"""Growth of the epoch that `first_epoch` derives from the clock: faster than a broker can allocate epochs."""
CLOCK_START_SECONDS: Final = 1_700_000_000
CLOCK_EPOCH_MAX: Final = 1 << 61


def first_epoch(end: int, wall_ms: int) -> int:
    """Return the first epoch after a start: the `end` of the leased ranges, or a higher one derived from the clock."""
    if end <= 1:  # No range was ever leased, so no other copy of the journal can have continued with higher epochs.
        return end
    return max(end, min((wall_ms // 1000 - CLOCK_START_SECONDS) * EPOCHS_PER_SECOND, CLOCK_EPOCH_MAX))


class EpochAllocator:
    """Allocates the epochs of transactions: unique, increasing numbers, from ranges that are leased in the journal.

    No epoch is used twice, so a late request for an older transaction cannot change a newer one of the same name. The
    lease of a range is durable in the journal before the first epoch of the range is allocated. The data folder may be
    restored from a backup after the broker has used higher epochs than the backup knows. So the first range of a start
    begins at an epoch derived from the clock, if that is higher than the leased ones.

    `lease(end, durable)` writes the record that epochs below `end` may be in use, and calls `durable(None)` when this
    record is durable, or `durable(error)`.
    """

    def __init__(self, lease: Callable[[int, Callable[[BaseException | None], None]], None]) -> None:
        self._lease = lease
        self._next = self._end = 0
        self._leasing = False
        self._lease_error: BaseException | None = None

    def set_range(self, first: int, end: int) -> None:
        self._next, self._end = first, end

    def allocate(self) -> int:
        """Allocate an epoch. If none is left, raises Busy; if the last lease has failed, DiskFull or StorageStopped."""
        if self._end - self._next < RENEW_BELOW and not self._leasing:
            self._leasing = True
            end = self._end + EPOCH_RANGE

            def durable(error: BaseException | None) -> None:
                self._leasing = False
                self._lease_error = error
                if error is None:
                    self._end = end

            self._lease(end, durable)
        if self._next >= self._end:
            if self._lease_error is None:
                raise Busy(LEASE_PENDING)
            if isinstance(self._lease_error, Full):
                raise DiskFull()
            raise StorageStopped(reason=str(self._lease_error))
        epoch = self._next
        self._next += 1
        return epoch


SEND: Final = "send"
FORGET: Final = "forget"

KEY_SIZE: Final = 16
"""Bytes of the secret key with which `Outcomes` computes the digests of names."""


class TransactionStore:
    """Transactions and the journal that makes them durable.

    The constructor opens or creates the journal in the existing `folder`, recovers it and leases epochs durably. It
    rolls back open transactions and puts prepared and committed ones into `transactions`. `settings`: the keys
    `transaction.*` of the configuration, without that prefix. `decision_time` returns the time for a commit record, in
    ms since 1970; the delays of delayed messages in the transaction count from this time. Raises Corrupt if the journal
    is damaged (with file and position; nothing was changed), NewerFormat if a later version wrote the journal, Full
    without space for a new journal, and Stopped or OSError if the disk fails.

    Every durable change is made by applying a journal entry, both in recovery and after it. The records of a turn are
    queued; `write()` writes them in one append, applies them in order and calls their callbacks. While a record is
    queued, the state of its transaction is preparing, committing or rolling_back; if the write fails, the previous
    state is restored. A method that queues a record raises states.InvalidTransition, and changes nothing, if the state
    does not permit the record. The store does not check limits, offsets and targets; the coordinator does. Used by one
    thread, except where a method states otherwise.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        *,
        clock: Clock,
        randomness: Callable[[int], bytes],
        new_id: Callable[[], int],
        lease_time: LeaseTime,
        request_fsync: RequestFsync,
        run: RunInWorker,
        limits: Mapping[str, int],
        settings: Mapping[str, int],
        mark_ready: Callable[[], None],
        decision_time: Callable[[], int] | None = None,
    ) -> None:
        self._table = table = TransactionTable(
            outcomes=Outcomes(
                outcomes_max=limits["transaction_outcomes"], retention_ms=settings["outcome_seconds"] * 1000
            ),
            local_outcomes=Outcomes(outcomes_max=LOCAL_OUTCOMES_MAX, retention_ms=LOCAL_OUTCOME_MS),
            producer_states=ProducerStates(
                producers_max=limits["transaction_streams"],
                idle_ms=limits.get("producer_idle_seconds", PRODUCER_IDLE_SECONDS) * 1000,
                lease_time=lease_time,
            ),
            commit_groups=CommitGroups(groups_max=limits["commit_groups"], fences_max=limits["commit_group_fences"]),
        )
        file_bytes = settings["journal_file_bytes"]
        options = JournalOptions(file_bytes=file_bytes, checkpoint_bytes=file_bytes)
        self._journal = journal = JournalStore.open(
            disk, folder, new_id=new_id, clock=clock, state=table, options=options, randomness=randomness
        )
        self._disk, self._folder = disk, folder
        self._clock, self._randomness, self._run = clock, randomness, run
        self._decision_time = decision_time or clock.wall_ms
        self._epochs = EpochAllocator(self._lease_epochs)
        self._writer = JournalWriter(journal, table, request_fsync=request_fsync, run=run, mark_ready=mark_ready)
        self._compaction = JournalCompaction(journal, table, self._writer, run, file_bytes)
        self._is_checkpoint_running = False
        self._pending_forgets: set[int] = set()
        self.transactions, self.by_xid = table.transactions, table.by_xid
        self.state_counts = table.state_counts
        self.producer_states, self.commit_groups = table.producer_states, table.commit_groups
        self.journal_id = journal.journal_id
        self.find_outcome, self.complete = table.find_outcome, table.complete
        self.when_durable = self._writer.when_durable
        self.close, self.abandon = journal.close, journal.abandon
        self.rolled_back_at_start = table.finish_recovery(FileReferences(journal))
        self._lease_first_epochs()
        self.warnings: Sequence[str] = (
            *journal.recovery.warnings,
            *(
                f"the transaction {each.xid or each.epoch} is {each.state} and lost {each.lost_messages} of its"
                f" {each.messages} messages with damage in the journal"
                for each in self.transactions.values()
                if each.lost_messages
            ),
        )
        """Sentences for operators about what recovery has found."""

    def _lease_first_epochs(self) -> None:
        first = first_epoch(self._table.epochs_end, self._clock.wall_ms())
        if self._table.fillers_seen:
            first += EPOCH_RANGE  # A lost lease record may have leased one more range.
        lease = self._lease_record(first + EPOCH_RANGE)
        try:
            (lsn,) = self._journal.append([entry.Operation(*journal_records.pack(lease))])
            self._journal.force()
        except Full:
            # The broker must start on a full disk, too. The first new transaction tries the lease again.
            self._epochs.set_range(first, first)
            return
        self._table.apply_operation(lsn, lease)
        assert self._table.file_references is not None
        self._table.file_references.refresh_files()
        self._epochs.set_range(first, first + EPOCH_RANGE)

    def _lease_record(self, end: int) -> journal_records.EpochLeaseRecord:
        return journal_records.EpochLeaseRecord(end, self._clock.wall_ms(), self._randomness(KEY_SIZE))

    def _lease_epochs(self, end: int, durable: DurableCallback) -> None:
        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                durable(error)
            else:
                self._writer.when_durable(lsn, durable)

        self._writer.enqueue(self._lease_record(end), written)

    # Records of changes

    def begin(self, origin: Origin) -> Transaction:
        """Create an open transaction, in memory only. Raises Busy, DiskFull or StorageStopped if no epoch is left."""
        return self._table.add_open(self._epochs.allocate(), origin)

    def discard(self, transaction: Transaction) -> None:
        """Remove an open transaction; write no record, store no outcome. Raises InvalidTransition if it is not open."""
        states.next_state(transaction.state, states.FINISH_EMPTY)
        self._table.remove(transaction)

    def finish_empty(self, transaction: Transaction) -> None:
        """End an open transaction without messages as "read_only"; no record is written."""
        states.next_state(transaction.state, states.FINISH_EMPTY)
        self._table.remove(transaction)
        transaction.state = states.READ_ONLY

    def add_batch(self, transaction: Transaction, piece: IncomingBatch, written: WrittenCallback) -> None:
        """Queue a batch of an open transaction. The caller has checked the batch's sequence and the limits."""
        if transaction.state != states.OPEN:
            raise states.InvalidTransition(transaction.state, SEND)
        transaction.topics.setdefault(piece.log_id, piece.topic)
        self._writer.enqueue(None, written, transaction=transaction, batches=(piece,))

    def prepare(
        self, transaction: Transaction, offsets: Sequence[GroupPositions], expires_ms: int, written: WrittenCallback
    ) -> None:
        """Queue the prepare record; when it is written, the state becomes "prepared"."""
        self._table.change_state(transaction, states.REQUEST_PREPARE)
        operation = journal_records.PrepareRecord(
            transaction.epoch,
            self._clock.wall_ms(),
            transaction.origin,
            tuple(transaction.topics.items()),
            tuple(offsets),
            transaction.messages + transaction.queued_messages,
            expires_ms,
        )
        self._enqueue(operation, written, transaction)

    def commit(
        self,
        transaction: Transaction,
        written: WrittenCallback,
        *,
        offsets: Sequence[GroupPositions] = (),
        batches: Sequence[IncomingBatch] = (),
    ) -> None:
        """Queue the commit record of a prepared transaction, or of an open one (a one-phase commit).

        In a one-phase commit, `offsets` and `batches` may be passed. They are written atomically with the record.
        When the record is written, the state becomes "applying" and `transaction.decision` is set.
        """
        if transaction.prepared_ms and (offsets or batches):
            raise states.InvalidTransition(transaction.state, SEND)
        self._table.change_state(transaction, states.REQUEST_COMMIT)
        if transaction.prepared_ms:
            record = journal_records.CommitRecord(transaction.epoch, self._decision_time(), transaction.xid)
            self._enqueue(record, written, transaction)
            return
        topics = transaction.topics
        count = transaction.messages + transaction.queued_messages
        for piece in batches:
            topics[piece.log_id] = piece.topic
            count += piece.count
        operation = journal_records.LocalCommitRecord(
            transaction.epoch, self._decision_time(), transaction.origin, tuple(topics.items()), tuple(offsets), count
        )
        self._enqueue(operation, written, transaction, batches)

    def rollback(self, transaction: Transaction, written: WrittenCallback) -> None:
        """Queue the rollback record. When it is written, the transaction is removed from `transactions`."""
        self._table.change_state(transaction, states.REQUEST_ROLLBACK)
        epoch, now_ms = transaction.epoch, self._clock.wall_ms()
        operation: journal_records.Operation
        if transaction.prepared_ms:
            operation = journal_records.RollbackRecord(epoch, now_ms)
        else:
            operation = journal_records.LocalRollbackRecord(epoch, now_ms, transaction.origin)
        self._enqueue(operation, written, transaction)

    def heuristic_commit(self, transaction: Transaction, written: WrittenCallback) -> None:
        """Queue an operator's commit of a prepared transaction, which then stays in `transactions` until `forget`."""
        if transaction.state != states.PREPARED:
            raise states.InvalidTransition(transaction.state, states.HEURISTIC_COMMIT)
        self._table.change_state(transaction, states.REQUEST_COMMIT)
        operation = journal_records.HeuristicCommitRecord(transaction.epoch, self._decision_time())
        self._enqueue(operation, written, transaction)

    def heuristic_rollback(self, transaction: Transaction, written: WrittenCallback) -> None:
        """Queue an operator's rollback of a prepared transaction, which then stays in `transactions` until `forget`."""
        if transaction.state != states.PREPARED:
            raise states.InvalidTransition(transaction.state, states.HEURISTIC_ROLLBACK)
        self._table.change_state(transaction, states.REQUEST_ROLLBACK)
        operation = journal_records.HeuristicRollbackRecord(transaction.epoch, self._clock.wall_ms())
        self._enqueue(operation, written, transaction)

    def forget(self, transaction: Transaction, written: WrittenCallback) -> None:
        """Queue the record that removes a transaction which an operator has committed or rolled back.

        Raises InvalidTransition for any other state, and after a commit whose effects are not durable yet.
        """
        epoch = transaction.epoch
        if (
            transaction.state not in states.HEURISTIC_STATES
            or not transaction.obsolete
            or epoch in self._pending_forgets
        ):
            raise states.InvalidTransition(transaction.state, FORGET)
        self._pending_forgets.add(epoch)

        def completed(lsn: int, error: BaseException | None) -> None:
            self._pending_forgets.discard(epoch)
            written(lsn, error)

        self._writer.enqueue(journal_records.ForgetRecord(epoch, self._clock.wall_ms()), completed)

    def _enqueue(
        self,
        operation: journal_records.Operation,
        written: WrittenCallback,
        transaction: Transaction,
        pieces: Sequence[IncomingBatch] = (),
    ) -> None:
        refused = partial(self._revert_states, (transaction,))
        self._writer.enqueue(operation, written, transaction=transaction, batches=pieces, revert=refused)

    def _revert_states(self, transactions: Sequence[Transaction]) -> None:
        for transaction in transactions:
            event = states.RECORD_FAILED_PREPARED if transaction.prepared_ms else states.RECORD_FAILED
            self._table.change_state(transaction, event)

    # Commit groups

    def commit_group(
        self,
        group: str,
        sequence: int,
        run: str,
        rows: int,
        members: Sequence[Transaction],
        dropped: Sequence[Transaction],
        written: WrittenCallback,
    ) -> None:
        """Queue one record that commits all `members` and rolls back `dropped`; all of these must be prepared.

        When the record is written, the members share one `decision`. A record without members only rolls back.
        """
        self._request_end(members, dropped)
        operation = journal_records.GroupCommitRecord(
            group,
            sequence,
            run,
            rows,
            [each.epoch for each in members],
            [each.epoch for each in dropped],
            self._decision_time(),
        )
        self._writer.enqueue(operation, written, revert=partial(self._revert_states, [*members, *dropped]))

    def abort_group(
        self, group: str, sequence: int, run: str, dropped: Sequence[Transaction], written: WrittenCallback
    ) -> None:
        """Queue the record that aborts a run and rolls back `dropped`, which must be prepared."""
        self._request_end((), dropped)
        operation = journal_records.GroupAbortRecord(
            group, sequence, run, [each.epoch for each in dropped], self._clock.wall_ms()
        )
        self._writer.enqueue(operation, written, revert=partial(self._revert_states, dropped))

    def forget_group(self, group: str, written: WrittenCallback) -> None:
        self._writer.enqueue(journal_records.GroupForgetRecord(group, self._clock.wall_ms()), written)

    def _request_end(self, members: Sequence[Transaction], dropped: Sequence[Transaction]) -> None:
        """Set `members` to committing, `dropped` to rolling_back. Raises InvalidTransition unless all are prepared."""
        for transactions, event in (members, states.COMMIT), (dropped, states.ROLLBACK):
            for each in transactions:
                if each.state != states.PREPARED:
                    raise states.InvalidTransition(each.state, event)
        for each in members:
            self._table.change_state(each, states.REQUEST_COMMIT)
        for each in dropped:
            self._table.change_state(each, states.REQUEST_ROLLBACK)

    # State

    @property
    def end_lsn(self) -> int:
        """LSN of the next entry; the commit record of every decision so far has a lower LSN."""
        return self._journal.end_offset

    @property
    def retained_bytes(self) -> int:
        """Bytes that the journal retains for transactions: the messages, and one entry header for each batch."""
        return self._table.retained_journal_bytes

    @property
    def batch_count(self) -> int:
        """Number of batches that the journal retains for transactions; the location of each is in memory."""
        return self._table.retained_batches

    def is_durable(self, transaction: Transaction) -> bool:
        """Return whether the record that led to the state is durable; if not, a power failure could undo the state."""
        return transaction.lsn < self._journal.forced_offset

    def find_pending_rollback(self, xid: str, epoch: int = 0) -> Transaction | None:
        """Return transaction `xid` (epoch 0: the latest) if its rollback is written but not durable, else None."""
        for transaction in reversed(self._table.pending_rollbacks.values()):
            if transaction.origin.xid == xid and epoch in (0, transaction.epoch):
                return None if self.is_durable(transaction) else transaction
        return None

    @property
    def stopped(self) -> str | None:
        """Why the journal accepts no more writes; None while it accepts them."""
        return self._journal.stopped

    def certainly_not_committed(self, xid: str, epoch: int) -> bool:
        """Return whether a transaction with an xid of the broker is known not to be committed.

        Its epoch was assigned and outcomes of that epoch are still stored, but there is none of this transaction.
        """
        given = self._table.local_outcomes.expired_epoch < epoch < self._table.epochs_end
        return given and xid.startswith(LOCAL_PREFIX) and self.find_outcome(xid, epoch) is None

    def read_operation(self, lsn: int) -> journal_records.Operation | None:
        """Return the operation whose journal entry is at `lsn`; None if the journal no longer has it, or it is damaged.

        May be called in any thread. Raises OSError, Closed.
        """
        try:
            content = self._journal.read(lsn).content
            return journal_records.unpack(*content) if isinstance(content, entry.Operation) else None
        except (Corrupt, ValueError):
            return None

    # Applying a committed transaction

    def read_slices(
        self, decision: Decision, log_id: int, after: int = 0, slice_bytes: int = SLICE_BYTES
    ) -> Iterator[Slice]:
        """Yield the decision's messages for the partition `log_id` above ordinal `after`, verified, slice by slice.

        May be called in any thread. Raises Corrupt if the journal is damaged, OSError if the disk fails.
        """
        return slicer.read_slices(self._journal.read, decision.partition_rows(log_id), log_id, after, slice_bytes)

    def read_slices_nowait(
        self, decision: Decision, log_id: int, after: int = 0, slice_bytes: int = SLICE_BYTES
    ) -> list[Slice] | None:
        """Return the slices of `read_slices`; None if a worker must read them. Raises Corrupt if they are damaged."""
        cached = decision.transactions[0].cached_batches
        rows = decision.partition_rows(log_id)
        if cached is not None:
            return slicer.slice_cached(cached, rows, log_id, after, slice_bytes)
        return slicer.read_slices_nowait(self._journal.read_cached, rows, log_id, after, slice_bytes)

    def mark_applied(self, decision: Decision) -> None:
        """Mark a decision as applied: each effect is written, or its target is deleted. Free the decision's memory."""
        for transaction in decision.transactions:
            self._table.change_state(transaction, states.APPLIED)
            self._writer.drop_cached(transaction)
        decision.release_memory()

    # Turns and housekeeping

    @property
    def due(self) -> bool:
        return self._writer.due

    def write(self) -> bool:
        """Write the queued records and apply them, at the end of a turn; return False if there was no work."""
        wrote = self._writer.write()
        if wrote and not self._writer.starting_file:
            self._run_checkpoint_if_due()
        return wrote

    def run_housekeeping(self) -> None:
        """Start a checkpoint or compaction if one is due; call this about once a second."""
        if self._writer.starting_file:
            return
        self._compaction.run_if_needed()
        self._run_checkpoint_if_due()

    def _run_checkpoint_if_due(self) -> None:
        """Start a checkpoint in a worker if one is due. Must not be called while a worker starts a new journal file."""
        if self._is_checkpoint_running or not self._journal.checkpoint_due:
            return
        work = self._journal.checkpoint()
        self._is_checkpoint_running = True
        self._run(work, self._checkpoint_done)

    def _checkpoint_done(self, _: Any, error: BaseException | None) -> None:
        self._is_checkpoint_running = False
        self._journal.checkpoint_done(error)
        if isinstance(error, JournalError | OSError):
            # The previous checkpoint stays valid, and its files are kept. The next checkpoint is tried when it is due.
            logger.error("a checkpoint of the transaction journal failed: %s", error)
        elif error is not None:
            raise error

    def transactions_after(self, after_epoch: int = 0) -> Iterator[Transaction]:
        transactions = self.transactions
        for epoch in self._table.epoch_index.epochs_after(after_epoch):
            yield transactions[epoch]

    def require_space(self, size_bytes: int) -> None:
        if self._journal.stopped is not None:
            raise StorageStopped(reason=self._journal.stopped, outcome="not done")
        if self._disk.free_space(self._folder) < size_bytes:
            raise DiskFull()

    @property
    def journal_bytes(self) -> int:
        return self._journal.size_bytes

    @property
    def idle(self) -> bool:
        return self._writer.idle and not self._is_checkpoint_running and not self._compaction.running
