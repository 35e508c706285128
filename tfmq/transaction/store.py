"""Holds the transactions that are under way, and the journal that makes them durable.

Every change of what is durable is the fold of a journal entry, live as in recovery (`ledger`). What is asked during
a turn is queued, written in one append by `write()`, folded in order, and then told to who asked. One owner's thread,
except where a method says otherwise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from journal.clock import Clock
from journal.disk import Disk
from tfmq.effects import GroupPlaces
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.operations import Origin
from tfmq.transaction.outcomes import Outcome
from tfmq.transaction.streams import LeasedMs, Streams
from tfmq.transaction.transaction import Decision, Piece, Slice, Transaction

Written: TypeAlias = Callable[[int, BaseException | None], None]
"""written(place, None) once an entry is in the journal at `place` and folded, not forced yet; written(0, error) if
nothing was written and nothing has changed. Errors: journal.errors.Full (go on when there is space), Stopped, others
of the journal, OSError."""

Waiter: TypeAlias = Callable[[BaseException | None], None]
Run: TypeAlias = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]


class JournalTransactionStore:
    """See the module. Made by `open`.

    `transactions`: epoch -> Transaction, all that are not settled, by rising epoch; `named`: xid -> the latest live
    one of that name; `counts`: state -> how many of `transactions`.
    """

    transactions: dict[int, Transaction]
    named: dict[str, Transaction]
    counts: dict[str, int]
    streams: Streams
    groups: CommitGroups

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
        force: Callable[[Any, int, Waiter], None],
        run: Run,
        limits: Mapping[str, int],
        settings: Mapping[str, int],
    ) -> "JournalTransactionStore":  # type: ignore[empty-body]
        """Opens or makes the journal in the existing `folder`, after recovery; forces a first range of epochs.

        Transactions that were never prepared are gone then; prepared and decided ones are in `transactions`.
        `force(journal, place, waiter)`: a Forcer's `want`. `limits` by name, `settings` the keys `transaction.*`
        without that prefix (outcome_seconds, journal_file_bytes).
        Raises Corrupt (file and position named; nothing was changed), NewerFormat, Full, OSError.
        """
        ...

    @property
    def journal_id(self) -> int:  # type: ignore[empty-body]
        """Names this journal as the source of effects: `Source(SOURCE_TRANSACTION, journal_id, place, number)`."""
        ...

    @property
    def stopped(self) -> str | None:
        """Why nothing can be written any more; None: it can."""
        ...

    # One transaction. Each verb checks the state only (states.WrongStep); everything else is the handler's business.
    # While a record waits to be written the state is preparing, committing or rolling_back; if it is refused, the state
    # is what it was before.

    def begin(self, origin: Origin) -> Transaction:  # type: ignore[empty-body]
        """A new, open transaction under an epoch that nobody had before; nothing is written.

        It is in `transactions`, and in `named` if it has a name. Raises Busy while new epochs wait for the disk, and
        StorageStopped if they never come.
        """
        ...

    def discard(self, transaction: Transaction) -> None:
        """Forgets an open transaction (whose prepare was refused) without a record; its outcome is not kept."""

    def add(self, transaction: Transaction, piece: Piece, written: Written) -> None:
        """Queues a batch of an open transaction. The caller has asked `streams.check` and the limits."""

    def prepare(
        self,
        transaction: Transaction,
        offsets: Sequence[GroupPlaces],
        expires_ms: int,
        written: Written,
    ) -> None:
        """Queues the prepare; when written the state is "prepared"."""

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

    def rollback(self, transaction: Transaction, written: Written) -> None:
        """Queues the end of an open or prepared one; when written it is gone from `transactions`."""

    def commit_by_hand(self, transaction: Transaction, written: Written) -> None:
        """As `commit` of a prepared one; it stays, as "heuristic_committed", until `forget`."""

    def rollback_by_hand(self, transaction: Transaction, written: Written) -> None:
        """As `rollback` of a prepared one; it stays, as "heuristic_rolled_back", until `forget`."""

    def forget(self, transaction: Transaction, written: Written) -> None:
        """Queues the end of a heuristic one's memory; its plain outcome stays among the outcomes. A commit by hand that
        is not settled yet raises WrongStep."""

    def finish_empty(self, transaction: Transaction) -> None:
        """An open one with nothing in it ends as "read_only", without a record."""

    def outcome(self, xid: str, epoch: int = 0) -> Outcome | None:
        """What became of a transaction that is over: of that very epoch, or of the latest of that name."""
        ...

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
        """Queues one decision over all members (prepared), which ends `dropped` too. When written every member has the
        same `decision`. Without members it only drops what was left over."""

    def abort_group(
        self, group: str, sequence: int, run: str, dropped: Sequence[Transaction], written: Written
    ) -> None:
        """Queues the fence of a run and the end of `dropped`."""

    def forget_group(self, group: str, written: Written) -> None:
        """Queues the end of a group's memory."""

    # After the decision

    def slices(self, decision: Decision, log_id: int, after: int = 0) -> Iterator[Slice]:  # type: ignore[empty-body]
        """What is still to go into one partition, behind the message number `after`.

        Appends of at most 1 MiB (one block alone may be larger), read from the journal and verified. Any thread,
        beside the owner. Raises Corrupt, OSError.
        """
        ...

    def slices_cached(self, decision: Decision, log_id: int, after: int = 0) -> list[Slice] | None:
        """The same at once, if it is not more than one slice and need not wait for the disk; else None."""
        ...

    def applied(self, decision: Decision) -> None:
        """All its effects are written, or their targets gone: the states become "committed", memory is freed."""

    def settle(self, decision: Decision) -> None:
        """All its effects are on the disk: the journal need not keep its messages. After `applied`."""

    # Turning

    @property
    def due(self) -> bool:
        """Whether `write` has something to do now."""
        return False

    def write(self) -> bool:
        """The turn's end: appends what is queued, folds it, tells who asked; whether it did anything. What waits for a
        new file in a worker owns its bytes from then on.
        """
        return False

    def when_forced(self, place: int, waiter: Waiter) -> None:
        """`waiter(None)` once the entry at `place` is on the disk, `waiter(error)` if the journal stops before."""

    def tend(self) -> None:
        """Housekeeping, about once a second: a checkpoint if one is due, old files emptied if they hold too little."""

    def listed(self, after_epoch: int = 0) -> Iterator[Transaction]:
        """`transactions` with an epoch above `after_epoch`, by rising epoch, without looking at those before."""
        return iter(())

    def check(self, size_bytes: int) -> None:
        """Whether the journal takes so many bytes more. Raises StorageStopped, DiskFull."""

    def status(self) -> Mapping[str, Any]:
        """journal: "open" or why it stopped; journal_bytes; bytes (of all messages kept)."""
        return {}

    def close(self) -> None:
        """Forces, writes a last checkpoint, closes; nothing may be queued or under way."""
