"""Takes what sessions ask of transactions, from begin to forget, and tells what became of it.

No protocol and no broker: requests are plain values, answers callbacks, targets a `Destination`. Nothing is
answered before the journal's force that the answer stands for; nothing is visible before the force of the
decision. Every change of what is durable is the fold of a journal entry in the store, live as in recovery.

One owner's thread calls everything. What is asked during a turn is written by `write()` at the end of the
turn, one append of the journal for all; call it until `due` is false.
"""

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
"""How often the store looks after its files."""
RETRY_SECONDS: Final = 60.0
"""A member whose time is over, and whose end the disk refused, is tried again after this."""


def answered(command: Callable[..., None]) -> Callable[..., None]:
    """What a command raises is told to its last argument, `done`."""

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
    """See the module. `run(work, done)`: work in a worker, for reading large transactions.

    `settings`: the keys `transaction.*` of the configuration without that prefix; `limits`: by name.
    Errors are given to `done`, none is raised; those named here besides StorageStopped, DiskFull and Busy,
    which every writing method may answer.
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
        """It takes no more requests."""
        self.over = False
        """It has stopped: its owner closes the store, in a worker maybe, and nothing here may touch that."""

    # One transaction

    @answered
    def begin(self, request: Begin, session: Caller, done: Done) -> None:
        """`done(Began)`. TransactionExists, GroupStale, GroupFenced, NotAllowed (groups), BadRequest."""
        self._beginnings.begin(request, session, done)

    @answered
    def send(self, epoch: int, piece: Piece, done: Done) -> None:
        """`done(None)` when it is in the journal, also if it was before; not forced.

        UnknownTransaction, TransactionState, TransactionTooLarge, UnknownTopic, SequenceGap, UnknownProducer.
        """
        self._beginnings.send(epoch, piece, done)

    @answered
    def prepare(
        self, xid: str, epoch: int, ttl_ms: int | None, offsets: Sequence[Any], session: Caller, done: Done
    ) -> None:
        """`done(Prepared)` once that is forced; again for one that is prepared already.

        UnknownTransaction, StaleEpoch, TransactionState, TransactionCommitted, TransactionRolledBack,
        HeuristicOutcome, UnknownTopic, Fenced, NotAllowed, GroupStale, GroupFenced.
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
        """`done(RolledBack)`. UnknownTransaction, StaleEpoch, TransactionCommitted, HeuristicOutcome."""
        self._endings.rollback(xid, epoch, heuristic, done)

    @answered
    def forget(self, xid: str, epoch: int, done: Done) -> None:
        """Drops a heuristic outcome for good; `done(whether there was one)`. TransactionState."""
        self._endings.forget(xid, epoch, done)

    @answered
    def transact(self, request: Transact, session: Caller, done: Done) -> None:
        """`done(Ended)`: begin, sends and commit in one. Errors as those."""
        self._transacting.transact(request, session, done)

    # Looking

    def list(
        self, states: Sequence[str] | None, after_epoch: int, limit: int, group: str = ""
    ) -> tuple[Maps, bool, int]:
        """(rows by epoch as LIST_TRANSACTIONS has them, whether there are more, the epoch behind which they are).

        `states` None: those that need somebody. `group` "": of every producer group. A page looks at a bounded number,
        so it may be short or empty although there are more."""
        return self._listing.page(states, after_epoch, limit, group)

    def describe(self, xid: str, epoch: int) -> dict[str, Any]:
        """One row and more, with `state` "unknown" for what is not known; epoch 0 means the latest."""
        return self._listing.describe(xid, epoch)

    def status(self) -> dict[str, Any]:
        """What STATUS says under "transactions"."""
        return self._listing.status()

    def await_checks(self, group: str, wait_ms: int, session: Caller, done: Done) -> Callable[[], None]:
        """`done(list of Check)` when there is something to ask, [] after `wait_ms`. The answer is what ends the
        wait: then `done([])` comes at once, unless an answer came before.
        """
        if self.stopping:
            done(None, Busy(rejections.STOPPING))
            return _nothing
        return self._books.checks.wait(group, wait_ms, session, done)

    # Commit groups

    @answered
    def commit_group(self, request: GroupCommit, done: Done) -> None:
        """`done(GroupEnded)`. GroupStale, GroupFenced, GroupIncomplete, NotAllowed, BadRequest."""
        self._groups.commit(request, done)

    @answered
    def abort_group(self, group: str, sequence: int, run: str, done: Done) -> None:
        """`done(GroupAborted)`. NotAllowed."""
        self._groups.abort(group, sequence, run, done)

    def list_groups(self, after: str, limit: int) -> tuple[Maps, bool]:
        """(one map a commit group, by name from the one behind `after` on; whether there are more)."""
        return self._groups.rows(after, limit)

    @answered
    def forget_group(self, group: str, done: Done) -> None:
        """`done(whether there was one)`."""
        self._groups.forget(group, done)

    # Events

    def session_lost(self, session: Caller) -> None:
        """Local transactions of that session end unless they are prepared or decided; so do its waits. After the stop
        nothing does: the next start finds no open ones."""
        if self.over:
            return
        self._books.checks.session_lost(session)
        for epoch in self._books.sessions.lost(session):
            self._end_open(epoch)

    def topic_gone(self, incarnation: int) -> None:
        """What waits for partitions of that incarnation need wait no longer: its messages are dropped."""
        self._applier.topic_gone(incarnation)

    def resumed(self, key: int) -> None:
        """A target takes writes again: what it lost is applied again, and what is parked there goes on."""
        self._applier.resumed(key)

    def _expired(self, epoch: int) -> None:
        self._end_open(epoch)

    def _end_open(self, epoch: int) -> None:
        """An unprepared one ends. While its prepare or commit is on the way, that decides."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            return
        if transaction.state == states.OPEN and not self._books.busy(transaction):
            self._steps.drop(transaction)
        else:
            live_of(transaction).orphan = True

    def _outlived(self, epoch: int) -> None:
        """The time of a prepared member of a commit group is over."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            return
        self._books.expiries.set(epoch, RETRY_SECONDS)
        if transaction.state == states.PREPARED and not self._books.busy(transaction):
            self._steps.drop(transaction)

    # Turning

    @property
    def due(self) -> bool:
        """Whether `write` has something to do that need not wait for a worker, a force or the time."""
        return self._store.due or self._applier.due

    def write(self) -> bool:
        """The turn's end: journals what was asked, hands out what is to be applied; whether it did anything."""
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
        """Before the listener opens: what is prepared waits as before, with its offsets locked; what was decided
        is applied. `done()` when all of it is written, or waits for a target that takes nothing.

        The caller turns (`write`, then the destination's writes, then `tick`) until then.
        """
        self._recovered = done
        self._books.restore()
        self._tend()

    def _tend(self) -> None:
        self._store.tend()
        self._tending = self._timers.after(TEND_SECONDS, self._tend, deferrable=True)

    def stop(self, done: Callable[[], None]) -> None:
        """Takes no more requests; `done()` when nothing of it is under way, and what was applied is forced where
        that can be. The store is closed by its owner; the caller turns until then.
        """
        self.stopping = True
        self._stopped = done
        if self._tending is not None:
            self._timers.cancel(self._tending)
        self._books.close()


def _nothing() -> None:
    """A wait that is over already."""
