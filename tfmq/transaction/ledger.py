"""What the entries of the transaction journal add up to: a pure fold, live as in recovery.

The same entries in the same order give the same ledger, over a snapshot or not. Two things are no entries, because
the journal and the partitions prove them without: that a transaction was begun (until its first record), and that all
of a decision is on the disk (`settle`). So a start may find decisions again that were settled before; the partitions
know that they have them.

An entry that does not fit what came before is damage and raises ValueError, unless a repair has left a filler before
it: then what was lost with the filler is left out, and counted.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, Final

from journal.wal.entry import AppendMsg, Entry, Filler
from tfmq.transaction import operations, snapshot, states
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.holds import Holds
from tfmq.transaction.kept import Kept
from tfmq.transaction.moves import Moves
from tfmq.transaction.operations import Origin
from tfmq.transaction.order import Order
from tfmq.transaction.outcomes import Outcome, Outcomes
from tfmq.transaction.streams import Streams
from tfmq.transaction.transaction import (
    LOST,
    SIZE_BITS,
    SIZE_MASK,
    WORDS,
    Decision,
    Locations,
    Transaction,
)

NOBODY: Final = Origin("", True, 0, 0, 0)
"""Of a transaction of which a start has found messages only: it is dropped unless a record behind names it."""

EPOCH_FIRST: Final = 1


class Ledger:
    """See the module. `outcomes` of transactions named by users, `local_outcomes` of those that the broker named."""

    def __init__(
        self, *, outcomes: Outcomes, local_outcomes: Outcomes, streams: Streams, groups: CommitGroups
    ) -> None:
        self.outcomes = outcomes
        self.local_outcomes = local_outcomes
        self.streams = streams
        self.groups = groups
        self._parts: tuple[Any, ...] = (streams, groups, outcomes, local_outcomes)
        self.clear()

    def clear(self) -> None:
        """Nothing, as before the first entry; outcomes, streams and groups are their own."""
        self.transactions: dict[int, Transaction] = {}
        self.named: dict[str, Transaction] = {}
        self.counts: dict[str, int] = dict.fromkeys(states.STATES, 0)
        self.order = Order(self.transactions)
        self.epochs_end = EPOCH_FIRST
        self.time_ms = 0
        """The latest time in any record: what expires does so by it, and so alike whenever it is folded."""
        self.kept = Kept()
        self.holds: Holds | None = None
        """None while recovering."""
        self.repaired = 0
        """Fillers seen."""
        self.ending: dict[int, Transaction] = {}
        """Prepared ones that were rolled back by a record that may not be on the disk yet, in the order of places."""
        self._moves = Moves()

    # Without a record

    def begin(self, epoch: int, origin: Origin) -> Transaction:
        """A new, open transaction."""
        transaction = self._add(Transaction(epoch, origin))
        if origin.producer_id:
            self.streams.begin(origin.producer_id, origin.number, epoch)
        self._name(transaction)
        return transaction

    def step(self, transaction: Transaction, event: str) -> None:
        """Raises WrongStep."""
        state = states.step(transaction.state, event)
        self.counts[transaction.state] -= 1
        self.counts[state] += 1
        transaction.state = state

    def remove(self, transaction: Transaction) -> None:
        """It is over, and nothing of it is needed."""
        if self.transactions.pop(transaction.epoch, None) is None:
            return
        self.counts[transaction.state] -= 1
        self.order.gone()
        origin = transaction.origin
        if origin.xid and self.named.get(origin.xid) is transaction:
            del self.named[origin.xid]
        if origin.member is not None:
            self.groups.leave(transaction.epoch, origin.member)
        if origin.producer_id:
            self.streams.give_up(origin.producer_id, origin.number)
        self._let_go(transaction)

    def settle(self, decision: Decision) -> None:
        """All of it is on the disk of its targets."""
        for transaction in decision.transactions:
            if transaction.state == states.HEURISTIC_COMMITTED:
                self._let_go(transaction)
            else:
                self.remove(transaction)

    def outcome(self, xid: str, epoch: int = 0) -> Outcome | None:
        return self.outcomes.find(xid, epoch) or self.local_outcomes.find(xid, epoch)

    # Entries

    def apply(self, entry: Entry) -> None:
        """One entry, as the journal gives it back. Raises ValueError."""
        content = entry.content
        if isinstance(content, AppendMsg):
            self.message(entry.place, content)
        elif isinstance(content, Filler):
            self.repaired += 1
            self.streams.torn = True
            self.outcomes.lost()
            self.local_outcomes.lost()
        else:
            self.enter(entry.place, operations.unpack(*content))

    def message(self, place: int, message: AppendMsg) -> Transaction | None:
        """A batch is in the journal; the transaction to which it belongs, None if that is over."""
        epoch, log_id, producer_id, sequence, count, _, data, moved_from = message
        if moved_from:
            return self._moved(place, epoch, moved_from)
        missing = self.streams.sent(producer_id, epoch, sequence, count)
        if self.holds is not None and epoch not in self.transactions:
            return None
        transaction = self._found(epoch)
        if missing and self.repaired:
            self._lose(transaction, missing)
        size = len(data)
        transaction.locations.add(place, log_id, count, size)
        transaction.messages += count
        transaction.size_bytes += size
        self.kept.add(size)
        if self.holds is not None:
            self.holds.add(transaction, place)
        return transaction

    def enter(self, place: int, operation: operations.Operation) -> None:
        """One operation is in the journal at `place`. Raises ValueError if it does not fit."""
        time_ms = max(self.time_ms, operation.time_ms)
        if time_ms != self.time_ms:
            self.time_ms = time_ms
            self.outcomes.expire(time_ms)
            self.local_outcomes.expire(time_ms)
            self.groups.expire(time_ms)
        self.streams.expire(time_ms)
        _RULES[type(operation)](self, place, operation)

    def _prepare(self, place: int, said: operations.Prepare) -> None:
        transaction = self._described(said)
        transaction.place = place
        transaction.prepared_ms = said.time_ms
        transaction.expires_ms = said.expires_ms
        self.step(transaction, states.PREPARE)
        self._ended(transaction, states.PREPARED)

    def _local_commit(self, place: int, said: operations.LocalCommit) -> None:
        self._decide(Decision(place, said.time_ms, (self._described(said),)), states.DECIDE)

    def _commit(self, place: int, said: operations.Commit) -> None:
        self._decide_prepared(place, said.time_ms, (said.epoch,), states.DECIDE)

    def _commit_by_hand(self, place: int, said: operations.HeuristicCommit) -> None:
        self._decide_prepared(place, said.time_ms, (said.epoch,), states.DECIDE_BY_HAND)

    def _rollback(self, place: int, said: operations.Rollback) -> None:
        self._drop(place, (said.epoch,), said.time_ms)

    def _local_rollback(self, place: int, said: operations.LocalRollback) -> None:
        self._describe(self._found(said.epoch), said.origin)
        self._drop(place, (said.epoch,), said.time_ms)

    def _rollback_by_hand(self, place: int, said: operations.HeuristicRollback) -> None:
        for transaction in self._known((said.epoch,)):
            transaction.place = place
            transaction.decided_ms = said.time_ms
            self.step(transaction, states.DROP_BY_HAND)
            self._ended(transaction, states.ROLLED_BACK)
            self._leave(transaction)
            self._let_go(transaction)

    def _forget(self, place: int, said: operations.Forget) -> None:
        for transaction in self._known((said.epoch,)):
            if transaction.state not in states.HEURISTIC:
                raise ValueError(f"transaction {said.epoch} is {transaction.state}: it cannot be forgotten")
            committed = transaction.state == states.HEURISTIC_COMMITTED
            self._remember(transaction, states.COMMITTED if committed else states.ROLLED_BACK)
            self.remove(transaction)

    def _epochs(self, place: int, said: operations.Epochs) -> None:
        self.epochs_end = max(self.epochs_end, said.end)
        for outcomes in (self.outcomes, self.local_outcomes):
            outcomes.key = outcomes.key or said.key
            outcomes.leased(said.end)

    def _group_commit(self, place: int, said: operations.GroupCommit) -> None:
        self.groups.committed(said.group, said.sequence, said.run, said.rows, said.time_ms)
        if said.members:
            self._decide_prepared(place, said.time_ms, said.members, states.DECIDE)
        self._drop(place, said.dropped, said.time_ms)

    def _group_abort(self, place: int, said: operations.GroupAbort) -> None:
        self._drop(place, said.dropped, said.time_ms)
        self.groups.aborted(said.group, said.sequence, said.run, self.time_ms)

    def _group_forget(self, place: int, said: operations.GroupForget) -> None:
        self.groups.forget(said.group)

    # What several rules share

    def _described(self, said: operations.Prepare | operations.LocalCommit) -> Transaction:
        """The transaction of which `said` tells everything."""
        transaction = self._found(said.epoch)
        self._describe(transaction, said.origin)
        transaction.topics = dict(said.topics)
        transaction.offsets = said.offsets
        self._complete(transaction, said.messages)
        return transaction

    def _describe(self, transaction: Transaction, origin: Origin) -> None:
        if transaction.origin is not origin:
            transaction.origin = origin
            self._name(transaction)

    def _name(self, transaction: Transaction) -> None:
        origin = transaction.origin
        if origin.xid:
            self.named[origin.xid] = transaction
        if origin.member is not None and transaction.decision is None and not transaction.settled:
            self.groups.join(transaction.epoch, origin.member)

    def _add(self, transaction: Transaction) -> Transaction:
        self.transactions[transaction.epoch] = transaction
        self.counts[transaction.state] += 1
        self.order.add(transaction.epoch)
        return transaction

    def _found(self, epoch: int) -> Transaction:
        """The transaction; made here if a start finds nothing of it before, maybe not even the lease of its epoch."""
        self.epochs_end = max(self.epochs_end, epoch + 1)
        return self.transactions.get(epoch) or self._add(Transaction(epoch, NOBODY))

    def _known(self, epochs: Iterable[int]) -> list[Transaction]:
        """Raises ValueError for one that is not there, unless a repair has lost something."""
        found = []
        for epoch in epochs:
            transaction = self.transactions.get(epoch)
            if transaction is not None:
                found.append(transaction)
            elif not self.repaired:
                raise ValueError(f"there is no transaction {epoch}")
        return found

    def _decide_prepared(self, place: int, time_ms: int, epochs: Iterable[int], event: str) -> None:
        transactions = tuple(self._known(epochs))
        if transactions:
            self._decide(Decision(place, time_ms, transactions), event)

    def _decide(self, decision: Decision, event: str) -> None:
        for transaction in decision.transactions:
            transaction.place = decision.place
            transaction.decision = decision
            transaction.decided_ms = decision.time_ms
            self.step(transaction, event)
            self._ended(transaction, states.COMMITTED)
            self._leave(transaction)
            if event == states.DECIDE:
                self._remember(transaction, states.COMMITTED)

    def _drop(self, place: int, epochs: Iterable[int], time_ms: int) -> None:
        for transaction in self._known(epochs):
            transaction.place = place
            transaction.decided_ms = time_ms
            self.step(transaction, states.DROP)
            self._ended(transaction, states.ROLLED_BACK)
            self._remember(transaction, states.ROLLED_BACK)
            self.remove(transaction)
            if transaction.prepared_ms and self.holds is not None:
                self.ending[transaction.epoch] = transaction

    def _ended(self, transaction: Transaction, state: str) -> None:
        """The stream that began it knows how far it is."""
        origin = transaction.origin
        if origin.producer_id:
            self.streams.ended(origin.producer_id, origin.number, transaction.epoch, state, self.time_ms)

    def _leave(self, transaction: Transaction) -> None:
        if transaction.origin.member is not None:
            self.groups.leave(transaction.epoch, transaction.origin.member)

    def _remember(self, transaction: Transaction, state: str) -> None:
        origin = transaction.origin
        if origin.xid:
            outcomes = self.local_outcomes if origin.local else self.outcomes
            outcomes.record(origin.xid, transaction.epoch, state, transaction.decided_ms)

    def _let_go(self, transaction: Transaction) -> None:
        """The journal need not keep its messages."""
        if transaction.settled:
            return
        transaction.settled = True
        self.kept.let_go(transaction)
        transaction.locations = Locations()
        if self.holds is not None:
            self.holds.release(transaction)

    def _moved(self, place: int, epoch: int, moved_from: int) -> Transaction | None:
        """The batch at `moved_from` is at `place` now, too; the transaction, None if it does not need it."""
        transaction = self.transactions.get(epoch)
        if transaction is None or transaction.decision is not None or transaction.settled:
            return None
        if not self._moves.move(transaction, place, moved_from):
            return None
        if self.holds is not None:
            self.holds.add(transaction, place)
        return transaction

    # What a repair lost

    def _complete(self, transaction: Transaction, messages: int) -> None:
        """A record names how many messages it had. Raises ValueError if they are not there, and nothing says why."""
        if missing := messages - transaction.messages:
            if missing < 0 or not self.repaired:
                has = f"transaction {transaction.epoch} has {transaction.messages} messages in the journal"
                raise ValueError(f"{has} and says that it has {messages}")
            self._lose(transaction, missing)

    def _lose(self, transaction: Transaction, missing: int) -> None:
        """Messages are lost that stood before the next ones: they keep their numbers."""
        transaction.locations.add(0, LOST, missing, 0)
        self.kept.add(0)
        transaction.messages += missing
        transaction.lost += missing

    def lose(self, places: Set[int]) -> None:
        """A repair gave up the batches at these places. Of what is decided they stay where they are: a partition may
        have them already, and one that has not is told when it reads them."""
        for transaction in self.transactions.values():
            if transaction.decision is not None or places.isdisjoint(transaction.places()):
                continue
            words = transaction.locations
            for at in range(0, len(words), WORDS):
                if words[at] in places:
                    count, size = words[at + 2] >> SIZE_BITS, words[at + 2] & SIZE_MASK
                    words[at : at + WORDS] = Locations((0, LOST, count << SIZE_BITS))
                    transaction.lost += count
                    transaction.size_bytes -= size
                    self.kept.lose(size)

    # journal.wal.store.JournalState

    def load(self, data: bytes) -> None:
        """Starts from what `dump` gave; b"" is the state of an empty journal. Raises ValueError, NewerFormat."""
        self.clear()
        for part in self._parts:
            part.clear()
        if not data:
            return
        head, transactions = snapshot.restore(data)
        self.time_ms, self.epochs_end = head.time_ms, head.epochs_end
        try:
            for part, fields in zip(self._parts, head.parts, strict=True):
                part.load(fields)
        except (TypeError, IndexError) as error:
            raise ValueError(f"{snapshot.NAME} does not decode: {error!r}") from error
        for transaction in transactions:
            self._restore(transaction)

    def _restore(self, transaction: Transaction) -> None:
        """One that a snapshot holds."""
        self._add(transaction)
        self._name(transaction)
        if not transaction.settled:
            self.kept.take(transaction)

    def dump(self) -> Callable[[], bytes]:
        """Captures the state in the owner's thread; what it answers packs it, in a worker maybe."""
        self._moves.share()
        head = snapshot.Head(self.time_ms, self.epochs_end, [part.dump() for part in self._parts])
        return snapshot.capture(head, self.transactions.values())

    def needed(self) -> Iterator[int]:
        """The places of what may go to a partition yet; what was never prepared is about to be dropped."""
        for transaction in self.transactions.values():
            if transaction.state != states.OPEN:
                yield from transaction.places()

    def held(self) -> Iterator[int]:
        """The places that are still needed."""
        for transaction in self.transactions.values():
            yield from transaction.places()

    def recovered(self, holds: Holds) -> list[Transaction]:
        """The end of a start: what was never prepared is rolled back. Answers those transactions."""
        self.holds = holds
        for transaction in self.transactions.values():
            holds.adopt(transaction)
        dropped = [each for each in self.transactions.values() if each.state == states.OPEN]
        for transaction in dropped:
            self.remove(transaction)
        return dropped


_RULES: Final[dict[type, Callable[[Ledger, int, Any], None]]] = {
    operations.Prepare: Ledger._prepare,
    operations.Commit: Ledger._commit,
    operations.Rollback: Ledger._rollback,
    operations.LocalCommit: Ledger._local_commit,
    operations.LocalRollback: Ledger._local_rollback,
    operations.HeuristicCommit: Ledger._commit_by_hand,
    operations.HeuristicRollback: Ledger._rollback_by_hand,
    operations.Forget: Ledger._forget,
    operations.Epochs: Ledger._epochs,
    operations.GroupCommit: Ledger._group_commit,
    operations.GroupAbort: Ledger._group_abort,
    operations.GroupForget: Ledger._group_forget,
}
