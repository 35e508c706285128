"""The storage scheduler: runs the file work that `memory_window.decide` selects.

It runs one piece of work at a time, in a worker. It spills arrivals to buckets, truncates the arrival log, loads,
splits and removes buckets, and writes the checkpoint. Disk errors are retried: arrivals that cannot be spilled are
loaded from the arrival log.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, NamedTuple

from tfmq.delay.arrivals.pending import Landed, Near
from tfmq.delay.arrivals.state import ArrivalState
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import Span
from tfmq.delay.buckets.loader import DUES_MAX, Area, Arrived, Gatherer, in_order
from tfmq.delay.buckets.store import Buckets
from tfmq.delay.buckets.writer import Pending, first_of
from tfmq.delay.cancelled_rows import Counting, Leaving
from tfmq.delay.due_time import BrokerTime
from tfmq.delay.flow_control import FLOW_PAUSE_SECONDS
from tfmq.delay.memory_window import LEAD_MS, URGENT_MS, Decision, Shore, Step, View, decide, goal
from tfmq.delay.pending import Pendings
from tfmq.delay.requests import Landing, Run, Timers, Turn
from tfmq.delay.rows import Part
from tfmq.delay.target_queue import ROWS_MAX, Line, Lines
from tfmq.delay.timing_wheel import DUE_SPAN
from tfmq.errors import NOT_DONE, StorageStopped

logger = logging.getLogger("tfmq.delay")

PAUSE_SECONDS, PAUSE_SECONDS_MAX = 1.0, 30.0
"""Bounds of the pauses before work is retried after a disk error; they double."""

Told = Callable[[BaseException | None], None]


class Keeper:
    """Runs the file work of delayed messages, one piece at a time, in a worker.

    `limit()` and `lowest()` are those of `tfmq.delay.arrivals.pending.Ledger`. `moved()` is called after work that may
    have made more messages ready to fire.
    """

    def __init__(
        self,
        *,
        landing: Landing,
        state: ArrivalState,
        pendings: Pendings,
        buckets: Buckets,
        gatherer: Gatherer,
        shore: Shore,
        lines: Lines,
        time: BrokerTime,
        timers: Timers,
        run: Run,
        limit: Callable[[], int | None],
        lowest: Callable[[], int | None],
        outcome_ms: int,
        counting: Counting,
        leaving: Leaving,
        moved: Callable[[], None],
    ) -> None:
        self._landing, self._state, self._buckets, self._gatherer = landing, state, buckets, gatherer
        self._shore, self._lines, self._time, self._timers = shore, lines, time, timers
        self._pendings = pendings
        self._run_worker, self._limit, self._lowest, self._outcome_ms = run, limit, lowest, outcome_ms
        self._counting, self._leaving, self._moved = counting, leaving, moved
        self.offset = buckets.spilled_offset
        self.number = buckets.spilled_number
        """Arrivals before these, by offset and number, are durable and processed."""
        self.tail_from: int | None = None
        """Offset from which on the log was not durable at the start (`load_tail`); None: all was."""
        self.busy: Step | None = None
        self.stopping = self._looking = False
        self.changed = False
        """Whether the checkpoint is out of date."""
        self._unspilled, self._committed = Unspilled(), 0
        self._pins = Pins(buckets.spilled_offset)
        self._unsplittable: set[Span] = set()
        self._wanted: list[Told] = []
        self._loading = Loading(shore, buckets, gatherer, timers=timers, run=run)
        self._reloading = Reloading(lines, buckets, gatherer)
        self._pause, self._write_after = PAUSE_SECONDS, 0.0
        self._stopped: Callable[[], None] | None = None

    # Arrivals

    def landed(self, landed: Landed) -> None:
        """Record a durable batch."""
        self.offset, self.number = landed.end_offset, landed.number_next
        self._unspilled.landed(landed.low, self._time.now_ms())
        self.changed = True

    def follow(self) -> None:
        """Advance to the end of the log if all batches are processed: the rest has no messages.

        Cancels and closed producer streams can then be truncated, too.
        """
        log = self._landing.log
        if log.forced_offset == log.end_offset > self.offset and self.tail_from is None:
            self.offset, self.number, self.changed = log.end_offset, log.end_ordinal, True
            self._unspilled.landed(None, self._time.now_ms())

    @property
    def unspilled_bytes(self) -> int:
        """Bytes of arrivals that are in no bucket."""
        return self.offset - self._buckets.spilled_offset

    @property
    def is_empty(self) -> bool:
        """Whether there are no pending messages on disk."""
        return not (self._buckets.leaves or self.unspilled_bytes) and self._limit() is None

    def when_spilled(self, done: Told) -> None:
        """Call `done(None)` once all durable arrivals are in buckets; `done(error)` if that fails."""
        self._wanted.append(done)
        self._tell_wanted()
        if self._wanted:
            self.look()

    def _tell_wanted(self) -> None:
        """Reply to all of `_wanted` if nothing is left to spill, or if no spill is possible until the next start."""
        error = None
        if self.unspilled_bytes:
            if self._buckets.stopped is None:
                return
            error = StorageStopped(UNTOLD, reason=self._buckets.stopped, outcome=NOT_DONE)
        wanted, self._wanted = self._wanted, []
        for told in wanted:
            told(error)

    # Scheduling

    def look(self) -> None:
        """Start the next work unless some is running.

        Steps that need no worker are repeated until none is left.
        """
        if self._looking or (self.tail_from is not None and self.tail_from < self._landing.log.forced_offset):
            return  # a tail of the log must be loaded first
        self._looking = True
        while self.busy is None and not self.stopping:
            self._retire()
            decision = decide(self.view())
            if decision.step is Step.REST or not self._take(decision):
                break
        self._looking = False
        self._try_stop()

    def view(self) -> View:
        """Return the input of `decide`."""
        window, buckets, queues = self._shore, self._buckets, self._lines
        now = self._time.now_ms()
        bucket = buckets.next_after(window.horizon)
        return View(
            now=now,
            horizon=window.horizon,
            unsure=self._limit(),
            stray=window.stray,
            rows=window.wheel.held + queues.queued,
            moving=queues.moving + (window.wheel.held if window.horizon <= now else 0),
            span=None if bucket is None else bucket.span,
            span_rows=0 if bucket is None else bucket.count,
            divisible=bucket is None or bucket.span not in self._unsplittable,
            far_low=window.far.low,
            far_count=window.far.count,
            unspilled_bytes=self.unspilled_bytes,
            unspilled_since=self._unspilled.since,
            writable=buckets.stopped is None and self._timers.now() >= self._write_after,
            wanted=bool(self._wanted),
            splits=self._to_split() is not None,
            counts=self._counting.due,
            reloads=self._reloading.wanted,
            spare_bytes=self._spare() - self._landing.log.first_offset,
            segment_bytes=self._landing.log.options.segment_bytes,
            committed=self._committed,
            changed=self.changed,
        )

    def _take(self, decision: Decision) -> bool:
        """Start or do the step; return False if it had no effect."""
        step, to = decision
        if step is Step.RETREAT:
            dropped = self._shore.retreat(to, self._buckets.spilled_offset)
            logger.info("%d delayed messages that are due from %d on are left on the disk", dropped, to)
            if to <= self._time.now_ms():  # `to` may be before messages that were fired
                self._counting.want(self._buckets.leaves, True)
            return True
        if step is Step.MOVE or step is Step.LOAD:
            unsure, now = self._limit(), self._time.now_ms()
            to = self._shore.reach(to, now if unsure is None else min(unsure, now))
            if to <= self._shore.horizon:
                return False  # the wheel covers 34 years: earlier messages must fire first
        if step is Step.MOVE:
            self._shore.move(to)
            self._moved()
            return True
        self.busy = step
        self._leaving.begin(self._landing.log.forced_offset)
        if step is Step.LOAD:
            self._load(to)
        else:
            work = {Step.SPILL: self._spill, Step.SPLIT: self._split, Step.COUNT: self._count}
            work |= {Step.RELOAD: self._reload, Step.TRUNCATE: self._truncate, Step.COMMIT: self._commit}
            work[step]()
        return True

    def _ended(self, error: BaseException | None = None) -> None:
        """End a piece of work. After an error nothing is written for a while."""
        if error is None:
            self._pause = PAUSE_SECONDS
        else:
            what = self.busy.value if self.busy is not None else "work"
            logger.error("delayed messages: the %s failed and is tried again: %s", what, error)
            self._write_after = self._timers.now() + self._pause
            self._timers.after(self._pause, self.look)
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
        self.busy = None
        self._leaving.end()
        # A spill replies only to requests made before it began. Afterwards there may be nothing left to spill, so no
        # other spill would begin for later requests; and any work that writes may have stopped the buckets.
        self._tell_wanted()
        self._moved()
        self.look()

    # Load

    def _load(self, to: int) -> None:
        self._loading.begin(
            to, self._buckets.spilled_offset, self.offset, self._pendings.for_work(), self._ended
        )

    def _reload(self) -> None:
        offsets = (self._buckets.spilled_offset, self.offset)
        work = self._reloading.begin(*offsets, self._shore.front, self._pendings.for_work())
        self._run_worker(work, self._reloaded)

    def _reloaded(self, result: Any, error: BaseException | None) -> None:
        self._reloading.end(result, error)
        self._ended()

    # Spill, split, count, remove

    def _spill(self) -> None:
        buckets, offset, number = self._buckets, self.offset, self.number
        self._shore.begin_spill()
        self._unspilled.begin_spill()
        wanted, self._wanted = self._wanted, []
        pending = self._pendings.for_work(self._shore.border)
        batches = self._gatherer.batches(buckets.spilled_offset, offset, damaged=pending.damage.append)
        how = (self._time.now_ms(), pending, self._time.dump())
        work = partial(buckets.spill, batches, offset, number, *how)

        def done(result: Any, error: BaseException | None) -> None:
            count = self._shore.end_spill(error is None)
            self._unspilled.end_spill(error is None)
            if error is None:
                self._pins.spilled(offset, self._shore.horizon)
                self._lines.note_lost(pending.dropped, pending.lost(count))
                self._committed = self._time.now_ms()
            for waiter in wanted:
                waiter(error)
            self._ended(error)

        self._run_worker(work, done)

    def _to_split(self) -> Bucket | None:
        named = [*self._buckets.cascade_due(self._time.now_ms()), *self._buckets.full()]
        following = self._buckets.next_after(self._shore.horizon)
        return first_of(named, following, self._shore.horizon, self._unsplittable)

    def _split(self) -> None:
        bucket = self._to_split() or self._buckets.next_after(self._shore.horizon)
        assert bucket is not None, "a split was decided without a bucket"
        done = partial(self._has_split, bucket)
        self._run_worker(partial(self._buckets.split, bucket, self._pendings.for_work()), done)

    def _has_split(
        self, bucket: Bucket, pieces: Collection[Bucket] | None, error: BaseException | None
    ) -> None:
        if pieces is not None:
            self._pins.split(bucket, self._shore.horizon)
        else:
            self._unsplittable.add(bucket.span)
        self._ended(error)

    def _count(self) -> None:
        self._run_worker(self._counting.begin(self._pendings.for_work()), self._counted)

    def _counted(self, found: Callable[[], bool] | None, error: BaseException | None) -> None:
        self.changed = (found is not None and found()) or self.changed
        self._ended()

    def _retire(self) -> None:
        """Mark buckets obsolete in which everything is durably delivered.

        Release files that memory does not need.
        """
        window, queues = self._shore, self._lines
        limits = (window.fires_below, window.wheel.due_next, queues.due_first, self._lowest())
        through = min(limit for limit in limits if limit is not None)
        for bucket in self._buckets.leaves:
            if bucket.span.end > through:
                break
            self._buckets.retire(bucket)
            self.changed = True
        needed = min(limit for limit in (window.fires_below, window.wheel.due_next) if limit is not None)
        if self._is_crowded and self._pins.next_horizon <= needed:
            queues.forget_parked(self._pins.next_horizon)
        first = queues.rows_first
        for bucket in self._pins.release(needed if first is None else min(first, needed)):
            self._buckets.release(bucket)
            self._unsplittable.clear()
            self.changed = True

    @property
    def _is_crowded(self) -> bool:
        """Whether blocked queues should drop their rows.

        Their locators retain two segments of spilled arrivals.
        """
        log = self._landing.log
        kept, spilled = self._pins.offset - log.first_offset, self._buckets.spilled_offset - log.first_offset
        return kept < log.options.segment_bytes and spilled >= 2 * log.options.segment_bytes

    def _spare(self) -> int:
        """Return the offset before which arrivals are obsolete."""
        return min(self._pins.offset, self._buckets.spilled_offset)

    def _truncate(self) -> None:
        self._landing.truncate_before(self._spare(), lambda result, error: self._ended(error))

    def _commit(self) -> None:
        now = self._time.now_ms()
        self.changed = False
        low = min(self.floor, now - self._outcome_ms)

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                self._committed = now
                self._state.forget_before(low)
            else:
                self.changed = True
            self._ended(error)

        self._run_worker(partial(self._buckets.commit, now, self._time.dump()), done)

    @property
    def floor(self) -> int:
        """Due time before which no message is in a file that counts: all are delivered or cancelled."""
        starts = [bucket.span.start for bucket in self._buckets.leaves[:1]]
        limits = [*self._unspilled.lows, *starts, self._lowest()]
        return min((limit for limit in limits if limit is not None), default=DUES_MAX)

    # Queries

    @property
    def is_hungry(self) -> bool:
        """Whether `run_due` should be called now, because queues wait for messages on disk."""
        if self.busy is not None or self.stopping:
            return False
        urgent = self._shore.horizon <= self._time.now_ms() + URGENT_MS
        return self._reloading.wanted or (urgent and not self.is_empty)

    # Start and stop

    def recover(self, found: Arrived, offset: int, number: int, whole: bool) -> None:
        """Restore the state from the arrivals that are in no bucket.

        The window starts where the buckets start. `whole`: False if a tail of the log follows later, which may hold
        messages that were due long ago.
        """
        self.offset, self.number = offset, number
        window, now = self._shore, self._time.now_ms()
        lows = [min(rows.dues) for rows in found.near if len(rows.dues)]
        horizon = min([goal(now), *(bucket.span.start for bucket in self._buckets.leaves[:1])])
        window.begin(min([now if whole else max(0, now - DUE_SPAN // 2), horizon, *lows]), horizon)
        self._take_in(found)

    def _take_in(self, found: Arrived) -> None:
        self._leaving.recovered(found.changed, self.offset)
        if self.unspilled_bytes:
            self._unspilled.landed(found.low, self._time.now_ms())
        for step in found.told:
            self._time.learn(*step)
        for rows in found.near:
            if len(rows.dues):
                self._shore.add(rows, len(rows.dues), min(rows.dues), max(rows.dues))

    def take_tail(self, from_offset: int, end: tuple[int, int], done: Callable[[], None]) -> None:
        """Load the tail of the log, which is durable now, then call `done()`. Errors are retried."""

        def found(arrived: Arrived | None, error: BaseException | None) -> None:
            if arrived is None:
                logger.error("the last delayed messages of the log cannot be read, tried again: %s", error)
                self._timers.after(PAUSE_SECONDS_MAX, partial(self.take_tail, from_offset, end, done))
                return
            self.tail_from, self.changed = None, True
            self.offset, self.number = max(self.offset, end[0]), max(self.number, end[1])
            self._take_in(arrived)
            done()
            self.look()

        work = partial(self._gatherer.arrived, from_offset, end[0], self._pendings.now())
        self._run_worker(work, found)

    def catch_up(self) -> None:
        """Extend the window if it is due to be extended."""
        if self._shore.horizon <= self._time.now_ms() + LEAD_MS:
            self.look()

    def stop(self, done: Callable[[], None]) -> None:
        """Start no more work; call `done()` when none is running."""
        self.stopping = True
        self._loading.stop()
        self._stopped = done
        for waiter in self._wanted:
            waiter(StorageStopped(reason="the broker stops", outcome=NOT_DONE))
        self._wanted.clear()
        self._try_stop()

    def _try_stop(self) -> None:
        if self._stopped is not None and self.busy is None:
            done, self._stopped = self._stopped, None
            done()


PUT_ROWS: Final = 8192
"""Rows added to the wheel in one turn of the broker, about 3 ms of work."""
LOAD_PAUSE_SECONDS: Final = 1.0
LOAD_PAUSE_SECONDS_MAX: Final = 10.0
"""Bounds of the pauses before a failed load is retried; they double.

Nothing after the load fires meanwhile.
"""


class Loading:
    """Loads the messages between the old and a new end of the window into the wheel.

    None fires before all are loaded. One load at a time.
    """

    def __init__(
        self, shore: Shore, buckets: Buckets, gatherer: Gatherer, *, timers: Timers, run: Run
    ) -> None:
        self._shore, self._buckets, self._gatherer = shore, buckets, gatherer
        self._timers, self._run = timers, run
        self._pause = LOAD_PAUSE_SECONDS
        self._stopping = False
        self._done: Callable[[], None] | None = None

    def begin(
        self, to: int, from_offset: int, to_offset: int, pending: Pending, done: Callable[[], None]
    ) -> None:
        """Extend the window to `to` and call `done()` when all below is in the wheel.

        Arrivals between the offsets are in no bucket.
        """
        low = self._shore.begin_load(to)
        buckets = [each for each in self._buckets.leaves if each.span.end > low and each.span.start < to]
        self._done = done
        self._gather(Area(low, to, buckets, from_offset, to_offset), pending)

    def stop(self) -> None:
        """Do not wait for rows that are not loaded yet."""
        self._stopping = True

    def _gather(self, area: Area, pending: Pending) -> None:
        self._run(partial(self._gatherer.near, area, pending), partial(self._loaded, area, pending))

    def _loaded(
        self, area: Area, pending: Pending, found: list[Near] | None, error: BaseException | None
    ) -> None:
        """Add the loaded rows, or retry.

        The old window cannot be restored, because later arrivals were compared with its new end.
        """
        if found is not None:
            self._pause = LOAD_PAUSE_SECONDS
            self._put([rows for rows in found if len(rows.dues)])
        elif self._stopping:
            self._end()
        else:
            logger.error("delayed messages that are soon due cannot be loaded, tried again: %s", error)
            self._timers.after(self._pause, partial(self._gather, area, pending))
            self._pause = min(2 * self._pause, LOAD_PAUSE_SECONDS_MAX)

    def _put(self, found: list[Near]) -> None:
        """Add a limited number of rows in each turn of the broker, to not delay other work."""
        room = PUT_ROWS
        while found and room > 0:
            rows = found.pop()
            if len(rows.dues) > room:
                found.append(Near(*(column[room:] for column in rows)))
                rows = Near(*(column[:room] for column in rows))
            self._shore.put(rows)
            room -= len(rows.dues)
        if found and not self._stopping:
            self._timers.after(0.0, partial(self._put, found))
            return
        if not found:
            self._shore.end_load()
        self._end()

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()


class _Pin(NamedTuple):
    horizon: int
    offset: int | None
    bucket: Bucket | None


class Pins:
    """Which files must be kept because rows in memory have locators into them.

    Rows that were in memory at a spill or a split were due before the end of the window at that time; rows loaded later
    have locators into the new files. So when everything due before that end has fired, the old files are obsolete.

    Arrivals before `offset` are obsolete.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._pins: deque[_Pin] = deque()
        self._top = 0

    def spilled(self, offset: int, horizon: int) -> None:
        """Record a spill of the arrivals before `offset`."""
        self._add(horizon, offset, None)

    def split(self, bucket: Bucket, horizon: int) -> None:
        """Record that the messages of a bucket are in other buckets now."""
        self._add(horizon, None, bucket)

    def _add(self, horizon: int, offset: int | None, bucket: Bucket | None) -> None:
        """Add a reference; a window that has shrunk must not release an earlier reference too early."""
        self._top = max(horizon, self._top) if self._pins else horizon
        self._pins.append(_Pin(self._top, offset, bucket))

    @property
    def next_horizon(self) -> int:
        """Rows due before this time hold the oldest reference; 0 if there is none."""
        return self._pins[0].horizon if self._pins else 0

    def release(self, needed: int) -> list[Bucket]:
        """Release references, given that no row in memory is due before `needed`.

        Return the unreferenced buckets.
        """
        found = []
        while self._pins and self._pins[0].horizon <= needed:
            pin = self._pins.popleft()
            if pin.bucket is not None:
                found.append(pin.bucket)
            if pin.offset is not None:
                self.offset = pin.offset
        return found


class Found(NamedTuple):
    """Reloaded rows. `more`: the turn from which on there are more; None: these are all."""

    part: Part
    more: Turn | None


class Reloading:
    """Reloads the rows that a target queue has dropped.

    Reads buckets and arrivals, a bounded number of rows at a time. One queue at a time.
    """

    def __init__(self, lines: Lines, buckets: Buckets, gatherer: Gatherer) -> None:
        self._lines, self._buckets, self._gatherer = lines, buckets, gatherer
        self._line: Line | None = None
        self._ticket = 0

    @property
    def wanted(self) -> bool:
        """Whether a queue has rows only on disk and could send them."""
        return self._lines.wanting() is not None

    def begin(
        self, from_offset: int, to_offset: int, front: Turn, pending: Pending
    ) -> Callable[[], Found | None]:
        """Return work for a worker: find rows of the next queue with turns below `front`.

        Higher turns were not popped from the wheel yet.
        """
        self._line = queue = self._lines.wanting()
        if queue is None or queue.behind is None:
            return lambda: None
        self._ticket = queue.reload()
        return partial(self._find, queue.key, queue.behind, from_offset, to_offset, front, pending)

    def _find(
        self, key: int, after: Turn, from_offset: int, to_offset: int, front: Turn, pending: Pending
    ) -> Found:
        """Read buckets until there are enough rows, then the arrivals of the same time range."""
        found: list[Near] = []
        high = front.due + 1
        count, covered = 0, high
        for bucket in self._buckets.leaves:
            if bucket.span.end <= after.due or bucket.span.start >= high:
                continue
            area = Area(after.due, high, [bucket], 0, 0)
            found += self._gatherer.near(area, pending, (key,))
            count = sum([len(rows.dues) for rows in found])
            if count >= ROWS_MAX:
                covered = min(high, bucket.span.end)
                break
        found += self._gatherer.near(Area(after.due, covered, [], from_offset, to_offset), pending, (key,))
        part, more = in_order(found, after, front, ROWS_MAX)
        if more is None and covered < high:
            more = Turn(covered, 0)
        return Found(part, more)

    def end(self, found: Found | None, error: BaseException | None) -> None:
        """Pass the rows to the queue. After an error the queue pauses."""
        queue, self._line = self._line, None
        if queue is None:
            return
        if found is None:
            queue.reloaded(self._ticket, None, None)
            queue.hold(FLOW_PAUSE_SECONDS)
        else:
            queue.reloaded(self._ticket, *found)


UNTOLD: Final = (
    "Pending messages cannot be listed or counted, because the disk failed under the buckets of delayed messages."
    " Repair the disk, then start the broker again."
)
"""Lists and counts need all arrivals in buckets, which are not writable any more."""


class Unspilled:
    """Arrivals that are in no bucket: their lowest due time, pending or not, and their age.

    `lows`: the lowest due time of these, and of a running spill. `since`: the broker time of the first of them.
    """

    def __init__(self) -> None:
        self.low: int | None = None
        self.since: int | None = None
        self._going: tuple[int | None, int | None] = (None, None)

    def landed(self, low: int | None, now_ms: int) -> None:
        """Add arrivals; `low` is None if they have no messages."""
        self.low = min([each for each in (low, self.low) if each is not None], default=None)
        self.since = self.since or now_ms

    @property
    def lows(self) -> list[int]:
        return [low for low in (self.low, self._going[0]) if low is not None]

    def begin_spill(self) -> None:
        """Start a spill of all arrivals; later ones are counted separately."""
        self._going = self.low, self.since
        self.low = self.since = None

    def end_spill(self, done: bool) -> None:
        """End a spill; if it failed, count its arrivals again."""
        (low, since), self._going = self._going, (None, None)
        if not done:
            self.landed(low, since or 0)
            self.since = since
