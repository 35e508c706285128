"""Which files of the journal transactions need: one hold for each transaction and file.

A hold for each batch would cost a large transaction as much at its end as it had batches. So a transaction keeps one
place in each file where it has batches; since places only grow, the file that is written tells a new one.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Container, Iterable, Iterator, Set
from typing import Any, Final, Protocol

from journal.wal.entry import AppendMsg, Entry, Filler
from journal.wal.store import JournalFileInfo
from tfmq.transaction import journal_records, snapshot, states
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import (
    ENTRY_BYTES,
    LOST,
    SIZE_BITS,
    SIZE_MASK,
    WORDS,
    Decision,
    Locations,
    Transaction,
)
from tfmq.transaction.outcomes import Outcome, Outcomes
from tfmq.transaction.producer_state import Streams


class Held(Protocol):
    """What of a `JournalStore` counts holds."""

    @property
    def files(self) -> list[JournalFileInfo]: ...
    def hold(self, place: int) -> None: ...
    def release(self, place: int) -> None: ...


class Holds:
    """See the module."""

    def __init__(self, journal: Held) -> None:
        self._journal = journal
        self._firsts: list[int] = []
        self._first = 0
        self.rolled()

    def rolled(self) -> None:
        """The journal may have other files now."""
        self._firsts = [file.first for file in self._journal.files]
        self._first = self._firsts[-1]

    def add(self, transaction: Transaction, place: int) -> None:
        """The transaction has a batch at `place`, in the file that is written."""
        files = transaction.files
        if not files or files[-1] < self._first:
            self._journal.hold(place)
            files.append(place)

    def adopt(self, transaction: Transaction) -> None:
        """After a start, which held every one of its places: one in each file is enough."""
        kept: dict[int, int] = {}
        for place in transaction.places():
            number = self._number(place)
            if kept.setdefault(number, place) != place:
                self._journal.release(place)
        transaction.files = [kept[number] for number in sorted(kept)]

    def release(self, transaction: Transaction) -> None:
        """The journal need not keep anything of it."""
        files, transaction.files = transaction.files, []
        for place in files:
            self._journal.release(place)

    def renew(self, transaction: Transaction) -> None:
        """Its locations have changed: holds what it needs now, and nothing else."""
        needed: dict[int, int] = {}
        for place in transaction.places():
            needed.setdefault(self._number(place), place)
        places = [needed[number] for number in sorted(needed)]
        for place in places:
            self._journal.hold(place)
        self.release(transaction)
        transaction.files = places

    def _number(self, place: int) -> int:
        return bisect_right(self._firsts, place)


# How much the journal keeps for transactions: of the messages, and of what each batch of them costs besides.


class Kept:
    """`size_bytes`: of all messages. `batches`: how many they came in; each has memory here, and in the journal a
    header.
    """

    __slots__ = ("batches", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = self.batches = 0

    @property
    def entries_bytes(self) -> int:
        """What lives in the journal's files: the messages with the headers of their entries."""
        return self.size_bytes + self.batches * ENTRY_BYTES

    def add(self, size_bytes: int) -> None:
        """A batch."""
        self.size_bytes += size_bytes
        self.batches += 1

    def take(self, transaction: Transaction) -> None:
        """All that a transaction of a snapshot has."""
        self.size_bytes += transaction.size_bytes
        self.batches += transaction.locations.rows

    def lose(self, size_bytes: int) -> None:
        """A batch of that size is lost; it still has its row."""
        self.size_bytes -= size_bytes

    def let_go(self, transaction: Transaction) -> None:
        """The same, before its locations are cleared."""
        self.size_bytes -= transaction.size_bytes
        self.batches -= transaction.locations.rows


NOBODY: Final = Origin("", True, 0, 0, 0)
"""Of a transaction of which a start has found messages only: it is dropped unless a record behind names it."""

EPOCH_FIRST: Final = 1


class Ledger:
    """What the entries of the transaction journal add up to: a pure fold, live as in recovery.

    The same entries in the same order give the same ledger, over a snapshot or not. Two things are no entries, because
    the journal and the partitions prove them without: that a transaction was begun (until its first record), and that
    all of a decision is on the disk (`settle`). So a start may find decisions again that were settled before; the
    partitions know that they have them.

    An entry that does not fit what came before is damage and raises ValueError, unless a repair has left a filler
    before it: then what was lost with the filler is left out, and counted.

    `outcomes` of transactions named by users, `local_outcomes` of those that the broker named.
    """

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
            self.enter(entry.place, journal_records.unpack(*content))

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

    def enter(self, place: int, operation: journal_records.Operation) -> None:
        """One operation is in the journal at `place`. Raises ValueError if it does not fit."""
        time_ms = max(self.time_ms, operation.time_ms)
        if time_ms != self.time_ms:
            self.time_ms = time_ms
            self.outcomes.expire(time_ms)
            self.local_outcomes.expire(time_ms)
            self.groups.expire(time_ms)
        self.streams.expire(time_ms)
        _RULES[type(operation)](self, place, operation)

    def _prepare(self, place: int, said: journal_records.Prepare) -> None:
        transaction = self._described(said)
        transaction.place = place
        transaction.prepared_ms = said.time_ms
        transaction.expires_ms = said.expires_ms
        self.step(transaction, states.PREPARE)
        self._ended(transaction, states.PREPARED)

    def _local_commit(self, place: int, said: journal_records.LocalCommit) -> None:
        self._decide(Decision(place, said.time_ms, (self._described(said),)), states.DECIDE)

    def _commit(self, place: int, said: journal_records.Commit) -> None:
        self._decide_prepared(place, said.time_ms, (said.epoch,), states.DECIDE)

    def _commit_by_hand(self, place: int, said: journal_records.HeuristicCommit) -> None:
        self._decide_prepared(place, said.time_ms, (said.epoch,), states.DECIDE_BY_HAND)

    def _rollback(self, place: int, said: journal_records.Rollback) -> None:
        self._drop(place, (said.epoch,), said.time_ms)

    def _local_rollback(self, place: int, said: journal_records.LocalRollback) -> None:
        self._describe(self._found(said.epoch), said.origin)
        self._drop(place, (said.epoch,), said.time_ms)

    def _rollback_by_hand(self, place: int, said: journal_records.HeuristicRollback) -> None:
        for transaction in self._known((said.epoch,)):
            transaction.place = place
            transaction.decided_ms = said.time_ms
            self.step(transaction, states.DROP_BY_HAND)
            self._ended(transaction, states.ROLLED_BACK)
            self._leave(transaction)
            self._let_go(transaction)

    def _forget(self, place: int, said: journal_records.Forget) -> None:
        for transaction in self._known((said.epoch,)):
            if transaction.state not in states.HEURISTIC:
                raise ValueError(f"transaction {said.epoch} is {transaction.state}: it cannot be forgotten")
            committed = transaction.state == states.HEURISTIC_COMMITTED
            self._remember(transaction, states.COMMITTED if committed else states.ROLLED_BACK)
            self.remove(transaction)

    def _epochs(self, place: int, said: journal_records.Epochs) -> None:
        self.epochs_end = max(self.epochs_end, said.end)
        for outcomes in (self.outcomes, self.local_outcomes):
            outcomes.key = outcomes.key or said.key
            outcomes.leased(said.end)

    def _group_commit(self, place: int, said: journal_records.GroupCommit) -> None:
        self.groups.committed(said.group, said.sequence, said.run, said.rows, said.time_ms)
        if said.members:
            self._decide_prepared(place, said.time_ms, said.members, states.DECIDE)
        self._drop(place, said.dropped, said.time_ms)

    def _group_abort(self, place: int, said: journal_records.GroupAbort) -> None:
        self._drop(place, said.dropped, said.time_ms)
        self.groups.aborted(said.group, said.sequence, said.run, self.time_ms)

    def _group_forget(self, place: int, said: journal_records.GroupForget) -> None:
        self.groups.forget(said.group)

    # What several rules share

    def _described(self, said: journal_records.Prepare | journal_records.LocalCommit) -> Transaction:
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
    journal_records.Prepare: Ledger._prepare,
    journal_records.Commit: Ledger._commit,
    journal_records.Rollback: Ledger._rollback,
    journal_records.LocalCommit: Ledger._local_commit,
    journal_records.LocalRollback: Ledger._local_rollback,
    journal_records.HeuristicCommit: Ledger._commit_by_hand,
    journal_records.HeuristicRollback: Ledger._rollback_by_hand,
    journal_records.Forget: Ledger._forget,
    journal_records.Epochs: Ledger._epochs,
    journal_records.GroupCommit: Ledger._group_commit,
    journal_records.GroupAbort: Ledger._group_abort,
    journal_records.GroupForget: Ledger._group_forget,
}


# Changes where a transaction's batches lie, when the journal has carried them forward.


class Moves:
    """Snapshots that are being packed share locations with the ledger: the first move of a transaction after each
    copies them.
    """

    def __init__(self) -> None:
        self._copied: set[int] = set()
        self._rows: tuple[int, dict[int, int]] = (0, {})
        """An epoch, and which of its batches lies at which place."""

    def share(self) -> None:
        """A snapshot has taken hold of all locations."""
        self._copied.clear()

    def move(self, transaction: Transaction, place: int, moved_from: int) -> bool:
        """The batch at `moved_from` lies at `place` now; False if it has none there."""
        row = self._row(transaction, moved_from)
        if row is None:
            return False
        if transaction.epoch not in self._copied:
            transaction.locations = Locations(transaction.locations)
            self._copied.add(transaction.epoch)
        transaction.locations[row * WORDS] = place
        self._rows[1][place] = row
        return True

    def _row(self, transaction: Transaction, place: int) -> int | None:
        """Which of its batches lies at `place`. Moves come transaction by transaction: one index is enough."""
        epoch, rows = self._rows
        if epoch != transaction.epoch or place not in rows:
            rows = {at: row for row, at in enumerate(transaction.locations[0::WORDS])}
            self._rows = (transaction.epoch, rows)
        return rows.get(place)


# Epochs by rising number, of which any page can be had without looking at those before it.
#
# Epochs come nearly in order and go in any: a list takes them, those that are gone stay in it until they are half of
# it. So adding and removing cost next to nothing, and a page a search and what lies in it.

SLACK: Final = 64
"""So many that are gone are not worth a round of clearing."""


class Order:
    """The epochs that `live` holds. The owner adds each once, and says when one is gone."""

    def __init__(self, live: Container[int]) -> None:
        self._live = live
        self._epochs: list[int] = []
        self._gone = 0

    def add(self, epoch: int) -> None:
        epochs = self._epochs
        if not epochs or epoch > epochs[-1]:
            epochs.append(epoch)
        else:
            insort(epochs, epoch)

    def gone(self) -> None:
        """One of them is in `live` no more."""
        self._gone += 1
        if self._gone > SLACK and 2 * self._gone > len(self._epochs):
            live = self._live
            self._epochs = [epoch for epoch in self._epochs if epoch in live]
            self._gone = 0

    def after(self, epoch: int) -> Iterator[int]:
        """Those above `epoch`. What is added or goes meanwhile may or may not be seen."""
        epochs = self._epochs
        for at in range(bisect_right(epochs, epoch), len(epochs)):
            if epochs[at] in self._live:
                yield epochs[at]
