"""One hold for each transaction and file: as few calls as files, and never one too few."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import NewerFormat
from journal.wal.entry import FORGET, KIND_FILLER, AppendMsg, JournalEntry, LostEntries, Operation
from journal.wal.store import JournalFileInfo
from tests.scale import scaled
from tests.transaction.stores import BILLS, DAY_MS, ORDERS, Store, decided, entry_of, picture, piece
from tfmq.apply_target import GroupPositions
from tfmq.transaction import journal_records, snapshot, states
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import ENTRY_BYTES, WORDS_PER_BATCH, BatchLocations, Transaction
from tfmq.transaction.outcomes import Outcomes
from tfmq.transaction.producer_state import ProducerStates
from tfmq.transaction.requests import CommitGroupMember
from tfmq.transaction.transaction_table import (
    REMOVED_EPOCHS_MIN,
    EntryRelocations,
    EpochIndex,
    FileReferences,
    TransactionTable,
)

ORIGIN = Origin("x", False, 1, 1, 0)


class Journal:
    """Files of 100 bytes; counts holds, and refuses to give back what was not taken."""

    def __init__(self) -> None:
        self.firsts = [0]
        self.held: Counter[int] = Counter()
        self.calls = 0

    @property
    def files(self) -> list[JournalFileInfo]:
        return [JournalFileInfo(n, first, 100, self.held[n]) for n, first in enumerate(self.firsts)]

    def number(self, place: int) -> int:
        return bisect_right(self.firsts, place) - 1

    def add_reference(self, place: int) -> None:
        self.calls += 1
        self.held[self.number(place)] += 1

    def release_reference(self, place: int) -> None:
        number = self.number(place)
        assert self.held[number] > 0, f"file {number} is not held"
        self.held[number] -= 1


def needed(journal: Journal, transactions: list[Transaction]) -> dict[int, int]:
    """What should be held: each file once for each transaction that has something in it."""
    found: Counter[int] = Counter()
    for each in transactions:
        found.update({journal.number(place) for place in each.batch_lsns()})
    return dict(found)


@given(st.integers(0, 1 << 32))
def test_every_file_is_held_once_for_each_transaction_in_it(seed: int) -> None:
    generator = random.Random(seed)
    journal = Journal()
    holds = FileReferences(journal)
    live = [Transaction(epoch, ORIGIN) for epoch in range(5)]
    place = 0
    for _ in range(generator.randrange(80)):
        place += generator.randrange(1, 40)
        if place >= journal.firsts[-1] + 100:
            journal.firsts.append(place)
            holds.refresh_files()
        if not live:
            break
        transaction = generator.choice(live)
        if generator.random() < 0.05:
            holds.release_all(transaction)
            live.remove(transaction)
        elif generator.random() < 0.1 and transaction.locations:
            row = generator.randrange(transaction.locations.batch_count)
            transaction.locations[row * WORDS_PER_BATCH] = place
            holds.add_batch(transaction, place)
            holds.rebuild(transaction)
        else:
            transaction.locations.add_batch(place, ORDERS, 1, 10)
            holds.add_batch(transaction, place)
        assert {n: c for n, c in journal.held.items() if c} == needed(journal, live), f"seed {seed}"
    again = Journal()
    again.firsts = journal.firsts
    for each in live:
        each.file_references = []
        for at in each.batch_lsns():
            again.add_reference(at)
    after = FileReferences(again)
    for each in live:
        after.adopt_recovered(each)
    assert {n: c for n, c in again.held.items() if c} == needed(again, live), f"seed {seed}: after a start"
    for each in live:
        after.release_all(each)
        after.release_all(each)
    assert not any(again.held.values())


def test_a_transaction_of_many_batches_takes_few_calls() -> None:
    journal = Journal()
    holds = FileReferences(journal)
    transaction = Transaction(1, ORIGIN)
    for place in range(90):
        transaction.locations.add_batch(place, ORDERS, 1, 1)
        holds.add_batch(transaction, place)
    assert journal.calls == 1


def test_the_journal_counts_what_the_transactions_need() -> None:
    store = Store(journal_file_bytes=4096)
    made = [store.prepared(f"x{n}", [bytes(600)]) for n in range(20)]
    long = store.begin("long")
    for _ in range(20):
        store.send(long, [bytes(600)])
    files = store.journal.files
    assert len(files) > 4
    for life in (store, store.killed()):
        held = sum(file.references for file in life.journal.files)
        assert held == sum(len(each.file_references) for each in life.store.transactions.values())
        for each in life.store.transactions.values():
            assert len(each.file_references) == len(
                {bisect_right([file.first for file in files], place) for place in each.batch_lsns()}
            )
    for each in made:
        store.rollback(each)
    store.rollback(long)
    assert not any(file.references for file in store.journal.files)


# The fold: the same entries give the same ledger, over any snapshot, in any number of lives.
#
# What must hold, for any sequence of steps (a failure prints the seed of the steps):
#
#  1. a snapshot taken anywhere, packed later, and the entries after it give what all entries give;
#  2. both give what the live ledger has;
#  3. packing a snapshot after the ledger went on changes nothing in it.


def make_ledger() -> TransactionTable:
    """Small memories, so that expiry and limits are part of every run."""
    return TransactionTable(
        outcomes=Outcomes(outcomes_max=40, retention_ms=DAY_MS),
        local_outcomes=Outcomes(outcomes_max=20, retention_ms=DAY_MS // 24),
        producer_states=ProducerStates(producers_max=12, idle_ms=DAY_MS, lease_time=lambda _: 1 << 60),
        commit_groups=CommitGroups(groups_max=3, fences_max=100),
    )


class Life:
    """A live ledger that keeps its entries as the journal would give them back, and takes snapshots on the way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = make_ledger()
        self.ledger.load(b"")
        self.ledger.finish_recovery(NoHolds())
        self.entries: list[JournalEntry] = []
        self.place = 100
        self.epoch = 0
        self.time_ms = 1_000_000_000_000
        self.sequences: dict[int, int] = {}
        self.producer = 1000
        self.sequence = {"g": 0, "h": 0}
        self.snapshots: list[tuple[int, Callable[[], bytes]]] = []
        self.settled_at: dict[int, int] = {}
        self.enter(journal_records.EpochLeaseRecord(1 << 20, self.time_ms, b"k" * 16))

    def enter(self, operation: journal_records.Operation) -> None:
        self.append(operation, Operation(*journal_records.pack(operation)))

    def append(self, said: Any, content: AppendMsg | Operation) -> None:
        self.place += self.random.randrange(1, 200)
        self.entries.append(entry_of(self.place, content))
        if isinstance(said, AppendMsg):
            self.ledger.apply_batch(self.place, said)
        else:
            self.ledger.apply_operation(self.place, said)

    # Steps

    def step(self) -> None:
        self.time_ms += self.random.choice((0, 1, 1000, 3_600_000))
        name = self.random.choice(STEPS)
        getattr(self, name)()

    def some(self, *wanted: str) -> Transaction | None:
        found = [each for each in self.ledger.transactions.values() if each.state in wanted]
        return self.random.choice(found) if found else None

    def begin(self, member: CommitGroupMember | None = None) -> Transaction:
        self.epoch += 1
        live = self.ledger.by_xid
        xid = self.random.choice([x for x in ("a", "b", "c", "", "", f"n{self.epoch}") if x not in live])
        if member is not None:
            xid = f"m{self.epoch}"
        self.producer += self.random.random() < 0.5
        number = self.random.randrange(1 << 20) + self.epoch
        local = not xid or self.random.random() < 0.2
        origin = Origin(xid, local, self.producer, number, self.time_ms, "", "me", member)
        return self.ledger.add_open(self.epoch, origin)

    def send(self, transaction: Transaction | None = None) -> None:
        transaction = transaction or self.some(states.OPEN)
        if transaction is None:
            return
        producer_id = transaction.origin.producer_id
        count = self.random.randrange(1, 5)
        sequence = self.sequences.get(producer_id, 0)
        self.sequences[producer_id] = sequence + count
        found = piece(producer_id, sequence, [b"."] * count, self.random.choice((ORDERS, BILLS)))
        message = AppendMsg(transaction.epoch, found.log_id, *found[2:])
        self.append(message, message)
        transaction.topics[found.log_id] = found.topic

    def prepare(self, transaction: Transaction | None = None) -> Transaction | None:
        transaction = transaction or self.some(states.OPEN)
        if transaction is not None:
            topics = tuple(transaction.topics.items())
            offsets = (GroupPositions("readers", 3, ((50, 0, 17, 0, 1),)),) * self.random.randrange(2)
            said = journal_records.PrepareRecord(
                transaction.epoch,
                self.time_ms,
                transaction.origin,
                topics,
                offsets,
                transaction.messages,
                self.random.choice((0, self.time_ms + 5)),
            )
            self.enter(said)
        return transaction

    def commit(self) -> None:
        if (transaction := self.some(states.PREPARED)) is not None:
            self.enter(journal_records.CommitRecord(transaction.epoch, self.time_ms))

    def rollback(self) -> None:
        if (transaction := self.some(states.PREPARED)) is not None:
            self.enter(journal_records.RollbackRecord(transaction.epoch, self.time_ms))

    def whole(self) -> None:
        transaction = self.begin()
        for _ in range(self.random.randrange(3)):
            self.send(transaction)
        topics = tuple(transaction.topics.items())
        self.enter(
            journal_records.LocalCommitRecord(
                transaction.epoch, self.time_ms, transaction.origin, topics, (), transaction.messages
            )
        )

    def give_up(self) -> None:
        if (transaction := self.some(states.OPEN)) is not None:
            self.enter(journal_records.LocalRollbackRecord(transaction.epoch, self.time_ms, transaction.origin))

    def discard(self) -> None:
        if (transaction := self.some(states.OPEN)) is not None:
            self.ledger.remove(transaction)

    def by_hand(self) -> None:
        if (transaction := self.some(states.PREPARED)) is not None:
            kind = self.random.choice((journal_records.HeuristicCommitRecord, journal_records.HeuristicRollbackRecord))
            self.enter(kind(transaction.epoch, self.time_ms))

    def forget(self) -> None:
        transaction = self.some(*states.HEURISTIC_STATES)
        if transaction is not None and transaction.obsolete:
            self.enter(journal_records.ForgetRecord(transaction.epoch, self.time_ms))

    def settle(self) -> None:
        transaction = self.some(states.APPLYING, states.HEURISTIC_COMMITTED)
        if transaction is not None and not transaction.obsolete:
            assert transaction.decision is not None
            for each in transaction.decision.transactions:
                self.settled_at[each.epoch] = len(self.entries)
            self.ledger.complete(transaction.decision)

    def member(self) -> None:
        group = self.random.choice(("g", "h"))
        transaction = self.begin(CommitGroupMember(group, self.sequence[group] + 1, self.random.choice(("r1", "r2"))))
        self.send(transaction)
        if self.random.random() < 0.8:
            self.prepare(transaction)

    def commit_group(self) -> None:
        group = self.random.choice(("g", "h"))
        sequence = self.sequence[group] + 1
        known = self.ledger.commit_groups.by_name.get(group)
        prepared = [e for e in known.members if self.ledger.transactions[e].prepared_ms] if known else []
        members = [e for e in prepared if self.random.random() < 0.7]
        dropped = [e for e in prepared if e not in members]
        said = journal_records.GroupCommitRecord(group, sequence, "r1", len(members), members, dropped, self.time_ms)
        if members:
            self.sequence[group] = sequence
            self.enter(said)

    def abort_group(self) -> None:
        group = self.random.choice(("g", "h"))
        dropped = [
            epoch
            for epoch in self.ledger.commit_groups.find_run_members(group, "r2")
            if self.ledger.transactions[epoch].prepared_ms
        ]
        self.enter(journal_records.GroupAbortRecord(group, self.sequence[group] + 1, "r2", dropped, self.time_ms))

    def forget_group(self) -> None:
        if self.random.random() < 0.1:
            self.enter(journal_records.GroupForgetRecord(self.random.choice(("g", "h")), self.time_ms))

    def lease(self) -> None:
        self.enter(journal_records.EpochLeaseRecord(self.ledger.epochs_end + 10, self.time_ms, b"x" * 16))

    def move(self) -> None:
        """A batch is carried forward, as relocation does."""
        transaction = self.some(states.PREPARED)
        places = list(transaction.batch_lsns()) if transaction is not None else []
        if transaction is None or not places:
            return
        place = self.random.choice(places)
        (old,) = (each for each in self.entries if each.lsn == place)
        assert isinstance(old.content, AppendMsg)
        copy = old.content._replace(moved_from=place)
        self.append(copy, copy)

    def snapshot(self) -> None:
        self.snapshots.append((len(self.entries), self.ledger.dump()))


STEPS = (
    *("begin", "send", "send", "send", "prepare", "prepare", "commit", "rollback", "whole", "whole", "give_up"),
    *("discard", "by_hand", "forget", "settle", "settle", "member", "member", "commit_group", "abort_group"),
    *("forget_group", "lease", "move", "move", "snapshot"),
)


class NoHolds:
    """The journal is not part of these tests."""

    def adopt_recovered(self, transaction: Transaction) -> None: ...
    def add_batch(self, transaction: Transaction, lsn: int) -> None: ...
    def release_all(self, transaction: Transaction) -> None: ...


def replayed(data: bytes, entries: Sequence[JournalEntry]) -> TransactionTable:
    ledger = make_ledger()
    ledger.load(data)
    for entry in entries:
        ledger.apply(entry)
    ledger.finish_recovery(NoHolds())
    return ledger


@given(st.integers(0, 1 << 32), st.integers(1, 120))
def test_a_snapshot_and_its_tail_give_what_all_entries_give(seed: int, steps: int) -> None:
    life = Life(seed)
    for _ in range(steps):
        life.step()
    everything = replayed(b"", life.entries)
    live = picture(life.ledger)
    assert picture(everything) == live, f"seed {seed}: the entries do not give the live ledger"
    for count, pack in life.snapshots:
        found = replayed(pack(), life.entries[count:])
        assert picture(found) == live, f"seed {seed}: the snapshot after {count} entries"
        again = decided(found)
        assert {e: again[e] for e in decided(life.ledger)} == decided(life.ledger), f"seed {seed}"
        left_out = {e: r for e, r in decided(everything).items() if e not in again}
        assert all(life.settled_at[e] <= count for e in left_out), f"seed {seed}: lost before it was settled"
        assert {e: r for e, r in decided(everything).items() if e in again} == again, f"seed {seed}"


def test_the_locations_of_what_is_found_again_are_those_that_were_sent() -> None:
    """`row` leaves the locations of decided ones out, because settled ones give theirs back: so they are compared here,
    where nothing is settled.
    """
    for seed in range(scaled(100)):
        life = Life(seed)
        life.settle = lambda: None  # type: ignore[method-assign]
        for _ in range(100):
            life.step()
        everything = replayed(b"", life.entries)
        for epoch, each in life.ledger.transactions.items():
            if each.state != states.OPEN and not each.obsolete:
                assert list(everything.transactions[epoch].locations) == list(each.locations), f"seed {seed}"


# One by one


def test_item_18_what_was_never_prepared_is_gone_after_a_start_and_leaves_nothing() -> None:
    life = Life(1)
    for _ in range(3):
        life.send(life.begin())
    found = replayed(b"", life.entries)
    assert not found.transactions and not found.by_xid and not found.retained_batches
    assert not any(found.state_counts.values())
    assert list(found.epoch_index.epochs_after(0)) == []


def test_what_is_open_in_a_snapshot_can_be_prepared_after_it() -> None:
    """Hazard 12: a checkpoint may fall between any two records of a transaction."""
    life = Life(2)
    transaction = life.begin()
    life.send(transaction)
    life.snapshot()
    life.send(transaction)
    life.prepare(transaction)
    ((count, pack),) = life.snapshots
    found = replayed(pack(), life.entries[count:]).transactions[transaction.epoch]
    assert found.state == states.PREPARED
    assert list(found.locations) == list(transaction.locations) and found.messages == transaction.messages


@pytest.mark.parametrize("at", range(5))
def test_hazard_12_a_checkpoint_anywhere_in_a_commit_leaves_no_orphan(at: int) -> None:
    life = Life(3)
    transaction = life.begin()
    steps: list[Callable[[], Any]] = [
        lambda: life.send(transaction),
        lambda: life.prepare(transaction),
        life.commit,
        life.settle,
    ]
    for number, step in enumerate(steps):
        if number == at:
            life.snapshot()
        step()
    if at == len(steps):
        life.snapshot()
    ((count, pack),) = life.snapshots
    found = replayed(pack(), life.entries[count:])
    if at == len(steps):
        assert not found.transactions
    else:
        decision = found.transactions[transaction.epoch].decision
        assert decision is not None and decision.lsn == life.place
    origin = transaction.origin
    assert found.find_outcome(origin.xid) == life.ledger.find_outcome(origin.xid)


def test_a_decision_over_several_transactions_comes_back_in_their_order() -> None:
    life = Life(4)
    made = [life.begin(CommitGroupMember("g", 1, "r1")) for _ in range(3)]
    for each in made:
        life.send(each)
        life.prepare(each)
    epochs = [each.epoch for each in reversed(made)]
    life.enter(journal_records.GroupCommitRecord("g", 1, "r1", 7, epochs, [], life.time_ms))
    for found in (replayed(b"", life.entries), replayed(life.ledger.dump()(), [])):
        decisions = [found.transactions[epoch].decision for epoch in epochs]
        assert decisions[0] is not None and all(each is decisions[0] for each in decisions)
        assert [each.epoch for each in decisions[0].transactions] == epochs
        assert decisions[0].lsn == life.place


def test_a_record_of_a_transaction_that_is_not_there_is_damage() -> None:
    ledger = make_ledger()
    ledger.load(b"")
    for said in (
        journal_records.CommitRecord(5, 1),
        journal_records.RollbackRecord(5, 1),
        journal_records.ForgetRecord(5, 1),
    ):
        with pytest.raises(ValueError, match="no transaction 5"):
            ledger.apply(entry_of(100, Operation(*journal_records.pack(said))))


def test_a_step_that_cannot_be_is_damage() -> None:
    life = Life(5)
    transaction = life.begin()
    life.send(transaction)
    life.prepare(transaction)
    with pytest.raises(ValueError, match="prepared"):
        replayed(b"", [*life.entries, life.entries[-1]])
    with pytest.raises(ValueError, match="forgotten"):
        replayed(b"", [*life.entries, entry_of(9999, Operation(FORGET, transaction.epoch, b"\x91\x01"))])


def test_missing_messages_are_damage_unless_a_repair_says_why() -> None:
    """A prepared transaction is never shorter than it was, in silence."""
    life = Life(6)
    transaction = life.begin()
    for _ in range(3):
        life.send(transaction)
    life.prepare(transaction)
    for number, entry in enumerate(life.entries):
        if not isinstance(entry.content, AppendMsg):
            continue
        rest = [each for each in life.entries if each is not entry]
        with pytest.raises(ValueError, match="but its record states"):
            replayed(b"", rest)
        filler = JournalEntry(KIND_FILLER, entry.lsn, entry.size, LostEntries(entry.size), 0)
        repaired = [filler if each is entry else each for each in life.entries]
        found = replayed(b"", repaired).transactions[transaction.epoch]
        assert found.messages == transaction.messages and found.lost_messages == entry.content.count
        assert numbers(found) == [each for each in numbers(transaction) if each[1] != entry.lsn], (
            f"entry {number}: messages keep their numbers"
        )


def test_what_a_repair_took_from_one_transaction_is_not_missing_in_the_next_one() -> None:
    """They are of one producer, whose messages have consecutive numbers."""
    life = Life(7)
    first = life.begin()
    life.send(first)
    life.epoch += 1
    second = life.ledger.add_open(life.epoch, first.origin._replace(number=first.origin.number + 1, xid="other"))
    life.send(second)
    life.send(second)
    life.prepare(second)
    of_first, *of_second = [each for each in life.entries if isinstance(each.content, AppendMsg)]
    for gone in ([of_first], [of_first, of_second[0]], [of_second[0]]):
        fillers = {each.lsn: JournalEntry(KIND_FILLER, each.lsn, each.size, LostEntries(each.size), 0) for each in gone}
        repaired = [fillers.get(each.lsn, each) for each in life.entries]
        found = replayed(b"", repaired).transactions[second.epoch]
        assert found.messages == second.messages
        assert found.lost_messages == (of_second[0].content.count if of_second[0] in gone else 0)
        assert numbers(found) == [each for each in numbers(second) if each[1] not in fillers]


def numbers(transaction: Transaction) -> list[tuple[int, int]]:
    """(number of the first message, place) of every batch that is there."""
    found, number = [], 1
    for each in transaction.locations():
        if each.log_id:
            found.append((number, each.lsn))
        number += each.count
    return found


def test_after_a_repair_a_record_without_its_transaction_is_left_out() -> None:
    ledger = make_ledger()
    ledger.load(b"")
    ledger.apply(JournalEntry(KIND_FILLER, 50, 60, LostEntries(60), 0))
    for said in (
        journal_records.CommitRecord(5, 1),
        journal_records.RollbackRecord(5, 1),
        journal_records.GroupCommitRecord("g", 1, "r", 3, [5], [6], 1),
    ):
        ledger.apply(entry_of(200, Operation(*journal_records.pack(said))))
    assert not ledger.transactions
    assert ledger.commit_groups.by_name["g"].last_commit is not None


def test_after_a_repair_epochs_count_as_given_out_where_a_record_has_them() -> None:
    life = Life(7)
    for _ in range(3):
        transaction = life.begin()
        life.send(transaction)
        life.prepare(transaction)
    filler = JournalEntry(KIND_FILLER, 50, 60, LostEntries(60), 0)
    rest = [each for each in life.entries if isinstance(each.content, AppendMsg) or not is_lease(each)]
    found = replayed(b"", [filler, *rest])
    assert found.epochs_end == max(found.transactions) + 1 > 3


def is_lease(entry: JournalEntry) -> bool:
    assert isinstance(entry.content, Operation)
    return isinstance(journal_records.unpack(*entry.content), journal_records.EpochLeaseRecord)


def test_times_only_go_forward_whatever_the_wall_clock_does() -> None:
    ledger = make_ledger()
    ledger.load(b"")
    ledger.apply_operation(1, journal_records.EpochLeaseRecord(10, 5000, b"k"))
    ledger.apply_operation(2, journal_records.EpochLeaseRecord(11, 3000, b"l"))
    assert ledger.latest_ms == 5000
    assert ledger.outcomes.key == b"k"


def test_time_that_goes_on_forgets_outcomes_and_sequences() -> None:
    life = Life(10)
    for local in (False, True):
        life.epoch += 1
        life.ledger.add_open(life.epoch, Origin(f"x{local}", local, 900 + local, 1, 0))
        origin = life.ledger.transactions[life.epoch].origin
        life.enter(journal_records.LocalRollbackRecord(life.epoch, life.time_ms, origin))
    for _ in range(50):
        life.epoch += 1
        origin = life.ledger.add_open(life.epoch, Origin(f"n{life.epoch}", False, 0, 0, 0)).origin
        life.enter(journal_records.LocalRollbackRecord(life.epoch, life.time_ms, origin))
    assert life.ledger.producer_states.expired_id == 0 and len(life.ledger.outcomes) > 35
    life.time_ms += 2 * DAY_MS
    life.lease()
    assert life.ledger.producer_states.expired_id == 901 and len(life.ledger.producer_states) == 0
    assert len(life.ledger.outcomes) <= 2 and len(life.ledger.local_outcomes) == 0


def test_each_snapshot_has_the_places_of_its_time() -> None:
    life = Life(11)
    transaction = life.begin()
    life.send(transaction)
    life.prepare(transaction)
    places = []
    for _ in range(3):
        life.move()
        life.snapshot()
        places.append(list(transaction.batch_lsns()))
        assert len(places[-1]) == 1, "a copy is no new message"
        life.move()
    for (_, pack), expected in zip(life.snapshots, places, strict=True):
        assert list(replayed(pack(), []).transactions[transaction.epoch].batch_lsns()) == expected


def test_epochs_never_go_back() -> None:
    ledger = make_ledger()
    ledger.load(b"")
    ledger.apply_operation(1, journal_records.EpochLeaseRecord(10, 1, b"k"))
    ledger.apply_operation(2, journal_records.EpochLeaseRecord(7, 1, b"k"))
    assert ledger.epochs_end == 10


def test_the_latest_of_a_name_is_the_one_that_is_named() -> None:
    life = Life(7)
    first = life.ledger.add_open(1, Origin("x", False, 1, 1, 0))
    second = life.ledger.add_open(2, Origin("x", False, 1, 2, 0))
    life.ledger.remove(first)
    assert life.ledger.by_xid == {"x": second}
    life.ledger.remove(second)
    life.ledger.remove(second)
    assert not life.ledger.by_xid and not any(life.ledger.state_counts.values())


def test_messages_of_a_transaction_that_is_over_are_not_counted() -> None:
    life = Life(8)
    transaction = life.begin()
    life.ledger.remove(transaction)
    life.send(transaction)
    assert not life.ledger.transactions and life.ledger.retained_bytes == 0


def test_bytes_are_counted_while_the_journal_keeps_them() -> None:
    life = Life(9)
    one, two, three = life.begin(), life.begin(), life.begin()
    for each in (one, two, three):
        life.send(each)
        life.prepare(each)
    sizes = [each.size_bytes for each in (one, two, three)]
    assert life.ledger.retained_bytes == sum(sizes)
    batches = sum(each.locations.batch_count for each in (one, two, three))
    assert life.ledger.retained_journal_bytes == sum(sizes) + batches * ENTRY_BYTES
    life.enter(journal_records.RollbackRecord(one.epoch, life.time_ms))
    life.enter(journal_records.HeuristicRollbackRecord(two.epoch, life.time_ms))
    assert life.ledger.retained_bytes == sizes[2]
    life.enter(journal_records.HeuristicCommitRecord(three.epoch, life.time_ms))
    assert life.ledger.retained_bytes == sizes[2]
    life.settle()
    assert life.ledger.retained_bytes == 0
    life.enter(journal_records.ForgetRecord(three.epoch, life.time_ms))
    assert life.ledger.retained_bytes == 0
    assert life.ledger.find_outcome(three.xid) is not None or not three.xid


def test_a_snapshot_of_a_later_version_is_refused() -> None:
    ledger = make_ledger()
    data = bytearray(ledger.dump()())
    assert data[1] == snapshot.VERSION
    data[1] = snapshot.VERSION + 1
    with pytest.raises(NewerFormat):
        ledger.load(bytes(data))


def test_the_store_of_a_start_is_the_store_of_before() -> None:
    store = Store()
    store.prepared("kept")
    assert picture(store.killed().ledger)["transactions"] == picture(store.ledger)["transactions"]


# Batches that were carried forward: the right one moves, and a snapshot on its way sees nothing of it.


def made(epoch: int, *places: int) -> Transaction:
    transaction = Transaction(epoch, Origin("x", False, 1, 1, 0))
    for place in places:
        transaction.locations.add_batch(place, ORDERS, 1, 1)
    return transaction


def places(locations: BatchLocations) -> list[int]:
    return list(locations[0::WORDS_PER_BATCH])


def test_a_batch_lies_where_it_was_moved_to() -> None:
    transaction, moves = made(1, 10, 20, 30), EntryRelocations()
    assert moves.relocate(transaction, 500, 20)
    assert places(transaction.locations) == [10, 500, 30]
    assert moves.relocate(transaction, 600, 500)
    assert places(transaction.locations) == [10, 600, 30]


def test_what_is_not_there_is_not_moved() -> None:
    transaction, moves = made(1, 10, 20), EntryRelocations()
    assert not moves.relocate(transaction, 500, 21)
    assert not moves.relocate(transaction, 500, ORDERS), "a log's id is no place"
    assert places(transaction.locations) == [10, 20]


def test_a_snapshot_that_is_being_packed_has_the_old_places() -> None:
    transaction, moves = made(1, 10, 20), EntryRelocations()
    moves.relocate(transaction, 500, 10)
    captured = transaction.locations
    moves.mark_shared()
    moves.relocate(transaction, 600, 20)
    moves.relocate(transaction, 700, 500)
    assert places(captured) == [500, 20]
    assert places(transaction.locations) == [700, 600]


@given(st.integers(0, 1 << 32))
def test_any_order_of_moves_does_what_a_list_does(seed: int) -> None:
    generator = random.Random(seed)
    moves = EntryRelocations()
    known = {epoch: [epoch * 1000 + n for n in range(generator.randrange(1, 8))] for epoch in range(1, 4)}
    live = {epoch: made(epoch, *at) for epoch, at in known.items()}
    place = 10_000
    for _ in range(generator.randrange(60)):
        epoch = generator.choice(list(live))
        place += 1
        row = generator.randrange(len(known[epoch]))
        assert moves.relocate(live[epoch], place, known[epoch][row])
        known[epoch][row] = place
        if generator.random() < 0.2:
            moves.mark_shared()
        assert places(live[epoch].locations) == known[epoch], f"seed {seed}"


# Epochs in order, a page at a time.


@given(st.integers(0, 1 << 32))
def test_any_page_is_what_sorting_would_give(seed: int) -> None:
    generator = random.Random(seed)
    live: dict[int, None] = {}
    order = EpochIndex(live)
    epoch = 0
    for _ in range(generator.randrange(600)):
        if live and generator.random() < 0.45:
            del live[generator.choice(list(live))]
            order.count_removed()
        else:
            epoch += generator.randrange(1, 4)
            late = epoch - generator.randrange(1, 3)
            new = late if generator.random() < 0.1 and late not in live and late not in order._epochs else epoch
            if new not in live:
                live[new] = None
                order.add_epoch(new)
        after = generator.randrange(epoch + 2)
        assert list(order.epochs_after(after)) == sorted(each for each in live if each > after), f"seed {seed}"


def test_what_is_gone_takes_no_room() -> None:
    live: dict[int, None] = {}
    order = EpochIndex(live)
    for epoch in range(1, scaled(100_000) + 1000):
        live[epoch] = None
        order.add_epoch(epoch)
        if epoch > 10:
            del live[epoch - 10]
            order.count_removed()
        assert len(order._epochs) <= 2 * (len(live) + REMOVED_EPOCHS_MIN)


def test_a_page_does_not_look_at_those_before_it() -> None:
    """Item 28: 100,000 in doubt are listed in pages, none of which walks over the others."""
    looked: list[int] = []

    class Live(dict[int, None]):
        def __contains__(self, epoch: object) -> bool:
            assert isinstance(epoch, int)
            looked.append(epoch)
            return super().__contains__(epoch)

    live = Live.fromkeys(range(1, 100_001))
    order = EpochIndex(live)
    for epoch in live:
        order.add_epoch(epoch)
    looked.clear()
    page = [epoch for epoch, _ in zip(order.epochs_after(70_000), range(100), strict=False)]
    assert page == list(range(70_001, 70_101))
    assert len(looked) <= 101 and min(looked) == 70_001


def test_it_may_change_while_a_page_is_read() -> None:
    live = dict.fromkeys(range(1, 1000))
    order = EpochIndex(live)
    for epoch in live:
        order.add_epoch(epoch)
    seen = []
    for epoch in order.epochs_after(0):
        seen.append(epoch)
        if epoch + 1 in live:
            del live[epoch + 1]
            order.count_removed()
    assert seen == list(range(1, 1000, 2))
