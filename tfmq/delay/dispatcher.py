"""The dispatcher: moves due messages from the timing wheel to their target queues.

Which of the messages in a queue may be appended now is decided by `fireable_rows` in `target_queue.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from journal.record.batch import Appended
from journal.record.format import Buffer
from tfmq.apply_target import Timers
from tfmq.delay.arrivals.header import ArrivalHeader
from tfmq.delay.arrivals.non_durable import NonDurableArrivals, WrittenArrival
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.due_time import ABSOLUTE_FLAG, BrokerClock
from tfmq.delay.memory_window import LOAD_AHEAD_MS, MemoryWindow
from tfmq.delay.queries import DelayMetrics
from tfmq.delay.requests import ArrivalLog
from tfmq.delay.storage_scheduler import StorageScheduler
from tfmq.delay.target_queue import TargetQueues

POP_ROWS_MAX: Final = 2048
"""Maximum number of messages that one call pops from the wheel: about 2 ms of work, so that other work can run."""
FIREABLE_ROWS_MAX: Final = 65_536
MAINTENANCE_SECONDS: Final = 1.0
"""Interval of `Dispatcher._run_maintenance` while any message is pending."""


@dataclass(eq=False, kw_only=True)
class Dispatcher:
    """Pops due messages from the timing wheel at its ticks, and passes them to the target queues.

    If the arrival log has a message that is not durable, messages with the same or a later due time are popped only
    after an fsync of the log. One timer is set for the next due time. Another timer is set for maintenance (an fsync
    and file work), which runs each second while messages are pending.
    """

    arrival_log: ArrivalLog
    state: ArrivalLogState
    non_durable: NonDurableArrivals
    window: MemoryWindow
    target_queues: TargetQueues
    scheduler: StorageScheduler
    metrics: DelayMetrics
    broker_clock: BrokerClock
    timers: Timers
    tick_ms: int
    mark_ready: Callable[[], None]

    def __post_init__(self) -> None:
        self.started = self.stopped = False
        self._append_after_stop: dict[int, bool] = {}
        """Ticket of an announced append -> whether the arrival log had stopped before `begin_append` was called."""
        self._timer: Any = None
        self._timer_due = 0.0
        self._maintenance_timer: Any = None
        self._fsync_requested_to = 0
        """Offset of the arrival log up to which an fsync was requested."""

    def start(self) -> None:
        self.started = True
        self.scheduler.run_due()
        self.dispatch_due()

    def stop(self) -> None:
        self.started, self.stopped = False, True
        for timer in (self._timer, self._maintenance_timer):
            if timer is not None:
                self.timers.cancel(timer)
        self._timer = self._maintenance_timer = None

    # Arrivals

    def begin_append(self, due_min: int) -> int:
        """Announce an append to the arrival log, and return a ticket for `append_written` or `append_failed`.

        `due_min`: the lowest due time in the append. No message due at `due_min` or later is delivered until the
        append is durable or has failed. So call this in the same turn of the broker in which the due times are
        computed, because otherwise a message that is due later could be delivered first.
        """
        ticket = self.non_durable.begin_append(due_min)
        self._append_after_stop[ticket] = self.arrival_log.log.stopped is not None
        return ticket

    def append_written(self, ticket: int, header: ArrivalHeader, records: Buffer, answer: Appended) -> None:
        """Record that an announced append is written; request an fsync if it has a message due in the memory window.

        `answer`: the result of the append. `header` and `records`: what was appended; used only during the call.
        """
        first, dues, count = answer.first_ordinal, header.dues, header.record_count
        self.state.epochs.record(first, self.arrival_log.log.epoch)
        del self._append_after_stop[ticket]
        if ABSOLUTE_FLAG in dues.absolute:
            self.broker_clock.record_offset(first, header.ahead_ms)
        self.scheduler.extend_if_due()
        rows = self.window.wheel_rows_of(header, records, answer, self.broker_clock.now_ms())
        written_range = (answer.end_offset, first + count, count, dues.low, dues.high, rows)
        self.non_durable.add_written(WrittenArrival(ticket, header.log_id, *written_range))
        self.metrics.count_arrived(count)
        if dues.low < self.window.end:
            self._request_fsync()
        else:
            self.dispatch_due()
        self._schedule_maintenance_if_needed()

    def append_failed(self, ticket: int) -> None:
        """Record that an announced append has failed.

        If the log has stopped since `begin_append`, the append may have been written. So its ticket stays valid, and no
        message due at its `due_min` or later is delivered until the next start.
        """
        if self.arrival_log.log.stopped is None or self._append_after_stop.get(ticket):
            self.non_durable.append_failed(ticket)
            self.dispatch_due()
        self._append_after_stop.pop(ticket, None)

    def _request_fsync(self) -> None:
        written = self.non_durable.last_written
        if written is not None and written.end_offset > self._fsync_requested_to:
            self._fsync_requested_to = written.end_offset
            self.arrival_log.when_forced(written.end_offset, self._fsync_ended)

    def _fsync_ended(self, error: BaseException | None) -> None:
        if error is not None:
            if self.arrival_log.log.stopped is None:
                self._fsync_requested_to = 0
            else:  # The log has stopped until the next start, so no other fsync is requested.
                self.non_durable.log_stopped()
                self.dispatch_due()
            return
        self.process_durable()
        self.scheduler.extend_if_due()
        self.dispatch_due()

    def process_durable(self) -> None:
        """Pass the messages that have become durable in the arrival log to the memory window."""
        for arrival in self.non_durable.pop_durable(self.arrival_log.log.forced_offset):
            self.window.add_durable(arrival.wheel_rows, arrival.count, arrival.due_low, arrival.due_high)
            self.scheduler.arrival_durable(arrival)
        if self.window.missing_due is not None:
            self.scheduler.run_due()

    def wait_for_tail(self, from_offset: int, end: tuple[int, int]) -> None:
        """Deliver no message until the arrival log is durable up to its end, and the messages at its end are loaded.

        Called at a start where, because the disk is full, the log is durable only up to `from_offset`. `end`: (offset,
        ordinal) of the end of the log.
        """
        ticket, log = self.non_durable.begin_append(self.window.wheel.base_ms), self.arrival_log.log
        self.scheduler.tail_offset = from_offset

        def again(*_: Any) -> None:
            self.timers.after(MAINTENANCE_SECONDS, look)

        def look() -> None:
            if self.stopped or log.stopped is not None:
                return  # the next start recovers the end of the log
            if log.waits_for_space:
                # Both an append and a truncation first make the end of the log durable. There may be no append, so
                # request a truncation, one that removes nothing.
                self.arrival_log.truncate_before(log.first_offset + 1, again)
            elif log.forced_offset < end[0]:
                again()
            else:
                self.scheduler.load_tail(from_offset, end, done)

        def done() -> None:
            self.non_durable.append_failed(ticket)
            self.dispatch_due()

        again()

    # Dispatch of due messages, and its timer

    def dispatch_due(self) -> None:
        """Pass due messages, POP_ROWS_MAX at most, to the target queues; set the timer for the next due time."""
        if not self.started:
            return
        self.process_durable()
        window, now = self.window, self.broker_clock.now_ms()
        limit = min(now, window.fires_below - 1)
        unsure = self.non_durable.due_limit
        if unsure is not None:
            limit = min(limit, unsure - 1)
            if unsure <= now + LOAD_AHEAD_MS:
                self._request_fsync()
        more = False
        due = window.wheel.next_due
        if due is not None and due <= limit:
            room = FIREABLE_ROWS_MAX - self.target_queues.fireable_count
            if room > 0:
                found = window.wheel.pop(limit, min(POP_ROWS_MAX, room))
                self.target_queues.add_due(found)
                self.mark_ready()
                due = window.wheel.next_due
                more = due is not None and due <= limit
            else:
                more = True
        self._schedule_next(now, more)
        self._schedule_maintenance_if_needed()

    def _schedule_next(self, now: int, more: bool) -> None:
        """Set the timer for the next `dispatch_due`. `more`: whether more messages are due already."""
        if more:
            self._set_timer(0.0 if self.target_queues.fireable_count < FIREABLE_ROWS_MAX else self.tick_ms / 1000)
            return
        due, on_disk = self.window.wheel.next_due, self.metrics.next_on_disk
        unsure, times = self.non_durable.due_limit, []
        if due is not None and due > now:
            times.append(-(-due // self.tick_ms) * self.tick_ms)
        for each in (on_disk, unsure):
            if each is not None and each - LOAD_AHEAD_MS > now:
                times.append(each - LOAD_AHEAD_MS)
        if times:
            self._set_timer(self.broker_clock.seconds_until(min(times)))

    def _set_timer(self, seconds: float) -> None:
        when = self.timers.now() + seconds
        if self._timer is not None:
            if self._timer_due <= when:
                return
            self.timers.cancel(self._timer)
        self._timer_due = when
        self._timer = self.timers.after(seconds, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self.scheduler.extend_if_due()
        self.dispatch_due()

    # Maintenance, each second while messages are pending

    def _schedule_maintenance_if_needed(self) -> None:
        if not self.scheduler.is_empty:
            self.schedule_maintenance()

    def schedule_maintenance(self) -> None:
        """Set the timer for maintenance. Also called after an append of cancels, which must be truncated later."""
        if self._maintenance_timer is None and self.started:
            self._maintenance_timer = self.timers.after(MAINTENANCE_SECONDS, self._run_maintenance, deferrable=True)

    def _run_maintenance(self) -> None:
        self._maintenance_timer = None
        self._request_fsync()
        self.process_durable()
        if self.non_durable.last_written is None:
            self.scheduler.skip_to_log_end()
        self.scheduler.run_due()
        self.dispatch_due()
