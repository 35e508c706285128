"""When schedules are looked at: at their time, every few seconds where something is in the way, in portions."""

from typing import Any

import pytest

from journal.testing import SimulatedClock
from tfmq.broker.catalog_state import ScheduleRow
from tfmq.broker.scheduler import (
    OBSOLETE_ENTRIES_MAX,
    PAUSE_SECONDS,
    PORTION_SECONDS,
    PORTION_STEPS,
    ROUND_SECONDS,
    RunningSchedule,
    ScheduleTimer,
)
from tfmq.broker.timers import Timers


class Rig:
    """A watch whose looks are written down; `costs` is how long one takes."""

    def __init__(self, runs: int = 1, costs: float = 0.0) -> None:
        self.clock = SimulatedClock()
        self.timers = Timers(self.clock)
        self.met: list[tuple[int, int]] = []
        self.set_back: list[int] = []
        self.costs = costs
        self.watch = ScheduleTimer(
            timers=self.timers, clock=self.clock, meet=self.meet, set_back=self.set_back.append
        )
        self.runs = [self.run(number) for number in range(1, runs + 1)]
        self.watch.start()

    def run(self, id: int) -> RunningSchedule:
        row = ScheduleRow(id, f"s{id}", "@daily", "UTC", "orders", None, b"", b"", "one", 0, 16 + id, 0, 0)
        made = self.watch.schedules[id] = RunningSchedule(row)
        return made

    def meet(self, run: RunningSchedule) -> None:
        self.met.append((run.row.id, self.clock.wall_ms()))
        self.clock.advance(self.costs)

    def advance(self, seconds: float) -> None:
        """In steps to whatever is due."""
        end = self.clock.monotonic() + seconds
        while (due := self.timers.next_due()) is not None and due <= end:
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            self.timers.tick(self.clock.monotonic())
        self.clock.advance(max(0.0, end - self.clock.monotonic()))

    def in_ms(self, milliseconds: int) -> int:
        return self.clock.wall_ms() + milliseconds


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_run_is_met_at_its_time_once(rig: Rig) -> None:
    moment = rig.in_ms(1_500)
    rig.watch.process_at(rig.runs[0], moment)
    rig.advance(1.499)
    assert rig.met == []
    rig.advance(60)
    assert rig.met == [(1, moment)]


def test_the_last_word_on_its_time_counts(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(1_000))
    rig.watch.process_at(rig.runs[0], later := rig.in_ms(3_000))
    rig.advance(2)
    assert rig.met == []
    rig.advance(2)
    assert rig.met == [(1, later)]
    rig.watch.process_at(rig.runs[0], rig.in_ms(1_000))
    rig.watch.process_at(rig.runs[0], None)
    rig.advance(60)
    assert len(rig.met) == 1


def test_what_is_dropped_is_not_met(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(1_000))
    rig.watch.remove(rig.runs[0])
    rig.advance(60)
    assert rig.met == []


def test_a_wall_clock_that_jumps_forth_is_seen_within_a_round(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(3_600_000))
    rig.clock.jump_wall(7200)
    rig.advance(ROUND_SECONDS)
    assert len(rig.met) == 1 and rig.set_back == []


def test_a_wall_clock_that_jumps_back_is_told_once_and_nothing_is_early(rig: Rig) -> None:
    moment = rig.in_ms(60_000)
    rig.watch.process_at(rig.runs[0], moment)
    rig.clock.jump_wall(-30)
    rig.advance(89.9)
    assert rig.met == [] and len(rig.set_back) == 1
    rig.advance(0.2)
    assert rig.met == [(1, moment)]


def test_what_is_parked_is_met_again_every_few_seconds_until_it_has_a_time(rig: Rig) -> None:
    (run,) = rig.runs
    rig.watch.retry_later(run)
    assert rig.watch.is_parked(run)
    start = rig.clock.monotonic()
    for number in range(1, 4):
        rig.advance(ROUND_SECONDS - (rig.clock.monotonic() - start) % ROUND_SECONDS)
        assert len(rig.met) == number
        rig.watch.retry_later(run)
    rig.watch.process_at(run, None)
    rig.advance(60)
    assert len(rig.met) == 3 and not rig.watch.is_parked(run)


def test_a_resumed_log_is_retried_at_once_and_others_are_not(rig: Rig) -> None:
    (run,) = rig.runs
    rig.watch.retry_later(run)
    rig.watch.retry_now(run.key + 1)
    rig.advance(0.1)
    assert rig.met == []
    rig.watch.retry_now(run.key)
    rig.advance(0.1)
    assert len(rig.met) == 1


def test_many_are_met_in_portions_with_a_pause_between() -> None:
    rig = Rig(runs=2 * PORTION_STEPS + 1)
    for run in rig.runs:
        rig.watch.process_at(run, rig.clock.wall_ms())
    times = []
    for _ in range(3):
        rig.timers.tick(rig.clock.monotonic())
        times.append(len(rig.met))
        rig.clock.advance(PAUSE_SECONDS)
    assert times == [PORTION_STEPS, 2 * PORTION_STEPS, 2 * PORTION_STEPS + 1]


def test_a_portion_ends_when_its_time_is_over() -> None:
    rig = Rig(runs=10, costs=PORTION_SECONDS)
    for run in rig.runs:
        rig.watch.process_at(run, rig.clock.wall_ms())
    rig.timers.tick(rig.clock.monotonic())
    assert 1 <= len(rig.met) <= 2
    rig.advance(1)
    assert sorted(id for id, _ in rig.met) == list(range(1, 11))


def test_steps_are_done_soon_and_in_their_order(rig: Rig) -> None:
    done: list[Any] = []
    for number in range(3):
        rig.watch.run_soon(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    rig.advance(0.001)
    assert done == [0, 1, 2]


def test_a_watch_that_stopped_meets_nobody(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(1_000))
    rig.watch.stop()
    rig.watch.retry_later(rig.runs[0])
    rig.watch.run_soon(lambda: rig.met.append((0, 0)))
    rig.advance(60)
    assert rig.met == [] and rig.timers.next_due() is None


def test_a_simulation_stops_only_for_what_is_due(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(3_600_000))
    assert rig.timers.next_not_deferrable() == pytest.approx(rig.clock.monotonic() + 3600)


def test_words_that_were_taken_back_leave_no_rest(rig: Rig) -> None:
    for number in range(5 * OBSOLETE_ENTRIES_MAX):
        rig.watch.process_at(rig.runs[0], rig.in_ms(10**9 + number))
    assert len(rig.watch._heap) <= OBSOLETE_ENTRIES_MAX + 3
