"""What is asked and answered are plain tuples; turns are ordered as messages fire."""

from tfmq.delay.requests import MessageState, Turn


def test_turns_are_in_the_order_in_which_messages_fire() -> None:
    assert sorted([Turn(2, 1), Turn(1, 9), Turn(1, 2)]) == [Turn(1, 2), Turn(1, 9), Turn(2, 1)]
    assert Turn(5, 6) == (5, 6), "as a source's position"


def test_what_is_not_said_has_a_default() -> None:
    assert MessageState("unknown", Turn(1, 1)).pending is None
