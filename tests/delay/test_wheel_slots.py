"""The lists of the wheel."""

from tfmq.delay.timing_wheel import DUE_SHIFT, TAG_MASK, TARGETS_MAX, Slot, tag


def test_a_tag_is_a_target_and_a_bit() -> None:
    assert [tag(0, False), tag(0, True), tag(5, False)] == [0, 1, 10]
    assert tag(TARGETS_MAX - 1, True) == TAG_MASK


def test_rows_are_picked_in_any_order_and_kept() -> None:
    slot = Slot()
    for number in range(5):
        slot.numbers.append(number)
        slot.locators.append(number * 2)
        slot.packed.append((10 - number) << DUE_SHIFT)
    part = slot.part([3, 1])
    assert (list(part.numbers), list(part.locators)) == ([3, 1], [6, 2])
    slot.keep([0, 2])
    assert (list(slot.numbers), slot.due_min) == ([0, 2], 8)
