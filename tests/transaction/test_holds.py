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
from tfmq.transaction.model import WORDS_PER_BATCH, Transaction
from tfmq.transaction.transaction_table import FileReferences

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
