"""Group commit: one fsync serves all waiters, and one syncfs serves several files. A failed fsync is never retried.

The thread that owns the logs calls the Forcer. The fsyncs run in a worker through `run(fn, done)`, which calls `fn()`
in any thread and afterwards `done(result, error)` in the owner's thread. Only one round of fsyncs runs at a time;
requests that come during a round are served by the next one.

Where logs are replicated, a round ends when its fsyncs have ended and what they cover is stored elsewhere, too. The
next round does not wait for the store: up to ROUNDS_MAX rounds have begun and not ended, and they end in order.

A log is dirty if it may have bytes that are not durable. If one log is dirty, its file is fsynced: by the kernel
without a worker (`journal.linux_aio`) if the system has AIO and AIO is not slower, else in a worker. If several logs
are dirty, one `syncfs` makes all of them durable. A failed syncfs does not name the files that lost bytes, and the
system reports the error only once. So after a failed syncfs each file is fsynced by itself, to find these files. A log
is stopped if the fsync of its own file fails; the other logs continue.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from journal.clock import Clock
from journal.disk import Disk, File, FileReferences
from journal.errors import BeyondEnd, Closed, JournalError, Stopped
from journal.histogram import TimeHistogram
from journal.linux_aio import AioFsync, FsyncCallback, StartFsync

FsyncMethod = Literal["auto", "fdatasync", "syncfs"]
Waiter = Callable[[Exception | None], None]
RunInWorker = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
WhenStored = Callable[[Callable[[], None]], None]
"""Calls its argument in the owner's thread when something is stored elsewhere."""

ROUNDS_MAX: Final = 4
"""Maximum rounds that have begun and not ended where logs are replicated. A request waits for the next round to begin,
and for the store. With one round at a time, the first wait would be as long as the second, with four it is a quarter of
that. Each round costs a request to the store."""

SLOW_FACTOR: Final = 4.0
"""Method "auto": a syncfs is slow if it takes this many times as long as fsyncs of its files one by one. The likely
cause is that the syncfs also writes data of other programs."""
SLOW_SECONDS: Final = 0.02
"""A syncfs in less than this time is never called slow, because short fsyncs vary by more than SLOW_FACTOR."""
SLOW_ROUNDS: Final = 3
"""After this many consecutive slow syncfs calls, files are fsynced one by one for PAUSE_SECONDS."""
PAUSE_SECONDS: Final = 60.0
SMOOTHING: Final = 0.2
"""Weight of the newest measurement in the running mean of the time that an fsync of one file takes."""
MEDIAN_STEP: Final = 1.15
"""A measurement changes the running median by this factor: 17 measurements suffice to follow a tenfold change."""
PROBE_ROUNDS: Final = 128
"""One of this many fsyncs of a single file uses the slower method, to measure its time again. That is too rare to
affect the 99th percentile of the times."""
KERNEL_BONUS: Final = 1.2
"""The kernel method is used if it is slower by at most this factor, because it saves the owner's thread a quarter of
its CPU time (measured)."""


class FsyncTarget(Protocol):
    """A log that a Forcer fsyncs, such as journal.log.log.Log. All members are used in the owner's thread."""

    @property
    def stopped(self) -> str | None: ...
    @property
    def forced_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    def force_plan(self) -> FsyncPlan | None:
        """Return the plan of an fsync of everything written so far; None if the log needs no fsync or is stopped."""

    def force_done(self, plan: FsyncPlan, error: Exception | None) -> Callable[[], None] | None:
        """Record the end of the fsync of `plan`: advance `forced_offset`, or if there is an `error`, stop the log.

        Returns a function for file work that is due now, which the Forcer calls in a worker; None if no work is due.
        """


class FsyncPlan(NamedTuple):
    """An fsync that is planned for a log: after the fsync of `file`, everything before offset `end` is durable."""

    log: FsyncTarget
    gate: FsyncGate
    file: FsyncFile
    end: int
    end_ordinal: int = 0
    planned_at: float = 0.0
    snapshot: Any = None


class _SyncfsSpeed:
    """Decides from measured times, for the method "auto", whether one syncfs is to replace several fsyncs."""

    def __init__(self) -> None:
        self._single = 0.0
        self._slow = 0
        self._pause_until = float("-inf")

    def is_fast(self, now: float) -> bool:
        """False for PAUSE_SECONDS after SLOW_ROUNDS consecutive slow syncfs calls. `now`: monotonic time (s)."""
        return now >= self._pause_until

    def record_fsync(self, seconds: float) -> None:
        self._single += (seconds - self._single) * (SMOOTHING if self._single else 1.0)

    def record_syncfs(self, seconds: float, files: int, now: float) -> None:
        limit = max(SLOW_SECONDS, SLOW_FACTOR * files * self._single)
        self._slow = self._slow + 1 if seconds > limit else 0
        if self._slow >= SLOW_ROUNDS:
            self._slow = 0
            self._pause_until = now + PAUSE_SECONDS


class _FsyncMethods:
    """Chooses who fsyncs a single file, the kernel (Linux AIO) or a worker, from the measured times of both.

    The times are measured in the owner's thread: from the start of an fsync until that thread gets the result. On an
    idle machine the kernel is faster. On a busy machine a worker may be faster: the kernel's thread is bound to the CPU
    of the owner's thread and may wait for that CPU (measured: 3 ms, against 0.3 ms in a worker on another CPU).
    """

    def __init__(self) -> None:
        self._seconds = {"kernel": 0.0, "worker": 0.0}
        """Running medians. Each measurement moves a median by one step, however far it is from the median."""
        self._round = 0

    def record(self, method: Literal["kernel", "worker"], seconds: float) -> None:
        known = self._seconds[method]
        if not known:
            self._seconds[method] = seconds
        elif seconds != known:
            self._seconds[method] = known * MEDIAN_STEP if seconds > known else known / MEDIAN_STEP

    def use_kernel(self) -> bool:
        # One of PROBE_ROUNDS calls chooses the slower method, so that its time is measured again: times change.
        self._round = (self._round + 1) % PROBE_ROUNDS
        faster = self._seconds["kernel"] <= KERNEL_BONUS * self._seconds["worker"]
        return faster if self._round else not faster


class Forcer:
    """Fsyncs a set of logs and then calls their waiters, as the module docstring describes.

    `anchor_path`: a folder on the file system of all these logs; `syncfs` is called with a handle of this folder.
    `begin` (`AioFsyncQueue.start`): starts an fsync of a single file without a worker; None if the system cannot do
    that. `replicate`: called when a round begins, where logs are replicated; it returns the function that calls its
    argument once everything that is written now is stored elsewhere, or None if nobody has to wait for that. These
    calls are made in the order of the rounds. If it raises OSError, the logs of the round are stopped.
    """

    def __init__(
        self,
        disk: Disk,
        run: RunInWorker,
        *,
        anchor_path: str,
        method: FsyncMethod = "auto",
        clock: Clock,
        begin: StartFsync | None = None,
        replicate: Callable[[], WhenStored | None] | None = None,
    ) -> None:
        self._disk = disk
        self._begin = begin
        self._replicate = replicate
        self._run = run
        self._clock = clock
        self._method = "fdatasync" if method == "auto" and sys.platform != "linux" else method
        self._anchor = None if self._method == "fdatasync" else disk.open_anchor(anchor_path)
        self._waiting: dict[FsyncTarget, list[tuple[int, Waiter]]] = {}
        self._dirty: dict[FsyncTarget, None] = {}
        self._is_fsyncing = False
        self._rounds: deque[list[FsyncPlan]] = deque()
        """The plans of the rounds that have begun and not ended, the oldest round first."""
        self._planned: dict[FsyncTarget, FsyncPlan] = {}
        """The newest plan of each log in `_rounds`, where logs are replicated."""
        self._results: deque[tuple[Waiter, Exception | None]] = deque()
        self._calling_waiters = False
        self._syncfs_speed = _SyncfsSpeed()
        self._methods = _FsyncMethods()
        self._failures = 0
        """How often a syncfs has failed."""
        self._verified: WeakKeyDictionary[FsyncTarget, int] = WeakKeyDictionary()
        """The value of `_failures` when an fsync of the log's own file last succeeded; 0 for a log without an
        entry. A syncfs counts for a log only if this value equals `_failures`."""
        self.forces = 0
        """Number of rounds so far. `joint_forces`: number of rounds with a successful syncfs."""
        self.joint_forces = 0
        self.times = TimeHistogram()
        """Times of the rounds, from the start until this thread gets the result."""

    @property
    def idle(self) -> bool:
        """True if all rounds have ended, no log is dirty, and there are no waiters."""
        return not self._rounds and not self._waiting and not self._dirty

    def want(self, log: FsyncTarget, offset: int, waiter: Waiter, *, start: bool = True) -> None:
        """Call `waiter(None)` once `log` is durable up to `offset`, or `waiter(error)` if the log is stopped before.

        With `start=False` no fsync starts until `start` is called: a caller with several logs adds them all first, so
        that one round serves them. Raises BeyondEnd if `offset` is after the end of the log.
        """
        if log.forced_offset >= offset:
            self._results.append((waiter, None))
            self._call_waiters()
        elif log.stopped is not None:
            self._results.append((waiter, Stopped(log.stopped)))
            self._call_waiters()
        elif offset > log.end_offset:
            raise BeyondEnd(offset, log.end_offset)
        else:
            self._waiting.setdefault(log, []).append((offset, waiter))
            self._dirty[log] = None
            if start:
                self.start()

    def dirty(self, log: FsyncTarget) -> None:
        """Include `log` in the next round of fsyncs, without starting a round."""
        self._dirty[log] = None

    def flush_all(self, waiter: Waiter) -> None:
        """Fsync every log that is dirty or being fsynced; afterwards call `waiter` with the first error or None."""
        logs = [*{plan.log: None for plans in self._rounds for plan in plans} | self._dirty]
        left = len(logs) + 1
        failed: list[Exception] = []

        def on_durable(error: Exception | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                failed.append(error)
            if not left:
                waiter(failed[0] if failed else None)

        for log in logs:
            self.want(log, log.end_offset, on_durable, start=False)
        self.start()
        on_durable(None)

    def start(self) -> None:
        """Start a round of fsyncs if a log is dirty, no fsync is in progress, and not too many rounds have begun."""
        while self._dirty and not self._is_fsyncing and len(self._rounds) < ROUNDS_MAX:
            logs, self._dirty = self._dirty, {}
            plans: list[FsyncPlan] = []
            for log in logs:
                if log in self._planned and self._planned[log].end >= log.end_offset:
                    continue  # A round that has not ended covers all of it, and its end calls the waiters.
                plan = log.force_plan()
                if plan is not None:
                    plans.append(plan)
                else:
                    self._end_waits(log, again=False)
            if plans:
                self._start_round(plans)
        if self._results:
            self._call_waiters()

    def close(self) -> None:
        """Close the handle for `syncfs`. No fsync may be in progress, and no waiter may be left."""
        anchor, self._anchor = self._anchor, None
        if anchor is not None:
            anchor.close()

    def _start_round(self, plans: list[FsyncPlan]) -> None:
        self._is_fsyncing = True
        self._rounds.append(plans)
        self.forces += 1
        when_stored = None
        if self._replicate is not None:
            try:
                when_stored = self._replicate()
            except OSError as error:
                self._fsynced(plans, [error] * len(plans), None, None)
                return
            if when_stored is not None:
                self._planned.update((plan.log, plan) for plan in plans)
        alone = len(plans) == 1 and self._begin is not None
        if alone and self._methods.use_kernel() and self._start_in_kernel(plans[0], when_stored):
            return
        started_at = self._clock.monotonic()

        def done(results: list[Exception | None] | None, error: BaseException | None) -> None:
            seconds = self._clock.monotonic() - started_at
            self.times.record(seconds)
            if alone:
                self._methods.record("worker", seconds)
            self._fsynced(plans, results, error, when_stored)

        self._run(lambda: self._fsync_all(plans), done)

    def _start_in_kernel(self, plan: FsyncPlan, when_stored: WhenStored | None) -> bool:
        """Start an fsync of one file by the kernel, without a worker. Return False if no fsync was started."""
        started_at = self._clock.monotonic()

        def on_end(error: Exception | None) -> None:
            seconds = self._clock.monotonic() - started_at
            self.times.record(seconds)
            self._methods.record("kernel", seconds)
            if error is None:
                self._record_success(plan, started_at)
            self._fsynced([plan], [error], None, when_stored)

        return self._begin is not None and plan.gate.start(plan.file, self._begin, on_end)

    def _fsynced(
        self,
        plans: list[FsyncPlan],
        results: list[Exception | None] | None,
        error: BaseException | None,
        when_stored: WhenStored | None,
    ) -> None:
        """End a round whose fsyncs have ended, or start the next one and wait for the store.

        `results`: None if no fsync was made.
        """
        self._is_fsyncing = False
        if when_stored is None:
            self._complete(plans, results, error)
        else:
            self.start()
            when_stored(lambda: self._complete(plans, results, error))

    def _complete(
        self, plans: list[FsyncPlan], results: list[Exception | None] | None, error: BaseException | None
    ) -> None:
        """End the oldest round: record its results, start the next round, call waiters."""
        self._rounds.popleft()
        if self._planned:
            for plan in plans:
                if self._planned.get(plan.log) is plan:
                    del self._planned[plan.log]
        if results is None:
            # `error` is from this code or from the worker, not from the disk. As it is unknown what is durable, each
            # log gets an error.
            results = [RuntimeError(f"the fsync did not run: {error!r}")] * len(plans)
        work = []
        for plan, result in zip(plans, results, strict=True):
            job = plan.log.force_done(plan, result)
            if job is not None:
                work.append(job)
        for plan in plans:
            self._end_waits(plan.log, again=True)
        self.start()
        for job in work:
            self._run(job, _raise_error)

    def _end_waits(self, log: FsyncTarget, *, again: bool) -> None:
        """Queue the results for waiters of `log`: success if their offset is durable, an error if the log is stopped.

        If `again`, the remaining waiters wait for the next fsync of the log. If not, they get an error.
        """
        rest, durable = [], log.forced_offset
        for offset, waiter in self._waiting.pop(log, ()):
            if offset <= durable:
                self._results.append((waiter, None))
            else:
                rest.append((offset, waiter))
        if rest and (log.stopped is not None or not again):
            # A log that is not stopped and needs no fsync was closed before the offsets of these waiters were durable.
            error = Closed() if log.stopped is None else Stopped(log.stopped)
            self._results.extend((waiter, error) for _, waiter in rest)
        elif rest:
            self._waiting[log] = rest
            self._dirty[log] = None

    def _call_waiters(self) -> None:
        """Call the queued waiters in order. If a waiter queues further results, these are delivered last."""
        if self._calling_waiters:
            return
        self._calling_waiters = True
        try:
            while self._results:
                waiter, error = self._results.popleft()
                waiter(error)
        finally:
            self._calling_waiters = False

    def _fsync_all(self, plans: list[FsyncPlan]) -> list[Exception | None]:
        """Fsync the logs of all plans; return for each plan None or its error. Runs in a worker, one call at a time."""
        anchor = self._anchor
        if anchor is None or len(plans) == 1 or not self._use_syncfs():
            return [self._fsync_one(plan) for plan in plans]
        started_at = self._clock.monotonic()
        try:
            self._disk.sync_file_system(anchor)
        except OSError:
            # The error does not name the files that lost bytes, and is not reported again. So every log, also one that
            # is not part of this round, needs a successful fsync of its own file before a syncfs counts for it again.
            self._failures += 1
        else:
            self.joint_forces += 1
            ended = self._clock.monotonic()
            self._syncfs_speed.record_syncfs(ended - started_at, len(plans), ended)
        return [None if self._verified.get(plan.log, 0) == self._failures else self._fsync_one(plan) for plan in plans]

    def _use_syncfs(self) -> bool:
        return self._method == "syncfs" or self._syncfs_speed.is_fast(self._clock.monotonic())

    def _fsync_one(self, plan: FsyncPlan) -> Exception | None:
        started_at = self._clock.monotonic()
        try:
            plan.gate.fsync(plan.file)
        except (OSError, JournalError) as error:
            return error
        self._record_success(plan, started_at)
        return None

    def _record_success(self, plan: FsyncPlan, began: float) -> None:
        """Record that an fsync of the log's own file, which started at `began`, has succeeded."""
        if self._failures:
            self._verified[plan.log] = self._failures
        self._syncfs_speed.record_fsync(self._clock.monotonic() - began)


def _raise_error(_: Any, error: BaseException | None) -> None:
    # The file work of `force_done` handles disk errors itself. Any other error is a bug and must be visible.
    if error is not None:
        raise error


NEVER_CLOSED: list[File] = []
"""Files that may have bytes which are not durable. Closing one could hide an error, so they are never closed."""


class FsyncFile(Protocol):
    """A file of a log. `sealed`: the file is durable and only read. `end`: the log's offset at the end of the file."""

    sealed: bool

    @property
    def file(self) -> File: ...

    @property
    def end(self) -> int: ...


FsyncFileType = TypeVar("FsyncFileType", bound=FsyncFile)


class FsyncGate:
    """Fsyncs the files of one log, one at a time. After a failed fsync, no other fsync of the log is made.

    The system reports lost bytes to one fsync only; a concurrent or later fsync would succeed. So the gate keeps the
    first error, and each later `fsync` raises that error. Any thread may call `fsync`. Only the thread that owns the
    log calls `start`, and its callback is called in that thread. `references` keep the files open during an fsync.
    """

    def __init__(self, references: FileReferences) -> None:
        self.detached = False
        """Set to True when the files no longer belong to the log. Then `fsync` does nothing."""
        self._references = references
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._in_progress: AioFsync | None = None

    def fsync(self, file: FsyncFile, how: Callable[[], None] | None = None) -> None:
        """Fsync `file` by calling `how` (default: the file's `force`), unless the file is sealed.

        Raises the OSError of this fsync or of an earlier fsync of the log.
        """
        with self._references, self._lock:
            in_flight = self._in_progress
            if in_flight is not None:
                self._error = self._error or in_flight.wait()
            if self._error is not None:
                raise self._error
            if file.sealed or self.detached:
                return
            try:
                (how or file.file.force)()
            except OSError as error:
                self._error = error
                raise

    def start(self, file: FsyncFile, start: StartFsync, callback: FsyncCallback) -> bool:
        """Start an fsync of `file` by `start`. At its end, `callback(error)` is called.

        Returns False if no fsync was started: another fsync is in progress or has failed, the file is sealed, the gate
        is detached, or `start` has returned None.
        """
        if self._in_progress is not None or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._error is not None or file.sealed or self.detached:
                return False
            self._references.acquire()
            try:
                self._in_progress = start(file.file, partial(self._on_end, callback))
            finally:
                if self._in_progress is None:
                    self._references.release()
            return self._in_progress is not None
        finally:
            self._lock.release()

    def _on_end(self, callback: FsyncCallback, error: OSError | None) -> None:
        if error is not None:
            self._error = self._error or error
        self._in_progress = None  # set after `_error`: if `fsync` finds None here, it reads `_error` at once
        self._references.release()
        callback(error)

    def keep_unsynced_open(self, files: Sequence[FsyncFileType], durable: int) -> list[FsyncFileType]:
        """Return the files that may have bytes after the durable offset `durable`, and add them to NEVER_CLOSED."""
        unforced = [file for file in files if not file.sealed and (file.end > durable or self._error)]
        NEVER_CLOSED.extend(file.file for file in unforced)
        return unforced
