"""Runtime state of active transactions, and the actions at each change of their state.

`ActiveTransactions` performs what a state change requires besides its journal record: timers, sessions,
reserved space, offset locks, check-back, waiting commands. Nothing here is durable; it is rebuilt after a
start.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from journal.clock import Clock
from tfmq.apply_target import Destination
from tfmq.errors import Busy, TransactionTooLarge
from tfmq.transaction import rejections, states
from tfmq.transaction.applier import Applier
from tfmq.transaction.apply_progress import Course, Waiting
from tfmq.transaction.check_back import Checks
from tfmq.transaction.deadlines import Deadlines
from tfmq.transaction.journal_writer import MaybeWritten, Run, Waiter, Written
from tfmq.transaction.model import Decision, Transaction
from tfmq.transaction.requests import Caller, Check, Timers
from tfmq.transaction.store import JournalTransactionStore

DEAD_MIN: Final = 1024
"""With fewer stale entries than this the heap is not rebuilt.

The pass would cost more than it saves.
"""


class Ages:
    """Prepared transactions ordered by prepare time (wall clock, ms), for the operator's alarm."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, epoch: int, prepared_ms: int) -> None:
        """Add a prepared transaction."""
        self._times[epoch] = prepared_ms
        heapq.heappush(self._heap, (prepared_ms, epoch))

    def remove(self, epoch: int) -> None:
        """Remove a transaction; no effect if it is missing."""
        self._times.pop(epoch, None)
        if len(self._heap) > 2 * len(self._times) + DEAD_MIN:
            self._heap = [(time_ms, each) for each, time_ms in self._times.items()]
            heapq.heapify(self._heap)

    @property
    def oldest_ms(self) -> int | None:
        """Prepare time of the transaction that has been prepared longest; None if there is none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


READ_ONLY_REMEMBERED: Final = 10_000
"""Empty transactions leave no record.

The last ones are kept in memory to answer repeated requests.
"""
DROPS_REMEMBERED: Final = 10_000
"""Likewise how many messages a decision had for topics that were gone, and how many of its messages were lost."""
UNDER_WAY: Final = frozenset((states.PREPARING, states.COMMITTING, states.ROLLING_BACK))
MAY_STAY_PREPARED: Final = frozenset((states.PREPARED, states.COMMITTING, states.ROLLING_BACK))
TOPICS_ASKED: Final = 8
"""Topics named in a check-back query."""


class Books:
    """Active transactions with their timers, sessions, reservations and the applier.

    Commands make the decisions; the `on_...` methods then do what the new state requires, alike for every
    command. `open_expired(epoch)` is called at the timeout of an open transaction,
    `prepared_expired(epoch)` at the expiry of a prepared member of a commit group.
    """

    def __init__(
        self,
        store: JournalTransactionStore,
        destination: Destination,
        *,
        timers: Timers,
        clock: Clock,
        run: Run,
        limits: Mapping[str, int],
        settings: Mapping[str, float],
        expired: Callable[[int], None],
        outlived: Callable[[int], None],
    ) -> None:
        self.store, self.destination = store, destination
        self.clock, self.limits, self.settings = clock, limits, settings
        self.sessions = Sessions()
        self.timeouts = Deadlines(timers, expired)
        self.expiries = Deadlines(timers, outlived)
        self.ages = Ages()
        self.reservations = Reservations(destination, limits)
        self.checks = Checks(
            timers,
            check_seconds=settings["check_seconds"],
            parked_max=limits["checks_parked"],
            check=self._check,
        )
        self.applier = Applier(
            store,
            destination,
            timers=timers,
            run=run,
            release=self.reservations.release,
            ended=self._applied,
        )
        self.sending_bytes = 0
        """Bytes of batches that are queued for the journal."""
        self._place = 0
        self._pending: deque[Course] = deque()
        self._read_only: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._drops: OrderedDict[int, int] = OrderedDict()
        self._losses: OrderedDict[int, tuple[int, int]] = OrderedDict()

    # Lookup and waiting

    def find(self, xid: str, epoch: int) -> Transaction | None:
        """Return the live transaction with that name and epoch.

        None if it has ended or never existed.

        Raises: StaleEpoch if a newer transaction has the name and the outcome is unknown; StorageStopped
        with outcome unknown if only recovery can determine it.
        """
        transaction = self.store.transactions.get(epoch)
        if transaction is not None and transaction.xid == xid:
            require_sure(transaction)
            return transaction
        newer = self.store.named.get(xid)
        if newer is not None and newer.epoch > epoch and self.store.outcome(xid, epoch) is None:
            raise rejections.stale(epoch, newer.epoch)
        return None

    def busy(self, transaction: Transaction) -> bool:
        """Whether the state may change: a record is being written, or its write result is uncertain."""
        runtime = live_of(transaction)
        return transaction.state in UNDER_WAY or runtime.recording > 0 or runtime.unsure is not None

    def put(
        self, transactions: Sequence[Transaction], call: Callable[[Written], None], written: Written
    ) -> None:
        """Call `call(written)`, which queues a record.

        The transactions count as busy until it completes. They are not busy if `call` raises. `state` alone
        is not enough to detect a pending record: a failed record restores it before the callback of the
        request is called.
        """
        runtimes = [live_of(transaction) for transaction in transactions]

        def arrived(lsn: int, error: BaseException | None) -> None:
            for runtime in runtimes:
                runtime.recording -= 1
                runtime.unsure = error if isinstance(error, MaybeWritten) else runtime.unsure
            written(lsn, error)

        for runtime in runtimes:
            runtime.recording += 1
        try:
            call(arrived)
        except Exception:
            for runtime in runtimes:
                runtime.recording -= 1
            raise

    def later(self, transaction: Transaction, again: Callable[[], None]) -> None:
        """Call `again()` after the pending records and batches are written or have failed."""
        live_of(transaction).waiting.append(again)

    def go_on(self, transaction: Transaction) -> None:
        """Retry the commands that waited for pending records, in order."""
        runtime = live_of(transaction)
        waiting, runtime.waiting = runtime.waiting, []
        for again in waiting:
            again()

    # Durability

    def recorded(self, lsn: int) -> None:
        """Note that a record was written at `lsn`."""
        self._place = max(self._place, lsn)

    def when_sure(self, waiter: Waiter) -> None:
        """Call `waiter(None)` once all records so far are durable; replies can depend on them then."""
        if self._place:
            self.store.when_forced(self._place, waiter)
        else:
            waiter(None)

    # State changes of a transaction

    def opened(self, transaction: Transaction, session: Caller, timeout_ms: int) -> None:
        """Start the session tracking and timeout of a new transaction."""
        transaction.live = Live(timeout_ms)
        self.sessions.opened(session, transaction.epoch, local=transaction.origin.local)
        self.timeouts.set(transaction.epoch, timeout_ms / 1000)

    def prepared(self, transaction: Transaction, lsn: int) -> None:
        """Handle a written prepare record: session and timeout no longer end the transaction."""
        self.recorded(lsn)
        live_of(transaction).place = lsn
        self._closed(transaction.epoch)
        self._keep(transaction)
        self.store.when_forced(lsn, lambda error: self._surely_prepared(transaction, error))

    def _surely_prepared(self, transaction: Transaction, error: BaseException | None) -> None:
        """Start check-back once the prepare record is durable."""
        # Before that, a client that commits its own part on being asked would be alone with its commit
        # after a power failure. A pending commit or rollback may still fail, so its transaction is watched
        # too; a completed one stops the check-back.
        if error is None and transaction.state in MAY_STAY_PREPARED:
            self._watch(transaction)

    def _watch(self, transaction: Transaction) -> None:
        """Schedule check-back of the transaction with its producer group."""
        if transaction.origin.group:
            age_seconds = max(0.0, (self.clock.wall_ms() - transaction.prepared_ms) / 1000)
            self.checks.watch(transaction.epoch, transaction.origin.group, age_seconds)

    def _keep(self, transaction: Transaction) -> None:
        """Track the age and expiry of a prepared transaction."""
        epoch = transaction.epoch
        self.ages.add(epoch, transaction.prepared_ms)
        if transaction.expires_ms:
            self.expiries.set(epoch, max(0.0, (transaction.expires_ms - self.clock.wall_ms()) / 1000))

    def _closed(self, epoch: int) -> None:
        self.timeouts.clear(epoch)
        self.sessions.closed(epoch)

    def _left(self, epoch: int) -> None:
        """Stop the tracking of a transaction that is no longer prepared."""
        self.ages.remove(epoch)
        self.checks.unwatch(epoch)
        self.expiries.clear(epoch)

    def decided(self, decision: Decision, waiting: Waiting) -> None:
        """Handle a written commit decision and queue it for the applier.

        `waiting` is called when the decision is applied, or is delayed.
        """
        self.recorded(decision.place)
        alone = decision.transactions[0] if len(decision.transactions) == 1 else None
        progress = Course(decision, batches=alone.locations.rows if alone is not None else 0)
        for transaction in decision.transactions:
            runtime = live_of(transaction)
            runtime.course, runtime.place = progress, decision.place
            progress.reserved += runtime.reserved
            runtime.reserved = 0
            if transaction.origin.xid:
                self._closed(transaction.epoch)
                self._left(transaction.epoch)
        progress.wait(waiting)
        self._pending.append(progress)
        self.store.when_forced(decision.place, lambda error: self._forced(progress, error))
        for transaction in decision.transactions:
            if live_of(transaction).waiting:
                self.go_on(transaction)

    def course(self, transaction: Transaction) -> Course:
        """Return the apply progress of a decided transaction."""
        progress = live_of(transaction).course
        assert progress is not None
        return progress

    @property
    def forcing(self) -> bool:
        """Whether a decision is written but not yet known to be durable."""
        return bool(self._pending)

    def _forced(self, progress: Course, error: BaseException | None) -> None:
        """Start the decisions up to this durable one, in LSN order; on an fsync error fail them."""
        while self._pending and self._pending[0].decision.place <= progress.decision.place:
            first = self._pending.popleft()
            if error is None:
                self.applier.start(first)
            else:
                first.fail(rejections.not_forced(error))

    def _applied(self, progress: Course) -> None:
        self.reservations.release(progress.reserved)
        progress.reserved = 0
        for transaction in progress.decision.transactions:
            if transaction.offsets:
                self.destination.unlock_offsets(transaction.epoch)
            if progress.dropped:
                _remember(self._drops, transaction.epoch, progress.dropped, DROPS_REMEMBERED)
            if progress.lost:
                alone = len(progress.decision.transactions) == 1
                lost = progress.lost if alone else transaction.lost
                _remember(self._losses, transaction.epoch, (lost, transaction.messages), DROPS_REMEMBERED)

    def ended(self, transaction: Transaction) -> None:
        """Handle the end of a transaction without a commit: rolled back, forgotten or empty."""
        self._closed(transaction.epoch)
        self._left(transaction.epoch)
        runtime = live_of(transaction)
        self.reservations.release(runtime.reserved)
        runtime.reserved = 0
        self.go_on(transaction)

    def dropped(self, transactions: Sequence[Transaction], lsn: int) -> None:
        """Handle written rollback records."""
        self.recorded(lsn)
        locked = [each.epoch for each in transactions if each.offsets]
        for transaction in transactions:
            self.ended(transaction)
        # Before the record is durable a crash could bring the transaction back, so its offsets stay locked
        # until then.
        if locked:
            self.store.when_forced(lsn, lambda error: self._unlock(locked, error))

    def _unlock(self, epochs: Iterable[int], error: BaseException | None) -> None:
        """Unlock offsets once the rollback is durable."""
        # After a failed fsync the state found at the next start is unknown, so the offsets stay locked.
        if error is None:
            for epoch in epochs:
                self.destination.unlock_offsets(epoch)

    # Empty transactions

    def finish_empty(self, transaction: Transaction) -> None:
        """End a transaction without messages or offsets; no record is written."""
        self.store.finish_empty(transaction)
        _remember(self._read_only, (transaction.xid, transaction.epoch), None, READ_ONLY_REMEMBERED)
        self.ended(transaction)

    def drops(self, epoch: int) -> int:
        """Return how many messages of a recent commit were for deleted topics."""
        return self._drops.get(epoch, 0)

    def losses(self, epoch: int) -> tuple[int, int]:
        """(how many messages of a committed one damage of the journal took, of how many), if that was not long ago."""
        return self._losses.get(epoch, (0, 0))

    def was_empty(self, xid: str, epoch: int) -> bool:
        """Whether that transaction recently ended as read-only."""
        return (xid, epoch) in self._read_only

    def _check(self, epoch: int) -> Check:
        transaction = self.store.transactions[epoch]
        return Check(transaction.xid, epoch, transaction.prepared_ms, topics_of(transaction)[:TOPICS_ASKED])

    # Start and stop

    def close(self) -> None:
        """Stop timeouts, expiries and check-back."""
        self.timeouts.close()
        self.expiries.close()
        self.checks.close()

    def restore(self) -> None:
        """Rebuild the runtime state after recovery; apply unfinished decisions again."""
        decisions: dict[int, Decision] = {}
        for transaction in self.store.transactions.values():
            if transaction.decision is not None and not transaction.settled:
                decisions[transaction.decision.place] = transaction.decision
            elif transaction.state == states.PREPARED:
                live_of(transaction).reserved = transaction.size_bytes
                self.reservations.restore(transaction.size_bytes)
                self._keep(transaction)
                self._watch(transaction)
            else:
                continue
            if transaction.offsets:
                self.destination.lock_offsets(transaction.epoch, transaction.xid, transaction.offsets)
        for lsn in sorted(decisions):
            self._restore_decision(decisions[lsn])

    def _restore_decision(self, decision: Decision) -> None:
        progress = Course(decision, sum(each.size_bytes for each in decision.transactions))
        self.reservations.restore(progress.reserved)
        for transaction in decision.transactions:
            live_of(transaction).course = progress
        self.applier.start(progress)


def live_of(transaction: Transaction) -> Live:
    """Return the transaction's runtime state, creating it if it was recovered from the journal."""
    runtime: Live | None = transaction.live
    if runtime is None:
        runtime = transaction.live = Live()
    return runtime


def require_sure(transaction: Transaction) -> None:
    """Check that no record of the transaction has an uncertain write result.

    Raises: StorageStopped, outcome unknown.
    """
    unsure = live_of(transaction).unsure
    if unsure is not None:
        raise rejections.of_journal(unsure)


def topics_of(transaction: Transaction) -> list[str]:
    """Return the names of its topics, sorted, without duplicates."""
    return sorted(set(transaction.topics.values()))


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Add an entry and remove the oldest one above `most` entries."""
    memory[key] = value
    if len(memory) > most:
        memory.popitem(last=False)


class Live:
    """Runtime state of one transaction that is not durable.

    `timeout_ms`: the timeout returned to the client. `lsn`: LSN of the record of its state, 0 before the
    first. `target_bytes`: bytes sent per target. `queued_batches` and `queued_records`: number of batches
    and of records queued for the journal. `missing_batches`: (producer id, sequence) of batches whose write
    failed and that were not resent. `reserved_bytes`: bytes reserved at the targets. `orphaned`: the
    timeout or the end of the session occurred while a record was queued, so the transaction ends if that
    record fails. `uncertain_write`: error of a record that may or may not be in the journal, which only
    recovery can determine. `waiting_commands`: commands that wait for queued records. `apply_progress`:
    apply progress after the decision.
    """

    __slots__ = (
        "course",
        "missing",
        "orphan",
        "place",
        "recording",
        "reserved",
        "sending",
        "sizes",
        "timeout_ms",
        "unsure",
        "waiting",
    )

    def __init__(self, timeout_ms: int = 0) -> None:
        self.timeout_ms = timeout_ms
        self.place = self.recording = self.reserved = self.sending = 0
        self.sizes: dict[int, int] = {}
        self.missing: set[tuple[int, int]] = set()
        self.orphan = False
        self.unsure: MaybeWritten | None = None
        self.waiting: list[Callable[[], None]] = []
        self.course: Course | None = None


FULL: Final = (
    "Unfinished transactions hold {held} bytes; with {more} more that is above limits.transactions_bytes. Wait, or"
    " end some of them."
)
MANY: Final = (
    "Unfinished transactions hold {held} batches; with {more} more that is above limits.transactions_pieces. Wait, or"
    " end some of them; and send larger batches."
)
LARGE: Final = "The transaction would have {found} {what}; the limit is limits.{limit}, {most}."


class Reservations:
    """Space limits of unfinished transactions, and space reserved at targets before decisions.

    Every target is checked (`Destination.check`) before the reservation, including all space reserved so
    far. A commit is thus rejected while this is still possible, rather than found impossible to apply after
    the decision. `reserved_bytes` is the total of prepared and decided transactions, in bytes.
    """

    def __init__(self, destination: Destination, limits: Mapping[str, int]) -> None:
        self._destination = destination
        self._bytes_max = limits["transaction_bytes"]
        self._pieces_max = limits["transaction_pieces"]
        self._all_bytes_max = limits["transactions_bytes"]
        self._all_pieces_max = limits["transactions_pieces"]
        self.reserved = 0

    def require_room(
        self, held_bytes: int, held_pieces: int, transaction: Transaction, size_bytes: int, pieces: int
    ) -> None:
        """Check whether a transaction may grow by `size_bytes` and `batches`.

        `held_bytes` and `held_batches` are the totals of all unfinished transactions, including queued
        batches.
        Raises: TransactionTooLarge, Busy.
        """
        found = transaction.size_bytes + size_bytes
        if found > self._bytes_max:
            raise _too_large("bytes", "transaction_bytes", found, self._bytes_max)
        rows = transaction.locations.rows + pieces
        if rows > self._pieces_max:
            raise _too_large("batches", "transaction_pieces", rows, self._pieces_max)
        if held_bytes + size_bytes > self._all_bytes_max:
            raise Busy(FULL.format(held=held_bytes, more=size_bytes))
        if held_pieces + pieces > self._all_pieces_max:
            raise Busy(MANY.format(held=held_pieces, more=pieces))

    def reserve(self, sizes: Mapping[int, int]) -> int:
        """Reserve space at each target, all or nothing; return the total.

        `sizes` has the bytes by target key.
        Raises: whatever `Destination.check` raises.
        """
        taken = 0
        try:
            for key, size in sizes.items():
                self._destination.check(key, size)
                self._destination.reserve(size)
                taken += size
        except Exception:
            if taken:
                self._destination.release(taken)
            raise
        self.reserved += taken
        return taken

    def restore(self, size_bytes: int) -> None:
        """Reserve space after recovery, unchecked: the transaction is already prepared or decided."""
        self._destination.reserve(size_bytes)
        self.reserved += size_bytes

    def release(self, size_bytes: int) -> None:
        """Release reserved space after the bytes were written or are no longer needed."""
        if size_bytes:
            self._destination.release(size_bytes)
            self.reserved -= size_bytes


def _too_large(what: str, limit: str, found: int, most: int) -> TransactionTooLarge:
    return TransactionTooLarge(
        LARGE.format(found=found, what=what, limit=limit, most=most), found=found, max=most, limit=limit
    )


class Sessions:
    """Open transactions by the session that began them.

    Used to limit the transactions per session, and to end local ones with their session. A session has an
    entry only while it has open transactions.
    """

    def __init__(self) -> None:
        self._epochs: dict[Caller, dict[int, bool]] = {}
        self._owner: dict[int, Caller] = {}

    def opened(self, session: Caller, epoch: int, *, local: bool) -> None:
        """Add an open transaction. A `local` one ends with the session."""
        self._epochs.setdefault(session, {})[epoch] = local
        self._owner[epoch] = session

    def closed(self, epoch: int) -> None:
        """Remove a transaction that is no longer open; no effect if it is unknown."""
        session = self._owner.pop(epoch, None)
        if session is None:
            return
        epochs = self._epochs[session]
        del epochs[epoch]
        if not epochs:
            del self._epochs[session]

    def count(self, session: Caller) -> int:
        """Return how many open transactions the session has."""
        return len(self._epochs.get(session, ()))

    def lost(self, session: Caller) -> list[int]:
        """Remove the session.

        Return the epochs of its local transactions in the order of their begin.
        """
        epochs = self._epochs.pop(session, {})
        for epoch in epochs:
            del self._owner[epoch]
        return [epoch for epoch, local in epochs.items() if local]
