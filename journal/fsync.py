"""Group commit: one fsync at a time serves all waiters, one syncfs several files.

The owner's thread calls `want`, `dirty` and `flush_all`. The fsyncs run in a worker through `run(fn, done)`,
which calls `fn()` anywhere and then `done(result, error)` in the owner's thread. Requests that arrive during
an fsync are served by the next one, which starts before the waiters of the previous one are called.

A single dirty file is fsynced by itself, without a worker where the system can (`journal.linux_aio`) and is
not slower; several files by one `syncfs`. A failed syncfs does not name a file and reports the error only
once, so after one every file whose bytes are not yet verified gets an fsync of its own, which does name it.
Logs whose own fsync fails are stopped, the others continue. Nothing is ever retried.
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
from journal.linux_aio import AioFsync, FsyncCallback, StartFsync

FsyncMethod = Literal["auto", "fdatasync", "syncfs"]
Waiter = Callable[[Exception | None], None]
RunInWorker = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]

SLOW_FACTOR: Final = 4.0
"""`auto`: a syncfs slower by this factor than fsyncs of its files one by one also writes data of other
programs.
"""
SLOW_SECONDS: Final = 0.02
"""A faster syncfs is never called slow: short fsyncs vary by more than the factor."""
SLOW_ROUNDS: Final = 3
"""After this many consecutive slow syncfs calls, fsync files individually for PAUSE_SECONDS."""
PAUSE_SECONDS: Final = 60.0
SMOOTHING: Final = 0.2
"""Weight of the newest measurement of a single fsync."""
MEDIAN_STEP: Final = 1.15
"""Factor of one step: adapts to a tenfold change within 17 measurements and oscillates little."""
PROBE_ROUNDS: Final = 128
"""One single fsync out of this many uses the slower method: below one in a hundred, so that a p99 does not
show it.
"""
KERNEL_BONUS: Final = 1.2
"""The kernel may be slower by this factor: it costs the owner a quarter less CPU time per fsync (measured).
"""


class FsyncTarget(Protocol):
    """A log that a Forcer fsyncs, such as journal.log.log.Log.

    All members are used in the owner's thread.
    """

    @property
    def stopped(self) -> str | None: ...
    @property
    def forced_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    def force_plan(self) -> FsyncPlan | None:
        """Plan an fsync of everything written so far; None if nothing needs it or the log is stopped."""
        ...

    def force_done(self, plan: FsyncPlan, error: Exception | None) -> Callable[[], None] | None:
        """Record the result of an fsync: advance `forced_offset`, or stop.

        Returns follow-up file work for a worker, or None.
        """
        ...


class FsyncPlan(NamedTuple):
    """The state of one log when its fsync is planned: an fsync of `file` makes everything before `end` durable.

    The other fields are for the log's own `force_done`.
    """

    log: FsyncTarget
    gate: FsyncGate
    file: FsyncFile
    end: int
    end_ordinal: int = 0
    planned_at: float = 0.0
    snapshot: Any = None


class _SyncfsSpeed:
    """Decides from measured times whether one syncfs may replace the fsyncs of several files.

    For the method "auto". A syncfs is slow if it also writes other programs' data.
    """

    def __init__(self) -> None:
        self._single = 0.0
        self._slow = 0
        self._pause_until = float("-inf")

    def is_fast(self, now: float) -> bool:
        """True unless the last syncfs calls were slow, for PAUSE_SECONDS; `now`: monotonic, s."""
        return now >= self._pause_until

    def record_fsync(self, seconds: float) -> None:
        """Record the duration of the fsync of one file."""
        self._single += (seconds - self._single) * (SMOOTHING if self._single else 1.0)

    def record_syncfs(self, seconds: float, files: int, now: float) -> None:
        """Record how long a syncfs took that was made for `files` files."""
        limit = max(SLOW_SECONDS, SLOW_FACTOR * files * self._single)
        self._slow = self._slow + 1 if seconds > limit else 0
        if self._slow >= SLOW_ROUNDS:
            self._slow = 0
            self._pause_until = now + PAUSE_SECONDS


class _FsyncMethods:
    """Whether the kernel or a worker fsyncs a single file faster, as seen by the owner's thread.

    On an idle machine the kernel does. On a busy one its thread, which is bound to the owner's processor, may
    wait there (3 ms measured, where a worker that moved to the other processor took 0.3 ms).
    """

    def __init__(self) -> None:
        self._seconds = {"kernel": 0.0, "worker": 0.0}
        """A running median of each: one step up or down per measurement, so that outliers do not count more."""
        self._round = 0

    def record(self, method: Literal["kernel", "worker"], seconds: float) -> None:
        """Record how long a single fsync took."""
        known = self._seconds[method]
        if not known:
            self._seconds[method] = seconds
        elif seconds != known:
            self._seconds[method] = known * MEDIAN_STEP if seconds > known else known / MEDIAN_STEP

    def use_kernel(self) -> bool:
        """True if the next single fsync should use the kernel."""
        # The slower method is tried now and then, since conditions change.
        self._round = (self._round + 1) % PROBE_ROUNDS
        faster = self._seconds["kernel"] <= KERNEL_BONUS * self._seconds["worker"]
        return faster if self._round else not faster


class Forcer:
    """Fsyncs a set of logs on behalf of waiters; see the module docstring for how.

    `anchor_path`: a folder on the file system of all these logs. `begin` (`AioFsyncQueue.start`), if the
    system has it, fsyncs a single file without a worker.
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
    ) -> None:
        self._disk = disk
        self._begin = begin
        self._run = run
        self._clock = clock
        self._method = "fdatasync" if method == "auto" and sys.platform != "linux" else method
        self._anchor = None if self._method == "fdatasync" else disk.open_anchor(anchor_path)
        self._waiting: dict[FsyncTarget, list[tuple[int, Waiter]]] = {}
        self._dirty: dict[FsyncTarget, None] = {}
        self._in_progress: list[FsyncPlan] = []
        self._results: deque[tuple[Waiter, Exception | None]] = deque()
        self._calling_waiters = False
        self._syncfs_speed = _SyncfsSpeed()
        self._methods = _FsyncMethods()
        self._failures = 0
        """How often a syncfs has failed."""
        self._verified: WeakKeyDictionary[FsyncTarget, int] = WeakKeyDictionary()
        """How many failures there had been when an fsync of the log's own file succeeded; none is stored as 0."""
        self.forces = 0
        """Fsync rounds so far; `joint_forces` of them were one syncfs."""
        self.joint_forces = 0

    @property
    def idle(self) -> bool:
        """True if no fsync is in progress and there are no waiters."""
        return not self._in_progress and not self._waiting and not self._dirty

    def want(self, log: FsyncTarget, offset: int, waiter: Waiter, *, start: bool = True) -> None:
        """Call `waiter(None)` once `log` is durable up to `offset`.

        Call `waiter(error)` if it stops before.

        `start=False` leaves the start of the next fsync to `start`, so that a caller with several logs can
        add them all first and one fsync serves them. Raises BeyondEnd.
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
        """Include `log` in the next fsync, without starting one."""
        self._dirty[log] = None

    def flush_all(self, waiter: Waiter) -> None:
        """Fsync every log that is dirty or being fsynced.

        Then call `waiter(None)`, or with the first error.
        """
        logs = [*{plan.log: None for plan in self._in_progress} | self._dirty]
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
        """Start an fsync if a log is dirty and none is in progress."""
        while self._dirty and not self._in_progress:
            logs, self._dirty = self._dirty, {}
            plans: list[FsyncPlan] = []
            for log in logs:
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
        """Close the anchor; no fsync may be in progress or waited for."""
        anchor, self._anchor = self._anchor, None
        if anchor is not None:
            anchor.close()

    def _start_round(self, plans: list[FsyncPlan]) -> None:
        self._in_progress = plans
        self.forces += 1
        alone = len(plans) == 1 and self._begin is not None
        if alone and self._methods.use_kernel() and self._start_in_kernel(plans[0]):
            return
        started_at = self._clock.monotonic()

        def done(results: list[Exception | None] | None, error: BaseException | None) -> None:
            if alone:
                self._methods.record("worker", self._clock.monotonic() - started_at)
            self._complete(plans, results, error)

        self._run(lambda: self._fsync_all(plans), done)

    def _start_in_kernel(self, plan: FsyncPlan) -> bool:
        """Start an fsync of one file without a worker; False if that is not possible."""
        started_at = self._clock.monotonic()

        def on_end(error: Exception | None) -> None:
            self._methods.record("kernel", self._clock.monotonic() - started_at)
            if error is None:
                self._record_success(plan, started_at)
            self._complete([plan], [error], None)

        return self._begin is not None and plan.gate.start(plan.file, self._begin, on_end)

    def _complete(
        self, plans: list[FsyncPlan], results: list[Exception | None] | None, error: BaseException | None
    ) -> None:
        """Record the results of a round of fsyncs, start the next one, and call waiters. Owner's thread.

        `results` is None if the fsyncs did not run; `error` is the reason.
        """
        self._in_progress = []
        if results is None:
            # An error of this code or of the thread, not of the disk; what is on the disk is unknown all the
            # same.
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
        """Queue the results of those waiters of `log` whose offset is durable, or of all if it is stopped.

        `again`: other waiters wait for the next fsync of the log. If False, there will be none, and they get
        an error.
        """
        rest, durable = [], log.forced_offset
        for offset, waiter in self._waiting.pop(log, ()):
            if offset <= durable:
                self._results.append((waiter, None))
            else:
                rest.append((offset, waiter))
        if rest and (log.stopped is not None or not again):
            # A log that needs no fsync and is not stopped was closed while a waiter was left.
            error = Closed() if log.stopped is None else Stopped(log.stopped)
            self._results.extend((waiter, error) for _, waiter in rest)
        elif rest:
            self._waiting[log] = rest
            self._dirty[log] = None

    def _call_waiters(self) -> None:
        """Call the queued waiters, each with its error or None.

        Waits that end during such a call are queued after them, so that waiters are called in order.
        """
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
        """Fsync all plans in a worker and return one result per plan. One call at a time."""
        anchor = self._anchor
        if anchor is None or len(plans) == 1 or not self._use_syncfs():
            return [self._fsync_one(plan) for plan in plans]
        started_at = self._clock.monotonic()
        try:
            self._disk.sync_file_system(anchor)
        except OSError:
            # The error does not name the files whose bytes are lost, and is not reported again: from now on
            # every log is suspect until an fsync of its own has succeeded, also logs that are not part of
            # this round.
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
    """Raise the error of the file work that `force_done` returned."""
    # The work handles disk errors itself; any other error is a bug and must be visible.
    if error is not None:
        raise error


NEVER_CLOSED: list[File] = []
"""Files whose fsync failed. Closing one could hide the error, so they stay open until the process ends."""


class FsyncFile(Protocol):
    """A file of a log; a sealed one is durable and only read.

    `end`: end of its bytes as an offset of the log.
    """

    sealed: bool

    @property
    def file(self) -> File: ...

    @property
    def end(self) -> int: ...


FsyncFileType = TypeVar("FsyncFileType", bound=FsyncFile)


class FsyncGate:
    """Fsyncs of one log's files: one at a time, and none after one that failed.

    The system reports a failed fsync to one caller only: a concurrent or later call would succeed. So the
    error is kept and every later fsync raises it; nothing is retried. Any thread, except `start` and the end
    of an fsync started by it, which run in the owner's thread.

    `references` keep the files open during an fsync.
    """

    def __init__(self, references: FileReferences) -> None:
        self.detached = False
        """True once the files no longer belong to the log: they are not fsynced any more."""
        self._references = references
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._in_progress: AioFsync | None = None

    def fsync(self, file: FsyncFile, how: Callable[[], None] | None = None) -> None:
        """Fsync a file, unless it is sealed.

        `how` replaces the fsync and runs before any other can start. Raises OSError.
        """
        with self._references, self._lock:
            flight = self._in_progress
            if flight is not None:
                self._error = self._error or flight.wait()
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
        """Start an fsync of a file without a thread and call `callback(error)` at its end.

        Return False if none was started; the caller then calls `fsync`, which makes it or raises the reason.
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
        self._in_progress = None  # last: a worker that no longer waits for the fsync must see the error
        self._references.release()
        callback(error)

    def keep_unsynced_open(self, files: Sequence[FsyncFileType], durable: int) -> list[FsyncFileType]:
        """Return those of `files` with bytes that may not be durable, and keep them open for good.

        They must never be closed. The log is durable up to `durable`.
        """
        unforced = [file for file in files if not file.sealed and (file.end > durable or self._error)]
        NEVER_CLOSED.extend(file.file for file in unforced)
        return unforced
