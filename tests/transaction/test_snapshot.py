"""Snapshots of transactions: packed later than captured, read back whole, damage refused."""

from __future__ import annotations

import contextlib
import gc
import threading

import msgpack
import pytest

from journal.errors import NewerFormat
from journal.wal.entry import AppendMsg
from tests import paths
from tests.memory_bombs import NESTED_LISTS, refused_in_little_memory
from tests.scale import scaled, seeded
from tests.transaction.stores import BILLS, ORDERS, Store, decided, picture, piece, row
from tests.transaction.test_transaction_table import make_ledger
from tfmq.apply_target import GroupPositions
from tfmq.transaction import journal_records, snapshot, states
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import Decision, Transaction
from tfmq.transaction.outcomes import ALL_EPOCHS
from tfmq.transaction.requests import CommitGroupMember
from tfmq.transaction.snapshot import SnapshotHead
from tfmq.transaction.transaction_table import TransactionTable

GOLDEN = paths.TESTS / "golden" / "ledger.hex"
HEAD = SnapshotHead(1234, 5678, ((1,), (2,), (3,), (4,)))


def made(epoch: int, state: str = states.PREPARED) -> Transaction:
    origin = Origin(f"x{epoch}", False, 100, epoch, 7, "group", "owner", CommitGroupMember("q", 3, "r"))
    transaction = Transaction(epoch, origin)
    transaction.state = state
    transaction.topics = {ORDERS: "orders", BILLS: "bills"}
    transaction.offsets = (GroupPositions("readers", 3, ((50, 0, 17, 0, 1),)),)
    transaction.locations.add_batch(1000 + epoch, ORDERS, 3, 77)
    transaction.messages, transaction.size_bytes = 3, 77
    if state != states.OPEN:
        transaction.prepared_ms, transaction.expires_ms = 50, 60
    return transaction


def again(*transactions: Transaction) -> list[Transaction]:
    head, found = snapshot.decode(snapshot.capture(HEAD, transactions)())
    assert head == HEAD
    return found


def test_a_prepared_one_comes_back() -> None:
    (found,) = again(made(5))
    assert row(found) == row(made(5)) and found.epoch == 5


def test_they_come_back_by_epoch() -> None:
    assert [each.epoch for each in again(made(7), made(5), made(6))] == [5, 6, 7]


def test_an_open_one_comes_back_as_what_it_is() -> None:
    (found,) = again(made(5, states.OPEN))
    assert found.state == states.OPEN and found.offsets == () and found.topics == made(5).topics


@pytest.mark.parametrize(
    ("state", "prepared", "durable"),
    [
        (states.PREPARING, False, states.OPEN),
        (states.COMMITTING, False, states.OPEN),
        (states.ROLLING_BACK, False, states.OPEN),
        (states.COMMITTING, True, states.PREPARED),
        (states.ROLLING_BACK, True, states.PREPARED),
        (states.COMMITTED, True, states.APPLYING),
    ],
)
def test_hazard_12_a_step_without_its_record_is_not_in_a_snapshot(state: str, prepared: bool, durable: str) -> None:
    transaction = made(5, state)
    if not prepared:
        transaction.prepared_ms = transaction.expires_ms = 0
    if durable == states.APPLYING:
        transaction.decision = Decision(99, 70, (transaction,))
    (found,) = again(transaction)
    assert found.state == durable
    assert (found.prepared_ms, found.expires_ms) == ((50, 60) if prepared else (0, 0))


def test_a_decision_comes_back_with_its_place() -> None:
    transaction = made(5, states.APPLYING)
    transaction.decision = Decision(99, 70, (transaction,))
    (found,) = again(transaction)
    assert found.decision is not None
    assert (found.decision.lsn, found.decision.time_ms, found.decided_ms) == (99, 70, 70)
    assert found.decision.transactions == (found,)


def test_what_is_settled_keeps_its_counts() -> None:
    transaction = made(5, states.HEURISTIC_ROLLED_BACK)
    transaction.obsolete, transaction.decided_ms = True, 70
    del transaction.locations[:]
    (found,) = again(transaction)
    assert (found.messages, found.size_bytes, found.decided_ms, found.obsolete) == (3, 77, 70, True)


def test_what_happens_after_the_capture_is_not_in_it() -> None:
    opened, prepared = made(1, states.OPEN), made(2)
    before = [list(each.locations) for each in (opened, prepared)]
    pack = snapshot.capture(HEAD, [opened, prepared])
    opened.topics[77] = "later"
    opened.locations.add_batch(9, 77, 1, 1)
    opened.offsets, opened.prepared_ms, opened.state = ((),), 80, states.PREPARED  # type: ignore[assignment]
    prepared.state, prepared.obsolete = states.APPLYING, True
    prepared.decision = Decision(99, 70, (prepared,))
    found = snapshot.decode(pack())[1]
    assert [each.state for each in found] == [states.OPEN, states.PREPARED]
    assert [list(each.locations) for each in found] == before
    assert 77 not in found[0].topics and not found[0].prepared_ms and found[1].decision is None


def test_packing_runs_beside_the_owner() -> None:
    """A thread packs while the owner goes on: what it reads is what was captured, whenever it reads it."""
    store = Store()
    live = [store.prepared(f"x{n}") for n in range(scaled(2000) + 200)]
    opened = store.begin("open")
    store.send(opened)
    pack = store.ledger.dump()
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(pack()))
    thread.start()
    for number, each in enumerate(live):
        if number % 3 == 0:
            store.commit(each)
            store.settle(each.decision)
        elif number % 3 == 1:
            store.rollback(each)
        store.send(opened)
    thread.join(60)
    assert not thread.is_alive()
    transactions = snapshot.decode(found[0])[1]
    assert len(transactions) == len(live) + 1
    assert {each.state for each in transactions[:-1]} == {states.PREPARED}
    assert transactions[-1].locations.batch_count == 1


def golden_ledger() -> TransactionTable:
    """A bit of everything that a snapshot can hold."""
    ledger = make_ledger()
    ledger.load(b"")
    ledger.apply_operation(100, journal_records.EpochLeaseRecord(1000, 5000, b"a key of sixteen"))
    for epoch, member in ((1, None), (2, CommitGroupMember("q", 3, "r")), (3, CommitGroupMember("q", 3, "r"))):
        origin = Origin(f"x{epoch}", False, 100 + epoch, 1, 4000, "payments", "a client", member)
        sent = piece(100 + epoch, 0, [b"one", b"two"])
        ledger.apply_batch(200 * epoch, AppendMsg(epoch, ORDERS, *sent[2:]))
        offsets = (GroupPositions("readers", 3, ((50, 0, 17, 0, 1),)),)
        said = journal_records.PrepareRecord(epoch, 6000, origin, ((ORDERS, "orders"),), offsets, 2, 0)
        ledger.apply_operation(200 * epoch + 100, said)
    ledger.apply_operation(800, journal_records.GroupCommitRecord("q", 3, "r", 4, (3, 2), (), 7000))
    ledger.apply_operation(900, journal_records.GroupAbortRecord("q", 4, "s", (), 7000))
    local = Origin("local-4", True, 104, 1, 7000)
    ledger.apply_operation(1000, journal_records.LocalRollbackRecord(4, 7000, local))
    return ledger


def test_the_bytes_are_those_of_the_golden_file() -> None:
    data = bytes.fromhex(GOLDEN.read_text())
    assert golden_ledger().dump()() == data
    found = make_ledger()
    found.load(data)
    assert picture(found) == picture(golden_ledger()) and decided(found) == decided(golden_ledger())
    assert set(found.transactions) == {1, 2, 3} and found.find_outcome("x2") is not None


def test_a_snapshot_of_an_earlier_release_claims_nothing_of_what_it_has_forgotten() -> None:
    """Until the start leases epochs of its own."""
    ledger = golden_ledger()
    dump = ledger.local_outcomes.dump
    ledger.local_outcomes.dump = lambda: dump()[:4]  # type: ignore[method-assign]
    streams = ledger.producer_states.dump()
    ledger.producer_states.dump = lambda: streams[:2]  # type: ignore[method-assign]
    found = make_ledger()
    found.load(ledger.dump()())
    assert found.producer_states.entries_lost and not ledger.producer_states.entries_lost
    assert found.local_outcomes.expired_epoch == ALL_EPOCHS and found.outcomes.expired_epoch == 0
    found.apply_operation(1100, journal_records.EpochLeaseRecord(2000, 8000, b""))
    assert found.local_outcomes.expired_epoch == 1999


def test_damage_is_refused_with_value_error_and_nothing_else() -> None:
    generator = seeded("snapshot")
    first, second = made(8, states.APPLYING), made(9, states.APPLYING)
    first.decision = second.decision = Decision(99, 70, (first, second))
    data = snapshot.capture(HEAD, [made(5), made(6, states.OPEN), first, second])()
    for _ in range(scaled(20_000)):
        bad = bytearray(data)
        for _ in range(generator.randrange(1, 3)):
            bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
        with contextlib.suppress(ValueError, NewerFormat):
            snapshot.decode(bytes(bad))
        with contextlib.suppress(ValueError, NewerFormat):
            snapshot.decode(bytes(bad[: generator.randrange(len(bad))]))


@pytest.mark.parametrize("data", [NESTED_LISTS, b"\xdd\xff\xff\xff\xff", b"\x9a\x01" + NESTED_LISTS])
def test_what_announces_too_much_takes_no_memory(data: bytes) -> None:
    with refused_in_little_memory("snapshot of the transactions does not decode"):
        snapshot.decode(data)


def test_a_row_that_announces_too_much_or_is_missing_is_refused() -> None:
    head = msgpack.packb((1, 0, 0, (), (), (), (), (), 1))
    with refused_in_little_memory("in the middle of a value"):
        snapshot.decode(head + NESTED_LISTS)
    with pytest.raises(ValueError, match="0 of 1 transactions"):
        snapshot.decode(head)


def test_an_unknown_state_is_damage() -> None:
    with pytest.raises(ValueError, match="unknown state"):
        again(made(5, "dreaming"))


def test_a_later_version_is_refused_and_more_fields_are_not() -> None:
    data = snapshot.capture(HEAD, [])()
    unpacker = msgpack.Unpacker(use_list=False)
    unpacker.feed(data)
    head = unpacker.unpack()
    assert snapshot.decode(msgpack.packb((*head, "new")))[0] == HEAD
    with pytest.raises(NewerFormat):
        snapshot.decode(msgpack.packb((snapshot.VERSION + 1, *head[1:])))


@pytest.mark.long
def test_capturing_makes_no_object_for_each_transaction() -> None:
    """It is done between two turns, and 100,000 new objects would set off the garbage collector."""
    transactions = [made(epoch) for epoch in range(1, scaled(100_000) + 1)]
    gc.collect()
    before = len(gc.get_objects())
    pack = snapshot.capture(HEAD, transactions)
    assert len(gc.get_objects()) - before < 50
    assert len(snapshot.decode(pack())[1]) == len(transactions)
