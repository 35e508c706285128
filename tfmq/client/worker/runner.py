"""Handler runner of a consumer: selection of messages and processing of results.

All methods are operations. Each worker, a thread or a task of a consumer API, repeats:
`HandlerRunner.next_job`, the handler call, `finish_call`. Returning acks. A failure is recorded in the
dead-letter store, and the handler is called again after a pause while its queue waits. After the last call
the message is a dead letter, and its offset may be committed. Without a store the error ends the run.
Committable is, per partition, the position before the lowest unacked message. Heartbeats and commits are
background tasks of the consumer, and so is the retry loop over due dead letters, which workers handle like
others.

Also here: signal handlers, and the connectivity monitor that logs an unreachable broker and limits the wait
for it.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, TypeVar

from tfmq.client.backoff import pause_seconds
from tfmq.client.connection.connection import Link
from tfmq.client.consumer.core import Consuming
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.positions import Ledger
from tfmq.client.operation import Flag, Operation, Wait
from tfmq.client.worker.dead_letter_store import DeadLetters, Failure, NotCalled
from tfmq.client.worker.listeners import Reject, RetryLater, log_failure
from tfmq.client.worker.ordered_queues import HandlerLanes, Job
from tfmq.errors import NOT_DONE, Closed, ConnectionFailed, DecodeFailed, Fenced, TfmqError

log = logging.getLogger("tfmq.consumer")

TELL_SECONDS: Final = 2.0
"""Interval of connectivity checks during a run."""
LOOK_AWAY_SECONDS: Final = 0.5
"""Interval of connectivity checks while a run is closing."""
AWAY_SECONDS: Final = 5.0
"""How long closing waits for an unreachable broker.

This is longer than a restart of the broker, and shorter than the 10 s and more that supervisors allow.
"""


class Away:
    """Measures how long there was no connection, by polling `link`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._since: float | None = None

    def long(self) -> bool:
        """Return whether the broker has been unreachable for `DISCONNECTED_SECONDS_MAX`."""
        if self._link.state == "ready":
            self._since = None
        elif self._since is None:
            self._since = self._link.now()
        return self._since is not None and self._link.now() >= self._since + AWAY_SECONDS

    def give_up(self, unsaved: bool) -> None:
        """End the run without the broker. Raises ConnectionFailed if acked offsets are `unsaved`."""
        if unsaved:
            raise ConnectionFailed(
                f"The broker was unreachable for the last {AWAY_SECONDS:g} s of the run: the last offsets could"
                f" not be saved, so their messages are handled again. {self._reason()}",
                outcome=NOT_DONE,
            )
        log.warning(
            "The broker is unreachable, so the group was not left; all offsets are saved. %s", self._reason()
        )

    def tell(self) -> Operation[None]:
        """Log when the broker becomes unreachable and when it is reachable again, for ever."""
        told = False
        while True:
            yield Wait((), TELL_SECONDS)
            if self._link.state == "ready" or not self._link.connections:
                if told:
                    log.info("The broker is reachable again.")
                told = False
            elif not told:
                log.warning(
                    "The broker is unreachable; the run continues when it is reachable again. %s",
                    self._reason(),
                )
                told = True

    def _reason(self) -> str:
        """Return the last connection error, or ""."""
        return str(self._link.last_error or "")


SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_CODE_BASE: Final = 128
"""Added to a signal's number in the exit code, as shells do."""


def at_once(number: int) -> BaseException:
    """Return the exception that ends the program on a second signal."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_CODE_BASE + number)


def tell(number: int) -> None:
    """Log what the first signal does."""
    log.info(
        "%s: messages in progress are finished first; a second signal ends at once.",
        signal.Signals(number).name,
    )


class Signals:
    """Context manager for SIGTERM and SIGINT: the first calls `stop`, the second raises.

    Only the main thread can install signal handlers; in other threads, and if `wanted` is False, this does
    nothing.
    """

    def __init__(self, stop: Callable[[], None], wanted: bool = True) -> None:
        self._stop = stop
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._told = False

    def __enter__(self) -> Signals:
        if self._wanted:
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        """Restore the former signal handlers."""
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _came(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._told:
            self._restore()
            raise at_once(number)
        self._told = True
        tell(number)
        self._stop()


Result = TypeVar("Result")

FAILING: Final = "failing"
"""State of a stored message whose handler is to be called again."""
CAREFUL: Final = 16
"""First messages of a partition whose calls are counted in the store before they start.

One of these may have crashed the process in a former run. Each costs two commits of the store.
"""
CAREFUL_SAVES_MAX: Final = 4096
"""Limit of the early offset commits, before the 16th, 32nd, 64th ... message of a partition.

A message that crashes the process again and again is thus among the first few after some restart, since each
restart at least halves the number of messages before it.
"""
OUT_BYTES: Final = 4 << 20
"""Maximum span from the lowest unacked message; beyond it a partition is not read further."""
FENCES_MAX: Final = 8
"""How often `Fenced` from a handler is treated as a lost partition.

The next heartbeats would report that, within half a minute. After that it is a failure like any other.
"""
LOOK_SECONDS: Final = 60.0
"""Maximum time between two checks of an idle worker."""


class RetryLoop(Protocol):
    """Loop over dead letters that are due."""

    stop_asked: Flag

    def run(self) -> Operation[None]: ...


class Running:
    """One run of handlers of one consumer.

    `chance` returns random numbers from 0 to 1, `wall_clock` seconds since 1970. `raise_flag` sets an event
    on which another thread waits. `tracebacks`: failed calls are logged with their tracebacks.
    """

    def __init__(
        self,
        core: Consuming,
        store: DeadLetters | None,
        *,
        order: str = "partition",
        tracebacks: bool = True,
        wall_clock: Callable[[], float],
        raise_flag: Callable[[Flag], None] = Flag.settle,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.failure: BaseException | None = None
        """What ended the run; None if it was `stop`."""
        self.retry_loop: RetryLoop | None = None
        self.store = store
        self._core = core
        self._lanes = HandlerLanes(order)
        self._tracebacks = tracebacks
        self._wall_clock = wall_clock
        self._raise_flag = raise_flag
        self._chance = chance
        self._news = Flag()
        self._retried = Flag()
        self._idle = 0
        core.positions.ledgers.stayed = self._wake

    # Start and shutdown

    def starting(self) -> Operation[None]:
        """Start the connectivity monitor and the retry loop."""
        yield from ()
        self._core.tasks.start(Away(self._core.link).tell(), self._fail)
        if self.retry_loop is not None:
            self._core.tasks.start(self._retry(self.retry_loop), self._fail)

    def failed(self, error: BaseException) -> Operation[None]:
        """End the run because of `error`: no call starts, calls in progress are finished."""
        yield from ()
        self._fail(error)

    def failed_late(self, error: Exception) -> Operation[None]:
        """Record an error of `close`, unless another one ended the run before."""
        yield from ()
        if self.failure is not None:
            log.warning("Closing after an error failed as well: %s", error)
        self._fail(error)

    def closing(self) -> Operation[None]:
        """Commit what is acked and leave the group.

        Bounded by the consumer's `timeout`, and a few seconds for an unreachable broker. Raises what
        prevented the commit.
        """
        core = self._core
        if core.closed:
            return
        core.stop()
        self._raise(core.stop_asked)
        closing, away = self._close(), Away(core.link)
        try:
            for wait in closing:
                unsaved = core.options.commits != "manual" and bool(core.positions.unsaved())
                if away.long() and (core.options.storage is None or not unsaved):
                    away.give_up(unsaved)
                    return
                yield wait._replace(seconds=min(LOOK_AWAY_SECONDS, wait.seconds or LOOK_AWAY_SECONDS))
        finally:
            closing.close()
            core.closed = True

    def _close(self) -> Operation[None]:
        """Wait for the retry loop, then close the consumer."""
        core = self._core
        until = core.link.now() + core.options.timeout
        if self.retry_loop is not None:
            self._raise(self.retry_loop.stop_asked)
            while not self._retried.done and core.link.now() < until:
                yield Wait((self._retried,), until - core.link.now())
        yield from core.close(processed=False)

    @property
    def ending(self) -> bool:
        """Whether no more calls start."""
        core = self._core  # in an event loop the event is set later than stop() is called
        return core.stop_asked.done or core.positions.stopped or core.closed

    def _fail(self, error: BaseException) -> None:
        """Record what ended the run, and stop the consumer."""
        if self.failure is None:
            self.failure = error
        self._core.stop()
        self._raise(self._core.stop_asked)

    def _raise(self, flag: Flag) -> None:
        """Set an event here and for threads that wait for it."""
        flag.settle()
        self._raise_flag(flag)

    # Next message

    def next_job(self) -> Operation[Job | None]:
        """Wait for the next message and return it for a handler call; None when the run ends.

        `finish_call` or `abandon` must follow. Raises the failure of a partition.
        """
        core = self._core
        while not self.ending:
            if core.membership is not None and core.handover.has_news:
                yield from core.handover.tell()
            job = self._lanes.next_letter() if core.silent else self._lanes.next(core.link.now())
            if job is not None:
                if self._idle and self._lanes.has_ready:
                    self._wake()
                if (yield from self._begins(job)):
                    return job
            elif not self._fill():
                yield from self._rest()
        return None

    def _fill(self) -> bool:
        """Move a decoded batch into the queues. Return False if there is none."""
        core, ledgers = self._core, self._core.positions.ledgers
        core.held = {each.name for each in ledgers if each.span >= OUT_BYTES}
        if not core.look():
            return False
        ready = core.positions.ready
        messages = [] if ready is None else list(ready.messages)
        ledger = core.positions.take()
        if ledger is not None:
            first = ledger.met - len(messages)
            for number, message in enumerate(messages, first):
                job = Job(message, ledger, careful=number < CAREFUL)
                job.saves_first = CAREFUL <= number <= CAREFUL_SAVES_MAX and not number & (number - 1)
                self._lanes.add(job)
        core.messages += len(messages)
        return True

    def _rest(self) -> Operation[None]:
        """Wait until there may be work, at most `IDLE_CHECK_SECONDS`."""
        core = self._core
        if self._news.done:
            self._news = Flag()
        self._idle += 1
        try:
            seconds = min(LOOK_SECONDS, self._lanes.next_time() - core.link.now())
            yield core.news(max(0.0, seconds), self._news)
        finally:
            self._idle -= 1

    def _wake(self) -> None:
        """Wake idle workers."""
        if self._idle:
            self._raise(self._news)

    def _begins(self, job: Job) -> Operation[bool]:
        """Prepare a handler call. Return False if the message is not to be handled.

        What must be committed or counted before the call is, when this returns.
        """
        job.started = job.working = True
        if job.ledger is None:
            return True
        job.ledger.in_work += 1
        begins = False
        try:
            begins = yield from self._counted(job, job.ledger)
        except BaseException:
            self._put_down(job)
            raise
        if not begins:
            self._over(job)
        return begins

    def _counted(self, job: Job, ledger: Ledger) -> Operation[bool]:
        """Commit the offset or count the call first where that is necessary.

        Return False to skip the call.
        """
        core, store, message = self._core, self.store, job.message
        if core.options.commits == "before":
            ledger.finish(message)
            refused = yield from self._sure(core.save, "A message waits to be handled")
            if ledger.name in refused or ledger.void:
                return False
        if store is not None and job.saves_first and core.options.commits == "auto":
            job.saves_first = False
            yield from self._save_early()
            if ledger.void:
                return False
        if store is not None and job.careful and not job.begun:
            state = yield from self._sure(lambda: store.begin(message), "A message waits to be handled")
            job.begun = True
            return state == FAILING and not ledger.void
        return True

    # Result of a call

    def settle(self, job: Job, error: Exception | None) -> Operation[None]:
        """Process the end of a handler call, which raised `error` or returned.

        Raises what ends the run.
        """
        try:
            pause = yield from self._outcome(job, error)
        except BaseException:
            self._put_down(job)
            raise
        if pause is None:
            self._over(job)
        else:
            self._put_down(job)
            self._lanes.again(job, self._core.link.now() + pause)
            self._wake()

    def abandon(self, job: Job) -> Operation[None]:
        """Process an interrupted handler call: the message is not acked."""
        yield from ()
        self._put_down(job)

    def _outcome(self, job: Job, error: Exception | None) -> Operation[float | None]:
        """Record the result of a call.

        Return the pause before the next call, or None if there is none.
        """
        store, message = self.store, job.message
        if job.ledger is None:
            job.error = error
            if error is not None:
                self._log(job, error, ", as a dead letter that is handled again")
            return None
        if job.ledger.void:
            if error is not None and not isinstance(error, Fenced):
                self._log(job, error, "; its partition belongs to another member by now, which handles it")
            return None
        if error is None:
            if store is not None and (job.noted or job.begun):
                yield from self._sure(lambda: store.passed(message))
            return None
        if isinstance(error, Fenced) and job.fences < FENCES_MAX:
            job.fences += 1
            return pause_seconds(job.fences, self._chance())
        job.failures += 1
        if store is None:
            return self._without_store(job, error)
        return (yield from self._with_store(store, job, error))

    def _without_store(self, job: Job, error: Exception) -> float:
        """Return the pause before the next call without a store. Raises `error` after the last call."""
        final = isinstance(error, Reject | RetryLater | DecodeFailed) or self._once
        if final or job.failures > self._core.options.retries:
            self._fail(error)  # also an error like `Closed`, which a worker would take for the end of the run
            raise error
        return self._paused(job, error)

    def _with_store(self, store: DeadLetters, job: Job, error: Exception) -> Operation[float | None]:
        """Record a failure in the store.

        Return the pause before the next call, or None if it was the last.
        """
        message = job.message
        failure = Failure.of(error, round(self._wall_clock() * 1000))
        begun, job.begun = job.begun, False
        if isinstance(error, RetryLater):
            later = error.seconds
            self._log(job, error)
            yield from self._sure(lambda: store.keep(message, [failure], begun=begun, retry_after=later))
        elif isinstance(error, Reject | DecodeFailed) or self._once:
            self._log(job, error)
            yield from self._sure(lambda: store.keep(message, [failure], begun=begun))
        else:
            job.noted = True

            def noted(state: str) -> None:
                if state != FAILING:
                    self._log(job, error)

            state = yield from self._sure(lambda: store.note(message, failure, begun=begun, noted=noted))
            if state == FAILING:
                return self._paused(job, error)
        return None

    @property
    def _once(self) -> bool:
        """Whether messages are handled at most once: offsets are committed before the call."""
        return self._core.options.commits == "before"

    def _paused(self, job: Job, error: Exception) -> float:
        """Log the failure, and return the pause before the next call."""
        pause = pause_seconds(job.failures, self._chance())
        self._log(job, error, f"; it is called again in {pause:.1f} s")
        return pause

    def _log(self, job: Job, error: Exception, then: str = "") -> None:
        """Log a failed call."""
        log_failure(job.message, error, then, tracebacks=self._tracebacks)

    def _over(self, job: Job) -> None:
        """Ack a message, so that its offset may be committed, and continue its queue."""
        ledger = job.ledger
        if ledger is not None and not ledger.void:
            ledger.finish(job.message)
        self._put_down(job)
        self._lanes.done(job)
        if self._idle and (self._lanes.has_ready or self._core.held):
            self._wake()

    def _put_down(self, job: Job) -> None:
        """Mark a message as not in progress. A second call does nothing."""
        if job.working:
            job.working = False
            if job.ledger is not None:
                self._core.positions.ledgers.rested(job.ledger)
        job.ended.settle()

    def _save_early(self) -> Operation[None]:
        """Commit acked offsets early.

        A failure is ignored, because the next periodic commit repeats it.
        """
        try:
            yield from self._core.save()
        except Closed:
            raise
        except TfmqError as error:
            log.debug("Offsets were not saved early: %s", error)

    def _sure(
        self, make: Callable[[], Operation[Result]], waits: str = "A handled message waits"
    ) -> Operation[Result]:
        """Repeat the store operation `make()` while it fails with retriable errors, with a log line.

        Raises other errors, and retriable ones when the run is stopping.
        """
        tries = 0
        while True:
            try:
                return (yield from make())
            except TfmqError as error:
                if not error.retriable or self.ending:
                    raise
                tries += 1
                pause = pause_seconds(tries, self._chance())
                log.error("%s, and its store is tried again in %.1f s: %s", waits, pause, error)
            yield Wait((self._core.stop_asked,), pause)

    # Due dead letters

    def again(self, message: ReceivedMessage[Any]) -> Operation[None]:
        """Have a worker call the handler with a dead letter, and wait for the result.

        Raises what the handler raises, and HandlerNotCalled if the run ends before the call.
        """
        job = Job(message)
        self._lanes.add(job)
        self._wake()
        try:
            while not job.ended.done:
                if self.ending and not job.started:
                    raise NotCalled
                stop = () if self.ending else (self._core.stop_asked,)
                yield Wait((job.ended, *stop))
        finally:
            job.cancelled = True
        if job.error is not None:
            raise job.error

    def _retry(self, loop: RetryLoop) -> Operation[None]:
        """Run the retry loop, and set an event at its end."""
        try:
            yield from loop.run()
        finally:
            self._raise(self._retried)
