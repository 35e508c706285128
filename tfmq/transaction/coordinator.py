"""The transaction coordinator: entry point for all transaction commands of sessions."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Final, TypeAlias

from journal.clock import Clock
from tfmq.apply_target import ApplyTarget, RunInWorker, Timers
from tfmq.errors import Busy
from tfmq.transaction import rejections, states
from tfmq.transaction.active_transactions import ActiveTransactions, runtime_state
from tfmq.transaction.commands import (
    BeginCommands,
    CommandSupport,
    EndCommands,
    PrepareCommand,
    TransactCommand,
)
from tfmq.transaction.commit_group_commands import CommitGroupCommands
from tfmq.transaction.model import IncomingBatch
from tfmq.transaction.queries import TransactionQueries
from tfmq.transaction.requests import BeginRequest, Caller, DoneCallback, GroupCommitRequest, TransactRequest
from tfmq.transaction.store import TransactionStore

JsonRows: TypeAlias = list[dict[str, Any]]

HOUSEKEEPING_SECONDS: Final = 1.0
"""Interval of `TransactionStore.run_housekeeping`."""
RETRY_SECONDS: Final = 60.0
"""Pause after a failed rollback of an expired member of a commit group."""


def reply_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator of commands: pass exceptions to the last argument, `done`; reject while stopping."""

    @wraps(command)
    def safe(self: "TransactionCoordinator", *asked: Any) -> None:
        try:
            if self.stopping:
                raise Busy(rejections.STOPPING)
            command(self, *asked)
        except Exception as error:
            asked[-1](None, rejections.from_command_error(error))

    return safe


class TransactionCoordinator:
    """Executes transaction commands, from begin to forget.

    It depends on no protocol and no broker: requests are plain values, replies are callbacks, targets are an
    `ApplyTarget`. No reply is sent before the journal fsync that it depends on; no message is visible to consumers
    before the fsync of the commit record.

    All methods are called by one thread, the broker's. Records of a turn are written by `write()` at the
    end of the turn, in one journal append; call it whenever `mark_ready` was called, and in each turn
    until `recover` or `stop` is done. `run(work, done)` runs work in a worker, to read large transactions.

    `settings`: the keys `transaction.*` of the configuration without that prefix; `limits`: by name. Errors
    are passed to `done`, none is raised. Each method lists its own errors; every writing method may also
    return StorageStopped, DiskFull and Busy.
    """

    def __init__(
        self,
        store: TransactionStore,
        destination: ApplyTarget,
        *,
        timers: Timers,
        clock: Clock,
        run: RunInWorker,
        limits: Mapping[str, int],
        settings: Mapping[str, float],
        mark_ready: Callable[[], None],
    ) -> None:
        self._active = ActiveTransactions(
            store,
            destination,
            timers=timers,
            clock=clock,
            run=run,
            limits=limits,
            settings=settings,
            open_expired=self._open_expired,
            prepared_expired=self._prepared_expired,
            mark_ready=mark_ready,
        )
        self._store, self._timers = store, timers
        self._applier = self._active.applier
        self._begin_commands = BeginCommands(self._active)
        self._support = CommandSupport(self._active)
        self._prepare_command = PrepareCommand(self._active, self._support)
        self._end_commands = EndCommands(self._active, self._support)
        self._transact_command = TransactCommand(self._active)
        self._group_commands = CommitGroupCommands(self._active, self._support)
        self._queries = TransactionQueries(self._active)
        self._housekeeping_timer: Any = None
        self._recovery_done: Callable[[], None] | None = None
        self._stop_done: Callable[[], None] | None = None
        self.stopping = False
        """Whether new requests are rejected."""
        self.stopped = False
        """Whether `stop` is done.

        The store may be closed in a worker from then on: do not use it.
        """

    # One transaction

    @reply_errors
    def begin(self, request: BeginRequest, session: Caller, done: DoneCallback) -> None:
        """Begin a transaction; `done(BeginResult)`.

        Errors: TransactionExists, GroupStale, GroupFenced, NotAllowed (too many groups), BadRequest.
        """
        self._begin_commands.begin(request, session, done)

    @reply_errors
    def send(self, epoch: int, piece: IncomingBatch, done: DoneCallback) -> None:
        """Store a batch; `done(None)` when it is in the journal, not fsynced, also for a duplicate.

        Errors: UnknownTransaction, TransactionState, TransactionTooLarge, UnknownTopic, SequenceGap,
        UnknownProducer.
        """
        self._begin_commands.send(epoch, piece, done)

    @reply_errors
    def prepare(
        self,
        xid: str,
        epoch: int,
        ttl_ms: int | None,
        offsets: Sequence[Any],
        session: Caller,
        done: DoneCallback,
    ) -> None:
        """Prepare a transaction; `done(PrepareResult)` once durable, also if it is already prepared.

        Errors: UnknownTransaction, StaleEpoch, TransactionState, TransactionCommitted,
        TransactionRolledBack, HeuristicOutcome, UnknownTopic, Fenced, NotAllowed, GroupStale, GroupFenced.
        """
        self._prepare_command.prepare(xid, epoch, ttl_ms, offsets, session, done)

    @reply_errors
    def commit(
        self,
        xid: str,
        epoch: int,
        one_phase: bool,
        heuristic: bool,
        offsets: Sequence[Any],
        force: bool,
        session: Caller,
        done: DoneCallback,
    ) -> None:
        """Commit; `done(CommitResult)` once the commit is durable and applied, or takes long.

        `one_phase`: commit it without a prepare. `heuristic`: an operator commits a prepared one. `force`, with
        `heuristic`: also if messages are lost. Errors as for `prepare`, and Damaged if messages are lost or cannot be
        read.
        """
        self._end_commands.commit(xid, epoch, one_phase, heuristic, offsets, force, session, done)

    @reply_errors
    def rollback(self, xid: str, epoch: int, heuristic: bool, done: DoneCallback) -> None:
        """Roll back an open or prepared transaction; `done(RollbackResult)`.

        `heuristic`: an operator rolls back a prepared one.

        Errors: UnknownTransaction, StaleEpoch, TransactionCommitted, HeuristicOutcome.
        """
        self._end_commands.rollback(xid, epoch, heuristic, done)

    @reply_errors
    def forget(self, xid: str, epoch: int, done: DoneCallback) -> None:
        """Forget a heuristic outcome; `done(True)`, or `done(False)` if there was none.

        Errors: TransactionState.
        """
        self._end_commands.forget(xid, epoch, done)

    @reply_errors
    def transact(self, request: TransactRequest, session: Caller, done: DoneCallback) -> None:
        """Begin, send and commit in one request; `done(CommitResult)`. Errors: as those commands."""
        self._transact_command.transact(request, session, done)

    # Queries

    def list(
        self, states: Sequence[str] | None, after_epoch: int, limit: int, group: str = ""
    ) -> tuple[JsonRows, bool, int]:
        """Return a page of transactions: (rows by epoch, whether there are more, last epoch).

        The next page continues after the last epoch. Rows are as in LIST_TRANSACTIONS. `states` None
        selects transactions that need an operator's attention. `group` "" selects all producer groups. A
        page scans a bounded number of transactions, so it may be short or empty although there are more.
        """
        return self._queries.page(states, after_epoch, limit, group)

    def describe(self, xid: str, epoch: int) -> dict[str, Any]:
        """Return the details of one transaction; epoch 0 means the latest with that name.

        If there is none, `state` is "unknown".
        """
        return self._queries.describe(xid, epoch)

    def status(self) -> dict[str, Any]:
        """Return the "transactions" part of STATUS."""
        return self._queries.status()

    def await_check_back(
        self, group: str, wait_ms: int, session: Caller, done: DoneCallback
    ) -> Callable[[], None]:
        """Wait for check-back queries to a producer group: `done(queries)`, or `done([])` at the end.

        The wait ends after `wait_ms`.

        Returns: a function that ends the wait with `done([])`; no effect once `done` was called.
        """
        if self.stopping:
            done(None, Busy(rejections.STOPPING))
            return _no_wait
        return self._active.check_back.add_wait(group, wait_ms, session, done)

    # Commit groups

    @reply_errors
    def commit_group(self, request: GroupCommitRequest, done: DoneCallback) -> None:
        """Commit all named members atomically; `done(GroupCommitResult)`.

        Errors: GroupStale, GroupFenced, GroupIncomplete, NotAllowed, BadRequest.
        """
        self._group_commands.commit(request, done)

    @reply_errors
    def abort_group(self, group: str, sequence: int, run: str, done: DoneCallback) -> None:
        """Fence a run of a commit group; `done(GroupAbortResult)`. Errors: NotAllowed."""
        self._group_commands.abort(group, sequence, run, done)

    def list_groups(self, after: str, limit: int) -> tuple[JsonRows, bool]:
        """Return (rows of commit groups with names above `after`, in order, whether there are more)."""
        return self._group_commands.list_groups(after, limit)

    @reply_errors
    def forget_group(self, group: str, done: DoneCallback) -> None:
        """Forget commit and aborted runs of a commit group; `done(True)`, `done(False)` if none."""
        self._group_commands.forget(group, done)

    # Notifications by the broker, and timeouts

    def session_closed(self, session: Caller) -> None:
        """End the local open transactions and the check-back waits of a closed session."""
        # After the stop nothing needs to end: recovery rolls back open transactions.
        if self.stopped:
            return
        self._active.check_back.session_lost(session)
        for epoch in self._active.sessions.remove_session(session):
            self._end_open(epoch)

    def topic_deleted(self, incarnation: int) -> None:
        """Drop effects on partitions of a deleted topic, by its incarnation."""
        self._applier.topic_deleted(incarnation)

    def target_resumed(self, key: int) -> None:
        """Handle a target that accepts writes again: apply lost effects again, then the waiting ones."""
        self._applier.target_resumed(key)

    def _open_expired(self, epoch: int) -> None:
        self._end_open(epoch)

    def _end_open(self, epoch: int) -> None:
        """Roll back an open transaction; if a record of it is being written, only if that fails."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            return
        if transaction.state == states.OPEN and not self._active.is_pending(transaction):
            self._support.roll_back(transaction)
        else:
            runtime_state(transaction).orphaned = True

    def _prepared_expired(self, epoch: int) -> None:
        """Roll back an expired, prepared member of a commit group."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            return
        self._active.prepared_expiries.set_deadline(epoch, RETRY_SECONDS)
        if transaction.state == states.PREPARED and not self._active.is_pending(transaction):
            self._support.roll_back(transaction)

    # Turns, start and stop

    def write(self) -> bool:
        """Write queued records and apply effects, at the end of a turn; False if there was no work."""
        wrote = self._store.write()
        wrote = self._applier.write() or wrote
        self._check_recovery_and_stop()
        return wrote

    def _check_recovery_and_stop(self) -> None:
        if self._recovery_done is not None and self._applier.idle and not self._store.due:
            recovered, self._recovery_done = self._recovery_done, None
            recovered()
        if self._stop_done is not None and self._store.idle and not self._active.has_undurable_decisions:
            stopped, self._stop_done = self._stop_done, None
            self._applier.stop(partial(self._applier_stopped, stopped))

    def _applier_stopped(self, stopped: Callable[[], None]) -> None:
        self.stopped = True
        stopped()

    def recover(self, done: Callable[[], None]) -> None:
        """Restore prepared transactions with their offset locks, and apply committed ones.

        Call this before the listener opens, then run turns (`write`, the writes of the targets, timers)
        until `done()`: all committed transactions are then written to their targets, or wait for a blocked one.
        """
        self._recovery_done = done
        self._active.restore()
        self._run_housekeeping()

    def _run_housekeeping(self) -> None:
        self._store.run_housekeeping()
        self._housekeeping_timer = self._timers.after(
            HOUSEKEEPING_SECONDS, self._run_housekeeping, deferrable=True
        )

    def stop(self, done: Callable[[], None]) -> None:
        """Reject new requests; call `done()` when nothing is pending.

        Effects are fsynced before, if possible. The caller runs turns until `done()`, and closes the store afterwards.
        """
        self.stopping = True
        self._stop_done = done
        if self._housekeeping_timer is not None:
            self._timers.cancel(self._housekeeping_timer)
        self._active.close()


def _no_wait() -> None:
    """Do nothing: cancels a wait that has already ended."""
