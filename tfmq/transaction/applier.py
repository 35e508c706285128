"""Applies commit decisions to partitions, delayed messages and consumer offsets.

`TargetQueue` applies the decisions of one target in order, `ChunkedApply` the large part of one decision,
slice by slice. What both have in common with delayed messages is in `tfmq.apply_queue`.
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
from tfmq.apply_queue import ApplyQueue, ApplyQueues, InFlightLimit
from tfmq.apply_target import (
    ARRIVALS_KEY,
    OFFSETS_KEY,
    Append,
    AppendDelayed,
    AppendResult,
    AppliedCallback,
    ApplyTarget,
    CommitOffsets,
    Effect,
    GroupPositions,
    RunInWorker,
    StoredDelayedBatch,
    Timers,
)
from tfmq.errors import NOT_DONE, StorageStopped
from tfmq.transaction.apply_progress import ApplyProgress, ApplyTask, FlushTracker
from tfmq.transaction.model import Slice, TargetPart
from tfmq.transaction.store import TransactionStore

COUNTED_INLINE_MAX: Final = 10_000
"""Batches of a decision that are counted in the owner's thread (about 5 ms).

Larger decisions are counted in a worker; later decisions wait until then.
"""
LATE_SECONDS: Final = 10.0
"""Seconds after the decision until a waiting commit request is answered with "applying"."""
TURN_BYTES: Final = 8 << 20
"""Bytes of small parts applied per turn (about 10 ms), before other work of the broker runs."""
DUE_WORDS_TOTAL: Final = 4 << 20
"""Words of due times (32 MiB) kept by all uncompleted decisions.

Above, no handles are returned.
"""
DelayedResults: TypeAlias = tuple[ApplyProgress, Sequence[int], Sequence[StoredDelayedBatch]]
"""A decision, the indexes of its delayed batches, and their results."""
OFFSETS_PART: Final = TargetPart(OFFSETS_KEY, "", 0, 0, 0)


class Applier(ApplyQueues["TargetQueue"]):
    """Applies decisions to their targets completely, in order and exactly once.

    Errors of a target are retried without limit; nothing here can revert a decision, and effects are
    dropped only if the target is deleted. There is one queue per target, so a blocked target holds up only
    later effects on itself. `on_applied(progress)` is called when a decision is applied for the first time,
    before any reply.
    """

    def __init__(
        self,
        store: TransactionStore,
        destination: ApplyTarget,
        *,
        timers: Timers,
        run: RunInWorker,
        release_space: Callable[[int], None],
        on_applied: Callable[[ApplyProgress], None],
        mark_ready: Callable[[], None],
    ) -> None:
        super().__init__(destination, timers, (SOURCE_TRANSACTION, store.journal_id), mark_ready)
        self.store, self.run = store, run
        self.in_flight = InFlightLimit()
        """Bytes of large parts that are written and not durable."""
        self.chunked = InFlightLimit(CHUNKED_MAX)
        """Large parts that are being applied."""
        self.flush_tracker = FlushTracker(destination, timers, self._complete)
        self.unlimited_turns = True
        """Whether the turn limit is off: until the applier is idle once, recovery has no other work."""
        self._release_space, self._on_applied = release_space, on_applied
        self._starting: deque[ApplyProgress] = deque()
        """Decisions to be started; the first is being counted."""
        self._turn_bytes = 0
        self.due_words = 0
        """Words of due times held for replies."""
        self._late: deque[tuple[float, ApplyProgress]] = deque()
        self._timer: Any = None
        self._stop_done: Callable[[], None] | None = None

    # Decisions

    def start(self, progress: ApplyProgress) -> None:
        """Queue a durable decision for its targets, after all earlier decisions."""
        self._starting.append(progress)
        if len(self._starting) == 1:
            self._start_next()

    def _start_next(self) -> None:
        while self._starting:
            decision = self._starting[0].decision
            if decision.batch_count > COUNTED_INLINE_MAX:
                self.run(decision.compute_targets, self._count_done)
                return
            self._start_decision(self._starting.popleft())

    def _count_done(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            raise error
        self._start_decision(self._starting.popleft())
        self._start_next()

    def _start_decision(self, progress: ApplyProgress) -> None:
        targets = progress.decision.targets
        offsets = any(each.offsets for each in progress.decision.transactions)
        progress.pending_targets = len(targets) + offsets
        if not progress.pending_targets:
            self._targets_done(progress)
            return
        self._watch_late(progress)
        for key, target in targets.items():
            self._enqueue(key, ApplyTask(progress, target))
        if offsets:
            self._enqueue(OFFSETS_KEY, ApplyTask(progress, OFFSETS_PART))

    def _enqueue(self, key: int, part: ApplyTask) -> None:
        queue = self._target_queue(key)
        queue.enqueue(part)
        self.mark_ready(queue)

    def _target_queue(self, key: int) -> TargetQueue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = TargetQueue(key, self)
        return queue

    # Turns

    def write(self) -> bool:
        """Send effects to the targets that are free; False if there was no work."""
        wrote = bool(self._ready_queues) and super().write()
        self.unlimited_turns = self.unlimited_turns and not self.idle
        self._try_stop()
        return wrote

    def may_send(self, queue: TargetQueue, size_bytes: int) -> bool:
        """Whether the target queue may apply `size_bytes` more in this turn.

        If not, it continues in the next turn.
        """
        if self.stopping or self.unlimited_turns:
            return True
        if self._turn_bytes and self._turn_bytes + size_bytes > TURN_BYTES:
            self.continue_next_turn(queue)
            return False
        self._turn_bytes += size_bytes
        return True

    def _start_turn(self) -> None:
        self._turn_bytes = 0
        super()._start_turn()

    # Notifications of target queues

    def target_blocked(self) -> None:
        """Handle a queue whose target became blocked."""
        self._try_stop()

    def tasks_written(self, queue: TargetQueue, parts: Sequence[ApplyTask], mark: AppendResult) -> None:
        """Handle written effects."""
        self.flush_tracker.add_written(mark, parts)
        self._finish_tasks(queue, parts)

    def record_delayed(self, mark: AppendResult, noted: Sequence[DelayedResults]) -> None:
        """Request an fsync for written delayed batches, and record their results once durable."""
        for progress, _, _ in noted:
            progress.undurable_delayed += 1

        def forced(error: BaseException | None) -> None:
            for progress, pieces, delayed in noted:
                progress.undurable_delayed -= 1
                if error is None and self.due_words < DUE_WORDS_TOTAL:
                    before = progress.due_words
                    progress.record_delayed(pieces, delayed)
                    self.due_words += progress.due_words - before
                if progress.is_answerable:
                    progress.notify()
                if progress.is_durable:  # another fsync may have made the rest durable already
                    self._complete(progress)

        self.destination.fsync_to(mark, forced)

    def tasks_dropped(self, queue: TargetQueue, parts: Sequence[ApplyTask]) -> None:
        """Handle effects whose target was deleted."""
        for progress, target in parts:
            progress.dropped_messages += target.messages
        self._finish_tasks(queue, parts)

    def _finish_tasks(self, queue: TargetQueue, parts: Sequence[ApplyTask]) -> None:
        if not self.remove_if_empty(queue):
            self.mark_ready(queue)
        for progress, target in parts:
            freed = min(progress.reserved_bytes, target.size_bytes)
            if freed:
                progress.reserved_bytes -= freed
                self._release_space(freed)
            progress.pending_targets -= 1
            if not progress.pending_targets:
                self._targets_done(progress)

    def _targets_done(self, progress: ApplyProgress) -> None:
        """Handle a decision with no pending targets."""
        # A target that lost effects gets them again, so this can be called twice.
        if not progress.applied:
            progress.applied = True
            self.store.mark_applied(progress.decision)
            self._on_applied(progress)
            if progress.is_answerable:
                progress.notify()
        if progress.is_durable:
            self._complete(progress)

    def _complete(self, progress: ApplyProgress) -> None:
        self.due_words -= progress.due_words
        progress.due_words = 0
        self.store.complete(progress.decision)
        progress.notify_durable()

    # Targets

    def target_resumed(self, key: int) -> None:
        """Handle a target that accepts writes again."""
        # Written effects without an fsync may be lost, so they are applied again first.
        parts = self.flush_tracker.remove_undurable(key)
        if parts:
            for progress, _ in parts:
                progress.pending_targets += 1
            self._target_queue(key).requeue(parts)
        super().target_resumed(key)

    def topic_deleted(self, incarnation: int) -> None:
        """Let the queues of a deleted topic's partitions drop their effects."""
        super().topic_deleted(incarnation)
        for key in list(self.flush_tracker.fsync_errors):
            if key >> SEQUENCE_BITS == incarnation:
                self.flush_tracker.retry(key)

    def blocked_targets(self) -> dict[int, str]:
        """Return the blocked targets: key -> reason. Includes targets that stopped before an fsync."""
        return self.flush_tracker.fsync_errors | {
            key: queue.blocked_reason for key, queue in self._queues.items() if queue.blocked_reason
        }

    @property
    def blocked_count(self) -> int:
        """Number of transactions that were applied once but lack, or may lose, effects at a target."""
        courses = self.flush_tracker.blocked_decisions()
        for queue in self._queues.values():
            courses |= {part.progress for part in queue.pending_tasks() if part.progress.applied}
        return sum(len(progress.decision.transactions) for progress in courses)

    @staticmethod
    def has_target(key: int, progress: ApplyProgress) -> bool:
        """Whether a decision has effects on that target."""
        if key == OFFSETS_KEY:
            return any(each.offsets for each in progress.decision.transactions)
        return key in progress.decision.targets

    @property
    def idle(self) -> bool:
        """Whether every decision is written or waits for a blocked target."""
        return (
            not self._starting
            and not self._ready_queues
            and not self._next_turn
            and all(each.blocked_reason and not each.busy for each in self._queues.values())
        )

    # Late replies

    def _watch_late(self, progress: ApplyProgress) -> None:
        while self._late and self._late[0][1].is_answerable:
            self._late.popleft()
        self._late.append((self.timers.now() + LATE_SECONDS, progress))
        if self._timer is None:
            self._timer = self.timers.after(LATE_SECONDS, self._notify_late)

    def _notify_late(self) -> None:
        self._timer = None
        now = self.timers.now()
        while self._late and (self._late[0][0] <= now or self._late[0][1].is_answerable):
            progress = self._late.popleft()[1]
            if not progress.is_answerable:
                progress.notify_late()
        if self._late:
            self._timer = self.timers.after(self._late[0][0] - now, self._notify_late)

    # Stopping

    def stop(self, done: Callable[[], None]) -> None:
        """Apply small parts, interrupt large ones after the next slice, fsync, then call `done()`."""
        self.stopping = True
        self._stop_done = done
        self._try_stop()

    def _try_stop(self) -> None:
        if self._stop_done is None or not self.idle:
            return
        done, self._stop_done = self._stop_done, None
        if self._timer is not None:
            self.timers.cancel(self._timer)
        self.close()
        self.flush_tracker.close()
        self.flush_tracker.fsync_all(done)


logger = logging.getLogger("tfmq.transaction")

OFFSETS_PER_APPEND: Final = 10_000
"""Offsets committed in one append: at most 512 KiB, well below the catalog's entry limit."""


class TargetQueue(ApplyQueue):
    """Queue of the effects on one target, applied strictly in LSN order, one at a time.

    Adjacent small effects are combined into one append with the last one's position.
    """

    contents = "committed transactions"
    logger = logger

    def __init__(self, key: int, applier: Applier) -> None:
        super().__init__(key, applier)
        self._applier = applier
        self.slice_bytes = self._read_slice_bytes()
        """Bytes per append, so that the owner's thread is not blocked.

        Larger parts use `ChunkedApply`.
        """
        self._queue: deque[ApplyTask] = deque()
        self._applying: list[ApplyTask] = []
        self._batch_indexes: list[Sequence[int]] = []
        self._chunked_apply: ChunkedApply | None = None
        self._applied_ordinal = 0

    def _read_slice_bytes(self) -> int:
        return 0 if self.key == OFFSETS_KEY else self._applier.destination.append_bytes_max(self.key)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued or being applied."""
        return not self._queue and not self.busy

    def pending_tasks(self) -> list[ApplyTask]:
        """Return the tasks that are queued or being applied."""
        return [*self._applying, *self._queue]

    def enqueue(self, part: ApplyTask) -> None:
        """Append a task; its position is higher than all queued ones."""
        self._queue.append(part)
        if self.blocked_reason:
            part.progress.notify_late()

    def requeue(self, parts: Sequence[ApplyTask]) -> None:
        """Return unapplied tasks to the queue, in order.

        Reads the target's position before the next append.
        """
        self._queue = deque(sorted([*parts, *self._queue], key=lambda part: part.position))
        self._position_known = False

    def target_resumed(self) -> None:
        """Handle a target that accepts writes again: effects without an fsync may be lost."""
        if self._chunked_apply is not None:
            self._chunked_apply.cancel()
        super().target_resumed()

    # Sending

    def _can_send(self) -> bool:
        return bool(self._queue)

    def _send(self) -> bool:
        if self.key == OFFSETS_KEY:
            self._send_offsets()
            return True
        return self._send_messages()

    def _drop_applied(self, applied: tuple[int, int] | None) -> bool:
        self.slice_bytes = self._read_slice_bytes()  # unknown before if the target could not be opened
        there = []
        while applied is not None and self._queue and self._queue[0].position <= applied:
            there.append(self._queue.popleft())
        head = self._queue[0].progress.decision.lsn if self._queue else -1
        self._applied_ordinal = applied[1] if applied is not None and head == applied[0] else 0
        if there:
            self._append(there, [], [], [])
            return False
        return bool(self._queue)

    def _send_messages(self) -> bool:
        """Send adjacent small tasks together or a large one alone.

        False if the turn's limit is reached.
        """
        parts: list[ApplyTask] = []
        batches: list[Batch] = []
        pieces: list[Sequence[int]] = []
        decided_ms: list[int] = []
        size = 0
        while self._queue:
            part = self._queue[0]
            if parts and size + part.target.size_bytes > self.slice_bytes:
                break
            if part.target.size_bytes <= self.slice_bytes and not self._applier.may_send(
                self, part.target.size_bytes
            ):
                break
            try:
                slices = self._read_small(part)
            except Exception as error:
                if not parts:
                    self._failed(Unreadable(error) if isinstance(error, Corrupt | OSError) else error)
                break
            if slices is None:
                if not parts:
                    self._start_chunked()
                break
            parts.append(self._queue.popleft())
            batches += [batch for each in slices for batch in each.batches]
            pieces.append([piece for each in slices for piece in each.batch_indexes])
            decided_ms += [part.progress.decision.time_ms] * (len(batches) - len(decided_ms))
            size += part.target.size_bytes
            self._applied_ordinal = 0
        if parts:
            self._append(parts, batches, pieces, decided_ms)
        return bool(parts) or self.busy

    def _read_small(self, part: ApplyTask) -> list[Slice] | None:
        if part.target.size_bytes > self.slice_bytes:
            return None
        return self._applier.store.read_slices_nowait(
            part.progress.decision, self.key, self._applied_ordinal, self.slice_bytes
        )

    def _append(
        self,
        parts: list[ApplyTask],
        batches: list[Batch],
        pieces: list[Sequence[int]],
        decided_ms: list[int],
    ) -> None:
        """Append the batches of all tasks with the last one's position."""
        self._applying, self._batch_indexes, self.busy = parts, pieces, True
        last = parts[-1]
        effect = self.make_effect(last, batches, last.target.last_ordinal, decided_ms)
        self._applier.destination.apply(effect, self._written)

    def make_effect(
        self, part: ApplyTask, batches: Sequence[Batch], last: int, decided_ms: Sequence[int] | None = None
    ) -> Effect:
        """Return the effect that appends `batches`, of which the last message has ordinal `last`.

        `decided_ms` has the decision time of each batch, if it is not that of `part` for all.
        """
        source = Source(*self._applier.source, part.progress.decision.lsn, last)
        if self.key == OFFSETS_KEY:
            return CommitOffsets((), source)
        if self.key == ARRIVALS_KEY:
            times = [part.progress.decision.time_ms] * len(batches) if decided_ms is None else decided_ms
            return AppendDelayed(batches, times, source)
        return Append(
            part.target.topic, self.key >> SEQUENCE_BITS, self.key & (1 << SEQUENCE_BITS) - 1, batches, source
        )

    def _send_offsets(self) -> None:
        """Commit the offsets of the first queued decisions together; later offsets of a group win."""
        parts: list[ApplyTask] = []
        groups: list[GroupPositions] = []
        count = 0
        while self._queue:
            offsets = self._queue[0].progress.decision.offsets
            count += sum(len(each.positions) for each in offsets)
            # The change must fit the catalog's entry limit, unless a single decision exceeds it.
            if parts and count > OFFSETS_PER_APPEND:
                break
            parts.append(self._queue.popleft())
            groups += offsets
        lsn = parts[-1].progress.decision.lsn
        self._applying, self._batch_indexes, self.busy = parts, [], True
        source = Source(*self._applier.source, lsn, 0)
        self._applier.destination.apply(CommitOffsets(groups, source), self._written)

    def _start_chunked(self) -> None:
        part = self._queue.popleft()
        self._applying, self._batch_indexes, self.busy = [part], [], True
        after, self._applied_ordinal = self._applied_ordinal, 0
        self._chunked_apply = ChunkedApply(self, self._applier, part, after, self._written)
        self._chunked_apply.start()

    # Results

    def _written(self, mark: AppendResult | None, error: BaseException | None) -> None:
        parts, self._applying, self.busy = self._applying, [], False
        self._chunked_apply = None
        if mark is None:
            self.requeue(parts)
            self._failed(error or RuntimeError("an effect ended without a mark"))
            return
        self._unblock()
        for part in parts:
            part.progress.damage = ""
        self._record_offsets(parts, mark)
        self._record_delayed(parts, mark)
        self._applier.tasks_written(self, parts, mark)

    def _record_offsets(self, parts: Sequence[ApplyTask], mark: AppendResult) -> None:
        """Record the offsets of the batches for replies."""
        # Only durable offsets are returned: others could change after a power failure.
        if not mark.offsets or not self._applier.destination.is_durable(mark):
            return
        first = 0
        for part, pieces in zip(parts, self._batch_indexes, strict=False):
            part.progress.record_offsets(pieces, mark.offsets[first : first + len(pieces)])
            first += len(pieces)

    def _record_delayed(self, parts: Sequence[ApplyTask], mark: AppendResult) -> None:
        noted = []
        first = 0
        for part, pieces in zip(parts, self._batch_indexes, strict=False):
            noted.append((part.progress, pieces, mark.delayed[first : first + len(pieces)]))
            first += len(pieces)
        if mark.delayed:
            self._applier.record_delayed(mark, noted)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Unreadable) and self._queue:
            self._queue[0].progress.damage = str(error)
        super()._failed(error)

    def drop_all(self) -> None:
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
        self.blocked_reason = ""
        self._applier.tasks_dropped(self, parts)

    def _block(self, error: BaseException) -> None:
        super()._block(error)
        for part in self._queue:
            part.progress.notify_late()
        self._applier.target_blocked()


CONTIGUOUS_BYTES: Final = 64 << 20
"""Parts up to this size are contiguous in their partition."""
CHUNKED_MAX: Final = 4
"""Large parts applied concurrently; each holds a slice in memory and uses a reader."""


class Unreadable(Exception):
    """Messages of a decided transaction cannot be read from the journal."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the transaction journal is damaged: {error}. Stop the broker, mend it with `tfmq log repair`, which says"
            " what is lost, and start the broker again"
        )


class ChunkedApply:
    """Applies the large part of one decision to one partition, slice by slice, read in a worker.

    Written bytes must be fsynced eventually, and every other fsync has to write them too, so only a window
    of unfsynced bytes is allowed for all parts together. Up to CONTIGUOUS_BYTES no other append is placed
    between the slices; larger parts allow others after each slice. `done` is called once, with the result
    of the last append or the error.
    """

    def __init__(
        self, queue: TargetQueue, applier: Applier, part: ApplyTask, after: int, done: AppliedCallback
    ) -> None:
        self._queue, self._applier, self._task, self._done = queue, applier, part, done
        self._applied_ordinal = after
        self._slices: Iterator[Slice] = iter(())
        self._contiguous = part.target.size_bytes <= CONTIGUOUS_BYTES
        self._mark: AppendResult | None = None
        self._cancelled: StorageStopped | None = None

    def start(self) -> None:
        """Start when a slot is free."""
        self._applier.chunked.acquire(1, self._slot_acquired)

    def cancel(self) -> None:
        """Stop with an error: the target stopped and resumed."""
        # Earlier slices may be lost and the highest position implies them, so no further slice may be
        # written. The target queue then reads the target's position.
        self._cancelled = StorageStopped(reason="the target stopped and resumed meanwhile", outcome=NOT_DONE)

    def _slot_acquired(self) -> None:
        self._slices = self._applier.store.read_slices(
            self._task.progress.decision, self._queue.key, self._applied_ordinal, self._queue.slice_bytes
        )
        if self._contiguous:
            self._applier.destination.begin_exclusive(self._queue.key, self._applier.source)
        self._read_slice()

    def _read_slice(self) -> None:
        self._applier.run(lambda: next(self._slices, None), self._slice_read)

    def _slice_read(self, found: Slice | None, error: BaseException | None) -> None:
        if isinstance(error, Corrupt | OSError):
            error = Unreadable(error)
        if error is not None or self._cancelled is not None:
            self._finish(None, self._cancelled or error)
        elif found is None:
            self._fail_incomplete()
        else:
            self._applier.in_flight.acquire(found.size_bytes, partial(self._write, found))

    def _write(self, found: Slice) -> None:
        if self._cancelled is not None:
            self._written(found, None, self._cancelled)
            return
        effect = self._queue.make_effect(self._task, found.batches, found.last_ordinal)
        self._applier.destination.apply(effect, partial(self._written, found))

    def _written(self, found: Slice, mark: AppendResult | None, error: BaseException | None) -> None:
        if mark is None:
            self._applier.in_flight.release(found.size_bytes)
            self._finish(None, error)
            return
        # After a failed fsync the target is stopped, so the bytes need no more room either.
        self._applier.destination.fsync_to(mark, lambda _: self._applier.in_flight.release(found.size_bytes))
        for number, count in found.lost:
            self._task.progress.losses[self._queue.key, number] = count
        if mark.delayed:
            self._applier.record_delayed(mark, [(self._task.progress, found.batch_indexes, mark.delayed)])
        self._mark = mark
        if self._cancelled is not None:
            self._finish(None, self._cancelled)
        elif found.last_ordinal >= self._task.target.last_ordinal:
            self._finish(mark, None)
        elif self._applier.stopping:
            self._finish(None, Closed())
        else:
            self._read_slice()

    def _fail_incomplete(self) -> None:
        """Fail: the journal ended before the last message of the part."""
        self._finish(None, RuntimeError("the journal has fewer messages of a transaction than were counted"))

    def _finish(self, mark: AppendResult | None, error: BaseException | None) -> None:
        if self._contiguous:
            self._applier.destination.end_exclusive(self._queue.key)
        self._applier.chunked.release(1)
        self._done(None if mark is None else mark._replace(offsets=(), delayed=()), error)
