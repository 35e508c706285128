"""Pauses that double, one at a time."""

from journal.testing import SimulatedClock
from tfmq.broker.timers import Timers
from tfmq.delay.flow_control import RETRY_SECONDS, RETRY_SECONDS_MAX, RetryTimer


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
