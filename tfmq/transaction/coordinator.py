"""The transaction coordinator: entry point for all transaction commands of sessions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from journal.clock import Clock
from tfmq.apply_target import ApplyTarget, RunInWorker, Timers
from tfmq.errors import Busy
from tfmq.transaction import rejections, states
from tfmq.transaction.active_transactions import ActiveTransactions, runtime_state
from tfmq.transaction.commands import TransactionCommandHandler
from tfmq.transaction.commit_group_commands import CommitGroupCommands
from tfmq.transaction.queries import TransactionQueries
from tfmq.transaction.requests import Caller, DoneCallback
from tfmq.transaction.store import TransactionStore

HOUSEKEEPING_SECONDS: Final = 1.0
"""Interval of `TransactionStore.run_housekeeping`."""
RETRY_SECONDS: Final = 60.0
"""Pause after a failed rollback of an expired member of a commit group."""


class TransactionCoordinator(TransactionCommandHandler):
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
        active = ActiveTransactions(
            store,
            destination,
            timers=timers,
            clock=clock,
            run=run,
            limits=limits,
            settings=settings,
            open_expired=self._end_open,
            prepared_expired=self._prepared_expired,
            mark_ready=mark_ready,
        )
        super().__init__(active)
        self._timers, self._applier = timers, active.applier
        self._group_commands = CommitGroupCommands(active, self)
        self.commit_group = self._group_commands.commit
        self.abort_group = self._group_commands.abort
        self.list_groups = self._group_commands.list_groups
        self.forget_group = self._group_commands.forget
        queries = TransactionQueries(active)
        self.list, self.describe, self.status = queries.page, queries.describe, queries.status
        self._housekeeping_timer: Any = None
        self._recovery_done: Callable[[], None] | None = None
        self._stop_done: Callable[[], None] | None = None
        self.stopped = False
        """Whether `stop` is done.

        The store may be closed in a worker from then on: do not use it.
        """

    def await_check_back(self, group: str, wait_ms: int, session: Caller, done: DoneCallback) -> Callable[[], None]:
        """Wait for check-back queries to a producer group: `done(queries)`, or `done([])` at the end.

        The wait ends after `wait_ms`.

        Returns: a function that ends the wait with `done([])`; no effect once `done` was called.
        """
        if self._active.stopping:
            done(None, Busy(rejections.STOPPING))
            return lambda: None
        return self._active.check_back.add_wait(group, wait_ms, session, done)

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

    def _end_open(self, epoch: int) -> None:
        """Roll back an open transaction; if a record of it is being written, only if that fails."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            return
        if transaction.state == states.OPEN and not self._active.is_pending(transaction):
            self.roll_back(transaction)
        else:
            runtime_state(transaction).orphaned = True

    def _prepared_expired(self, epoch: int) -> None:
        """Roll back an expired, prepared member of a commit group."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            return
        self._active.prepared_expiries.set_deadline(epoch, RETRY_SECONDS)
        if transaction.state == states.PREPARED and not self._active.is_pending(transaction):
            self.roll_back(transaction)

    # Turns, start and stop

    def write(self) -> bool:
        """Write queued records and apply effects, at the end of a turn; False if there was no work."""
        wrote = self._store.write()
        wrote = self._applier.write() or wrote
        if self._recovery_done is not None and self._applier.idle and not self._store.due:
            recovered, self._recovery_done = self._recovery_done, None
            recovered()
        if self._stop_done is not None and self._store.idle and not self._active.undurable_decisions:
            stopped, self._stop_done = self._stop_done, None
            self._applier.stop(partial(self._applier_stopped, stopped))
        return wrote

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
        self._housekeeping_timer = self._timers.after(HOUSEKEEPING_SECONDS, self._run_housekeeping, deferrable=True)

    def stop(self, done: Callable[[], None]) -> None:
        """Reject new requests; call `done()` when nothing is pending.

        Effects are fsynced before, if possible. The caller runs turns until `done()`, and closes the store afterwards.
        """
        self._active.stopping = True
        self._stop_done = done
        if self._housekeeping_timer is not None:
            self._timers.cancel(self._housekeeping_timer)
        self._active.close()
