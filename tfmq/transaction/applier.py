"""Applies commits to their targets: partitions, the arrival log, group offsets.

A decision is one commit record, of one transaction or of a commit group; its part for one target is an apply task. Each
target has a `TargetQueue`, which does the tasks of all decisions in the order of the commits. `ChunkedApply` does a
large task in several appends, called slices. The delivery of delayed messages shares the code in `tfmq.apply_queue`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from journal.errors import Closed, Corrupt
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import SEQUENCE_BITS
from tfmq.apply_queue import RETRY_SECONDS, RETRY_SECONDS_MAX, ApplyQueue, ApplyQueues, InFlightLimit
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
from tfmq.backoff import Backoff
from tfmq.errors import NOT_DONE, StorageStopped
from tfmq.transaction.apply_progress import LATE_SECONDS, ApplyProgress, ApplyTask, FlushTracker
from tfmq.transaction.model import Slice, TargetPart
from tfmq.transaction.store import TransactionStore

COUNTED_INLINE_MAX: Final = 10_000
"""The targets of a decision with more batches than this (5 ms) are computed in a worker, not in the broker's thread."""
TURN_BYTES: Final = 8 << 20
"""Maximum bytes of small tasks (each fits into one append) that one turn of the broker applies (about 10 ms)."""
DUE_WORDS_TOTAL: Final = 4 << 20
"""Maximum of due times in memory for replies (32 MiB). Above it, replies have no handles of delayed messages."""
DelayedResults: TypeAlias = tuple[ApplyProgress, Sequence[int], Sequence[StoredDelayedBatch]]
"""(progress of a decision, indexes of its delayed batches, where each of these batches is stored)."""
OFFSETS_PART: Final = TargetPart(OFFSETS_KEY, "", 0, 0, 0)


class Applier(ApplyQueues["TargetQueue"]):
    """Applies decisions (commit records) to their targets completely, in order and exactly once.

    After an error of a target the applier tries again without limit, because nothing can revert a commit.
    `on_applied(progress)` is called once for each decision, when all its effects are written, and before any reply.
    """

    def __init__(
        self,
        store: TransactionStore,
        apply_target: ApplyTarget,
        *,
        timers: Timers,
        run: RunInWorker,
        release_space: Callable[[int], None],
        on_applied: Callable[[ApplyProgress], None],
        mark_ready: Callable[[], None],
    ) -> None:
        super().__init__(apply_target, timers, (SOURCE_TRANSACTION, store.journal_id), mark_ready)
        self.store, self.run = store, run
        self.in_flight = InFlightLimit()
        self.chunked = InFlightLimit(CHUNKED_MAX)
        self.flush_tracker = FlushTracker(apply_target, timers, self._complete)
        self.unlimited_turns = True
        """Whether TURN_BYTES is ignored: from the start of the broker until the applier is idle for the first time."""
        self._release_space, self._on_applied = release_space, on_applied
        self._starting: deque[ApplyProgress] = deque()
        """Decisions without tasks in the queues yet, because a worker computes the targets of the first of them."""
        self._start_backoff: Backoff | None = None
        self._start_timer: Any = None
        """Timer of the pause after the targets of the first one could not be computed; None if there is no pause."""
        self._turn_bytes = 0
        self.due_words = 0
        self._late: deque[tuple[float, ApplyProgress]] = deque()
        self._timer: Any = None
        self._stop_done: Callable[[], None] | None = None

    # Adding decisions to the queues of their targets

    def start(self, progress: ApplyProgress) -> None:
        """Add the tasks of a durable decision to the queues of its targets, after those of all earlier decisions.

        If the targets of a decision cannot be computed, this is logged and tried again after a pause, without limit.
        All later decisions wait for it: if one was applied first, a target that both have in common would count the
        effects of the earlier one as applied, and they would be lost. The replies to all of them have the state
        "applying".
        """
        self._starting.append(progress)
        if self._start_timer is not None:
            progress.notify_late()
        elif len(self._starting) == 1:
            self._start_next()

    def _start_next(self) -> None:
        self._start_timer = None
        while self._starting:
            decision = self._starting[0].decision
            if decision.batch_count > COUNTED_INLINE_MAX:
                self.run(decision.compute_targets, self._count_done)
                return
            try:
                targets = decision.targets
            except Exception as error:
                self._start_failed(error)
                return
            self._start_backoff = None
            self._start_decision(self._starting.popleft(), targets)

    def _count_done(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            self._start_failed(error)
            return
        self._start_backoff = None
        progress = self._starting.popleft()
        self._start_decision(progress, progress.decision.targets)
        self._start_next()

    def _start_failed(self, error: BaseException) -> None:
        logger.error("committed transactions wait: the targets of one cannot be computed", exc_info=error)
        self._start_backoff = self._start_backoff or Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
        self._start_timer = self.timers.after(self._start_backoff.advance(), self._start_next)
        for progress in self._starting:
            progress.notify_late()
        self.try_stop()

    def _start_decision(self, progress: ApplyProgress, targets: Mapping[int, TargetPart]) -> None:
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

    def _enqueue(self, key: int, task: ApplyTask) -> None:
        queue = self._target_queue(key)
        queue.enqueue(task)
        self.mark_ready(queue)

    def _target_queue(self, key: int) -> TargetQueue:
        queue = self.by_key.get(key)
        if queue is None:
            queue = self.by_key[key] = TargetQueue(key, self)
        return queue

    # Turns of the broker

    def write(self) -> bool:
        wrote = bool(self._ready_queues) and super().write()
        self.unlimited_turns = self.unlimited_turns and not self.idle
        self.try_stop()
        return wrote

    def may_send(self, queue: TargetQueue, size_bytes: int) -> bool:
        """Return whether `queue` may apply `size_bytes` more in this turn of the broker, and count them.

        All queues together apply at most TURN_BYTES in a turn. Above that, `queue` continues in the next turn.
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

    def tasks_written(self, queue: TargetQueue, tasks: Sequence[ApplyTask], result: AppendResult) -> None:
        """Handle tasks whose effects are written. `result`: result of the append that has written these effects."""
        self.flush_tracker.add_written(result, tasks)
        self._finish_tasks(queue, tasks)

    def record_delayed(self, result: AppendResult, delayed_results: Sequence[DelayedResults]) -> None:
        """Fsync the written delayed batches; then record, for replies, where these batches are stored."""
        for progress, _, _ in delayed_results:
            progress.undurable_delayed += 1

        def durable(error: BaseException | None) -> None:
            for progress, pieces, delayed in delayed_results:
                progress.undurable_delayed -= 1
                if error is None and self.due_words < DUE_WORDS_TOTAL:
                    before = progress.due_words
                    progress.record_delayed(pieces, delayed)
                    self.due_words += progress.due_words - before
                if progress.can_reply:
                    progress.notify()
                if progress.is_durable:  # The other effects may have become durable before.
                    self._complete(progress)

        self.apply_target.fsync_to(result, durable)

    def tasks_dropped(self, queue: TargetQueue, tasks: Sequence[ApplyTask]) -> None:
        for progress, target in tasks:
            progress.dropped_messages += target.messages
        self._finish_tasks(queue, tasks)

    def _finish_tasks(self, queue: TargetQueue, tasks: Sequence[ApplyTask]) -> None:
        if not self.remove_if_empty(queue):
            self.mark_ready(queue)
        for progress, target in tasks:
            freed = min(progress.reserved_bytes, target.size_bytes)
            if freed:
                progress.reserved_bytes -= freed
                self._release_space(freed)
            progress.pending_targets -= 1
            if not progress.pending_targets:
                self._targets_done(progress)

    def _targets_done(self, progress: ApplyProgress) -> None:
        # A target that lost unfsynced effects gets these again, so this method may be called twice for a decision.
        if not progress.applied:
            progress.applied = True
            self.store.mark_applied(progress.decision)
            self._on_applied(progress)
            if progress.can_reply:
                progress.notify()
        if progress.is_durable:
            self._complete(progress)

    def _complete(self, progress: ApplyProgress) -> None:
        self.due_words -= progress.due_words
        progress.due_words = 0
        self.store.complete(progress.decision)
        progress.notify_durable()

    # Blocked, resumed and deleted targets

    def target_resumed(self, key: int) -> None:
        # The target may have lost effects that were not fsynced. Apply these again, before all later effects.
        tasks = self.flush_tracker.remove_undurable(key)
        if tasks:
            for progress, _ in tasks:
                progress.pending_targets += 1
            self._target_queue(key).requeue(tasks)
        super().target_resumed(key)

    def topic_deleted(self, incarnation: int) -> None:
        super().topic_deleted(incarnation)
        for key in list(self.flush_tracker.fsync_errors):
            if key >> SEQUENCE_BITS == incarnation:
                self.flush_tracker.retry(key)

    def blocked_targets(self) -> dict[int, str]:
        """Return key of a blocked target -> why it accepts no appends, or why the fsync of its effects has failed."""
        return self.flush_tracker.fsync_errors | {queue.key: queue.blocked_reason for queue in self.blocked}

    @property
    def blocked_count(self) -> int:
        """Number of applied transactions with effects that may be lost, because a target stopped before the fsync."""
        decisions = self.flush_tracker.blocked_decisions()
        for queue in self.by_key.values():
            decisions |= {task.progress for task in queue.pending_tasks() if task.progress.applied}
        return sum(len(progress.decision.transactions) for progress in decisions)

    @staticmethod
    def has_target(key: int, progress: ApplyProgress) -> bool:
        if key == OFFSETS_KEY:
            return any(each.offsets for each in progress.decision.transactions)
        return key in progress.decision.targets

    @property
    def idle(self) -> bool:
        """Whether each effect of all decisions is written or waits, for a blocked target or for a new attempt."""
        return (
            (not self._starting or self._start_timer is not None)
            and not self._ready_queues
            and not self._next_turn
            and all(each.blocked_reason and not each.busy for each in self.by_key.values())
        )

    # Replies to commits that are not applied in time

    def _watch_late(self, progress: ApplyProgress) -> None:
        while self._late and self._late[0][1].can_reply:
            self._late.popleft()
        self._late.append((self.timers.now() + LATE_SECONDS, progress))
        if self._timer is None:
            self._timer = self.timers.after(LATE_SECONDS, self._notify_late)

    def _notify_late(self) -> None:
        self._timer = None
        now = self.timers.now()
        while self._late and (self._late[0][0] <= now or self._late[0][1].can_reply):
            progress = self._late.popleft()[1]
            if not progress.can_reply:
                progress.notify_late()
        if self._late:
            self._timer = self.timers.after(self._late[0][0] - now, self._notify_late)

    # Stop

    def stop(self, done: Callable[[], None]) -> None:
        """Do all small tasks, interrupt large tasks after the current slice, fsync all targets, then call `done()`."""
        self.stopping = True
        self._stop_done = done
        self.try_stop()

    def try_stop(self) -> None:
        if self._stop_done is None or not self.idle:
            return
        done, self._stop_done = self._stop_done, None
        for timer in (self._timer, self._start_timer):
            if timer is not None:
                self.timers.cancel(timer)
        self.close()
        self.flush_tracker.close()
        self.flush_tracker.fsync_all(done)


logger = logging.getLogger("tfmq.transaction")

OFFSETS_PER_APPEND: Final = 10_000
"""Maximum of group offsets that one append has from several decisions (512 KiB). A single decision may have more."""


class TargetQueue(ApplyQueue):
    """The apply tasks for one target, done by rising LSN, one append at a time. One append may do many small tasks."""

    contents = "committed transactions"
    logger = logger

    def __init__(self, key: int, applier: Applier) -> None:
        super().__init__(key, applier)
        self._applier = applier
        self.slice_bytes = self._read_slice_bytes()
        """Maximum bytes of one append; larger tasks are done by `ChunkedApply`."""
        self._queue: deque[ApplyTask] = deque()
        self._applying: list[ApplyTask] = []
        self._batch_indexes: list[Sequence[int]] = []
        self._chunked_apply: ChunkedApply | None = None
        self._applied_ordinal = 0

    def _read_slice_bytes(self) -> int:
        return 0 if self.key == OFFSETS_KEY else self._applier.apply_target.append_bytes_max(self.key)

    @property
    def is_empty(self) -> bool:
        return not self._queue and not self.busy

    def pending_tasks(self) -> list[ApplyTask]:
        return [*self._applying, *self._queue]

    def enqueue(self, task: ApplyTask) -> None:
        """Add a task. Its source position (LSN, ordinal) must be higher than those of all queued tasks."""
        self._queue.append(task)
        if self.blocked_reason:
            task.progress.notify_late()

    def requeue(self, tasks: Sequence[ApplyTask]) -> None:
        """Put tasks back into the queue, by source position, because the target may or may not have their effects."""
        self._queue = deque(sorted([*tasks, *self._queue], key=lambda task: task.position))
        self._position_known = False

    def target_resumed(self) -> None:
        """Continue after the target was resumed. The target may have lost effects that were written but not fsynced."""
        if self._chunked_apply is not None:
            self._chunked_apply.cancel()
        super().target_resumed()

    # Appends to the target

    def _can_send(self) -> bool:
        return bool(self._queue)

    def _send(self) -> bool:
        if self.key == OFFSETS_KEY:
            self._send_offsets()
            return True
        return self._send_messages()

    def _drop_applied(self, applied: tuple[int, int] | None) -> bool:
        self.slice_bytes = self._read_slice_bytes()  # The maximum is unknown until the target is open.
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
        """Start one append for as many tasks as fit into it, or one large task; return False if nothing was started."""
        self._applying = tasks = list[ApplyTask]()
        batches: list[Batch] = []
        pieces: list[Sequence[int]] = []
        decided_ms: list[int] = []
        size = 0
        while self._queue:
            task = self._queue[0]
            task_bytes = task.target.size_bytes
            if tasks and size + task_bytes > self.slice_bytes:
                break
            is_small = task_bytes <= self.slice_bytes
            if is_small and not self._applier.may_send(self, task_bytes):
                break
            slices = None
            try:
                if is_small:
                    slices = self._applier.store.read_slices_nowait(
                        task.progress.decision, self.key, self._applied_ordinal, self.slice_bytes
                    )
            except Exception as error:
                if not tasks:
                    self._failed(Unreadable(error) if isinstance(error, Corrupt | OSError) else error)
                break
            if slices is None:
                if not tasks:
                    self._start_chunked()
                break
            tasks.append(self._queue.popleft())
            batches += [batch for each in slices for batch in each.batches]
            pieces.append([piece for each in slices for piece in each.batch_indexes])
            decided_ms += [task.progress.decision.time_ms] * (len(batches) - len(decided_ms))
            size += task_bytes
            self._applied_ordinal = 0
        if tasks:
            self._append(tasks, batches, pieces, decided_ms)
        return bool(tasks) or self.busy

    def _append(
        self, tasks: list[ApplyTask], batches: list[Batch], pieces: list[Sequence[int]], decided_ms: list[int]
    ) -> None:
        self._applying, self._batch_indexes = tasks, pieces
        last = tasks[-1]
        effect = self.make_effect(last, batches, last.target.last_ordinal, decided_ms)
        self.busy = True
        self._applier.apply_target.apply(effect, self._written)

    def make_effect(
        self, task: ApplyTask, batches: Sequence[Batch], last: int, decided_ms: Sequence[int] | None = None
    ) -> Effect:
        """Return the effect that appends `batches` and moves the target's source position to (`task`'s LSN, `last`).

        `last`: ordinal of the last message. `decided_ms`: commit time of each batch; None: all have the time of `task`.
        """
        source = Source(*self._applier.source, task.progress.decision.lsn, last)
        if self.key == OFFSETS_KEY:
            return CommitOffsets((), source)
        if self.key == ARRIVALS_KEY:
            times = [task.progress.decision.time_ms] * len(batches) if decided_ms is None else decided_ms
            return AppendDelayed(batches, times, source)
        return Append(task.target.topic, *self.partition, batches, source)

    def _send_offsets(self) -> None:
        """Commit the offsets of as many queued decisions as one effect can have; later offsets replace earlier ones."""
        self._applying = tasks = list[ApplyTask]()
        groups: list[GroupPositions] = []
        count = 0
        while self._queue:
            offsets = self._queue[0].progress.decision.offsets
            count += sum(len(each.positions) for each in offsets)
            # The effect must fit into one entry of the catalog. The offsets of one decision are never divided.
            if tasks and count > OFFSETS_PER_APPEND:
                break
            tasks.append(self._queue.popleft())
            groups += offsets
        lsn = tasks[-1].progress.decision.lsn
        effect = CommitOffsets(groups, Source(*self._applier.source, lsn, 0))
        self._batch_indexes, self.busy = [], True
        self._applier.apply_target.apply(effect, self._written)

    def _start_chunked(self) -> None:
        task = self._queue.popleft()
        self._applying, self._batch_indexes, self.busy = [task], [], True
        after, self._applied_ordinal = self._applied_ordinal, 0
        self._chunked_apply = ChunkedApply(self, self._applier, task, after, self._written)
        self._chunked_apply.start()

    # Results of appends

    def _written(self, result: AppendResult | None, error: BaseException | None) -> None:
        tasks, self._applying, self.busy = self._applying, [], False
        self._chunked_apply = None
        if result is None:
            self.requeue(tasks)
            self._failed(error or RuntimeError("an effect ended without a result"))
            return
        self._unblock()
        # Only durable offsets are recorded for replies: after a power failure, a message could get another offset.
        has_offsets = bool(result.offsets) and self._applier.apply_target.is_durable(result)
        delayed_results: list[DelayedResults] = []
        first = 0
        for task, pieces in zip(tasks, self._batch_indexes, strict=False):
            end = first + len(pieces)
            if has_offsets:
                task.progress.record_offsets(pieces, result.offsets[first:end])
            delayed_results.append((task.progress, pieces, result.delayed[first:end]))
            first = end
        for task in tasks:
            task.progress.damage = ""
        if result.delayed:
            self._applier.record_delayed(result, delayed_results)
        self._applier.tasks_written(self, tasks, result)

    def sending_failed(self, error: BaseException) -> None:
        if not self.busy:
            tasks, self._applying = self._applying, []
            self.requeue(tasks)
        super().sending_failed(error)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Unreadable) and self._queue:
            self._queue[0].progress.damage = str(error)
        super()._failed(error)

    def drop_all(self) -> None:
        tasks, self._queue = list(self._queue), deque()
        messages = sum(task.target.messages for task in tasks)
        if messages:
            topic = tasks[0].target.topic
            logger.warning(
                "%d messages of committed transactions were dropped: the topic %s was deleted", messages, topic
            )
        self.blocked_reason = ""
        self._applier.tasks_dropped(self, tasks)

    def _block(self, error: BaseException) -> None:
        super()._block(error)
        for task in self._queue:
            task.progress.notify_late()
        self._applier.try_stop()


CONTIGUOUS_BYTES: Final = 64 << 20
"""The messages of a large task up to this size are contiguous in their partition: nothing is appended in between."""
CHUNKED_MAX: Final = 4
"""Maximum of large tasks in progress at the same time; each needs the memory of a slice, and a worker that reads."""


class Unreadable(Exception):
    """Messages of a committed transaction cannot be read from the journal."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the transaction journal is damaged: {error}. Stop the broker, mend it with `tfmq log repair`, which says"
            " what is lost, and start the broker again"
        )


class ChunkedApply:
    """Does one large apply task of a partition slice by slice: a worker reads a slice, then one append writes it.

    The bytes that are written but not durable are limited for all large tasks together (`Applier.in_flight`). During a
    task of at most CONTIGUOUS_BYTES nothing else is appended to the partition. `after`: ordinal of the decision's last
    message that the partition already has; 0: none. `done` is called once, with the last append's result or an error.
    """

    def __init__(
        self, queue: TargetQueue, applier: Applier, task: ApplyTask, after: int, done: AppliedCallback
    ) -> None:
        self._queue, self._applier, self._task, self._done = queue, applier, task, done
        self._applied_ordinal = after
        self._slices: Iterator[Slice] = iter(())
        self._contiguous = task.target.size_bytes <= CONTIGUOUS_BYTES
        self._cancelled: StorageStopped | None = None

    def start(self) -> None:
        self._applier.chunked.acquire(1, self._slot_acquired)

    def cancel(self) -> None:
        """End the task with an error, because the target has stopped and was resumed."""
        # The partition may have lost earlier slices. The source position of a later slice would state that the
        # partition has them, so no further slice may be written. The target queue reads the position of the partition
        # and starts the task again from there.
        self._cancelled = StorageStopped(reason="the target stopped and resumed meanwhile", outcome=NOT_DONE)

    def _slot_acquired(self) -> None:
        self._slices = self._applier.store.read_slices(
            self._task.progress.decision, self._queue.key, self._applied_ordinal, self._queue.slice_bytes
        )
        if self._contiguous:
            self._applier.apply_target.begin_exclusive(self._queue.key, self._applier.source)
        self._read_slice()

    def _read_slice(self) -> None:
        self._applier.run(lambda: next(self._slices, None), self._slice_read)

    def _slice_read(self, found: Slice | None, error: BaseException | None) -> None:
        if isinstance(error, Corrupt | OSError):
            error = Unreadable(error)
        if error is not None or self._cancelled is not None:
            self._finish(None, self._cancelled or error)
        elif found is None:
            incomplete = "the journal has fewer messages of a transaction than were counted"
            self._finish(None, RuntimeError(incomplete))
        else:
            self._applier.in_flight.acquire(found.size_bytes, partial(self._write, found))

    def _write(self, found: Slice) -> None:
        if self._cancelled is not None:
            self._written(found, None, self._cancelled)
            return
        effect = self._queue.make_effect(self._task, found.batches, found.last_ordinal)
        self._applier.apply_target.apply(effect, partial(self._written, found))

    def _written(self, found: Slice, result: AppendResult | None, error: BaseException | None) -> None:
        if result is None:
            self._applier.in_flight.release(found.size_bytes)
            self._finish(None, error)
            return
        # The bytes are also released after a failed fsync, because the target is stopped then.
        self._applier.apply_target.fsync_to(result, lambda _: self._applier.in_flight.release(found.size_bytes))
        for number, count in found.lost:
            self._task.progress.losses[self._queue.key, number] = count
        if result.delayed:
            self._applier.record_delayed(result, [(self._task.progress, found.batch_indexes, result.delayed)])
        if self._cancelled is not None:
            self._finish(None, self._cancelled)
        elif found.last_ordinal >= self._task.target.last_ordinal:
            self._finish(result, None)
        elif self._applier.stopping:
            self._finish(None, Closed())
        else:
            self._read_slice()

    def _finish(self, result: AppendResult | None, error: BaseException | None) -> None:
        if self._contiguous:
            self._applier.apply_target.end_exclusive(self._queue.key)
        self._applier.chunked.release(1)
        self._done(None if result is None else result._replace(offsets=(), delayed=()), error)
