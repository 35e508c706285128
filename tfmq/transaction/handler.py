"""Takes what sessions ask of transactions, from begin to forget, and tells what became of it.

No protocol and no broker: requests are plain values, answers callbacks, targets a `Destination`. Nothing is
answered before the journal's force that the answer stands for. Every change of a transaction's state is the
fold of a journal entry in the store, live as in recovery.

One owner's thread calls everything. What is asked during a turn is written by `write()` at the end of the
turn, one append of the journal for all; call it until `due` is false.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from journal.clock import Clock
from tfmq.effects import Destination
from tfmq.transaction.requests import Begin, Caller, Done, GroupCommit, Timers, Transact


class TransactionHandler:
    """See the module. `store`: a `JournalTransactionStore`; `run(work, done)`: work in a worker.

    `settings`: the keys `transaction.*` of the configuration without that prefix; `limits`: by name.
    Errors are given to `done`, none is raised; those named here besides StorageStopped, DiskFull and Busy,
    which every writing method may answer.
    """

    def __init__(
        self,
        store: Any,
        destination: Destination,
        *,
        timers: Timers,
        clock: Clock,
        run: Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None],
        limits: Mapping[str, int],
        settings: Mapping[str, int],
    ) -> None: ...

    # One transaction

    def begin(self, request: Begin, session: Caller, done: Done) -> None:
        """`done(Began)`. TransactionExists, GroupStale, GroupFenced, NotAllowed (limits), BadRequest."""

    def send(self, epoch: int, piece: Any, done: Done) -> None:
        """Takes a `Piece`; `done(None)` when it is in the journal, also if it was before; not forced.

        UnknownTransaction, TransactionState, TransactionTooLarge, SequenceGap, UnknownProducer.
        """

    def prepare(
        self, xid: str, epoch: int, ttl_ms: int | None, offsets: Sequence[Any], session: Caller, done: Done
    ) -> None:
        """`done(Prepared)` once that is forced; again for one that is prepared already."""

    def commit(
        self,
        xid: str,
        epoch: int,
        one_phase: bool,
        heuristic: bool,
        offsets: Sequence[Any],
        session: Caller,
        done: Done,
    ) -> None:
        """`done(Ended)` when the decision is forced and everything written, or after ten seconds."""

    def rollback(self, xid: str, epoch: int, heuristic: bool, done: Done) -> None:
        """`done(RolledBack)`."""

    def forget(self, xid: str, epoch: int, done: Done) -> None:
        """Drops a heuristic outcome for good; `done(whether there was one)`."""

    def transact(self, request: Transact, session: Caller, done: Done) -> None:
        """`done(Ended)`: begin, sends and commit in one."""

    # Looking

    def list(
        self, states: Sequence[str] | None, after_epoch: int, limit: int, group: str = ""
    ) -> tuple[list[dict[str, Any]], bool]:
        """(rows as LIST_TRANSACTIONS has them, whether there are more)."""
        return [], False

    def describe(self, xid: str, epoch: int) -> dict[str, Any]:
        """One row, with `state` "unknown" for what is not known; epoch 0 means the latest."""
        return {}

    def status(self) -> dict[str, Any]:
        """What STATUS says under "transactions"."""
        return {}

    def await_checks(self, group: str, wait_ms: int, session: Caller, done: Done) -> Callable[[], None]:
        """`done(list of Check)` when there is something to ask, [] after `wait_ms`; answers what ends the
        wait: then `done([])` comes at once, unless an answer came before.
        """
        return lambda: None

    # Commit groups

    def commit_group(self, request: GroupCommit, done: Done) -> None:
        """`done(GroupEnded)`. GroupStale, GroupFenced, GroupIncomplete."""

    def abort_group(self, group: str, sequence: int, run: str, done: Done) -> None:
        """`done(GroupAborted)`."""

    def list_groups(self) -> Sequence[dict[str, Any]]:
        """One map a commit group."""
        return []

    def forget_group(self, group: str, done: Done) -> None:
        """`done(whether there was one)`."""

    # Events

    def session_lost(self, session: Caller) -> None:
        """Local transactions of that session end unless they are decided; its waits for checks end."""

    def topic_gone(self, incarnation: int) -> None:
        """What waits for partitions of that incarnation need wait no longer: its messages are dropped."""

    def resumed(self, key: int) -> None:
        """A target takes writes again: what is parked there goes on at once."""

    # Turning

    @property
    def due(self) -> bool:
        """Whether `write` has something to do that need not wait for a worker or a force."""
        return False

    def write(self) -> bool:
        """The turn's end: journals what was asked, hands out what is to be applied; whether it did anything."""
        return False

    def recover(self, done: Callable[[], None]) -> None:
        """Before the listener opens: rolls back what was never prepared, locks the offsets of prepared ones,
        applies what was decided. `done()` when all of it is written, or waits for a target that takes nothing.

        The caller turns (`write`, then the destination's writes) until then.
        """

    def stop(self, done: Callable[[], None]) -> None:
        """Takes no more requests; `done()` when nothing of it is under way. The store is closed by its owner."""
