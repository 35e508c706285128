"""Schedules that send: what of a schedule is due goes to its partition, each time once.

What was sent is told by the partition: the time stands in its control records as the place of the schedule's source,
the highest counts, and nothing at or below it is sent again; so a crash doubles nothing, and no entry says that
something was sent. One append of a schedule is under way at a time, and the next comes when it is forced. What cannot
be sent now (a stopped partition, a full disk) is tried again at each look; what it missed then is a matter of its
misfire rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from journal.clock import Clock
from journal.record.batch import Batch
from tfmq.apply_target import Append, Mark
from tfmq.broker import faults
from tfmq.broker.caller import Run
from tfmq.broker.destination import BrokerDestination
from tfmq.broker.schedule_run import ScheduleRun
from tfmq.broker.schedule_watch import ScheduleWatch
from tfmq.broker.timers import Timers
from tfmq.broker.topics import Topics
from tfmq.broker.work import tail_of
from tfmq.delay.cron import ALL, GRACE_MS, Cron, to_send
from tfmq.errors import DiskFull, StorageStopped, UnknownTopic

logger = logging.getLogger("tfmq.broker")

MESSAGES_AT_ONCE: Final = 100
"""Of one schedule in one append, after a downtime: making them takes some ten milliseconds."""

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
        run: Run,
        bind: Callable[[ScheduleRun], None],
    ) -> None:
        """`bind(run)` is asked for where the topic of a schedule is there under another incarnation."""
        self._destination, self._topics, self._clock = destination, topics, clock
        self._run, self._bind = run, bind
        self._watch = ScheduleWatch(
            timers=timers, clock=clock, meet=self._meet, set_back=self._clock_set_back
        )

    def start(self) -> None:
        """From now on what is due is sent."""
        self._watch.start()

    def stop(self) -> None:
        """Sends nothing more; what is under way ends."""
        self._watch.stop()

    def put(self, run: ScheduleRun) -> None:
        """It runs from now on."""
        self._watch.runs[run.row.id] = run
        self._note_sure(run)
        self.plan(run)

    def drop(self, run: ScheduleRun) -> None:
        """It runs no more; what is on its way is written all the same."""
        self._watch.drop(run)

    def plan(self, run: ScheduleRun) -> None:
        """Looks up its next time, after a change of it or of the clock."""
        self._watch.at(run, self.next_of(run))

    def resumed(self, log_id: int) -> None:
        """The partition takes writes again: what waits for it is looked at now, and what it may have lost."""
        for run in self._watch.runs.values():
            if run.key == log_id and not run.sending and not self._watch.is_parked(run):
                self.plan(run)
        self._watch.retry(log_id)

    # How it stands

    def next_of(self, run: ScheduleRun) -> int | None:
        """The first time that is not settled, though it be over; None while it is paused."""
        if run.row.paused or run.cron is None:
            return None
        return run.cron.next_after(self.settled(run))

    def settled(self, run: ScheduleRun) -> int:
        """Nothing up to this time is sent any more. What only a stopped partition knows does not count: what was not
        forced may be lost when it is resumed.
        """
        known = self.sent(run)
        if known > run.sure_ms and self._stopped(run):
            known = 0
        return max(run.row.through_ms, known, run.sure_ms, run.passed_ms)

    def sent(self, run: ScheduleRun) -> int:
        """The latest time that its partition knows, forced or not; 0 for none."""
        applied = self._destination.applied(run.key, run.source)
        return 0 if applied is None else applied[0]

    def upcoming(self, run: ScheduleRun) -> int | None:
        """The first time behind what its partition knows, for people; None while it is paused."""
        if run.row.paused or run.cron is None:
            return None
        return run.cron.next_after(max(self.settled(run), self.sent(run)))

    def _stopped(self, run: ScheduleRun) -> bool:
        try:
            self._destination.check(run.key, 0)
        except StorageStopped:
            return True
        except (DiskFull, UnknownTopic):
            pass
        return False

    def _note_sure(self, run: ScheduleRun) -> None:
        """What its partition has is on the disk, unless it is stopped or waits for space."""
        settled = self._destination.settled(run.key, run.source)
        if settled is not None:
            run.sure_ms = settled[0]

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

    def _clock_set_back(self, now: int) -> None:
        """Times that were left out because the clock stood behind them come again."""
        for run in list(self._watch.runs.values()):
            run.passed_ms = min(run.passed_ms, now)
            if not run.sending and not self._watch.is_parked(run):
                self.plan(run)

    def _may_send(self, run: ScheduleRun) -> bool:
        """Whether it runs. After a change of it, or a resumption, `plan` is called again."""
        here = self._watch.runs.get(run.row.id) is run
        return self._watch.on and here and not run.changing and not run.row.paused

    # What is due

    def _meet(self, run: ScheduleRun) -> None:
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
        self._look_up(run, cron)

    def _look_up(self, run: ScheduleRun, cron: Cron) -> None:
        """Which times are to be sent; in a worker where that takes its time."""
        after, now = self.settled(run), self._clock.wall_ms()
        many = run.row.misfire == ALL and len(list(islice(cron.between(after, now), 2))) > 1
        found = partial(to_send, cron, run.row.misfire, after, now)
        if not many:
            self._found(run, found(), None)
            return
        run.sending = True
        self._run(found, lambda *result: self._watch.soon(partial(self._found, run, *result)))

    def _found(self, run: ScheduleRun, moments: list[int] | None, error: BaseException | None) -> None:
        run.sending = False
        if error is not None:
            self.park(run, error)
        elif moments:
            self._go_on(run, moments)
        elif self._may_send(run):
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
        self._watch.park(run)

    # Sending

    def _go_on(self, run: ScheduleRun, moments: list[int]) -> None:
        """With these times, as far as they still count: it may have been resumed, or bound anew, meanwhile."""
        run.sending = False
        if not self._may_send(run):
            return
        settled = self.settled(run)
        moments = [moment for moment in moments if moment > settled]
        if moments:
            self._send(run, moments)
        else:
            self.plan(run)

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
        size = len(run.batch(moments[0]).data)
        count = min(max(1, self._destination.slice_bytes(run.key) // size), MESSAGES_AT_ONCE)
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
        self._note_sure(run)
        if run.trouble:
            logger.info("the schedule %s sends again", run.row.name)
            run.trouble = ""
        if rest:
            self._watch.soon(partial(self._go_on, run, rest))
        else:
            run.sending = False
            if self._may_send(run):
                self.plan(run)
