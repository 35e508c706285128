"""The wheel by the rows of its table, and against a sorted list."""

from __future__ import annotations

import random
from array import array

import pytest

from tests.scale import scaled
from tfmq.delay import timing_wheel as wheels
from tfmq.delay.timing_wheel import (
    DUE_RANGE,
    DUE_SHIFT,
    TAG_MASK,
    TARGET_SHIFT,
    TARGETS_MAX,
    HashedTimingWheel,
    WheelSlot,
)

TICK = 10
SLOTS = 8


def make_tag(target: int, absolute: bool) -> int:
    return target << TARGET_SHIFT | absolute


def turns(wheel: HashedTimingWheel, now_ms: int, rows_max: int = wheels.ROWS_MAX) -> list[tuple[int, int]]:
    found = wheel.pop(now_ms, rows_max)
    return list(zip(found.dues, found.numbers, strict=True))


def add(wheel: HashedTimingWheel, due: int, number: int, locator: int, target: int, absolute: bool = False) -> None:
    wheel.add_many([due], [number], [locator], [make_tag(target, absolute)])


def small(base_ms: int = 0) -> HashedTimingWheel:
    return HashedTimingWheel(TICK, SLOTS, base_ms)


def test_due_on_a_tick_comes_in_that_millisecond_and_not_before() -> None:
    wheel = small()
    add(wheel, 20, 1, 0, 0)
    assert turns(wheel, 19) == []
    assert turns(wheel, 20) == [(20, 1)]
    assert wheel.count == 0


def test_first_and_last_millisecond_of_a_slot() -> None:
    wheel = small()
    add(wheel, 39, 2, 0, 0)
    add(wheel, 30, 1, 0, 0)
    assert turns(wheel, 29) == []
    assert turns(wheel, 30) == [(30, 1)]
    assert turns(wheel, 38) == []
    assert turns(wheel, 39) == [(39, 2)]


def test_more_ticks_away_than_there_are_slots_comes_in_a_later_round() -> None:
    wheel = small()
    for round in (3, 1, 0, 2):
        add(wheel, 25 + round * TICK * SLOTS, round, 0, 0)
    for round in range(4):
        due = 25 + round * TICK * SLOTS
        assert turns(wheel, due - 1) == []
        assert turns(wheel, due) == [(due, round)]


def test_the_ring_wraps_between_two_pops() -> None:
    wheel = small()
    dues = [5, 75, 79, 80, 81, 155, 160, 400]
    for number, due in enumerate(dues):
        add(wheel, due, number, 0, 0)
    assert turns(wheel, 3) == []
    assert turns(wheel, 399) == [(due, number) for number, due in enumerate(dues[:-1])]
    assert turns(wheel, 10_000) == [(400, 7)]
    assert turns(wheel, 20_000) == []


def test_due_before_the_last_pop_comes_with_the_next_one() -> None:
    wheel = small()
    assert turns(wheel, 1000) == []
    add(wheel, 1, 9, 0, 0)
    wheel.add_many(array("Q", [999, 1]), array("Q", [10, 8]), array("Q", [0, 0]), array("Q", [0, 0]))
    add(wheel, 1001, 11, 0, 0)
    assert wheel.next_due == 1
    assert turns(wheel, 1000) == [(1, 8), (1, 9), (999, 10)]
    assert turns(wheel, 1001) == [(1001, 11)]


def test_same_due_comes_in_the_order_of_the_numbers() -> None:
    wheel = small()
    numbers = list(range(1000))
    random.Random(7).shuffle(numbers)
    for number in numbers:
        add(wheel, 44, number, number * 3, number % 5)
    found = wheel.pop(44)
    assert list(found.numbers) == list(range(1000))
    assert list(found.locators) == [number * 3 for number in range(1000)]
    assert list(found.tags) == [make_tag(number % 5, False) for number in range(1000)]


def test_cancelled_before_it_came_never_comes() -> None:
    wheel = small()
    add(wheel, 20, 1, 0, 0)
    add(wheel, 20, 2, 0, 0)
    assert wheel.cancel(20, 1)
    assert wheel.count == 1
    assert turns(wheel, 20) == [(20, 2)]
    assert (wheel.count, wheel.row_count) == (0, 0)


def test_cancelled_after_it_came_changes_nothing() -> None:
    wheel = small()
    add(wheel, 20, 1, 0, 0)
    assert turns(wheel, 20) == [(20, 1)]
    assert not wheel.cancel(20, 1)
    add(wheel, 21, 1, 0, 0)
    assert turns(wheel, 21) == [(21, 1)]


def test_cancelled_twice_is_false_the_second_time() -> None:
    wheel = small()
    add(wheel, 20, 1, 0, 0)
    assert [wheel.cancel(20, 1), wheel.cancel(20, 1)] == [True, False]
    assert wheel.count == 0
    assert turns(wheel, 20) == []


def test_a_late_one_can_be_cancelled_until_it_came() -> None:
    wheel = small()
    turns(wheel, 100)
    add(wheel, 50, 1, 0, 0)
    add(wheel, 50, 2, 0, 0)
    assert wheel.cancel(50, 1)
    assert turns(wheel, 100) == [(50, 2)]
    assert not wheel.cancel(50, 2)


def test_dropped_from_a_due_on_never_comes_unless_it_is_added_again() -> None:
    wheel = small()
    for number, due in enumerate((20, 49, 50, 51, 500)):
        add(wheel, due, number, 100 + number, 0)
    wheel.cancel(51, 3)
    wheel.cancel(20, 0)
    assert sorted(wheel.drop_from(50)) == [102, 103, 104], "rows: cancelled ones too"
    assert wheel.count == 1
    add(wheel, 51, 3, 0, 0)
    assert turns(wheel, 1000) == [(49, 1), (51, 3)]


def test_every_column_comes_back() -> None:
    wheel = small(base_ms=1_000_000)
    add(wheel, 1_000_005, 7, (1 << 64) - 1, TARGETS_MAX - 1, True)
    add(wheel, 1_000_000 + DUE_RANGE - 1, (1 << 63) - 1, 0, 0)
    found = wheel.pop(1_000_005)
    assert [list(column) for column in found] == [[1_000_005], [7], [(1 << 64) - 1], [make_tag(TARGETS_MAX - 1, True)]]
    assert wheel.next_due == 1_000_000 + DUE_RANGE - 1


@pytest.mark.parametrize("due", [999, 1000 + DUE_RANGE])
def test_a_due_that_its_base_does_not_allow_is_refused_and_nothing_added(due: int) -> None:
    wheel = small(base_ms=1000)
    with pytest.raises(ValueError):
        add(wheel, due, 1, 0, 0)
    with pytest.raises(ValueError):
        wheel.add_many([1000, due], [1, 2], [0, 0], [0, 0])
    assert (wheel.row_count, wheel.next_due) == (0, None)


def test_only_an_empty_wheel_takes_another_base() -> None:
    wheel = small(base_ms=1000)
    add(wheel, 1000, 1, 0, 0)
    with pytest.raises(ValueError):
        wheel.rebase(0)
    turns(wheel, 5000)
    wheel.rebase(20)
    add(wheel, 21, 2, 0, 0)
    assert turns(wheel, 21) == [(21, 2)]


def test_many_rows_come_in_parts_and_go_on_from_there() -> None:
    wheel = small()
    for number in range(100):
        add(wheel, number, number, 0, 0)
    assert turns(wheel, 1000, 15) == [(due, due) for due in range(15)]
    assert (wheel.next_due, wheel.count) == (15, 85)
    assert [wheel.cancel(14, 14), wheel.cancel(15, 15), wheel.cancel(15, 15)] == [False, True, False]
    assert turns(wheel, 1000, 1) == [(16, 16)]
    add(wheel, 3, 200, 0, 0)
    assert turns(wheel, 1000, 3) == [(3, 200), (17, 17), (18, 18)]
    assert list(wheel.drop_from(90)) == [0] * 10
    assert turns(wheel, 35) == [(due, due) for due in range(19, 36)]
    assert len(turns(wheel, 1000)) == 54
    assert (wheel.count, wheel.row_count, wheel.next_due) == (0, 0, None)


def test_what_is_dropped_later_does_not_move_the_front() -> None:
    wheel = small()
    for number in range(10):
        add(wheel, 5, number, number, 0)
    add(wheel, 500, 10, 10, 0)
    assert len(turns(wheel, 100, 4)) == 4
    assert wheel.first_unpopped == (5, 4)
    assert wheel.cancel(5, 7)
    assert list(wheel.drop_from(300)) == [10]
    assert (wheel.first_unpopped, wheel.count, wheel.row_count) == ((5, 4), 5, 6)
    assert turns(wheel, 100) == [(5, number) for number in (4, 5, 6, 8, 9)]
    assert (wheel.first_unpopped, wheel.count, wheel.row_count) == ((101, 0), 0, 0)


def test_rows_of_cancelled_messages_go_when_they_are_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "CANCELLED_ROWS_MIN", 10)
    wheel = small()
    for number in range(100):
        add(wheel, 500 + number, number, 0, 0)
    for number in range(60):
        assert wheel.cancel(500 + number, number)
    assert wheel.count == 40
    assert wheel.row_count < 60
    assert turns(wheel, 1000) == [(500 + number, number) for number in range(60, 100)]


def test_it_returns_how_full_it_is() -> None:
    wheel = small()
    for number in range(5):
        add(wheel, 3, number, 0, 0)
    add(wheel, 50, 9, 0, 0)
    wheel.cancel(50, 9)
    assert wheel.occupancy() == {"slots": 8, "slots_used": 2, "slot_rows_max": 5, "rows": 6, "cancelled": 1}


@pytest.mark.parametrize("seed", range(scaled(200)))
def test_it_does_what_a_sorted_list_does(seed: int) -> None:
    dice = random.Random(seed)
    wheel = HashedTimingWheel(dice.choice([1, 3, 10]), dice.choice([1, 2, 7, 64]), base_ms=50)
    model: dict[int, int] = {}
    now, number = 49, 0
    for _ in range(300):
        step = dice.random()
        if step < 0.5:
            count = dice.choice([1, 1, 5, 30])
            spread = dice.choice([1, 20, 500])
            dues = [max(50, now - 20) + dice.randrange(spread) for _ in range(count)]
            numbers = list(range(number, number + count))
            dice.shuffle(numbers)
            number += count
            model |= dict(zip(numbers, dues, strict=True))
            if count == 1:
                add(wheel, dues[0], numbers[0], 0, 0)
            else:
                wheel.add_many(dues, numbers, [0] * count, [0] * count)
        elif step < 0.7 and number:
            which = dice.randrange(number)
            due = model.pop(which, None)
            if due is not None:
                assert wheel.cancel(due, which)
        elif step < 0.73:
            end = now + dice.randrange(100)
            wheel.drop_from(max(50, end))
            model = {each: due for each, due in model.items() if due < max(50, end)}
        else:
            now += dice.choice([0, 1, 5, 40, 1000])
            expected = sorted((due, each) for each, due in model.items() if due <= now)
            if dice.random() < 0.3:
                expected = expected[: dice.randrange(1, 8)]
                found = turns(wheel, now, max(1, len(expected)))
            else:
                found = turns(wheel, now)
            assert found == expected, f"seed {seed}"
            for _, each in found:
                del model[each]
        assert wheel.count == len(model), f"seed {seed}"
        if model:
            assert wheel.next_due is not None and wheel.next_due <= min(model.values()), f"seed {seed}"


# The lists of the wheel.


def test_a_tag_is_a_target_and_a_bit() -> None:
    assert [make_tag(0, False), make_tag(0, True), make_tag(5, False)] == [0, 1, 10]
    assert make_tag(TARGETS_MAX - 1, True) == TAG_MASK


def test_rows_are_picked_in_any_order_and_kept() -> None:
    slot = WheelSlot()
    for number in range(5):
        slot.numbers.append(number)
        slot.locators.append(number * 2)
        slot.packed.append((10 - number) << DUE_SHIFT)
    part = slot.select([3, 1])
    assert (list(part.numbers), list(part.locators)) == ([3, 1], [6, 2])
    slot.retain([0, 2])
    assert (list(slot.numbers), slot.due_min) == ([0, 2], 8)
