"""Pending messages from buckets and arrivals, as columns."""

from array import array

import pytest

from tests.delay.desk import BILLS, ORDERS, START_MS, Desk, Handle
from tfmq.delay.arrivals.log import WheelRows
from tfmq.delay.buckets.loader import LoadRange, merge_rows
from tfmq.delay.requests import Turn
from tfmq.delay.timing_wheel import ABSOLUTE, TARGET_SHIFT


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.send([b"a%d" % n for n in range(10)], [100_000 * n + 500_000 for n in range(10)])
    desk.send([b"b%d" % n for n in range(10)], [100_000 * n + 500_000 for n in range(10)], key=BILLS)
    desk.advance(70)
    desk.send([b"c"], 900_000)
    desk.send([b"d"], at=[desk.clock.wall_ms() + 900_000])
    desk.turn()
    desk.landing.log.force()
    return desk


def whole(desk: Desk, low: int = 0, high: int = 1 << 62) -> LoadRange:
    return LoadRange(
        low, high, desk.buckets.live_buckets, desk.buckets.spilled_offset, desk.landing.log.end_offset
    )


def numbers(found: list[WheelRows]) -> list[int]:
    return sorted(number for near in found for number in near.numbers)


def test_everything_that_is_pending_in_the_area(desk: Desk) -> None:
    gatherer, pending = desk.queue._loader, desk.queue._pending_snapshots.current()
    everything = gatherer.load(whole(desk), pending)
    assert len(numbers(everything)) == 22
    dues = sorted(due for near in everything for due in near.dues)
    middle = dues[8]
    below = gatherer.load(whole(desk, 0, middle), pending)
    above = gatherer.load(whole(desk, middle), pending)
    assert numbers(below + above) == numbers(everything)
    assert all(due < middle for near in below for due in near.dues)


def test_only_some_logs(desk: Desk) -> None:
    gatherer, pending = desk.queue._loader, desk.queue._pending_snapshots.current()
    found = gatherer.load(whole(desk), pending, (BILLS,))
    assert len(numbers(found)) == 10
    targets = {tag >> TARGET_SHIFT for near in found for tag in near.tags}
    assert [desk.queue._target_queues._targets.target_of(number).key for number in targets] == [BILLS]


def test_not_what_is_cancelled_and_it_is_known_who_named_a_time(desk: Desk) -> None:
    row = desk.listed(first=desk.now_ms + 500_000).rows[0]
    desk.cancel(Handle(row.key, row.due, row.number, b""))
    found = desk.queue._loader.load(whole(desk), desk.queue._pending_snapshots.current())
    assert len(numbers(found)) == 21
    assert row.number not in numbers(found)
    assert sum(tag & ABSOLUTE for near in found for tag in near.tags) == 1


def test_a_start_also_learns_the_lowest_due_of_what_is_not_pending() -> None:
    desk = Desk()
    a, b = desk.send([b"a", b"b"], [30_000, 60_000])
    desk.cancel(a)
    log = desk.landing.log
    found = desk.queue._loader.recover(0, log.end_offset, desk.queue._pending_snapshots.current())
    assert (numbers(found.wheel_rows), found.due_low) == ([b.number], a.due)


def test_a_start_restores_the_times_that_were_reported() -> None:
    """The same in a row is one, delays count for nothing."""
    desk = Desk()
    desk.send([b"a", b"b"], at=[START_MS + 60_000] * 2)
    desk.clock.jump_wall(3600)
    first = desk.send([b"c", b"d"], at=[START_MS + 3_700_000] * 2)
    desk.send([b"e"], 5)
    last = desk.send([b"f"], at=[START_MS + 3_700_000])
    log = desk.landing.log
    log.force()
    found = desk.queue._loader.recover(0, log.end_offset, desk.queue._pending_snapshots.current())
    count = last[0].number + 1 - first[0].number
    assert found.ahead_steps[0][2] == 0 and found.ahead_steps[1:] == [(first[0].number, count, -3_600_000)]


def test_in_order_from_a_turn_to_a_turn_and_no_more_than_asked() -> None:
    near = WheelRows(
        array("Q", [5, 3, 5, 9]),
        array("Q", [7, 8, 6, 1]),
        array("Q", [70, 80, 60, 10]),
        array("Q", [0, 1, 0, 0]),
    )
    part, more = merge_rows([near], Turn(0, 0), Turn(100, 0), 10)
    assert (list(part.numbers), list(part.locators), list(part.flags), more) == (
        [8, 6, 7, 1],
        [80, 60, 70, 10],
        [1, 0, 0, 0],
        None,
    )
    part, more = merge_rows([near, near], Turn(5, 6), Turn(9, 1), 3)
    assert (list(part.numbers), more) == ([6, 6, 7], Turn(5, 7))


def test_orders_and_bills_are_two_logs() -> None:
    assert ORDERS != BILLS
