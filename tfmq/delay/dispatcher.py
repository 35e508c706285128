"""The dispatcher: moves due messages from the timing wheel to their target queues."""

from collections.abc import Callable
from typing import Any, Final

from tfmq.apply_target import Timers
from tfmq.delay.arrivals.log import NonDurableArrivals
from tfmq.delay.due_time import BrokerClock
from tfmq.delay.memory_window import LOAD_AHEAD_MS, MemoryWindow
from tfmq.delay.queries import DelayMetrics
from tfmq.delay.requests import ArrivalLog
from tfmq.delay.storage_scheduler import StorageScheduler
from tfmq.delay.target_queue import TargetQueues

POP_ROWS_MAX: Final = 2048
"""Messages popped from the wheel at once: about 2 ms, so that other work is not delayed."""
FIREABLE_ROWS_MAX: Final = 65_536
"""Maximum of messages in target queues that can fire. They need less memory in the wheel."""
MAINTENANCE_SECONDS: Final = 1.0
"""Interval of maintenance while any message is pending."""


class Dispatcher:
    """Pops due messages from the timing wheel at its ticks, and passes them to the target queues.

    Messages that are due after an arrival that is not durable are not popped; an fsync is requested instead. Without a
    due time in the near future no timer runs, except for maintenance.
    """

    def __init__(
        self,
        *,
        metrics: DelayMetrics,
        arrival_log: ArrivalLog,
        non_durable: NonDurableArrivals,
        window: MemoryWindow,
        target_queues: TargetQueues,
        scheduler: StorageScheduler,
        broker_clock: BrokerClock,
        timers: Timers,
        tick_ms: int,
        mark_ready: Callable[[], None],
    ) -> None:
        self._arrival_log, self._non_durable, self._window, self._target_queues = (
            arrival_log,
            non_durable,
            window,
            target_queues,
        )
        self._scheduler, self._broker_clock, self._timers, self._tick_ms = (
            scheduler,
            broker_clock,
            timers,
            tick_ms,
        )
        self._metrics, self._mark_ready = metrics, mark_ready
        self.started = self.stopped = False
        self._timer: Any = None
        self._timer_due = 0.0
        self._maintenance_timer: Any = None
        self._fsync_requested_to = 0
        """Offset of the arrival log up to which an fsync was requested."""

    def start(self) -> None:
        """Start to pop due messages."""
        self.started = True
        self._scheduler.run_due()
        self.dispatch_due()

    def stop(self) -> None:
        """Stop popping and cancel the timers."""
        self.started, self.stopped = False, True
        for timer in (self._timer, self._maintenance_timer):
            if timer is not None:
                self._timers.cancel(timer)
        self._timer = self._maintenance_timer = None

    # Arrivals

    def batch_written(self, low: int) -> None:
        """Handle a written batch, due at `low` or later. Request an fsync at once if it is due soon."""
        if low < self._window.end:
            self._request_fsync()
        else:
            self.dispatch_due()
        self._schedule_maintenance_if_needed()

    def _request_fsync(self) -> None:
        written = self._non_durable.last_written
        if written is not None and written.end_offset > self._fsync_requested_to:
            self._fsync_requested_to = written.end_offset
            self._arrival_log.when_forced(written.end_offset, self._fsync_ended)

    def _fsync_ended(self, error: BaseException | None) -> None:
        """Handle the end of an fsync of the arrival log.

        If it failed because the log has stopped, targets with non-durable arrivals wait for the next start.
        """
        if error is not None:
            if self._arrival_log.log.stopped is None:
                self._fsync_requested_to = 0
            else:  # The log has stopped until the next start: request nothing more.
                self._non_durable.log_stopped()
                self.dispatch_due()
            return
        self.process_durable()
        self._scheduler.extend_if_due()
        self.dispatch_due()

    def process_durable(self) -> None:
        """Pass the arrivals that are durable now to the memory window."""
        for arrival in self._non_durable.pop_durable(self._arrival_log.log.forced_offset):
            self._window.add_durable(arrival.wheel_rows, arrival.count, arrival.due_low, arrival.due_high)
            self._scheduler.arrival_durable(arrival)
        if self._window.missing_due is not None:
            self._scheduler.run_due()

    def wait_for_tail(self, from_offset: int, end: tuple[int, int]) -> None:
        """Fire nothing until the log from `from_offset` to `end` (offset, ordinal) is durable."""
        ticket, log = self._non_durable.begin_append(self._window.wheel.base_ms), self._arrival_log.log
        self._scheduler.tail_offset = from_offset

        def again(*_: Any) -> None:
            self._timers.after(MAINTENANCE_SECONDS, look)

        def look() -> None:
            if self.stopped or log.stopped is not None:
                return  # the next start resolves it
            if log.waits_for_space:
                # The next write makes the tail durable first, but there may be no other write. This truncation removes
                # nothing.
                self._arrival_log.truncate_before(log.first_offset + 1, again)
            elif log.forced_offset < end[0]:
                again()
            else:
                self._scheduler.load_tail(from_offset, end, done)

        def done() -> None:
            self._non_durable.append_failed(ticket)
            self.dispatch_due()

        again()

    # Due messages, and the timer for the next ones

    def dispatch_due(self) -> None:
        """Pop due messages, a limited number, and set the timer for the next due time."""
        if not self.started:
            return
        self.process_durable()
        window, now = self._window, self._broker_clock.now_ms()
        limit = min(now, window.fires_below - 1)
        unsure = self._non_durable.due_limit
        if unsure is not None:
            limit = min(limit, unsure - 1)
            if unsure <= now + LOAD_AHEAD_MS:
                self._request_fsync()
        more = False
        due = window.wheel.next_due
        if due is not None and due <= limit:
            room = FIREABLE_ROWS_MAX - self._target_queues.fireable_count
            if room > 0:
                found = window.wheel.pop(limit, min(POP_ROWS_MAX, room))
                self._target_queues.add_due(found)
                self._mark_ready()
                due = window.wheel.next_due
                more = due is not None and due <= limit
            else:
                more = True
        self._schedule_next(now, more)
        self._schedule_maintenance_if_needed()

    def _schedule_next(self, now: int, more: bool) -> None:
        """Set the timer: at once if more is due, else at the tick after the next due time.

        Messages that wait for an fsync or a load need no timer: the end of that work calls `dispatch_due`.
        """
        if more:
            self._set_timer(
                0.0 if self._target_queues.fireable_count < FIREABLE_ROWS_MAX else self._tick_ms / 1000
            )
            return
        times = []
        due = self._window.wheel.next_due
        if due is not None and due > now:
            times.append(-(-due // self._tick_ms) * self._tick_ms)
        on_disk = self._metrics.next_on_disk
        if on_disk is not None and on_disk - LOAD_AHEAD_MS > now:
            times.append(on_disk - LOAD_AHEAD_MS)
        unsure = self._non_durable.due_limit
        if unsure is not None and unsure - LOAD_AHEAD_MS > now:
            times.append(unsure - LOAD_AHEAD_MS)
        if times:
            self._set_timer(self._broker_clock.seconds_until(min(times)))

    def _set_timer(self, seconds: float) -> None:
        when = self._timers.now() + seconds
        if self._timer is not None:
            if self._timer_due <= when:
                return
            self._timers.cancel(self._timer)
        self._timer_due = when
        self._timer = self._timers.after(seconds, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._scheduler.extend_if_due()
        self.dispatch_due()

    # Maintenance, each second while messages are pending

    def _schedule_maintenance_if_needed(self) -> None:
        if not self._scheduler.is_empty:
            self.schedule_maintenance()

    def schedule_maintenance(self) -> None:
        """Set the timer for maintenance: an fsync of the arrival log, file work, truncation."""
        if self._maintenance_timer is None and self.started:
            self._maintenance_timer = self._timers.after(
                MAINTENANCE_SECONDS, self._run_maintenance, deferrable=True
            )

    def _run_maintenance(self) -> None:
        self._maintenance_timer = None
        self._request_fsync()
        self.process_durable()
        if self._non_durable.last_written is None:
            self._scheduler.skip_to_log_end()
        self._scheduler.run_due()
        self.dispatch_due()
