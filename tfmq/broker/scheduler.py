"""The scheduler, which appends the due messages of schedules exactly once."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from journal.clock import Clock
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_SCHEDULE
from journal.record.format import FLAG_TOMBSTONE, SEQUENCE_COUNT, make_id, make_log_id, make_record, tag_flag
from tfmq import limits
from tfmq.apply_target import Append, Mark, SourceName
from tfmq.broker import reply
from tfmq.broker.apply_target import BrokerDestination
from tfmq.broker.catalog_state import SCHEDULE, SCHEDULE_STATE, ScheduleRow
from tfmq.broker.partition import tail_of
from tfmq.broker.reply import Run
from tfmq.broker.timers import Timer, Timers
from tfmq.broker.topics import Topics
from tfmq.delay.cron import ALL, GRACE_MS, MINUTE_MS, Cron, to_send, zone_text
from tfmq.errors import BadRequest, DiskFull, StorageStopped, TfmqError, UnknownTopic
from tfmq.message import Attribute, decode_attribute, encode_attribute

logger = logging.getLogger("tfmq.broker")

MESSAGES_AT_ONCE: Final = 100
"""Messages of one schedule in one append, after a downtime. Creating them takes some ten milliseconds."""

TOPIC_GONE: Final = (
    "There is no topic {topic}: create it (tfmq topic create {topic}), or remove the schedule."
)
CLOCK_BEHIND: Final = (
    "The broker's clock is before the last time that it sent for. If the clock is right now, resume it"
    " (tfmq schedule resume) to go on from here."
)


class ScheduleFiring:
    """The running schedules. All calls come from the broker's thread.

    The target partition records what was sent: the scheduled time is the position of the schedule's source in the
    block trailers, and no time at or below the highest one is sent again. So a crash never duplicates a message, and
    no catalog entry is written per message. A schedule has one append in progress at a time; the next follows when it
    is durable. What cannot be sent now (a stopped partition, a full disk) is retried every ROUND_SECONDS; the misfire
    rule decides about the times missed until then.
    """

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
        """`bind(run)` is called if the topic of a schedule exists with another incarnation."""
        self._destination, self._topics, self._clock = destination, topics, clock
        self._run, self._bind = run, bind
        self._watch = ScheduleWatch(
            timers=timers, clock=clock, meet=self._meet, set_back=self._clock_set_back
        )

    def start(self) -> None:
        """Start sending due messages."""
        self._watch.start()

    def stop(self) -> None:
        """Stop sending; appends in progress complete."""
        self._watch.stop()

    def put(self, run: ScheduleRun) -> None:
        """Start a schedule."""
        self._watch.runs[run.row.id] = run
        self._note_sure(run)
        self.plan(run)

    def drop(self, run: ScheduleRun) -> None:
        """Stop a schedule; its append in progress is still written."""
        self._watch.drop(run)

    def plan(self, run: ScheduleRun) -> None:
        """Compute the next time of a schedule, after a change of it or of the clock."""
        self._watch.at(run, self.next_of(run))

    def resumed(self, log_id: int) -> None:
        """Retry the schedules of a partition that was resumed.

        The resume may have truncated sent messages.
        """
        for run in self._watch.runs.values():
            if run.key == log_id and not run.sending and not self._watch.is_parked(run):
                self.plan(run)
        self._watch.retry(log_id)

    # State

    def next_of(self, run: ScheduleRun) -> int | None:
        """Return the first time that is not resolved yet, possibly in the past; None while paused."""
        if run.row.paused or run.cron is None:
            return None
        return run.cron.next_after(self.settled(run))

    def settled(self, run: ScheduleRun) -> int:
        """Return the time up to which nothing is sent any more.

        Messages in a stopped partition that are not known to be durable do not count: a resume may truncate them.
        """
        known = self.sent(run)
        if known > run.sure_ms and self._stopped(run):
            known = 0
        return max(run.row.through_ms, known, run.sure_ms, run.passed_ms)

    def sent(self, run: ScheduleRun) -> int:
        """Return the latest time in the partition's trailers, durable or not; 0 for none."""
        applied = self._destination.applied(run.key, run.source)
        return 0 if applied is None else applied[0]

    def upcoming(self, run: ScheduleRun) -> int | None:
        """Return the next time after what the partition contains, for display; None while paused."""
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
        """Record as durable what the partition contains, unless it is stopped or waits for space."""
        settled = self._destination.settled(run.key, run.source)
        if settled is not None:
            run.sure_ms = settled[0]

    def trouble(self, run: ScheduleRun) -> str:
        """Return why the schedule does not send, or will not; "" if it does."""
        if run.cron is None:
            return run.trouble
        if self._topics.by_incarnation(run.row.incarnation) is None:
            return run.trouble or TOPIC_GONE.format(topic=run.row.topic)
        return run.trouble or (CLOCK_BEHIND if self.clock_behind(run) else "")

    def clock_behind(self, run: ScheduleRun) -> bool:
        """Return whether the clock is before the last sent time, as after setting it back."""
        return self.settled(run) - self._clock.wall_ms() >= GRACE_MS

    def _clock_set_back(self, now: int) -> None:
        """Plan again the times that were skipped and that occur again."""
        for run in list(self._watch.runs.values()):
            run.passed_ms = min(run.passed_ms, now)
            if not run.sending and not self._watch.is_parked(run):
                self.plan(run)

    def _may_send(self, run: ScheduleRun) -> bool:
        """Return whether the schedule runs. After a change or a resume, `plan` is called again."""
        here = self._watch.runs.get(run.row.id) is run
        return self._watch.on and here and not run.changing and not run.row.paused

    # Due times

    def _meet(self, run: ScheduleRun) -> None:
        """Process a schedule that is due, or that was due and could not send."""
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
        """Determine which times to send; in a worker if that takes long."""
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
        """Skip what is due by now. `trouble` is the reason; "" if the misfire rule says so."""
        if trouble:
            logger.warning("the schedule %s skips what is due: %s", run.row.name, trouble)
        run.trouble = trouble
        run.passed_ms = self._clock.wall_ms()
        self.plan(run)

    def park(self, run: ScheduleRun, error: BaseException) -> None:
        """Retry the schedule at the next round. The error is logged once."""
        trouble = str(reply.client_error(error))
        if trouble != run.trouble:
            logger.warning("the schedule %s cannot send, and tries again: %s", run.row.name, trouble)
        run.trouble = trouble
        run.sending = False
        self._watch.park(run)

    # Appends

    def _go_on(self, run: ScheduleRun, moments: list[int]) -> None:
        """Send for these times, as far as they still count after a resume or a new binding."""
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
        """Append as many messages as fit one append; the rest follows when it is durable."""
        try:
            append, count = self._append(run, moments)
        except Exception as error:
            self.leave_out(run, str(reply.client_error(error)))
            return
        run.sending = True
        self._destination.apply(append, partial(self._written, run, moments[count:]))

    def _append(self, run: ScheduleRun, moments: list[int]) -> tuple[Append, int]:
        """Return the append and its count of messages.

        Raises BadBatch, MessageTooLarge for a message that the partition cannot accept.
        """
        size = len(run.batch(moments[0]).data)
        count = min(max(1, self._destination.slice_bytes(run.key) // size), MESSAGES_AT_ONCE)
        append = run.append(moments[:count])
        self.check(run, append.batches)
        return append, len(append.batches)

    def check(self, run: ScheduleRun, batches: Sequence[Batch]) -> None:
        """Check that the partition would accept the batches.

        Raises BadBatch, MessageTooLarge, UnknownTopic.
        """
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


NAME_PROPERTY: Final = "schedule"
TIME_PROPERTY: Final = "scheduled_for"
"""Properties of each message of a schedule: its schedule, and its scheduled time in the schedule's time zone."""

ACTIVE, PAUSED, WAITING = "active", "paused", "waiting"


class ScheduleRun:
    """A running schedule: its row in the catalog, its times, and the records made from it.

    Raises BadRequest, DecodeFailed for an invalid row. A row that is stored already (`kept`) raises nothing: such a
    schedule never sends, and `trouble` has the reason.
    """

    def __init__(self, row: ScheduleRow, kept: bool = False) -> None:
        self.row = row
        self.next_ms: int | None = None
        """When the schedule is processed next, by the wall clock."""
        self.sure_ms = 0
        """Messages for times up to here are durable in the partition it is bound to now."""
        self.passed_ms = 0
        """Times up to here were skipped; never in the future."""
        self.trouble = ""
        """Why due messages are not sent, in one sentence."""
        self.sending = False
        self.changing = False
        """A change is being written to the catalog; nothing is sent meanwhile."""
        self.cron: Cron | None = None
        """None if the row is invalid, for example because its time zone does not exist any more."""
        self._attribute: Attribute | None = None
        try:
            self.cron = Cron(row.cron, row.timezone)
            self._attribute = decode_attribute(row.attribute) if row.attribute else None
            self._refuse_own_properties()
        except TfmqError as error:
            if not kept:
                raise
            self.cron, self.trouble = None, str(error)

    def _refuse_own_properties(self) -> None:
        given = self._attribute.properties if self._attribute is not None else {}
        for name in (NAME_PROPERTY, TIME_PROPERTY):
            if name in given:
                raise BadRequest(f"The property {name} is the schedule's own: give yours another name.")
        if len(given) + 2 > limits.PROPERTIES:
            raise BadRequest(
                f"A schedule's message has {limits.PROPERTIES - 2:d} properties at most, and two of its own."
            )

    def now_is(self, row: ScheduleRow) -> None:
        """Replace the row."""
        if (row.incarnation, row.partition) != (self.row.incarnation, self.row.partition):
            self.sure_ms = 0
        self.row = row

    @property
    def key(self) -> int:
        """Return the id of the target log."""
        return make_log_id(self.row.incarnation, self.row.partition)

    @property
    def source(self) -> SourceName:
        return SOURCE_SCHEDULE, self.row.id

    @property
    def message_key(self) -> bytes | str | None:
        return None if self._attribute is None else self._attribute.key

    def append(self, moments_ms: list[int]) -> Append:
        """Return an append with one message for each of these times."""
        row = self.row
        source = Source(*self.source, moments_ms[-1], 0)
        batches = [self.batch(moment) for moment in moments_ms]
        return Append(row.topic, row.incarnation, row.partition, batches, source)

    def batch(self, moment_ms: int) -> Batch:
        """Return the message for that time. The bytes depend only on the schedule and the time."""
        row, given = self.row, self._attribute
        own = {NAME_PROPERTY: row.name, TIME_PROPERTY: zone_text(moment_ms, row.timezone)}
        tag = given.tag if given is not None else None
        properties = {**given.properties, **own} if given is not None else own
        attribute = encode_attribute(moment_ms, self.message_key, tag, properties)
        flag = tag_flag(tag or "") | (FLAG_TOMBSTONE if row.payload is None else 0)
        sequence = moment_ms // MINUTE_MS % SEQUENCE_COUNT
        record = make_record(row.payload or b"", make_id(row.id, sequence), flag, attribute)
        return Batch(record, (), row.id, sequence, 1)

    def made_entry(self) -> tuple[Any, ...]:
        """Return the catalog entry that adds the schedule."""
        return (SCHEDULE, *self.row[:-1])

    def state_entry(self, **changed: Any) -> tuple[Any, ...]:
        """Return the catalog entry that changes the schedule's state."""
        row = self.row._replace(**changed)
        return SCHEDULE_STATE, row.id, row.incarnation, row.partition, row.through_ms, row.paused

    def state(self, trouble: str) -> str:
        return PAUSED if self.row.paused else WAITING if trouble else ACTIVE

    def described(self, last_ms: int, next_ms: int | None, trouble: str) -> dict[str, Any]:
        """Return the schedule as replies describe it."""
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

    def content(self) -> dict[str, Any]:
        """Return payload and attribute, for a reply about this schedule alone."""
        return {"payload": self.row.payload, "attribute": self.row.attribute}


LOOK_SECONDS: Final = 10.0
"""Interval of rounds: a step of the wall clock, or the end of a machine's sleep, is noticed this late at most. Far
below a minute, which is the resolution of cron."""

PORTION_STEPS: Final = 100
PORTION_SECONDS: Final = 0.005
"""Limits of the work in one turn: thousands of schedules may be due at 9 a.m. or after a downtime."""
BETWEEN_SECONDS: Final = 0.005
"""Pause between such turns."""

STALE_MAX: Final = 64
"""Obsolete entries in the heap before it is rebuilt."""

Step = Callable[[], None]


class ScheduleWatch:
    """Timer that processes due schedules.

    Calls `meet(run)` for each due schedule, and `set_back(now)` when the wall clock was set back.

    Times are of the wall clock, which may be set, and a machine may sleep. So besides the timer for the next due
    schedule there is a round every ROUND_SECONDS. Work is done in portions, so that other requests are served in
    between.
    """

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
        """Timer for the next due schedule."""
        self._round: Timer | None = None
        """Timer for rounds, which detect clock changes and sleep. Deferrable, because a simulation has neither."""
        self._looked_ms = 0
        self._looking = False

    def start(self) -> None:
        """Start processing due schedules."""
        self.on = True
        self._looked_ms = self._clock.wall_ms()
        self._set_alarm()

    def stop(self) -> None:
        """Stop processing."""
        self.on = False
        for timer in (self._alarm, self._round):
            if timer is not None:
                self._timers.cancel(timer)

    def drop(self, run: ScheduleRun) -> None:
        """Remove a schedule."""
        self.runs.pop(run.row.id, None)
        self._parked.pop(run.row.id, None)

    def at(self, run: ScheduleRun, moment_ms: int | None) -> None:
        """Process the schedule at `moment_ms` instead of any earlier plan; None: not at all."""
        self._parked.pop(run.row.id, None)
        run.next_ms = moment_ms
        if moment_ms is not None:
            heapq.heappush(self._heap, (moment_ms, run.row.id))
            self._sweep()
            self._set_alarm()

    def soon(self, step: Step) -> None:
        """Run `step()` in the next portion that has room for it."""
        self._steps.append(step)
        if self.on and not self._looking:
            self._wake_in(0.0)

    def park(self, run: ScheduleRun) -> None:
        """Process the schedule every ROUND_SECONDS, until `process_at` is called for it."""
        if self.runs.get(run.row.id) is run and self.on:
            if not self._parked:
                self._retry_at = self._timers.now() + LOOK_SECONDS
            self._parked[run.row.id] = run
            self._wake_in(LOOK_SECONDS)

    def is_parked(self, run: ScheduleRun) -> bool:
        return run.row.id in self._parked

    def retry(self, log_id: int) -> None:
        """Retry all parked schedules now, if the log is the target of one of them."""
        if any(run.key == log_id for run in self._parked.values()):
            self._retry_at = self._timers.now()
            self._wake_in(0.0)

    # Portions

    def _set_alarm(self) -> None:
        """Set the timers for the next due schedule and for the next round."""
        if not self.on or self._looking or not self.runs:
            return
        if self._heap:
            self._wake_in(max((self._heap[0][0] - self._clock.wall_ms()) / 1000, 0.0))
        if self._parked:
            self._wake_in(max(self._retry_at - self._timers.now(), 0.0))
        if _over(self._round):
            self._round = self._timers.after(LOOK_SECONDS, self._go_round, deferrable=True)

    def _go_round(self) -> None:
        """Check the clock, unless the other timer does so now anyway."""
        alarm = self._alarm
        if alarm is not None and not _over(alarm) and alarm.due <= self._timers.now() + BETWEEN_SECONDS:
            self._set_alarm()
        else:
            self._look()

    def _wake_in(self, seconds: float) -> None:
        """Run the next portion in at most `seconds`."""
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
        """Do one portion of the work that is due. Return whether there is more."""
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
    """Return whether the timer has run or is cancelled."""
    return timer is None or timer.call is None
