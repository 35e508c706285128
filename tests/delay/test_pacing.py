"""How much is brought at once."""

from tfmq.delay.pacing import TURN_BYTES, TURN_ROWS, WINDOW_BYTES, Pacing


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
    pacing.wait(lambda: asked.append(1))
    pacing.wait(lambda: asked.append(2))
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
