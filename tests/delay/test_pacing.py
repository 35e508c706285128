"""How much is brought at once."""

from tfmq.delay.flow_control import IN_FLIGHT_BYTES_MAX, TURN_BYTES_MAX, TURN_ROWS_MAX, FlowControl


def test_only_a_window_of_bytes_is_not_forced_and_a_larger_slice_goes_alone() -> None:
    pacing = FlowControl()
    assert pacing.may_write(10 * IN_FLIGHT_BYTES_MAX)
    pacing.reserve(IN_FLIGHT_BYTES_MAX // 2)
    assert pacing.may_write(IN_FLIGHT_BYTES_MAX // 2)
    assert not pacing.may_write(IN_FLIGHT_BYTES_MAX // 2 + 1)


def test_who_waits_for_room_asks_again_when_there_is_some() -> None:
    pacing = FlowControl()
    pacing.reserve(IN_FLIGHT_BYTES_MAX)
    asked: list[int] = []
    pacing.wait_for_room(100, lambda: asked.append(1))
    pacing.wait_for_room(100, lambda: asked.append(2))
    pacing.release(IN_FLIGHT_BYTES_MAX)
    assert asked == [1, 2]
    pacing.release(0)
    assert asked == [1, 2]


def test_a_turn_has_its_rows_and_bytes() -> None:
    pacing = FlowControl()
    pacing.count_written(TURN_ROWS_MAX - 5, 100)
    assert pacing.rows_left == 5
    pacing.count_written(1, TURN_BYTES_MAX)
    assert pacing.rows_left == 0
    pacing.start_turn()
    assert pacing.rows_left == TURN_ROWS_MAX


def test_who_waits_goes_in_order_and_only_as_far_as_there_is_room() -> None:
    """Not all are asked each time: ten thousand lines that wait would be asked ten thousand times."""
    pacing, went = FlowControl(), []
    third = IN_FLIGHT_BYTES_MAX // 3

    def go(n: int) -> None:
        assert pacing.may_write(third)
        pacing.reserve(third)
        went.append(n)

    pacing.reserve(IN_FLIGHT_BYTES_MAX)
    for n in range(9):
        pacing.wait_for_room(third, lambda n=n: go(n))  # type: ignore[misc]
    assert not pacing.may_write(0), "nobody passes who waits"
    pacing.release(IN_FLIGHT_BYTES_MAX)
    assert went == [0, 1, 2]
    pacing.release(third)
    assert went == [0, 1, 2, 3]


def test_a_large_one_is_not_passed_by_small_ones_for_ever() -> None:
    pacing, went = FlowControl(), []
    pacing.reserve(1000)
    pacing.wait_for_room(2 * IN_FLIGHT_BYTES_MAX, lambda: went.append("large"))
    pacing.wait_for_room(10, lambda: went.append("small"))
    pacing.release(500)
    assert went == [] and not pacing.may_write(10)
    pacing.release(500)
    assert went == ["large", "small"]


def test_what_is_given_back_while_others_go_is_theirs_too() -> None:
    pacing, went = FlowControl(), []
    pacing.reserve(IN_FLIGHT_BYTES_MAX)

    def fails() -> None:
        pacing.reserve(IN_FLIGHT_BYTES_MAX)
        went.append("fails")
        pacing.release(IN_FLIGHT_BYTES_MAX)

    pacing.wait_for_room(IN_FLIGHT_BYTES_MAX, fails)
    pacing.wait_for_room(IN_FLIGHT_BYTES_MAX, lambda: went.append("goes"))
    pacing.release(IN_FLIGHT_BYTES_MAX)
    assert went == ["fails", "goes"] and pacing.may_write(IN_FLIGHT_BYTES_MAX)
