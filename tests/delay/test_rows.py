"""Columns that are filled behind and emptied in front."""

from array import array

import pytest

from tfmq.delay import rows as columns
from tfmq.delay.requests import Turn
from tfmq.delay.rows import Part, Rows, no_part


def part(turns: list[tuple[int, int]]) -> Part:
    dues, numbers = array("Q", [due for due, _ in turns]), array("Q", [number for _, number in turns])
    return Part(dues, numbers, array("Q", [number * 10 for number in numbers]), bytearray(len(turns)))


def turns(found: Part) -> list[tuple[int, int]]:
    return list(zip(found.dues, found.numbers, strict=True))


@pytest.mark.parametrize("shift_min", [0, 4096])
def test_what_comes_behind_leaves_in_front(shift_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "SHIFT_MIN", shift_min)
    rows = Rows()
    expected = [(number // 3, number) for number in range(100)]
    rows.add(part(expected[:60]))
    rows.drop(25)
    rows.add(part(expected[60:]))
    rows.drop(30)
    assert len(rows) == 45
    assert (rows.first(), rows.last()) == (Turn(18, 55), Turn(33, 99))
    assert turns(rows.head(1000)) == expected[55:]
    head = rows.head(2)
    assert (turns(head), list(head.locators)) == ([(18, 55), (18, 56)], [550, 560])
    rows.drop(45)
    assert (len(rows), turns(rows.head(5))) == (0, [])
    with pytest.raises(IndexError):
        rows.first()


def test_turns_are_dropped_up_to_one_that_need_not_be_there() -> None:
    rows = Rows()
    rows.add(part([(5, 1), (5, 4), (5, 9), (7, 2), (8, 3)]))
    assert rows.drop_through(Turn(4, 100)) == 0
    assert rows.drop_through(Turn(5, 4)) == 2
    assert rows.drop_through(Turn(6, 0)) == 1
    assert rows.first() == Turn(7, 2)
    assert rows.drop_through(Turn(1 << 60, 0)) == 2


def test_a_part_is_cut() -> None:
    whole = part([(1, 1), (2, 2), (3, 3)])
    assert turns(whole.cut(2)) == [(1, 1), (2, 2)]
    assert whole.cut(3) is whole
    assert len(no_part().numbers) == 0
    assert whole.turn(1) == Turn(2, 2)
