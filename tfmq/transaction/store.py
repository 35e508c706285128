"""Holds the transactions that are under way, and the journal that makes them durable.

Every change of what is durable is the fold of a journal entry, live as in recovery (`ledger`). What is asked during
a turn is queued, written in one append by `write()`, folded in order, and then told to who asked. One owner's thread,
except where a method says otherwise.
"""

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

# When the journal's checkpoints begin, and how they end: a worker writes them while the owner goes on.

logger = logging.getLogger("tfmq.transaction")


class Checkpoints:
    """One at a time. The owner's thread calls `tend` while no file is being begun."""

    def __init__(self, journal: JournalStore, run: Run) -> None:
        self._journal = journal
        self._run = run
        self.working = False

    def tend(self) -> None:
        """Begins a checkpoint if one is due."""
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
            # The old checkpoints stand; the journal stays as long as it must, and the next try comes by itself.
            logger.error("a checkpoint of the transaction journal failed: %s", error)
            self._journal.checkpointed(error)
        else:
            raise error


# Numbers for transactions that nobody had before, from one durable counter: a late request of an older transaction
# of the same name can never meet a newer one.
#
# They are taken from ranges; a range is forced to the disk before its first epoch is given out, and what is left of it
# after a stop is never used. The journal may be an older copy of one that went on, so the first range of a start begins
# at the clock's number where that is higher.

RANGE: Final = 1 << 20
"""Epochs leased at once. 63 bits last for ever at one range a start."""

AHEAD: Final = RANGE // 2
"""So many left, and the next range is leased: half a minute of the fastest rate."""

WAITING = (
    "The broker's transaction journal is being written; new transactions wait for it. Try again in a moment."
)


EPOCHS_PER_SECOND: Final = 1 << 17
"""More than can be given out, so the clock's number passes each range within eight seconds."""
CLOCK_BEGIN_SECONDS: Final = 1_700_000_000
CLOCK_EPOCH_MAX: Final = 1 << 61


def first_epoch(end: int, wall_ms: int) -> int:
    """The first epoch of a start: not below `end`, where the journal's ranges end, and, unless no range was ever leased
    (`end` is 1), not below the clock's number."""
    if end <= 1:
        return end
    return max(end, min((wall_ms // 1000 - CLOCK_BEGIN_SECONDS) * EPOCHS_PER_SECOND, CLOCK_EPOCH_MAX))


class Epochs:
    """Takes epochs below `end`. `lease(end, forced)` journals that those below the new `end` may be given out, and
    calls `forced(error)` when that is on the disk, or is not going to be.
    """

    def __init__(self, lease: Callable[[int, Callable[[BaseException | None], None]], None]) -> None:
        self._lease = lease
        self._next = self._end = 0
        self._leasing = False
        self._trouble: BaseException | None = None

    def start(self, first: int, end: int) -> None:
        """Those from `first` on, below `end`, are leased."""
        self._next, self._end = first, end

    def take(self) -> int:
        """The next one. Raises Busy while the next range is on its way, DiskFull or StorageStopped if the last try
        failed; each call tries again.
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


# What is asked of transactions becomes records: each verb checks the state, and queues the record that changes it.
#
# Everything else (who may ask, limits, offsets, targets) is the handler's business. While a record waits to be written
# the state is preparing, committing or rolling_back; if it is refused, the state is what it was before.

SEND: Final = "send"
FORGET: Final = "forget"


class Recording:
    """The verbs of a `JournalTransactionStore`. They raise states.WrongStep, and nothing is changed then."""

    def __init__(
        self,
        ledger: Ledger,
        queue: JournalQueue,
        epochs: Epochs,
        clock: Clock,
        decided_ms: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._epochs = epochs
        self._clock = clock
        self._decided_ms = decided_ms
        """The time of a decision, from which the delays of what it brings count."""
        self._forgetting: set[int] = set()
        """Heuristic ones whose end is queued."""

    def begin(self, origin: Origin) -> Transaction:
        """A new, open transaction under an epoch that nobody had before; nothing is written.

        It is in `transactions`, and in `named` if it has a name. Raises Busy while new epochs wait for the disk,
        StorageStopped or DiskFull if they do not come.
        """
        return self._ledger.begin(self._epochs.take(), origin)

    def discard(self, transaction: Transaction) -> None:
        """Forgets an open transaction without a record; its outcome is not kept. Raises WrongStep for another."""
        states.step(transaction.state, states.FINISH_EMPTY)
        self._ledger.remove(transaction)

    def finish_empty(self, transaction: Transaction) -> None:
        """An open one with nothing in it ends as "read_only", without a record."""
        states.step(transaction.state, states.FINISH_EMPTY)
        self._ledger.remove(transaction)
        transaction.state = states.READ_ONLY

    def add(self, transaction: Transaction, piece: Piece, written: Written) -> None:
        """Queues a batch of an open transaction. The caller has asked `streams.check` and the limits."""
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
        """Queues the prepare; when written the state is "prepared"."""
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
        """Queues the decision: of a prepared one, or one-phase of an open one with last `offsets` and `pieces`, which
        are written with it, all or none. When written the state is "applying" and `transaction.decision` is there.
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
        """Queues the end of an open or prepared one; when written it is gone from `transactions`."""
        self._ask(transaction, states.ASK_ROLLBACK)
        epoch, now_ms = transaction.epoch, self._clock.wall_ms()
        operation: journal_records.Operation
        if transaction.prepared_ms:
            operation = journal_records.Rollback(epoch, now_ms)
        else:
            operation = journal_records.LocalRollback(epoch, now_ms, transaction.origin)
        self._put(operation, written, transaction)

    def commit_by_hand(self, transaction: Transaction, written: Written) -> None:
        """As `commit` of a prepared one; it stays, as "heuristic_committed", until `forget`."""
        self._require_prepared(transaction, states.DECIDE_BY_HAND)
        self._ask(transaction, states.ASK_COMMIT)
        operation = journal_records.HeuristicCommit(transaction.epoch, self._decided_ms())
        self._put(operation, written, transaction)

    def rollback_by_hand(self, transaction: Transaction, written: Written) -> None:
        """As `rollback` of a prepared one; it stays, as "heuristic_rolled_back", until `forget`."""
        self._require_prepared(transaction, states.DROP_BY_HAND)
        self._ask(transaction, states.ASK_ROLLBACK)
        operation = journal_records.HeuristicRollback(transaction.epoch, self._clock.wall_ms())
        self._put(operation, written, transaction)

    def forget(self, transaction: Transaction, written: Written) -> None:
        """Queues the end of a heuristic one's memory; its plain outcome stays among the outcomes.

        Raises WrongStep for any other, and for one that was committed by hand and is not settled yet.
        """
        epoch = transaction.epoch
        if transaction.state not in states.HEURISTIC or not transaction.settled or epoch in self._forgetting:
            raise states.WrongStep(transaction.state, FORGET)
        self._forgetting.add(epoch)

        def told(place: int, error: BaseException | None) -> None:
            self._forgetting.discard(epoch)
            written(place, error)

        self._queue.put(journal_records.Forget(epoch, self._clock.wall_ms()), told)

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
        """Their record was not written: each is what it was before."""
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
        """Queues one decision over all members (prepared), which ends `dropped` (prepared) too. When written every
        member has the same `decision`. Without members it only drops what was left over.

        Open ones end by records of their own, which say who they are.
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
        """Queues the fence of a run and the end of `dropped` (prepared)."""
        self._ask_all((), dropped)
        operation = journal_records.GroupAbort(
            group, sequence, run, [each.epoch for each in dropped], self._clock.wall_ms()
        )
        self._queue.put(operation, written, refused=partial(self._refused, dropped))

    def forget_group(self, group: str, written: Written) -> None:
        """Queues the end of a group's memory."""
        self._queue.put(journal_records.GroupForget(group, self._clock.wall_ms()), written)

    def _ask_all(self, members: Sequence[Transaction], dropped: Sequence[Transaction]) -> None:
        """All of them, or WrongStep and nothing has changed."""
        for member in members:
            self._require_prepared(member, states.DECIDE)
        for transaction in dropped:
            self._require_prepared(transaction, states.DROP)
        for member in members:
            self._ask(member, states.ASK_COMMIT)
        for transaction in dropped:
            self._ask(transaction, states.ASK_ROLLBACK)


LOCAL_OUTCOMES_MAX: Final = 100_000
"""Outcomes of transactions that only their session could name: a repeated commit comes within minutes."""
LOCAL_OUTCOME_MS: Final = 3_600_000

KEY_SIZE: Final = 16
"""Of the digests of names; see `Outcomes`."""


lost_of = attrgetter("lost")


def loss_of(transaction: Transaction) -> str:
    """What the start tells of one that lost messages with damage of the journal."""
    return (
        f"the transaction {transaction.xid or transaction.epoch} is {transaction.state} and lost {transaction.lost} of"
        f" its {transaction.messages} messages with damage in the journal"
    )


class JournalTransactionStore(Recording):
    """See the module. Made by `open`.

    `transactions`: epoch -> Transaction, all that are not settled; `listed` has them in order. `named`: xid -> the
    latest live one of that name; `counts`: state -> how many of `transactions`.
    """

    def __init__(
        self,
        journal: JournalStore,
        ledger: Ledger,
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
        queue = JournalQueue(journal, ledger, force=force, run=run)
        super().__init__(ledger, queue, Epochs(self._lease), clock, decided_ms)
        self._journal = journal
        self._disk, self._folder = disk, folder
        self._randomness = randomness
        self._checkpoints = Checkpoints(journal, run)
        self._relocation = Relocation(journal, ledger, self._queue, run, options.file_bytes)
        self.transactions = ledger.transactions
        self.named = ledger.named
        self.counts = ledger.counts
        self.streams = ledger.streams
        self.groups = ledger.groups
        self.warnings: Sequence[str] = ()
        """What the opening found that an operator should know, in sentences."""
        self.dropped: Sequence[Transaction] = ()
        """What the start has rolled back, because it was never prepared."""

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
        """Opens or makes the journal in the existing `folder`, after recovery; forces a first range of epochs.

        Transactions that were never prepared are gone then; prepared and decided ones are in `transactions`.
        `force(journal, place, waiter)`: a Forcer's `want`. `limits` by name, `settings` the keys `transaction.*`
        without that prefix (outcome_seconds, journal_file_bytes). `decided_ms`: the time that decisions carry, ms since
        1970, if another than the wall clock's.
        Raises Corrupt (file and position named; nothing was changed), NewerFormat, Full, Stopped, OSError.
        """
        ledger = Ledger(
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
            state=ledger,
            options=options,
            randomness=randomness,
        )
        store = cls(
            journal,
            ledger,
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
            first += RANGE  # of one that is lost nobody knows which were given out
        lease = self._epochs_operation(first + RANGE)
        try:
            (place,) = self._journal.append([entry.Operation(*journal_records.pack(lease))])
            self._journal.force()
        except Full:
            # The broker starts on a full disk, too; the first transaction asks again.
            self._epochs.start(first, first)
            return
        self._ledger.enter(place, lease)
        assert self._ledger.holds is not None
        self._ledger.holds.rolled()
        self._epochs.start(first, first + RANGE)

    def _epochs_operation(self, end: int) -> journal_records.Epochs:
        return journal_records.Epochs(end, self._clock.wall_ms(), self._randomness(KEY_SIZE))

    def _lease(self, end: int, forced: Waiter) -> None:
        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                forced(error)
            else:
                self._queue.when_forced(place, forced)

        self._queue.put(self._epochs_operation(end), written)

    @property
    def journal_id(self) -> int:
        """Names this journal as the source of effects: `Source(SOURCE_TRANSACTION, journal_id, place, number)`."""
        return self._journal.journal_id

    @property
    def end_place(self) -> int:
        """The place where the next entry goes: every decision so far lies before it."""
        return self._journal.end_offset

    @property
    def size_bytes(self) -> int:
        """Of all that is kept for transactions, as it lies in the journal: messages, and a header for each batch."""
        return self._ledger.kept.entries_bytes

    @property
    def batches(self) -> int:
        """How many batches they came in, each of which has memory."""
        return self._ledger.kept.batches

    def is_durable(self, transaction: Transaction) -> bool:
        """Whether the record that made its state is on the disk: a power cut could else take the state back."""
        return transaction.place < self._journal.forced_offset

    def ending(self, xid: str, epoch: int = 0) -> Transaction | None:
        """A prepared one that was rolled back, by a record that is not on the disk yet: it may come back."""
        for transaction in reversed(self._ledger.ending.values()):
            if transaction.origin.xid == xid and epoch in (0, transaction.epoch):
                return None if self.is_durable(transaction) else transaction
        return None

    @property
    def stopped(self) -> str | None:
        """Why nothing can be written any more; None: it can."""
        return self._journal.stopped

    def outcome(self, xid: str, epoch: int = 0) -> Outcome | None:
        """What became of a transaction that is over: of that very epoch, or of the latest of that name."""
        return self._ledger.outcome(xid, epoch)

    def left_nothing(self, xid: str, epoch: int) -> bool:
        """Whether a local transaction that is over, and whose outcome is not remembered, was certainly not committed:
        its epoch was given out, and no outcome of its time is forgotten.
        """
        given = self._ledger.local_outcomes.forgotten < epoch < self._ledger.epochs_end
        return given and xid.startswith(LOCAL_PREFIX) and self.outcome(xid, epoch) is None

    @property
    def repaired(self) -> bool:
        """Whether a repair lost some of the journal, ever: what is not there may have been."""
        return self._ledger.streams.torn

    # After the decision

    def slices(
        self, decision: Decision, log_id: int, after: int = 0, slice_bytes: int = SLICE_BYTES
    ) -> Iterator[Slice]:
        """What is still to go into one partition, behind the message number `after`.

        Appends of at most `slice_bytes` (one block alone may be larger), read from the journal and verified. Any
        thread, beside the owner. Raises Corrupt, OSError.
        """
        return slicer.slices(self._journal.read, decision.rows(log_id), log_id, after, slice_bytes)

    def slices_cached(
        self, decision: Decision, log_id: int, after: int = 0, slice_bytes: int = SLICE_BYTES
    ) -> list[Slice] | None:
        """The same at once, if it is little and need not wait for the disk; else None. Raises Corrupt."""
        cached = decision.transactions[0].cached
        rows = decision.rows(log_id)
        if cached is not None:
            return slicer.slices_of(cached, rows, log_id, after, slice_bytes)
        return slicer.slices_at_once(self._journal.read_cached, rows, log_id, after, slice_bytes)

    def applied(self, decision: Decision) -> None:
        """All its effects are written, or their targets gone: the states become "committed", memory is freed."""
        for transaction in decision.transactions:
            self._ledger.step(transaction, states.APPLIED)
            self._queue.uncache(transaction)
        decision.release()

    def settle(self, decision: Decision) -> None:
        """All its effects are on the disk: the journal need not keep its messages. After `applied`."""
        self._ledger.settle(decision)

    # Turning

    @property
    def due(self) -> bool:
        """Whether `write` has something to do now."""
        return self._queue.due

    def write(self) -> bool:
        """The turn's end: appends what is queued, folds it, tells who asked; whether it did anything. What waits for a
        new file in a worker owns its bytes from then on.
        """
        wrote = self._queue.write()
        if wrote and not self._queue.working:
            self._checkpoints.tend()
        return wrote

    def when_forced(self, place: int, waiter: Waiter) -> None:
        """`waiter(None)` once the entry at `place` is on the disk, `waiter(error)` if the journal stops before."""
        self._queue.when_forced(place, waiter)

    def tend(self) -> None:
        """Housekeeping, about once a second: a checkpoint if one is due, old files emptied if they hold too little."""
        if self._queue.working:
            return
        self._relocation.tend()
        self._checkpoints.tend()

    def listed(self, after_epoch: int = 0) -> Iterator[Transaction]:
        """`transactions` with an epoch above `after_epoch`, by rising epoch, without looking at those before."""
        transactions = self.transactions
        for epoch in self._ledger.order.after(after_epoch):
            yield transactions[epoch]

    def check(self, size_bytes: int) -> None:
        """Whether the journal takes so many bytes more. Raises StorageStopped, DiskFull."""
        if self._journal.stopped is not None:
            raise StorageStopped(reason=self._journal.stopped, outcome="not done")
        if self._disk.free_space(self._folder) < size_bytes:
            raise DiskFull()

    def status(self) -> Mapping[str, Any]:
        """journal: "open" or why it stopped; journal_bytes; bytes (of all messages kept)."""
        return {
            "journal": self._journal.stopped or "open",
            "journal_bytes": self._journal.size_bytes,
            "bytes": self._ledger.kept.size_bytes,
        }

    @property
    def idle(self) -> bool:
        """Nothing is queued or under way: it may be closed."""
        return self._queue.idle and not self._checkpoints.working and not self._relocation.working

    def close(self) -> None:
        """Forces, writes a last checkpoint, closes; only when `idle`. Raises Stopped, Full: closed all the same."""
        self._journal.close()

    def abandon(self, reason: str) -> None:
        """Lets go without writing anything more."""
        self._journal.abandon(reason)
