"""The table of live transactions, rebuilt by replaying the transaction journal.

`TransactionTable` applies journal entries in order, in recovery and while the broker runs. `FileReferences` keeps the
journal files that transactions need, `EntryRelocations` updates the locations of batches that compaction has copied,
and `EpochIndex` sorts the epochs for lists in pages.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Container, Iterator, Set
from typing import Any, Final

from journal.wal.entry import AppendMsg, JournalEntry, LostEntries
from journal.wal.store import JournalStore
from tfmq.transaction import journal_records, snapshot, states
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import (
    ENTRY_BYTES,
    LOST_LOG_ID,
    SIZE_BITS,
    SIZE_MASK,
    WORDS_PER_BATCH,
    BatchLocations,
    Decision,
    Transaction,
)
from tfmq.transaction.outcomes import Outcome, Outcomes
from tfmq.transaction.producer_state import ProducerStates


class FileReferences:
    """The references of transactions to journal files: a file with a reference is not deleted.

    A transaction has one reference to each file with any of its batches, not one for each batch, so that the references
    are released fast. LSNs only increase, so a batch is in the last file if its LSN is not below that file's first LSN.
    """

    def __init__(self, journal: JournalStore) -> None:
        self._journal = journal
        self._first_lsns: list[int] = []
        self._current_first_lsn = 0
        self.refresh_files()

    def refresh_files(self) -> None:
        self._first_lsns = [file.first for file in self._journal.files]
        self._current_first_lsn = self._first_lsns[-1]

    def add_batch(self, transaction: Transaction, lsn: int) -> None:
        files = transaction.file_references
        if not files or files[-1] < self._current_first_lsn:
            self._journal.add_reference(lsn)
            files.append(lsn)

    def adopt_recovered(self, transaction: Transaction) -> None:
        """Keep one reference to each file of a recovered transaction; recovery has added one for each batch."""
        kept: dict[int, int] = {}
        for lsn in transaction.batch_lsns():
            number = self._file_index(lsn)
            if kept.setdefault(number, lsn) != lsn:
                self._journal.release_reference(lsn)
        transaction.file_references = [kept[number] for number in sorted(kept)]

    def release_all(self, transaction: Transaction) -> None:
        files, transaction.file_references = transaction.file_references, []
        for lsn in files:
            self._journal.release_reference(lsn)

    def rebuild(self, transaction: Transaction) -> None:
        """Compute the references of a transaction again, because compaction has copied its batches to other files."""
        needed: dict[int, int] = {}
        for lsn in transaction.batch_lsns():
            needed.setdefault(self._file_index(lsn), lsn)
        references = [needed[number] for number in sorted(needed)]
        for lsn in references:
            self._journal.add_reference(lsn)
        self.release_all(transaction)
        transaction.file_references = references

    def _file_index(self, lsn: int) -> int:
        return bisect_right(self._first_lsns, lsn)


UNKNOWN_ORIGIN: Final = Origin("", True, 0, 0, 0)
"""Origin of a transaction of which recovery has read only batches so far; its first record has the true origin."""

EPOCH_FIRST: Final = 1


class TransactionTable:
    """Live transactions, outcomes, producer states and commit groups, replayed from the journal.

    The same entries in the same order result in the same table, also if recovery begins with a snapshot. `add_open` and
    `complete` have no journal entry. So recovery also restores decisions (commits) that were complete before the stop;
    the source positions of the targets show that these are applied. An entry that contradicts earlier entries raises
    ValueError. After a filler, which a repair writes in place of lost entries, missing messages are counted as lost
    instead, and missing transactions are ignored.

    `outcomes`: how transactions with a name given by a client have ended; `local_outcomes`: the same for local ones.
    """

    def __init__(
        self,
        *,
        outcomes: Outcomes,
        local_outcomes: Outcomes,
        producer_states: ProducerStates,
        commit_groups: CommitGroups,
    ) -> None:
        self.outcomes = outcomes
        self.local_outcomes = local_outcomes
        self.producer_states = producer_states
        self.commit_groups = commit_groups
        self._parts: tuple[Any, ...] = (producer_states, commit_groups, outcomes, local_outcomes)
        self.clear()

    def clear(self) -> None:
        """Remove all transactions, as before the first entry. Outcomes, producer states and groups are not changed."""
        self.transactions: dict[int, Transaction] = {}
        self.by_xid: dict[str, Transaction] = {}
        self.state_counts: dict[str, int] = dict.fromkeys(states.STATES, 0)
        self.epoch_index = EpochIndex(self.transactions)
        self.epochs_end = EPOCH_FIRST
        self.latest_ms = 0
        """The latest time in any record. State expires by this time, not by a clock, so replay is deterministic."""
        self.retained_bytes = self.retained_batches = 0
        """Bytes of messages, and number of batches, that the journal must retain for transactions."""
        self.file_references: FileReferences | None = None
        """The file references of the transactions; None during recovery."""
        self.fillers_seen = 0
        """Number of fillers replayed. A repair writes a filler in place of lost entries."""
        self.pending_rollbacks: dict[int, Transaction] = {}
        """Rolled back prepared transactions whose rollback record may not be durable yet, in the order of LSNs."""
        self._relocations = EntryRelocations()
        self._gaps_before: dict[int, int] = {}
        """During recovery after a repair: epoch -> messages of the same producer that are missing before the first
        batch. Only the transaction's record says how many of them were its own."""

    @property
    def retained_journal_bytes(self) -> int:
        """Size in the journal files of the retained batches: the messages and the headers of their entries."""
        return self.retained_bytes + self.retained_batches * ENTRY_BYTES

    # Changes without a journal entry

    def add_open(self, epoch: int, origin: Origin) -> Transaction:
        transaction = self._add(Transaction(epoch, origin))
        if origin.producer_id:
            self.producer_states.add_begun(origin.producer_id, origin.number, epoch)
        self._index_origin(transaction)
        return transaction

    def change_state(self, transaction: Transaction, event: str) -> None:
        """Move a transaction to the state that follows `event`. Raises InvalidTransition if there is no such state."""
        state = states.next_state(transaction.state, event)
        self.state_counts[transaction.state] -= 1
        self.state_counts[state] += 1
        transaction.state = state

    def remove(self, transaction: Transaction) -> None:
        """Remove a transaction that has ended from the table and its commit group, and release its journal entries."""
        if self.transactions.pop(transaction.epoch, None) is None:
            return
        self.state_counts[transaction.state] -= 1
        self.epoch_index.count_removed()
        origin = transaction.origin
        if origin.xid and self.by_xid.get(origin.xid) is transaction:
            del self.by_xid[origin.xid]
        self._leave_commit_group(transaction)
        if origin.producer_id:
            self.producer_states.discard_begun(origin.producer_id, origin.number)
        self._release_entries(transaction)

    def complete(self, decision: Decision) -> None:
        """Release the journal entries of a durably applied decision; remove its transactions, except heuristic ones."""
        for transaction in decision.transactions:
            if transaction.state == states.HEURISTIC_COMMITTED:
                self._release_entries(transaction)
            else:
                self.remove(transaction)

    def find_outcome(self, xid: str, epoch: int = 0) -> Outcome | None:
        """Return the outcome of the transaction `xid` with this epoch (0: the latest one); None if it is not stored."""
        return self.outcomes.find(xid, epoch) or self.local_outcomes.find(xid, epoch)

    # Replay of journal entries

    def apply(self, entry: JournalEntry) -> None:
        """Apply one entry that recovery has read from the journal. Raises ValueError if it contradicts earlier ones."""
        content = entry.content
        if isinstance(content, AppendMsg):
            self.apply_batch(entry.lsn, content)
        elif isinstance(content, LostEntries):
            self.fillers_seen += 1
            self.producer_states.entries_lost = True
            self.outcomes.mark_entries_lost()
            self.local_outcomes.mark_entries_lost()
        else:
            self.apply_operation(entry.lsn, journal_records.unpack(*content))

    def apply_batch(self, lsn: int, message: AppendMsg) -> None:
        epoch, log_id, producer_id, sequence, count, _, data, moved_from = message
        if moved_from:
            # This entry is a copy that compaction has made of the entry at the LSN `moved_from`.
            found = self.transactions.get(epoch)
            if found is None or found.decision is not None or found.obsolete:
                return
            if self._relocations.relocate(found, lsn, moved_from) and self.file_references is not None:
                self.file_references.add_batch(found, lsn)
            return
        gap = self.producer_states.apply_batch(producer_id, epoch, sequence, count)
        if self.file_references is not None and epoch not in self.transactions:
            return
        transaction = self._get_or_add(epoch)
        if gap.messages and self.fillers_seen:
            if gap.is_inside:
                self._add_lost_messages(transaction, gap.messages)
            elif self.file_references is None:
                self._gaps_before.setdefault(epoch, gap.messages)
        size = len(data)
        transaction.locations.add_batch(lsn, log_id, count, size)
        transaction.messages += count
        transaction.size_bytes += size
        self.retained_bytes += size
        self.retained_batches += 1
        if self.file_references is not None:
            self.file_references.add_batch(transaction, lsn)

    def apply_operation(self, lsn: int, operation: journal_records.Operation) -> None:
        """Apply an operation whose entry is at `lsn`. Raises ValueError if it contradicts earlier entries."""
        time_ms = max(self.latest_ms, operation.time_ms)
        if time_ms != self.latest_ms:
            self.latest_ms = time_ms
            self.outcomes.expire(time_ms)
            self.local_outcomes.expire(time_ms)
            self.commit_groups.expire(time_ms)
        self.producer_states.expire(time_ms)
        match operation:
            case journal_records.PrepareRecord() as record:
                transaction = self._update_from_record(record)
                transaction.lsn = lsn
                transaction.prepared_ms = record.time_ms
                transaction.expires_ms = record.expires_ms
                self.change_state(transaction, states.PREPARE)
                self._record_producer_outcome(transaction, states.PREPARED)
            case journal_records.LocalCommitRecord() as record:
                self._apply_commit(lsn, record.time_ms, [self._update_from_record(record)], states.COMMIT)
            case journal_records.CommitRecord(epoch, time_ms):
                self._apply_commit(lsn, time_ms, self._existing(epoch), states.COMMIT)
            case journal_records.HeuristicCommitRecord(epoch, time_ms):
                self._apply_commit(lsn, time_ms, self._existing(epoch), states.HEURISTIC_COMMIT)
            case journal_records.RollbackRecord(epoch, time_ms):
                self._roll_back(lsn, time_ms, self._existing(epoch))
            case journal_records.LocalRollbackRecord(epoch, time_ms, origin):
                transaction = self._get_or_add(epoch)
                self._set_origin(transaction, origin)
                self._roll_back(lsn, time_ms, [transaction])
            case journal_records.HeuristicRollbackRecord(epoch, time_ms):
                for transaction in self._existing(epoch):
                    transaction.lsn = lsn
                    transaction.decided_ms = time_ms
                    self.change_state(transaction, states.HEURISTIC_ROLLBACK)
                    self._record_producer_outcome(transaction, states.ROLLED_BACK)
                    self._leave_commit_group(transaction)
                    self._release_entries(transaction)
            case journal_records.ForgetRecord(epoch):
                for transaction in self._existing(epoch):
                    self._forget(transaction)
            case journal_records.EpochLeaseRecord() as record:
                self.epochs_end = max(self.epochs_end, record.end)
                for outcomes in (self.outcomes, self.local_outcomes):
                    outcomes.key = outcomes.key or record.key
                    outcomes.mark_epochs_leased(record.end)
            case journal_records.GroupCommitRecord(group, sequence, run, rows, members, dropped, time_ms):
                self.commit_groups.apply_commit(group, sequence, run, rows, time_ms)
                self._apply_commit(lsn, time_ms, self._existing(*members), states.COMMIT)
                self._roll_back(lsn, time_ms, self._existing(*dropped))
            case journal_records.GroupAbortRecord(group, sequence, run, dropped, time_ms):
                self._roll_back(lsn, time_ms, self._existing(*dropped))
                self.commit_groups.apply_abort(group, sequence, run, self.latest_ms)
            case journal_records.GroupForgetRecord(group):
                self.commit_groups.forget_group(group)

    def _forget(self, transaction: Transaction) -> None:
        if transaction.state not in states.HEURISTIC_STATES:
            raise ValueError(f"transaction {transaction.epoch} is {transaction.state}: it cannot be forgotten")
        committed = transaction.state == states.HEURISTIC_COMMITTED
        self._record_outcome(transaction, states.COMMITTED if committed else states.ROLLED_BACK)
        self.remove(transaction)

    # Shared by several operations

    def _update_from_record(
        self, record: journal_records.PrepareRecord | journal_records.LocalCommitRecord
    ) -> Transaction:
        transaction = self._get_or_add(record.epoch)
        self._set_origin(transaction, record.origin)
        transaction.topics = dict(record.topics)
        transaction.offsets = record.offsets
        self._check_message_count(transaction, record.messages)
        return transaction

    def _set_origin(self, transaction: Transaction, origin: Origin) -> None:
        if transaction.origin is not origin:
            transaction.origin = origin
            self._index_origin(transaction)

    def _index_origin(self, transaction: Transaction) -> None:
        origin = transaction.origin
        if origin.xid:
            self.by_xid[origin.xid] = transaction
        if origin.member is not None and transaction.decision is None and not transaction.obsolete:
            self.commit_groups.add_member(transaction.epoch, origin.member)

    def _add(self, transaction: Transaction) -> Transaction:
        self.transactions[transaction.epoch] = transaction
        self.state_counts[transaction.state] += 1
        self.epoch_index.add_epoch(transaction.epoch)
        return transaction

    def _get_or_add(self, epoch: int) -> Transaction:
        """Return the transaction; create it if recovery has found no earlier entry of it."""
        # After a repair even the record that leased this epoch may be missing.
        self.epochs_end = max(self.epochs_end, epoch + 1)
        return self.transactions.get(epoch) or self._add(Transaction(epoch, UNKNOWN_ORIGIN))

    def _existing(self, *epochs: int) -> list[Transaction]:
        """Return the transactions with these epochs. If one is missing, raises ValueError; after a repair, omits it."""
        found = []
        for epoch in epochs:
            transaction = self.transactions.get(epoch)
            if transaction is not None:
                found.append(transaction)
            elif not self.fillers_seen:
                raise ValueError(f"there is no transaction {epoch}")
        return found

    def _apply_commit(self, lsn: int, time_ms: int, transactions: list[Transaction], event: str) -> None:
        decision = Decision(lsn, time_ms, tuple(transactions))
        for transaction in transactions:
            transaction.lsn = lsn
            transaction.decision = decision
            transaction.decided_ms = time_ms
            self.change_state(transaction, event)
            self._record_producer_outcome(transaction, states.COMMITTED)
            self._leave_commit_group(transaction)
            if event == states.COMMIT:
                self._record_outcome(transaction, states.COMMITTED)

    def _roll_back(self, lsn: int, time_ms: int, transactions: list[Transaction]) -> None:
        for transaction in transactions:
            transaction.lsn = lsn
            transaction.decided_ms = time_ms
            self.change_state(transaction, states.ROLLBACK)
            self._record_producer_outcome(transaction, states.ROLLED_BACK)
            self._record_outcome(transaction, states.ROLLED_BACK)
            self.remove(transaction)
            if transaction.prepared_ms and self.file_references is not None:
                self.pending_rollbacks[transaction.epoch] = transaction

    def _record_producer_outcome(self, transaction: Transaction, state: states.State) -> None:
        origin = transaction.origin
        if origin.producer_id:
            self.producer_states.apply_outcome(
                origin.producer_id, origin.number, transaction.epoch, state, self.latest_ms
            )

    def _leave_commit_group(self, transaction: Transaction) -> None:
        if transaction.origin.member is not None:
            self.commit_groups.remove_member(transaction.epoch, transaction.origin.member)

    def _record_outcome(self, transaction: Transaction, state: states.State) -> None:
        origin = transaction.origin
        if origin.xid:
            outcomes = self.local_outcomes if origin.local else self.outcomes
            outcomes.add_outcome(origin.xid, transaction.epoch, state, transaction.decided_ms)

    def _release_entries(self, transaction: Transaction) -> None:
        if transaction.obsolete:
            return
        transaction.obsolete = True
        self.retained_bytes -= transaction.size_bytes
        self.retained_batches -= transaction.locations.batch_count
        transaction.locations = BatchLocations()
        if self.file_references is not None:
            self.file_references.release_all(transaction)

    # Entries lost in a repair

    def _check_message_count(self, transaction: Transaction, messages: int) -> None:
        """Count as lost the messages that are in the record's count `messages`, but not in the journal.

        Raises ValueError if messages are missing although no repair has removed entries, or if there are too many.
        """
        if missing := messages - transaction.messages:
            if missing < 0 or not self.fillers_seen:
                has = f"transaction {transaction.epoch} has {transaction.messages} messages in the journal"
                raise ValueError(f"{has} but its record states {messages}")
            # As many as can have been before the first batch in the journal were there, the others after the last one.
            first = min(missing, self._gaps_before.get(transaction.epoch, 0))
            if first:
                self._add_lost_messages(transaction, first, is_first=True)
            if first < missing:
                self._add_lost_messages(transaction, missing - first)

    def _add_lost_messages(self, transaction: Transaction, missing: int, *, is_first: bool = False) -> None:
        """Count messages lost before the next batch, or before the first one. They get ordinals, so that later messages
        keep their ordinals."""
        at = 0 if is_first else len(transaction.locations)
        transaction.locations[at:at] = BatchLocations((0, LOST_LOG_ID, missing << SIZE_BITS))
        if is_first:
            self._relocations.forget_rows()
        self.retained_batches += 1
        transaction.messages += missing
        transaction.lost_messages += missing

    def lose(self, lsns: Set[int]) -> None:
        """Count as lost the messages of the batches at `lsns`, because a repair could not restore them.

        Batches of committed transactions are not counted here, because their partition may have the messages already.
        If the partition lacks the messages, the applier finds the loss when it reads the batches.
        """
        for transaction in self.transactions.values():
            if transaction.decision is not None or lsns.isdisjoint(transaction.batch_lsns()):
                continue
            words = transaction.locations
            for at in range(0, len(words), WORDS_PER_BATCH):
                if words[at] in lsns:
                    count, size = words[at + 2] >> SIZE_BITS, words[at + 2] & SIZE_MASK
                    words[at : at + WORDS_PER_BATCH] = BatchLocations((0, LOST_LOG_ID, count << SIZE_BITS))
                    transaction.lost_messages += count
                    transaction.size_bytes -= size
                    self.retained_bytes -= size

    # The interface journal.wal.store.JournalState

    def load(self, data: bytes) -> None:
        """Restore the encoded result of `dump` (b"": empty). Raises ValueError if malformed, NewerFormat if too new."""
        self.clear()
        for part in self._parts:
            part.clear()
        if not data:
            return
        head, transactions = snapshot.decode(data)
        self.latest_ms, self.epochs_end = head.time_ms, head.epochs_end
        try:
            for part, fields in zip(self._parts, head.parts, strict=True):
                part.load(fields)
        except (TypeError, IndexError) as error:
            raise ValueError(f"{snapshot.NAME} does not decode: {error!r}") from error
        for transaction in transactions:
            self._add(transaction)
            self._index_origin(transaction)
            if not transaction.obsolete:
                self.retained_bytes += transaction.size_bytes
                self.retained_batches += transaction.locations.batch_count

    def dump(self) -> Callable[[], bytes]:
        """Capture the present state; return a function that encodes this state and may run in a worker."""
        self._relocations.mark_shared()
        head = snapshot.SnapshotHead(self.latest_ms, self.epochs_end, [part.dump() for part in self._parts])
        return snapshot.capture(head, self.transactions.values())

    def needed(self) -> Iterator[int]:
        """Yield the LSNs of the batches that may still be applied: those of all transactions that are not open."""
        for transaction in self.transactions.values():
            if transaction.state != states.OPEN:
                yield from transaction.batch_lsns()

    def held(self) -> Iterator[int]:
        """Yield the LSNs of all batches of live transactions, whose files must not be deleted."""
        for transaction in self.transactions.values():
            yield from transaction.batch_lsns()

    def finish_recovery(self, file_references: FileReferences) -> list[Transaction]:
        """Finish recovery: remove the unprepared transactions, which count as rolled back, and return them."""
        self.file_references = file_references
        self._gaps_before.clear()
        for transaction in self.transactions.values():
            file_references.adopt_recovered(transaction)
        dropped = [each for each in self.transactions.values() if each.state == states.OPEN]
        for transaction in dropped:
            self.remove(transaction)
        return dropped


class EntryRelocations:
    """Updates the locations of batches that compaction has copied to the end of the journal.

    A worker that encodes a snapshot reads the same arrays of locations. So the first change of an array after the
    capture of a snapshot is made in a copy of the array.
    """

    def __init__(self) -> None:
        self._copied: set[int] = set()
        self._row_index: tuple[int, dict[int, int]] = (0, {})
        """(epoch, LSN -> row of the batch in the locations) of the transaction whose batch was copied last."""

    def mark_shared(self) -> None:
        self._copied.clear()

    def forget_rows(self) -> None:
        """The batches of a transaction have got other rows."""
        self._row_index = (0, {})

    def relocate(self, transaction: Transaction, lsn: int, moved_from: int) -> bool:
        """Change the LSN of the batch at `moved_from` to `lsn`; return False if there is no such batch."""
        # Compaction copies one transaction completely before the next one, so the index of one transaction is enough.
        epoch, rows = self._row_index
        if epoch != transaction.epoch or moved_from not in rows:
            rows = {at: row for row, at in enumerate(transaction.locations[0::WORDS_PER_BATCH])}
            self._row_index = (transaction.epoch, rows)
        row = rows.get(moved_from)
        if row is None:
            return False
        if transaction.epoch not in self._copied:
            transaction.locations = BatchLocations(transaction.locations)
            self._copied.add(transaction.epoch)
        transaction.locations[row * WORDS_PER_BATCH] = lsn
        rows[lsn] = row
        return True


REMOVED_EPOCHS_MIN: Final = 64


class EpochIndex:
    """The sorted epochs of the live transactions, so that a list can begin at any epoch.

    Removed epochs stay in the list until they are half of the list, so that a removal takes little time.
    """

    def __init__(self, transactions: Container[int]) -> None:
        self._transactions = transactions
        self._epochs: list[int] = []
        self._removed = 0

    def add_epoch(self, epoch: int) -> None:
        epochs = self._epochs
        if not epochs or epoch > epochs[-1]:
            epochs.append(epoch)
        else:
            insort(epochs, epoch)

    def count_removed(self) -> None:
        self._removed += 1
        if self._removed > REMOVED_EPOCHS_MIN and 2 * self._removed > len(self._epochs):
            live = self._transactions
            self._epochs = [epoch for epoch in self._epochs if epoch in live]
            self._removed = 0

    def epochs_after(self, epoch: int) -> Iterator[int]:
        """Yield the epochs above `epoch`. Transactions that are added or removed meanwhile may be included or not."""
        epochs = self._epochs
        for at in range(bisect_right(epochs, epoch), len(epochs)):
            if epochs[at] in self._transactions:
                yield epochs[at]
