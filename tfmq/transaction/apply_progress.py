"""How far commits are applied to their targets, and the fsyncs of the targets after that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from tfmq.apply_target import AppendResult, ApplyTarget, StoredDelayedBatch, Timers
from tfmq.transaction import states
from tfmq.transaction.model import Decision, TargetPart

LATE_SECONDS: Final = 10.0
"""If a commit is not applied after this time, the reply to the client has the state "applying"."""

OFFSETS_MAX: Final = 4096
"""The reply to a commit of more batches than this has no offsets. A TRANSACT frame has at most as many batches."""

UNKNOWN_OFFSET: Final = -1

DUE_WORDS_MAX: Final = 65_536
"""Maximum of due times in one reply to a commit (512 KiB). A batch with one due time for all messages counts once."""

ProgressCallback: TypeAlias = Callable[["ApplyProgress", BaseException | None], None]
"""Called with (progress, None) when the commit is applied or `late`; with (progress, error) if its fsync failed."""


@dataclass(slots=True, eq=False)
class ApplyProgress:
    """How far one decision (commit record) is applied to its targets, and the requests that wait for the apply.

    `pending_targets`: number of targets whose effects are not written yet. `undurable_tasks`: number of targets whose
    effects are written and not known to be durable; `blocked`: one of these targets has stopped. `applied`: the effects
    were written to each target at least once. `undurable_delayed`: number of appends of delayed batches that are not
    durable. Replies wait for these appends, because the handle of a delayed message contains its ordinal in the arrival
    log, and another message could get this ordinal after a power failure.

    `damage`: why messages cannot be read from the journal, "" while they can. `losses`: (log id, first ordinal) ->
    number of messages that a repair of the journal lost after the commit. `late`: requests get replies before the
    commit is applied (see `notify_late`). `failure`: error of the commit record's fsync. `offsets`: the offset of each
    batch, -1 if it is not known; empty for more than OFFSETS_MAX batches, for commit groups and after a restart.
    """

    decision: Decision
    reserved_bytes: int = 0
    batches: InitVar[int] = 0
    applied: bool = False
    pending_targets: int = 0
    undurable_tasks: int = 0
    undurable_delayed: int = 0
    dropped_messages: int = 0
    due_words: int = 0
    delayed: dict[int, StoredDelayedBatch] = field(default_factory=dict)
    damage: str = ""
    losses: dict[tuple[int, int], int] = field(default_factory=dict)
    late: bool = False
    blocked: bool = False
    failure: BaseException | None = None
    offsets: list[int] = field(init=False)
    callbacks: list[ProgressCallback] = field(default_factory=list)
    durable_callbacks: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call once all effects are durable."""

    def __post_init__(self, batches: int) -> None:
        self.offsets = [UNKNOWN_OFFSET] * batches if batches <= OFFSETS_MAX else []

    @property
    def state(self) -> states.State:
        there = self.applied and not self.pending_targets and not self.blocked
        return states.COMMITTED if there else states.APPLYING

    @property
    def lost(self) -> int:
        """Number of messages lost by damage of the journal; some of them may be in their partition nevertheless."""
        return sum(each.lost_messages for each in self.decision.transactions) + sum(self.losses.values())

    @property
    def is_durable(self) -> bool:
        """Whether all effects are written and durable."""
        return self.applied and not self.pending_targets and not self.undurable_tasks and not self.undurable_delayed

    @property
    def can_reply(self) -> bool:
        """Whether a complete reply is possible: each effect was written, and the delayed batches are durable."""
        return self.applied and not self.undurable_delayed

    def add_callback(self, waiting: ProgressCallback) -> None:
        if self.failure is not None or self.can_reply or self.late:
            waiting(self, self.failure)
        else:
            self.callbacks.append(waiting)

    def notify(self) -> None:
        waiting, self.callbacks = self.callbacks, []
        for each in waiting:
            each(self, self.failure)

    def notify_durable(self) -> None:
        waiting, self.durable_callbacks = self.durable_callbacks, []
        for each in waiting:
            each()

    def notify_late(self) -> None:
        """Reply to the waiting requests before the commit is applied: a target is blocked, or LATE_SECONDS are over."""
        self.late = True
        self.notify()

    def record_offsets(self, batch_indexes: Sequence[int], offsets: Sequence[int]) -> None:
        """Store the offsets of batches for replies. Index -1, which is a later part of a split batch, is ignored."""
        if self.offsets:
            for piece, offset in zip(batch_indexes, offsets, strict=False):
                if piece >= 0:
                    self.offsets[piece] = offset

    def record_delayed(self, batch_indexes: Sequence[int], delayed: Sequence[StoredDelayedBatch]) -> None:
        """Record for replies the locations of delayed batches, up to a total of DUE_WORDS_MAX due times."""
        for piece, each in zip(batch_indexes, delayed, strict=False):
            if self.offsets and piece >= 0 and self.due_words + len(each.dues) <= DUE_WORDS_MAX:
                self.due_words += len(each.dues)
                self.delayed[piece] = each


FSYNC_DELAY_SECONDS: Final = 0.005
"""Delay before an fsync, so that several commits share it. Consumers get the messages at most this much later."""
RETRY_SECONDS: Final = 30.0
"""Pause before a failed fsync of a target is tried again, unless the target is resumed earlier."""


class ApplyTask(NamedTuple):
    """The part of one decision (`progress`) for one target: the effects that one `TargetQueue` has to write."""

    progress: ApplyProgress
    target: TargetPart

    @property
    def position(self) -> tuple[int, int]:
        """(LSN, ordinal of the last message): the source position that a target has after the whole task is done."""
        return self.progress.decision.lsn, self.target.last_ordinal


class WrittenTasks(NamedTuple):
    """Apply tasks whose effects one append has written. `result`: the append, to query whether it is durable."""

    result: AppendResult
    tasks: Sequence[ApplyTask]


class FlushTracker:
    """Fsyncs written effects, and tracks them until they are durable. Before that, no consumer gets the messages.

    An fsync of a target is requested up to FSYNC_DELAY_SECONDS after a write, and includes all effects written by then.
    The reply to a commit does not wait for the fsync. `complete(progress)` is called when a decision is applied and all
    its effects are durable.
    """

    def __init__(self, apply_target: ApplyTarget, timers: Timers, complete: Callable[[ApplyProgress], None]) -> None:
        self._apply_target, self._timers, self._complete = apply_target, timers, complete
        self._written: dict[int, deque[WrittenTasks]] = {}
        self._fsync_requested: set[int] = set()
        """Keys of the targets whose fsync is in progress, or has failed less than RETRY_SECONDS ago."""
        self.fsync_errors: dict[int, str] = {}
        """Key of each target that stopped before its effects were durable -> error of the fsync."""
        self._timer: Any = None
        self._closed = False

    def add_written(self, result: AppendResult, tasks: Sequence[ApplyTask]) -> None:
        written = self._written.get(result.key)
        if written is None:
            written = self._written[result.key] = deque()
        written.append(WrittenTasks(result, tasks))
        for progress, _ in tasks:
            progress.undurable_tasks += 1
            progress.blocked = progress.blocked or result.key in self.fsync_errors
        self._start_timer(result.key)

    def remove_undurable(self, key: int) -> list[ApplyTask]:
        """Remove the tasks of a resumed target whose effects may not be durable; return the tasks in write order."""
        self._fsync_requested.discard(key)
        self.fsync_errors.pop(key, None)
        tasks = [task for each in self._written.pop(key, ()) for task in each.tasks]
        self._tasks_removed(tasks)
        for progress, _ in tasks:
            progress.blocked = False
        # Some of these decisions may still be blocked by other stopped targets.
        for other in self.fsync_errors:
            self._mark_blocked(other)
        return tasks

    def blocked_decisions(self) -> set[ApplyProgress]:
        return {
            progress for key in self.fsync_errors for each in self._written.get(key, ()) for progress, _ in each.tasks
        }

    def fsync_all(self, done: Callable[[], None]) -> None:
        """Fsync all targets with undurable effects; call `done()` when each fsync has succeeded or failed."""
        pending = len(self._written) + 1

        def ended(error: BaseException | None) -> None:
            nonlocal pending
            pending -= 1
            if not pending:
                for key in list(self._written):
                    self._complete_target(key)
                done()

        for written in list(self._written.values()):
            self._apply_target.fsync_to(written[-1].result, ended)
        ended(None)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def _start_timer(self, key: int) -> None:
        if self._timer is None and not self._closed and key not in self._fsync_requested:
            self._timer = self._timers.after(FSYNC_DELAY_SECONDS, self._request_fsyncs)

    def _request_fsyncs(self) -> None:
        self._timer = None
        for key in list(self._written):
            self._complete_target(key)
            written = self._written.get(key)
            if written and key not in self._fsync_requested:
                self._fsync_requested.add(key)
                self._apply_target.fsync_to(written[-1].result, partial(self._fsync_done, key))

    def _fsync_done(self, key: int, error: BaseException | None) -> None:
        if error is None:
            self._complete_target(key)
            self.retry(key)
            return
        # A failed fsync stops the target. The fsync is tried again when the target resumes, or after a pause.
        self._timers.after(RETRY_SECONDS, partial(self.retry, key))
        if key in self._written:
            self.fsync_errors[key] = str(error)
            self._mark_blocked(key)

    def _mark_blocked(self, key: int) -> None:
        for written in self._written.get(key, ()):
            for progress, _ in written.tasks:
                progress.blocked = True

    def retry(self, key: int) -> None:
        """Request an fsync of the target again, because the target may have resumed or been deleted."""
        self._fsync_requested.discard(key)
        if key in self._written:
            self._start_timer(key)

    def _complete_target(self, key: int) -> None:
        written = self._written.get(key)
        while written and self._apply_target.is_durable(written[0].result):
            tasks = written.popleft().tasks
            self._tasks_removed(tasks)
            for progress, _ in tasks:
                if progress.is_durable:
                    self._complete(progress)
        if written is not None and not written:
            self._written.pop(key, None)
            self.fsync_errors.pop(key, None)

    def _tasks_removed(self, tasks: Sequence[ApplyTask]) -> None:
        for progress, _ in tasks:
            progress.undurable_tasks -= 1
            progress.blocked = progress.blocked and progress.undurable_tasks > 0
