"""The dispatcher: moves due messages from the timing wheel to their target queues."""

from typing import Any, Final

from tfmq.delay.arrivals.pending import Ledger
from tfmq.delay.due_time import BrokerTime
from tfmq.delay.memory_window import LEAD_MS, Shore
from tfmq.delay.queries import Figures
from tfmq.delay.requests import Landing, Timers
from tfmq.delay.storage_scheduler import Keeper
from tfmq.delay.target_queue import Lines

POP_ROWS: Final = 2048
"""Rows popped at once: about 2 ms, so that other work of the broker is not delayed."""
MOVING_ROWS: Final = 65_536
"""Maximum of popped rows in queues that can fire. Rows need less memory in the wheel."""
HOUSE_SECONDS: Final = 1.0
"""Interval of maintenance while any message is pending."""


class Firing:
    """Pops due messages at the ticks and hands them to the target queues.

    Messages that are due after an arrival that is not durable are not popped; an fsync is requested then. Without a
    due time in the near future no timer runs, except for maintenance.
    """

    def __init__(
        self,
        *,
        figures: Figures,
        landing: Landing,
        ledger: Ledger,
        shore: Shore,
        lines: Lines,
        keeper: Keeper,
        time: BrokerTime,
        timers: Timers,
        tick_ms: int,
    ) -> None:
        self._landing, self._ledger, self._shore, self._lines = landing, ledger, shore, lines
        self._keeper, self._time, self._timers, self._tick_ms = keeper, time, timers, tick_ms
        self._figures = figures
        self.started = self.stopped = False
        self._timer: Any = None
        self._timer_due = 0.0
        self._house: Any = None
        self._asked = 0
        """Offset of the arrival log up to which an fsync was requested."""

    def start(self) -> None:
        """Start firing."""
        self.started = True
        self._keeper.look()
        self.look()

    def stop(self) -> None:
        """Stop popping and cancel the timers."""
        self.started, self.stopped = False, True
        for timer in (self._timer, self._house):
            if timer is not None:
                self._timers.cancel(timer)
        self._timer = self._house = None

    # Arrivals

    def arrived(self, low: int) -> None:
        """Handle a written batch, due at `low` or later. Request an fsync at once if it is due soon."""
        if low < self._shore.horizon:
            self._force_written()
        else:
            self.look()
        self._arm_house()

    def _force_written(self) -> None:
        written = self._ledger.written
        if written is not None and written.end_offset > self._asked:
            self._asked = written.end_offset
            self._landing.when_forced(written.end_offset, self._forced)

    def _forced(self, error: BaseException | None) -> None:
        """Handle the end of an fsync.

        If the log has stopped, targets with unresolved arrivals wait for a restart.
        """
        if error is not None:
            if self._landing.log.stopped is None:
                self._asked = 0
            else:  # The log has stopped until the next start: request nothing more.
                self._ledger.give_up()
                self.look()
            return
        self.settle()
        self._keeper.catch_up()
        self.look()

    def settle(self) -> None:
        """Pass the arrivals that are durable now to the memory window."""
        for landed in self._ledger.forced(self._landing.log.forced_offset):
            self._shore.add(landed.near, landed.count, landed.low, landed.high)
            self._keeper.landed(landed)
        if self._shore.stray is not None:
            self._keeper.look()

    def wait_for_tail(self, from_offset: int, end: tuple[int, int]) -> None:
        """Fire nothing until the log from `from_offset` to `end` (offset, ordinal) is durable."""
        ticket, log = self._ledger.expect(self._shore.wheel.base_ms), self._landing.log
        self._keeper.tail_from = from_offset

        def again(*_: Any) -> None:
            self._timers.after(HOUSE_SECONDS, look)

        def look() -> None:
            if self.stopped or log.stopped is not None:
                return  # the next start resolves it
            if log.waits_for_space:
                # The next write makes the tail durable first, but there may be no other write. This truncation removes
                # nothing.
                self._landing.truncate_before(log.first_offset + 1, again)
            elif log.forced_offset < end[0]:
                again()
            else:
                self._keeper.take_tail(from_offset, end, done)

        def done() -> None:
            self._ledger.failed(ticket)
            self.look()

        again()

    # Timer

    def look(self) -> None:
        """Pop what is due and set the timer for the next due time."""
        if not self.started:
            return
        self.settle()
        window, now = self._shore, self._time.now_ms()
        limit = min(now, window.fires_below - 1)
        unsure = self._ledger.limit
        if unsure is not None:
            limit = min(limit, unsure - 1)
            if unsure <= now + LEAD_MS:
                self._force_written()
        more = False
        due = window.wheel.due_next
        if due is not None and due <= limit:
            room = MOVING_ROWS - self._lines.moving
            if room > 0:
                found = window.wheel.pop(limit, min(POP_ROWS, room))
                self._lines.put(found)
                due = window.wheel.due_next
                more = due is not None and due <= limit
            else:
                more = True
        self._arm(now, more)
        self._arm_house()

    def _arm(self, now: int, more: bool) -> None:
        """Set the timer: at once if more is due, else at the tick after the next due time.

        Messages that wait for an fsync or a load need no timer: the end of that work calls `dispatch_due`.
        """
        if more:
            self._set(0.0 if self._lines.moving < MOVING_ROWS else self._tick_ms / 1000)
            return
        times = []
        due = self._shore.wheel.due_next
        if due is not None and due > now:
            times.append(-(-due // self._tick_ms) * self._tick_ms)
        on_disk = self._figures.next_on_disk
        if on_disk is not None and on_disk - LEAD_MS > now:
            times.append(on_disk - LEAD_MS)
        unsure = self._ledger.limit
        if unsure is not None and unsure - LEAD_MS > now:
            times.append(unsure - LEAD_MS)
        if times:
            self._set(self._time.seconds_until(min(times)))

    def _set(self, seconds: float) -> None:
        when = self._timers.now() + seconds
        if self._timer is not None:
            if self._timer_due <= when:
                return
            self._timers.cancel(self._timer)
        self._timer_due = when
        self._timer = self._timers.after(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._keeper.catch_up()
        self.look()

    # Maintenance

    def _arm_house(self) -> None:
        if not self._keeper.is_empty:
            self.watch()

    def watch(self) -> None:
        """Run maintenance within a second, for example after an append without messages."""
        if self._house is None and self.started:
            self._house = self._timers.after(HOUSE_SECONDS, self._look_after, deferrable=True)

    def _look_after(self) -> None:
        self._house = None
        self._force_written()
        self.settle()
        if self._ledger.written is None:
            self._keeper.follow()
        self._keeper.look()
        self.look()
