"""The progress of commits at their targets, and the fsyncs of their effects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from tfmq.apply_target import AppendResult, ApplyTarget, StoredDelayedBatch, Timers
from tfmq.transaction import states
from tfmq.transaction.model import Decision, TargetPart

OFFSETS_MAX: Final = 4096
"""Replies have offsets for commits of up to this many batches, which is the maximum of a TRANSACT frame."""

UNKNOWN_OFFSET: Final = -1

DUE_WORDS_MAX: Final = 65_536
"""Maximum words of due times in one reply to a commit (512 KiB). A batch with one due time for all has one word."""

ProgressCallback: TypeAlias = Callable[["ApplyProgress", BaseException | None], None]
"""Called with (progress, None) when the commit is applied or late; with an error if it may not be durable."""


@dataclass(slots=True, eq=False)
class ApplyProgress:
    """Progress of one decision (commit record) at its targets, and the requests that wait for it.

    `pending_targets`: number of targets that lack their part. `undurable_parts`: number of parts that are written and
    not known to be durable. `blocked`: a target stopped before the fsync of such a part. `applied`: each target has had
    its part at least once. `undurable_delayed`: number of appends of delayed batches that are not durable. Replies wait
    for these appends: the handle of a message contains its ordinal in the arrival log, which another message could get
    after a power failure.

    `damage`: why messages cannot be read from the journal, "" while they can. `losses`: by (log id, ordinal), the
    number of messages that a repair of the journal lost after the commit. `late`: the reply must not wait any longer.
    `failure`: why it is not known whether the commit is durable. `offsets`: the offset of each batch, -1 if it is not
    known; empty for many batches, commit groups and after a restart.
    """

    decision: Decision
    reserved_bytes: int = 0
    batches: InitVar[int] = 0
    applied: bool = False
    pending_targets: int = 0
    undurable_parts: int = 0
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
    def state(self) -> str:
        there = self.applied and not self.pending_targets and not self.blocked
        return states.COMMITTED if there else states.APPLYING

    @property
    def lost(self) -> int:
        """Maximum number of messages of the decision that were lost by damage of the journal."""
        return sum(each.lost_messages for each in self.decision.transactions) + sum(self.losses.values())

    @property
    def is_durable(self) -> bool:
        """Whether all effects are written and durable, and all results for replies are recorded."""
        return self.applied and not self.pending_targets and not self.undurable_parts and not self.undurable_delayed

    @property
    def is_answerable(self) -> bool:
        """Whether all effects were written once, and the reply can be complete."""
        return self.applied and not self.undurable_delayed

    def add_callback(self, waiting: ProgressCallback) -> None:
        if self.failure is not None or self.is_answerable or self.late:
            waiting(self, self.failure)
        else:
            self.callbacks.append(waiting)

    def notify(self) -> None:
        waiting, self.callbacks = self.callbacks, []
        for each in waiting:
            each(self, self.failure)

    def notify_durable(self) -> None:
        settling, self.durable_callbacks = self.durable_callbacks, []
        for each in settling:
            each()

    def notify_late(self) -> None:
        """Let waiting requests be answered although not all is applied: a target is blocked or takes long."""
        self.late = True
        self.notify()

    def record_offsets(self, batch_indexes: Sequence[int], offsets: Sequence[int]) -> None:
        """Record the offsets of batches by their indexes in the decision; index -1: a later part of a split batch."""
        if self.offsets:
            for piece, offset in zip(batch_indexes, offsets, strict=False):
                if piece >= 0:
                    self.offsets[piece] = offset

    def record_delayed(self, batch_indexes: Sequence[int], delayed: Sequence[StoredDelayedBatch]) -> None:
        """Record where delayed batches are stored, up to DUE_WORDS_MAX. `batch_indexes`: as for `record_offsets`."""
        for piece, each in zip(batch_indexes, delayed, strict=False):
            if self.offsets and piece >= 0 and self.due_words + len(each.dues) <= DUE_WORDS_MAX:
                self.due_words += len(each.dues)
                self.delayed[piece] = each


FSYNC_DELAY_SECONDS: Final = 0.005
"""Delay before an fsync, so that several commits share it. Readers wait at most this much longer."""
RETRY_SECONDS: Final = 30.0
"""Pause before a failed fsync of a target is tried again, unless the target is resumed earlier."""


class ApplyTask(NamedTuple):
    """The part of one decision for one target, which is applied as a whole."""

    progress: ApplyProgress
    target: TargetPart

    @property
    def position(self) -> tuple[int, int]:
        """(LSN, ordinal of the last message): the source position of a target that has all of this part."""
        return self.progress.decision.lsn, self.target.last_ordinal


class WrittenTasks(NamedTuple):
    """Apply tasks whose effects were written by one append. `mark`: tells whether this append is durable."""

    mark: AppendResult
    tasks: Sequence[ApplyTask]


class FlushTracker:
    """Tracks written effects until they are durable. Consumers see the effects only when they are durable.

    An fsync is requested within a few milliseconds, and all effects written meanwhile share it. The reply to a commit
    does not wait for this fsync. `complete(progress)` is called once a decision is applied and all its effects are
    durable.
    """

    def __init__(self, destination: ApplyTarget, timers: Timers, complete: Callable[[ApplyProgress], None]) -> None:
        self._destination, self._timers, self._complete = destination, timers, complete
        self._written: dict[int, deque[WrittenTasks]] = {}
        self._fsync_requested: set[int] = set()
        """Keys of targets whose fsync is running, or has failed less than RETRY_SECONDS ago."""
        self.fsync_errors: dict[int, str] = {}
        """By key of each target that stopped before its effects were durable: the reason."""
        self._timer: Any = None
        self._closed = False

    def add_written(self, mark: AppendResult, parts: Sequence[ApplyTask]) -> None:
        written = self._written.get(mark.key)
        if written is None:
            written = self._written[mark.key] = deque()
        written.append(WrittenTasks(mark, parts))
        for progress, _ in parts:
            progress.undurable_parts += 1
            progress.blocked = progress.blocked or mark.key in self.fsync_errors
        self._start_timer(mark.key)

    def remove_undurable(self, key: int) -> list[ApplyTask]:
        """Remove the tasks of a resumed target that are not known to be durable, and return them in order."""
        self._fsync_requested.discard(key)
        self.fsync_errors.pop(key, None)
        parts = [part for each in self._written.pop(key, ()) for part in each.tasks]
        self._tasks_removed(parts)
        for progress, _ in parts:
            progress.blocked = False
        # Some of these decisions may still be blocked by other stopped targets.
        for other in self.fsync_errors:
            self._mark_blocked(other)
        return parts

    def blocked_decisions(self) -> set[ApplyProgress]:
        return {
            progress for key in self.fsync_errors for each in self._written.get(key, ()) for progress, _ in each.tasks
        }

    def fsync_all(self, done: Callable[[], None]) -> None:
        """Fsync all targets; call `done()` when each attempt has succeeded or failed."""
        left = len(self._written) + 1

        def ended(error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if not left:
                for key in list(self._written):
                    self._complete_target(key)
                done()

        for written in list(self._written.values()):
            self._destination.fsync_to(written[-1].mark, ended)
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
                self._destination.fsync_to(written[-1].mark, partial(self._fsync_done, key))

    def _fsync_done(self, key: int, error: BaseException | None) -> None:
        if error is None:
            self._complete_target(key)
            self.retry(key)
            return
        # A failed fsync stops the target. It is tried again when the target resumes, or after a pause.
        self._timers.after(RETRY_SECONDS, partial(self.retry, key))
        if key in self._written:
            self.fsync_errors[key] = str(error)
            self._mark_blocked(key)

    def _mark_blocked(self, key: int) -> None:
        for written in self._written.get(key, ()):
            for progress, _ in written.tasks:
                progress.blocked = True

    def retry(self, key: int) -> None:
        """Request an fsync again: the target may have resumed or been deleted."""
        self._fsync_requested.discard(key)
        if key in self._written:
            self._start_timer(key)

    def _complete_target(self, key: int) -> None:
        written = self._written.get(key)
        while written and self._destination.is_durable(written[0].mark):
            parts = written.popleft().tasks
            self._tasks_removed(parts)
            for progress, _ in parts:
                if progress.is_durable:
                    self._complete(progress)
        if written is not None and not written:
            self._written.pop(key, None)
            self.fsync_errors.pop(key, None)

    def _tasks_removed(self, parts: Sequence[ApplyTask]) -> None:
        for progress, _ in parts:
            progress.undurable_parts -= 1
            progress.blocked = progress.blocked and progress.undurable_parts > 0
