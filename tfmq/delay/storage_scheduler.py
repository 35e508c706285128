"""Keeps memory and disk in step: does what `horizon` decides, one piece of file work at a time, in a worker.

Arrivals are spilled to buckets and given up, leaves are loaded, split and retired, the checkpoint is written. An error
of the disk is waited out: what cannot be spilled stays in the arrivals, and is loaded from there.
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
"""Work that the disk refused is tried again after pauses that double between these."""

Told = Callable[[BaseException | None], None]


class Keeper:
    """See the module. `limit()`, `lowest()`: as of `tfmq.delay.arrivals.pending.Ledger`; `moved()`: something more may
    fire.
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


PUT_ROWS: Final = 8192
"""Rows that come to the wheel in one turn, some three milliseconds' work."""
LOAD_PAUSE_SECONDS: Final = 1.0
LOAD_PAUSE_SECONDS_MAX: Final = 10.0
"""What the disk does not give is asked for again after pauses that double between these: nothing behind it fires."""


class Loading:
    """Brings what is due between the old horizon and a new one into the wheel; until it is there nothing of it fires.

    One load at a time.
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
        """Moves the horizon to `to`; `done()` when all below it is in the wheel. Arrivals between the offsets are in no
        bucket."""
        low = self._shore.begin_load(to)
        buckets = [each for each in self._buckets.leaves if each.span.end > low and each.span.start < to]
        self._done = done
        self._gather(Area(low, to, buckets, from_offset, to_offset), pending)

    def stop(self) -> None:
        """What is not there yet is not waited for."""
        self._stopping = True

    def _gather(self, area: Area, pending: Pending) -> None:
        self._run(partial(self._gatherer.near, area, pending), partial(self._loaded, area, pending))

    def _loaded(
        self, area: Area, pending: Pending, found: list[Near] | None, error: BaseException | None
    ) -> None:
        """An error leaves all as it is, since what arrived meanwhile was judged by the new horizon: once more."""
        if found is not None:
            self._pause = LOAD_PAUSE_SECONDS
            self._put([near for near in found if len(near.dues)])
        elif self._stopping:
            self._end()
        else:
            logger.error("delayed messages that are soon due cannot be loaded, tried again: %s", error)
            self._timers.after(self._pause, partial(self._gather, area, pending))
            self._pause = min(2 * self._pause, LOAD_PAUSE_SECONDS_MAX)

    def _put(self, found: list[Near]) -> None:
        """Some rows a turn, so that nobody waits for all of them."""
        room = PUT_ROWS
        while found and room > 0:
            near = found.pop()
            if len(near.dues) > room:
                found.append(Near(*(column[room:] for column in near)))
                near = Near(*(column[:room] for column in near))
            self._shore.put(near)
            room -= len(near.dues)
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
    """Until when files must stay because messages in memory say that their records lie there.

    Whatever was near when arrivals were spilled, or a bucket split, was due below the horizon of that moment; what came
    near later lies in the new files. So when everything below that horizon has fired, nobody looks into the old ones.

    Arrivals before `offset` nobody needs.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._pins: deque[_Pin] = deque()
        self._top = 0

    def spilled(self, offset: int, horizon: int) -> None:
        """Arrivals up to there are in buckets."""
        self._add(horizon, offset, None)

    def split(self, bucket: Bucket, horizon: int) -> None:
        """What was in the bucket is in others."""
        self._add(horizon, None, bucket)

    def _add(self, horizon: int, offset: int | None, bucket: Bucket | None) -> None:
        """A horizon that was taken back does not let an earlier pin go."""
        self._top = max(horizon, self._top) if self._pins else horizon
        self._pins.append(_Pin(self._top, offset, bucket))

    @property
    def next_horizon(self) -> int:
        """What is due below keeps the oldest pin; 0 without one."""
        return self._pins[0].horizon if self._pins else 0

    def release(self, needed: int) -> list[Bucket]:
        """Nothing in memory is due before `needed`: the buckets that nobody looks into any more."""
        found = []
        while self._pins and self._pins[0].horizon <= needed:
            pin = self._pins.popleft()
            if pin.bucket is not None:
                found.append(pin.bucket)
            if pin.offset is not None:
                self.offset = pin.offset
        return found


class Found(NamedTuple):
    """`more`: the turn from which on there are others; None: these are all."""

    part: Part
    more: Turn | None


class Reloading:
    """Brings rows back to a line that had given them up: from the buckets and the arrivals, a bounded number at a time.

    One line at a time.
    """

    def __init__(self, lines: Lines, buckets: Buckets, gatherer: Gatherer) -> None:
        self._lines, self._buckets, self._gatherer = lines, buckets, gatherer
        self._line: Line | None = None
        self._ticket = 0

    @property
    def wanted(self) -> bool:
        """Whether a line is behind and would fire."""
        return self._lines.wanting() is not None

    def begin(
        self, from_offset: int, to_offset: int, front: Turn, pending: Pending
    ) -> Callable[[], Found | None]:
        """Work for a worker: what of the first such line has a turn below `front`, all that ever came to it."""
        self._line = line = self._lines.wanting()
        if line is None or line.behind is None:
            return lambda: None
        self._ticket = line.reload()
        return partial(self._find, line.key, line.behind, from_offset, to_offset, front, pending)

    def _find(
        self, key: int, after: Turn, from_offset: int, to_offset: int, front: Turn, pending: Pending
    ) -> Found:
        """A bucket at a time until there are enough; the arrivals are looked through as far as that reached."""
        found: list[Near] = []
        high = front.due + 1
        count, covered = 0, high
        for bucket in self._buckets.leaves:
            if bucket.span.end <= after.due or bucket.span.start >= high:
                continue
            area = Area(after.due, high, [bucket], 0, 0)
            found += self._gatherer.near(area, pending, (key,))
            count = sum([len(near.dues) for near in found])
            if count >= ROWS_MAX:
                covered = min(high, bucket.span.end)
                break
        found += self._gatherer.near(Area(after.due, covered, [], from_offset, to_offset), pending, (key,))
        part, more = in_order(found, after, front, ROWS_MAX)
        if more is None and covered < high:
            more = Turn(covered, 0)
        return Found(part, more)

    def end(self, found: Found | None, error: BaseException | None) -> None:
        """What the work found, or why not: then the line waits a moment."""
        line, self._line = self._line, None
        if line is None:
            return
        if found is None:
            line.reloaded(self._ticket, None, None)
            line.hold(FLOW_PAUSE_SECONDS)
        else:
            line.reloaded(self._ticket, *found)


UNTOLD: Final = (
    "What waits cannot be listed or counted, because the disk failed under the buckets of delayed messages. Mend the"
    " disk, then start the broker again."
)
"""Where they can never come into buckets, which is where lists look."""


class Unspilled:
    """Arrivals that are in no bucket: since when there are any, and the lowest due of them, pending or not.

    `lows`: the lowest due, and that of those that are on their way into buckets, where known.
    """

    def __init__(self) -> None:
        self.low: int | None = None
        self.since: int | None = None
        self._going: tuple[int | None, int | None] = (None, None)

    def landed(self, low: int | None, now_ms: int) -> None:
        """More of them; None: no messages."""
        self.low = min([each for each in (low, self.low) if each is not None], default=None)
        self.since = self.since or now_ms

    @property
    def lows(self) -> list[int]:
        return [low for low in (self.low, self._going[0]) if low is not None]

    def begin_spill(self) -> None:
        """All that are there go; what comes from now on is apart."""
        self._going = self.low, self.since
        self.low = self.since = None

    def end_spill(self, done: bool) -> None:
        """They are in buckets, or stay where they are."""
        (low, since), self._going = self._going, (None, None)
        if not done:
            self.landed(low, since or 0)
            self.since = since
