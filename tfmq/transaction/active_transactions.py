"""The state of active transactions that is only in memory, and the actions at each change of a transaction's state.

A transaction is active from its begin until it is rolled back, or committed and applied. After each change of its state
`ActiveTransactions` updates timers, sessions, reserved space, offset locks and check-back, and calls waiting commands
again. A start of the broker rebuilds this state from the recovered transactions.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from journal.clock import Clock
from tfmq.apply_target import ApplyTarget, DurableCallback, RunInWorker, Timers
from tfmq.errors import Busy, TransactionTooLarge
from tfmq.transaction import rejections, states
from tfmq.transaction.applier import Applier
from tfmq.transaction.apply_progress import ApplyProgress, ProgressCallback
from tfmq.transaction.check_back import CheckBack
from tfmq.transaction.deadlines import Deadlines, EpochHeap
from tfmq.transaction.journal_writer import UncertainWrite, WrittenCallback
from tfmq.transaction.model import Decision, Transaction
from tfmq.transaction.requests import Caller, CheckBackQuery
from tfmq.transaction.store import TransactionStore

READ_ONLY_KEPT: Final = 10_000
"""Maximum of ended empty transactions that are remembered for repeated requests; the journal has no record of them."""
DROPPED_COUNTS_KEPT: Final = 10_000
"""Maximum of commits whose counts of dropped and lost messages are remembered, to reply to repeated commit requests."""
PENDING_STATES: Final = frozenset((states.PREPARING, states.COMMITTING, states.ROLLING_BACK))
RETRY_SECONDS: Final = 60.0
"""Pause before the broker tries again to roll back an expired member of a commit group."""
TOPICS_PER_QUERY: Final = 8
"""Maximum of topics named in a check-back query."""


class ActiveTransactions:
    """Active transactions with their timers, sessions and reserved space, and the applier of their commits.

    A command queues the journal record of a change. When the record is written, the command calls the `on_...` method
    for the new state. `roll_back(transaction)`: called for a transaction that ends by a timeout or with its session.
    """

    def __init__(
        self,
        store: TransactionStore,
        apply_target: ApplyTarget,
        *,
        timers: Timers,
        clock: Clock,
        run: RunInWorker,
        limits: Mapping[str, int],
        settings: Mapping[str, float],
        roll_back: Callable[[Transaction], None],
        mark_ready: Callable[[], None],
    ) -> None:
        self.store, self.apply_target = store, apply_target
        self.clock, self.limits, self.settings = clock, limits, settings
        self.sessions = SessionTransactions()
        self._roll_back = roll_back
        self.open_timeouts = Deadlines(timers, self._end_open)
        self.prepared_expiries = Deadlines(timers, self._prepared_expired)
        self.prepared_ms = EpochHeap()
        """Prepare times (wall clock, ms) of the prepared transactions by epoch, to warn operators of old ones."""
        self.reservations = SpaceReservations(apply_target, limits)
        self.check_back = CheckBack(
            timers,
            check_seconds=settings["check_seconds"],
            waits_max=limits["checks_parked"],
            make_query=self._make_query,
        )
        self.applier = Applier(
            store,
            apply_target,
            timers=timers,
            run=run,
            release_space=self.reservations.release,
            on_applied=self._on_applied,
            mark_ready=mark_ready,
        )
        self.stopping = False
        self.queued_bytes = 0
        """Bytes of batches that are queued for the journal and not yet written."""
        self._last_lsn = 0
        self.undurable_decisions: deque[ApplyProgress] = deque()
        """Progress of the decisions (commit records) that are written but not known to be durable, by rising LSN."""
        self.read_only: OrderedDict[tuple[str, int], None] = OrderedDict()
        """(xid, epoch) of recently ended transactions without messages and offsets, and so without a journal record."""
        self.dropped_counts: OrderedDict[int, int] = OrderedDict()
        """Epoch of a recently committed transaction -> number of messages that its commit dropped (topic deleted)."""
        self.losses: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Epoch of a recently committed transaction with messages lost by damage -> (lost messages, all messages)."""

    # Lookup and waiting

    def find_live(self, xid: str, epoch: int) -> Transaction | None:
        """Return the live transaction with this name and epoch; None if it has ended or never existed.

        Raises StaleEpoch if a newer transaction has the name and no outcome is stored for `epoch`; StorageStopped
        (outcome unknown) if a write failed in such a way that the transaction's last record may be in the journal.
        """
        transaction = self.store.transactions.get(epoch)
        if transaction is not None and transaction.xid == xid:
            require_certain(transaction)
            return transaction
        newer = self.store.by_xid.get(xid)
        if newer is not None and newer.epoch > epoch and self.store.find_outcome(xid, epoch) is None:
            raise rejections.stale_epoch(epoch, newer.epoch)
        return None

    def is_pending(self, transaction: Transaction) -> bool:
        """Return whether a record that changes the state is queued, or may be in the journal after a failed write."""
        runtime = runtime_state(transaction)
        return transaction.state in PENDING_STATES or runtime.queued_records > 0 or runtime.uncertain_write is not None

    def is_certainly(self, transaction: Transaction, state: states.State) -> bool:
        """Return whether a transaction is in `state`, and no record that changes the state is pending."""
        return transaction.state == state and not self.is_pending(transaction)

    def submit(
        self, transactions: Sequence[Transaction], call: Callable[[WrittenCallback], None], written: WrittenCallback
    ) -> None:
        """Let `call(callback)` queue one record of these transactions. `written` is called when the write has ended.

        Until then `is_pending` is true for each of these transactions, even if a failed write has already restored the
        transaction's previous state.
        """
        runtimes = [runtime_state(transaction) for transaction in transactions]

        def arrived(lsn: int, error: BaseException | None) -> None:
            for runtime in runtimes:
                runtime.queued_records -= 1
                runtime.uncertain_write = error if isinstance(error, UncertainWrite) else runtime.uncertain_write
            written(lsn, error)

        for runtime in runtimes:
            runtime.queued_records += 1
        try:
            call(arrived)
        except Exception:
            for runtime in runtimes:
                runtime.queued_records -= 1
            raise

    def retry_waiting(self, transaction: Transaction) -> None:
        runtime = runtime_state(transaction)
        waiting, runtime.waiting_commands = runtime.waiting_commands, []
        for again in waiting:
            again()

    # Durability

    def record_written(self, lsn: int) -> None:
        """Store the LSN of a written record, so that `when_all_durable` waits until that record is durable."""
        self._last_lsn = max(self._last_lsn, lsn)

    def when_all_durable(self, waiter: DurableCallback) -> None:
        """Call `waiter(None)` once all records written so far are durable, `waiter(error)` if their fsync fails."""
        if self._last_lsn:
            self.store.when_durable(self._last_lsn, waiter)
        else:
            waiter(None)

    # State changes of a transaction

    def on_opened(self, transaction: Transaction, session: Caller, timeout_ms: int) -> None:
        transaction.runtime = TransactionRuntimeState(timeout_ms)
        self.sessions.add_transaction(session, transaction.epoch, local=transaction.origin.local)
        self.open_timeouts.set_deadline(transaction.epoch, timeout_ms / 1000)

    def on_prepared(self, transaction: Transaction, lsn: int) -> None:
        """Handle a written prepare record; a closed session or the timeout can no longer end the transaction."""
        self.record_written(lsn)
        runtime_state(transaction).lsn = lsn
        self._untrack_open(transaction.epoch)
        self._track_prepared(transaction)
        self.store.when_durable(lsn, lambda error: self._prepare_durable(transaction, error))

    def _prepare_durable(self, transaction: Transaction, error: BaseException | None) -> None:
        # Check-back must not start before the prepare record is durable. Otherwise a client that is asked could commit
        # its database transaction, and a power failure could then undo the prepare. Check-back starts even if a commit
        # or rollback record is queued, because its write may still fail; when the record is written, check-back ends.
        if error is None and transaction.state in states.IN_DOUBT_STATES:
            self._start_check_back(transaction)

    def _start_check_back(self, transaction: Transaction) -> None:
        if transaction.origin.group:
            age_seconds = max(0.0, (self.clock.wall_ms() - transaction.prepared_ms) / 1000)
            self.check_back.watch_transaction(transaction.epoch, transaction.origin.group, age_seconds)

    def _track_prepared(self, transaction: Transaction) -> None:
        epoch = transaction.epoch
        self.prepared_ms.set(epoch, transaction.prepared_ms)
        if transaction.expires_ms:
            self.prepared_expiries.set_deadline(epoch, max(0.0, (transaction.expires_ms - self.clock.wall_ms()) / 1000))

    def _untrack_open(self, epoch: int) -> None:
        self.open_timeouts.remove(epoch)
        self.sessions.remove_transaction(epoch)

    def _untrack_prepared(self, epoch: int) -> None:
        self.prepared_ms.remove(epoch)
        self.check_back.unwatch_transaction(epoch)
        self.prepared_expiries.remove(epoch)

    def on_committed(self, decision: Decision, waiting: ProgressCallback) -> ApplyProgress:
        """Handle a written commit record, which is applied when it is durable; return the progress of its decision.

        `waiting` is called once: when the commit is applied or late (`ApplyProgress.late`), or its fsync has failed.
        """
        self.record_written(decision.lsn)
        alone = decision.transactions[0] if len(decision.transactions) == 1 else None
        progress = ApplyProgress(decision, batches=alone.locations.batch_count if alone is not None else 0)
        for transaction in decision.transactions:
            runtime = runtime_state(transaction)
            runtime.apply_progress, runtime.lsn = progress, decision.lsn
            progress.reserved_bytes += runtime.reserved_bytes
            runtime.reserved_bytes = 0
            if transaction.origin.xid:
                self._untrack_open(transaction.epoch)
                self._untrack_prepared(transaction.epoch)
        progress.add_callback(waiting)
        self.undurable_decisions.append(progress)
        self.store.when_durable(decision.lsn, lambda error: self._decision_durable(progress, error))
        for transaction in decision.transactions:
            if runtime_state(transaction).waiting_commands:
                self.retry_waiting(transaction)
        return progress

    def _decision_durable(self, progress: ApplyProgress, error: BaseException | None) -> None:
        """Start to apply the decisions up to this one, by rising LSN; after a failed fsync, reply with `error`."""
        while self.undurable_decisions and self.undurable_decisions[0].decision.lsn <= progress.decision.lsn:
            first = self.undurable_decisions.popleft()
            if error is None:
                self.applier.start(first)
            else:
                first.failure = rejections.durability_unknown(error)
                first.notify()

    def _on_applied(self, progress: ApplyProgress) -> None:
        self.reservations.release(progress.reserved_bytes)
        progress.reserved_bytes = 0
        for transaction in progress.decision.transactions:
            if transaction.offsets:
                self.apply_target.unlock_offsets(transaction.epoch)
            if progress.dropped_messages:
                _add_bounded(self.dropped_counts, transaction.epoch, progress.dropped_messages, DROPPED_COUNTS_KEPT)
            if progress.lost:
                alone = len(progress.decision.transactions) == 1
                lost = progress.lost if alone else transaction.lost_messages
                _add_bounded(self.losses, transaction.epoch, (lost, transaction.messages), DROPPED_COUNTS_KEPT)

    def on_ended(self, transaction: Transaction) -> None:
        """Stop the timers, release the space and retry the commands of a transaction that ended without a commit."""
        self._untrack_open(transaction.epoch)
        self._untrack_prepared(transaction.epoch)
        runtime = runtime_state(transaction)
        self.reservations.release(runtime.reserved_bytes)
        runtime.reserved_bytes = 0
        self.retry_waiting(transaction)

    def on_rolled_back(self, transactions: Sequence[Transaction], lsn: int) -> None:
        """Handle a record, written at `lsn`, that rolls back these transactions or removes their heuristic outcome."""
        self.record_written(lsn)
        locked = [each.epoch for each in transactions if each.offsets]
        for transaction in transactions:
            self.on_ended(transaction)
        # The offsets stay locked until the record is durable: a power failure before that could undo the record.
        if locked:
            self.store.when_durable(lsn, lambda error: self._unlock_offsets(locked, error))

    def _unlock_offsets(self, epochs: Iterable[int], error: BaseException | None) -> None:
        # After a failed fsync the offsets stay locked, because the next start may find the transactions prepared.
        if error is None:
            for epoch in epochs:
                self.apply_target.unlock_offsets(epoch)

    # Ends of transactions

    def end_session(self, session: Caller) -> None:
        """Roll back the local open transactions of a closed session, and end its waits for check-back queries."""
        self.check_back.session_lost(session)
        for epoch in self.sessions.remove_session(session):
            self._end_open(epoch)

    def _end_open(self, epoch: int) -> None:
        """Roll back an open transaction that timed out or lost its session: now, or when its pending record fails."""
        transaction = self.store.transactions.get(epoch)
        if transaction is not None:
            runtime_state(transaction).orphaned = True
            self._end_orphaned(transaction)

    def _end_orphaned(self, transaction: Transaction) -> bool:
        """Roll back an orphaned transaction if it is open and has no pending record; return whether this was done."""
        ends = runtime_state(transaction).orphaned and self.is_certainly(transaction, states.OPEN)
        if ends:
            self._roll_back(transaction)
        return ends

    def resume_commands(self, transaction: Transaction) -> None:
        """After a failed write, roll the transaction back if its session or timeout has ended, else retry commands."""
        if not self._end_orphaned(transaction):
            self.retry_waiting(transaction)

    def _prepared_expired(self, epoch: int) -> None:
        """Roll back a prepared member of a commit group whose expiry time is reached."""
        transaction = self.store.transactions.get(epoch)
        if transaction is not None:
            self.prepared_expiries.set_deadline(epoch, RETRY_SECONDS)
            if self.is_certainly(transaction, states.PREPARED):
                self._roll_back(transaction)

    def finish_empty(self, transaction: Transaction) -> None:
        """End a transaction without messages and offsets as "read_only"; no record is written."""
        self.store.finish_empty(transaction)
        _add_bounded(self.read_only, (transaction.xid, transaction.epoch), None, READ_ONLY_KEPT)
        self.on_ended(transaction)

    def _make_query(self, epoch: int) -> CheckBackQuery:
        transaction = self.store.transactions[epoch]
        return CheckBackQuery(
            transaction.xid, epoch, transaction.prepared_ms, topic_names(transaction)[:TOPICS_PER_QUERY]
        )

    # Start and stop

    def close(self) -> None:
        self.open_timeouts.close()
        self.prepared_expiries.close()
        self.check_back.close()

    def restore(self) -> None:
        """Rebuild the runtime state after recovery, and start to apply the commits that are not completely applied."""
        decisions: dict[int, Decision] = {}
        for transaction in self.store.transactions.values():
            if transaction.decision is not None and not transaction.obsolete:
                decisions[transaction.decision.lsn] = transaction.decision
            elif transaction.state == states.PREPARED:
                runtime_state(transaction).reserved_bytes = transaction.size_bytes
                self.reservations.restore(transaction.size_bytes)
                self._track_prepared(transaction)
                self._start_check_back(transaction)
            else:
                continue
            if transaction.offsets:
                self.apply_target.lock_offsets(transaction.epoch, transaction.xid, transaction.offsets)
        for lsn in sorted(decisions):
            transactions = decisions[lsn].transactions
            progress = ApplyProgress(decisions[lsn], sum(each.size_bytes for each in transactions))
            self.reservations.restore(progress.reserved_bytes)
            for transaction in transactions:
                runtime_state(transaction).apply_progress = progress
            self.applier.start(progress)


def runtime_state(transaction: Transaction) -> TransactionRuntimeState:
    """Return the runtime state of a transaction; create it at the first call for a transaction found by recovery."""
    runtime: TransactionRuntimeState | None = transaction.runtime
    if runtime is None:
        runtime = transaction.runtime = TransactionRuntimeState()
    return runtime


def require_certain(transaction: Transaction) -> None:
    """Raise StorageStopped (outcome unknown) if a failed write may have put a record of the transaction on the disk."""
    unsure = runtime_state(transaction).uncertain_write
    if unsure is not None:
        raise rejections.from_journal_error(unsure)


def topic_names(transaction: Transaction) -> list[str]:
    return sorted(set(transaction.topics.values()))


def _add_bounded(memory: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    memory[key] = value
    if len(memory) > most:
        memory.popitem(last=False)


@dataclass(slots=True, eq=False)
class TransactionRuntimeState:
    """The part of one transaction's state that is only in memory.

    `lsn`: LSN of its last prepare or commit record; 0 if this run of the broker wrote none. `target_bytes`: log id of a
    target -> bytes written for it. `reserved_bytes`: bytes reserved at all targets together. `missing_batches`:
    (producer id, sequence) of batches whose write failed, until they are sent again. `orphaned`: the session or timeout
    has ended; if a record was queued at that time and fails, the transaction is rolled back. `uncertain_write`: error
    of a record that may be in the journal or not. `waiting_commands`: called when the queued records are written.
    """

    timeout_ms: int = 0
    lsn: int = 0
    target_bytes: dict[int, int] = field(default_factory=dict)
    queued_batches: int = 0
    queued_records: int = 0
    missing_batches: set[tuple[int, int]] = field(default_factory=set)
    reserved_bytes: int = 0
    orphaned: bool = False
    uncertain_write: UncertainWrite | None = None
    waiting_commands: list[Callable[[], None]] = field(default_factory=list)
    apply_progress: ApplyProgress | None = None


TOO_MANY_BYTES: Final = (
    "Unfinished transactions hold {held} bytes; with {more} more that is above limits.transactions_bytes. Wait, or"
    " end some of them."
)
TOO_MANY_BATCHES: Final = (
    "Unfinished transactions hold {held} batches; with {more} more that is above limits.transactions_pieces. Wait, or"
    " end some of them; and send larger batches."
)
TOO_LARGE: Final = "The transaction would have {found} {what}; the limit is limits.{limit}, {most}."


class SpaceReservations:
    """Limits the size of unfinished transactions, and reserves space at their targets.

    Space is checked and reserved before a prepare or commit record is written, because after that the commit cannot be
    rejected. `reserved_bytes`: the total for all prepared, and all committed but not applied transactions.
    """

    def __init__(self, apply_target: ApplyTarget, limits: Mapping[str, int]) -> None:
        self._apply_target, self._limits = apply_target, limits
        self.reserved_bytes = 0

    def require_room(
        self, held_bytes: int, held_batches: int, transaction: Transaction, size_bytes: int, batches: int
    ) -> None:
        """Check that `size_bytes` in `batches` batches may be added to a transaction.

        `held_bytes` and `held_batches`: the totals of all unfinished transactions. Raises TransactionTooLarge if this
        transaction would exceed a limit; Busy if all unfinished transactions together would.
        """
        for what, limit, found in (
            ("bytes", "transaction_bytes", transaction.size_bytes + size_bytes),
            ("batches", "transaction_pieces", transaction.locations.batch_count + batches),
        ):
            if found > (most := self._limits[limit]):
                sentence = TOO_LARGE.format(found=found, what=what, limit=limit, most=most)
                raise TransactionTooLarge(sentence, found=found, max=most, limit=limit)
        if held_bytes + size_bytes > self._limits["transactions_bytes"]:
            raise Busy(TOO_MANY_BYTES.format(held=held_bytes, more=size_bytes))
        if held_batches + batches > self._limits["transactions_pieces"]:
            raise Busy(TOO_MANY_BATCHES.format(held=held_batches, more=batches))

    def reserve(self, sizes: Mapping[int, int]) -> int:
        """Reserve all `sizes` (target key -> bytes), or none if `check_space` raises an error; return the total."""
        taken = 0
        try:
            for key, size in sizes.items():
                self._apply_target.check_space(key, size)
                self._apply_target.reserve_bytes(size)
                taken += size
        except Exception:
            if taken:
                self._apply_target.release_bytes(taken)
            raise
        self.reserved_bytes += taken
        return taken

    def restore(self, size_bytes: int) -> None:
        """Reserve space for a transaction that recovery found prepared or committed; do not check the free space."""
        self._apply_target.reserve_bytes(size_bytes)
        self.reserved_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        if size_bytes:
            self._apply_target.release_bytes(size_bytes)
            self.reserved_bytes -= size_bytes


class SessionTransactions:
    """Open transactions by session, to limit their number, and to end local transactions with their session."""

    def __init__(self) -> None:
        self._epochs: dict[Caller, dict[int, bool]] = {}
        self._session_by_epoch: dict[int, Caller] = {}

    def add_transaction(self, session: Caller, epoch: int, *, local: bool) -> None:
        self._epochs.setdefault(session, {})[epoch] = local
        self._session_by_epoch[epoch] = session

    def remove_transaction(self, epoch: int) -> None:
        session = self._session_by_epoch.pop(epoch, None)
        if session is None:
            return
        epochs = self._epochs[session]
        del epochs[epoch]
        if not epochs:
            del self._epochs[session]

    def open_count(self, session: Caller) -> int:
        return len(self._epochs.get(session, ()))

    def remove_session(self, session: Caller) -> list[int]:
        """Remove a session; return the epochs of its local open transactions in the order in which they began."""
        epochs = self._epochs.pop(session, {})
        for epoch in epochs:
            del self._session_by_epoch[epoch]
        return [epoch for epoch, local in epochs.items() if local]
