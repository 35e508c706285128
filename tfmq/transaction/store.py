"""Holds the transactions that are under way, and the journal that makes them durable.

Every change of what is durable is the fold of a journal entry, live as in recovery (`ledger`). What is asked during
a turn is queued, written in one append by `write()`, folded in order, and then told to who asked. One owner's thread,
except where a method says otherwise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from journal.clock import Clock
from journal.disk import Disk
from journal.errors import Full
from journal.wal import entry
from journal.wal.store import JournalOptions, JournalStore
from tfmq.errors import DiskFull, StorageStopped
from tfmq.limits import PRODUCER_IDLE_SECONDS
from tfmq.transaction import operations, slices, states
from tfmq.transaction.checkpoints import Checkpoints
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.epochs import RANGE, Epochs, first_epoch
from tfmq.transaction.holds import Holds
from tfmq.transaction.ledger import Ledger
from tfmq.transaction.outcomes import LOCAL_PREFIX, Outcome, Outcomes
from tfmq.transaction.queue import Force, JournalQueue, Run, Waiter
from tfmq.transaction.recording import Recording
from tfmq.transaction.relocation import Relocation
from tfmq.transaction.slices import SLICE_BYTES
from tfmq.transaction.streams import LeasedMs, Streams
from tfmq.transaction.transaction import Decision, Slice, Transaction

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
    ) -> "JournalTransactionStore":
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
            (place,) = self._journal.append([entry.Operation(*operations.pack(lease))])
            self._journal.force()
        except Full:
            # The broker starts on a full disk, too; the first transaction asks again.
            self._epochs.start(first, first)
            return
        self._ledger.enter(place, lease)
        assert self._ledger.holds is not None
        self._ledger.holds.rolled()
        self._epochs.start(first, first + RANGE)

    def _epochs_operation(self, end: int) -> operations.Epochs:
        return operations.Epochs(end, self._clock.wall_ms(), self._randomness(KEY_SIZE))

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
        return slices.slices(self._journal.read, decision.rows(log_id), log_id, after, slice_bytes)

    def slices_cached(
        self, decision: Decision, log_id: int, after: int = 0, slice_bytes: int = SLICE_BYTES
    ) -> list[Slice] | None:
        """The same at once, if it is little and need not wait for the disk; else None. Raises Corrupt."""
        cached = decision.transactions[0].cached
        rows = decision.rows(log_id)
        if cached is not None:
            return slices.slices_of(cached, rows, log_id, after, slice_bytes)
        return slices.slices_at_once(self._journal.read_cached, rows, log_id, after, slice_bytes)

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
