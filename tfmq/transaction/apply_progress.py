"""Progress of decisions at their targets, and the tracker that waits for the effects' fsync."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from tfmq.apply_target import Delayed, Destination, Mark
from tfmq.transaction import states
from tfmq.transaction.model import Decision, Target
from tfmq.transaction.requests import Timers

OFFSETS_MAX: Final = 4096
"""Largest number of batches whose offsets are returned; the maximum of one TRANSACT frame."""

UNKNOWN_OFFSET: Final = -1

DUES_MAX: Final = 65_536
"""Words of due times in one reply (512 KiB).

A batch with one due time for all messages has one word.
"""

Waiting: TypeAlias = Callable[["Course", BaseException | None], None]
"""Called with (progress, None) when applied or late, (progress, error) if not known durable."""


class Course:
    """Progress of one decision at its targets, and the requests that wait for it.

    `pending_targets`: targets that lack their part. `undurable_parts`: parts written and not known to be
    durable. `blocked`: a target stopped before the fsync of such a part, which is invisible until the
    target resumes. `applied`: every target had its part once. `reserved_bytes`: bytes reserved for it.

    `undurable_delayed`: appends of delayed batches not known to be durable. Replies wait for them: a
    message handle contains the ordinal in the arrival log, which could be reassigned after a power failure.

    `damage`: why messages of it cannot be read from the journal, "" while they can. `losses`: messages that a repair of
    the journal gave up after the decision, by target and number, found as they were to be written.

    `reserved`: bytes set aside for it. `offsets`: where each batch begins, -1 where that is not known; empty for many
    batches, for groups and after a restart. `applied`: every target had its part once.
    """

    __slots__ = (
        "applied",
        "damage",
        "decision",
        "delayed",
        "dropped",
        "dues",
        "failure",
        "late",
        "left",
        "losses",
        "offsets",
        "reserved",
        "settling",
        "stuck",
        "unforced",
        "unsure",
        "waiting",
    )

    def __init__(self, decision: Decision, reserved: int = 0, batches: int = 0) -> None:
        self.decision = decision
        self.reserved = reserved
        self.left = self.unforced = self.dropped = self.unsure = self.dues = 0
        self.delayed: dict[int, Delayed] = {}
        self.damage = ""
        self.losses: dict[tuple[int, int], int] = {}
        self.applied = self.late = self.stuck = False
        self.failure: BaseException | None = None
        self.offsets = [UNKNOWN_OFFSET] * batches if batches <= OFFSETS_MAX else []
        self.waiting: list[Waiting] = []
        self.settling: list[Callable[[], None]] = []
        """Called once all effects are durable."""

    @property
    def state(self) -> str:
        """State for replies: "committed" or "applying"."""
        there = self.applied and not self.left and not self.stuck
        return states.COMMITTED if there else states.APPLYING

    @property
    def lost(self) -> int:
        """Messages of it that damage of the journal took, at most."""
        return sum(each.lost for each in self.decision.transactions) + sum(self.losses.values())

    @property
    def safe(self) -> bool:
        """Whether all effects are written and durable, and all results for replies recorded."""
        return self.applied and not self.left and not self.unforced and not self.unsure

    @property
    def known(self) -> bool:
        """Whether it is applied and a complete reply is possible."""
        return self.applied and not self.unsure

    def wait(self, waiting: Waiting) -> None:
        """Call `waiting` now if a reply is possible, else later."""
        if self.failure is not None or self.known or self.late:
            waiting(self, self.failure)
        else:
            self.waiting.append(waiting)

    def tell(self) -> None:
        """Call all waiting callbacks: the decision is applied, failed or late."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each(self, self.failure)

    def tell_safe(self) -> None:
        """Call the callbacks that wait for durability."""
        settling, self.settling = self.settling, []
        for each in settling:
            each()

    def tell_late(self) -> None:
        """Answer waiting requests early: a target is blocked, or too much time has passed."""
        self.late = True
        self.tell()

    def fail(self, error: BaseException) -> None:
        """Fail waiting requests: the journal stopped before the decision was known to be durable."""
        self.failure = error
        self.tell()

    def note_offsets(self, pieces: Sequence[int], offsets: Sequence[int]) -> None:
        """Record first offsets of batches.

        `batch_indexes` are batch indexes, -1 for the rest of a split batch.
        """
        if self.offsets:
            for piece, offset in zip(pieces, offsets, strict=False):
                if piece >= 0:
                    self.offsets[piece] = offset

    def note_delayed(self, pieces: Sequence[int], delayed: Sequence[Delayed]) -> None:
        """Record results of delayed batches, up to the reply limit; `batch_indexes` as in `record_offsets`."""
        for piece, each in zip(pieces, delayed, strict=False):
            if self.offsets and piece >= 0 and self.dues + len(each.dues) <= DUES_MAX:
                self.dues += len(each.dues)
                self.delayed[piece] = each


SOON_SECONDS: Final = 0.005
"""Delay of an fsync request, so that effects of several decisions share it.

It bounds the additional latency for readers of durable data; 200 fsyncs per second leave disk time to other
work.
"""
RETRY_SECONDS: Final = 30.0
"""Pause after which a target with a failed fsync is retried, even if it reports no resume."""


class Part(NamedTuple):
    """An apply task: the part of one decision for one target."""

    course: Course
    target: Target

    @property
    def place(self) -> tuple[int, int]:
        """(LSN, ordinal): once the target's applied position reaches it, the part is applied."""
        return self.course.decision.place, self.target.last


class Written(NamedTuple):
    """Tasks written to a target by one append."""

    mark: Mark
    parts: Sequence[Part]


class Settling:
    """Tracks written effects until they are durable.

    Only then can the journal release a decision. Readers of durable data see a commit from then on. An
    fsync is therefore requested soon, but shared by all effects within a few milliseconds; the reply to the
    commit does not wait for it. `complete(progress)` is called once a decision is applied and all its
    effects are durable.
    """

    def __init__(self, destination: Destination, timers: Timers, settle: Callable[[Course], None]) -> None:
        self._destination, self._timers, self._settle = destination, timers, settle
        self._keys: dict[int, deque[Written]] = {}
        self._asked: set[int] = set()
        """Targets with an fsync requested, or failed less than RETRY_SECONDS ago."""
        self.trouble: dict[int, str] = {}
        """Targets that stopped before their effects were durable: key -> reason."""
        self._timer: Any = None
        self._parts = 0
        self._closed = False

    def __len__(self) -> int:
        """Number of tasks not known to be durable."""
        return self._parts

    def add(self, mark: Mark, parts: Sequence[Part]) -> None:
        """Add written tasks; `mark` identifies what must be fsynced."""
        written = self._keys.get(mark.key)
        if written is None:
            written = self._keys[mark.key] = deque()
        written.append(Written(mark, parts))
        self._parts += len(parts)
        for progress, _ in parts:
            progress.unforced += 1
            progress.stuck = progress.stuck or mark.key in self.trouble
        self._arm(mark.key)

    def take_back(self, key: int) -> list[Part]:
        """Remove and return all undurable tasks of a target that resumed, in order."""
        self._asked.discard(key)
        self.trouble.pop(key, None)
        parts = [part for each in self._keys.pop(key, ()) for part in each.parts]
        self._take_out(parts)
        for progress, _ in parts:
            progress.stuck = False
        # Other stopped targets still block some of these decisions.
        for other in self.trouble:
            self._mark_stuck(other)
        return parts

    def stuck(self) -> set[Course]:
        """Return decisions with a target that stopped before their effects were durable."""
        return {
            progress for key in self.trouble for each in self._keys.get(key, ()) for progress, _ in each.parts
        }

    def force_all(self, done: Callable[[], None]) -> None:
        """Fsync all targets; call `done()` when every attempt has ended, successful or not."""
        left = len(self._keys) + 1

        def ended(error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if not left:
                self.sweep()
                done()

        for written in list(self._keys.values()):
            self._destination.when_forced(written[-1].mark, ended)
        ended(None)

    def close(self) -> None:
        """Cancel the timer; no more fsyncs are requested."""
        self._closed = True
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def sweep(self) -> None:
        """Complete every decision whose effects are durable."""
        for key in list(self._keys):
            self._sweep(key)

    def _arm(self, key: int) -> None:
        if self._timer is None and not self._closed and key not in self._asked:
            self._timer = self._timers.after(SOON_SECONDS, self._ring)

    def _ring(self) -> None:
        self._timer = None
        for key in list(self._keys):
            self._sweep(key)
            written = self._keys.get(key)
            if written and key not in self._asked:
                self._asked.add(key)
                self._destination.when_forced(written[-1].mark, partial(self._forced, key))

    def _forced(self, key: int, error: BaseException | None) -> None:
        """Handle the end of an fsync."""
        if error is None:
            self._sweep(key)
            self.look_again(key)
            return
        # A failed fsync stops the target: it is retried when it resumes, or after a pause.
        self._timers.after(RETRY_SECONDS, partial(self.look_again, key))
        if key in self._keys:
            self.trouble[key] = str(error)
            self._mark_stuck(key)

    def _mark_stuck(self, key: int) -> None:
        for written in self._keys.get(key, ()):
            for progress, _ in written.parts:
                progress.stuck = True

    def look_again(self, key: int) -> None:
        """Request an fsync again: the target may have resumed or been deleted."""
        self._asked.discard(key)
        if key in self._keys:
            self._arm(key)

    def _sweep(self, key: int) -> None:
        written = self._keys.get(key)
        while written and self._destination.forced(written[0].mark):
            parts = written.popleft().parts
            self._take_out(parts)
            for progress, _ in parts:
                if progress.safe:
                    self._settle(progress)
        if written is not None and not written:
            self._keys.pop(key, None)
            self.trouble.pop(key, None)

    def _take_out(self, parts: Sequence[Part]) -> None:
        self._parts -= len(parts)
        for progress, _ in parts:
            progress.unforced -= 1
            progress.stuck = progress.stuck and progress.unforced > 0
