"""Which rows may fire now."""

from array import array
from types import SimpleNamespace
from typing import Any

from tfmq.delay.arrivals.state import CancelledMessages
from tfmq.delay.requests import Turn
from tfmq.delay.rows import RowColumns
from tfmq.delay.target_queue import fireable_rows


def part(*dues: int, flags: bytes | None = None) -> RowColumns:
    numbers = array("Q", range(len(dues)))
    return RowColumns(array("Q", dues), numbers, array("Q", numbers), bytearray(flags or bytes(len(dues))))


def lines(blocked: tuple[Turn, ...] = (), cancelled: tuple[Turn, ...] = (), early: dict[int, int] | None = None) -> Any:
    known = CancelledMessages()
    for turn in cancelled:
        known.add(*turn)
    time = SimpleNamespace(is_steady=early is None, early_ms=lambda due, number: (early or {}).get(number, 0))
    return SimpleNamespace(locked=set(blocked), cancelled=known, broker_clock=time)


def numbers(found: RowColumns) -> list[int]:
    return list(found.numbers)


def test_all_where_nothing_is_in_the_way() -> None:
    assert numbers(fireable_rows(part(1, 2, 3), lines()).rows) == [0, 1, 2]


def test_up_to_one_that_is_blocked_and_none_if_it_leads() -> None:
    assert numbers(fireable_rows(part(1, 2, 3), lines(blocked=(Turn(2, 1),))).rows) == [0]
    found = fireable_rows(part(1, 2, 3), lines(blocked=(Turn(1, 0),), cancelled=(Turn(1, 0),)))
    assert (numbers(found.rows), found.cancelled) == ([], 0), "a cancel that is not sure takes nothing out"


def test_cancelled_ones_are_taken_out_when_they_lead() -> None:
    assert fireable_rows(part(1, 2, 3), lines(cancelled=(Turn(1, 0), Turn(2, 1)))).cancelled == 2
    assert fireable_rows(part(1, 2), lines(cancelled=(Turn(1, 0), Turn(2, 1)))).cancelled == 2
    found = fireable_rows(part(1, 2, 3), lines(cancelled=(Turn(2, 1),)))
    assert (numbers(found.rows), found.cancelled) == ([0], 0)


def test_early_ones_are_named_when_they_lead() -> None:
    early = {0: 70, 2: 90}
    found = fireable_rows(part(1, 2, 3, flags=b"\x01\x01\x01"), lines(early=early))
    assert (numbers(found.early), list(found.early_ms)) == ([0, 2], [70, 90])
    found = fireable_rows(part(1, 2, 3, flags=b"\x00\x01\x01"), lines(early=early))
    assert (numbers(found.rows), numbers(found.early)) == ([0, 1], [])
    assert numbers(fireable_rows(part(1, flags=b"\x01"), lines(early={})).rows) == [0]
