"""The transaction coordinator: entry point for all transaction commands of sessions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from journal.clock import Clock
from tfmq.apply_target import ApplyTarget, RunInWorker, Timers
from tfmq.errors import Busy
from tfmq.transaction import rejections
from tfmq.transaction.active_transactions import ActiveTransactions
from tfmq.transaction.commands import TransactionCommandHandler
from tfmq.transaction.commit_group_commands import CommitGroupCommands
from tfmq.transaction.queries import TransactionQueries
from tfmq.transaction.requests import Caller, DoneCallback
from tfmq.transaction.store import TransactionStore

HOUSEKEEPING_SECONDS: Final = 1.0
"""Interval of `TransactionStore.run_housekeeping`."""


class TransactionCoordinator(TransactionCommandHandler):
    """Executes transaction commands, from begin to forget.

    A reply is sent only after the journal fsync that the reply depends on. A message is visible to consumers only after
    the fsync of its commit record. All methods are called in the broker's thread. `write()` writes the records of a
    turn (one pass of the broker's event loop) in one journal append. The broker calls it at the end of a turn in which
    `mark_ready` was called, and in each turn until `recover` or `stop` is done.

    `settings`: the keys `transaction.*` of the configuration without that prefix. `limits`: the limits by name. A
    command passes its error to `done` and does not raise it. Each command lists its own errors; every command that
    writes may also pass StorageStopped, DiskFull and Busy.
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
        mark_ready: Callable[[], None],
    ) -> None:
        active = ActiveTransactions(
            store,
            apply_target,
            timers=timers,
            clock=clock,
            run=run,
            limits=limits,
            settings=settings,
            roll_back=self.roll_back,
            mark_ready=mark_ready,
        )
        super().__init__(active)
        self._timers, self._applier = timers, active.applier
        self.topic_deleted, self.target_resumed = self._applier.topic_deleted, self._applier.target_resumed
        self._group_commands = groups = CommitGroupCommands(active, self)
        self.commit_group, self.abort_group, self.forget_group = groups.commit, groups.abort, groups.forget
        self.list_groups = groups.list_groups
        queries = TransactionQueries(active)
        self.list, self.describe, self.status = queries.page, queries.describe, queries.status
        self.describe_commit, self.read_commit = queries.describe_commit, queries.read_commit
        self._housekeeping_timer: Any = None
        self._recovery_done: Callable[[], None] | None = None
        self._stop_done: Callable[[], None] | None = None
        self.stopped = False
        """Whether `stop` is done. After that the store must not be used, because a worker may be closing it."""

    def await_check_back(self, group: str, wait_ms: int, session: Caller, done: DoneCallback) -> Callable[[], None]:
        """Wait up to `wait_ms` for check-back queries, which ask how a group's prepared transactions are to end.

        Calls `done(queries, None)` when there are any, or `done([], None)` after `wait_ms`. Returns a function that
        ends the wait with `done([], None)`; that function has no effect after `done` was called.
        """
        if self._active.stopping:
            done(None, Busy(rejections.STOPPING))
            return lambda: None
        return self._active.check_back.add_wait(group, wait_ms, session, done)

    def session_closed(self, session: Caller) -> None:
        """Roll back the local open transactions of a closed session, and end its waits for check-back queries."""
        # After the stop no rollback is needed, because the next start rolls back open transactions.
        if not self.stopped:
            self._active.end_session(session)

    # Turns, start and stop

    def write(self) -> bool:
        """Write the queued records and apply effects, at the end of a turn; return False if there was nothing to do."""
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
        """After a start, restore prepared transactions with their offset locks, and apply committed transactions.

        Called before the listener opens. The caller then runs turns until `done()` is called. By then the effects of
        each committed transaction are written to their targets, or wait for a blocked target.
        """
        self._recovery_done = done
        self._active.restore()
        self._run_housekeeping()

    def _run_housekeeping(self) -> None:
        self._store.run_housekeeping()
        self._housekeeping_timer = self._timers.after(HOUSEKEEPING_SECONDS, self._run_housekeeping, deferrable=True)

    def stop(self, done: Callable[[], None]) -> None:
        """Reject new requests, finish the queued work, try to fsync all effects, then call `done()`.

        The caller runs turns until `done()` is called, and closes the store after that.
        """
        self._active.stopping = True
        self._stop_done = done
        if self._housekeeping_timer is not None:
            self._timers.cancel(self._housekeeping_timer)
        self._active.close()
