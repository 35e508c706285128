"""What goes into a partition, in appends of at most 1 MiB, from wherever it left off."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import Corrupt, Lost
from journal.filenames import journal_name
from journal.record.batch import Batch, verify_batch
from journal.record.format import records_of
from journal.wal.entry import AppendMsg, JournalEntry
from tests.scale import scaled
from tests.transaction.stores import BILLS, FOLDER, ORDERS, Store, entry_of, piece
from tfmq.apply_target import ARRIVALS_KEY
from tfmq.transaction.model import ROW_WORDS, SIZE_BITS, Slice
from tfmq.transaction.slicer import CONTINUED, SLICE_BYTES, first_row, read_slices, read_slices_nowait, slice_cached

MIB = 1 << 20


class Journal:
    """Entries by place."""

    def __init__(self) -> None:
        self.contents: dict[int, AppendMsg] = {}
        self.reads: list[int] = []

    def read(self, place: int, size: int) -> JournalEntry:
        self.reads.append(place)
        found = self.contents[place]
        assert size >= len(found.data)
        return entry_of(place, found)


def made(seed: int, count: int, largest: int, block_bytes: int) -> tuple[Journal, array[int], bytes]:
    """A journal with `count` batches for ORDERS among others, their rows, and all their records."""
    generator = random.Random(seed)
    journal, rows, everything = Journal(), array("Q"), b""
    number, sequence = 1, 0
    for index in range(count):
        payloads = [bytes(generator.randrange(largest)) for _ in range(generator.randrange(1, 8))]
        log_id = generator.choice((ORDERS, ORDERS, BILLS))
        found = piece(700, sequence, payloads, log_id, block_bytes)
        place = 1000 + index
        journal.contents[place] = AppendMsg(9, log_id, *found[2:])
        if log_id == ORDERS:
            rows.extend((place, number, found.count << SIZE_BITS | len(found.data), index))
            everything += found.data
        number += found.count
        sequence += found.count
    return journal, rows, everything


def numbers(rows: array[int]) -> list[int]:
    """Of every message that goes there."""
    return [
        number
        for at in range(0, len(rows), ROW_WORDS)
        for number in range(rows[at + 1], rows[at + 1] + (rows[at + 2] >> SIZE_BITS))
    ]


def whole(found: list[Slice]) -> bytes:
    return b"".join(bytes(batch.data) for each in found for batch in each.batches)


def check(found: list[Slice], slice_bytes: int) -> None:
    """Each slice is what a partition takes: verified blocks, sizes and counts that add up."""
    for each in found:
        assert each.size_bytes == sum(len(batch.data) for batch in each.batches)
        assert len(each.batch_indexes) == len(each.batches) > 0
        blocks = sum(len(batch.blocks) for batch in each.batches)
        assert each.size_bytes <= slice_bytes or blocks == 1
        for data, cut, producer_id, sequence, count in each.batches:
            verify_batch(data, cut, producer_id, sequence, count, verify="records")


@given(
    st.integers(0, 1 << 32),
    st.integers(0, 30),
    st.sampled_from((30, 300, 3000)),
    st.sampled_from((100, 1000, 65_536)),
    st.sampled_from((200, 2000, 20_000, MIB)),
)
def test_slices_hold_every_message_once_and_in_order(
    seed: int, count: int, largest: int, block_bytes: int, slice_bytes: int
) -> None:
    journal, rows, everything = made(seed, count, largest, block_bytes)
    found = list(read_slices(journal.read, rows, ORDERS, 0, slice_bytes))
    check(found, slice_bytes)
    assert whole(found) == everything, f"seed {seed}"
    lasts = [each.last_ordinal for each in found]
    assert lasts == sorted(set(lasts)) and lasts[-1:] == numbers(rows)[-1:]
    first_pieces = [index for each in found for index in each.batch_indexes if index != CONTINUED]
    assert first_pieces == list(rows[3::ROW_WORDS])


@given(st.integers(0, 1 << 32), st.integers(1, 12), st.sampled_from((200, 2000, MIB)))
def test_after_any_message_the_rest_comes_and_nothing_else(seed: int, count: int, slice_bytes: int) -> None:
    """Item 35: whatever a partition has when the broker dies, it gets what it has not."""
    journal, rows, everything = made(seed, count, 200, 500)
    positions = [each.position for each in records_of(everything)] + [len(everything)]
    known = numbers(rows)
    for after in range(known[-1] + 2 if known else 1):
        found = list(read_slices(journal.read, rows, ORDERS, after, slice_bytes))
        check(found, slice_bytes)
        skipped = sum(number <= after for number in known)
        assert whole(found) == everything[positions[skipped] :], f"seed {seed} after {after}"
        cached = slice_cached(batches_of(journal), rows, ORDERS, after, slice_bytes)
        assert whole(cached) == whole(found) and [s.last_ordinal for s in cached] == [s.last_ordinal for s in found]


def batches_of(journal: Journal) -> list[Batch]:
    return [
        Batch(each.data, each.blocks, each.producer_id, each.sequence, each.count) for each in journal.contents.values()
    ]


def test_a_resumption_goes_on_at_the_end_of_any_slice() -> None:
    for seed in range(scaled(300)):
        journal, rows, everything = made(seed, 6, 3000, 1000)
        found = list(read_slices(journal.read, rows, ORDERS, 0, 2500))
        for number, each in enumerate(found):
            rest = list(read_slices(journal.read, rows, ORDERS, each.last_ordinal, 2500))
            assert whole(found[: number + 1]) + whole(rest) == everything, f"seed {seed}"


def test_a_delayed_batch_is_never_cut() -> None:
    """Its dues stand before its records: a part of it would have none."""
    journal, rows, everything = made(8, 10, 3000, 1000)
    for place, each in journal.contents.items():
        log_id = ARRIVALS_KEY if each.log_id == ORDERS else each.log_id
        journal.contents[place] = each._replace(log_id=log_id)
    for found in (
        list(read_slices(journal.read, rows, ARRIVALS_KEY, 0, 500)),
        slice_cached(batches_of(journal), rows, ARRIVALS_KEY, 0, 500),
    ):
        assert whole(found) == everything
        assert [each.batch_indexes for each in found] == [[index] for index in rows[3::ROW_WORDS]]


def test_only_what_is_needed_is_read() -> None:
    journal, rows, _ = made(3, 20, 100, 1000)
    middle = rows[5 * ROW_WORDS + 1]
    list(read_slices(journal.read, rows, ORDERS, middle - 1))
    assert journal.reads == list(rows[5 * ROW_WORDS :: ROW_WORDS])


def test_the_first_row_after_a_number() -> None:
    rows = array("Q", (100, 1, 3 << SIZE_BITS, 0, 200, 8, 2 << SIZE_BITS, 1))
    found = [first_row(rows, after) for after in range(12)]
    assert found == [0, 0, 0, 4, 4, 4, 4, 4, 4, 8, 8, 8]
    assert first_row(array("Q"), 5) == 0


@pytest.mark.parametrize("wrong", ["log", "count", "size"])
def test_an_entry_that_is_not_the_batch_is_damage(wrong: str) -> None:
    journal, rows, _ = made(4, 3, 100, 1000)
    place = rows[0]
    found = journal.contents[place]
    changed = {
        "log": found._replace(log_id=77),
        "count": found._replace(count=found.count + 1),
        "size": found._replace(data=found.data[:-1]),
    }
    journal.contents[place] = changed[wrong]
    with pytest.raises(Corrupt, match="not the batch"):
        list(read_slices(journal.read, rows, ORDERS, 0))


@pytest.mark.parametrize("which", ["first", "middle", "last", "all"])
def test_what_a_repair_gave_up_is_left_out_and_the_position_goes_on(which: str) -> None:
    """Else the decision would wait for it without end."""
    journal, rows, _ = made(7, 12, 100, 1000)
    places = list(rows[::ROW_WORDS])
    lost = {"first": places[:1], "middle": places[2:4], "last": places[-1:], "all": places}[which]
    left = b"".join(bytes(journal.contents[place].data) for place in places if place not in lost)

    def read(place: int, size: int) -> JournalEntry:
        if place in lost:
            raise Lost("a file", 0, 1, "a repair has closed the gap")
        return journal.read(place, size)

    for slice_bytes in (200, SLICE_BYTES):
        found = list(read_slices(read, rows, ORDERS, 0, slice_bytes))
        assert whole(found) == left
        assert found[-1].last_ordinal == numbers(rows)[-1], "a partition then has all that there is"
        assert [each.last_ordinal for each in found] == sorted({each.last_ordinal for each in found})
        middle = found[len(found) // 2].last_ordinal
        assert whole(list(read_slices(read, rows, ORDERS, middle, slice_bytes))) == whole(
            [each for each in found if each.last_ordinal > middle]
        )
    assert read_slices_nowait(read, rows, ORDERS, 0) is None


def test_what_is_little_and_in_the_cache_comes_at_once() -> None:
    journal, rows, everything = made(5, 10, 100, 1000)
    found = read_slices_nowait(journal.read, rows, ORDERS, 0)
    assert found is not None and whole(found) == everything
    assert read_slices_nowait(lambda place, size: None, rows, ORDERS, 0) is None
    large, many, _ = made(6, 40, 60_000, 65_536)
    assert sum(both & 0xFFFFFFFF for both in many[2::ROW_WORDS]) > SLICE_BYTES
    assert read_slices_nowait(large.read, many, ORDERS, 0) is None
    assert large.reads == [], "what is too much is not even read"
    last = numbers(many)[-1]
    assert read_slices_nowait(large.read, many, ORDERS, last) == []


# With the journal


def test_a_small_whole_transaction_is_not_read_again() -> None:
    store = Store()
    transaction = store.transact([b"one", b"two"])
    assert transaction.decision is not None
    store.journal.read_cached = store.journal.read = None  # type: ignore[method-assign, assignment]
    found = store.store.read_slices_nowait(transaction.decision, ORDERS)
    assert found is not None and [each.last_ordinal for each in found] == [2]
    rest = store.store.read_slices_nowait(transaction.decision, ORDERS, 1)
    assert rest is not None and whole(rest) == whole(found)[23:]


def test_a_large_one_is_read_in_slices_and_verified() -> None:
    store = Store()
    transaction = store.begin("x")
    for _ in range(40):
        store.send(transaction, [bytes(50_000)] * 2)
    store.commit(transaction)
    decision = transaction.decision
    assert decision is not None and store.store.read_slices_nowait(decision, ORDERS) is None
    found = store.slices(decision)
    check(found, SLICE_BYTES)
    assert len(found) == 4 and found[-1].last_ordinal == 80
    assert sum(each.size_bytes for each in found) == transaction.size_bytes


def test_a_bit_that_turned_in_the_journal_is_found_before_it_reaches_a_partition() -> None:
    store = Store()
    transaction = store.prepared("x", [b"precious"])
    (place,) = transaction.batch_lsns()
    life = store.killed()
    file = life.disk.open_write(f"{FOLDER}/{journal_name(1)}")
    at = file.pread(1 << 16, 0).find(b"precious")
    file.pwritev([b"P"], at)
    found = life.store.by_xid["x"]
    life.commit(found)
    assert next(found.batch_lsns()) == place
    with pytest.raises(Corrupt):
        life.slices(found.decision)
