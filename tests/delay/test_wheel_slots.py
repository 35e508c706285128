"""The lists of the wheel."""

from tfmq.delay.timing_wheel import DUE_SHIFT, TAG_MASK, TARGETS_MAX, WheelSlot, make_tag


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
