"""The durable store of transactions: the journal and the table replayed from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

from journal.clock import Clock
from journal.disk import Disk
from journal.errors import Full, JournalError
from journal.wal import entry
from journal.wal.store import JournalOptions, JournalStore
from tfmq.apply_target import GroupPlaces
from tfmq.errors import Busy, DiskFull, StorageStopped
from tfmq.limits import PRODUCER_IDLE_SECONDS
from tfmq.transaction import journal_records, slicer, states
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.compaction import Relocation
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.journal_writer import Force, JournalQueue, Run, Waiter, Written
from tfmq.transaction.model import Decision, Piece, Slice, Transaction
from tfmq.transaction.outcomes import LOCAL_PREFIX, Outcome, Outcomes
from tfmq.transaction.producer_state import LeasedMs, Streams
from tfmq.transaction.slicer import SLICE_BYTES
from tfmq.transaction.transaction_table import Holds, Ledger

logger = logging.getLogger("tfmq.transaction")


class Checkpoints:
    """Starts journal checkpoints, one at a time; a worker writes them.

    The owner's thread calls `run_if_due` while no journal file is being started.
    """

    def __init__(self, journal: JournalStore, run: Run) -> None:
        self._journal = journal
        self._run = run
        self.working = False

    def tend(self) -> None:
        """Start a checkpoint if one is due."""
        if self.working or not self._journal.checkpoint_due:
            return
        work = self._journal.checkpoint()
        self.working = True
        self._run(work, self._done)

    def _done(self, _: Any, error: BaseException | None) -> None:
        self.working = False
        if error is None:
            self._journal.checkpointed(None)
        elif isinstance(error, JournalError | OSError):
            # The previous checkpoint stays valid and the journal keeps its files; the next `run_if_due` retries.
            logger.error("a checkpoint of the transaction journal failed: %s", error)
            self._journal.checkpointed(error)
        else:
            raise error


RANGE: Final = 1 << 20
"""Epochs leased at once. 63 bits are enough for any number of starts."""

AHEAD: Final = RANGE // 2
"""With fewer epochs left the next range is leased; half a minute at the highest rate."""

WAITING = (
    "The broker's transaction journal is being written; new transactions wait for it. Try again in a moment."
)


EPOCHS_PER_SECOND: Final = 1 << 17
"""Higher than any possible rate; the clock-based epoch passes each range within 8 seconds."""
CLOCK_BEGIN_SECONDS: Final = 1_700_000_000
CLOCK_EPOCH_MAX: Final = 1 << 61


def first_epoch(end: int, wall_ms: int) -> int:
    """Return the first epoch of a start.

    It is not below `end`, where the journaled ranges end, nor below the epoch derived from the clock. The
    clock is ignored if no range was ever leased (`end` is 1).
    """
    if end <= 1:
        return end
    return max(end, min((wall_ms // 1000 - CLOCK_BEGIN_SECONDS) * EPOCHS_PER_SECOND, CLOCK_EPOCH_MAX))


class Epochs:
    """Allocates unique, increasing epochs from leased ranges.

    Epochs are never reused, so a late request of an older transaction cannot reach a newer one of the same
    name. A range is durable in the journal before its first epoch is allocated; what remains of it at a
    stop is not used. The journal may be an older copy of one that continued elsewhere, so the first range
    of a start begins at the epoch derived from the clock if that is higher.

    `lease(end, forced)` writes to the journal that epochs below `end` may be in use, and calls
    `forced(error)` when that is durable or has failed.
    """

    def __init__(self, lease: Callable[[int, Callable[[BaseException | None], None]], None]) -> None:
        self._lease = lease
        self._next = self._end = 0
        self._leasing = False
        self._trouble: BaseException | None = None

    def start(self, first: int, end: int) -> None:
        """Set the leased range: from `first` up to, but not including, `end`."""
        self._next, self._end = first, end

    def take(self) -> int:
        """Allocate the next epoch. Every call retries a failed lease.

        Raises: Busy while the next range is being leased, DiskFull or StorageStopped if the last lease
        failed.
        """
        if self._end - self._next < AHEAD and not self._leasing:
            self._renew()
        if self._next >= self._end:
            raise self._error()
        epoch = self._next
        self._next += 1
        return epoch

    def _renew(self) -> None:
        self._leasing = True
        end = self._end + RANGE

        def forced(error: BaseException | None) -> None:
            self._leasing = False
            self._trouble = error
            if error is None:
                self._end = end

        self._lease(end, forced)

    def _error(self) -> Exception:
        if self._trouble is None:
            return Busy(WAITING)
        if isinstance(self._trouble, Full):
            return DiskFull()
        return StorageStopped(reason=str(self._trouble))


SEND: Final = "send"
FORGET: Final = "forget"


class Recording:
    """Base class of the store: checks a transaction's state and queues the record of a change.

    Permissions, limits, offsets and targets are the coordinator's task. While a record is queued the state
    is preparing, committing or rolling_back; if the write fails, the previous state is restored. The
    methods raise states.InvalidTransition, and then nothing has changed.
    """

    def __init__(
        self,
        table: Ledger,
        queue: JournalQueue,
        epochs: Epochs,
        clock: Clock,
        decided_ms: Callable[[], int],
    ) -> None:
        self._ledger = table
        self._queue = queue
        self._epochs = epochs
        self._clock = clock
        self._decided_ms = decided_ms
        """Returns the time of a decision, from which relative delays of its messages count."""
        self._forgetting: set[int] = set()
        """Epochs of heuristic transactions whose forget record is queued."""

    def begin(self, origin: Origin) -> Transaction:
        """Create an open transaction with a new epoch; nothing is written.

        The transaction is in `transactions`, and in `by_xid` if it has a name.
        Raises: Busy while new epochs are being leased, StorageStopped or DiskFull if the lease failed.
        """
        return self._ledger.begin(self._epochs.take(), origin)

    def discard(self, transaction: Transaction) -> None:
        """Remove an open transaction without a record; no outcome is kept.

        Raises: InvalidTransition if it is not open.
        """
        states.step(transaction.state, states.FINISH_EMPTY)
        self._ledger.remove(transaction)

    def finish_empty(self, transaction: Transaction) -> None:
        """End an open transaction without messages as "read_only", without a record."""
        states.step(transaction.state, states.FINISH_EMPTY)
        self._ledger.remove(transaction)
        transaction.state = states.READ_ONLY

    def add(self, transaction: Transaction, piece: Piece, written: Written) -> None:
        """Queue a batch of an open transaction. The caller has checked its sequences and the limits."""
        if transaction.state != states.OPEN:
            raise states.WrongStep(transaction.state, SEND)
        transaction.topics.setdefault(piece.log_id, piece.topic)
        self._queue.put(None, written, transaction=transaction, pieces=(piece,))

    def prepare(
        self,
        transaction: Transaction,
        offsets: Sequence[GroupPlaces],
        expires_ms: int,
        written: Written,
    ) -> None:
        """Queue the prepare record; the state is "prepared" once it is written."""
        self._ask(transaction, states.ASK_PREPARE)
        operation = journal_records.Prepare(
            transaction.epoch,
            self._clock.wall_ms(),
            transaction.origin,
            tuple(transaction.topics.items()),
            tuple(offsets),
            transaction.messages + transaction.queued,
            expires_ms,
        )
        self._put(operation, written, transaction)

    def commit(
        self,
        transaction: Transaction,
        written: Written,
        *,
        offsets: Sequence[GroupPlaces] = (),
        pieces: Sequence[Piece] = (),
    ) -> None:
        """Queue the commit record of a prepared transaction, or of an open one (one-phase).

        A one-phase commit may add `offsets` and `batches`, which are written atomically with the record.
        Once written, the state is "applying" and `transaction.decision` is set.
        """
        if transaction.prepared_ms:
            if offsets or pieces:
                raise states.WrongStep(transaction.state, SEND)
            self._ask(transaction, states.ASK_COMMIT)
            self._put(journal_records.Commit(transaction.epoch, self._decided_ms()), written, transaction)
            return
        self._ask(transaction, states.ASK_COMMIT)
        topics = transaction.topics
        count = transaction.messages + transaction.queued
        for piece in pieces:
            topics[piece.log_id] = piece.topic
            count += piece.count
        operation = journal_records.LocalCommit(
            transaction.epoch,
            self._decided_ms(),
            transaction.origin,
            tuple(topics.items()),
            tuple(offsets),
            count,
        )
        self._put(operation, written, transaction, pieces)

    def rollback(self, transaction: Transaction, written: Written) -> None:
        """Queue the rollback of an open or prepared transaction.

        Once written it is not in `transactions`.
        """
        self._ask(transaction, states.ASK_ROLLBACK)
        epoch, now_ms = transaction.epoch, self._clock.wall_ms()
        operation: journal_records.Operation
        if transaction.prepared_ms:
            operation = journal_records.Rollback(epoch, now_ms)
        else:
            operation = journal_records.LocalRollback(epoch, now_ms, transaction.origin)
        self._put(operation, written, transaction)

    def commit_by_hand(self, transaction: Transaction, written: Written) -> None:
        """Like `commit` of a prepared transaction, by an operator.

        Kept as "heuristic_committed" until `forget`.
        """
        self._require_prepared(transaction, states.DECIDE_BY_HAND)
        self._ask(transaction, states.ASK_COMMIT)
        operation = journal_records.HeuristicCommit(transaction.epoch, self._decided_ms())
        self._put(operation, written, transaction)

    def rollback_by_hand(self, transaction: Transaction, written: Written) -> None:
        """Like `rollback` of a prepared one, by an operator.

        Kept as "heuristic_rolled_back" until `forget`.
        """
        self._require_prepared(transaction, states.DROP_BY_HAND)
        self._ask(transaction, states.ASK_ROLLBACK)
        operation = journal_records.HeuristicRollback(transaction.epoch, self._clock.wall_ms())
        self._put(operation, written, transaction)

    def forget(self, transaction: Transaction, written: Written) -> None:
        """Queue the forget record of a heuristic transaction; its ordinary outcome is kept.

        Raises: InvalidTransition for any other state, and after a heuristic commit that is not completed
        yet.
        """
        epoch = transaction.epoch
        if transaction.state not in states.HEURISTIC or not transaction.settled or epoch in self._forgetting:
            raise states.WrongStep(transaction.state, FORGET)
        self._forgetting.add(epoch)

        def completed(lsn: int, error: BaseException | None) -> None:
            self._forgetting.discard(epoch)
            written(lsn, error)

        self._queue.put(journal_records.Forget(epoch, self._clock.wall_ms()), completed)

    def _require_prepared(self, transaction: Transaction, event: str) -> None:
        if transaction.state != states.PREPARED:
            raise states.WrongStep(transaction.state, event)

    def _ask(self, transaction: Transaction, event: str) -> None:
        self._ledger.step(transaction, event)

    def _put(
        self,
        operation: journal_records.Operation,
        written: Written,
        transaction: Transaction,
        pieces: Sequence[Piece] = (),
    ) -> None:
        refused = partial(self._refused, (transaction,))
        self._queue.put(operation, written, transaction=transaction, pieces=pieces, refused=refused)

    def _refused(self, transactions: Sequence[Transaction]) -> None:
        """Restore the states after the record of these transactions could not be written."""
        for transaction in transactions:
            event = states.REFUSED_PREPARED if transaction.prepared_ms else states.REFUSED
            self._ledger.step(transaction, event)

    # Commit groups

    def commit_group(
        self,
        group: str,
        sequence: int,
        run: str,
        rows: int,
        members: Sequence[Transaction],
        dropped: Sequence[Transaction],
        written: Written,
    ) -> None:
        """Queue one commit record for all `members`, which also rolls back `dropped`.

        All must be prepared. Once written, all members have the same `decision`. Without members the record
        only rolls back `dropped`. Open members need rollback records of their own, which contain their
        origin.
        """
        self._ask_all(members, dropped)
        operation = journal_records.GroupCommit(
            group,
            sequence,
            run,
            rows,
            [each.epoch for each in members],
            [each.epoch for each in dropped],
            self._decided_ms(),
        )
        self._queue.put(operation, written, refused=partial(self._refused, [*members, *dropped]))

    def abort_group(
        self, group: str, sequence: int, run: str, dropped: Sequence[Transaction], written: Written
    ) -> None:
        """Queue the fence of a run and the rollback of `dropped` (prepared)."""
        self._ask_all((), dropped)
        operation = journal_records.GroupAbort(
            group, sequence, run, [each.epoch for each in dropped], self._clock.wall_ms()
        )
        self._queue.put(operation, written, refused=partial(self._refused, dropped))

    def forget_group(self, group: str, written: Written) -> None:
        """Queue the record that forgets a commit group."""
        self._queue.put(journal_records.GroupForget(group, self._clock.wall_ms()), written)

    def _ask_all(self, members: Sequence[Transaction], dropped: Sequence[Transaction]) -> None:
        """Change the states of all transactions, or of none.

        Raises: InvalidTransition.
        """
        for member in members:
            self._require_prepared(member, states.DECIDE)
        for transaction in dropped:
            self._require_prepared(transaction, states.DROP)
        for member in members:
            self._ask(member, states.ASK_COMMIT)
        for transaction in dropped:
            self._ask(transaction, states.ASK_ROLLBACK)


LOCAL_OUTCOMES_MAX: Final = 100_000
"""Outcomes of local transactions; a repeated request follows within minutes."""
LOCAL_OUTCOME_MS: Final = 3_600_000

KEY_SIZE: Final = 16
"""Bytes of the key for name digests; see `Outcomes`."""


lost_of = attrgetter("lost")


def loss_of(transaction: Transaction) -> str:
    """What the start tells of one that lost messages with damage of the journal."""
    return (
        f"the transaction {transaction.xid or transaction.epoch} is {transaction.state} and lost {transaction.lost} of"
        f" its {transaction.messages} messages with damage in the journal"
    )


class JournalTransactionStore(Recording):
    """Transactions and the journal that makes them durable. Created by `open`.

    Every durable change is the replay of a journal entry, live as in recovery. Requests of a turn are
    queued; `write()` writes them in one append, applies them in order and calls their callbacks. Used by
    one thread, except where a method states otherwise.

    `transactions`: epoch -> transaction, all that are not completed. `by_xid`: name -> its latest live
    transaction. `state_counts`: state -> number of `transactions`.
    """

    def __init__(
        self,
        journal: JournalStore,
        table: Ledger,
        *,
        disk: Disk,
        folder: str,
        clock: Clock,
        randomness: Callable[[int], bytes],
        force: Force,
        run: Run,
        options: JournalOptions,
        decided_ms: Callable[[], int],
    ) -> None:
        queue = JournalQueue(journal, table, force=force, run=run)
        super().__init__(table, queue, Epochs(self._lease), clock, decided_ms)
        self._journal = journal
        self._disk, self._folder = disk, folder
        self._randomness = randomness
        self._checkpoints = Checkpoints(journal, run)
        self._relocation = Relocation(journal, table, self._queue, run, options.file_bytes)
        self.transactions = table.transactions
        self.named = table.named
        self.counts = table.counts
        self.streams = table.streams
        self.groups = table.groups
        self.warnings: Sequence[str] = ()
        """Warnings of the recovery for operators, as sentences."""
        self.dropped: Sequence[Transaction] = ()
        """Transactions rolled back at the start because they were not prepared."""

    @classmethod
    def open(
        cls,
        disk: Disk,
        folder: str,
        *,
        clock: Clock,
        randomness: Callable[[int], bytes],
        new_id: Callable[[], int],
        leased_ms: LeasedMs,
        force: Force,
        run: Run,
        limits: Mapping[str, int],
        settings: Mapping[str, int],
        decided_ms: Callable[[], int] | None = None,
    ) -> JournalTransactionStore:
        """Open or create the journal in the existing `folder`, recover it, lease epochs durably.

        Afterwards unprepared transactions are rolled back; prepared and decided ones are in `transactions`.
        `request_fsync` requests an fsync of the journal up to an LSN. `limits` are by name; `settings` are
        the keys `transaction.*` without that prefix (outcome_seconds, journal_file_bytes). `decision_time`
        returns the time of decisions, in ms since 1970; default is the wall clock.
        Raises: Corrupt (with file and position; nothing was changed), NewerFormat, Full, Stopped, OSError.
        """
        table = Ledger(
            outcomes=Outcomes(
                outcomes_max=limits["transaction_outcomes"], keep_ms=settings["outcome_seconds"] * 1000
            ),
            local_outcomes=Outcomes(outcomes_max=LOCAL_OUTCOMES_MAX, keep_ms=LOCAL_OUTCOME_MS),
            streams=Streams(
                streams_max=limits["transaction_streams"],
                idle_ms=limits.get("producer_idle_seconds", PRODUCER_IDLE_SECONDS) * 1000,
                leased_ms=leased_ms,
            ),
            groups=CommitGroups(groups_max=limits["commit_groups"], fences_max=limits["commit_group_fences"]),
        )
        file_bytes = settings["journal_file_bytes"]
        options = JournalOptions(file_bytes=file_bytes, checkpoint_bytes=file_bytes)
        journal = JournalStore.open(
            disk,
            folder,
            new_id=new_id,
            clock=clock,
            state=table,
            options=options,
            randomness=randomness,
        )
        store = cls(
            journal,
            table,
            disk=disk,
            folder=folder,
            clock=clock,
            randomness=randomness,
            force=force,
            run=run,
            options=options,
            decided_ms=clock.wall_ms if decided_ms is None else decided_ms,
        )
        store._start()
        store.warnings = (
            *journal.recovery.warnings,
            *map(loss_of, filter(lost_of, store.transactions.values())),
        )
        return store

    def _start(self) -> None:
        self.dropped = self._ledger.recovered(Holds(self._journal))
        first = first_epoch(self._ledger.epochs_end, self._clock.wall_ms())
        if self._ledger.repaired:
            first += RANGE  # A lost lease record may have leased one more range.
        lease = self._epochs_operation(first + RANGE)
        try:
            (lsn,) = self._journal.append([entry.Operation(*journal_records.pack(lease))])
            self._journal.force()
        except Full:
            # The broker also starts on a full disk; the first transaction retries the lease.
            self._epochs.start(first, first)
            return
        self._ledger.enter(lsn, lease)
        assert self._ledger.holds is not None
        self._ledger.holds.rolled()
        self._epochs.start(first, first + RANGE)

    def _epochs_operation(self, end: int) -> journal_records.Epochs:
        return journal_records.Epochs(end, self._clock.wall_ms(), self._randomness(KEY_SIZE))

    def _lease(self, end: int, forced: Waiter) -> None:
        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                forced(error)
            else:
                self._queue.when_forced(lsn, forced)

        self._queue.put(self._epochs_operation(end), written)

    @property
    def journal_id(self) -> int:
        """Id of this journal in the `Source` of effects: (SOURCE_TRANSACTION, id, LSN, ordinal)."""
        return self._journal.journal_id

    @property
    def end_place(self) -> int:
        """LSN of the next entry; every decision so far has a lower one."""
        return self._journal.end_offset

    @property
    def size_bytes(self) -> int:
        """Bytes retained in the journal for transactions: messages and one entry header per batch."""
        return self._ledger.kept.entries_bytes

    @property
    def batches(self) -> int:
        """Number of batches retained; each also takes memory."""
        return self._ledger.kept.batches

    def is_durable(self, transaction: Transaction) -> bool:
        """Whether the record of the state is durable; otherwise a power failure could revert it."""
        return transaction.place < self._journal.forced_offset

    def ending(self, xid: str, epoch: int = 0) -> Transaction | None:
        """Return a prepared transaction whose written rollback is not durable yet: it may come back."""
        for transaction in reversed(self._ledger.ending.values()):
            if transaction.origin.xid == xid and epoch in (0, transaction.epoch):
                return None if self.is_durable(transaction) else transaction
        return None

    @property
    def stopped(self) -> str | None:
        """Why the journal accepts no more writes; None while it does."""
        return self._journal.stopped

    def outcome(self, xid: str, epoch: int = 0) -> Outcome | None:
        """Return the outcome of the ended transaction `xid` at `epoch`, or its latest for epoch 0."""
        return self._ledger.outcome(xid, epoch)

    def left_nothing(self, xid: str, epoch: int) -> bool:
        """Whether an ended local transaction without a known outcome was certainly not committed.

        True if its epoch was leased and no outcome of its time has expired.
        """
        given = self._ledger.local_outcomes.forgotten < epoch < self._ledger.epochs_end
        return given and xid.startswith(LOCAL_PREFIX) and self.outcome(xid, epoch) is None

    @property
    def repaired(self) -> bool:
        """Whether a repair has ever removed journal entries: missing state may have been lost."""
        return self._ledger.streams.torn

    # Applying a decision

    def slices(
        self, decision: Decision, log_id: int, after: int = 0, slice_bytes: int = SLICE_BYTES
    ) -> Iterator[Slice]:
        """Yield a partition's messages after ordinal `after` as slices of at most `slice_bytes`.

        A single larger block is one slice. Entries are read from the journal and verified. Any thread may
        call this, concurrently with the owner.
        Raises: Corrupt, OSError.
        """
        return slicer.slices(self._journal.read, decision.rows(log_id), log_id, after, slice_bytes)

    def slices_cached(
        self, decision: Decision, log_id: int, after: int = 0, slice_bytes: int = SLICE_BYTES
    ) -> list[Slice] | None:
        """Like `read_slices`, as a list; None if it is too much or the disk must be read.

        Raises: Corrupt.
        """
        cached = decision.transactions[0].cached
        rows = decision.rows(log_id)
        if cached is not None:
            return slicer.slices_of(cached, rows, log_id, after, slice_bytes)
        return slicer.slices_at_once(self._journal.read_cached, rows, log_id, after, slice_bytes)

    def applied(self, decision: Decision) -> None:
        """Mark a decision as applied: every effect is written, or its target deleted.

        Frees its memory.
        """
        for transaction in decision.transactions:
            self._ledger.step(transaction, states.APPLIED)
            self._queue.uncache(transaction)
        decision.release()

    def settle(self, decision: Decision) -> None:
        """Release the journal entries of an applied decision whose effects are all durable."""
        self._ledger.settle(decision)

    # Turns and housekeeping

    @property
    def due(self) -> bool:
        """Whether `write` has something to do now."""
        return self._queue.due

    def write(self) -> bool:
        """Append and apply what is queued, at the end of a turn; False if there was no work.

        Items that wait for a new journal file own their data.
        """
        wrote = self._queue.write()
        if wrote and not self._queue.working:
            self._checkpoints.tend()
        return wrote

    def when_forced(self, lsn: int, waiter: Waiter) -> None:
        """Call `waiter(None)` once the entry at `lsn` is durable.

        Calls `waiter(error)` if the journal stops first.
        """
        self._queue.when_forced(lsn, waiter)

    def tend(self) -> None:
        """Start a checkpoint or compaction if one is due; call this about once a second."""
        if self._queue.working:
            return
        self._relocation.tend()
        self._checkpoints.tend()

    def listed(self, after_epoch: int = 0) -> Iterator[Transaction]:
        """Yield transactions with an epoch above `after_epoch`, by rising epoch.

        Skips earlier ones at no cost.
        """
        transactions = self.transactions
        for epoch in self._ledger.order.after(after_epoch):
            yield transactions[epoch]

    def check(self, size_bytes: int) -> None:
        """Check whether the journal accepts `size_bytes` more.

        Raises: StorageStopped, DiskFull.
        """
        if self._journal.stopped is not None:
            raise StorageStopped(reason=self._journal.stopped, outcome="not done")
        if self._disk.free_space(self._folder) < size_bytes:
            raise DiskFull()

    def status(self) -> Mapping[str, Any]:
        """Return "journal" ("open" or why it stopped), "journal_bytes" and "bytes" (of messages)."""
        return {
            "journal": self._journal.stopped or "open",
            "journal_bytes": self._journal.size_bytes,
            "bytes": self._ledger.kept.size_bytes,
        }

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running, so that the store may be closed."""
        return self._queue.idle and not self._checkpoints.working and not self._relocation.working

    def close(self) -> None:
        """Fsync, write a last checkpoint and close; only when `idle`.

        Raises: Stopped, Full; the journal is closed all the same.
        """
        self._journal.close()

    def abandon(self, reason: str) -> None:
        """Close the journal without writing anything more."""
        self._journal.abandon(reason)
