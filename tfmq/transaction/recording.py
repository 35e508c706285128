"""What is asked of transactions becomes records: each verb checks the state, and queues the record that changes it.

Everything else (who may ask, limits, offsets, targets) is the handler's business. While a record waits to be written
the state is preparing, committing or rolling_back; if it is refused, the state is what it was before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from journal.clock import Clock
from tfmq.apply_target import GroupPlaces
from tfmq.transaction import operations, states
from tfmq.transaction.epochs import Epochs
from tfmq.transaction.ledger import Ledger
from tfmq.transaction.operations import Origin
from tfmq.transaction.queue import JournalQueue, Written
from tfmq.transaction.transaction import Piece, Transaction

SEND: Final = "send"
FORGET: Final = "forget"


class Recording:
    """The verbs of a `JournalTransactionStore`. They raise states.WrongStep, and nothing is changed then."""

    def __init__(
        self,
        ledger: Ledger,
        queue: JournalQueue,
        epochs: Epochs,
        clock: Clock,
        decided_ms: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._epochs = epochs
        self._clock = clock
        self._decided_ms = decided_ms
        """The time of a decision, from which the delays of what it brings count."""
        self._forgetting: set[int] = set()
        """Heuristic ones whose end is queued."""

    def begin(self, origin: Origin) -> Transaction:
        """A new, open transaction under an epoch that nobody had before; nothing is written.

        It is in `transactions`, and in `named` if it has a name. Raises Busy while new epochs wait for the disk,
        StorageStopped or DiskFull if they do not come.
        """
        return self._ledger.begin(self._epochs.take(), origin)

    def discard(self, transaction: Transaction) -> None:
        """Forgets an open transaction without a record; its outcome is not kept. Raises WrongStep for another."""
        states.step(transaction.state, states.FINISH_EMPTY)
        self._ledger.remove(transaction)

    def finish_empty(self, transaction: Transaction) -> None:
        """An open one with nothing in it ends as "read_only", without a record."""
        states.step(transaction.state, states.FINISH_EMPTY)
        self._ledger.remove(transaction)
        transaction.state = states.READ_ONLY

    def add(self, transaction: Transaction, piece: Piece, written: Written) -> None:
        """Queues a batch of an open transaction. The caller has asked `streams.check` and the limits."""
        if transaction.state != states.OPEN:
            raise states.WrongStep(transaction.state, SEND)
        transaction.topics.setdefault(piece.log_id, piece.topic)
        self._queue.put(None, written, transaction=transaction, pieces=(piece,))

    def prepare(
        self,
        transaction: Transaction,
        offsets: Sequence[GroupPlaces],
        expires_ms: int,
        written: Written,
    ) -> None:
        """Queues the prepare; when written the state is "prepared"."""
        self._ask(transaction, states.ASK_PREPARE)
        operation = operations.Prepare(
            transaction.epoch,
            self._clock.wall_ms(),
            transaction.origin,
            tuple(transaction.topics.items()),
            tuple(offsets),
            transaction.messages + transaction.queued,
            expires_ms,
        )
        self._put(operation, written, transaction)

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
        if transaction.prepared_ms:
            if offsets or pieces:
                raise states.WrongStep(transaction.state, SEND)
            self._ask(transaction, states.ASK_COMMIT)
            self._put(operations.Commit(transaction.epoch, self._decided_ms()), written, transaction)
            return
        self._ask(transaction, states.ASK_COMMIT)
        topics = transaction.topics
        count = transaction.messages + transaction.queued
        for piece in pieces:
            topics[piece.log_id] = piece.topic
            count += piece.count
        operation = operations.LocalCommit(
            transaction.epoch,
            self._decided_ms(),
            transaction.origin,
            tuple(topics.items()),
            tuple(offsets),
            count,
        )
        self._put(operation, written, transaction, pieces)

    def rollback(self, transaction: Transaction, written: Written) -> None:
        """Queues the end of an open or prepared one; when written it is gone from `transactions`."""
        self._ask(transaction, states.ASK_ROLLBACK)
        epoch, now_ms = transaction.epoch, self._clock.wall_ms()
        operation: operations.Operation
        if transaction.prepared_ms:
            operation = operations.Rollback(epoch, now_ms)
        else:
            operation = operations.LocalRollback(epoch, now_ms, transaction.origin)
        self._put(operation, written, transaction)

    def commit_by_hand(self, transaction: Transaction, written: Written) -> None:
        """As `commit` of a prepared one; it stays, as "heuristic_committed", until `forget`."""
        self._require_prepared(transaction, states.DECIDE_BY_HAND)
        self._ask(transaction, states.ASK_COMMIT)
        operation = operations.HeuristicCommit(transaction.epoch, self._decided_ms())
        self._put(operation, written, transaction)

    def rollback_by_hand(self, transaction: Transaction, written: Written) -> None:
        """As `rollback` of a prepared one; it stays, as "heuristic_rolled_back", until `forget`."""
        self._require_prepared(transaction, states.DROP_BY_HAND)
        self._ask(transaction, states.ASK_ROLLBACK)
        operation = operations.HeuristicRollback(transaction.epoch, self._clock.wall_ms())
        self._put(operation, written, transaction)

    def forget(self, transaction: Transaction, written: Written) -> None:
        """Queues the end of a heuristic one's memory; its plain outcome stays among the outcomes.

        Raises WrongStep for any other, and for one that was committed by hand and is not settled yet.
        """
        epoch = transaction.epoch
        if transaction.state not in states.HEURISTIC or not transaction.settled or epoch in self._forgetting:
            raise states.WrongStep(transaction.state, FORGET)
        self._forgetting.add(epoch)

        def told(place: int, error: BaseException | None) -> None:
            self._forgetting.discard(epoch)
            written(place, error)

        self._queue.put(operations.Forget(epoch, self._clock.wall_ms()), told)

    def _require_prepared(self, transaction: Transaction, event: str) -> None:
        if transaction.state != states.PREPARED:
            raise states.WrongStep(transaction.state, event)

    def _ask(self, transaction: Transaction, event: str) -> None:
        self._ledger.step(transaction, event)

    def _put(
        self,
        operation: operations.Operation,
        written: Written,
        transaction: Transaction,
        pieces: Sequence[Piece] = (),
    ) -> None:
        refused = partial(self._refused, (transaction,))
        self._queue.put(operation, written, transaction=transaction, pieces=pieces, refused=refused)

    def _refused(self, transactions: Sequence[Transaction]) -> None:
        """Their record was not written: each is what it was before."""
        for transaction in transactions:
            event = states.REFUSED_PREPARED if transaction.prepared_ms else states.REFUSED
            self._ledger.step(transaction, event)

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
        """Queues one decision over all members (prepared), which ends `dropped` (prepared) too. When written every
        member has the same `decision`. Without members it only drops what was left over.

        Open ones end by records of their own, which say who they are.
        """
        self._ask_all(members, dropped)
        operation = operations.GroupCommit(
            group,
            sequence,
            run,
            rows,
            [each.epoch for each in members],
            [each.epoch for each in dropped],
            self._decided_ms(),
        )
        self._queue.put(operation, written, refused=partial(self._refused, [*members, *dropped]))

    def abort_group(
        self, group: str, sequence: int, run: str, dropped: Sequence[Transaction], written: Written
    ) -> None:
        """Queues the fence of a run and the end of `dropped` (prepared)."""
        self._ask_all((), dropped)
        operation = operations.GroupAbort(
            group, sequence, run, [each.epoch for each in dropped], self._clock.wall_ms()
        )
        self._queue.put(operation, written, refused=partial(self._refused, dropped))

    def forget_group(self, group: str, written: Written) -> None:
        """Queues the end of a group's memory."""
        self._queue.put(operations.GroupForget(group, self._clock.wall_ms()), written)

    def _ask_all(self, members: Sequence[Transaction], dropped: Sequence[Transaction]) -> None:
        """All of them, or WrongStep and nothing has changed."""
        for member in members:
            self._require_prepared(member, states.DECIDE)
        for transaction in dropped:
            self._require_prepared(transaction, states.DROP)
        for member in members:
            self._ask(member, states.ASK_COMMIT)
        for transaction in dropped:
            self._ask(transaction, states.ASK_ROLLBACK)
