"""How much is brought at once."""

from tfmq.delay.flow_control import TURN_BYTES, TURN_ROWS, WINDOW_BYTES, Pacing


def test_only_a_window_of_bytes_is_not_forced_and_a_larger_slice_goes_alone() -> None:
    pacing = Pacing()
    assert pacing.fits(10 * WINDOW_BYTES)
    pacing.take(WINDOW_BYTES // 2)
    assert pacing.fits(WINDOW_BYTES // 2)
    assert not pacing.fits(WINDOW_BYTES // 2 + 1)


def test_who_waits_for_room_asks_again_when_there_is_some() -> None:
    pacing = Pacing()
    pacing.take(WINDOW_BYTES)
    asked: list[int] = []
    pacing.wait(100, lambda: asked.append(1))
    pacing.wait(100, lambda: asked.append(2))
    pacing.give(WINDOW_BYTES)
    assert asked == [1, 2]
    pacing.give(0)
    assert asked == [1, 2]


def test_a_turn_has_its_rows_and_bytes() -> None:
    pacing = Pacing()
    pacing.spend(TURN_ROWS - 5, 100)
    assert pacing.rows_left == 5
    pacing.spend(1, TURN_BYTES)
    assert pacing.rows_left == 0
    pacing.begin_turn()
    assert pacing.rows_left == TURN_ROWS


def test_who_waits_goes_in_order_and_only_as_far_as_there_is_room() -> None:
    """Not all are asked each time: ten thousand lines that wait would be asked ten thousand times."""
    pacing, went = Pacing(), []
    third = WINDOW_BYTES // 3

    def go(n: int) -> None:
        assert pacing.fits(third)
        pacing.take(third)
        went.append(n)

    pacing.take(WINDOW_BYTES)
    for n in range(9):
        pacing.wait(third, lambda n=n: go(n))  # type: ignore[misc]
    assert not pacing.fits(0), "nobody passes who waits"
    pacing.give(WINDOW_BYTES)
    assert went == [0, 1, 2]
    pacing.give(third)
    assert went == [0, 1, 2, 3]


def test_a_large_one_is_not_passed_by_small_ones_for_ever() -> None:
    pacing, went = Pacing(), []
    pacing.take(1000)
    pacing.wait(2 * WINDOW_BYTES, lambda: went.append("large"))
    pacing.wait(10, lambda: went.append("small"))
    pacing.give(500)
    assert went == [] and not pacing.fits(10)
    pacing.give(500)
    assert went == ["large", "small"]


def test_what_is_given_back_while_others_go_is_theirs_too() -> None:
    pacing, went = Pacing(), []
    pacing.take(WINDOW_BYTES)

    def fails() -> None:
        pacing.take(WINDOW_BYTES)
        went.append("fails")
        pacing.give(WINDOW_BYTES)

    pacing.wait(WINDOW_BYTES, fails)
    pacing.wait(WINDOW_BYTES, lambda: went.append("goes"))
    pacing.give(WINDOW_BYTES)
    assert went == ["fails", "goes"] and pacing.fits(WINDOW_BYTES)
