"""Pauses that double, one at a time."""

from journal.testing import SimulatedClock
from tfmq.broker.timers import Timers
from tfmq.delay.flow_control import FLOW_PAUSE_SECONDS, FLOW_PAUSE_SECONDS_MAX, Patience


def ticked(clock: SimulatedClock, timers: Timers, seconds: float) -> None:
    clock.advance(seconds)
    timers.tick(clock.monotonic())


def test_each_refusal_takes_twice_as_long_up_to_a_limit() -> None:
    clock = SimulatedClock()
    timers, went = Timers(clock), list[float]()
    patience = Patience(timers, lambda: went.append(clock.monotonic()))
    pauses = []
    for _ in range(8):
        patience.refused()
        before = clock.monotonic()
        while patience.waits:
            ticked(clock, timers, 0.5)
        pauses.append(clock.monotonic() - before)
    assert pauses[:4] == [
        FLOW_PAUSE_SECONDS,
        2 * FLOW_PAUSE_SECONDS,
        4 * FLOW_PAUSE_SECONDS,
        8 * FLOW_PAUSE_SECONDS,
    ]
    assert pauses[-1] == FLOW_PAUSE_SECONDS_MAX
    assert len(went) == 8
    patience.renew()
    patience.refused()
    ticked(clock, timers, FLOW_PAUSE_SECONDS)
    assert len(went) == 9


def test_one_pause_at_a_time_and_none_after_a_stop() -> None:
    clock = SimulatedClock()
    timers, went = Timers(clock), list[int]()
    patience = Patience(timers, lambda: went.append(1))
    patience.hold(1)
    patience.hold(5)
    ticked(clock, timers, 1)
    assert went == [1]
    patience.hold(1)
    patience.stop()
    ticked(clock, timers, 10)
    assert (went, patience.waits) == ([1], False)
    patience.end()
    assert went == [1, 1]
