"""Relocation: old prepared transactions neither pin the journal nor slow the start, and keep every byte."""

from __future__ import annotations

import random
from typing import Any

import pytest

from journal.filenames import journal_name
from journal.wal.entry import AppendMsg
from journal.wal.store import JournalFileInfo
from tests.scale import scaled
from tests.transaction.stores import BILLS, FOLDER, ORDERS, Store, picture
from tfmq.transaction import states
from tfmq.transaction.compaction import FILES_MIN, LIVE_FACTOR, plan_round
from tfmq.transaction.model import Transaction

FILE_BYTES = 16 << 10
BOUND = FILES_MIN * FILE_BYTES
TURNS = 3
"""Checkpoints are written after bytes, and old files go after the second: so much may be there beyond the bound."""


def traffic(store: Store, count_bytes: int, *, housekeeping: bool = True) -> None:
    """Transactions that come, commit and are settled, and the housekeeping in between."""
    end = store.journal.end_offset + count_bytes
    while store.journal.end_offset < end:
        transaction = store.transact([bytes(store.generator.randrange(200, 1500))])
        store.settle(transaction.decision)
        if housekeeping and store.generator.random() < 0.2:
            house(store)


def house(store: Store) -> None:
    store.clock.advance(1)
    store.store.run_housekeeping()
    store.work()


def bounded(store: Store) -> None:
    for _ in range(120):
        house(store)
    limit = max(LIVE_FACTOR * store.store.retained_bytes, BOUND) + TURNS * FILE_BYTES
    assert store.journal.size_bytes <= limit, [tuple(each) for each in store.journal.files]


def test_item_25_journal_files_are_reclaimed() -> None:
    store = Store(journal_file_bytes=FILE_BYTES)
    traffic(store, 40 * FILE_BYTES)
    bounded(store)
    assert store.journal.files[0].number > 20
    assert picture(store.killed().ledger)["transactions"] == {}


def test_one_old_prepared_transaction_does_not_keep_the_journal() -> None:
    store = Store(journal_file_bytes=FILE_BYTES)
    old = store.prepared("old", [b"first", b"second"])
    places = list(old.batch_lsns())
    traffic(store, 60 * FILE_BYTES)
    bounded(store)
    assert len(store.journal.files) <= FILES_MIN + TURNS
    life = store.killed()
    assert life.journal.recovery.walked_bytes < TURNS * FILE_BYTES, "the start reads little of it"
    found = life.store.by_xid["old"]
    assert list(found.batch_lsns()) != places or store.journal.files[0].first <= places[0]
    life.commit(found)
    assert life.payloads(found.decision).endswith(b"second")


def test_many_old_ones_in_as_many_files_are_gathered() -> None:
    """Each would pin a file of its own."""
    store = Store(journal_file_bytes=FILE_BYTES)
    sent: dict[str, bytes] = {}
    for number in range(40):
        transaction = store.begin(f"old-{number}")
        found = store.piece(transaction, [f"{number}".encode() * 20], random.Random(number).choice((ORDERS, BILLS)))
        sent[transaction.xid] = found.data
        store.store.add_batch(transaction, found, lambda *_: None)
        store.prepare(transaction)
        traffic(store, FILE_BYTES)
    bounded(store)
    held = sum(file.references > 0 for file in store.journal.files)
    assert held <= FILES_MIN, "they pinned a file each"
    for life in (store, store.killed(), store.power_cut(), store.killed().closed()):
        for xid, data in sent.items():
            transaction = life.store.by_xid[xid]
            (location,) = transaction.locations()
            entry = life.journal.read(location.lsn)
            assert isinstance(entry.content, AppendMsg)
            assert bytes(entry.content.data) == data, xid
            assert entry.content.epoch == transaction.epoch and entry.content.log_id == location.log_id


def test_batches_keep_their_order_and_their_bytes() -> None:
    store = Store(journal_file_bytes=FILE_BYTES)
    transaction = store.begin("long")
    data = b""
    for number in range(100):
        found = store.piece(transaction, [b"%d" % number, bytes(50)], (ORDERS, BILLS)[number % 3 == 0])
        data += found.data if found.log_id == ORDERS else b""
        store.store.add_batch(transaction, found, lambda *_: None)
        store.turn()
        if number % 10 == 9:
            traffic(store, 3 * FILE_BYTES)
    store.prepare(transaction)
    bounded(store)
    traffic(store, 20 * FILE_BYTES)
    bounded(store)
    life = store.killed()
    found_again = life.store.by_xid["long"]
    assert list(found_again.locations) == list(transaction.locations)
    places = list(transaction.batch_lsns())
    assert places != sorted(places) or places[0] > store.journal.files[0].first
    life.commit(found_again)
    assert life.payloads(found_again.decision) == data


def test_a_transaction_that_ends_while_it_is_carried_is_not_carried_on() -> None:
    store = Store(lazy=True, journal_file_bytes=FILE_BYTES)
    made = pin(store)
    store.store.run_housekeeping()
    assert store.store._compaction.running
    store.commit(made[0])
    store.rollback(made[1])
    store.work()
    assert store.payloads(made[0].decision)
    for _ in range(40):
        house(store)
    life = store.killed()
    assert set(life.store.by_xid) == {"old-0", *[each.xid for each in made[2:]]}
    assert life.payloads(life.store.by_xid["old-0"].decision)
    life.commit(life.store.by_xid["old-2"])
    life.work()
    assert life.payloads(life.store.by_xid["old-2"].decision)


def pin(store: Store) -> list[Transaction]:
    """Prepared transactions in so many files that they must be carried."""
    made: list[Transaction] = []
    while not store.store._compaction.needed:
        made.append(store.begin(f"old-{len(made)}"))
        store.send(made[-1])
        store.prepare(made[-1])
        traffic_lazily(store, FILE_BYTES)
    return made


def traffic_lazily(store: Store, count_bytes: int) -> None:
    end = store.journal.end_offset + count_bytes
    while store.journal.end_offset < end:
        transaction = store.begin()
        store.store.commit(transaction, lambda *_: None, batches=[store.piece(transaction, [bytes(1000)])])
        store.turn()
        while transaction.decision is None:
            store.step()
        store.settle(transaction.decision)
    store.work()


def test_a_decision_in_the_same_turn_comes_before_the_copy() -> None:
    """The copy is written after the decision: it changes nothing, live as in a replay."""
    store = Store(lazy=True, journal_file_bytes=FILE_BYTES)
    old = pin(store)[0]
    store.store.run_housekeeping()
    while store.store._compaction.running and not store.store._writer._queue:
        work, done = store.jobs.pop(0)
        done(work(), None)
    assert store.store._writer._queue, "the copy is queued"
    copy = store.store._writer._queue.pop()
    store.store.commit(old, lambda *_: None)
    store.store._writer._queue.append(copy)
    before = list(old.locations)
    store.work()
    assert old.decision is not None and list(old.locations) == before
    found = store.killed().store.transactions[old.epoch]
    assert list(found.locations) == before


def test_a_file_that_cannot_be_read_stays_and_the_others_are_emptied() -> None:
    store = Store(journal_file_bytes=FILE_BYTES)
    made = [store.prepared("bad", [b"rotten"])]
    file = store.disk.open_write(f"{FOLDER}/{journal_name(1)}")
    while not store.store._compaction.needed:
        traffic(store, FILE_BYTES, housekeeping=False)
        made.append(store.prepared(f"good-{len(made)}", [b"sound"]))
    file.pwritev([b"R"], file.pread(FILE_BYTES, 0).find(b"rotten"))
    before = [next(each.batch_lsns()) for each in made]
    for _ in range(120):
        house(store)
    after = [next(each.batch_lsns()) for each in made]
    assert after[0] == before[0]
    assert after[1] > before[-1], "the next oldest has moved"
    bounded(store)
    for each in made[1:]:
        store.commit(each)
        assert store.payloads(each.decision).endswith(b"sound")


def test_while_there_is_no_space_nothing_is_lost() -> None:
    store = Store(journal_file_bytes=FILE_BYTES)
    old = store.prepared("old", [b"kept"])
    relocation = store.store._compaction
    tend, relocation.run_if_needed = relocation.run_if_needed, lambda: None  # type: ignore[method-assign]
    traffic(store, 12 * FILE_BYTES)
    held = [store.prepared(f"held-{n}", [bytes(900)]) for n in range(FILES_MIN * 18)]
    for each in held[::2]:
        store.rollback(each)
    store.disk.space_bytes = 0
    tend()
    store.work()
    assert not relocation.running
    store.disk.space_bytes = None
    relocation.run_if_needed = tend  # type: ignore[method-assign]
    bounded(store)
    for life in (store, store.killed()):
        assert life.journal.read(next(life.store.by_xid["old"].batch_lsns()))
        assert len(life.store.by_xid) == 1 + len(held) // 2
    store.commit(old)
    assert store.payloads(old.decision).endswith(b"kept")


# The plan


def made(*rows: tuple[int, int]) -> tuple[Any, int]:
    transaction = Transaction(1, Store().origin("x"))
    for place, size in rows:
        transaction.locations.add_batch(place, ORDERS, 1, size)
    return transaction.locations, len(transaction.locations)


FILES = [JournalFileInfo(number, number * 1000, 1000, 1) for number in range(1, 5)]


def test_files_less_than_half_alive_are_emptied_but_never_the_last() -> None:
    rows = [made((1100, 400), (2100, 300), (2500, 300)), made((3100, 10), (4100, 10))]
    assert list(plan_round(rows, FILES, frozenset())) == [1100, 3100]
    assert list(plan_round(rows, FILES, frozenset({1}))) == [3100]


def test_what_is_lost_or_came_later_is_not_moved() -> None:
    locations, words = made((1100, 10), (0, 0))
    locations.add_batch(1200, ORDERS, 1, 10)
    assert list(plan_round([(locations, words)], FILES, frozenset())) == [1100]


def test_a_round_takes_so_much_and_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.transaction.compaction.BYTES_PER_ROUND", 250)
    rows = [made((3100, 100), (1100, 200))]
    assert list(plan_round(rows, FILES, frozenset())) == [1100]
    monkeypatch.setattr("tfmq.transaction.compaction.BYTES_PER_ROUND", 5)
    assert list(plan_round(rows, FILES, frozenset())) == [1100], "at least one file"


def test_while_more_lies_there_than_may_there_is_a_file_to_empty() -> None:
    """Why EMPTY_FACTOR and ALIVE_FACTOR fit each other: any places and sizes, one file always qualifies."""
    for seed in range(scaled(400)):
        generator = random.Random(seed)
        files = [JournalFileInfo(n, n * 1000, 1000, 1) for n in range(1, generator.randrange(10, 30))]
        rows = []
        for file in files:
            for _ in range(generator.randrange(1, 4)):
                rows.append(made((file.first + generator.randrange(900), generator.randrange(1, 150))))
        alive = sum(locations[2] & 0xFFFFFFFF for locations, _ in rows)
        if 1000 * len(files) > LIVE_FACTOR * alive:
            assert len(plan_round(rows, files, frozenset())) > 0, f"seed {seed}"


def test_only_prepared_ones_move() -> None:
    """What is open ends by itself, and what is decided is about to go."""
    store = Store(lazy=True, journal_file_bytes=FILE_BYTES)
    opened, decided = store.begin("open"), store.begin("decided")
    for each in (opened, decided):
        store.send(each)
    store.prepare(decided)
    store.commit(decided)
    still = [list(each.batch_lsns()) for each in (opened, decided)]
    moving = pin(store)
    before = next(moving[0].batch_lsns())
    for _ in range(20):
        house(store)
    assert next(moving[0].batch_lsns()) > before
    assert [list(each.batch_lsns()) for each in (opened, decided)] == still
    assert opened.state == states.OPEN
    assert store.payloads(decided.decision)


def test_tiny_batches_are_not_copied_again_and_again() -> None:
    """Most of such an entry is its header: a copy would look as empty as what it was copied from."""
    store = Store(journal_file_bytes=FILE_BYTES)
    for number in range(12):
        transaction = store.begin(f"x{number}")
        for _ in range(2 * FILE_BYTES // 93):
            store.send(transaction, [b"x"])
        store.prepare(transaction)
    bounded(store)
    end = store.journal.end_offset
    for _ in range(30):
        house(store)
    assert store.journal.end_offset == end
