"""How much is brought at once."""

from __future__ import annotations

from journal.testing import SimulatedClock
from tfmq.apply_target import AppendResult
from tfmq.broker.timers import Timers
from tfmq.delay.flow_control import (
    IN_FLIGHT_BYTES_MAX,
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    TURN_BYTES_MAX,
    TURN_ROWS_MAX,
    FlowControl,
    FlushTracker,
    RetryTimer,
    WrittenAppend,
)
from tfmq.delay.requests import Turn


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


# Pauses that double, one at a time.


def ticked(clock: SimulatedClock, timers: Timers, seconds: float) -> None:
    clock.advance(seconds)
    timers.tick(clock.monotonic())


def test_each_refusal_takes_twice_as_long_up_to_a_limit() -> None:
    clock = SimulatedClock()
    timers, went = Timers(clock), list[float]()
    patience = RetryTimer(timers, lambda: went.append(clock.monotonic()))
    pauses = []
    for _ in range(8):
        patience.back_off()
        before = clock.monotonic()
        while patience.is_waiting:
            ticked(clock, timers, 0.5)
        pauses.append(clock.monotonic() - before)
    assert pauses[:4] == [
        RETRY_SECONDS,
        2 * RETRY_SECONDS,
        4 * RETRY_SECONDS,
        8 * RETRY_SECONDS,
    ]
    assert pauses[-1] == RETRY_SECONDS_MAX
    assert len(went) == 8
    patience.reset()
    patience.back_off()
    ticked(clock, timers, RETRY_SECONDS)
    assert len(went) == 9


def test_one_pause_at_a_time_and_none_after_a_stop() -> None:
    clock = SimulatedClock()
    timers, went = Timers(clock), list[int]()
    patience = RetryTimer(timers, lambda: went.append(1))
    patience.pause(1)
    patience.pause(5)
    ticked(clock, timers, 1)
    assert went == [1]
    patience.pause(1)
    patience.cancel()
    ticked(clock, timers, 10)
    assert (went, patience.is_waiting) == ([1], False)
    patience.retry_now()
    assert went == [1, 1]


# What is written and not known to be on the disk.


def written(number: int) -> WrittenAppend:
    return WrittenAppend(AppendResult(1, number * 10, ()), number * 100, Turn(number * 100 + 50, number), 7)


def test_it_settles_in_order_as_far_as_is_forced_and_tells_who_waits() -> None:
    settling = FlushTracker(None)
    told: list[int] = []
    for number in (1, 2, 3):
        settling.add(written(number))
    settling.when_durable(Turn(250, 2), lambda: told.append(2))
    settling.when_durable(Turn(120, 0), lambda: told.append(1))
    assert (len(settling), settling.first_due, settling.size_bytes, settling.count) == (3, 100, 21, 3)
    settling.pop_durable(lambda mark: mark.end <= 10)
    assert (settling.durable_through, told, settling.first_due) == (Turn(150, 1), [1], 200)
    assert settling.is_durable(Turn(150, 1)) and not settling.is_durable(Turn(150, 2))
    assert settling.count == 2
    settling.pop_durable(lambda mark: True)
    assert settling.count == 0
    assert (told, settling.size_bytes, settling.first_due, settling.last_append) == ([1, 2], 0, None, None)


def test_a_target_that_came_back_says_how_far_it_is() -> None:
    settling = FlushTracker(Turn(50, 0))
    told: list[str] = []
    settling.add(written(1))
    settling.add(written(2))
    settling.when_durable(Turn(250, 2), lambda: told.append("ask again"))
    assert settling.reset_to(Turn(150, 1)), "the second is lost"
    assert (settling.durable_through, len(settling), told, settling.size_bytes) == (
        Turn(150, 1),
        0,
        ["ask again"],
        0,
    )
    assert settling.count == 0
    settling.add(written(2))
    assert not settling.reset_to(Turn(250, 2))
    assert not settling.reset_to(None), "nothing was under way"
