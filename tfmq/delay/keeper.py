"""Keeps memory and disk in step: does what `horizon` decides, one piece of file work at a time, in a worker.

Arrivals are spilled to buckets and given up, leaves are loaded, split and retired, the checkpoint is written. An error
of the disk is waited out: what cannot be spilled stays in the arrivals, and is loaded from there.
"""

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from tfmq.delay.arrival_state import ArrivalState
from tfmq.delay.broker_time import BrokerTime
from tfmq.delay.bucket import Bucket
from tfmq.delay.buckets import Buckets
from tfmq.delay.counting import Counting
from tfmq.delay.gathering import DUES_MAX, Arrived, Gatherer
from tfmq.delay.horizon import LEAD_MS, URGENT_MS, Decision, Step, View, decide, goal
from tfmq.delay.leaving import Leaving
from tfmq.delay.ledger import Landed
from tfmq.delay.lines import Lines
from tfmq.delay.loading import Loading
from tfmq.delay.pending import Pendings
from tfmq.delay.pins import Pins
from tfmq.delay.reloading import Reloading
from tfmq.delay.requests import Landing, Run, Timers
from tfmq.delay.shore import Shore
from tfmq.delay.spans import Span
from tfmq.delay.splitting import first_of
from tfmq.delay.unspilled import UNTOLD, Unspilled
from tfmq.delay.wheel_slots import DUE_SPAN
from tfmq.errors import NOT_DONE, StorageStopped

logger = logging.getLogger("tfmq.delay")

PAUSE_SECONDS, PAUSE_SECONDS_MAX = 1.0, 30.0
"""Work that the disk refused is tried again after pauses that double between these."""

Told = Callable[[BaseException | None], None]


class Keeper:
    """See the module. `limit()`, `lowest()`: as of `tfmq.delay.ledger.Ledger`; `moved()`: something more may fire."""

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
        """Arrivals before are on the disk, and known here."""
        self.tail_from: int | None = None
        """From this offset on lies what a start could not take for sure (`take_tail`)."""
        self.busy: Step | None = None
        self.stopping = self._looking = False
        self.changed = False
        """Whether the checkpoint would say something else now."""
        self._unspilled, self._committed = Unspilled(), 0
        self._pins = Pins(buckets.spilled_offset)
        self._unsplittable: set[Span] = set()
        self._wanted: list[Told] = []
        self._loading = Loading(shore, buckets, gatherer, timers=timers, run=run)
        self._reloading = Reloading(lines, buckets, gatherer)
        self._pause, self._write_after = PAUSE_SECONDS, 0.0
        self._stopped: Callable[[], None] | None = None

    # What arrives

    def landed(self, landed: Landed) -> None:
        """It is on the disk."""
        self.offset, self.number = landed.end_offset, landed.number_next
        self._unspilled.landed(landed.low, self._time.now_ms())
        self.changed = True

    def follow(self) -> None:
        """All that was told to land is there: what lies behind it are cancels and ended streams, which go, too."""
        log = self._landing.log
        if log.forced_offset == log.end_offset > self.offset and self.tail_from is None:
            self.offset, self.number, self.changed = log.end_offset, log.end_ordinal, True
            self._unspilled.landed(None, self._time.now_ms())

    @property
    def unspilled_bytes(self) -> int:
        """Arrivals in no bucket."""
        return self.offset - self._buckets.spilled_offset

    @property
    def is_empty(self) -> bool:
        """Nothing is on the disk that is not settled."""
        return not (self._buckets.leaves or self.unspilled_bytes) and self._limit() is None

    def when_spilled(self, done: Told) -> None:
        """`done(None)` once all that is on the disk now is in buckets, `done(error)` if that cannot be done."""
        if not self.unspilled_bytes:
            return done(None)
        if self._buckets.stopped is not None:
            return done(StorageStopped(UNTOLD, reason=self._buckets.stopped, outcome=NOT_DONE))
        self._wanted.append(done)
        self.look()

    # Deciding

    def look(self) -> None:
        """Does what is to be done next, unless something is under way. Work that ends at once is followed by more."""
        if self._looking or (self.tail_from is not None and self.tail_from < self._landing.log.forced_offset):
            return  # or there is a tail that must be known first
        self._looking = True
        while self.busy is None and not self.stopping:
            self._retire()
            decision = decide(self.view())
            if decision.step is Step.REST or not self._take(decision):
                break
        self._looking = False
        self._try_stop()

    def view(self) -> View:
        """How things are."""
        shore, buckets, lines = self._shore, self._buckets, self._lines
        now = self._time.now_ms()
        bucket = buckets.next_after(shore.horizon)
        return View(
            now=now,
            horizon=shore.horizon,
            unsure=self._limit(),
            stray=shore.stray,
            rows=shore.wheel.held + lines.queued,
            moving=lines.moving + (shore.wheel.held if shore.horizon <= now else 0),
            span=None if bucket is None else bucket.span,
            span_rows=0 if bucket is None else bucket.count,
            divisible=bucket is None or bucket.span not in self._unsplittable,
            far_low=shore.far.low,
            far_count=shore.far.count,
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
        """Begins, or does, what was decided; False if nothing came of it."""
        step, to = decision
        if step is Step.RETREAT:
            dropped = self._shore.retreat(to, self._buckets.spilled_offset)
            logger.info("%d delayed messages that are due from %d on are left on the disk", dropped, to)
            if to <= self._time.now_ms():  # it lies before what fired already
                self._counting.want(self._buckets.leaves, True)
            return True
        if step is Step.MOVE or step is Step.LOAD:
            unsure, now = self._limit(), self._time.now_ms()
            to = self._shore.reach(to, now if unsure is None else min(unsure, now))
            if to <= self._shore.horizon:
                return False  # a wheel holds 34 years: what is due first must fire before
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
        """A piece of work ended; with an error, nothing is written for a while."""
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
        self._moved()
        self.look()

    # Loading

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

    # Spilling, splitting, giving up

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
            for told in wanted:
                told(error)
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
        """Buckets in which everything is settled, on the disk, count no more."""
        shore, lines = self._shore, self._lines
        limits = (shore.fires_below, shore.wheel.due_next, lines.due_first, self._lowest())
        through = min(limit for limit in limits if limit is not None)
        for bucket in self._buckets.leaves:
            if bucket.span.end > through:
                break
            self._buckets.retire(bucket)
            self.changed = True
        needed = min(limit for limit in (shore.fires_below, shore.wheel.due_next) if limit is not None)
        if self._is_crowded and self._pins.next_horizon <= needed:
            lines.forget_parked(self._pins.next_horizon)
        first = lines.rows_first
        for bucket in self._pins.release(needed if first is None else min(first, needed)):
            self._buckets.release(bucket)
            self._unsplittable.clear()
            self.changed = True

    @property
    def _is_crowded(self) -> bool:
        """Arrivals that are in buckets stay for rows in memory: those of lines that wait for a target give way."""
        log = self._landing.log
        kept, spilled = self._pins.offset - log.first_offset, self._buckets.spilled_offset - log.first_offset
        return kept < log.options.segment_bytes and spilled >= 2 * log.options.segment_bytes

    def _spare(self) -> int:
        """Arrivals before this offset nobody needs any more."""
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
        """Nothing that is due before is in any file that counts: it is settled, or was cancelled."""
        starts = [bucket.span.start for bucket in self._buckets.leaves[:1]]
        limits = [*self._unspilled.lows, *starts, self._lowest()]
        return min((limit for limit in limits if limit is not None), default=DUES_MAX)

    # For others

    @property
    def is_hungry(self) -> bool:
        """Whether a look is worth it now, since lines wait for what is on the disk."""
        if self.busy is not None or self.stopping:
            return False
        urgent = self._shore.horizon <= self._time.now_ms() + URGENT_MS
        return self._reloading.wanted or (urgent and not self.is_empty)

    # Starting and stopping

    def recover(self, found: Arrived, offset: int, number: int, whole: bool) -> None:
        """A start found these in arrivals that are in no bucket. The horizon begins where the buckets do. Unless they
        are the `whole`, a tail comes later, of which some may have been due long ago."""
        self.offset, self.number = offset, number
        shore, now = self._shore, self._time.now_ms()
        lows = [min(near.dues) for near in found.near if len(near.dues)]
        horizon = min([goal(now), *(bucket.span.start for bucket in self._buckets.leaves[:1])])
        shore.begin(min([now if whole else max(0, now - DUE_SPAN // 2), horizon, *lows]), horizon)
        self._take_in(found)

    def _take_in(self, found: Arrived) -> None:
        self._leaving.recovered(found.changed, self.offset)
        if self.unspilled_bytes:
            self._unspilled.landed(found.low, self._time.now_ms())
        for told in found.told:
            self._time.learn(*told)
        for near in found.near:
            if len(near.dues):
                self._shore.add(near, len(near.dues), min(near.dues), max(near.dues))

    def take_tail(self, from_offset: int, end: tuple[int, int], done: Callable[[], None]) -> None:
        """What lies between is on the disk only now."""

        def found(arrived: Arrived | None, error: BaseException | None) -> None:
            if arrived is None:
                logger.error("delayed messages that arrived last cannot be read, tried again: %s", error)
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
        """Something arrives: the horizon is where it should be, if that takes no work."""
        if self._shore.horizon <= self._time.now_ms() + LEAD_MS:
            self.look()

    def stop(self, done: Callable[[], None]) -> None:
        """Begins nothing more; `done()` when nothing is under way."""
        self.stopping = True
        self._loading.stop()
        self._stopped = done
        for told in self._wanted:
            told(StorageStopped(reason="the broker stops", outcome=NOT_DONE))
        self._wanted.clear()
        self._try_stop()

    def _try_stop(self) -> None:
        if self._stopped is not None and self.busy is None:
            done, self._stopped = self._stopped, None
            done()
