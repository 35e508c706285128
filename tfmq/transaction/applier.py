"""Applies commit decisions to partitions, delayed messages and consumer offsets.

`TargetQueue` applies the decisions of one target in order, `ChunkedApply` the large part of one decision,
slice by slice. `InFlightWindow` limits what the latter have written and not fsynced.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from journal.errors import Closed, Corrupt
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import SEQUENCE_BITS
from tfmq.apply_target import (
    ARRIVALS_KEY,
    OFFSETS_KEY,
    Append,
    Applied,
    CommitOffsets,
    Delayed,
    Destination,
    Effect,
    GroupPlaces,
    Mark,
    Schedule,
    SourceName,
)
from tfmq.errors import NOT_DONE, StorageStopped, UnknownTopic
from tfmq.transaction.apply_progress import Course, Part, Settling
from tfmq.transaction.journal_writer import Run
from tfmq.transaction.model import Slice, Target
from tfmq.transaction.requests import Timers
from tfmq.transaction.store import JournalTransactionStore

COUNTED_AT_ONCE: Final = 10_000
"""Batches of a decision that are counted in the owner's thread (about 5 ms).

Larger decisions are counted in a worker; later decisions wait until then.
"""
LATE_SECONDS: Final = 10.0
"""Seconds after the decision until a waiting commit request is answered with "applying"."""
TURN_BYTES: Final = 8 << 20
"""Bytes of small parts applied per turn (about 10 ms), before other work of the broker runs."""
DUES_MAX_ALL: Final = 4 << 20
"""Words of due times (32 MiB) kept by all uncompleted decisions.

Above, no handles are returned.
"""
Noted: TypeAlias = tuple[Course, Sequence[int], Sequence[Delayed]]
"""A decision, the indexes of its delayed batches, and their results."""
OFFSETS_TARGET: Final = Target(OFFSETS_KEY, "", 0, 0, 0)


class Applier:
    """Applies decisions to their targets completely, in order and exactly once.

    Errors of a target are retried without limit; nothing here can revert a decision, and effects are
    dropped only if the target is deleted. There is one queue per target, so a blocked target holds up only
    later effects on itself. `on_applied(progress)` is called when a decision is applied for the first time,
    before any reply.
    """

    def __init__(
        self,
        store: JournalTransactionStore,
        destination: Destination,
        *,
        timers: Timers,
        run: Run,
        release: Callable[[int], None],
        ended: Callable[[Course], None],
    ) -> None:
        self.store, self.destination, self.timers, self.run = store, destination, timers, run
        self.journal_id = store.journal_id
        self.source: SourceName = (SOURCE_TRANSACTION, self.journal_id)
        self.pace = Pace(destination)
        self.settling = Settling(destination, timers, self._settle)
        self.stopping = False
        self.hurried = True
        """Whether the turn limit is off: until the applier is idle once, recovery has no other work."""
        self._release, self._ended = release, ended
        self._lines: dict[int, Line] = {}
        self._starting: deque[Course] = deque()
        """Decisions to be started; the first is being counted."""
        self._due: dict[Line, None] = {}
        self._next_turn: dict[Line, None] = {}
        self._turn_bytes = 0
        self.dues = 0
        """Words of due times held for replies."""
        self._late: deque[tuple[float, Course]] = deque()
        self._timer: Any = None
        self._stopped: Callable[[], None] | None = None

    # Decisions

    def start(self, progress: Course) -> None:
        """Queue a durable decision for its targets, after all earlier decisions."""
        self._starting.append(progress)
        if len(self._starting) == 1:
            self._start_next()

    def _start_next(self) -> None:
        while self._starting:
            decision = self._starting[0].decision
            if decision.batches > COUNTED_AT_ONCE:
                self.run(decision.count, self._counted)
                return
            self._begin(self._starting.popleft())

    def _counted(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            raise error
        self._begin(self._starting.popleft())
        self._start_next()

    def _begin(self, progress: Course) -> None:
        targets = progress.decision.targets
        offsets = any(each.offsets for each in progress.decision.transactions)
        progress.left = len(targets) + offsets
        if not progress.left:
            self._over(progress)
            return
        self._watch(progress)
        for key, target in targets.items():
            self._put(key, Part(progress, target))
        if offsets:
            self._put(OFFSETS_KEY, Part(progress, OFFSETS_TARGET))

    def _put(self, key: int, part: Part) -> None:
        queue = self._line(key)
        queue.put(part)
        self._due[queue] = None

    def _line(self, key: int) -> Line:
        queue = self._lines.get(key)
        if queue is None:
            queue = self._lines[key] = Line(key, self)
        return queue

    # Turns

    @property
    def due(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._due)

    def write(self) -> bool:
        """Send effects to the targets that are free; False if there was no work."""
        due, self._due = self._due, {}
        for queue in due:
            queue.pump()
        self.hurried = self.hurried and not self.idle
        self._try_stop()
        return bool(due)

    def may_read(self, queue: Line, size_bytes: int) -> bool:
        """Whether the target queue may apply `size_bytes` more in this turn.

        If not, it continues in the next turn.
        """
        if self.stopping or self.hurried:
            return True
        if self._turn_bytes and self._turn_bytes + size_bytes > TURN_BYTES:
            if not self._next_turn:
                self.timers.after(0.0, self._new_turn)
            self._next_turn[queue] = None
            return False
        self._turn_bytes += size_bytes
        return True

    def _new_turn(self) -> None:
        self._turn_bytes = 0
        queues, self._next_turn = self._next_turn, {}
        self._due.update(queues)

    # Notifications of target queues

    def ready(self, queue: Line) -> None:
        """Mark a queue that may have something to send."""
        self._due[queue] = None

    def rested(self, queue: Line) -> None:
        """Handle a queue whose target became blocked."""
        self._try_stop()

    def arrived(self, queue: Line, parts: Sequence[Part], mark: Mark) -> None:
        """Handle written effects."""
        self.settling.add(mark, parts)
        self._done(queue, parts)

    def note_delayed(self, mark: Mark, noted: Sequence[Noted]) -> None:
        """Request an fsync for written delayed batches, and record their results once durable."""
        for progress, _, _ in noted:
            progress.unsure += 1

        def forced(error: BaseException | None) -> None:
            for progress, pieces, delayed in noted:
                progress.unsure -= 1
                if error is None and self.dues < DUES_MAX_ALL:
                    before = progress.dues
                    progress.note_delayed(pieces, delayed)
                    self.dues += progress.dues - before
                if progress.known:
                    progress.tell()
                if progress.safe:  # another fsync may have made the rest durable already
                    self._settle(progress)

        self.destination.when_forced(mark, forced)

    def dropped(self, queue: Line, parts: Sequence[Part]) -> None:
        """Handle effects whose target was deleted."""
        for progress, target in parts:
            progress.dropped += target.messages
        self._done(queue, parts)

    def _done(self, queue: Line, parts: Sequence[Part]) -> None:
        if queue.empty:
            queue.close()
            self._lines.pop(queue.key, None)
        else:
            self._due[queue] = None
        for progress, target in parts:
            freed = min(progress.reserved, target.size_bytes)
            if freed:
                progress.reserved -= freed
                self._release(freed)
            progress.left -= 1
            if not progress.left:
                self._over(progress)

    def _over(self, progress: Course) -> None:
        """Handle a decision with no pending targets."""
        # A target that lost effects gets them again, so this can be called twice.
        if not progress.applied:
            progress.applied = True
            self.store.applied(progress.decision)
            self._ended(progress)
            if progress.known:
                progress.tell()
        if progress.safe:
            self._settle(progress)

    def _settle(self, progress: Course) -> None:
        self.dues -= progress.dues
        progress.dues = 0
        self.store.settle(progress.decision)
        progress.tell_safe()

    # Targets

    def resumed(self, key: int) -> None:
        """Handle a target that accepts writes again."""
        # Written effects without an fsync may be lost, so they are applied again first.
        parts = self.settling.take_back(key)
        if parts:
            for progress, _ in parts:
                progress.left += 1
            self._line(key).put_back(parts)
        if key in self._lines:
            self._lines[key].resumed()

    def topic_gone(self, incarnation: int) -> None:
        """Let the queues of a deleted topic's partitions drop their effects."""
        for key, queue in list(self._lines.items()):
            if key >> SEQUENCE_BITS == incarnation:
                queue.look_again()
        for key in list(self.settling.trouble):
            if key >> SEQUENCE_BITS == incarnation:
                self.settling.look_again(key)

    def name(self, key: int) -> str:
        """Return the display name of a target."""
        return (
            "the groups' offsets" if key == OFFSETS_KEY else self.destination.name(key) or "a deleted topic"
        )

    def parked(self) -> dict[int, str]:
        """Return the blocked targets: key -> reason. Includes targets that stopped before an fsync."""
        return self.settling.trouble | {
            key: queue.parked for key, queue in self._lines.items() if queue.parked
        }

    @property
    def stuck(self) -> int:
        """Number of transactions that were applied once but lack, or may lose, effects at a target."""
        courses = self.settling.stuck()
        for queue in self._lines.values():
            courses |= {part.course for part in queue.parts() if part.course.applied}
        return sum(len(progress.decision.transactions) for progress in courses)

    @staticmethod
    def concerns(key: int, progress: Course) -> bool:
        """Whether a decision has effects on that target."""
        if key == OFFSETS_KEY:
            return any(each.offsets for each in progress.decision.transactions)
        return key in progress.decision.targets

    @property
    def idle(self) -> bool:
        """Whether every decision is written or waits for a blocked target."""
        return (
            not self._starting
            and not self._due
            and not self._next_turn
            and all(each.parked and not each.busy for each in self._lines.values())
        )

    # Late replies

    def _watch(self, progress: Course) -> None:
        while self._late and self._late[0][1].known:
            self._late.popleft()
        self._late.append((self.timers.now() + LATE_SECONDS, progress))
        if self._timer is None:
            self._timer = self.timers.after(LATE_SECONDS, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self.timers.now()
        while self._late and (self._late[0][0] <= now or self._late[0][1].known):
            progress = self._late.popleft()[1]
            if not progress.known:
                progress.tell_late()
        if self._late:
            self._timer = self.timers.after(self._late[0][0] - now, self._ring)

    # Stopping

    def stop(self, done: Callable[[], None]) -> None:
        """Apply small parts, interrupt large ones after the next slice, fsync, then call `done()`."""
        self.stopping = True
        self._stopped = done
        self._try_stop()

    def _try_stop(self) -> None:
        if self._stopped is None or not self.idle:
            return
        done, self._stopped = self._stopped, None
        if self._timer is not None:
            self.timers.cancel(self._timer)
        for queue in self._lines.values():
            queue.close()
        self.settling.close()
        self.settling.force_all(done)


logger = logging.getLogger("tfmq.transaction")

PLACES_MAX: Final = 10_000
"""Offsets committed in one append: at most 512 KiB, well below the catalog's entry limit."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 30.0
"""Retry pauses of a blocked target double from RETRY_SECONDS to this limit.

A resume also retries.
"""


class Line:
    """Queue of the effects on one target, applied strictly in LSN order, one at a time.

    The target stores the highest position that was applied, which implies all earlier ones. So no effect is
    written before an earlier one, and after a start, an error or a resume the target's position is read
    before anything is sent. Adjacent small effects are combined into one append with the last one's
    position. `blocked_reason` is the reason why the target is blocked, "" if it is not.
    """

    def __init__(self, key: int, applier: Applier) -> None:
        self.key = key
        self.parked = ""
        self.busy = False
        self._applier = applier
        self.slice_bytes = self._slice_bytes()
        """Bytes per append, so that the owner's thread is not blocked.

        Larger parts use `ChunkedApply`.
        """
        self._queue: deque[Part] = deque()
        self._flight: list[Part] = []
        self._pieces: list[Sequence[int]] = []
        self._convoy: Convoy | None = None
        self._known = False
        self._after = 0
        self._pause = PAUSE_SECONDS
        self._timer: Any = None

    def _slice_bytes(self) -> int:
        return 0 if self.key == OFFSETS_KEY else self._applier.destination.slice_bytes(self.key)

    @property
    def empty(self) -> bool:
        """Whether nothing is queued or being applied."""
        return not self._queue and not self.busy

    def parts(self) -> list[Part]:
        """Return the tasks that are queued or being applied."""
        return [*self._flight, *self._queue]

    def put(self, part: Part) -> None:
        """Append a task; its position is higher than all queued ones."""
        self._queue.append(part)
        if self.parked:
            part.course.tell_late()

    def put_back(self, parts: Sequence[Part]) -> None:
        """Return unapplied tasks to the queue, in order.

        Reads the target's position before the next append.
        """
        self._queue = deque(sorted([*parts, *self._queue], key=lambda part: part.place))
        self._known = False

    def resumed(self) -> None:
        """Handle a target that accepts writes again: effects without an fsync may be lost."""
        if self._convoy is not None:
            self._convoy.recall()
        self.look_again()

    def look_again(self) -> None:
        """Retry now: the target may have become writable or been deleted."""
        self._known = False
        self._pause = PAUSE_SECONDS
        self._go_on()

    def close(self) -> None:
        """Stop the retry timer."""
        self._stop_timer()

    # Sending

    def pump(self) -> None:
        """Start the next append if there is a task and none is being applied."""
        while self._queue and not self.busy and self._timer is None:
            if not self._known and not self._look():
                continue
            if self.key == OFFSETS_KEY:
                self._send_offsets()
            elif not self._send_messages():
                return

    def _look(self) -> bool:
        """Read the applied position of the target; return whether tasks are left to send."""
        destination, key = self._applier.destination, self.key
        if key != OFFSETS_KEY and destination.name(key) is None:
            self.drop()
            return False
        self.slice_bytes = self._slice_bytes()  # unknown before if the target could not be opened
        applied = destination.applied(key, self._applier.source)
        there = []
        while applied is not None and self._queue and self._queue[0].place <= applied:
            there.append(self._queue.popleft())
        head = self._queue[0].course.decision.place if self._queue else -1
        self._after = applied[1] if applied is not None and head == applied[0] else 0
        self._known = True
        if there:
            self._send(there, [], [], [])
            return False
        return bool(self._queue)

    def _send_messages(self) -> bool:
        """Send adjacent small tasks together or a large one alone.

        False if the turn's limit is reached.
        """
        parts: list[Part] = []
        batches: list[Batch] = []
        pieces: list[Sequence[int]] = []
        decided_ms: list[int] = []
        size = 0
        while self._queue:
            part = self._queue[0]
            if parts and size + part.target.size_bytes > self.slice_bytes:
                break
            if part.target.size_bytes <= self.slice_bytes and not self._applier.may_read(
                self, part.target.size_bytes
            ):
                break
            try:
                slices = self._cached(part)
            except Exception as error:
                if not parts:
                    self._failed(Unreadable(error) if isinstance(error, Corrupt | OSError) else error)
                break
            if slices is None:
                if not parts:
                    self._send_convoy()
                break
            parts.append(self._queue.popleft())
            batches += [batch for each in slices for batch in each.batches]
            pieces.append([piece for each in slices for piece in each.pieces])
            decided_ms += [part.course.decision.time_ms] * (len(batches) - len(decided_ms))
            size += part.target.size_bytes
            self._after = 0
        if parts:
            self._send(parts, batches, pieces, decided_ms)
        return bool(parts) or self.busy

    def _cached(self, part: Part) -> list[Slice] | None:
        if part.target.size_bytes > self.slice_bytes:
            return None
        return self._applier.store.slices_cached(
            part.course.decision, self.key, self._after, self.slice_bytes
        )

    def _send(
        self,
        parts: list[Part],
        batches: list[Batch],
        pieces: list[Sequence[int]],
        decided_ms: list[int],
    ) -> None:
        """Append the batches of all tasks with the last one's position."""
        self._flight, self._pieces, self.busy = parts, pieces, True
        last = parts[-1]
        effect = self.effect(last, batches, last.target.last, decided_ms)
        self._applier.destination.apply(effect, self._written)

    def effect(
        self, part: Part, batches: Sequence[Batch], last: int, decided_ms: Sequence[int] | None = None
    ) -> Effect:
        """Return the effect that appends `batches`, of which the last message has ordinal `last`.

        `decided_ms` has the decision time of each batch, if it is not that of `part` for all.
        """
        source = Source(SOURCE_TRANSACTION, self._applier.journal_id, part.course.decision.place, last)
        if self.key == OFFSETS_KEY:
            return CommitOffsets((), source)
        if self.key == ARRIVALS_KEY:
            times = [part.course.decision.time_ms] * len(batches) if decided_ms is None else decided_ms
            return Schedule(batches, times, source)
        return Append(
            part.target.topic, self.key >> SEQUENCE_BITS, self.key & (1 << SEQUENCE_BITS) - 1, batches, source
        )

    def _send_offsets(self) -> None:
        """Commit the offsets of the first queued decisions together; later offsets of a group win."""
        parts: list[Part] = []
        groups: list[GroupPlaces] = []
        count = 0
        while self._queue:
            offsets = self._queue[0].course.decision.offsets
            count += sum(len(each.places) for each in offsets)
            # The change must fit the catalog's entry limit, unless a single decision exceeds it.
            if parts and count > PLACES_MAX:
                break
            parts.append(self._queue.popleft())
            groups += offsets
        lsn = parts[-1].course.decision.place
        self._flight, self._pieces, self.busy = parts, [], True
        source = Source(SOURCE_TRANSACTION, self._applier.journal_id, lsn, 0)
        self._applier.destination.apply(CommitOffsets(groups, source), self._written)

    def _send_convoy(self) -> None:
        part = self._queue.popleft()
        self._flight, self._pieces, self.busy = [part], [], True
        after, self._after = self._after, 0
        self._convoy = Convoy(self, self._applier, part, after, self._written)
        self._convoy.start()

    # Results

    def _written(self, mark: Mark | None, error: BaseException | None) -> None:
        parts, self._flight, self.busy = self._flight, [], False
        self._convoy = None
        if mark is None:
            self.put_back(parts)
            self._failed(error or RuntimeError("an effect ended without a mark"))
            return
        if self.parked:
            self._tell_open()
        for part in parts:
            part.course.damage = ""
        self._note_offsets(parts, mark)
        self._note_delayed(parts, mark)
        self._applier.arrived(self, parts, mark)

    def _note_offsets(self, parts: Sequence[Part], mark: Mark) -> None:
        """Record the offsets of the batches for replies."""
        # Only durable offsets are returned: others could change after a power failure.
        if not mark.offsets or not self._applier.destination.forced(mark):
            return
        first = 0
        for part, pieces in zip(parts, self._pieces, strict=False):
            part.course.note_offsets(pieces, mark.offsets[first : first + len(pieces)])
            first += len(pieces)

    def _note_delayed(self, parts: Sequence[Part], mark: Mark) -> None:
        noted = []
        first = 0
        for part, pieces in zip(parts, self._pieces, strict=False):
            noted.append((part.course, pieces, mark.delayed[first : first + len(pieces)]))
            first += len(pieces)
        if mark.delayed:
            self._applier.note_delayed(mark, noted)

    def _failed(self, error: BaseException) -> None:
        self._known = False
        if isinstance(error, UnknownTopic):
            self.drop()
            return
        if isinstance(error, Unreadable) and self._queue:
            self._queue[0].course.damage = str(error)
        self._park(error)

    def drop(self) -> None:
        """Drop, count and log all tasks: the target was deleted."""
        parts, self._queue = list(self._queue), deque()
        messages = sum(part.target.messages for part in parts)
        if messages:
            topic = parts[0].target.topic
            logger.warning(
                "%d messages of committed transactions were dropped: the topic %s was deleted",
                messages,
                topic,
            )
        self.parked = ""
        self._applier.dropped(self, parts)

    # Waiting for the target

    def _park(self, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if reason != self.parked and not self._applier.stopping:
            name = self._applier.name(self.key)
            logger.error("Committed transactions wait for %s: %s", name, reason)
        self.parked = reason
        self._timer = self._applier.timers.after(self._pause, self._go_on)
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
        for part in self._queue:
            part.course.tell_late()
        self._applier.rested(self)

    def _go_on(self) -> None:
        self._stop_timer()
        self._applier.ready(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._applier.timers.cancel(self._timer)
            self._timer = None

    def _tell_open(self) -> None:
        logger.info("%s accepts committed transactions again", self._applier.name(self.key))
        self.parked = ""
        self._pause = PAUSE_SECONDS


CONTIGUOUS_BYTES: Final = 64 << 20
"""Parts up to this size are contiguous in their partition."""
WINDOW_BYTES: Final = 512 << 10
"""Bytes written by all large parts together and not yet fsynced.

Any fsync of another client has to write these bytes too. Measured with a 2 GB transaction: another client's
send took 4.6 ms (p99 9.3) with 8 MiB, 1.6 ms (p99 3.3) with this value and slices of 256 KiB; the 2 GB took
6 % longer.
"""
CONVOYS_MAX: Final = 4
"""Large parts applied concurrently; each holds a slice in memory and uses a reader."""


class Unreadable(Exception):
    """Messages of a decided transaction cannot be read from the journal."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the transaction journal is damaged: {error}. Stop the broker, mend it with `tfmq log repair`, which says"
            " what is lost, and start the broker again"
        )


class Pace:
    """Limits unfsynced bytes and concurrency of all `ChunkedApply` together."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._unforced = 0
        self._running = 0
        self._entering: deque[Callable[[], None]] = deque()
        self._writing: deque[tuple[int, Callable[[], None]]] = deque()

    def enter(self, go: Callable[[], None]) -> None:
        """Call `go()` when another large part may start."""
        if self._running < CONVOYS_MAX:
            self._running += 1
            go()
        else:
            self._entering.append(go)

    def leave(self) -> None:
        """Free the slot of a finished part."""
        if self._entering:
            self._entering.popleft()()
        else:
            self._running -= 1

    def take(self, size_bytes: int, go: Callable[[], None]) -> None:
        """Call `go()` when `size_bytes` fit into the window; a larger size runs alone."""
        if not self._writing and self._fits(size_bytes):
            self._unforced += size_bytes
            go()
        else:
            self._writing.append((size_bytes, go))

    def written(self, mark: Mark, size_bytes: int) -> None:
        """Request an fsync of written bytes, which frees their room."""
        self._destination.when_forced(mark, partial(self._give, size_bytes))

    def not_written(self, size_bytes: int) -> None:
        """Free the room of bytes that were not written."""
        self._give(size_bytes, None)

    def _give(self, size_bytes: int, error: BaseException | None) -> None:
        """Free room and start waiting writes."""
        # After a failed fsync the target is stopped, so the bytes need no more room either.
        self._unforced -= size_bytes
        while self._writing and self._fits(self._writing[0][0]):
            size, go = self._writing.popleft()
            self._unforced += size
            go()

    def _fits(self, size_bytes: int) -> bool:
        return not self._unforced or self._unforced + size_bytes <= WINDOW_BYTES


class Convoy:
    """Applies the large part of one decision to one partition, slice by slice, read in a worker.

    Written bytes must be fsynced eventually, and every other fsync has to write them too, so only a window
    of unfsynced bytes is allowed for all parts together. Up to CONTIGUOUS_BYTES no other append is placed
    between the slices; larger parts allow others after each slice. `done` is called once, with the result
    of the last append or the error.
    """

    def __init__(self, queue: Line, applier: Applier, part: Part, after: int, done: Applied) -> None:
        self._line, self._applier, self._part, self._done = queue, applier, part, done
        self._after = after
        self._slices: Iterator[Slice] = iter(())
        self._holds = part.target.size_bytes <= CONTIGUOUS_BYTES
        self._mark: Mark | None = None
        self._recalled: StorageStopped | None = None

    def start(self) -> None:
        """Start when a slot is free."""
        self._applier.pace.enter(self._begin)

    def recall(self) -> None:
        """Stop with an error: the target stopped and resumed."""
        # Earlier slices may be lost and the highest position implies them, so no further slice may be
        # written. The target queue then reads the target's position.
        self._recalled = StorageStopped(reason="the target stopped and resumed meanwhile", outcome=NOT_DONE)

    def _begin(self) -> None:
        self._slices = self._applier.store.slices(
            self._part.course.decision, self._line.key, self._after, self._line.slice_bytes
        )
        if self._holds:
            self._applier.destination.hold(self._line.key, self._applier.source)
        self._read()

    def _read(self) -> None:
        self._applier.run(lambda: next(self._slices, None), self._have)

    def _have(self, found: Slice | None, error: BaseException | None) -> None:
        if isinstance(error, Corrupt | OSError):
            error = Unreadable(error)
        if error is not None or self._recalled is not None:
            self._end(None, self._recalled or error)
        elif found is None:
            self._end_of_slices()
        else:
            self._applier.pace.take(found.size_bytes, partial(self._write, found))

    def _write(self, found: Slice) -> None:
        if self._recalled is not None:
            self._written(found, None, self._recalled)
            return
        effect = self._line.effect(self._part, found.batches, found.last)
        self._applier.destination.apply(effect, partial(self._written, found))

    def _written(self, found: Slice, mark: Mark | None, error: BaseException | None) -> None:
        if mark is None:
            self._applier.pace.not_written(found.size_bytes)
            self._end(None, error)
            return
        self._applier.pace.written(mark, found.size_bytes)
        for number, count in found.lost:
            self._part.course.losses[self._line.key, number] = count
        if mark.delayed:
            self._applier.note_delayed(mark, [(self._part.course, found.pieces, mark.delayed)])
        self._mark = mark
        if self._recalled is not None:
            self._end(None, self._recalled)
        elif found.last >= self._part.target.last:
            self._end(mark, None)
        elif self._applier.stopping:
            self._end(None, Closed())
        else:
            self._read()

    def _end_of_slices(self) -> None:
        """Fail: the journal ended before the last message of the part."""
        self._end(None, RuntimeError("the journal has fewer messages of a transaction than were counted"))

    def _end(self, mark: Mark | None, error: BaseException | None) -> None:
        if self._holds:
            self._applier.destination.unhold(self._line.key)
        self._applier.pace.leave()
        self._done(None if mark is None else mark._replace(offsets=(), delayed=()), error)
