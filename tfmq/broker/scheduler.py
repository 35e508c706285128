"""The scheduler: appends the messages of schedules when they are due, each exactly once."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, Final

from journal.clock import Clock
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_SCHEDULE
from journal.record.format import FLAG_TOMBSTONE, SEQUENCE_COUNT, make_id, make_log_id, make_record, tag_flag
from tfmq import limits
from tfmq.apply_target import Append, AppendResult, SourceId
from tfmq.broker import reply
from tfmq.broker.apply_target import BrokerApplyTarget
from tfmq.broker.catalog_state import SCHEDULE, SCHEDULE_STATE, ScheduleRow
from tfmq.broker.partition import tail_of
from tfmq.broker.reply import Run
from tfmq.broker.runtime import Runtime
from tfmq.broker.timers import Timer, Timers
from tfmq.broker.topics import Topics
from tfmq.delay.cron import MINUTE_MS, CronSchedule, zone_text
from tfmq.errors import BadRequest, DiskFull, StorageStopped, TfmqError, UnknownTopic
from tfmq.message import Attribute, decode_attribute, encode_attribute

logger = logging.getLogger("tfmq.broker")

MESSAGES_AT_ONCE: Final = 100
"""Maximum messages of one schedule in one append. After a downtime more may be due. Encoding 100 takes about 10 ms."""

TOPIC_GONE: Final = "There is no topic {topic}: create it (tfmq topic create {topic}), or remove the schedule."
CLOCK_BEHIND: Final = (
    "The broker's clock is before the last time that it sent for. If the clock is right now, resume it"
    " (tfmq schedule resume) to go on from here."
)

# Misfire rules: what happens with times that a schedule missed because the broker was down, the partition was stopped,
# or the clock was set forward.
#
#     one    one message is sent, for the latest missed time; the default
#     all    a message is sent for each missed time, oldest first, but only for the newest SEND_ALL_MAX
#     skip   no message is sent

SEND_LATEST, SEND_ALL, SEND_NONE = "one", "all", "skip"
MISFIRE_RULES: Final = (SEND_LATEST, SEND_ALL, SEND_NONE)

GRACE_MS: Final = 60_000
"""A time counts as missed, so that the misfire rule applies, if no message was sent within this time after it."""

SEND_ALL_MAX: Final = 1_000
"""Maximum number of missed times for which the rule `all` sends messages. A minutely schedule has 500,000 a year."""


def moments_to_send(cron: CronSchedule, rule: str, after_ms: int, now_ms: int) -> list[int]:
    """Return the times in (after_ms, now_ms] for which the misfire rule `rule` sends a message, ascending."""
    if rule == SEND_ALL:
        return cron.last_moments(after_ms, now_ms, SEND_ALL_MAX)
    latest = cron.last_between(after_ms, now_ms)
    if latest is None or (rule == SEND_NONE and now_ms - latest >= GRACE_MS):
        return []
    return [latest]


class Scheduler:
    """Sends the messages of all schedules. All methods are called in the broker's thread.

    The target partition records what was sent: the block trailers of an append name the schedule as its source, and
    have the scheduled time as the position in this source. For times up to the highest recorded one, no message is sent
    again. So a crash never duplicates a message, and no catalog entry is written per message. A schedule has only one
    append in progress, and starts the next one when that append is durable. If a schedule cannot send now (its
    partition is stopped, the disk is full), it is tried again every ROUND_SECONDS. The misfire rule then decides for
    which of the missed times messages are sent.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        apply_target: BrokerApplyTarget,
        topics: Topics,
        run: Run,
        bind: Callable[[RunningSchedule], None],
    ) -> None:
        """`bind(run)` is called if the topic of a schedule exists with another incarnation than the schedule has."""
        self._apply_target, self._topics, self._clock = apply_target, topics, runtime.clock
        self._run, self._bind = run, bind
        self.timer = ScheduleTimer(
            timers=runtime.timers, clock=runtime.clock, meet=self._process, set_back=self._clock_set_back
        )
        """`timer.start` and `timer.stop` begin and end the sending. Appends in progress at a stop are completed."""

    def add(self, run: RunningSchedule) -> None:
        self.timer.schedules[run.row.id] = run
        self._record_durable(run)
        self.plan(run)

    def plan(self, run: RunningSchedule) -> None:
        """Set the time at which the schedule is processed next. Called after a send or a change of the schedule."""
        self.timer.process_at(run, self.next_unresolved(run))

    def partition_resumed(self, log_id: int) -> None:
        """Recompute the next times of the partition's schedules: its resume may have truncated sent messages."""
        for run in self.timer.schedules.values():
            if run.key == log_id and not run.is_sending and not self.timer.is_blocked(run):
                self.plan(run)
        self.timer.retry_now(log_id)

    # The times that a schedule has sent or will send, and the reason if it does not send

    def next_unresolved(self, run: RunningSchedule) -> int | None:
        """Return the first scheduled time that was neither sent nor skipped; None for a paused or invalid schedule."""
        if run.row.paused or run.cron is None:
            return None
        return run.cron.next_after(self.resolved_until(run))

    def resolved_until(self, run: RunningSchedule) -> int:
        """Return the time up to which all messages were sent or skipped, so that none is sent for earlier times.

        While the partition is stopped, messages in it that are not known to be durable do not count as sent, because
        the resume may truncate them.
        """
        known = self.last_sent(run)
        if known > run.durable_ms and self._is_target_stopped(run):
            known = 0
        return max(run.row.through_ms, known, run.durable_ms, run.skipped_ms)

    def last_sent(self, run: RunningSchedule) -> int:
        """Return the latest time whose message is in the partition, durable or not; 0 if there is no message."""
        applied = self._apply_target.last_applied(run.key, run.source)
        return 0 if applied is None else applied[0]

    def next_shown(self, run: RunningSchedule) -> int | None:
        """Return the next time for which a message will be sent, for display; None for a paused or invalid schedule."""
        if run.row.paused or run.cron is None:
            return None
        return run.cron.next_after(max(self.resolved_until(run), self.last_sent(run)))

    def _is_target_stopped(self, run: RunningSchedule) -> bool:
        try:
            self._apply_target.check_space(run.key, 0)
        except (StorageStopped, DiskFull, UnknownTopic) as error:
            return isinstance(error, StorageStopped)
        return False

    def _record_durable(self, run: RunningSchedule) -> None:
        durable = self._apply_target.last_durable(run.key, run.source)
        if durable is not None:
            run.durable_ms = durable[0]

    def trouble(self, run: RunningSchedule) -> str:
        """Return why the schedule cannot send messages, now or when they are due; "" if it can."""
        if run.cron is None:
            return run.trouble
        if self._topics.by_incarnation(run.row.incarnation) is None:
            return run.trouble or TOPIC_GONE.format(topic=run.row.topic)
        return run.trouble or (CLOCK_BEHIND if self.is_clock_behind(run) else "")

    def is_clock_behind(self, run: RunningSchedule) -> bool:
        """Return whether the clock was set back, to GRACE_MS or more before the last sent or skipped time."""
        return self.resolved_until(run) - self._clock.wall_ms() >= GRACE_MS

    def _clock_set_back(self, now: int) -> None:
        """Recompute the next times of all schedules. No time after `now` counts as skipped: it will occur once more."""
        for run in list(self.timer.schedules.values()):
            run.skipped_ms = min(run.skipped_ms, now)
            if not run.is_sending and not self.timer.is_blocked(run):
                self.plan(run)

    def _may_send(self, run: RunningSchedule) -> bool:
        """Return whether the schedule may send now. If not, the end of its pause or change calls `plan`."""
        here = self.timer.schedules.get(run.row.id) is run
        return self.timer.is_started and here and not run.is_changing and not run.row.paused

    # Schedules that are due

    def _process(self, run: RunningSchedule) -> None:
        cron = run.cron
        if run.is_sending or cron is None or not self._may_send(run):
            return
        topic = self._topics.get(run.row.topic)
        if topic is None:
            self.skip_due(run, TOPIC_GONE.format(topic=run.row.topic))
            return
        if topic.incarnation != run.row.incarnation:
            self._bind(run)
            return
        try:
            self._apply_target.check_space(run.key, 0)
        except Exception as error:
            self.retry_later(run, error)
            return
        # Determine the times to send for; in a worker if the misfire rule is `all` and several are due.
        after, now = self.resolved_until(run), self._clock.wall_ms()
        many = run.row.misfire == SEND_ALL and len(list(islice(cron.moments_between(after, now), 2))) > 1
        found = partial(moments_to_send, cron, run.row.misfire, after, now)
        if not many:
            self._due_times_found(run, found(), None)
            return
        run.is_sending = True
        self._run(found, lambda *result: self.timer.run_soon(partial(self._due_times_found, run, *result)))

    def _due_times_found(self, run: RunningSchedule, moments: list[int] | None, error: BaseException | None) -> None:
        run.is_sending = False
        if error is not None:
            self.retry_later(run, error)
        elif moments:
            self._send_if_allowed(run, moments)
        elif self._may_send(run):
            self.skip_due(run)

    def skip_due(self, run: RunningSchedule, trouble: str = "") -> None:
        """Skip all times up to now. `trouble` is the reason; "" if the misfire rule is the reason."""
        if trouble:
            logger.warning("the schedule %s skips what is due: %s", run.row.name, trouble)
        run.trouble = trouble
        run.skipped_ms = self._clock.wall_ms()
        self.plan(run)

    def retry_later(self, run: RunningSchedule, error: BaseException) -> None:
        """Process the schedule again at the next round. A repeated error is logged only the first time."""
        trouble = str(reply.client_error(error))
        if trouble != run.trouble:
            logger.warning("the schedule %s cannot send, and tries again: %s", run.row.name, trouble)
        run.trouble = trouble
        run.is_sending = False
        self.timer.retry_later(run)

    # Appends of messages

    def _send_if_allowed(self, run: RunningSchedule, moments: list[int]) -> None:
        """Send messages for `moments`, except for times that a send or a new binding has made obsolete meanwhile."""
        run.is_sending = False
        if not self._may_send(run):
            return
        resolved_ms = self.resolved_until(run)
        moments = [moment for moment in moments if moment > resolved_ms]
        if moments:
            self._send(run, moments)
        else:
            self.plan(run)

    def _send(self, run: RunningSchedule, moments: list[int]) -> None:
        """Append the first messages, as many as fit one append. When these are durable, the other messages follow."""
        try:
            size = len(run.batch(moments[0]).data)
            count = min(max(1, self._apply_target.append_bytes_max(run.key) // size), MESSAGES_AT_ONCE)
            append = run.append(moments[:count])
            self.check_batches(run, append.batches)
        except Exception as error:  # BadBatch, MessageTooLarge: the partition never accepts the message
            self.skip_due(run, str(reply.client_error(error)))
            return
        run.is_sending = True
        self._apply_target.apply(append, partial(self._append_written, run, moments[count:]))

    def check_batches(self, run: RunningSchedule, batches: Sequence[Batch]) -> None:
        """Check that the partition would accept the batches. Raises BadBatch, MessageTooLarge, UnknownTopic."""
        partition = self._topics.find_partition(run.row.incarnation, run.row.partition)
        if partition is None:
            raise UnknownTopic(TOPIC_GONE.format(topic=run.row.topic))
        before = b""
        for batch in batches:
            self._apply_target.check_batch(partition, batch)
            if before:
                partition.log.check(batch, before)
            before = tail_of(batch)

    def _append_written(
        self, run: RunningSchedule, rest: list[int], result: AppendResult | None, error: BaseException | None
    ) -> None:
        if error is not None or result is None:
            self.retry_later(run, error or RuntimeError("an effect ended without a result"))
        else:
            self._apply_target.fsync_to(result, partial(self._append_durable, run, rest))

    def _append_durable(self, run: RunningSchedule, rest: list[int], error: BaseException | None) -> None:
        if error is not None:
            self.retry_later(run, error)
            return
        self._record_durable(run)
        if run.trouble:
            logger.info("the schedule %s sends again", run.row.name)
            run.trouble = ""
        if rest:
            self.timer.run_soon(partial(self._send_if_allowed, run, rest))
        else:
            run.is_sending = False
            if self._may_send(run):
                self.plan(run)


NAME_PROPERTY: Final = "schedule"
TIME_PROPERTY: Final = "scheduled_for"
"""Each message has two properties with these names: schedule name, and scheduled time in the schedule's time zone."""


class ScheduleState(StrEnum):
    """State of a schedule as commands return it."""

    ACTIVE = "active"
    PAUSED = "paused"
    WAITING = "waiting"
    """A due message cannot be sent, for the reason that the commands return as "trouble"."""


ACTIVE, PAUSED, WAITING = ScheduleState


class RunningSchedule:
    """A schedule with its row of the catalog, its next time, and the encoding of its messages.

    For an invalid row the constructor raises BadRequest or DecodeFailed, unless `kept` says that the row is stored in
    the catalog already. A schedule with a stored invalid row never sends, and `trouble` has the reason.
    """

    def __init__(self, row: ScheduleRow, kept: bool = False) -> None:
        self.row = row
        self.next_ms: int | None = None
        """When the schedule is processed next (wall clock, ms); None: not until `Scheduler.plan` sets a time."""
        self.durable_ms = 0
        """The messages for times up to this one (ms) are durable in the partition to which the schedule sends."""
        self.skipped_ms = 0
        """Times up to this one (ms) were skipped. It is never in the future."""
        self.trouble = ""
        """Why due messages are not sent, in one sentence; "" if they are sent."""
        self.is_sending = False
        self.is_changing = False
        """Whether a change of the schedule is being written to the catalog. No message is sent meanwhile."""
        self.cron: CronSchedule | None = None
        """None if the row is invalid, for example because its time zone does not exist any more."""
        self._attribute: Attribute | None = None
        try:
            self.cron = CronSchedule(row.cron, row.timezone)
            self._attribute = decode_attribute(row.attribute) if row.attribute else None
            given = self._attribute.properties if self._attribute is not None else {}
            for name in (NAME_PROPERTY, TIME_PROPERTY):
                if name in given:
                    raise BadRequest(f"The property {name} is the schedule's own: give yours another name.")
            if len(given) + 2 > limits.PROPERTIES:
                raise BadRequest(
                    f"A schedule's message has {limits.PROPERTIES - 2:d} properties at most, and two of its own."
                )
        except TfmqError as error:
            if not kept:
                raise
            self.cron, self.trouble = None, str(error)

    def replace_row(self, row: ScheduleRow) -> None:
        """Replace the row after a change. Reset `durable_ms` if the new row names another partition."""
        if (row.incarnation, row.partition) != (self.row.incarnation, self.row.partition):
            self.durable_ms = 0
        self.row = row

    @property
    def key(self) -> int:
        """The log id of the partition to which the schedule sends."""
        return make_log_id(self.row.incarnation, self.row.partition)

    @property
    def source(self) -> SourceId:
        return SOURCE_SCHEDULE, self.row.id

    @property
    def message_key(self) -> bytes | str | None:
        return None if self._attribute is None else self._attribute.key

    def append(self, moments_ms: list[int]) -> Append:
        row = self.row
        source = Source(*self.source, moments_ms[-1], 0)
        batches = [self.batch(moment) for moment in moments_ms]
        return Append(row.topic, row.incarnation, row.partition, batches, source)

    def batch(self, moment_ms: int) -> Batch:
        """Return the message for the time `moment_ms`. Its bytes depend only on the schedule and that time."""
        row, given = self.row, self._attribute
        own = {NAME_PROPERTY: row.name, TIME_PROPERTY: zone_text(moment_ms, row.timezone)}
        tag = given.tag if given is not None else None
        properties = {**given.properties, **own} if given is not None else own
        attribute = encode_attribute(moment_ms, self.message_key, tag, properties)
        flag = tag_flag(tag or "") | (FLAG_TOMBSTONE if row.payload is None else 0)
        sequence = moment_ms // MINUTE_MS % SEQUENCE_COUNT
        record = make_record(row.payload or b"", make_id(row.id, sequence), flag, attribute)
        return Batch(record, (), row.id, sequence, 1)

    def add_entry(self) -> tuple[Any, ...]:
        """Return the catalog entry that adds the schedule."""
        return (SCHEDULE, *self.row[:-1])

    def state_entry(self, **changed: Any) -> tuple[Any, ...]:
        """Return the catalog entry that changes these fields of the row."""
        row = self.row._replace(**changed)
        return SCHEDULE_STATE, row.id, row.incarnation, row.partition, row.through_ms, row.paused

    def state(self, trouble: str) -> str:
        return PAUSED if self.row.paused else WAITING if trouble else ACTIVE

    def description(self, last_ms: int, next_ms: int | None, trouble: str) -> dict[str, Any]:
        row, given = self.row, self._attribute
        return {
            "name": row.name,
            "id": row.id,
            "cron": row.cron,
            "timezone": row.timezone,
            "topic": row.topic,
            "partition": row.partition,
            "misfire": row.misfire,
            "state": self.state(trouble),
            "trouble": trouble,
            "next_ms": next_ms or 0,
            "last_ms": last_ms,
            "made_ms": row.made_ms,
            "size": len(row.payload or b""),
            "tag": given.tag or "" if given is not None else "",
            "properties": len(given.properties) if given is not None else 0,
        }


ROUND_SECONDS: Final = 10.0
"""Interval of rounds, which detect that the wall clock was set, or that the machine has slept. Far shorter than a
minute, the resolution of cron expressions."""

PORTION_STEPS: Final = 100
PORTION_SECONDS: Final = 0.005
"""Limits of a portion, the work in one turn: thousands of schedules may be due at 9 a.m. or after a downtime."""
PAUSE_SECONDS: Final = 0.005
"""Pause between two portions of work, so that other requests are served."""

OBSOLETE_ENTRIES_MAX: Final = 64
"""The heap is rebuilt when it has more than this plus two entries per schedule: most entries are obsolete then."""

Step = Callable[[], None]


class ScheduleTimer:
    """Timer that calls `meet(run)` for each due schedule, and `set_back(now)` when the wall clock was set back.

    The timer for the next due schedule uses the monotonic clock. It is late if the wall clock is set forward, or the
    machine sleeps. So a round every ROUND_SECONDS also looks for due schedules. Work is done in portions, so that other
    requests are served between two portions.
    """

    def __init__(
        self, *, timers: Timers, clock: Clock, meet: Callable[[RunningSchedule], None], set_back: Callable[[int], None]
    ) -> None:
        self._timers, self._clock = timers, clock
        self._process, self._set_back = meet, set_back
        self.schedules: dict[int, RunningSchedule] = {}
        self.is_started = False
        self._heap: list[tuple[int, int]] = []
        self._steps: deque[Step] = deque()
        self._blocked: dict[int, RunningSchedule] = {}
        self._retry_at = 0.0
        self._alarm: Timer | None = None
        """Timer for the next due schedule."""
        self._round: Timer | None = None
        """Timer for rounds, which detect clock changes and sleep. Deferrable, because simulations have neither."""
        self._last_wall_ms = 0
        self._in_portion = False

    def start(self) -> None:
        self.is_started = True
        self._last_wall_ms = self._clock.wall_ms()
        self._set_timers()

    def stop(self) -> None:
        self.is_started = False
        for timer in (self._alarm, self._round):
            if timer is not None:
                self._timers.cancel(timer)

    def remove(self, run: RunningSchedule) -> None:
        """Remove a schedule, so that it is not processed any more."""
        self.schedules.pop(run.row.id, None)
        self._blocked.pop(run.row.id, None)

    def process_at(self, run: RunningSchedule, moment_ms: int | None) -> None:
        """Process the schedule at `moment_ms` (wall clock, ms). Replaces an earlier call; None: do not process it."""
        self._blocked.pop(run.row.id, None)
        run.next_ms = moment_ms
        if moment_ms is not None:
            heapq.heappush(self._heap, (moment_ms, run.row.id))
            if len(self._heap) > 2 * len(self.schedules) + OBSOLETE_ENTRIES_MAX:
                self._heap = [
                    (each.next_ms, each.row.id) for each in self.schedules.values() if each.next_ms is not None
                ]
                heapq.heapify(self._heap)
            self._set_timers()

    def run_soon(self, step: Step) -> None:
        """Run `step()` in the next portion of work that has time for it."""
        self._steps.append(step)
        if self.is_started and not self._in_portion:
            self._run_within(0.0)

    def retry_later(self, run: RunningSchedule) -> None:
        """Block the schedule: process it again within ROUND_SECONDS, unless `process_at` is called for it before."""
        if self.schedules.get(run.row.id) is run and self.is_started:
            if not self._blocked:
                self._retry_at = self._timers.now() + ROUND_SECONDS
            self._blocked[run.row.id] = run
            self._run_within(ROUND_SECONDS)

    def is_blocked(self, run: RunningSchedule) -> bool:
        return run.row.id in self._blocked

    def retry_now(self, log_id: int) -> None:
        """Process all blocked schedules now, if one of them sends to the log with this id."""
        if any(run.key == log_id for run in self._blocked.values()):
            self._retry_at = self._timers.now()
            self._run_within(0.0)

    # Portions of work, and their timers

    def _set_timers(self) -> None:
        if not self.is_started or self._in_portion or not self.schedules:
            return
        if self._heap:
            self._run_within(max((self._heap[0][0] - self._clock.wall_ms()) / 1000, 0.0))
        if self._blocked:
            self._run_within(max(self._retry_at - self._timers.now(), 0.0))
        if _is_finished(self._round):
            self._round = self._timers.after(ROUND_SECONDS, self._run_round, deferrable=True)

    def _run_round(self) -> None:
        """Run a portion, which checks the clock, unless the timer `_alarm` will run one within PAUSE_SECONDS."""
        alarm = self._alarm
        if alarm is not None and not _is_finished(alarm) and alarm.due <= self._timers.now() + PAUSE_SECONDS:
            self._set_timers()
        else:
            self._run_portion()

    def _run_within(self, seconds: float) -> None:
        alarm = self._alarm
        if alarm is not None and not _is_finished(alarm):
            if alarm.due <= self._timers.now() + seconds:
                return
            self._timers.cancel(alarm)
        self._alarm = self._timers.after(seconds, self._run_portion)

    def _run_portion(self) -> None:
        self._in_portion = True
        try:
            more = self._do_portion(self._clock.wall_ms())
        finally:
            self._in_portion = False
        if more:
            self._run_within(PAUSE_SECONDS)
        else:
            self._set_timers()

    def _do_portion(self, now: int) -> bool:
        """Do one portion of the work that is due at `now` (wall clock, ms). Return whether more work is due."""
        if now < self._last_wall_ms:
            self._set_back(now)
        self._last_wall_ms = now
        if self._blocked and self._timers.now() >= self._retry_at:
            blocked, self._blocked = self._blocked, {}
            self._steps.extend(partial(self._process, run) for run in blocked.values())
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
            run = self.schedules.get(id)
            if run is not None and run.next_ms == moment:
                return partial(self._process, run)
        return None


def _is_finished(timer: Timer | None) -> bool:
    return timer is None or timer.call is None
