"""Timers run in time order, never early, never after they were cancelled."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from journal.clock import SimulatedClock
from tfmq.broker.timers import CANCELLED_KEPT_MAX, ROUNDING_SECONDS, Timers


def test_nothing_runs_before_its_time() -> None:
    clock, ran = SimulatedClock(), []
    timers = Timers(clock)
    timers.after(5, lambda: ran.append("five"))
    clock.advance(4.999)
    assert timers.tick(clock.monotonic()) == timers.next_due() and ran == []
    clock.advance(0.001)
    assert timers.tick(clock.monotonic()) is None and ran == ["five"]


def test_a_cancelled_timer_does_not_run_and_is_not_due() -> None:
    clock, ran = SimulatedClock(), []
    timers = Timers(clock)
    timer = timers.after(1, lambda: ran.append(1))
    timers.cancel(timer)
    timers.cancel(timer)
    assert timers.next_due() is None
    clock.advance(2)
    timers.tick(clock.monotonic())
    assert ran == []


def test_a_timer_may_set_and_cancel_others() -> None:
    clock, ran = SimulatedClock(), []
    timers = Timers(clock)
    later = timers.after(2, lambda: ran.append("never"))

    def first() -> None:
        ran.append("first")
        timers.cancel(later)
        timers.after(0, lambda: ran.append("second"))

    timers.after(1, first)
    clock.advance(3)
    timers.tick(clock.monotonic())
    assert ran == ["first", "second"]


def test_long_waits_of_idle_clients_end_together_and_a_little_early() -> None:
    clock = SimulatedClock()
    timers = Timers(clock)
    waits = []
    for _ in range(100):
        waits.append((clock.monotonic(), timers.after_rounded(10, lambda: None)))
        clock.advance(0.013)
    assert all(10 - ROUNDING_SECONDS < timer.due - began <= 10 for began, timer in waits)
    assert len({timer.due for _, timer in waits}) <= 100 * 0.013 / ROUNDING_SECONDS + 1
    assert timers.after_rounded(1.1, lambda: None).due == clock.monotonic() + 1.1, "a short one is kept exactly"


def test_many_cancelled_timers_do_not_stay_in_memory() -> None:
    timers = Timers(SimulatedClock())
    kept = timers.after(1, lambda: None)
    for _ in range(4 * CANCELLED_KEPT_MAX):
        timers.cancel(timers.after(9, lambda: None))
    assert len(timers._heap) < 2 * CANCELLED_KEPT_MAX and timers.next_due() == kept.due


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=40))
def test_timers_run_in_order_of_time_then_of_setting(plan: list[tuple[int, bool]]) -> None:
    clock = SimulatedClock()
    ran: list[int] = []
    timers = Timers(clock)
    for number, (seconds, cancelled) in enumerate(plan):
        timer = timers.after(seconds, partial(ran.append, number))
        if cancelled:
            timers.cancel(timer)
    while (due := timers.next_due()) is not None:
        clock.advance(due - clock.monotonic())
        timers.tick(clock.monotonic())
    assert ran == sorted((n for n, (_, gone) in enumerate(plan) if not gone), key=lambda n: plan[n][0])


def test_a_deferrable_timer_runs_in_its_time_like_any_other_but_is_no_firm_date() -> None:
    clock, ran = SimulatedClock(), []
    timers = Timers(clock)
    timers.after(1, lambda: ran.append("round"), deferrable=True)
    assert timers.next_not_deferrable() is None and timers.next_due() == clock.monotonic() + 1
    firm = timers.after(5, lambda: ran.append("firm"))
    assert timers.next_not_deferrable() == firm.due
    clock.advance(1)
    timers.tick(clock.monotonic())
    assert ran == ["round"]
    timers.cancel(firm)
    assert timers.next_not_deferrable() is None


def test_deferred_ones_run_with_the_first_tick_after_their_time() -> None:
    clock, ran = SimulatedClock(), []
    timers = Timers(clock)

    def each_second() -> None:
        ran.append("round")
        timers.after(1, each_second, deferrable=True)

    each_second()
    clock.advance(100)
    timers.tick(clock.monotonic())
    assert ran == ["round", "round"]
