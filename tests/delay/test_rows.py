"""Columns that are filled at the end and emptied at the front."""

from __future__ import annotations

from array import array

import pytest

from journal.record.block_trailer import BlockTrailer, encode_trailer
from journal.record.format import ATTRIBUTE_SIZE, BadRecord, make_id, make_log_id, make_record
from tfmq.delay import rows
from tfmq.delay import rows as columns
from tfmq.delay.requests import Turn
from tfmq.delay.rows import RowColumns, RowQueue, TargetIds, attribute_of, join_records


def part(turns: list[tuple[int, int]]) -> RowColumns:
    dues, numbers = array("Q", [due for due, _ in turns]), array("Q", [number for _, number in turns])
    return RowColumns(dues, numbers, array("Q", [number * 10 for number in numbers]), bytearray(len(turns)))


def turns(found: RowColumns) -> list[tuple[int, int]]:
    return list(zip(found.dues, found.numbers, strict=True))


@pytest.mark.parametrize("shift_min", [0, 4096])
def test_what_comes_last_leaves_first(shift_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "COMPACT_ROWS_MIN", shift_min)
    rows = RowQueue()
    expected = [(number // 3, number) for number in range(100)]
    rows.append(part(expected[:60]))
    rows.drop_head(25)
    rows.append(part(expected[60:]))
    rows.drop_head(30)
    assert len(rows) == 45
    assert (rows.first_turn(), rows.head(99).turn(-1)) == (Turn(18, 55), Turn(33, 99))
    assert turns(rows.head(1000)) == expected[55:]
    head = rows.head(2)
    assert (turns(head), list(head.locators)) == ([(18, 55), (18, 56)], [550, 560])
    rows.drop_head(45)
    assert (len(rows), turns(rows.head(5))) == (0, [])
    with pytest.raises(IndexError):
        rows.first_turn()


def test_turns_are_dropped_up_to_one_that_need_not_be_there() -> None:
    rows = RowQueue()
    rows.append(part([(5, 1), (5, 4), (5, 9), (7, 2), (8, 3)]))
    assert rows.drop_through(Turn(4, 100)) == 0
    assert rows.drop_through(Turn(5, 4)) == 2
    assert rows.drop_through(Turn(6, 0)) == 1
    assert rows.first_turn() == Turn(7, 2)
    assert rows.drop_through(Turn(1 << 60, 0)) == 2


def test_a_part_is_cut() -> None:
    whole = part([(1, 1), (2, 2), (3, 3)])
    assert turns(whole.head(2)) == [(1, 1), (2, 2)]
    assert whole.head(3) is whole
    assert whole.turn(1) == Turn(2, 2)


# What one effect brings.

KEY = make_log_id(16, 0)


def record(number: int, size: int = 50, payload: bytes | None = None) -> bytes:
    return make_record(payload if payload is not None else b"%d" % number + b"." * size, make_id(1000, number))


def test_records_become_one_batch_cut_into_blocks() -> None:
    records = [record(n, 1000) for n in range(200)]
    piece = join_records(records, KEY, 1 << 20)
    (batch,) = piece.batches
    assert (batch.data, batch.count, piece.rows, piece.damaged) == (b"".join(records), 200, 200, 0)
    assert sum(size for size, _, _ in batch.blocks) == piece.size_bytes == len(batch.data)
    assert max(size for size, _, _ in batch.blocks) <= 64 << 10
    assert (batch.producer_id, batch.sequence) == (1000, 0)


def test_no_more_than_fits_but_at_least_one() -> None:
    records = [record(n, 1000) for n in range(10)]
    assert join_records(records, KEY, 3000).rows == 2
    assert join_records(records, KEY, 10).rows == 1
    assert join_records([None, None, *records], KEY, 10).rows == 3


def test_damaged_ones_are_left_out_and_counted() -> None:
    records = [record(0), None, record(2), None]
    piece = join_records(records, KEY, 1 << 20)
    assert (piece.rows, piece.damaged, piece.batches[0].count) == (4, 2, 2)
    assert join_records([None], KEY, 100) == ((), 1, 0, 1)


def test_it_ends_where_two_records_would_look_like_a_block_trailer() -> None:
    header = encode_trailer(KEY, BlockTrailer(1, 100, 0, 0, 0, 0, 0, 0))[:20]
    records = [record(0), record(1, payload=b"a" + header[:16]), record(2, payload=b"x" * 0x40), record(3)]
    assert join_records(records, KEY, 1 << 20).rows == 2
    assert join_records(records[2:], KEY, 1 << 20).rows == 2
    assert join_records(records, make_log_id(17, 0), 1 << 20).rows == 4


def test_the_attribute_of_a_record() -> None:
    assert attribute_of(make_record(b"payload", 1, 0, b"attribute")) == b"attribute"
    assert attribute_of(make_record(b"payload", 1)) is None
    broken = bytearray(make_record(b"payload", 1, 0, b"attribute"))
    broken[20:24] = ATTRIBUTE_SIZE.pack(1000)
    with pytest.raises(BadRecord):
        attribute_of(bytes(broken))


# Short numbers for logs.


def test_a_log_keeps_its_number_and_its_name() -> None:
    known = TargetIds()
    assert [known.id_of(key, f"t{key}") for key in (70, 80, 70)] == [0, 1, 0]
    assert (known.target_of(1).log_id, known.target_of(1).topic) == (80, "t80")
    assert len(known) == 2


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TARGETS_MAX", 1)
    known = TargetIds()
    known.id_of(1, "a")
    with pytest.raises(OverflowError):
        known.id_of(2, "b")
    known.clear()
    assert known.id_of(2, "b") == 0
