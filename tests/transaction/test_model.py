"""What memory keeps of a transaction: few bytes a batch, and the numbering of a decision's messages."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from tests.scale import scaled
from tests.transaction.stores import BILLS, ORDERS, Store
from tfmq.transaction import states
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import (
    LOST_LOG_ID,
    ROW_WORDS,
    BatchLocation,
    BatchLocations,
    Decision,
    TargetPart,
    Transaction,
    pack_locations,
    unpack_locations,
)

ORIGIN = Origin("x", False, 100, 1, 0)
LOCATION_BYTES = 48
"""What the design allows for one batch."""


def test_locations_come_back_as_they_were_added() -> None:
    locations = BatchLocations()
    rows = [BatchLocation(1 << 62, ORDERS, 1 << 20, (1 << 32) - 1), BatchLocation(7, BILLS, 1, 21)]
    for each in rows:
        locations.add_batch(*each)
    assert list(locations()) == rows and locations.batch_count == 2
    copy = BatchLocations(locations)
    copy[0] = 5
    assert list(locations()) == rows, "a copy is a copy"


def test_packed_locations_are_the_same_on_every_machine() -> None:
    locations = BatchLocations()
    locations.add_batch(0x0102030405060708, ORDERS, 1, 2)
    data = pack_locations(locations[:])
    assert data[:8] == bytes(range(1, 9))
    assert list(unpack_locations(data)()) == list(locations())
    with pytest.raises(ValueError, match="end inside a location"):
        unpack_locations(data[:16])
    with pytest.raises(ValueError):
        unpack_locations(data[:17])


@pytest.mark.long
def test_a_2_gb_transaction_takes_little_memory() -> None:
    """200,000 batches of 10 KiB: the limit of batches, and 2 GB of messages."""
    count = scaled(200_000)
    gc.collect()
    tracemalloc.start()
    transaction = Transaction(1, ORIGIN)
    for number in range(count):
        transaction.locations.add_batch(number * 10_300, ORDERS, 100, 10_240)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size <= LOCATION_BYTES * count + 2048, f"{size / count:.1f} bytes a batch"


def test_a_transaction_is_empty_until_something_is_on_its_way() -> None:
    store = Store(lazy=True)
    transaction = store.begin("x")
    assert (transaction.messages, transaction.queued_messages) == (0, 0)
    store.store.add_batch(transaction, store.piece(transaction, [b"m"]), lambda *_: None)
    assert (transaction.messages, transaction.queued_messages) == (0, 1)
    store.turn()
    assert (transaction.queued_messages, transaction.messages) == (0, 1)


def decided(*batches: tuple[int, int], epochs: int = 1) -> Decision:
    """Batches of (log id, count), dealt out to `epochs` transactions in a row."""
    made = []
    for epoch in range(epochs):
        transaction = Transaction(epoch + 1, ORIGIN)
        transaction.topics = {ORDERS: "orders", BILLS: "bills"}
        part = batches[epoch * len(batches) // epochs : (epoch + 1) * len(batches) // epochs]
        for number, (log_id, count) in enumerate(part):
            transaction.locations.add_batch(1000 * (epoch + 1) + number, log_id, count, count * 30)
        made.append(transaction)
    return Decision(9999, 0, made)


def test_messages_are_counted_from_one_over_all_partitions() -> None:
    decision = decided((ORDERS, 3), (BILLS, 2), (ORDERS, 4))
    assert decision.targets == {
        ORDERS: TargetPart(ORDERS, "orders", 7, 210, 9),
        BILLS: TargetPart(BILLS, "bills", 2, 60, 5),
    }
    assert [r[:2] for r in rows(decision, ORDERS)] == [(1000, 1), (1002, 6)]
    assert [r[3] for r in rows(decision, ORDERS)] == [0, 2]
    assert rows(decision, BILLS) == [(1001, 4, 2 << 32 | 60, 1)]
    assert rows(decision, 77) == []


def rows(decision: Decision, log_id: int) -> list[tuple[int, ...]]:
    words = decision.partition_rows(log_id)
    return [tuple(words[at : at + ROW_WORDS]) for at in range(0, len(words), ROW_WORDS)]


def test_messages_of_several_transactions_are_counted_on() -> None:
    decision = decided((ORDERS, 3), (BILLS, 2), (ORDERS, 4), (ORDERS, 1), epochs=2)
    assert [r[:2] for r in rows(decision, ORDERS)] == [(1000, 1), (2000, 6), (2001, 10)]
    assert decision.targets[ORDERS].last_ordinal == 10


def test_lost_messages_keep_their_numbers_and_go_nowhere() -> None:
    decision = decided((ORDERS, 3), (LOST_LOG_ID, 5), (ORDERS, 1))
    assert [r[:2] for r in rows(decision, ORDERS)] == [(1000, 1), (1002, 9)]
    assert list(decision.targets) == [ORDERS]


def test_what_was_counted_is_counted_again_after_release() -> None:
    decision = decided((ORDERS, 3))
    before = decision.targets
    decision.release_memory()
    assert decision.partition_rows(ORDERS)[1] == 1
    decision.release_memory()
    assert decision.targets == before


def test_a_decision_without_messages_has_no_targets() -> None:
    assert decided().targets == {}
    assert decided().offsets == []


def test_the_steps_of_a_transaction_show_in_its_state() -> None:
    store = Store()
    transaction = store.begin("x")
    seen = [transaction.state]
    store.send(transaction)
    store.prepare(transaction)
    seen.append(transaction.state)
    store.commit(transaction)
    seen.append(transaction.state)
    decision = transaction.decision
    assert decision is not None
    store.store.mark_applied(decision)
    seen.append(transaction.state)
    assert seen == [states.OPEN, states.PREPARED, states.APPLYING, states.COMMITTED]
