"""One hold for each transaction and file: as few calls as files, and never one too few."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from journal.wal.store import JournalFileInfo
from tests.transaction.stores import ORDERS, Store
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import WORDS, Transaction
from tfmq.transaction.transaction_table import Holds

ORIGIN = Origin("x", False, 1, 1, 0)


class Journal:
    """Files of 100 bytes; counts holds, and refuses to give back what nobody took."""

    def __init__(self) -> None:
        self.firsts = [0]
        self.held: Counter[int] = Counter()
        self.calls = 0

    @property
    def files(self) -> list[JournalFileInfo]:
        return [JournalFileInfo(n, first, 100, self.held[n]) for n, first in enumerate(self.firsts)]

    def number(self, place: int) -> int:
        return bisect_right(self.firsts, place) - 1

    def hold(self, place: int) -> None:
        self.calls += 1
        self.held[self.number(place)] += 1

    def release(self, place: int) -> None:
        number = self.number(place)
        assert self.held[number] > 0, f"file {number} is not held"
        self.held[number] -= 1


def needed(journal: Journal, transactions: list[Transaction]) -> dict[int, int]:
    """What should be held: each file once for each transaction that has something in it."""
    found: Counter[int] = Counter()
    for each in transactions:
        found.update({journal.number(place) for place in each.places()})
    return dict(found)


@given(st.integers(0, 1 << 32))
def test_every_file_is_held_once_for_each_transaction_in_it(seed: int) -> None:
    generator = random.Random(seed)
    journal = Journal()
    holds = Holds(journal)
    live = [Transaction(epoch, ORIGIN) for epoch in range(5)]
    place = 0
    for _ in range(generator.randrange(80)):
        place += generator.randrange(1, 40)
        if place >= journal.firsts[-1] + 100:
            journal.firsts.append(place)
            holds.rolled()
        if not live:
            break
        transaction = generator.choice(live)
        if generator.random() < 0.05:
            holds.release(transaction)
            live.remove(transaction)
        elif generator.random() < 0.1 and transaction.locations:
            row = generator.randrange(transaction.locations.rows)
            transaction.locations[row * WORDS] = place
            holds.add(transaction, place)
            holds.renew(transaction)
        else:
            transaction.locations.add(place, ORDERS, 1, 10)
            holds.add(transaction, place)
        assert {n: c for n, c in journal.held.items() if c} == needed(journal, live), f"seed {seed}"
    again = Journal()
    again.firsts = journal.firsts
    for each in live:
        each.files = []
        for at in each.places():
            again.hold(at)
    after = Holds(again)
    for each in live:
        after.adopt(each)
    assert {n: c for n, c in again.held.items() if c} == needed(again, live), f"seed {seed}: after a start"
    for each in live:
        after.release(each)
        after.release(each)
    assert not any(again.held.values())


def test_a_transaction_of_many_batches_takes_few_calls() -> None:
    journal = Journal()
    holds = Holds(journal)
    transaction = Transaction(1, ORIGIN)
    for place in range(90):
        transaction.locations.add(place, ORDERS, 1, 1)
        holds.add(transaction, place)
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
        held = sum(file.holds for file in life.journal.files)
        assert held == sum(len(each.files) for each in life.store.transactions.values())
        for each in life.store.transactions.values():
            assert len(each.files) == len(
                {bisect_right([file.first for file in files], place) for place in each.places()}
            )
    for each in made:
        store.rollback(each)
    store.rollback(long)
    assert not any(file.holds for file in store.journal.files)
