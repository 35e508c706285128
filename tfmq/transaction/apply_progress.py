"""Progress of commits at their targets, and the tracker of their effects' fsyncs."""

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
"""Offsets are returned for commits of up to so many batches: as many as a TRANSACT frame can have."""

UNKNOWN_OFFSET: Final = -1

DUE_WORDS_MAX: Final = 65_536
"""Maximum of words of due times in one reply to a commit (512 KiB).

A batch with one due time for all messages has one word.
"""

ProgressCallback: TypeAlias = Callable[["ApplyProgress", BaseException | None], None]
"""Called with (progress, None) when a reply is due, as the commit is applied, or late.

Called with (progress, error) if it is not known whether the commit is durable.
"""


@dataclass(slots=True, eq=False)
class ApplyProgress:
    """Progress of one decision at its targets, and the requests that wait for it.

    `pending_targets`: number of targets that lack their part. `undurable_parts`: number of parts that are written and
    not known to be durable. `blocked`: a target stopped before the fsync of such a part, which is invisible until the
    target resumes. `applied`: every target had its part once. `reserved_bytes`: bytes reserved at the targets.

    `undurable_delayed`: number of appends of delayed batches that are not known to be durable. Replies wait for them:
    a message handle contains the ordinal in the arrival log, which could be reassigned after a power failure.

    `damage`: why messages cannot be read from the journal, "" while they can. `losses`: (log id, ordinal) of messages
    that were missing when they were to be written, because a repair of the journal lost them after the commit, with
    their count. `late`: a reply must not wait any longer. `failure`: why it is not known whether the commit is durable.

    `offsets`: the offset of each batch in its partition, -1 if it is not known; empty for many batches, for commit
    groups and after a restart.
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
        """State for replies: "committed" or "applying"."""
        there = self.applied and not self.pending_targets and not self.blocked
        return states.COMMITTED if there else states.APPLYING

    @property
    def lost(self) -> int:
        """Number of its messages that are lost by damage of the journal, at most."""
        return sum(each.lost_messages for each in self.decision.transactions) + sum(self.losses.values())

    @property
    def is_durable(self) -> bool:
        """Whether all effects are written and durable, and all results for replies are recorded."""
        return self.applied and not self.pending_targets and not self.undurable_parts and not self.undurable_delayed

    @property
    def is_answerable(self) -> bool:
        """Whether all effects were written, and a complete reply is possible."""
        return self.applied and not self.undurable_delayed

    def add_callback(self, waiting: ProgressCallback) -> None:
        """Call `waiting` now if a reply is possible, else later."""
        if self.failure is not None or self.is_answerable or self.late:
            waiting(self, self.failure)
        else:
            self.callbacks.append(waiting)

    def notify(self) -> None:
        """Call all waiting callbacks: the decision is applied, failed or late."""
        waiting, self.callbacks = self.callbacks, []
        for each in waiting:
            each(self, self.failure)

    def notify_durable(self) -> None:
        """Call the callbacks that wait for durability."""
        settling, self.durable_callbacks = self.durable_callbacks, []
        for each in settling:
            each()

    def notify_late(self) -> None:
        """Let waiting requests be answered before all is applied: a target is blocked, or it takes long."""
        self.late = True
        self.notify()

    def record_offsets(self, batch_indexes: Sequence[int], offsets: Sequence[int]) -> None:
        """Record the offsets of batches in their partition.

        `batch_indexes`: their indexes over the whole decision, -1 for the rest of a split batch.
        """
        if self.offsets:
            for piece, offset in zip(batch_indexes, offsets, strict=False):
                if piece >= 0:
                    self.offsets[piece] = offset

    def record_delayed(self, batch_indexes: Sequence[int], delayed: Sequence[StoredDelayedBatch]) -> None:
        """Record where delayed batches are stored, up to DUE_WORDS_MAX; else as `record_offsets`."""
        for piece, each in zip(batch_indexes, delayed, strict=False):
            if self.offsets and piece >= 0 and self.due_words + len(each.dues) <= DUE_WORDS_MAX:
                self.due_words += len(each.dues)
                self.delayed[piece] = each


FSYNC_DELAY_SECONDS: Final = 0.005
"""Delay of an fsync request, so that effects of several commits share the fsync.

It bounds the additional latency for readers of durable data; 200 fsyncs per second leave disk time to other
work.
"""
RETRY_SECONDS: Final = 30.0
"""Pause after which a target with a failed fsync is retried, even if it reports no resume."""


class ApplyTask(NamedTuple):
    """An apply task: the part of one decision for one target."""

    progress: ApplyProgress
    target: TargetPart

    @property
    def position(self) -> tuple[int, int]:
        """(LSN, ordinal of the last message): the source position of a target that has the whole part."""
        return self.progress.decision.lsn, self.target.last_ordinal


class WrittenTasks(NamedTuple):
    """Apply tasks whose effects one append has written; `mark`: what has to be durable."""

    mark: AppendResult
    tasks: Sequence[ApplyTask]


class FlushTracker:
    """Tracks written effects until they are durable.

    Only then is a decision no longer needed in the journal, and only then do consumers see its messages. An fsync is
    therefore requested soon, but shared by all effects within a few milliseconds; the reply to the commit does not
    wait for it. `complete(progress)` is called once a decision is applied and all its effects are durable.
    """

    def __init__(self, destination: ApplyTarget, timers: Timers, complete: Callable[[ApplyProgress], None]) -> None:
        self._destination, self._timers, self._complete = destination, timers, complete
        self._written: dict[int, deque[WrittenTasks]] = {}
        self._fsync_requested: set[int] = set()
        """Keys of targets with a running fsync, or one that failed less than RETRY_SECONDS ago."""
        self.fsync_errors: dict[int, str] = {}
        """Targets that stopped before their effects were durable: key -> reason."""
        self._timer: Any = None
        self._closed = False

    def add_written(self, mark: AppendResult, parts: Sequence[ApplyTask]) -> None:
        """Add written tasks; `mark` identifies what must be fsynced."""
        written = self._written.get(mark.key)
        if written is None:
            written = self._written[mark.key] = deque()
        written.append(WrittenTasks(mark, parts))
        for progress, _ in parts:
            progress.undurable_parts += 1
            progress.blocked = progress.blocked or mark.key in self.fsync_errors
        self._start_timer(mark.key)

    def remove_undurable(self, key: int) -> list[ApplyTask]:
        """Remove and return, in order, the tasks of a resumed target that are not known to be durable."""
        self._fsync_requested.discard(key)
        self.fsync_errors.pop(key, None)
        parts = [part for each in self._written.pop(key, ()) for part in each.tasks]
        self._tasks_removed(parts)
        for progress, _ in parts:
            progress.blocked = False
        # Other stopped targets still block some of these decisions.
        for other in self.fsync_errors:
            self._mark_blocked(other)
        return parts

    def blocked_decisions(self) -> set[ApplyProgress]:
        """Return the progress of decisions with a target that stopped before the effects were durable."""
        return {
            progress for key in self.fsync_errors for each in self._written.get(key, ()) for progress, _ in each.tasks
        }

    def fsync_all(self, done: Callable[[], None]) -> None:
        """Fsync all targets; call `done()` when every attempt has ended, successful or not."""
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
        """Cancel the timer; no more fsyncs are requested."""
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
        """Complete what is durable after an fsync; after a failed one, mark decisions as blocked."""
        if error is None:
            self._complete_target(key)
            self.retry(key)
            return
        # A failed fsync stops the target: it is retried when it resumes, or after a pause.
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
