"""The transaction coordinator: entry point for all transaction commands of sessions."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Final, TypeAlias

from journal.clock import Clock
from tfmq.apply_target import Destination
from tfmq.errors import Busy
from tfmq.transaction import rejections, states
from tfmq.transaction.active_transactions import Books, live_of
from tfmq.transaction.commands import Beginnings, Endings, Preparing, Steps, Transacting
from tfmq.transaction.commit_group_commands import GroupCommits
from tfmq.transaction.journal_writer import Run
from tfmq.transaction.model import Piece
from tfmq.transaction.queries import Listing
from tfmq.transaction.requests import Begin, Caller, Done, GroupCommit, Timers, Transact
from tfmq.transaction.store import JournalTransactionStore

Maps: TypeAlias = list[dict[str, Any]]

TEND_SECONDS: Final = 1.0
"""Interval of the store's housekeeping."""
RETRY_SECONDS: Final = 60.0
"""Pause before the rollback of an expired member is retried after its record failed."""


def answered(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: pass exceptions of a command to its last argument, `done`.

    Reject it while stopping.
    """

    @wraps(command)
    def safe(self: "TransactionHandler", *asked: Any) -> None:
        try:
            if self.stopping:
                raise Busy(rejections.STOPPING)
            command(self, *asked)
        except Exception as error:
            asked[-1](None, rejections.of_step(error))

    return safe


class TransactionHandler:
    """Executes transaction commands, from begin to forget.

    It depends on no protocol and no broker: requests are plain values, replies are callbacks, targets are a
    `Destination`. No reply is sent before the journal fsync that it depends on; nothing becomes visible
    before the fsync of the decision.

    All methods are called by one thread, the owner's. Requests of a turn are written by `write()` at the
    end of the turn, in one journal append; call it until `due` is false. `run(work, done)` runs work in a
    worker, to read large transactions.

    `settings`: the keys `transaction.*` of the configuration without that prefix; `limits`: by name. Errors
    are passed to `done`, none is raised. Each method lists its own errors; every writing method may also
    return StorageStopped, DiskFull and Busy.
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
    ) -> None:
        self._books = Books(
            store,
            destination,
            timers=timers,
            clock=clock,
            run=run,
            limits=limits,
            settings=settings,
            expired=self._expired,
            outlived=self._outlived,
        )
        self._store, self._timers = store, timers
        self._applier = self._books.applier
        self._beginnings = Beginnings(self._books)
        self._steps = Steps(self._books)
        self._preparing = Preparing(self._books, self._steps)
        self._endings = Endings(self._books, self._steps)
        self._transacting = Transacting(self._books)
        self._groups = GroupCommits(self._books, self._steps)
        self._listing = Listing(self._books)
        self._tending: Any = None
        self._recovered: Callable[[], None] | None = None
        self._stopped: Callable[[], None] | None = None
        self.stopping = False
        """Whether new requests are rejected."""
        self.over = False
        """Whether it has stopped.

        The owner may then be closing the store in a worker: do not use the store.
        """

    # One transaction

    @answered
    def begin(self, request: Begin, session: Caller, done: Done) -> None:
        """Begin a transaction; `done(BeginResult)`.

        Errors: TransactionExists, GroupStale, GroupFenced, NotAllowed (too many groups), BadRequest.
        """
        self._beginnings.begin(request, session, done)

    @answered
    def send(self, epoch: int, piece: Piece, done: Done) -> None:
        """Store a batch; `done(None)` when it is in the journal, also if it was before. Not fsynced.

        Errors: UnknownTransaction, TransactionState, TransactionTooLarge, UnknownTopic, SequenceGap,
        UnknownProducer.
        """
        self._beginnings.send(epoch, piece, done)

    @answered
    def prepare(
        self, xid: str, epoch: int, ttl_ms: int | None, offsets: Sequence[Any], session: Caller, done: Done
    ) -> None:
        """Prepare a transaction; `done(PrepareResult)` once durable, also if it is already prepared.

        Errors: UnknownTransaction, StaleEpoch, TransactionState, TransactionCommitted,
        TransactionRolledBack, HeuristicOutcome, UnknownTopic, Fenced, NotAllowed, GroupStale, GroupFenced.
        """
        self._preparing.prepare(xid, epoch, ttl_ms, offsets, session, done)

    @answered
    def commit(
        self,
        xid: str,
        epoch: int,
        one_phase: bool,
        heuristic: bool,
        offsets: Sequence[Any],
        force: bool,
        session: Caller,
        done: Done,
    ) -> None:
        """`done(Ended)` when the decision is forced and everything written, or takes long. Errors as `prepare`, and
        Damaged where messages of it are lost or cannot be read; `force`: an operator commits what is left."""
        self._endings.commit(xid, epoch, one_phase, heuristic, offsets, force, session, done)

    @answered
    def rollback(self, xid: str, epoch: int, heuristic: bool, done: Done) -> None:
        """Roll back; `done(RollbackResult)`.

        Errors: UnknownTransaction, StaleEpoch, TransactionCommitted, HeuristicOutcome.
        """
        self._endings.rollback(xid, epoch, heuristic, done)

    @answered
    def forget(self, xid: str, epoch: int, done: Done) -> None:
        """Forget a heuristic outcome; `done(True)`, or `done(False)` if there was none.

        Errors: TransactionState.
        """
        self._endings.forget(xid, epoch, done)

    @answered
    def transact(self, request: Transact, session: Caller, done: Done) -> None:
        """Begin, send and commit in one request; `done(CommitResult)`. Errors: as those commands."""
        self._transacting.transact(request, session, done)

    # Queries

    def list(
        self, states: Sequence[str] | None, after_epoch: int, limit: int, group: str = ""
    ) -> tuple[Maps, bool, int]:
        """Return a page of transactions: (rows by epoch, whether there are more, last epoch).

        The next page continues after the last epoch. Rows are as in LIST_TRANSACTIONS. `states` None
        selects transactions that need an operator's attention. `group` "" selects all producer groups. A
        page scans a bounded number of transactions, so it may be short or empty although there are more.
        """
        return self._listing.page(states, after_epoch, limit, group)

    def describe(self, xid: str, epoch: int) -> dict[str, Any]:
        """Return the details of one transaction; epoch 0 means the latest.

        Unknown: `state` "unknown".
        """
        return self._listing.describe(xid, epoch)

    def status(self) -> dict[str, Any]:
        """Return the "transactions" part of STATUS."""
        return self._listing.status()

    def await_checks(self, group: str, wait_ms: int, session: Caller, done: Done) -> Callable[[], None]:
        """Wait for check-back queries: `done(queries)`, or `done([])` after `wait_ms`.

        Returns: a function that ends the wait with `done([])`; no effect once `done` was called.
        """
        if self.stopping:
            done(None, Busy(rejections.STOPPING))
            return _nothing
        return self._books.checks.wait(group, wait_ms, session, done)

    # Commit groups

    @answered
    def commit_group(self, request: GroupCommit, done: Done) -> None:
        """Commit all named members atomically; `done(GroupCommitResult)`.

        Errors: GroupStale, GroupFenced, GroupIncomplete, NotAllowed, BadRequest.
        """
        self._groups.commit(request, done)

    @answered
    def abort_group(self, group: str, sequence: int, run: str, done: Done) -> None:
        """Fence a run of a commit group; `done(GroupAbortResult)`. Errors: NotAllowed."""
        self._groups.abort(group, sequence, run, done)

    def list_groups(self, after: str, limit: int) -> tuple[Maps, bool]:
        """Return (rows of commit groups with names above `after`, in order, whether there are more)."""
        return self._groups.rows(after, limit)

    @answered
    def forget_group(self, group: str, done: Done) -> None:
        """Forget a commit group; `done(True)`, or `done(False)` if there was none."""
        self._groups.forget(group, done)

    # Events

    def session_lost(self, session: Caller) -> None:
        """End the local open transactions and the check-back waits of a closed session."""
        # After the stop nothing needs to end: recovery rolls back open transactions.
        if self.over:
            return
        self._books.checks.session_lost(session)
        for epoch in self._books.sessions.lost(session):
            self._end_open(epoch)

    def topic_gone(self, incarnation: int) -> None:
        """Drop effects on partitions of a deleted topic, by its incarnation."""
        self._applier.topic_gone(incarnation)

    def resumed(self, key: int) -> None:
        """Handle a target that accepts writes again: reapply lost effects and continue waiting ones."""
        self._applier.resumed(key)

    def _expired(self, epoch: int) -> None:
        self._end_open(epoch)

    def _end_open(self, epoch: int) -> None:
        """Roll back an open transaction. If its prepare or commit is being written, that decides."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            return
        if transaction.state == states.OPEN and not self._books.busy(transaction):
            self._steps.drop(transaction)
        else:
            live_of(transaction).orphan = True

    def _outlived(self, epoch: int) -> None:
        """Roll back an expired, prepared member of a commit group."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            return
        self._books.expiries.set(epoch, RETRY_SECONDS)
        if transaction.state == states.PREPARED and not self._books.busy(transaction):
            self._steps.drop(transaction)

    # Turns, start and stop

    @property
    def due(self) -> bool:
        """Whether `write` can do something now, without waiting for a worker, an fsync or a timer."""
        return self._store.due or self._applier.due

    def write(self) -> bool:
        """Write queued records and start effects, at the end of a turn; False if there was no work."""
        wrote = self._store.write()
        wrote = self._applier.write() or wrote
        self._look_whether_done()
        return wrote

    def _look_whether_done(self) -> None:
        if self._recovered is not None and self._applier.idle and not self._store.due:
            recovered, self._recovered = self._recovered, None
            recovered()
        if self._stopped is not None and self._store.idle and not self._books.forcing:
            stopped, self._stopped = self._stopped, None
            self._applier.stop(partial(self._over, stopped))

    def _over(self, stopped: Callable[[], None]) -> None:
        self.over = True
        stopped()

    def recover(self, done: Callable[[], None]) -> None:
        """Restore prepared transactions with their offset locks, and apply decided ones.

        Call this before the listener opens, then run turns (`write`, the destination's writes, `tick`)
        until `done()`: all decisions are then written or wait for a blocked target.
        """
        self._recovered = done
        self._books.restore()
        self._tend()

    def _tend(self) -> None:
        self._store.tend()
        self._tending = self._timers.after(TEND_SECONDS, self._tend, deferrable=True)

    def stop(self, done: Callable[[], None]) -> None:
        """Reject new requests.

        `done()` when nothing is pending and effects are fsynced where possible. The caller runs turns until
        then; the owner closes the store afterwards.
        """
        self.stopping = True
        self._stopped = done
        if self._tending is not None:
            self._timers.cancel(self._tending)
        self._books.close()


def _nothing() -> None:
    """Do nothing: cancels a wait that has already ended."""
