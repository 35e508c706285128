"""Group commit: one force at a time serves all who wait, and one for many files where the system can.

The owner's thread calls `want`, `dirty`, `flush_all`; the forces themselves run in a worker, through `run(fn, done)`:
it calls `fn()` anywhere and then `done(result, error)` in the owner's thread. While one force is in flight the next
gathers; it starts before the waiters of the last are called.

One dirty file is forced by itself, without a worker where the system can (`journal.linux_aio`) and is not slower so,
several by one `syncfs`.
A failed syncfs names no file and tells the error only once, so behind one every file with bytes not yet proven gets a
force of its own, which does name it; those whose own force fails are stopped, the others go on. Nothing is ever
retried.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

from journal.clock import Clock
from journal.disk import Disk, File, Pins
from journal.errors import BeyondEnd, Closed, JournalError, Stopped
from journal.linux_aio import Begin, Flight, Landed

Method = Literal["auto", "fdatasync", "syncfs"]
Waiter = Callable[[Exception | None], None]
Run = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]

SLOW_FACTOR: Final = 4.0
"""`auto`: a syncfs this many times slower than forcing its files one by one writes others' bytes too."""
SLOW_SECONDS: Final = 0.02
"""Below this a syncfs is never called slow: small forces vary by more than the factor."""
SLOW_ROUNDS: Final = 3
"""So many slow ones in a row, and files are forced one by one for PAUSE_SECONDS."""
PAUSE_SECONDS: Final = 60.0
SMOOTHING: Final = 0.2
"""Weight of the newest measurement of a single force."""
MEDIAN_STEP: Final = 1.15
"""Finds its way over a factor of ten within 17 measurements, and does not swing widely where it is."""
PROBE_ROUNDS: Final = 128
"""One single force in so many goes the way that was slower: below one in a hundred, so that a p99 does not see it."""
KERNEL_BONUS: Final = 1.2
"""The kernel may be slower by this factor: it costs the owner a quarter less processor time a force (measured)."""


class Forceable(Protocol):
    """What is forced: journal.log.log.Log. All in the owner's thread."""

    @property
    def stopped(self) -> str | None: ...
    @property
    def forced_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    def force_plan(self) -> Plan | None:
        """What a force that starts now would cover; None if there is nothing to force, or no use in it."""
        ...

    def force_done(self, plan: Any, error: Exception | None) -> Callable[[], None] | None:
        """Takes note of a force's end, moves `forced_offset` or stops; answers work to be done in a worker."""
        ...


class Plan(Protocol):
    """What one force of one log covers, as it was when the force began."""

    @property
    def log(self) -> Forceable: ...
    def force(self) -> None:
        """Forces the log's own files; in a worker. Raises OSError."""
        ...

    def begin(self, begin: Begin, landed: Landed) -> bool:
        """Starts the same without a worker; `landed(error)` when it has ended. False: nothing was begun."""
        ...


class _Speed:
    """`auto`: whether one syncfs for several files pays, or forces what strangers write to the same disk."""

    def __init__(self) -> None:
        self._single = 0.0
        self._slow = 0
        self._pause_until = float("-inf")

    def pays(self, now: float) -> bool:
        return now >= self._pause_until

    def single(self, seconds: float) -> None:
        self._single += (seconds - self._single) * (SMOOTHING if self._single else 1.0)

    def joint(self, seconds: float, files: int, now: float) -> None:
        limit = max(SLOW_SECONDS, SLOW_FACTOR * files * self._single)
        self._slow = self._slow + 1 if seconds > limit else 0
        if self._slow >= SLOW_ROUNDS:
            self._slow = 0
            self._pause_until = now + PAUSE_SECONDS


class _Median:
    """A running median: it goes a step up or down, however far off a measurement is, so stalls do not count more."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def note(self, seconds: float) -> None:
        if not self.seconds:
            self.seconds = seconds
        elif seconds > self.seconds:
            self.seconds *= MEDIAN_STEP
        elif seconds < self.seconds:
            self.seconds /= MEDIAN_STEP


class _Ways:
    """Whether the kernel or a worker forces a single file faster, from its start to its end in the owner's thread.

    On an idle machine the kernel does. On a busy one its thread, which is bound to the processor of the owner, may wait
    there for its turn (3 ms measured, where a worker that moved to the other processor took 0.3).
    """

    def __init__(self) -> None:
        self.kernel = _Median()
        self.worker = _Median()
        self._round = 0

    def kernel_pays(self) -> bool:
        """Now and then the slower one is tried, since things change."""
        self._round = (self._round + 1) % PROBE_ROUNDS
        faster = self.kernel.seconds <= KERNEL_BONUS * self.worker.seconds
        return faster if self._round else not faster


class Forcer:
    """See the module. `anchor_path`: a folder on the file system of all logs that this one forces.

    `begin` (`ForceQueue.begin`), where the system has it, forces a single file without a worker.
    """

    def __init__(
        self,
        disk: Disk,
        run: Run,
        *,
        anchor_path: str,
        method: Method = "auto",
        clock: Clock,
        begin: Begin | None = None,
    ) -> None:
        self._disk = disk
        self._begin = begin
        self._run = run
        self._clock = clock
        self._method = "fdatasync" if method == "auto" and sys.platform != "linux" else method
        self._anchor = None if self._method == "fdatasync" else disk.open_anchor(anchor_path)
        self._wants: dict[Forceable, list[tuple[int, Waiter]]] = {}
        self._dirty: dict[Forceable, None] = {}
        self._flying: list[Plan] = []
        self._answers: deque[tuple[Waiter, Exception | None]] = deque()
        self._answering = False
        self._speed = _Speed()
        self._ways = _Ways()
        self._failures = 0
        self._proven: WeakKeyDictionary[Forceable, int] = WeakKeyDictionary()
        self.forces = 0
        """Rounds so far; `joint_forces` of them were one syncfs."""
        self.joint_forces = 0

    @property
    def idle(self) -> bool:
        """True if no force is in flight and nobody waits for one."""
        return not self._flying and not self._wants and not self._dirty

    def want(self, log: Forceable, offset: int, waiter: Waiter, *, start: bool = True) -> None:
        """Calls `waiter(None)` once `log` is forced up to `offset`, `waiter(error)` if it stops before.

        `start=False` leaves the start of the next force to `start`: whoever has several logs at hand names them all
        first, and one force serves them. Raises BeyondEnd.
        """
        if log.forced_offset >= offset:
            self._answer([(waiter, None)])
        elif log.stopped is not None:
            self._answer([(waiter, Stopped(log.stopped))])
        elif offset > log.end_offset:
            raise BeyondEnd(offset, log.end_offset)
        else:
            self._wants.setdefault(log, []).append((offset, waiter))
            self._dirty[log] = None
            if start:
                self.start()

    def dirty(self, log: Forceable) -> None:
        """The next force includes `log`; none is started for it."""
        self._dirty[log] = None

    def flush_all(self, waiter: Waiter) -> None:
        """Forces every log that was marked dirty or is being forced; then `waiter(None)`, or the first error."""
        logs = [*{plan.log: None for plan in self._flying} | self._dirty]
        left = len(logs) + 1
        failed: list[Exception] = []

        def arrived(error: Exception | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                failed.append(error)
            if not left:
                waiter(failed[0] if failed else None)

        for log in logs:
            self.want(log, log.end_offset, arrived, start=False)
        self.start()
        arrived(None)

    def start(self) -> None:
        """Starts a force, if there is something to force and none is in flight."""
        while self._dirty and not self._flying:
            logs, self._dirty = self._dirty, {}
            plans = [plan for log in logs if (plan := log.force_plan()) is not None]
            self._settle(set(logs) - {plan.log for plan in plans}, again=False)
            if plans:
                self._fly(plans)
        self._answer([])

    def close(self) -> None:
        """Gives the anchor back; nothing may be in flight or waiting."""
        anchor, self._anchor = self._anchor, None
        if anchor is not None:
            anchor.close()

    def _fly(self, plans: list[Plan]) -> None:
        self._flying = plans
        self.forces += 1
        alone = len(plans) == 1 and self._begin is not None
        if alone and self._ways.kernel_pays() and self._fly_alone(plans[0]):
            return
        began = self._clock.monotonic()

        def done(results: list[Exception | None] | None, error: BaseException | None) -> None:
            if alone:
                self._ways.worker.note(self._clock.monotonic() - began)
            self._done(plans, results, error)

        self._run(lambda: self._force(plans), done)

    def _fly_alone(self, plan: Plan) -> bool:
        """One file, without a worker; False where that cannot be."""
        began = self._clock.monotonic()

        def landed(error: Exception | None) -> None:
            self._ways.kernel.note(self._clock.monotonic() - began)
            if error is None:
                self._note_own(plan, began)
            self._done([plan], [error], None)

        return self._begin is not None and plan.begin(self._begin, landed)

    def _done(
        self, plans: list[Plan], results: list[Exception | None] | None, error: BaseException | None
    ) -> None:
        """The end of a force, in the owner's thread."""
        self._flying = []
        if results is None:
            # Not an error of the disk, but of this code or of the thread: what is on the disk is as unknown.
            results = [RuntimeError(f"the force did not run: {error!r}")] * len(plans)
        work = [plan.log.force_done(plan, result) for plan, result in zip(plans, results, strict=True)]
        self._settle({plan.log for plan in plans}, again=True)
        self.start()
        self._answer([])
        for job in filter(None, work):
            self._run(job, _raise)

    def _settle(self, logs: Iterable[Forceable], *, again: bool) -> None:
        """Notes the answers of those who waited for these logs and need wait no longer.

        `again`: the rest waits for the next force of the log; else there will be none.
        """
        for log in logs:
            waiting = self._wants.pop(log, [])
            rest = [want for want in waiting if want[0] > log.forced_offset]
            self._answers.extend((waiter, None) for offset, waiter in waiting if offset <= log.forced_offset)
            if rest and (log.stopped is not None or not again):
                # A log that has nothing to force and is not stopped was closed with a waiter left.
                error = Closed() if log.stopped is None else Stopped(log.stopped)
                self._answers.extend((waiter, error) for _, waiter in rest)
            elif rest:
                self._wants[log] = rest
                self._dirty[log] = None

    def _answer(self, answers: Sequence[tuple[Waiter, Exception | None]]) -> None:
        """Calls waiters in the order in which their waits ended, also if one of them causes more to end."""
        self._answers.extend(answers)
        if self._answering:
            return
        self._answering = True
        try:
            while self._answers:
                waiter, error = self._answers.popleft()
                waiter(error)
        finally:
            self._answering = False

    def _force(self, plans: list[Plan]) -> list[Exception | None]:
        """One result for each plan; in a worker, one at a time."""
        anchor = self._anchor
        if anchor is None or len(plans) == 1 or not self._joint_pays():
            return [self._own(plan) for plan in plans]
        began = self._clock.monotonic()
        try:
            self._disk.sync_file_system(anchor)
        except OSError:
            # It does not say whose bytes are gone, and will not say it again: from now on every log is suspect
            # until a force of its own has succeeded, also those that are not part of this round.
            self._failures += 1
        else:
            self.joint_forces += 1
            ended = self._clock.monotonic()
            self._speed.joint(ended - began, len(plans), ended)
        return [
            None if self._proven.get(plan.log, 0) == self._failures else self._own(plan) for plan in plans
        ]

    def _joint_pays(self) -> bool:
        return self._method == "syncfs" or self._speed.pays(self._clock.monotonic())

    def _own(self, plan: Plan) -> Exception | None:
        began = self._clock.monotonic()
        try:
            plan.force()
        except (OSError, JournalError) as error:
            return error
        self._note_own(plan, began)
        return None

    def _note_own(self, plan: Plan, began: float) -> None:
        """A force of the log's own file that began at `began` was good."""
        self._proven[plan.log] = self._failures
        self._speed.single(self._clock.monotonic() - began)


def _raise(_: Any, error: BaseException | None) -> None:
    """Work behind a force deals with the disk's errors itself; anything else is a fault of ours, and loud."""
    if error is not None:
        raise error


KEPT_OPEN: list[File] = []
"""Files with bytes whose force failed: closing one could swallow the error, so they stay open until the process
ends."""


class GatedFile(Protocol):
    """One of the log's files; a sealed one is forced, and only read. `end`: where its bytes end, as the log counts."""

    sealed: bool

    @property
    def file(self) -> File: ...

    @property
    def end(self) -> int: ...


Gated = TypeVar("Gated", bound=GatedFile)


class Gate:
    """The forces of one log's files: one at a time, and none behind one that failed.

    The system tells a failed force to one caller only: a second one beside it, or after it, would be told that all is
    well. So the error is kept, and every later force fails alike: nothing is retried. Any thread, but for `begin` and
    the end of what it began, which are the owner's.

    `pins` keep the files open while one is forced.
    """

    def __init__(self, pins: Pins) -> None:
        self.shut = False
        """True once the files are no longer the log's: they are not forced any more."""
        self._pins = pins
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._flight: Flight | None = None

    def force(self, file: GatedFile, how: Callable[[], None] | None = None) -> None:
        """Forces a file; a sealed one is forced already. `how` does it instead, with what must come before others may.

        Raises OSError.
        """
        with self._pins, self._lock:
            flight = self._flight
            if flight is not None:
                self._error = self._error or flight.wait()
            if self._error is not None:
                raise self._error
            if file.sealed or self.shut:
                return
            try:
                (how or file.file.force)()
            except OSError as error:
                self._error = error
                raise

    def begin(self, file: GatedFile, begin: Begin, landed: Landed) -> bool:
        """Starts a force of a file that needs no thread; `landed(error)` when it has ended.

        False: nothing was begun, `force` does it, or says why not.
        """
        if self._flight is not None or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._error is not None or file.sealed or self.shut:
                return False
            self._pins.pin()
            try:
                self._flight = begin(file.file, partial(self._landed, landed))
            finally:
                if self._flight is None:
                    self._pins.unpin()
            return self._flight is not None
        finally:
            self._lock.release()

    def _landed(self, landed: Landed, error: OSError | None) -> None:
        if error is not None:
            self._error = self._error or error
        self._flight = None  # last: a worker that does not wait for it any more must find the error
        self._pins.unpin()
        landed(error)

    def keep_unforced(self, files: Sequence[Gated], forced: int) -> list[Gated]:
        """Those of `files` with bytes that are not known to be forced: they must never be closed, and are kept open.

        `forced`: up to there the log is.
        """
        unforced = [file for file in files if not file.sealed and (file.end > forced or self._error)]
        KEPT_OPEN.extend(file.file for file in unforced)
        return unforced
