"""Batches that were carried forward: the right one moves, and a snapshot on its way sees nothing of it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.transaction.stores import ORDERS
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import WORDS_PER_BATCH, BatchLocations, Transaction
from tfmq.transaction.transaction_table import EntryRelocations


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
