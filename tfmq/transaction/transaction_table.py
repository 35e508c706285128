"""The table of live transactions, rebuilt by replaying the transaction journal.

`TransactionTable` applies journal entries in order, both live and in recovery. Its parts: references to
journal files that are still needed, the retained size, relocation of entries by compaction, and an index of
epochs for paging.
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
    """The methods of `JournalStore` that count file references."""

    @property
    def files(self) -> list[JournalFileInfo]: ...
    def hold(self, lsn: int) -> None: ...
    def release(self, lsn: int) -> None: ...


class Holds:
    """References of transactions to the journal files that contain their batches.

    A transaction has one reference per file, not per batch: otherwise the end of a large transaction would
    cost as much as it has batches. LSNs only increase, so a batch in the file being written is detected by
    comparing with that file's first LSN.
    """

    def __init__(self, journal: Held) -> None:
        self._journal = journal
        self._firsts: list[int] = []
        self._first = 0
        self.rolled()

    def rolled(self) -> None:
        """Read the list of journal files again after it changed."""
        self._firsts = [file.first for file in self._journal.files]
        self._first = self._firsts[-1]

    def add(self, transaction: Transaction, lsn: int) -> None:
        """Add a reference for a batch that was appended to the current file."""
        files = transaction.files
        if not files or files[-1] < self._first:
            self._journal.hold(lsn)
            files.append(lsn)

    def adopt(self, transaction: Transaction) -> None:
        """Reduce the references that recovery took for every batch to one per file."""
        kept: dict[int, int] = {}
        for lsn in transaction.places():
            number = self._number(lsn)
            if kept.setdefault(number, lsn) != lsn:
                self._journal.release(lsn)
        transaction.files = [kept[number] for number in sorted(kept)]

    def release(self, transaction: Transaction) -> None:
        """Release all references of a transaction."""
        files, transaction.files = transaction.files, []
        for lsn in files:
            self._journal.release(lsn)

    def renew(self, transaction: Transaction) -> None:
        """Replace the references of a transaction after its batch locations changed."""
        needed: dict[int, int] = {}
        for lsn in transaction.places():
            needed.setdefault(self._number(lsn), lsn)
        places = [needed[number] for number in sorted(needed)]
        for lsn in places:
            self._journal.hold(lsn)
        self.release(transaction)
        transaction.files = places

    def _number(self, lsn: int) -> int:
        return bisect_right(self._firsts, lsn)


class Kept:
    """Total size of messages and number of batches that the journal retains for transactions."""

    __slots__ = ("batches", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = self.batches = 0

    @property
    def entries_bytes(self) -> int:
        """Size in the journal files: the messages and the headers of their entries."""
        return self.size_bytes + self.batches * ENTRY_BYTES

    def add(self, size_bytes: int) -> None:
        """Count one batch."""
        self.size_bytes += size_bytes
        self.batches += 1

    def take(self, transaction: Transaction) -> None:
        """Count all batches of a transaction loaded from a snapshot."""
        self.size_bytes += transaction.size_bytes
        self.batches += transaction.locations.rows

    def lose(self, size_bytes: int) -> None:
        """A batch of that size is lost; it still has its row."""
        self.size_bytes -= size_bytes

    def let_go(self, transaction: Transaction) -> None:
        """Subtract all batches of a transaction; call it before its locations are cleared."""
        self.size_bytes -= transaction.size_bytes
        self.batches -= transaction.locations.rows


NOBODY: Final = Origin("", True, 0, 0, 0)
"""Origin of a transaction of which recovery has found only messages so far.

It is rolled back unless a later record names it.
"""

EPOCH_FIRST: Final = 1


class Ledger:
    """Live transactions, outcomes, producer states and commit groups, replayed from the journal.

    The same entries in the same order give the same table, with or without a snapshot. Two events have no
    journal entry, because the journal and the partitions prove them: the begin of a transaction (before its
    first record), and `complete`. Recovery may therefore find completed decisions again; the partitions
    detect that they have them.

    An entry that contradicts earlier entries is corruption and raises ValueError, unless a repair has left
    a filler before it: then whatever was lost with the filler is skipped and counted.

    `outcomes` has named transactions, `local_outcomes` those named by the broker.
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
        """Reset the transactions to the state before the first entry.

        Does not clear the other parts.
        """
        self.transactions: dict[int, Transaction] = {}
        self.named: dict[str, Transaction] = {}
        self.counts: dict[str, int] = dict.fromkeys(states.STATES, 0)
        self.order = Order(self.transactions)
        self.epochs_end = EPOCH_FIRST
        self.time_ms = 0
        """The latest time of any record.

        Expiry uses it instead of the clock, so that replay is deterministic.
        """
        self.kept = Kept()
        self.holds: Holds | None = None
        """None during recovery."""
        self.repaired = 0
        """Number of fillers seen; a repair writes them in place of lost entries."""
        self.ending: dict[int, Transaction] = {}
        """Prepared transactions whose rollback record may not be durable yet, in LSN order."""
        self._moves = Moves()

    # Changes without a journal entry

    def begin(self, epoch: int, origin: Origin) -> Transaction:
        """Create an open transaction."""
        transaction = self._add(Transaction(epoch, origin))
        if origin.producer_id:
            self.streams.begin(origin.producer_id, origin.number, epoch)
        self._name(transaction)
        return transaction

    def step(self, transaction: Transaction, event: str) -> None:
        """Move a transaction to the state that follows `event`.

        Raises: InvalidTransition.
        """
        state = states.step(transaction.state, event)
        self.counts[transaction.state] -= 1
        self.counts[state] += 1
        transaction.state = state

    def remove(self, transaction: Transaction) -> None:
        """Remove an ended transaction and release everything that it holds."""
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
        """Release the journal entries of a decision that is durable at all its targets.

        Removes its transactions, except heuristic ones, which stay until the forget record.
        """
        for transaction in decision.transactions:
            if transaction.state == states.HEURISTIC_COMMITTED:
                self._let_go(transaction)
            else:
                self.remove(transaction)

    def outcome(self, xid: str, epoch: int = 0) -> Outcome | None:
        """Return the outcome of `xid` at `epoch`, or its latest for epoch 0; None if not known."""
        return self.outcomes.find(xid, epoch) or self.local_outcomes.find(xid, epoch)

    # Replay of journal entries

    def apply(self, entry: Entry) -> None:
        """Apply one entry read back from the journal.

        Raises: ValueError.
        """
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

    def message(self, lsn: int, message: AppendMsg) -> Transaction | None:
        """Apply a batch at `lsn`. Return its transaction, None if that has ended."""
        epoch, log_id, producer_id, sequence, count, _, data, moved_from = message
        if moved_from:
            return self._moved(lsn, epoch, moved_from)
        missing = self.streams.sent(producer_id, epoch, sequence, count)
        if self.holds is not None and epoch not in self.transactions:
            return None
        transaction = self._found(epoch)
        if missing and self.repaired:
            self._lose(transaction, missing)
        size = len(data)
        transaction.locations.add(lsn, log_id, count, size)
        transaction.messages += count
        transaction.size_bytes += size
        self.kept.add(size)
        if self.holds is not None:
            self.holds.add(transaction, lsn)
        return transaction

    def enter(self, lsn: int, operation: journal_records.Operation) -> None:
        """Apply one operation at `lsn`.

        Raises: ValueError if it contradicts earlier entries.
        """
        time_ms = max(self.time_ms, operation.time_ms)
        if time_ms != self.time_ms:
            self.time_ms = time_ms
            self.outcomes.expire(time_ms)
            self.local_outcomes.expire(time_ms)
            self.groups.expire(time_ms)
        self.streams.expire(time_ms)
        _RULES[type(operation)](self, lsn, operation)

    def _prepare(self, lsn: int, record: journal_records.Prepare) -> None:
        transaction = self._described(record)
        transaction.place = lsn
        transaction.prepared_ms = record.time_ms
        transaction.expires_ms = record.expires_ms
        self.step(transaction, states.PREPARE)
        self._ended(transaction, states.PREPARED)

    def _local_commit(self, lsn: int, record: journal_records.LocalCommit) -> None:
        self._decide(Decision(lsn, record.time_ms, (self._described(record),)), states.DECIDE)

    def _commit(self, lsn: int, record: journal_records.Commit) -> None:
        self._decide_prepared(lsn, record.time_ms, (record.epoch,), states.DECIDE)

    def _commit_by_hand(self, lsn: int, record: journal_records.HeuristicCommit) -> None:
        self._decide_prepared(lsn, record.time_ms, (record.epoch,), states.DECIDE_BY_HAND)

    def _rollback(self, lsn: int, record: journal_records.Rollback) -> None:
        self._drop(lsn, (record.epoch,), record.time_ms)

    def _local_rollback(self, lsn: int, record: journal_records.LocalRollback) -> None:
        self._describe(self._found(record.epoch), record.origin)
        self._drop(lsn, (record.epoch,), record.time_ms)

    def _rollback_by_hand(self, lsn: int, record: journal_records.HeuristicRollback) -> None:
        for transaction in self._known((record.epoch,)):
            transaction.place = lsn
            transaction.decided_ms = record.time_ms
            self.step(transaction, states.DROP_BY_HAND)
            self._ended(transaction, states.ROLLED_BACK)
            self._leave(transaction)
            self._let_go(transaction)

    def _forget(self, lsn: int, record: journal_records.Forget) -> None:
        for transaction in self._known((record.epoch,)):
            if transaction.state not in states.HEURISTIC:
                raise ValueError(f"transaction {record.epoch} is {transaction.state}: it cannot be forgotten")
            committed = transaction.state == states.HEURISTIC_COMMITTED
            self._remember(transaction, states.COMMITTED if committed else states.ROLLED_BACK)
            self.remove(transaction)

    def _epochs(self, lsn: int, record: journal_records.Epochs) -> None:
        self.epochs_end = max(self.epochs_end, record.end)
        for outcomes in (self.outcomes, self.local_outcomes):
            outcomes.key = outcomes.key or record.key
            outcomes.leased(record.end)

    def _group_commit(self, lsn: int, record: journal_records.GroupCommit) -> None:
        self.groups.committed(record.group, record.sequence, record.run, record.rows, record.time_ms)
        if record.members:
            self._decide_prepared(lsn, record.time_ms, record.members, states.DECIDE)
        self._drop(lsn, record.dropped, record.time_ms)

    def _group_abort(self, lsn: int, record: journal_records.GroupAbort) -> None:
        self._drop(lsn, record.dropped, record.time_ms)
        self.groups.aborted(record.group, record.sequence, record.run, self.time_ms)

    def _group_forget(self, lsn: int, record: journal_records.GroupForget) -> None:
        self.groups.forget(record.group)

    # Shared by several operations

    def _described(self, record: journal_records.Prepare | journal_records.LocalCommit) -> Transaction:
        """Update the transaction from the fields of a prepare or local commit record."""
        transaction = self._found(record.epoch)
        self._describe(transaction, record.origin)
        transaction.topics = dict(record.topics)
        transaction.offsets = record.offsets
        self._complete(transaction, record.messages)
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
        """Return the transaction, created if recovery has found no earlier entry of it."""
        # Even the lease record of its epoch may be missing.
        self.epochs_end = max(self.epochs_end, epoch + 1)
        return self.transactions.get(epoch) or self._add(Transaction(epoch, NOBODY))

    def _known(self, epochs: Iterable[int]) -> list[Transaction]:
        """Return the transactions with these epochs, skipping missing ones if a repair lost entries.

        Raises: ValueError for a missing one without a repair.
        """
        found = []
        for epoch in epochs:
            transaction = self.transactions.get(epoch)
            if transaction is not None:
                found.append(transaction)
            elif not self.repaired:
                raise ValueError(f"there is no transaction {epoch}")
        return found

    def _decide_prepared(self, lsn: int, time_ms: int, epochs: Iterable[int], event: str) -> None:
        transactions = tuple(self._known(epochs))
        if transactions:
            self._decide(Decision(lsn, time_ms, transactions), event)

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

    def _drop(self, lsn: int, epochs: Iterable[int], time_ms: int) -> None:
        for transaction in self._known(epochs):
            transaction.place = lsn
            transaction.decided_ms = time_ms
            self.step(transaction, states.DROP)
            self._ended(transaction, states.ROLLED_BACK)
            self._remember(transaction, states.ROLLED_BACK)
            self.remove(transaction)
            if transaction.prepared_ms and self.holds is not None:
                self.ending[transaction.epoch] = transaction

    def _ended(self, transaction: Transaction, state: str) -> None:
        """Record in the producer's state what its request led to."""
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
        """Release the journal entries of the transaction's messages."""
        if transaction.settled:
            return
        transaction.settled = True
        self.kept.let_go(transaction)
        transaction.locations = Locations()
        if self.holds is not None:
            self.holds.release(transaction)

    def _moved(self, lsn: int, epoch: int, moved_from: int) -> Transaction | None:
        """Apply a relocated copy of a batch. Return the transaction, None if it no longer needs it."""
        transaction = self.transactions.get(epoch)
        if transaction is None or transaction.decision is not None or transaction.settled:
            return None
        if not self._moves.move(transaction, lsn, moved_from):
            return None
        if self.holds is not None:
            self.holds.add(transaction, lsn)
        return transaction

    # Entries lost in a repair

    def _complete(self, transaction: Transaction, messages: int) -> None:
        """Compare the message count with that of a record; missing messages are counted as lost.

        Raises: ValueError if the counts differ and no repair explains it.
        """
        if missing := messages - transaction.messages:
            if missing < 0 or not self.repaired:
                has = f"transaction {transaction.epoch} has {transaction.messages} messages in the journal"
                raise ValueError(f"{has} but its record states {messages}")
            self._lose(transaction, missing)

    def _lose(self, transaction: Transaction, missing: int) -> None:
        """Count messages lost before the next batch; they keep their ordinals."""
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
        """Restore the result of `dump`; b"" is the state of an empty journal.

        Raises: ValueError, NewerFormat.
        """
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
        """Add a transaction loaded from a snapshot."""
        self._add(transaction)
        self._name(transaction)
        if not transaction.settled:
            self.kept.take(transaction)

    def dump(self) -> Callable[[], bytes]:
        """Capture the state and return a function that encodes it.

        Call this in the owner's thread; the returned function may run in a worker.
        """
        self._moves.share()
        head = snapshot.Head(self.time_ms, self.epochs_end, [part.dump() for part in self._parts])
        return snapshot.capture(head, self.transactions.values())

    def needed(self) -> Iterator[int]:
        """The places of what may go to a partition yet; what was never prepared is about to be dropped."""
        for transaction in self.transactions.values():
            if transaction.state != states.OPEN:
                yield from transaction.places()

    def held(self) -> Iterator[int]:
        """Yield the LSNs that are still needed."""
        for transaction in self.transactions.values():
            yield from transaction.places()

    def recovered(self, holds: Holds) -> list[Transaction]:
        """Finish recovery: roll back the unprepared transactions and return them."""
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


class Moves:
    """Updates batch locations when compaction copies entries forward.

    A snapshot that is being encoded in a worker shares the location arrays, so the first relocation of a
    transaction after each snapshot copies its array.
    """

    def __init__(self) -> None:
        self._copied: set[int] = set()
        self._rows: tuple[int, dict[int, int]] = (0, {})
        """(epoch, LSN -> row of the batch) of the transaction relocated last."""

    def share(self) -> None:
        """Mark all location arrays as shared with a snapshot."""
        self._copied.clear()

    def move(self, transaction: Transaction, lsn: int, moved_from: int) -> bool:
        """Set the LSN of the batch at `moved_from` to `lsn`; False if there is no such batch."""
        row = self._row(transaction, moved_from)
        if row is None:
            return False
        if transaction.epoch not in self._copied:
            transaction.locations = Locations(transaction.locations)
            self._copied.add(transaction.epoch)
        transaction.locations[row * WORDS] = lsn
        self._rows[1][lsn] = row
        return True

    def _row(self, transaction: Transaction, lsn: int) -> int | None:
        """Return the row of the batch at `lsn`; None if there is none."""
        # Relocations are ordered by transaction, so an index of one transaction is enough.
        epoch, rows = self._rows
        if epoch != transaction.epoch or lsn not in rows:
            rows = {at: row for row, at in enumerate(transaction.locations[0::WORDS])}
            self._rows = (transaction.epoch, rows)
        return rows.get(lsn)


SLACK: Final = 64
"""Up to this many removed epochs the list is not compacted."""


class Order:
    """Sorted epochs of the live transactions, for paging from any epoch.

    Epochs are added nearly in order and removed in any order. Removed ones stay in the list until they are
    half of it, so adding and removing are cheap, and a page costs a binary search and its own length. The
    owner adds each epoch once and reports each removal.
    """

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
        """Count one epoch as removed from `transactions`; compact the list if half of it is removed."""
        self._gone += 1
        if self._gone > SLACK and 2 * self._gone > len(self._epochs):
            live = self._live
            self._epochs = [epoch for epoch in self._epochs if epoch in live]
            self._gone = 0

    def after(self, epoch: int) -> Iterator[int]:
        """Yield the epochs above `epoch`. Concurrent additions and removals may or may not be seen."""
        epochs = self._epochs
        for at in range(bisect_right(epochs, epoch), len(epochs)):
            if epochs[at] in self._live:
                yield epochs[at]
