"""Columns that are filled behind and emptied in front."""

from array import array

import pytest

from tfmq.delay import rows as columns
from tfmq.delay.requests import Turn
from tfmq.delay.rows import RowColumns, RowQueue, empty_row_columns


def part(turns: list[tuple[int, int]]) -> RowColumns:
    dues, numbers = array("Q", [due for due, _ in turns]), array("Q", [number for _, number in turns])
    return RowColumns(dues, numbers, array("Q", [number * 10 for number in numbers]), bytearray(len(turns)))


def turns(found: RowColumns) -> list[tuple[int, int]]:
    return list(zip(found.dues, found.numbers, strict=True))


@pytest.mark.parametrize("shift_min", [0, 4096])
def test_what_comes_behind_leaves_in_front(shift_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "COMPACT_ROWS_MIN", shift_min)
    rows = RowQueue()
    expected = [(number // 3, number) for number in range(100)]
    rows.append(part(expected[:60]))
    rows.drop_head(25)
    rows.append(part(expected[60:]))
    rows.drop_head(30)
    assert len(rows) == 45
    assert (rows.first_turn(), rows.last_turn()) == (Turn(18, 55), Turn(33, 99))
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
    assert len(empty_row_columns().numbers) == 0
    assert whole.turn(1) == Turn(2, 2)
