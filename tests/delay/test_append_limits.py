"""How much is brought at once."""

from __future__ import annotations

from tfmq.delay.append_limits import TURN_BYTES_MAX, TURN_ROWS_MAX, FlowControl


def test_a_turn_has_its_rows_and_bytes() -> None:
    pacing = FlowControl()
    pacing.count_written(TURN_ROWS_MAX - 5, 100)
    assert pacing.rows_left == 5
    pacing.count_written(1, TURN_BYTES_MAX)
    assert pacing.rows_left == 0
    pacing.start_turn()
    assert pacing.rows_left == TURN_ROWS_MAX
