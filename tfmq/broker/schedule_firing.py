"""Schedules and the clock: what is due is sent, each time once.

Times are the wall clock's. It is looked at when the next one is due, and every LOOK_SECONDS, since it may be set and
a machine may sleep. What was sent is told by the partition: the time stands in its control records as the place of
the schedule's source, the highest counts, and nothing at or below it is sent again; so a crash doubles nothing, and
no entry says that something was sent. One append of a schedule is under way at a time, and the next comes when it is
forced. What cannot be sent now (a stopped partition, a full disk) is tried again at each look; what it missed then
is a matter of its misfire rule.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from journal.clock import Clock
from journal.shapes import Batch
from tfmq.broker import faults
from tfmq.broker.destination import BrokerDestination
from tfmq.broker.schedule_run import ScheduleRun
from tfmq.broker.timers import Timer, Timers
from tfmq.broker.topics import Topics
from tfmq.broker.work import tail_of
from tfmq.delay.misfire import GRACE_MS, to_send
from tfmq.effects import Append, Mark
from tfmq.errors import UnknownTopic

logger = logging.getLogger("tfmq.broker")

LOOK_SECONDS: Final = 10.0
"""How long a step of the wall clock, or the end of a machine's sleep, may go unnoticed: far less than a minute, which
is as fine as cron is."""

SENT_AT_ONCE: Final = 100
"""Schedules that are sent in one turn: at nine o'clock there may be thousands, and others write too."""
BETWEEN_SECONDS: Final = 0.005
"""Between such turns."""

STALE_MAX: Final = 64
"""Entries of the heap that nobody waits for any more, before it is made anew."""

TOPIC_GONE: Final = (
    "There is no topic {topic}: create it (tfmq topic create {topic}), or remove the schedule."
)
CLOCK_BEHIND: Final = (
    "The broker's clock stands before what it sent last. If the clock is right now, resume it (tfmq schedule resume)"
    " to go on from here."
)


class ScheduleFiring:
    """The schedules that run. All calls come from the engine's thread."""

    def __init__(
        self,
        *,
        destination: BrokerDestination,
        topics: Topics,
        timers: Timers,
        clock: Clock,
        bind: Callable[[ScheduleRun], None],
    ) -> None:
        """`bind(run)` is asked for where the topic of a schedule is there under another incarnation."""
        self._destination, self._topics = destination, topics
        self._timers, self._clock, self._bind = timers, clock, bind
        self._runs: dict[int, ScheduleRun] = {}
        self._heap: list[tuple[int, int]] = []
        self._parked: dict[int, ScheduleRun] = {}
        self._alarm: Timer | None = None
        """For what is due next."""
        self._round: Timer | None = None
        """For clocks that are set and machines that sleep; a simulation has neither unawares."""
        self._looked_ms = 0
        self._looking = self._on = False

    def start(self) -> None:
        """From now on what is due is sent."""
        self._on = True
        self._looked_ms = self._clock.wall_ms()
        self._set_alarm()

    def stop(self) -> None:
        """Sends nothing more; what is under way ends."""
        self._on = False
        for timer in (self._alarm, self._round):
            if timer is not None:
                self._timers.cancel(timer)

    def put(self, run: ScheduleRun) -> None:
        """It runs from now on."""
        self._runs[run.row.id] = run
        self.plan(run)

    def drop(self, run: ScheduleRun) -> None:
        """It runs no more; what is on its way is written all the same."""
        self._runs.pop(run.row.id, None)
        self._parked.pop(run.row.id, None)

    def plan(self, run: ScheduleRun) -> None:
        """Looks up its next time, after a change of it or of the clock."""
        self._parked.pop(run.row.id, None)
        run.next_ms = self.next_of(run)
        if run.next_ms is not None:
            heapq.heappush(self._heap, (run.next_ms, run.row.id))
            self._sweep()
            self._set_alarm()

    def next_of(self, run: ScheduleRun) -> int | None:
        """The first time that is not settled, though it be over; None while it is paused."""
        if run.row.paused or run.cron is None:
            return None
        return run.cron.next_after(self.settled(run))

    def settled(self, run: ScheduleRun) -> int:
        """Nothing up to this time is sent any more."""
        return max(run.row.through_ms, self.sent(run), run.passed_ms)

    def sent(self, run: ScheduleRun) -> int:
        """The latest time that its partition knows; 0 for none."""
        applied = self._destination.applied(run.key, run.source)
        return 0 if applied is None else applied[0]

    def trouble(self, run: ScheduleRun) -> str:
        """Why it does not send, or will not; "" if all is well."""
        if run.cron is None:
            return run.trouble
        if self._topics.by_incarnation(run.row.incarnation) is None:
            return run.trouble or TOPIC_GONE.format(topic=run.row.topic)
        return run.trouble or (CLOCK_BEHIND if self.clock_behind(run) else "")

    def clock_behind(self, run: ScheduleRun) -> bool:
        """Whether the wall clock was set back so far that times which count as sent come again."""
        return self.settled(run) - self._clock.wall_ms() >= GRACE_MS

    def resumed(self, log_id: int) -> None:
        """The partition takes writes again: what waits for it is looked at now."""
        if any(run.key == log_id for run in self._parked.values()):
            self._wake_in(0.0)

    # The clock

    def _set_alarm(self) -> None:
        """For the next that is due, and for the next round."""
        if not self._on or self._looking or not self._runs:
            return
        if self._heap:
            self._wake_in(max((self._heap[0][0] - self._clock.wall_ms()) / 1000, 0.0))
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
            more = self._look_around(self._clock.wall_ms())
        finally:
            self._looking = False
        if more:
            self._wake_in(BETWEEN_SECONDS)
        else:
            self._set_alarm()
        if self._parked:
            self._wake_in(LOOK_SECONDS)

    def _look_around(self, now: int) -> bool:
        """Sends what is due; whether there is more of it."""
        if now < self._looked_ms:
            self._clock_set_back(now)
        self._looked_ms = now
        parked, self._parked = self._parked, {}
        for waiting in parked.values():
            self._meet(waiting, now)
        for _ in range(SENT_AT_ONCE):
            run = self._take(now)
            if run is None:
                return False
            self._meet(run, now)
        return True

    def _clock_set_back(self, now: int) -> None:
        """Times that were left out because the clock stood behind them come again."""
        for run in list(self._runs.values()):
            run.passed_ms = min(run.passed_ms, now)
            if not run.sending and run.row.id not in self._parked:
                self.plan(run)

    def _take(self, now: int) -> ScheduleRun | None:
        """The next one that is due."""
        while self._heap and self._heap[0][0] <= now:
            moment, id = heapq.heappop(self._heap)
            run = self._runs.get(id)
            if run is not None and run.next_ms == moment and not run.sending:
                return run
        return None

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._runs) + STALE_MAX:
            self._heap = [(run.next_ms, run.row.id) for run in self._runs.values() if run.next_ms is not None]
            heapq.heapify(self._heap)

    # Sending

    def _may_send(self, run: ScheduleRun) -> bool:
        """Whether it runs. After a change of it, or a resumption, `plan` is called again."""
        here = self._runs.get(run.row.id) is run
        return self._on and here and not run.changing and not run.row.paused

    def _meet(self, run: ScheduleRun, now: int) -> None:
        """Something of it is due, or was and could not be sent."""
        cron = run.cron
        if run.sending or cron is None or not self._may_send(run):
            return
        topic = self._topics.find(run.row.topic)
        if topic is None:
            self.leave_out(run, TOPIC_GONE.format(topic=run.row.topic))
            return
        if topic.incarnation != run.row.incarnation:
            self._bind(run)
            return
        try:
            self._destination.check(run.key, 0)
        except Exception as error:
            self.park(run, error)
            return
        moments = to_send(cron, run.row.misfire, self.settled(run), now)
        if moments:
            self._send(run, moments)
        else:
            self.leave_out(run)

    def leave_out(self, run: ScheduleRun, trouble: str = "") -> None:
        """What is due by now is not sent, and `trouble` says why; "" if that is its misfire rule."""
        if trouble:
            logger.warning("the schedule %s leaves out what is due: %s", run.row.name, trouble)
        run.trouble = trouble
        run.passed_ms = self._clock.wall_ms()
        self.plan(run)

    def park(self, run: ScheduleRun, error: BaseException) -> None:
        """Tried again at the next look. Told once."""
        trouble = str(faults.client_error(error))
        if trouble != run.trouble:
            logger.warning("the schedule %s cannot send, and tries again: %s", run.row.name, trouble)
        run.trouble = trouble
        run.sending = False
        if self._runs.get(run.row.id) is run:
            self._parked[run.row.id] = run
            if self._on:
                self._wake_in(LOOK_SECONDS)

    def _send(self, run: ScheduleRun, moments: list[int]) -> None:
        """As many of these times as fit one append; the rest when it is forced."""
        try:
            append, count = self._append(run, moments)
        except Exception as error:
            self.leave_out(run, str(faults.client_error(error)))
            return
        run.sending = True
        self._destination.apply(append, partial(self._written, run, moments[count:]))

    def _append(self, run: ScheduleRun, moments: list[int]) -> tuple[Append, int]:
        """Raises BadBatch, MessageTooLarge for a message that its partition cannot take."""
        first = run.batch(moments[0])
        count = max(1, self._destination.slice_bytes(run.key) // len(first.data))
        append = run.append(moments[:count])
        self.check(run, append.batches)
        return append, len(append.batches)

    def check(self, run: ScheduleRun, batches: Sequence[Batch]) -> None:
        """Whether its partition could take these. Raises BadBatch, MessageTooLarge, UnknownTopic."""
        partition = self._topics.find_partition(run.row.incarnation, run.row.partition)
        if partition is None:
            raise UnknownTopic(TOPIC_GONE.format(topic=run.row.topic))
        before = b""
        for batch in batches:
            self._destination.check_batch(partition, batch)
            if before:
                partition.log.check(batch, before)
            before = tail_of(batch)

    def _written(
        self, run: ScheduleRun, rest: list[int], mark: Mark | None, error: BaseException | None
    ) -> None:
        if error is not None or mark is None:
            self.park(run, error or RuntimeError("an effect ended without a mark"))
        else:
            self._destination.when_forced(mark, partial(self._forced, run, rest))

    def _forced(self, run: ScheduleRun, rest: list[int], error: BaseException | None) -> None:
        if error is not None:
            self.park(run, error)
            return
        run.sending = False
        if run.trouble:
            logger.info("the schedule %s sends again", run.row.name)
            run.trouble = ""
        if self._may_send(run):
            settled = self.settled(run)  # it may have been resumed, or bound to another topic, meanwhile
            rest = [moment for moment in rest if moment > settled]
            if rest:
                self._send(run, rest)
            else:
                self.plan(run)


def _over(timer: Timer | None) -> bool:
    """Whether it was called, or is cancelled."""
    return timer is None or timer.call is None
