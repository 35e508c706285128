"""Pending messages from buckets and arrivals, as columns."""

from array import array

import pytest

from tests.delay.rig import BILLS, ORDERS, START_MS, Handle, Rig
from tfmq.delay.buckets.loader import LoadRange, merge_rows
from tfmq.delay.requests import Turn
from tfmq.delay.timing_wheel import ABSOLUTE, TARGET_SHIFT, WheelRows


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.send([b"a%d" % n for n in range(10)], [100_000 * n + 500_000 for n in range(10)])
    rig.send([b"b%d" % n for n in range(10)], [100_000 * n + 500_000 for n in range(10)], key=BILLS)
    rig.advance(70)
    rig.send([b"c"], 900_000)
    rig.send([b"d"], at=[rig.clock.wall_ms() + 900_000])
    rig.turn()
    rig.landing.log.force()
    return rig


def whole(rig: Rig, low: int = 0, high: int = 1 << 62) -> LoadRange:
    return LoadRange(low, high, rig.buckets.live_buckets, rig.buckets.spilled_offset, rig.landing.log.end_offset)


def numbers(found: list[WheelRows]) -> list[int]:
    return sorted(number for near in found for number in near.numbers)


def test_everything_that_is_pending_in_the_area(rig: Rig) -> None:
    gatherer, pending = rig.queue._loader, rig.queue._pending_snapshot()
    everything = gatherer.load(whole(rig), pending)
    assert len(numbers(everything)) == 22
    dues = sorted(due for near in everything for due in near.dues)
    middle = dues[8]
    below = gatherer.load(whole(rig, 0, middle), pending)
    above = gatherer.load(whole(rig, middle), pending)
    assert numbers(below + above) == numbers(everything)
    assert all(due < middle for near in below for due in near.dues)


def test_only_some_logs(rig: Rig) -> None:
    gatherer, pending = rig.queue._loader, rig.queue._pending_snapshot()
    found = gatherer.load(whole(rig), pending, BILLS.__eq__)
    assert len(numbers(found)) == 10
    targets = {tag >> TARGET_SHIFT for near in found for tag in near.tags}
    assert [rig.queue._target_queues._targets.target_of(number).log_id for number in targets] == [BILLS]


def test_not_what_is_cancelled_and_it_is_known_who_named_a_time(rig: Rig) -> None:
    row = rig.listed(first=rig.now_ms + 500_000).rows[0]
    rig.cancel(Handle(row.key, row.due, row.number, b""))
    found = rig.queue._loader.load(whole(rig), rig.queue._pending_snapshot())
    assert len(numbers(found)) == 21
    assert row.number not in numbers(found)
    assert sum(tag & ABSOLUTE for near in found for tag in near.tags) == 1


def test_a_start_also_learns_the_lowest_due_of_what_is_not_pending() -> None:
    rig = Rig()
    a, b = rig.send([b"a", b"b"], [30_000, 60_000])
    rig.cancel(a)
    log = rig.landing.log
    found = rig.queue._loader.recover(0, log.end_offset, rig.queue._pending_snapshot())
    assert (numbers(found.wheel_rows), found.due_low) == ([b.number], a.due)


def test_a_start_restores_the_times_that_were_reported() -> None:
    """The same in a row is one, delays count for nothing."""
    rig = Rig()
    rig.send([b"a", b"b"], at=[START_MS + 60_000] * 2)
    rig.clock.jump_wall(3600)
    first = rig.send([b"c", b"d"], at=[START_MS + 3_700_000] * 2)
    rig.send([b"e"], 5)
    last = rig.send([b"f"], at=[START_MS + 3_700_000])
    log = rig.landing.log
    log.force()
    found = rig.queue._loader.recover(0, log.end_offset, rig.queue._pending_snapshot())
    count = last[0].number + 1 - first[0].number
    assert found.ahead_steps[0][2] == 0 and found.ahead_steps[1:] == [(first[0].number, count, -3_600_000)]


def test_in_order_from_a_turn_to_a_turn_and_no_more_than_asked() -> None:
    near = WheelRows(
        array("Q", [5, 3, 5, 9]), array("Q", [7, 8, 6, 1]), array("Q", [70, 80, 60, 10]), array("Q", [0, 1, 0, 0])
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
