"""When schedules are looked at: the one that is due next, those that wait for a disk, and the clock itself.

Times are the wall clock's, which may be set, and a machine may sleep; so besides the alarm for what is due next there
is a round every LOOK_SECONDS. Work is done in portions that leave other traffic its turn.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from journal.clock import Clock
from tfmq.broker.schedule_run import ScheduleRun
from tfmq.broker.timers import Timer, Timers

LOOK_SECONDS: Final = 10.0
"""How long a step of the wall clock, or the end of a machine's sleep, may go unnoticed: far less than a minute, which
is as fine as cron is."""

PORTION_STEPS: Final = 100
PORTION_SECONDS: Final = 0.005
"""What is done in one turn: at nine o'clock, or after a downtime, there may be thousands, and others write too."""
BETWEEN_SECONDS: Final = 0.005
"""Between such turns."""

STALE_MAX: Final = 64
"""Entries of the heap that nobody waits for any more, before it is made anew."""

Step = Callable[[], None]


class ScheduleWatch:
    """Calls `meet(run)` for each run that is due, and `set_back(now)` when the wall clock was set back."""

    def __init__(
        self,
        *,
        timers: Timers,
        clock: Clock,
        meet: Callable[[ScheduleRun], None],
        set_back: Callable[[int], None],
    ) -> None:
        self._timers, self._clock = timers, clock
        self._meet, self._set_back = meet, set_back
        self.runs: dict[int, ScheduleRun] = {}
        self.on = False
        self._heap: list[tuple[int, int]] = []
        self._steps: deque[Step] = deque()
        self._parked: dict[int, ScheduleRun] = {}
        self._retry_at = 0.0
        self._alarm: Timer | None = None
        """For what is due next."""
        self._round: Timer | None = None
        """For clocks that are set and machines that sleep; a simulation has neither unawares."""
        self._looked_ms = 0
        self._looking = False

    def start(self) -> None:
        """From now on there are looks."""
        self.on = True
        self._looked_ms = self._clock.wall_ms()
        self._set_alarm()

    def stop(self) -> None:
        """None any more."""
        self.on = False
        for timer in (self._alarm, self._round):
            if timer is not None:
                self._timers.cancel(timer)

    def drop(self, run: ScheduleRun) -> None:
        """It is looked at no more."""
        self.runs.pop(run.row.id, None)
        self._parked.pop(run.row.id, None)

    def at(self, run: ScheduleRun, moment_ms: int | None) -> None:
        """Looks at it then, instead of whatever was said before; None: not."""
        self._parked.pop(run.row.id, None)
        run.next_ms = moment_ms
        if moment_ms is not None:
            heapq.heappush(self._heap, (moment_ms, run.row.id))
            self._sweep()
            self._set_alarm()

    def soon(self, step: Step) -> None:
        """`step()` in the next look that has room for it."""
        self._steps.append(step)
        if self.on and not self._looking:
            self._wake_in(0.0)

    def park(self, run: ScheduleRun) -> None:
        """Looks at it every LOOK_SECONDS, until `at` says something else."""
        if self.runs.get(run.row.id) is run and self.on:
            if not self._parked:
                self._retry_at = self._timers.now() + LOOK_SECONDS
            self._parked[run.row.id] = run
            self._wake_in(LOOK_SECONDS)

    def is_parked(self, run: ScheduleRun) -> bool:
        return run.row.id in self._parked

    def retry(self, log_id: int) -> None:
        """What is parked is looked at now, if the log is that of one of them."""
        if any(run.key == log_id for run in self._parked.values()):
            self._retry_at = self._timers.now()
            self._wake_in(0.0)

    # Looks

    def _set_alarm(self) -> None:
        """For the next that is due, and for the next round."""
        if not self.on or self._looking or not self.runs:
            return
        if self._heap:
            self._wake_in(max((self._heap[0][0] - self._clock.wall_ms()) / 1000, 0.0))
        if self._parked:
            self._wake_in(max(self._retry_at - self._timers.now(), 0.0))
        if _over(self._round):
            self._round = self._timers.after(LOOK_SECONDS, self._go_round, deferrable=True)

    def _go_round(self) -> None:
        """Looks at the clock, unless that is going to happen anyway."""
        alarm = self._alarm
        if alarm is not None and not _over(alarm) and alarm.due <= self._timers.now() + BETWEEN_SECONDS:
            self._set_alarm()
        else:
            self._look()

    def _wake_in(self, seconds: float) -> None:
        """At the latest."""
        alarm = self._alarm
        if alarm is not None and not _over(alarm):
            if alarm.due <= self._timers.now() + seconds:
                return
            self._timers.cancel(alarm)
        self._alarm = self._timers.after(seconds, self._look)

    def _look(self) -> None:
        self._looking = True
        try:
            more = self._portion(self._clock.wall_ms())
        finally:
            self._looking = False
        if more:
            self._wake_in(BETWEEN_SECONDS)
        else:
            self._set_alarm()

    def _portion(self, now: int) -> bool:
        """Some of what is to be done now; whether there is more."""
        if now < self._looked_ms:
            self._set_back(now)
        self._looked_ms = now
        if self._parked and self._timers.now() >= self._retry_at:
            parked, self._parked = self._parked, {}
            self._steps.extend(partial(self._meet, run) for run in parked.values())
        end = self._timers.now() + PORTION_SECONDS
        for _ in range(PORTION_STEPS):
            step = self._next_step(now)
            if step is None:
                return False
            step()
            if self._timers.now() > end:
                break
        return bool(self._steps or (self._heap and self._heap[0][0] <= now))

    def _next_step(self, now: int) -> Step | None:
        if self._steps:
            return self._steps.popleft()
        while self._heap and self._heap[0][0] <= now:
            moment, id = heapq.heappop(self._heap)
            run = self.runs.get(id)
            if run is not None and run.next_ms == moment:
                return partial(self._meet, run)
        return None

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self.runs) + STALE_MAX:
            self._heap = [(run.next_ms, run.row.id) for run in self.runs.values() if run.next_ms is not None]
            heapq.heapify(self._heap)


def _over(timer: Timer | None) -> bool:
    """Whether it was called, or is cancelled."""
    return timer is None or timer.call is None
